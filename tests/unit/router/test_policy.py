"""Decisions: the worked examples, what each is called, and what holds for all of them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.router import policy
from prefixbus.router.cost import PROFILES, PrefillModel
from prefixbus.router.policy import NO_LIMIT_MS, Candidate, Decision, Policy, Pull, RequestShape, decide
from prefixbus.router.transfer import Links

H100 = PROFILES["h100-8b"]
# 1 ms a token and nothing else: examples that speak of milliseconds can be written in tokens.
MS_A_TOKEN = PrefillModel(0.0, 1.0, 0.0, 0.0)
KV_TOKENS = 1_050_000
BARE = Policy(new_kv_price=0.0, decode_price=0.0, queue_share=1.0, sibling_bonus_ms=0.0, min_reuse_tokens=1)


def candidate(worker: str, cached: int = 0, queue_ms: float = 0.0, **changed: Any) -> Candidate:
    given_: dict[str, Any] = {
        "worker": worker,
        "cached_tokens": cached,
        "queue_ms": queue_ms,
        "rho": 0.0,
        "pinned_tokens": 0,
        "free_tokens": KV_TOKENS,
        "model": H100,
    }
    return Candidate(**(given_ | changed))


def shape(prompt: int, **changed: Any) -> RequestShape:
    return RequestShape(**({"prompt_tokens": prompt, "output_tokens": 200, "block_size": 16} | changed))


def choose(request: RequestShape, *candidates: Candidate, by: Policy = Policy()) -> Decision:  # noqa: B008 - frozen
    return decide(request, list(candidates), by, 0.0)


IDLE = candidate("idle")

# --- those who decode


def test_a_small_hit_is_left_where_many_decode_for_their_sake() -> None:
    """400k tokens of others' context add 21 ms to a step: less than the 35 ms that 2,000 tokens save, but those who
    decode pay the same, step after step."""
    busy = candidate("busy", 2000, pinned_tokens=400_000)

    assert choose(shape(4000), busy, IDLE, by=BARE).worker == "busy"
    decided = choose(shape(4000), busy, IDLE)
    assert decided.worker == "idle"
    terms = next(one for one in decided.ranking if one.candidate is busy)
    assert terms.decode_ms == Policy().decode_price * terms.interference_ms > 0.0


# --- the worked examples


def test_a_holder_queued_longer_than_it_saves_loses_to_an_idle_worker() -> None:
    holder = candidate("holder", cached=80, queue_ms=120.0, model=MS_A_TOKEN)
    idle = candidate("idle", model=PrefillModel(0.0, 45 / 125, 0.0, 0.0))

    decision = choose(shape(125), holder, idle, by=BARE)

    assert (decision.worker, decision.name) == ("idle", "spill-margin")


@pytest.mark.parametrize("prompt", [2_100, 100_000])
def test_matched_tokens_count_absolutely_and_not_as_a_share(prompt: int) -> None:
    linear = PrefillModel(21.74, 0.0172, 0.0, 5.2e-5)
    warm = policy.price(shape(prompt), candidate("w", cached=2_000, model=linear), BARE)
    cold = policy.price(shape(prompt), candidate("w", model=linear), BARE)

    assert cold.ttft_ms - warm.ttft_ms == pytest.approx(2_000 * 0.0172)


def test_what_most_traffic_shares_is_no_reason_to_stay_where_it_was_computed_first() -> None:
    """2000 tokens are a system prompt of 34 ms: less than all sessions on one worker cost."""
    first, home = candidate("first", cached=2_000), candidate("home")

    shared = choose(shape(2_300, home="home", shared_tokens=2_000), first, home)
    not_shared = choose(shape(2_300), first, home)

    assert (shared.worker, shared.name) == ("home", "home-worker")
    assert not_shared.worker == "first"


def test_a_home_does_not_call_if_it_is_busier() -> None:
    home = candidate("home", queue_ms=1.0)

    decision = choose(shape(2_300, home="home", shared_tokens=2_000), candidate("first", cached=2_000), home)

    assert decision.worker == "first"


def test_of_a_very_long_shared_prefix_only_a_part_is_everybodys_business() -> None:
    assert policy.shared_tokens(shared_blocks=100, block_size=16) == 1_600
    assert policy.shared_tokens(shared_blocks=256, block_size=512) == policy.MAX_SHARED_TOKENS


@pytest.mark.parametrize(
    ("queue_ms", "chosen"),
    [pytest.param(150.0, "holder", id="short queue"), pytest.param(900.0, "idle", id="long queue")],
)
def test_a_long_match_is_worth_a_short_queue_and_not_a_long_one(queue_ms: float, chosen: str) -> None:
    decision = choose(shape(30_000), candidate("holder", 24_000, queue_ms), candidate("idle"))

    assert decision.worker == chosen


def test_among_equal_holders_the_less_queued_is_chosen() -> None:
    decision = choose(shape(4_000), candidate("a", 3_200, 20.0), candidate("b", 3_200, 5.0), candidate("c"))

    assert decision.order == ["b", "a", "c"]


@given(queues=st.lists(st.floats(0, 5_000), min_size=1, max_size=8, unique=True), prompt=st.integers(1, 100_000))
def test_traffic_that_never_repeats_goes_to_the_least_loaded(queues: list[float], prompt: int) -> None:
    fleet = [candidate(f"w{n}", queue_ms=queue_ms) for n, queue_ms in enumerate(queues)]

    decision = choose(shape(prompt), *fleet)

    assert decision.queue_ms == pytest.approx(min(queues), abs=1e-6)
    assert decision.name == "balanced-cold"


def test_siblings_of_a_burst_follow_the_first_until_its_queue_is_longer_than_their_prefill() -> None:
    """The first one's blocks are announced, so the others find it a holder; each adds its prefill to the queue."""
    queues = dict.fromkeys(("w1", "w2", "w3", "w4"), 0.0)
    cached = dict.fromkeys(queues, 0)
    request = shape(8_000)

    for _ in range(16):
        decision = choose(request, *(candidate(name, cached[name], queues[name]) for name in queues))
        queues[decision.worker] += decision.work_ms
        cached[decision.worker] = 7_984

    assert sum(depth > 0 for depth in cached.values()) <= 2


