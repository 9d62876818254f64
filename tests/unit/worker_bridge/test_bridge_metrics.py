"""What a bridge tells Prometheus is what its attempts measured, to the token."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixbus.bus.messages import VERSION, Outcome
from prefixbus.worker_bridge.evictions import Evictions
from prefixbus.worker_bridge.metrics import COUNTERS, GAUGES, BridgeMetrics

BLOCK = 32
OF_CLASS = {"model": "m", "pool": "gold", "template": "0123456789ab", "prefix_class": "session"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> BridgeMetrics:
    return BridgeMetrics(registry, BLOCK, model="m", pool="gold", template="sha256:0123456789abcdef")


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "v": VERSION,
        "request_id": "r",
        "client_request_id": "c",
        "attempt": 1,
        "worker": "w1",
        "incarnation": 1,
        "tenant": "acme",
        "model": "m",
        "ns_id": "00" * 16,
        "status": "ok",
        "error": "",
        "prefix_class": "session",
        "decision": "partial-hit",
        "prompt_tokens": 330,
        "predicted_tokens": 96,
        "cached_tokens": 64,
        "prefill_tokens": 266,
        "output_tokens": 7,
        "queue_wait_ms": 30.0,
        "ttft_ms": 150.0,
        "total_ms": 400.0,
        "ended_at": 0.0,
    }
    return Outcome(**(values | changes))


def of(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"prefixbus_bridge_{name}", OF_CLASS | labels)


def test_an_answer_is_counted_under_its_class_its_warmth_and_its_decision(
    metrics: BridgeMetrics, registry: CollectorRegistry
) -> None:
    metrics.ended(outcome())

    assert of(registry, "requests_total", status="ok", error="none") == 1
    assert of(registry, "input_tokens_total", source="cached") == 64
    assert of(registry, "input_tokens_total", source="uncached") == 266
    assert of(registry, "output_tokens_total") == 7
    assert of(registry, "ttft_seconds_sum", warmth="partial") == pytest.approx(0.15)
    assert of(registry, "request_seconds_sum", warmth="partial") == pytest.approx(0.4)
    assert of(registry, "queue_wait_seconds_sum", decision="partial-hit") == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("predicted", "cached", "verdicts"),
    [(96, 64, (64, 32, 0)), (64, 96, (64, 0, 32)), (0, 0, (0, 0, 0)), (-5, 32, (0, 0, 32))],
    ids=["promised too much", "promised too little", "nothing", "nonsense"],
)
def test_one_answers_missing_tokens_are_not_hidden_by_anothers_surplus(
    metrics: BridgeMetrics, registry: CollectorRegistry, predicted: int, cached: int, verdicts: tuple[int, int, int]
) -> None:
    metrics.ended(outcome(predicted_tokens=predicted, cached_tokens=cached))

    found = [of(registry, "predicted_tokens_total", verdict=name) for name in ("met", "missed", "unforeseen")]
    assert tuple(found) == verdicts


def test_an_engine_that_does_not_say_what_it_reused_adds_nothing_to_either(
    metrics: BridgeMetrics, registry: CollectorRegistry
) -> None:
    metrics.ended(outcome(cached_tokens=None, prefill_tokens=None))

    assert of(registry, "input_tokens_total", source="cached") is None
    assert of(registry, "input_tokens_total", source="uncached") is None
    assert of(registry, "ttft_seconds_count", warmth="unknown") == 1


@pytest.mark.parametrize(
    ("changes", "tokens", "seconds"),
    [
        ({}, 266, 0.12),
        ({"prefill_tokens": 0}, 0, 0.12),
        ({"ttft_ms": None}, None, None),
        ({"queue_wait_ms": None}, None, None),
        ({"cached_tokens": None, "prefill_tokens": None}, None, None),
        ({"queue_wait_ms": 151.0}, 266, 0.0),
    ],
    ids=["computed", "all cached", "no first frame", "no turn", "not told", "a wait longer than the whole"],
)
def test_how_fast_the_engine_computes_is_told_without_what_others_made_a_request_wait(
    metrics: BridgeMetrics,
    registry: CollectorRegistry,
    changes: dict[str, Any],
    tokens: int | None,
    seconds: float | None,
) -> None:
    served = {name: value for name, value in OF_CLASS.items() if name != "prefix_class"}

    metrics.ended(outcome(**changes))

    assert registry.get_sample_value("prefixbus_bridge_prefill_tokens_total", served) == tokens
    found = registry.get_sample_value("prefixbus_bridge_prefill_seconds_total", served)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_cancelled_one_has_no_end_to_end_time(metrics: BridgeMetrics, registry: CollectorRegistry) -> None:
    metrics.ended(outcome(status="cancelled", error="cancelled", cached_tokens=None, ttft_ms=None))

    assert of(registry, "requests_total", status="cancelled", error="cancelled") == 1
    assert of(registry, "request_seconds_count", warmth="unknown") is None


def test_what_a_message_says_makes_no_new_labels(metrics: BridgeMetrics, registry: CollectorRegistry) -> None:
    def series() -> int:
        return sum(len(metric.samples) for metric in registry.collect())

    metrics.ended(outcome(prefix_class="mine", decision="theirs"))
    before = series()

    for number in range(5):
        metrics.ended(outcome(prefix_class=f"mine-{number}", decision=f"theirs-{number}", request_id=str(number)))

    assert series() == before


def readings() -> dict[str, Callable[[], float]]:
    return {name: lambda: 1.0 for name in GAUGES | COUNTERS}


def test_evicted_blocks_are_counted_by_their_age(metrics: BridgeMetrics, registry: CollectorRegistry) -> None:
    evictions = Evictions()
    metrics.watch(readings(), evictions)

    for age_s in (0.5, 1.0, 2.0, 100.0, 1e6, -3.0):
        evictions.add(age_s)

    def up_to(bound: str) -> float | None:
        return registry.get_sample_value("prefixbus_bridge_evicted_block_age_seconds_bucket", {"le": bound})

    assert [up_to(bound) for bound in ("1.0", "5.0", "60.0", "300.0", "86400.0", "+Inf")] == [3, 4, 4, 5, 5, 6]
    assert registry.get_sample_value("prefixbus_bridge_evicted_block_age_seconds_count") == 6
    assert registry.get_sample_value("prefixbus_bridge_evicted_block_age_seconds_sum") == 1000103.5


@pytest.mark.parametrize("change", [{"mine": lambda: 1.0}, {}], ids=["one too many", "one missing"])
def test_a_number_that_nobody_reads_is_found_at_once(
    metrics: BridgeMetrics, change: dict[str, Callable[[], float]]
) -> None:
    known = readings()
    if not change:
        del known["running"]

    with pytest.raises(ValueError, match=r"running|mine"):
        metrics.watch(known | change, Evictions())
