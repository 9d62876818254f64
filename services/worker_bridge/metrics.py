"""What a bridge tells Prometheus: what each attempt measured, and what its worker holds.

What was decided, and why, is the router's to count (router/metrics.py). A bridge has one model, one template and one
pool, so these labels have one value here and tell workers apart where all are added up; of the others, whatever comes
from outside is one of a known set (bus/labels.py).

Owns: names, labels, buckets.   Must not know: how anything is counted.   Source: DESIGN 11."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..bus import labels
from ..bus.blockkeys import warmth
from ..bus.messages import Outcome
from ..bus.readings import Readings
from .evictions import Evictions

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)

PREFIX = "prefixbus_bridge_"
GAUGES = {
    "running": "Requests that have their first token.",
    "waiting": "Accepted requests that do not.",
    "held_back": "Those whose turn with the engine has not come.",
    "attempts": "Attempts that have not ended.",
    "warming": "1 while an ordered prefix is computed.",
    "prompt_tokens": "Prompt tokens of all accepted requests.",
    "queue_ms": "Prefill work ahead of a newcomer.",
    "held_blocks": "Keys of ours that the engine holds.",
    "foreign_blocks": "Blocks held under salts that are not ours.",
    "kv_occupancy_ratio": "Blocks held over what the engine has room for; 0 if it does not say.",
    "kv_pinned_ratio": "Prompt tokens of accepted requests over what the engine has room for; 0 if it does not say.",
    "story_complete": "1 if all the engine's events were heard.",
    "engine_event_lag_seconds": "Age of the last event batch when heard.",
    "incarnation": "The worker's current life, 0 if none.",
    "kv_seq": "Block events published in this life.",
}
COUNTERS = {
    "cache_clears": "Times that all the worker held was void at once: a reset, an engine's end, lost events.",
    "engine_sessions": "Connections to the engine's events.",
    "engine_event_gaps": "Gaps in the engine's events.",
    "engine_batches": "Event batches heard.",
    "engine_events_unknown": "Events of unknown kinds.",
    "foreign_batches": "Event batches under another topic than the engine's: other engines', passed over.",
    "blocks_malformed": "Stored blocks that could not be read.",
    "blocks_of_unknown_parents": "Stored blocks whose parent is unknown.",
    "blocks_of_other_tiers": "Block events of other tiers.",
    "kv_messages_unsent": "Block events that the bus did not take.",
    "dumps": "Dumps written.",
    "heartbeats": "Heartbeats sent.",
    "heartbeats_skipped": "Heartbeats that the bus did not take.",
    "hits_unverified": "Answers whose reuse could not be checked.",
    "engine_silent": "Answers that no block event followed.",
}


class _Evicted(Collector):
    """The histogram that the index keeps."""

    def __init__(self, evictions: Evictions) -> None:
        self._evictions = evictions

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(
            f"{PREFIX}evicted_block_age_seconds",
            "How long blocks had been held when the engine evicted them; what a reset took is not in it.",
            buckets=self._evictions.buckets(),
            sum_value=self._evictions.total_s,
        )


class BridgeMetrics:
    """Fed once a request."""

    def __init__(self, registry: CollectorRegistry, block_size: int, *, model: str, pool: str, template: str) -> None:
        """`template` is the version of the served model's template, as the config has it."""
        self._registry = registry
        self._block_size = block_size
        self._served = model, pool or labels.NONE, labels.template(template)
        served = "model", "pool", "template"

        def counter(name: str, text: str, *names: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, names, registry=registry)

        def histogram(name: str, text: str, *names: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, names, registry=registry, buckets=_SECONDS)

        of_class = *served, "prefix_class"
        self._requests = labels.series(
            counter("requests", "Attempts that ended, by how.", *of_class, "status", "error")
        )
        self._input = labels.series(
            counter(
                "input_tokens",
                "Prompt tokens of answered requests: cached (prefill avoided) or uncached (computed).",
                *of_class,
                "source",
            )
        )
        self._predictions = labels.series(
            counter(
                "predicted_tokens",
                "Predicted against actual cached tokens of answered requests: met (predicted and there), missed "
                "(predicted and not there), unforeseen (there and not predicted).",
                *of_class,
                "verdict",
            )
        )
        self._output = labels.series(counter("output_tokens", "Tokens generated.", *of_class))
        self._ttft = labels.series(histogram("ttft_seconds", "Acceptance to first frame.", *of_class, "warmth"))
        self._total = labels.series(
            histogram("request_seconds", "Acceptance to the end of answered requests.", *of_class, "warmth")
        )
        self._queue_wait = labels.series(
            histogram("queue_wait_seconds", "Others' prefills before its own.", *of_class, "decision")
        )
        self._prefill_tokens = labels.series(
            counter(
                "prefill_tokens", "Prompt tokens that the engine computed for requests with a first frame.", *served
            )
        )
        self._prefill_seconds = labels.series(
            counter("prefill_seconds", "How long it took for them, what decodes beside it included.", *served)
        )
        self._refusals = counter("dispatches_refused", "Dispatches not taken, by reason.", "reason")
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
        self.engine_prompts = counter(
            "engine_prompts",
            "Chats whose prompt the engine was to take from us, by whether it did: same, differs, or untold.",
            "model",
            "verdict",
        )
        self.warm_orders = counter("warm_orders", "Orders to compute a prefix, by result.", "result")
        self.warm_tokens = counter("warm_tokens", "Tokens of ordered prefixes, by source.", "source")

    def watch(self, read: Mapping[str, Callable[[], float]], evictions: Evictions) -> None:
        """What to read at each scrape, by name. :raises ValueError: a name is missing, or none of ours."""
        self._registry.register(Readings(PREFIX, GAUGES, COUNTERS, read))
        self._registry.register(_Evicted(evictions))

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def given_back(self, error: str) -> None:
        self._given_back.labels(error).inc()

    def broken(self, error: str) -> None:
        self._broken.labels(error).inc()

    def ended(self, outcome: Outcome) -> None:
        of_class = *self._served, labels.prefix_class(outcome.prefix_class)
        cached = outcome.cached_tokens
        kind = "unknown" if cached is None else warmth(outcome.prompt_tokens, cached, self._block_size)
        self._requests(*of_class, outcome.status, outcome.error or labels.NONE).inc()
        self._output(*of_class).inc(outcome.output_tokens)
        if cached is not None:
            self._input(*of_class, "cached").inc(cached)
            self._input(*of_class, "uncached").inc(max(0, outcome.prompt_tokens - cached))
            predicted = max(0, outcome.predicted_tokens)
            met = min(predicted, cached)
            self._predictions(*of_class, "met").inc(met)
            self._predictions(*of_class, "missed").inc(predicted - met)
            self._predictions(*of_class, "unforeseen").inc(cached - met)
        if outcome.ttft_ms is not None:
            self._ttft(*of_class, kind).observe(outcome.ttft_ms / 1000)
        if outcome.queue_wait_ms is not None:
            self._queue_wait(*of_class, labels.decision(outcome.decision)).observe(outcome.queue_wait_ms / 1000)
        if outcome.ttft_ms is not None and outcome.queue_wait_ms is not None and outcome.prefill_tokens is not None:
            self._prefill_tokens(*self._served).inc(outcome.prefill_tokens)
            self._prefill_seconds(*self._served).inc(max(0.0, outcome.ttft_ms - outcome.queue_wait_ms) / 1000)
        if outcome.status == "ok":
            self._total(*of_class, kind).observe(outcome.total_ms / 1000)
