"""What a bridge tells Prometheus. Labels are bounded: whatever comes from outside is one of a known set, or `other`.

Owns: names, labels, buckets.   Must not know: how anything is counted.   Source: DESIGN 11."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..bus.blockkeys import warmth
from ..bus.messages import Outcome

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_CLASSES = frozenset(("system", "document", "session", "rag"))
_DECISIONS = frozenset(
    (
        "prefer-warm-worker",
        "partial-hit",
        "remote-pull",
        "home-worker",
        "balanced-cold",
        "cold-reserve",
        "spill-max-wait",
        "spill-margin",
        "spill-memory",
        "blind",
        "round-robin",
    )
)
_OTHER = "other"


class _Now(Collector):
    """Numbers that others keep, read when someone scrapes."""

    def __init__(
        self, gauges: dict[str, tuple[str, Callable[[], float]]], counters: dict[str, tuple[str, Callable[[], float]]]
    ) -> None:
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        for name, (text, read) in self._counters.items():
            yield CounterMetricFamily(name, text, value=read())


class BridgeMetrics:
    """Fed once a request."""

    def __init__(self, registry: CollectorRegistry, block_size: int) -> None:
        self._registry = registry
        self._block_size = block_size

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prefixbus_bridge_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"prefixbus_bridge_{name}", text, labels, registry=registry, buckets=_SECONDS)

        self._requests = counter("requests", "Attempts that ended, by how.", "model", "status", "error")
        self._refusals = counter("dispatches_refused", "Dispatches not taken, by reason.", "reason")
        self._input = counter("input_tokens", "Prompt tokens of answered requests.", "model", "prefix_class", "source")
        self._predicted = counter("predicted_tokens", "Cached tokens that decisions predicted.", "model")
        self._output = counter("output_tokens", "Tokens generated.", "model")
        self._ttft = histogram("ttft_seconds", "Acceptance to first frame.", "model", "prefix_class", "warmth")
        self._total = histogram("request_seconds", "Acceptance to the end.", "model", "warmth")
        self._queue_wait = histogram("queue_wait_seconds", "Others' prefills before its own.", "decision")
        self._given_back = counter("attempts_given_back", "Accepted, and given back before the first frame.", "error")
        self._broken = counter("attempts_broken", "Begun, and left to the router to end.", "error")
        self.superseded = counter("attempts_superseded", "Attempts that found another one answering their request.")
        self.unclaimed = counter("answers_unclaimed", "First attempts that answered though no claim was acknowledged.")
        # Whoever finds one says it under this name.
        self.wrong_hits = Counter(
            "prefixbus_wrong_hits",
            "Answers that reused blocks their namespace does not have. Must be 0.",
            registry=registry,
        )
        self.frames = counter("frames", "Chunks published.")
        self.frames_dropped = counter("frames_dropped", "Frames that the bus did not take.")
        self.keepalives = counter("keepalives", "Keep-alive chunks published.")
        self.clients_gone = counter("clients_gone", "Requests whose client had stopped listening.")

    def watch(
        self,
        gauges: dict[str, tuple[str, Callable[[], float]]],
        counters: dict[str, tuple[str, Callable[[], float]]],
    ) -> None:
        """Numbers to read at each scrape: name without prefix -> (text, reading)."""
        self._registry.register(_Now(_prefixed(gauges), _prefixed(counters)))

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def given_back(self, error: str) -> None:
        self._given_back.labels(error).inc()

    def broken(self, error: str) -> None:
        self._broken.labels(error).inc()

    def ended(self, outcome: Outcome) -> None:
        model = outcome.model
        self._requests.labels(model, outcome.status, outcome.error).inc()
        self._output.labels(model).inc(outcome.output_tokens)
        cached = outcome.cached_tokens
        kind = "unknown" if cached is None else warmth(outcome.prompt_tokens, cached, self._block_size)
        prefix_class = outcome.prefix_class if outcome.prefix_class in _CLASSES else _OTHER
        if outcome.cached_tokens is not None:
            uncached = max(0, outcome.prompt_tokens - outcome.cached_tokens)
            self._input.labels(model, prefix_class, "cached").inc(outcome.cached_tokens)
            self._input.labels(model, prefix_class, "uncached").inc(uncached)
            self._predicted.labels(model).inc(max(0, outcome.predicted_tokens))
        if outcome.ttft_ms is not None:
            self._ttft.labels(model, prefix_class, kind).observe(outcome.ttft_ms / 1000)
        if outcome.queue_wait_ms is not None:
            decision = outcome.decision if outcome.decision in _DECISIONS else _OTHER
            self._queue_wait.labels(decision).observe(outcome.queue_wait_ms / 1000)
        if outcome.status == "ok":
            self._total.labels(model, kind).observe(outcome.total_ms / 1000)


def _prefixed(numbers: dict[str, tuple[str, Callable[[], float]]]) -> dict[str, tuple[str, Callable[[], float]]]:
    return {f"prefixbus_bridge_{name}": number for name, number in numbers.items()}
