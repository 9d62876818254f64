"""Where prefixes go: sessions, hot documents, bursts, and what never comes again."""

import itertools
from collections import defaultdict

import msgspec
import pytest

from prefixbus.lab import synthetic
from prefixbus.lab.harness import World, run
from prefixbus.lab.results import Served
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Workload

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

# --- sessions that share one system prompt


@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize("system_tokens", [1000, 2000, 4000])
def test_sessions_under_one_system_prompt_spread_and_find_their_own_history(system_tokens: int, routers: int) -> None:
    turns = 8
    load = synthetic.sessions(sessions=100, turns=turns, seconds=60, system_tokens=system_tokens)

    result = run(Setup(routers=routers), load)

    assert result.token_reuse >= 0.82
    assert result.busiest_to_mean <= 2.0
    assert result.busiest_prefill_to_mean <= 2.0
    later = [one for one in sessions_of(load, result.served, system_tokens) if len(one) == turns]
    assert len(later) == 100
    found = [
        (turn.cached_tokens or 0) >= before.prompt_tokens - load.block_size
        for session in later
        for before, turn in itertools.pairwise(session)
    ]
    assert sum(found) >= 0.97 * len(found)


def sessions_of(load: Workload, served: list[Served], system_tokens: int) -> list[list[Served]]:
    """The turns of each session, told apart by its first block after the system prompt."""
    at = 8 * (system_tokens // load.block_size)
    sessions = defaultdict(list)
    for arrival, one in zip(load.arrivals, served, strict=True):
        sessions[arrival.keys[at : at + 8]].append(one)
    return list(sessions.values())


# --- one very hot prefix


@pytest.mark.parametrize("load", [0.95])
def test_one_very_hot_prefix_near_saturation_is_served_better_than_in_turn(load: float) -> None:
    def asked(rate: float) -> Workload:
        return synthetic.zipf_prefixes(rate=rate, count=800, exponent=1.2, output_tokens=60)

    saturation = 800 / run(Setup(workers=4, slots=4096, policy=ruled("round-robin")), asked(100).at_once()).ended_at
    in_turn = run(Setup(workers=4, policy=ruled("round-robin")), asked(load * saturation)).ttft()
    ours = run(Setup(workers=4), asked(load * saturation)).ttft()

    assert ours.count == in_turn.count == 800
    assert ours.mean < 0.7 * in_turn.mean
    assert ours.p95 < 0.7 * in_turn.p95


# --- traffic that never repeats


@pytest.mark.parametrize("rate", [10, 25, 38])
def test_traffic_that_never_repeats_costs_nothing_over_least_loaded(rate: float) -> None:
    """Of 45 a second, which four workers can compute; a queue that differs by one request changes all that follows, so
    sums of several runs are compared."""
    loads = [synthetic.never_repeating(rate=rate, count=350, seed=seed) for seed in range(3)]

    least = sum(run(Setup(workers=4, policy=ruled("least-loaded")), load).ttft().mean for load in loads)
    ours = sum(run(Setup(workers=4), load).ttft().mean for load in loads)

    assert ours <= 1.01 * least


# --- bursts


@pytest.mark.parametrize("routers", [1, 2, 4, 8])
@pytest.mark.parametrize("spread_s", [0.0, 0.002, 0.05], ids=lambda spread: f"in {1000 * spread:.0f} ms")
def test_32_identical_cold_prompts_at_once_cost_at_most_2_prefills(routers: int, spread_s: float) -> None:
    load = synthetic.burst(count=32, prompt_tokens=8000, spread_s=spread_s)

    result = run(Setup(workers=4, routers=routers), load)

    assert sum(1 for one in result.served if (one.cached_tokens or 0) < 4000) <= 2
    assert result.leftovers == []


def test_without_announcements_to_the_directory_each_worker_computes_it() -> None:
    load = synthetic.burst(count=32, prompt_tokens=8000)

    result = run(Setup(workers=4, predict_delay_s=None), load)

    assert sum(1 for one in result.served if (one.cached_tokens or 0) < 4000) == 4


# --- what came to nothing


def predicted_blocks(world: World) -> int:
    return world.directory.predictions.blocks


@pytest.mark.parametrize("cancelled_after_s", [0.0, 0.0012, 0.0018, 0.05, 0.2])
def test_a_cancelled_request_leaves_no_placement(cancelled_after_s: float) -> None:
    """On its way to the directory, to the worker, in its prefill, in its answer."""
    (arrival,) = synthetic.burst(count=1, prompt_tokens=8000, output_tokens=500).arrivals
    world = World(Setup(workers=2), Workload([msgspec.structs.replace(arrival, cancel_after_s=cancelled_after_s)], 32))

    result = world.run()

    assert [one.status for one in result.served] == ["cancelled"]
    assert result.leftovers == []
    assert predicted_blocks(world) == 0


def test_a_shed_request_leaves_no_placement() -> None:
    load = synthetic.never_repeating(rate=1000, count=40)
    world = World(Setup(workers=2, slots=4, routers=2), load)

    result = world.run()

    statuses = [one.status for one in result.served]
    assert statuses.count("shed") >= 20 and statuses.count("ok") >= 8
    assert result.leftovers == []
    assert predicted_blocks(world) == 0


def test_a_failed_request_leaves_no_placement() -> None:
    """Its prompt is longer than the engine's memory."""
    load = synthetic.burst(count=1, prompt_tokens=50_000)
    world = World(Setup(workers=2, kv_tokens=32_768), load)

    result = world.run()

    assert [(one.status, one.error) for one in result.served] == [("error", "too_large")]
    assert result.leftovers == []
    assert predicted_blocks(world) == 0