@pytest.mark.parametrize("shared", [0, 496], ids=["new", "the only prompt of all traffic"])
def test_who_computes_what_nobody_has_yet_is_given_its_siblings(shared: int) -> None:
    """20 ms of their last blocks are queued there, and 500 tokens are computed in 9."""
    request = shape(500, shared_tokens=shared)

    def first(announced: int) -> Candidate:
        return candidate("first", 496, 20.0, held_blocks=31, announced_blocks=announced)

    computing = choose(request, first(31), IDLE)
    done = choose(request, first(0), IDLE)
    done_by_another = choose(request, first(31), candidate("other", 496, held_blocks=31), IDLE)

    assert computing.worker == "first"
    assert computing.ranking[0].home_bonus_ms == Policy().sibling_bonus_ms
    assert done.worker == "idle"
    assert done_by_another.worker == "other"


def test_siblings_do_not_pile_up_without_end() -> None:
    first = candidate("first", 496, 45.0, held_blocks=31, announced_blocks=31)

    assert choose(shape(500), first, IDLE).worker == "idle"


def test_who_computes_only_what_most_traffic_shares_is_nobodys_home() -> None:
    first = candidate("first", 480, 20.0, held_blocks=30, announced_blocks=30)

    decision = choose(shape(600, shared_tokens=480), first, IDLE)

    assert decision.worker == "idle"


def test_a_busy_worker_with_a_small_cache_loses_a_cold_miss_to_an_idle_one() -> None:
    small = candidate("a-small", pinned_tokens=49_000, free_tokens=1_000, rho=0.7)

    assert choose(shape(4_000), small, candidate("idle")).worker == "idle"


