"""What idle workers compute for nobody: it delays no request, stops under load, and pays after a cache was lost."""

import pytest

from prefixbus.directory.placement import PlacementRules
from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.results import Result
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Workload

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

REWARMING_ALONE = PlacementRules(copies_max=0)

LOADS = {
    "traffic that never repeats": synthetic.never_repeating(rate=10, count=300),
    "documents at leisure": synthetic.zipf_prefixes(rate=15, count=800),
    "sessions under one system prompt": synthetic.sessions(sessions=100, turns=4, seconds=80),
    # Longer than what routers spread by themselves (policy.MAX_SHARED_TOKENS).
    "one hot document and cold prompts": synthetic.hot_and_cold(hot_rate=10, cold_rate=2, seconds=40, hot_tokens=16000),
}


def orders(result: Result) -> int:
    return sum(worker.orders_done + worker.orders_given_up for worker in result.workers)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_no_traffic_waits_for_what_is_computed_for_nobody(load: Workload) -> None:
    without = run(Setup(placement=None), load)
    with_orders = run(Setup(placement=PlacementRules()), load)

    assert with_orders.leftovers == []
    assert with_orders.ttft().mean <= 1.01 * without.ttft().mean
    assert with_orders.ttft().p95 <= 1.01 * without.ttft().p95


def test_one_hot_prefix_is_where_idle_workers_are_before_they_are_asked() -> None:
    load = LOADS["one hot document and cold prompts"]

    without = run(Setup(placement=None), load)
    with_orders = run(Setup(placement=PlacementRules()), load)

    assert with_orders.ttft(prefix_class="document").mean < 0.8 * without.ttft(prefix_class="document").mean


def test_near_saturation_requests_wait_no_longer_either() -> None:
    """There a queue that is longer by one request changes all that follows: sums of several runs are compared."""
    loads = [synthetic.zipf_prefixes(rate=100, count=700, seed=seed) for seed in range(3)]

    without = [run(Setup(placement=None), load).ttft() for load in loads]
    with_orders = [run(Setup(placement=PlacementRules()), load).ttft() for load in loads]

    assert sum(times.mean for times in with_orders) <= 1.01 * sum(times.mean for times in without)
    assert sum(times.p95 for times in with_orders) <= 1.01 * sum(times.p95 for times in without)


def test_under_load_next_to_nothing_is_ordered() -> None:
    """Of 1000 requests for 100 documents that come faster than they can be answered."""
    result = run(Setup(placement=PlacementRules()), synthetic.zipf_prefixes(rate=160, count=1000))

    assert orders(result) <= 20
    assert sum(worker.orders_done for worker in result.workers) <= 5


@pytest.mark.parametrize(("rate", "count", "prefixes"), [(4, 800, 20), (15, 1500, 100)])
def test_reuse_recovers_faster_after_half_of_the_fleet_has_lost_its_cache(
    rate: float, count: int, prefixes: int
) -> None:
    load = synthetic.zipf_prefixes(rate=rate, count=count, prefixes=prefixes)
    lost_at = load.arrivals[count // 2].at
    resets = tuple((lost_at, f"w{number}") for number in range(0, 8, 2))

    def afterwards(result: Result) -> tuple[float, float]:
        """(token reuse, mean TTFT in ms) of the first 15 s."""
        served = [one for one in result.served if lost_at <= one.at < lost_at + 15]
        cached = sum(one.cached_tokens or 0 for one in served)
        return cached / sum(one.prompt_tokens for one in served), sum(one.ttft_ms or 0.0 for one in served) / len(
            served
        )

    without = run(Setup(resets=resets, placement=None), load)
    rewarmed = run(Setup(resets=resets, placement=REWARMING_ALONE), load)

    assert orders(without) == 0 < orders(rewarmed)
    assert afterwards(rewarmed)[0] > afterwards(without)[0] + 0.01
    assert afterwards(rewarmed)[1] < afterwards(without)[1]
    assert rewarmed.leftovers == []
