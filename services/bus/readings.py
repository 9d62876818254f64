"""Numbers that others keep anyway, read when someone scrapes.

Must not know: what they mean.   Source: prometheus_client, custom collectors."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Readings(Collector):
    """`gauges` and `counters` are texts by name, without the common `prefix`; `read` has a reading of each."""

    def __init__(
        self,
        prefix: str,
        gauges: Mapping[str, str],
        counters: Mapping[str, str],
        read: Mapping[str, Callable[[], float]],
    ) -> None:
        """:raises ValueError: a name is not read, or not known."""
        strange = read.keys() ^ (gauges.keys() | counters.keys())
        if strange:
            raise ValueError(f"not read, or not known: {', '.join(sorted(strange))}")
        self._prefix = prefix
        self._gauges = gauges
        self._counters = counters
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, text in self._gauges.items():
            yield GaugeMetricFamily(self._prefix + name, text, value=self._read[name]())
        for name, text in self._counters.items():
            yield CounterMetricFamily(self._prefix + name, text, value=self._read[name]())