def test_an_equal_fleet_is_chosen_from_by_name() -> None:
    assert choose(shape(10), candidate("b"), candidate("c"), candidate("a")).order == ["a", "b", "c"]


# --- pull or recompute

GIB = 2**30
KV_TOKEN_BYTES = 128 * 1024
PREFIX = 2 * GIB // KV_TOKEN_BYTES


def a_pull(prefill_ms: float, *, gib_per_s: float = 20.0) -> Candidate:
    """An idle worker that could pull 2 GiB, or compute it in so many ms; its holder would take a second."""
    links = Links(KV_TOKEN_BYTES, setup_ms=0.5, bytes_per_ms=gib_per_s * GIB / 1000)
    pull = Pull("holder", PREFIX, links.transfer_ms("holder", "idle", PREFIX))
    return candidate("idle", model=PrefillModel(0.0, prefill_ms / PREFIX, 0.0, 0.0), pull=pull)


def test_two_gib_over_twenty_a_second_lose_to_a_recompute_of_60_ms() -> None:
    idle = a_pull(60.0)

    decision = choose(shape(PREFIX + 1), candidate("holder", PREFIX, queue_ms=1_000.0), idle)

    assert idle.pull is not None
    assert idle.pull.transfer_ms >= 100
    assert (decision.worker, decision.pull, decision.predicted_tokens) == ("idle", None, 0)


def test_the_same_transfer_wins_over_a_recompute_of_400_ms() -> None:
    decision = choose(shape(PREFIX + 1), candidate("holder", PREFIX, queue_ms=1_000.0), a_pull(400.0))

    assert (decision.worker, decision.name, decision.predicted_tokens) == ("idle", "remote-pull", PREFIX)
    assert decision.pull is not None
    assert decision.ranking[0].ttft_ms == pytest.approx(100.5, rel=0.01)
    assert decision.work_ms < 1


def test_a_transfer_runs_while_the_queue_does() -> None:
    queued = msgspec.structs.replace(a_pull(400.0), queue_ms=90.0)

    assert policy.price(shape(PREFIX + 1), queued, Policy()).ttft_ms == pytest.approx(100.5, rel=0.01)


def test_a_pulled_copy_costs_others_what_a_computed_one_does() -> None:
    """Without a price on it, pulling collapses when memory is short (facts/policy.md)."""
    request = shape(PREFIX + 1)
    pulling = policy.price(request, a_pull(400.0), Policy())
    computing = policy.price(request, msgspec.structs.replace(a_pull(400.0), pull=None), Policy())

    assert pulling.pulls
    assert pulling.new_kv_ms == computing.new_kv_ms == pytest.approx(0.3 * 400, rel=0.01)


@pytest.mark.parametrize(("fleet_rho", "name"), [(0.8, "remote-pull"), (0.81, "spill-margin")])
def test_nothing_is_pulled_while_the_fleet_is_busy(fleet_rho: float, name: str) -> None:
    holder = candidate("holder", PREFIX, queue_ms=1_000.0)

    by = Policy(copy_price=0.0)

    assert choose(shape(PREFIX + 1, fleet_rho=fleet_rho), holder, a_pull(400.0), by=by).name == name


def test_nothing_is_pulled_into_slots_kept_for_cold_requests() -> None:
    reserved = msgspec.structs.replace(a_pull(400.0), only_reserved=True)

    assert choose(shape(PREFIX + 1), reserved).name == "cold-reserve"


def test_round_robin_pulls_nothing() -> None:
    assert choose(shape(PREFIX + 1), a_pull(400.0), by=Policy(name="round-robin")).pull is None


# --- slots kept for cold requests


def test_a_warm_request_leaves_the_reserve_alone() -> None:
    holder = candidate("holder", 976, only_reserved=True)

    decision = choose(shape(1_000), holder, IDLE)

    assert (decision.worker, decision.name) == ("idle", "spill-max-wait")


