"""Who is considered, where a fresh prefix belongs, and the record of it all."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.messages import DECISION, Holdings, Level, Load, Route
from prefixbus.router import journal
from prefixbus.router.cost import PROFILES
from prefixbus.router.fleet import Available, Fleet
from prefixbus.router.home import home
from prefixbus.router.policy import SCHEMES, Policy, decide
from prefixbus.router.shortlist import MAX_LEVELS, Shortlist, shortlist
from prefixbus.router.traffic import MAX_BLOCKS, MAX_NAMESPACES, QUORUM, WINDOW, Traffic

NS = bytes(16)
BLOCK = 16
H100 = PROFILES["h100-8b"]


def chain(*blocks: int) -> bytes:
    """Keys of blocks; as in life, a key stands for all blocks before it, too."""
    keys, parent = [], 0
    for block in blocks:
        parent = hash((parent, block)) & (2**64 - 1)
        keys.append(parent)
    return struct.pack(f"<{len(keys)}Q", *keys)


def route(keys: bytes, prompt_tokens: int | None = None) -> Route:
    return Route(
        v=1,
        request_id="R1",
        client_request_id="c1",
        tenant="acme",
        model="m",
        serves="digest",
        ns_id=NS,
        keys=keys,
        prompt_tokens=len(keys) // 8 * BLOCK + 5 if prompt_tokens is None else prompt_tokens,
        output_tokens=100,
        prefix_class="session",
        reply="_INBOX.acme.1",
        deadline_at=1e9,
        job=b"",
    )


def fleet(count: int, queues: dict[str, float] | None = None) -> list[Available]:
    books = Fleet(0.6, 3.0)
    for number in range(count):
        name = f"w{number:03d}"
        values: dict[str, Any] = {
            "v": 1,
            "worker": name,
            "incarnation": 1,
            "report": 1,
            "event_seq": 0,
            "model": "m",
            "serves": "digest",
            "queue_ms": (queues or {}).get(name, 0.0),
            "running": 0,
            "waiting": 0,
            "slots": 8,
            "kv_usage": 0.1,
            "kv_tokens": 100_000,
            "block_size": BLOCK,
            "draining": False,
            "accepted": [],
        }
        books.heard(Load(**values), 0.0)
    return books.survey("m", "digest", 0.0).available


def holdings(*levels: tuple[int, list[str]], suspect: list[str] | None = None) -> Holdings:
    made = [Level(depth, workers) for depth, workers in levels]
    return Holdings(1, made, suspect or [])


def shortlisted(
    keys: bytes, workers: list[Available], held: Holdings | None, *, shared: int = 0, **more: Any
) -> Shortlist:
    asked = route(keys, more.pop("prompt_tokens", None))
    return shortlist(asked, workers, held, shared, H100, Policy(), 0.0, **more)


# --- which candidates


def test_holders_the_least_loaded_and_the_home_are_considered() -> None:
    workers = fleet(64, {f"w{n:03d}": 100.0 for n in range(60)})

    found = shortlisted(chain(1, 2, 3), workers, holdings((2, ["w000", "w001"])), shared=2)

    names = {one.worker for one in found.candidates}
    assert {"w000", "w001", "w060", "w061", "w062", "w063", found.shape.home} == names


def test_of_a_depth_that_all_hold_only_the_least_loaded_are_considered() -> None:
    names = [f"w{n:03d}" for n in range(256)]

    found = shortlisted(chain(1, 2), fleet(256), holdings((2, names)))

    assert [one.worker for one in found.candidates] == names[:4]
    assert all(one.cached_tokens == 2 * BLOCK for one in found.candidates)


def test_when_each_worker_has_its_own_depth_the_deepest_are_considered() -> None:
    held = holdings(*((depth, [f"w{depth:03d}"]) for depth in range(63, 0, -1)))

    found = shortlisted(chain(*range(64)), fleet(64), held)

    assert len(found.candidates) <= MAX_LEVELS + 4
    assert max(one.cached_tokens for one in found.candidates) == 63 * BLOCK


def test_round_robin_sees_the_whole_fleet() -> None:
    found = shortlisted(chain(1, 2), fleet(20), holdings((1, ["w019"])), whole_fleet=True)

    assert [one.cached_tokens for one in found.candidates] == [0] * 19 + [BLOCK]


@pytest.mark.parametrize(
    ("prompt_tokens", "usable"),
    [
        pytest.param(3 * BLOCK, 2 * BLOCK, id="exactly three blocks: one token must be computed"),
        pytest.param(3 * BLOCK + 1, 3 * BLOCK, id="one token over"),
        pytest.param(BLOCK, 0, id="one block"),
    ],
)
def test_predicted_tokens_never_exceed_what_an_engine_can_serve(prompt_tokens: int, usable: int) -> None:
    keys = chain(*range(prompt_tokens // BLOCK))

    found = shortlisted(keys, fleet(1), holdings((len(keys) // 8, ["w000"])), prompt_tokens=prompt_tokens)

    assert found.candidates[0].cached_tokens == usable


def test_a_doubted_worker_is_believed_in_part() -> None:
    found = shortlisted(chain(*range(10)), fleet(1), holdings((10, ["w000"]), suspect=["w000"]))

    assert found.candidates[0].cached_tokens == 5 * BLOCK


def test_holders_that_may_not_be_given_work_do_not_count() -> None:
    found = shortlisted(chain(1, 2), fleet(2), holdings((2, ["elsewhere"])))

    assert found.held_blocks == 0
    assert found.shape.home


def test_without_the_directory_load_alone_decides() -> None:
    found = shortlisted(chain(1, 2), fleet(3), None)

    assert found.shape.blind
    assert found.shape.home == ""
    assert decide(found.shape, found.candidates, Policy(), 0.0).name == "blind"


@pytest.mark.parametrize(
    ("held", "shared", "fresh"),
    [
        pytest.param([], 0, True, id="nobody holds anything"),
        pytest.param([(2, ["w000"])], 2, True, id="only what most traffic shares is held"),
        pytest.param([(3, ["w000"])], 2, False, id="the distinguishing block is held"),
        pytest.param([(2, ["w000"])], 0, False, id="some of it is held, and it is not common"),
        pytest.param([], 4, False, id="there is no distinguishing block"),
    ],
)
def test_a_prefix_is_fresh_while_nobody_holds_its_distinguishing_block(
    held: list[tuple[int, list[str]]], shared: int, fresh: bool
) -> None:
    found = shortlisted(chain(1, 2, 3, 4), fleet(3), holdings(*held), shared=shared)

    assert bool(found.shape.home) == fresh


def test_a_prompt_shorter_than_a_block_has_no_home() -> None:
    found = shortlisted(b"", fleet(3), holdings(), prompt_tokens=3)

    assert found.shape.home == ""


def test_sessions_under_one_system_prompt_spread_over_the_fleet() -> None:
    """The prompt is held by one worker alone; without looking past it, all sessions would go there."""
    traffic, workers, chosen = Traffic(), fleet(8), []
    for session in range(200):
        keys = chain(*range(20), 1000 + session, 2000 + session)
        shared = traffic.shared_blocks(NS, keys)
        found = shortlisted(keys, workers, holdings((20, ["w000"])), shared=shared)
        chosen.append(decide(found.shape, found.candidates, Policy(), 0.0).worker)
        traffic.note(NS, keys)

    assert max(chosen.count(worker) for worker in set(chosen)) <= 2 * 200 / 8


# --- traffic


def test_what_a_quorum_of_requests_starts_with_is_shared() -> None:
    traffic = Traffic()
    for n in range(QUORUM):
        traffic.note(NS, chain(1, 2, 3, 100 + n))

    assert traffic.shared_blocks(NS, chain(1, 2, 3, 9, 9)) == 3
    assert traffic.shared_blocks(NS, chain(1, 5)) == 1
    assert traffic.shared_blocks(NS, chain(7)) == 0
    assert traffic.shared_blocks(bytes(15) + b"1", chain(1, 2, 3)) == 0
    assert traffic.shared_blocks(NS, b"") == 0


def test_a_session_of_its_own_is_not_shared() -> None:
    traffic = Traffic()
    for n in range(QUORUM - 1):
        traffic.note(NS, chain(*range(n + 2)))

    assert traffic.shared_blocks(NS, chain(*range(9))) == 0


def test_traffic_is_remembered_within_bounds() -> None:
    traffic = Traffic()
    for n in range(MAX_NAMESPACES + 10):
        traffic.note(n.to_bytes(16, "little"), chain(*range(MAX_BLOCKS + 50)))

    assert repr(traffic) == f"<Traffic namespaces={MAX_NAMESPACES}>"
    newest = traffic._recent[(MAX_NAMESPACES + 9).to_bytes(16, "little")]
    assert len(newest[0]) == 8 * MAX_BLOCKS


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=WINDOW), st.lists(st.integers(0, 2), max_size=8))
def test_shared_blocks_are_what_counting_gives(recent: list[list[int]], asked: list[int]) -> None:
    traffic = Traffic()
    for blocks in recent:
        traffic.note(NS, chain(*blocks))

    counted = [
        depth for depth in range(1, len(asked) + 1) if sum(one[:depth] == asked[:depth] for one in recent) >= QUORUM
    ]

    assert traffic.shared_blocks(NS, chain(*asked)) == max(counted, default=0)


# --- homes


@given(st.integers(0, 2**64 - 1), st.permutations([f"w{n}" for n in range(6)]))
def test_a_home_depends_on_the_key_and_not_on_the_order_of_workers(key: int, names: list[str]) -> None:
    assert home(key, [(name, 1) for name in names]) == home(key, [(name, 1) for name in sorted(names)])


@given(st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_worker_that_leaves_moves_only_its_own_prefixes(key: int, leaver: int) -> None:
    workers = [(f"w{n}", 1000) for n in range(6)]
    before = home(key, workers)

    after = home(key, workers[:leaver] + workers[leaver + 1 :])

    assert after == before or before == f"w{leaver}"


def test_a_larger_cache_is_home_to_more() -> None:
    homes = [home(hash((n, "key")) & (2**64 - 1), [("small", 1000), ("large", 3000)]) for n in range(2000)]

    assert 0.70 < homes.count("large") / len(homes) < 0.80


def test_nobody_is_home_to_anything_in_an_empty_fleet() -> None:
    assert home(1, []) == ""


# --- the journal


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(
    queues=st.lists(st.floats(0, 1e4), min_size=1, max_size=6),
    depths=st.lists(st.integers(1, 8), max_size=6),
    shared=st.integers(0, 8),
    ordinal=st.integers(0, 99),
)
def test_a_recorded_decision_replays_bit_for_bit(
    name: str, queues: list[float], depths: list[int], shared: int, ordinal: int
) -> None:
    workers = fleet(len(queues), {f"w{n:03d}": queue for n, queue in enumerate(queues)})
    by_depth: dict[int, list[str]] = {}
    for n, depth in enumerate(depths[: len(queues)]):
        by_depth.setdefault(depth, []).append(f"w{n:03d}")
    held = holdings(*sorted(by_depth.items(), reverse=True))
    found = shortlisted(
        chain(*range(8)), workers, held, shared=shared, whole_fleet=SCHEMES[name].whole_fleet, ordinal=ordinal
    )
    policy = Policy(name=name, version="v7", margin_ms=12.5)
    decision = decide(found.shape, found.candidates, policy, 1_700_000_000.25)

    record = journal.build(
        route(chain(*range(8))),
        decision,
        found,
        policy,
        attempt=1,
        router="router-1",
        excluded={"w9": "lost"},
        key=b"k" * 32,
        code_version="0.1.0",
    )
    replayed = decide(*journal.inputs(DECISION.decode(DECISION.encode(record))))

    assert replayed == decision


def test_a_record_is_readable_and_holds_no_keys() -> None:
    keys = chain(1, 2, 3)
    found = shortlisted(keys, fleet(2), holdings((2, ["w000"])))
    decision = decide(found.shape, found.candidates, Policy(), 5.0)

    record = journal.build(
        route(keys),
        decision,
        found,
        Policy(),
        attempt=2,
        router="router-1",
        excluded={},
        key=b"k" * 32,
        code_version="0.1.0",
    )
    read = msgspec.json.decode(DECISION.encode(record))

    assert read["selected_worker"] == "w000"
    assert read["decision"] == "prefer-warm-worker"
    assert read["predicted_cached_tokens"] == 2 * BLOCK
    assert read["policy"] == "prefix-aware/default"
    assert keys[8:16].hex() not in str(read)


def test_prefix_keys_agree_for_one_prefix_and_namespace_and_key_alone() -> None:
    one, other = chain(1, 2, 3), chain(1, 2, 4)

    named = journal.prefix_key(b"k", NS, one, 2)

    assert len(named) == 16
    assert journal.prefix_key(b"k", NS, other, 2) == named
    assert journal.prefix_key(b"k", NS, one, 0) != journal.prefix_key(b"k", NS, other, 0)
    assert journal.prefix_key(b"k", b"n" * 16, one, 2) != named
    assert journal.prefix_key(b"x", NS, one, 2) != named
    assert journal.prefix_key(b"k", NS, b"", 0) == ""
