"""Which tokens a router remembers: those of popular prefixes, nothing of the questions, and no more than it may."""

from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import blockkeys, messages
from prefixbus.bus.messages import VERSION, Job, Route
from prefixbus.bus.namespace import Namespace
from prefixbus.router.prefixes import KEPT_S, Prefix, Prefixes

BLOCK = 16
NAMESPACE = Namespace("acme", "", "m", "sha256:m", "sha256:t", "v1", "", "", "", "", "bfloat16", BLOCK, bytes(16))
MUCH = 1 << 20


def route(
    document: int, question: int = 0, *, blocks: int = 4, namespace: Namespace = NAMESPACE, ns_id: bytes = bytes(16)
) -> Route:
    """A prompt of so many blocks of a document, and a question after them."""
    tokens = array("I", [document] * BLOCK * blocks + [question] * 20).tobytes()
    job = Job(VERSION, "r", "c", "_INBOX.acme.x", namespace, tokens, "chat", b'{"user": "secret"}', False, 1, 2.0)
    return Route(
        v=VERSION,
        request_id="r",
        client_request_id="c",
        tenant=namespace.tenant,
        model="m",
        serves="s",
        ns_id=ns_id,
        keys=blockkeys.chain(tokens, BLOCK, int.from_bytes(ns_id[:8], "little")),
        prompt_tokens=len(tokens) // 4,
        output_tokens=1,
        prefix_class="document",
        reply="_INBOX.acme.x",
        deadline_at=2.0,
        job=messages.JOB.encode(job),
    )


def key_of(one: Route, blocks: int = 4) -> int:
    return int.from_bytes(one.keys[8 * blocks - 8 : 8 * blocks], "little")


def find(prefixes: Prefixes, one: Route, *, ours: bool = True, now: float = 0.0, blocks: int = 4) -> Prefix | None:
    return prefixes.find(one.ns_id, key_of(one, blocks), ours=ours, now=now)


def twice(prefixes: Prefixes, document: int, now: float = 0.0, **how: object) -> Route:
    for question in (1, 2):
        one = route(document, question, **how)  # type: ignore[arg-type]  # as the keywords of route
        prefixes.dispatched(one, 4, BLOCK, now)
    return one


def test_a_prefix_is_kept_from_its_second_sight_on_without_what_follows_it() -> None:
    prefixes = Prefixes(MUCH, MUCH)

    prefixes.dispatched(route(1, 1), 4, BLOCK, 0.0)
    once = find(prefixes, route(1))
    prefixes.dispatched(route(1, 2), 4, BLOCK, 0.0)
    kept = find(prefixes, route(1))

    assert once is None
    assert kept is not None and kept.blocks == 4
    assert kept.tokens == array("I", [1] * BLOCK * 4).tobytes()
    assert kept.keys == route(1).keys[:32]
    assert b"secret" not in msgspec.msgpack.encode(kept)


def test_what_nobody_holds_is_no_prefix_of_several() -> None:
    prefixes = Prefixes(MUCH, MUCH)

    for _ in range(3):
        prefixes.dispatched(route(1), 0, BLOCK, 0.0)

    assert len(prefixes) == 0


def test_what_another_router_sent_last_is_not_ours_until_we_send_it_again() -> None:
    prefixes = Prefixes(MUCH, MUCH)
    one = twice(prefixes, 1)

    prefixes.others(one.ns_id, one.keys, 4)
    after_them = find(prefixes, one), find(prefixes, one, ours=False)
    prefixes.dispatched(route(1, 3), 4, BLOCK, 0.0)

    assert after_them[0] is None and after_them[1] is not None
    assert find(prefixes, one) is not None


def test_what_others_sent_counts_as_seen() -> None:
    prefixes = Prefixes(MUCH, MUCH)
    one = route(1)

    prefixes.others(one.ns_id, one.keys, 4)
    prefixes.dispatched(one, 4, BLOCK, 0.0)

    assert find(prefixes, one) is not None


def test_it_is_dropped_with_age() -> None:
    prefixes = Prefixes(MUCH, MUCH)
    one = twice(prefixes, 1)

    assert find(prefixes, one, now=KEPT_S + 1) is None
    prefixes.expire(KEPT_S + 1)

    assert (len(prefixes), prefixes.held_bytes) == (0, 0)


def test_a_namespace_that_is_not_served_any_more_is_forgotten() -> None:
    prefixes = Prefixes(MUCH, MUCH)
    old, other = twice(prefixes, 1), twice(prefixes, 1, ns_id=b"other namespace!", namespace=_scope("b"))

    prefixes.forget_namespace(old.ns_id)

    assert find(prefixes, old) is None
    assert find(prefixes, other) is not None


def test_a_new_epoch_or_revision_in_a_namespaces_place_ends_the_old_one() -> None:
    prefixes = Prefixes(MUCH, MUCH)
    old, narrowed = twice(prefixes, 1), twice(prefixes, 1, ns_id=b"narrowed by salt", namespace=_salted("x"))

    renewed = msgspec.structs.replace(NAMESPACE, acl_epoch=b"e" * 16)
    new = twice(prefixes, 1, ns_id=b"the next epoch's", namespace=renewed)

    assert find(prefixes, old) is None
    assert find(prefixes, new) is not None and find(prefixes, narrowed) is not None


def test_one_tenants_flood_costs_no_other_tenant_its_prefixes() -> None:
    prefixes = Prefixes(bytes_max=20_000, bytes_per_tenant=10_000)
    quiet = twice(prefixes, 1, namespace=_tenant("quiet"), ns_id=b"quiet tenant's--")

    for document in range(2, 200):
        twice(prefixes, document)

    assert find(prefixes, quiet) is not None
    assert prefixes.held_bytes <= 20_000


def test_with_no_bytes_nothing_is_remembered() -> None:
    prefixes = Prefixes(0, MUCH)

    twice(prefixes, 1)

    assert len(prefixes) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 3),
            st.integers(0, 6),
            st.sampled_from(["ours", "theirs", "forget", "age"]),
        ),
        max_size=60,
    )
)
def test_however_it_is_used_its_books_balance_and_its_bounds_hold(steps: list[tuple[int, int, int, str]]) -> None:
    prefixes = Prefixes(bytes_max=5000, bytes_per_tenant=3000)
    now = 0.0
    for document, tenant, blocks, what in steps:
        one = route(document, namespace=_tenant(f"t{tenant}"), ns_id=bytes([tenant]) * 16)
        if what == "ours":
            prefixes.dispatched(one, blocks, BLOCK, now)
        elif what == "theirs":
            prefixes.others(one.ns_id, one.keys, blocks)
        elif what == "forget":
            prefixes.forget_namespace(one.ns_id)
        else:
            now += 200.0
            prefixes.expire(now)
        assert 0 <= prefixes.held_bytes <= 5000
    prefixes.expire(now + KEPT_S + 1)

    assert (len(prefixes), prefixes.held_bytes) == (0, 0)


def _scope(scope: str) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, scope=scope)


def _salted(salt: str) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, client_salt=salt)


def _tenant(tenant: str) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, tenant=tenant)