def test_a_cold_request_takes_the_reserve() -> None:
    decision = choose(shape(1_000), candidate("hot", only_reserved=True), candidate("busy", queue_ms=500.0))

    assert (decision.worker, decision.name, decision.is_warm) == ("hot", "cold-reserve", False)


def test_what_all_hold_most_of_is_warm_everywhere() -> None:
    """A hot document on every worker: else those who ask about it would fill the slots kept for others."""
    fleet = [candidate("a", 24_000, only_reserved=True), candidate("b", 24_000, queue_ms=700.0)]

    decision = choose(shape(30_000), *fleet)

    assert (decision.worker, decision.is_warm) == ("b", True)


def test_a_short_system_prompt_that_all_hold_takes_the_reserve() -> None:
    fleet = [candidate("a", 512, only_reserved=True), candidate("b", 512, queue_ms=700.0)]

    decision = choose(shape(30_000), *fleet)

    assert (decision.worker, decision.name, decision.is_warm) == ("a", "cold-reserve", False)


def test_when_only_the_reserve_is_left_the_bridge_has_the_last_word() -> None:
    decision = choose(shape(1_000), candidate("a", 976, only_reserved=True), candidate("b", 976, only_reserved=True))

    assert (decision.worker, decision.is_warm) == ("a", True)


# --- speeds


def test_a_worker_known_to_be_slow_gets_what_it_is_still_best_for() -> None:
    slow = candidate("a-slow", speed=2.0)

    assert choose(shape(8_000), slow, candidate("b")).worker == "b"
    assert choose(shape(8_000), slow, candidate("b", queue_ms=500.0)).worker == "a-slow"
    assert choose(shape(8_000), slow).work_ms == pytest.approx(2 * choose(shape(8_000), IDLE).work_ms)


# --- how long a warm request waits


def test_a_warm_choice_may_wait_as_long_as_its_hit_is_worth() -> None:
    by = Policy(max_warm_wait_ms=800)

    warm = choose(shape(60_000, output_tokens=2_048), candidate("w", 59_000, 10.0), IDLE, by=by)
    cold = choose(shape(60_000), candidate("a"), IDLE, by=by)
    alone = choose(shape(60_000), candidate("w", 59_000, 10.0), by=by)

    assert (warm.is_warm, warm.max_wait_ms) == (True, 400)
    assert (cold.is_warm, cold.max_wait_ms) == (False, 0)
    assert alone.max_wait_ms == 0


def test_who_has_waited_is_warm_only_where_nobody_waits_longer() -> None:
    holder, cold = candidate("holder", 59_000, 100.0), candidate("cold", queue_ms=90.0)

    first = choose(shape(60_000), holder, cold)
    again = choose(shape(60_000, has_waited=True), holder, cold)
    idle = choose(shape(60_000, has_waited=True), msgspec.structs.replace(holder, queue_ms=90.0), cold)

    worse = choose(shape(60_000, has_waited=True), msgspec.structs.replace(holder, queue_ms=9_000.0), cold)

    assert (first.worker, again.worker, idle.worker, worse.worker) == ("holder", "cold", "holder", "cold")
    assert again.name == worse.name == "spill-max-wait"


def test_a_choice_stands_as_long_as_what_is_missing_does_not_matter() -> None:
    """59,000 of 60,000 tokens were expected; from some depth on the missing prefill is under `rechoose_ms`."""
    request, holder = shape(60_000), candidate("holder", 59_008)
    decision = choose(request, holder, IDLE)

    least = decision.min_held_blocks
    loss_ms = {
        blocks: policy.price(request, candidate("holder", 16 * blocks), Policy()).prefill_ms
        - policy.price(request, holder, Policy()).prefill_ms
        for blocks in (least - 1, least)
    }

    assert 0 < least < 59_008 // 16
    assert loss_ms[least] <= Policy().rechoose_ms < loss_ms[least - 1]


