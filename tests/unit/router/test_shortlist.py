"""Who is considered, where a fresh prefix belongs, and the record of it all."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.home import home
from prefixbus.bus.messages import DECISION, DecisionRecord, Holdings, Level, Load, Outcome, Route
from prefixbus.router import journal
from prefixbus.router.cost import PROFILES
from prefixbus.router.fleet import Available, Fleet, Surroundings, WorkerClass
from prefixbus.router.learning import Learner
from prefixbus.router.policy import SCHEMES, Decision, Policy, Pull, decide
from prefixbus.router.shortlist import MAX_HOLDERS, Shortlist, shortlist
from prefixbus.router.traffic import MAX_BLOCKS, MAX_NAMESPACES, QUORUM, WINDOW, Traffic
from prefixbus.router.transfer import Links

NS = bytes(16)
BLOCK = 16
H100 = PROFILES["h100-8b"]


def outcome(ttft_ms: float, worker: str) -> Outcome:
    """8,000 tokens were computed there, and nothing waited."""
    values: dict[str, Any] = {
        "v": 1,
        "request_id": "R1",
        "client_request_id": "c1",
        "attempt": 1,
        "worker": worker,
        "incarnation": 1,
        "tenant": "acme",
        "model": "m",
        "ns_id": "",
        "status": "ok",
        "error": "",
        "prefix_class": "session",
        "decision": "balanced-cold",
        "prompt_tokens": 8_000,
        "predicted_tokens": 0,
        "cached_tokens": 0,
        "prefill_tokens": 8_000,
        "output_tokens": 1,
        "queue_wait_ms": 0.0,
        "ttft_ms": ttft_ms,
        "total_ms": ttft_ms,
        "ended_at": 0.0,
    }
    return Outcome(**values)


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


def fleet(count: int, queues: dict[str, float] | None = None, **changed: Any) -> list[Available]:
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
        books.heard(Load(**(values | changed)), 0.0)
    return books.survey("m", "digest", 0.0).available


def holdings(
    *levels: tuple[int, list[str]],
    suspect: list[str] | None = None,
    trust: dict[str, float] | None = None,
    host: list[tuple[int, list[str]]] | None = None,
    **more: Any,
) -> Holdings:
    made = [Level(depth, workers) for depth, workers in levels]
    made += [Level(depth, workers, "host") for depth, workers in host or []]
    return Holdings(1, made, suspect or [], trust or {}, **more)


def shortlisted(
    keys: bytes, workers: list[Available], held: Holdings | None, *, shared: int = 0, **more: Any
) -> Shortlist:
    asked = route(keys, more.pop("prompt_tokens", None))
    learner = more.pop("learner", None) or Learner({"m": H100})
    return shortlist(asked, workers, held, shared, learner, Policy(), 0.0, **more)


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

    assert len(found.candidates) <= MAX_HOLDERS + 4
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


@pytest.mark.parametrize(
    ("said", "doubted", "believed"),
    [
        pytest.param({"w000": 0.8}, [], 8, id="eight of ten came true"),
        pytest.param({"w000": 0.78}, [], 7, id="whole blocks"),
        pytest.param({"w000": 0.8}, ["w000"], 5, id="doubted for two reasons: the stronger one counts"),
        pytest.param({"w000": 0.2}, ["w000"], 2, id="the other way round"),
        pytest.param({"w000": 0.0}, [], 0, id="nothing came true"),
        pytest.param({"w000": 3.0}, [], 10, id="more than all is all"),
        pytest.param({"w000": float("nan")}, [], 0, id="not a number"),
        pytest.param({"w999": 0.1}, [], 10, id="somebody else"),
    ],
)
def test_what_a_worker_is_said_to_hold_is_believed_as_far_as_it_came_true(
    said: dict[str, float], doubted: list[str], believed: int
) -> None:
    held = holdings((10, ["w000"]), suspect=doubted, trust=said, announced={"w000": 3})

    found = shortlisted(chain(*range(10)), fleet(1), held).candidates[0]

    assert found.cached_tokens == believed * BLOCK
    assert (found.held_blocks, found.announced_blocks) == (10, 3)


def test_what_is_in_a_host_store_is_no_hit() -> None:
    found = shortlisted(chain(1, 2, 3), fleet(2), holdings((1, ["w000"]), host=[(3, ["w000", "w001"])]))

    assert [one.cached_tokens for one in found.candidates] == [BLOCK, 0]
    assert (found.held_blocks, found.candidates[0].pull) == (1, None)


def test_a_class_is_priced_by_one_model_and_a_worker_by_its_speed() -> None:
    learner = Learner({"m": H100})
    slow = [outcome(200.0 if number % 4 else 500.0, worker=f"w{number % 4:03d}") for number in range(400)]
    around = Surroundings(WorkerClass("m", "digest", "h100"), 0, 0.0)
    for one in slow:
        learner.hear(one, around, 0.0)

    found = shortlisted(chain(1), fleet(4, worker_class="h100"), holdings(), learner=learner)

    assert {id(one.model) for one in found.candidates} == {id(learner.model_of(around.worker_class))}
    assert {one.worker_class for one in found.candidates} == {"h100"}
    assert {one.worker for one in found.candidates if one.speed > 2} == {"w000"}
    assert [one.speed for one in found.candidates].count(1.0) == 3


def test_a_worker_whose_free_slots_are_reserved_is_said_to_be_one() -> None:
    kept = shortlisted(chain(1), fleet(1, slots=8, running=6, reserved_slots=2), holdings())
    free = shortlisted(chain(1), fleet(1, slots=8, running=5, reserved_slots=2), holdings())

    assert [kept.candidates[0].only_reserved, free.candidates[0].only_reserved] == [True, False]


def test_a_warm_request_finds_a_free_slot_behind_many_reserved_ones() -> None:
    """Twelve idle workers have only slots for cold requests left; the ninth least loaded has one for this."""
    books = Fleet(0.6, 3.0)
    for n, one in enumerate(fleet(13, {"w012": 50.0})):
        books.heard(msgspec.structs.replace(one.worker.load, reserved_slots=0 if n == 12 else 8), 0.0)
    workers = books.survey("m", "digest", 0.0).available
    everybody = [one.name for one in workers]

    held = shortlisted(chain(*range(9)), workers, holdings((9, everybody)))
    cold = shortlisted(chain(*range(9)), workers, holdings())

    assert decide(held.shape, held.candidates, Policy(), 0.0).worker == "w012"
    assert decide(cold.shape, cold.candidates, Policy(), 0.0).name == "cold-reserve"


# --- what could be pulled


def test_each_candidate_is_offered_the_most_that_another_could_give_it() -> None:
    links = Links(131_072)
    for _ in range(20):
        links.learn("w001", "w002", 2**30, 400.0)
    held = holdings((8, ["w000", "w001"]), (5, ["w002"]), host=[(6, ["w003"])])

    found = shortlisted(chain(*range(9)), fleet(4), held, links=links)

    offers = {one.worker: one.pull for one in found.candidates}
    assert offers["w000"] is offers["w001"] is None
    assert offers["w002"] == Pull("w000", 3 * BLOCK, links.transfer_ms("w000", "w002", 3 * BLOCK))
    assert offers["w003"] == Pull("w000", 8 * BLOCK, links.transfer_ms("w000", "w003", 8 * BLOCK))


def test_a_host_store_is_pulled_from_but_not_by_its_own_worker() -> None:
    found = shortlisted(chain(*range(9)), fleet(2), holdings(host=[(6, ["w000"])]), links=Links(131_072))

    offers = {one.worker: one.pull for one in found.candidates}
    assert offers["w000"] is None
    assert offers["w001"] is not None
    assert (offers["w001"].source, offers["w001"].tokens) == ("w000", 6 * BLOCK)


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


def a_record(keys: bytes, found: Shortlist, decision: Decision) -> DecisionRecord:
    return journal.build(
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


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(
    queues=st.lists(st.floats(0, 1e4), min_size=1, max_size=6),
    depths=st.lists(st.integers(1, 8), max_size=6),
    host=st.integers(1, 8),
    shared=st.integers(0, 8),
    ordinal=st.integers(0, 99),
    has_waited=st.booleans(),
    trust=st.dictionaries(st.sampled_from(["w000", "w001", "w002"]), st.floats(0, 1)),
    reserved=st.integers(0, 8),
    took_ms=st.lists(st.floats(1, 1e4), max_size=40),
    token_bytes=st.integers(0, 10**7),
    acts=st.booleans(),
)
def test_a_recorded_decision_replays_bit_for_bit(
    name: str,
    queues: list[float],
    depths: list[int],
    host: int,
    shared: int,
    ordinal: int,
    has_waited: bool,
    trust: dict[str, float],
    reserved: int,
    took_ms: list[float],
    token_bytes: int,
    acts: bool,
) -> None:
    """All that a decision is made from: learned models and speeds of two classes, trust, reserves, offers to pull."""
    books, learner = Fleet(0.6, 3.0), Learner({"m": H100})
    for n, queue in enumerate(queues):
        report = fleet(1, {"w000": queue}, worker_class=f"class-{n % 2}", reserved_slots=reserved)[0].worker.load
        books.heard(msgspec.structs.replace(report, worker=f"w{n:03d}"), 0.0)
    workers = books.survey("m", "digest", 0.0).available
    for n, ms in enumerate(took_ms):
        around = Surroundings(WorkerClass("m", "digest", f"class-{n % 2}"), 0, 0.0)
        learner.hear(outcome(ms, worker=f"w{n % 2:03d}"), around, 0.0)
    by_depth: dict[int, list[str]] = {}
    for n, depth in enumerate(depths[: len(queues)]):
        by_depth.setdefault(depth, []).append(f"w{n:03d}")
    held = holdings(
        *sorted(by_depth.items(), reverse=True),
        trust=trust,
        host=[(host, ["w001", "w999"])],
        replica="directory-2",
        stream_seq=12_345,
        announced={"w000": 1},
    )
    found = shortlisted(
        chain(*range(8)),
        workers,
        held,
        shared=shared,
        whole_fleet=SCHEMES[name].whole_fleet,
        ordinal=ordinal,
        has_waited=has_waited,
        learner=learner,
        links=Links(token_bytes),
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
        rollout="active" if acts else "canary",
        shadow=journal.shadow(policy, decision),
    )
    read = DECISION.decode(DECISION.encode(record))
    replayed = decide(*journal.inputs(read))

    assert read == record
    assert replayed == decision
    assert journal.decided(replayed) == journal.decided(decision)
    assert (read.directory, read.stream_seq) == ("directory-2", 12_345)


def test_a_record_of_a_router_that_did_not_learn_yet_replays() -> None:
    found = shortlisted(chain(1, 2, 3), fleet(2), holdings((2, ["w000"])))
    decision = decide(found.shape, found.candidates, Policy(), 5.0)
    record = a_record(chain(1, 2, 3), found, decision)

    older = msgspec.structs.replace(record, prefill_models={})

    assert decide(*journal.inputs(older)) == decision


@given(queues=st.lists(st.floats(0, 1e4), min_size=2, max_size=6), depths=st.lists(st.integers(1, 8), max_size=6))
def test_what_candidates_would_gain_orders_them_as_their_costs_do(queues: list[float], depths: list[int]) -> None:
    workers = fleet(len(queues), {f"w{n:03d}": queue for n, queue in enumerate(queues)})
    held = holdings(*((depth, [f"w{n:03d}"]) for n, depth in enumerate(depths)))
    found = shortlisted(chain(*range(8)), workers, held)

    record = a_record(chain(*range(8)), found, decide(found.shape, found.candidates, Policy(), 5.0))

    rows = record.candidate_workers
    assert sorted(rows, key=lambda row: row.cost_ms) == sorted(rows, key=lambda row: -row.net_gain_ms)
    for row in rows:
        gain = row.saved_prefill_ms - row.wait_ms - row.transfer_ms - row.imbalance_penalty_ms
        assert row.net_gain_ms == pytest.approx(gain, abs=1e-6)
        assert (row.saved_prefill_ms > 0) == (row.cached_tokens > 0)


def test_a_policy_is_named_by_its_content() -> None:
    assert journal.digest(Policy()) == journal.digest(Policy())
    assert journal.digest(Policy()) != journal.digest(Policy(new_kv_price=0.31))
    assert len(journal.digest(Policy())) == 16


def test_a_record_is_readable_and_holds_no_keys() -> None:
    keys = chain(1, 2, 3)
    found = shortlisted(keys, fleet(2), holdings((2, ["w000"])))
    decision = decide(found.shape, found.candidates, Policy(), 5.0)

    record = a_record(keys, found, decision)
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
