"""The engine's numbers under vLLM's metric names, in a registry of their own.

Counters and gauges are read from the core when someone scrapes, so a step pays nothing for them; only the histograms
are fed, once a request.

Owns: names, labels, buckets.   Must not know: HTTP.   Units: seconds and ratios, as in vLLM."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .core import EngineCore
from .lifetimes import Evicted
from .tier import LeakyTier

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_LABELS = ("model_name", "engine")


class _CoreCollector(Collector):
    def __init__(self, core: EngineCore, model: str, tier: LeakyTier | None) -> None:
        self._core = core
        self._tier = tier
        self._labels = [model, "0"]

    def collect(self) -> Iterator[Metric]:
        core, totals = self._core, self._core.totals
        gauges = {
            "num_requests_running": len(core.running),
            "num_requests_waiting": len(core.waiting),
            "kv_cache_usage_perc": core.pool.used_count / core.pool.capacity,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = {
            "prefix_cache_queries": totals.prefix_queries,
            "prefix_cache_hits": totals.prefix_hits,
            "external_prefix_cache_queries": self._tier.queries if self._tier else 0,
            "external_prefix_cache_hits": self._tier.hits if self._tier else 0,
            "num_preemptions": totals.preemptions,
            "prompt_tokens": totals.prompt_tokens,
            "generation_tokens": totals.generated_tokens,
        }
        for name, value in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        sources = {
            "local_compute": totals.prompt_tokens - totals.prompt_tokens_cached,
            "local_cache_hit": totals.prompt_tokens_cached,
            "external_kv_transfer": 0,
        }
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "prompt tokens by source", labels=(*_LABELS, "source")
        )
        for source, value in sources.items():
            by_source.add_metric([*self._labels, source], value)
        yield by_source
        success = CounterMetricFamily(
            "vllm:request_success", "ended requests by reason", labels=(*_LABELS, "finished_reason")
        )
        for reason in ("stop", "length"):
            success.add_metric([*self._labels, reason], totals.finished.get(reason, 0))
        # vLLM counts nobody's going away: the reason is there, and stays at 0.
        success.add_metric([*self._labels, "abort"], 0)
        yield success
        # vLLM's info metric carries its whole cache config as labels; these are what others read.
        config = {
            "block_size": str(core.block_size),
            "num_gpu_blocks": str(core.pool.capacity + 1),
            "enable_prefix_caching": "True",
            "engine": "0",
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "cache config", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info
        wrong = CounterMetricFamily("engine_sim_wrong_hits", "blocks reused under a wrong origin", labels=_LABELS)
        wrong.add_metric(self._labels, totals.wrong_hits)
        yield wrong


class EngineMetrics:
    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", "time to first token")
        self._queue = histogram("request_queue_time_seconds", "time in the waiting queue")
        self._prefill = histogram("request_prefill_time_seconds", "from first scheduled to first token")
        self._decode = histogram("request_decode_time_seconds", "from first token to last")
        self._latency = histogram("e2e_request_latency_seconds", "from arrival to last token")

    def _histogram(self, name: str, text: str) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=_SECONDS)
        return metric.labels(self._model, "0")

    def read(self, core: EngineCore, tier: LeakyTier | None) -> None:
        """From now on scrapes tell this core's numbers, and those of the tier behind it."""
        self._registry.register(_CoreCollector(core, self._model, tier))

    def watch_evictions(self) -> Evicted:
        """Adds the histograms of `--kv-cache-metrics`; what feeds them."""
        lifetime = self._histogram("kv_block_lifetime_seconds", "from being taken to being evicted")
        idle = self._histogram("kv_block_idle_before_evict_seconds", "from the last use to being evicted")
        reuse_gap = self._histogram("kv_block_reuse_gap_seconds", "between two uses of a block")

        def evicted(lived: float, idled: float, gaps: Sequence[float]) -> None:
            lifetime.observe(lived)
            idle.observe(idled)
            for gap in gaps:
                reuse_gap.observe(gap)

        return evicted

    def first_token(self, waited_ms: float, queued_ms: float, prefill_ms: float) -> None:
        self._ttft.observe(waited_ms / 1000)
        self._queue.observe(queued_ms / 1000)
        self._prefill.observe(prefill_ms / 1000)

    def ended(self, total_ms: float, decode_ms: float) -> None:
        self._latency.observe(total_ms / 1000)
        self._decode.observe(decode_ms / 1000)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