@pytest.mark.parametrize(
    ("candidates", "why"),
    [
        ([candidate("holder", 59_008)], "there is nobody else"),
        ([candidate("holder", 512), candidate("busy", queue_ms=9_000)], "the loss is small"),
        ([IDLE, candidate("busy", 512, queue_ms=9_000)], "nothing was expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_choice_stands_whatever_is_held_where(candidates: list[Candidate], why: str) -> None:
    assert choose(shape(60_000), *candidates).min_held_blocks == 0


# --- what a decision is called

NAMED: list[Any] = [
    pytest.param(shape(1_000), [candidate("w", 976), IDLE], Policy(), "w", "prefer-warm-worker", id="all but the last"),
    pytest.param(shape(1_000), [candidate("w", 512), IDLE], Policy(), "w", "partial-hit", id="some blocks"),
    pytest.param(shape(1_000), [IDLE], Policy(), "idle", "balanced-cold", id="nobody holds it"),
    pytest.param(shape(1_000, home="w"), [candidate("w"), IDLE], Policy(), "w", "home-worker", id="fresh"),
    pytest.param(
        shape(1_000, home="w"), [candidate("w", queue_ms=1.0), IDLE], Policy(), "idle", "balanced-cold", id="no home"
    ),
    pytest.param(shape(1_000, blind=True), [IDLE], Policy(), "idle", "blind", id="no directory"),
    pytest.param(
        shape(60_000),
        [candidate("w", 59_000, 600.0), IDLE],
        Policy(max_warm_wait_ms=500),
        "idle",
        "spill-max-wait",
        id="queue over the cap",
    ),
    pytest.param(
        shape(60_000, output_tokens=4_096),
        [candidate("w", 59_000, 600.0), IDLE],
        Policy(max_warm_wait_ms=2_000),
        "idle",
        "spill-max-wait",
        id="queue over the cap of long outputs",
    ),
    pytest.param(
        shape(20_000),
        [candidate("w", 19_000, 550.0), IDLE],
        Policy(margin_ms=20),
        "idle",
        "spill-margin",
        id="later than the margin allows",
    ),
    pytest.param(
        shape(20_000),
        [candidate("w", 19_000, 400.0), IDLE],
        Policy(),
        "w",
        "partial-hit",
        id="later, but new KV has a price",
    ),
    pytest.param(
        shape(10_000),
        [candidate("w", 9_600, pinned_tokens=100_000, free_tokens=0), candidate("idle", free_tokens=50_000)],
        Policy(kv_turnover_ms=60_000),
        "idle",
        "spill-memory",
        id="no memory for the rest",
    ),
]


@pytest.mark.parametrize(("request_", "candidates", "by", "worker", "name"), NAMED)
def test_a_decision_says_why(
    request_: RequestShape, candidates: list[Candidate], by: Policy, worker: str, name: str
) -> None:
    decision = choose(request_, *candidates, by=by)

    assert (decision.worker, decision.name) == (worker, name)


def test_a_system_prompt_that_all_hold_makes_nobody_warm() -> None:
    """Every queue is over the cap; the choice is by load among equals, not a spill."""
    by = Policy(max_warm_wait_ms=100)

    decision = choose(shape(2_000), candidate("a", 512, 300.0), candidate("b", 512, 200.0), by=by)

    assert (decision.worker, decision.name) == ("b", "partial-hit")


def test_nobody_is_barred_for_a_queue_when_all_are_as_long() -> None:
    by = Policy(max_warm_wait_ms=100)

    decision = choose(shape(60_000), candidate("w", 59_000, 500.0), candidate("cold", queue_ms=450.0), by=by)

    assert decision.worker == "w"


# --- the bound of the queue


def test_a_dispatch_stands_until_another_worker_is_better_by_the_slack() -> None:
    by = Policy(queue_share=1.0)
    decision = choose(shape(1_000), candidate("a", queue_ms=10.0), candidate("b", queue_ms=40.0), by=by)

    assert decision.max_queue_ms == pytest.approx(10 + 30 + 50)


def test_a_lone_candidate_has_no_bound() -> None:
    assert choose(shape(1_000), candidate("a", queue_ms=1e6)).max_queue_ms == NO_LIMIT_MS


def test_a_warm_choice_never_waits_longer_than_its_cap() -> None:
    by = Policy(max_warm_wait_ms=70)

    assert choose(shape(60_000), candidate("w", 59_000, 10.0), IDLE, by=by).max_queue_ms == 70


# --- round robin


def test_round_robin_takes_each_worker_in_turn() -> None:
    fleet = [candidate("c", 976), candidate("a", queue_ms=1e5), candidate("b")]
    by = Policy(name="round-robin")

    chosen = [choose(shape(1_000, ordinal=n), *fleet, by=by) for n in range(4)]

    assert [one.order for one in chosen] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert {one.name for one in chosen} == {"round-robin"}


# --- all policies

candidates_ = st.lists(
    st.builds(
        candidate,
        st.text("abc", min_size=1, max_size=4),
        st.integers(0, 60).map(lambda blocks: 16 * blocks),
        st.floats(0, 1e5),
        rho=st.floats(0, 2),
        pinned_tokens=st.integers(0, 10**6),
        free_tokens=st.integers(0, 10**6),
        speed=st.floats(0.25, 4),
        only_reserved=st.booleans(),
        pull=st.none() | st.builds(Pull, st.text("xyz", min_size=1), st.integers(1, 1_000), st.floats(0, 1e4)),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.worker,
)


@given(
    candidates=candidates_,
    name=st.sampled_from(sorted(policy.SCHEMES)),
    margin_ms=st.none() | st.floats(0, 500),
    warm_wait_ms=st.floats(0, 1e4),
    blind=st.booleans(),
    ordinal=st.integers(0, 10**9),
    has_waited=st.booleans(),
    fleet_rho=st.floats(0, 1),
    data=st.data(),
)
def test_a_decision_ranks_every_candidate_once_whatever_their_order(
    candidates: list[Candidate],
    name: str,
    margin_ms: float | None,
    warm_wait_ms: float,
    blind: bool,
    ordinal: int,
    has_waited: bool,
    fleet_rho: float,
    data: st.DataObject,
) -> None:
    by = Policy(name=name, margin_ms=margin_ms, max_warm_wait_ms=warm_wait_ms)
    request = shape(1_000, blind=blind, ordinal=ordinal, has_waited=has_waited, fleet_rho=fleet_rho)

    decision = decide(request, candidates, by, 0.0)
    again = decide(request, data.draw(st.permutations(candidates)), by, 0.0)

    assert decision == again
    assert decision.worker == decision.order[0]
    assert sorted(decision.order) == sorted(one.worker for one in candidates)
    assert decision.max_queue_ms >= decision.queue_ms
    assert decision.max_wait_ms == 0 or decision.max_wait_ms >= decision.queue_ms


# --- policies as people write them


def test_the_defaults_survive_json() -> None:
    assert policy.parse(msgspec.json.encode(Policy())) == Policy()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="not json"),
        pytest.param('{"name": "prefix-aware", "weight": 1}', id="unknown field"),
        pytest.param('{"name": "coin-toss"}', id="unknown policy"),
        pytest.param('{"new_kv_price": -1}', id="negative price"),
        pytest.param('{"new_kv_price": "1"}', id="text for a number"),
        pytest.param('{"least_loaded": 0}', id="no candidates"),
        pytest.param('{"margin_ms": 1e999}', id="infinite"),
        pytest.param('{"name": "\xff"}', id="not utf-8"),
        pytest.param('{"kv_turnover_ms": 1.7e308}', id="nothing is left of other terms"),
        pytest.param('{"sibling_bonus_ms": 1.7e308}', id="sums are infinite"),
        pytest.param('{"version": "%s"}' % ("v" * 65), id="a version of a megabyte in each record"),
        pytest.param('{"version": "\\u001b[31m"}', id="a version that commands a terminal"),
    ],
)
def test_an_invalid_policy_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="policy"):
        policy.parse(text.encode("latin-1"))
