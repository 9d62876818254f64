"""What a gateway tells Prometheus. Labels are bounded: endpoints and results are words of ours, statuses are few.

Owns: names, labels, buckets.   Must not know: how anything is counted.   Source: DESIGN 11."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..bus.readings import Readings

PREFIX = "prefixbus_gateway_"
GAUGES = {
    "in_hand": "Requests in progress.",
    "connections": "Connections to the bus, one for each API key in use.",
}
COUNTERS = {"resumed": "Answers that went on at another worker after theirs was lost."}


class GatewayMetrics:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests by endpoint (chat, completions, models, other) and HTTP status; 499: the client went away.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.failed_streams = Counter(
            f"{PREFIX}failed_streams",
            "Answers that failed after their status was sent, by error code.",
            ["code"],
            registry=registry,
        )
        self.first_seconds = Histogram(
            f"{PREFIX}first_seconds",
            "From a request's headers to the first chunk of its answer.",
            ["endpoint"],
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=registry,
        )
        self.keys = Counter(
            f"{PREFIX}keys",
            "New API keys (connected, denied, denied_again: known as wrong, failed: no verdict, refused: too many).",
            ["result"],
            registry=registry,
        )

    def watch(self, read: Mapping[str, Callable[[], float]]) -> None:
        """What to read at each scrape, by name. :raises ValueError: a name is missing, or none of ours."""
        self._registry.register(Readings(PREFIX, GAUGES, COUNTERS, read))
