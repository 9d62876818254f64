"""Hot traffic does not starve what is rare: cold requests, other documents, a second replica."""

from collections.abc import Callable

import pytest

from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.results import Result
from prefixbus.lab.rules import MakeRule, Sight
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Arrival, Segment, Workload, keys_of, seed_of
from prefixbus.router.policy import Policy, RequestShape, decide

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

WORKERS = 4
BLOCK = 32
# What may be with the engine before a newcomer, and the step that is under way when it comes: 2 + 1 steps of 8192
# tokens at 162 ms each. No cold request waits longer, whatever is queued behind the bridge.
COLD_BOUND_MS = 3 * 162.0


def prompt(at: float, *segments: Segment, output_tokens: int = 40, prefix_class: str = "document") -> Arrival:
    keys = keys_of(segments, BLOCK, seed_of("acme"))
    return Arrival(at, keys, sum(one.tokens for one in segments), output_tokens, prefix_class=prefix_class)


class Steered:
    """The production policy, but for requests whose worker is given."""

    def __init__(self, where: Callable[[RequestShape], str]) -> None:
        self._where = where

    def choose(self, sight: Sight) -> str:
        request = sight.request
        return self._where(request) or decide(request, sight.candidates, Policy(), sight.now).worker


def steered(where: Callable[[RequestShape], str]) -> MakeRule:
    return lambda _seed: Steered(where)


# --- cold requests among hot ones


@pytest.fixture(scope="module")
def saturation() -> float:
    """Requests a second for one hot document that four workers can answer."""
    hot = synthetic.hot_and_cold(hot_rate=100, cold_rate=0.1, seconds=10, output_tokens=40)
    return len(hot.arrivals) / run(Setup(workers=WORKERS, slots=4096), hot.at_once()).ended_at


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_a_cold_request_among_hot_ones_starts_within_its_bound(saturation: float, load: float) -> None:
    asked = synthetic.hot_and_cold(hot_rate=load * saturation, cold_rate=2, seconds=10, output_tokens=40)

    result = run(Setup(workers=WORKERS), asked)

    assert {one.status for one in result.served} == {"ok"}
    assert result.queue(prefix_class="cold").count >= 20
    assert result.queue(prefix_class="cold").highest < COLD_BOUND_MS
    assert result.queue(prefix_class="cold").mean <= 1.5 * result.queue(prefix_class="document").mean + 5.0


def test_without_its_slots_a_cold_request_is_shut_out() -> None:
    """What the reserve is for: hot requests hold on to all slots for long, and more of them come than can be held."""
    hot = synthetic.hot_and_cold(hot_rate=80, cold_rate=2, seconds=10, output_tokens=800)

    def shed(reserve: float) -> tuple[int, int]:
        result = run(Setup(workers=WORKERS, slots=32, cold_reserve=reserve), hot)
        lost = [one.prefix_class for one in result.served if one.status == "shed"]
        return lost.count("cold"), lost.count("document")

    kept, shut_out = shed(reserve=0.2), shed(reserve=0.0)

    assert kept[1] > 0 and shut_out[1] > 0
    assert kept[0] < shut_out[0] / 2


# --- the affinity of others


def test_one_hot_document_does_not_cost_the_others_their_workers() -> None:
    """It is asked for more often than one worker can answer; each of the others has a worker that holds it."""
    others = Workload(
        [
            prompt(at / 20, Segment(100 + at % 12, 6000), Segment(1000 + at, 150), prefix_class="other")
            for at in range(400)
        ],
        BLOCK,
    )
    hot = synthetic.hot_and_cold(hot_rate=30, cold_rate=0.1, seconds=20, hot_tokens=12_000)

    def reuse(result: Result) -> float:
        mine = [one for one in result.served if one.prefix_class == "other"]
        return sum(one.cached_tokens or 0 for one in mine) / sum(one.prompt_tokens for one in mine)

    alone, beside_it = run(Setup(workers=WORKERS), others), run(Setup(workers=WORKERS), others + hot)

    assert reuse(alone) > 0.9
    assert reuse(beside_it) > 0.97 * reuse(alone)


def test_the_second_replica_is_used_before_anybody_queues() -> None:
    document, pairs = Segment(1, 16_000), 10
    warm_up = [prompt(at, document, Segment(2 + at, 40)) for at in (0, 1)]
    asked = [
        prompt(5.0 + pair, document, Segment(100 + 2 * pair + second, 3000))
        for pair in range(pairs)
        for second in (0, 1)
    ]
    # Two workers compute it, one after the other; from then on the policy decides.
    replicas = steered(lambda request: f"w{request.ordinal}" if request.ordinal < 2 else "")

    result = run(Setup(workers=WORKERS, policy=replicas), Workload(warm_up + asked, BLOCK))

    for first, second in zip(result.served[2::2], result.served[3::2], strict=True):
        assert {first.worker, second.worker} == {"w0", "w1"}
        assert first.cached_tokens == second.cached_tokens == document.tokens
        # The way to the worker, and at most the rest of a decode step.
        assert max(first.queue_ms or 0.0, second.queue_ms or 0.0) < 25.0


def test_a_busy_worker_with_a_small_cache_loses_a_cold_request_to_an_idle_one() -> None:
    """Nine tenths of its memory are in use for long: who comes would wait for it, though no prefill is queued."""
    small = 65_536
    long_ones = [prompt(number / 10, Segment(number + 1, 9000), output_tokens=3000) for number in range(6)]
    cold = [prompt(3.0 + number / 2, Segment(100 + number, 8000), prefix_class="cold") for number in range(12)]
    fill = steered(lambda request: "w0" if request.output_tokens == 3000 else "")

    result = run(Setup(workers=WORKERS, policy=fill, kv_tokens_of={"w0": small}), Workload([*long_ones, *cold], BLOCK))

    served = [one for one in result.served if one.prefix_class == "cold"]
    assert {one.worker for one in result.served if one.prefix_class != "cold"} == {"w0"}
    assert {one.worker for one in served} == {"w1", "w2", "w3"}
    assert max(one.queue_ms or 0.0 for one in served) < 25.0
