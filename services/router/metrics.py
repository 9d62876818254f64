"""What the router counts: decisions, and what came of each request.

What an attempt measured (tokens, times, predicted against actual) is its bridge's to count (worker_bridge/metrics.py).
Labels are bounded: decisions, error codes, reasons, workers that live, and of whatever comes from outside a few values
(bus/labels.py); never requests or prefixes.

Owns: names, labels, buckets.   Must not know: how anything is decided.   Source: DESIGN 11."""

from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..bus import labels
from ..bus.errors import PrefixbusError, by_code
from .fleet import Fleet

_SHORT_MS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_US = (10, 25, 50, 100, 250, 500, 1000, 2500)

OfClass = tuple[str, str, str, str]
"""Model, pool, template, prefix class."""


class WorkerGauges(Collector):
    """What this router believes of each worker that it has not lost, read when someone scrapes."""

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._now = now

    def collect(self) -> Iterator[Metric]:
        in_flight = _of_workers("in_flight", "Dispatches there of all routers.")
        reported = _of_workers("reported", "Requests there by its last heartbeat.")
        queue_ms = _of_workers("queue_ms", "Prefill work there: as reported, and booked since.")
        for name, worker in self._fleet.living().items():
            in_flight.add_metric([name], len(worker.bookings))
            reported.add_metric([name], worker.load.running + worker.load.waiting)
            queue_ms.add_metric([name], worker.queue_ms(self._now()))
        yield from (in_flight, reported, queue_ms)


def _of_workers(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prefixbus_router_worker_{name}", text, labels=["worker"])


class Metrics:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry, models: Collection[str]) -> None:
        """`models` are those in the config; a request for any other is for `other`."""
        self._models = frozenset(models)
        self._pools = labels.Few()
        self._templates = labels.Few()
        of_class = "model", "pool", "template", "prefix_class"
        self._requests = labels.series(
            Counter(
                "prefixbus_router_requests",
                "Requests that ended, by the last decision (none: before any) and error code (ok: none).",
                [*of_class, "decision", "code"],
                registry=registry,
            )
        )
        self.left_warm_worker = Counter(
            "prefixbus_router_left_warm_worker",
            "Requests whose last decision passed over a worker that holds more of the prompt: for its queue "
            "(max-wait), since it was later (margin), for its memory (memory), or since it could not be chosen (busy, "
            "draining, suspect, lost, tried).",
            [*of_class, "reason"],
            registry=registry,
        )
        self._prefill_saved_ms = labels.series(
            Counter(
                "prefixbus_router_prefill_saved_ms",
                "Prefill that cached tokens made needless, by the prices of the decision.",
                of_class,
                registry=registry,
            )
        )
        self._extra_queue_ms = labels.series(
            Counter(
                "prefixbus_router_extra_queue_ms",
                "Queue accepted beyond the shortest of all candidates, of the same requests: saved less this is net.",
                of_class,
                registry=registry,
            )
        )
        self.lookup_ms = Histogram(
            "prefixbus_router_lookup_ms", "Time to the directory's answer.", buckets=_SHORT_MS, registry=registry
        )
        self.lookup_failures = Counter(
            "prefixbus_router_lookup_failures", "Lookups without an answer: decided blind.", registry=registry
        )
        self.lookups_skipped = Counter(
            "prefixbus_router_lookups_skipped",
            "Requests decided blind without asking: the directory had not answered the last few, or had been wrong.",
            registry=registry,
        )
        self.decide_us = Histogram(
            "prefixbus_router_decide_us", "Time to find, price and rank the candidates.", buckets=_US, registry=registry
        )
        self.prefill_samples = Counter(
            "prefixbus_router_prefill_samples",
            "Ends of requests, by what they told of prefill times (contended: they were computed beside others).",
            ["verdict"],
            registry=registry,
        )
        self.failovers = Counter(
            "prefixbus_router_failovers", "Attempts given up, by reason.", ["reason"], registry=registry
        )
        self.ends_unheard = Counter(
            "prefixbus_router_ends_unheard",
            "Ends of accepted requests that were found out by asking the worker.",
            registry=registry,
        )
        self.waits = Counter(
            "prefixbus_router_waits",
            "Waits of requests for a worker that was late with its heartbeat.",
            registry=registry,
        )
        self.leases = Counter(
            "prefixbus_router_leases",
            "Workers that went silent, by how long (suspect: no new work; lost).",
            ["turn"],
            registry=registry,
        )
        self.clients_gone = Counter(
            "prefixbus_router_clients_gone",
            "Requests whose client had stopped listening before a worker accepted them.",
            registry=registry,
        )
        self.unheard = Counter(
            "prefixbus_router_dispatches_unheard",
            "Dispatches that nobody heard, and that were sent once more.",
            registry=registry,
        )
        self.foreign_answers = Counter(
            "prefixbus_router_foreign_answers",
            "Answers to dispatches and aborts, and outcomes, by another worker or life than the one addressed, or at an"
            " address that nobody was told.",
            registry=registry,
        )
        self.in_hand = Gauge(
            "prefixbus_router_in_hand", "Requests this router has taken and that have not ended.", registry=registry
        )
        self.in_flight = Gauge(
            "prefixbus_router_in_flight", "Dispatches of all routers, as this one knows them.", registry=registry
        )
        self.workers = Gauge("prefixbus_router_workers", "Workers this router has heard of.", registry=registry)
        self.keepalives = Counter(
            "prefixbus_router_keepalives", "Keep-alives sent while no bridge does.", registry=registry
        )
        self.policies_refused = Counter(
            "prefixbus_router_policies_refused",
            "Policies, canaries and shadows that were not valid; what was in force stayed.",
            registry=registry,
        )
        self.shadow_decisions = Counter(
            "prefixbus_router_shadow_decisions",
            "Decisions that a shadow policy made, too, by whether it chose the same worker (agrees, differs).",
            ["verdict"],
            registry=registry,
        )
        self.warm_orders = Counter(
            "prefixbus_router_warm_orders",
            "Orders to have a prefix computed, by kind and what became of them here.",
            ["kind", "result"],
            registry=registry,
        )
        self.remembered_bytes = Gauge(
            "prefixbus_router_remembered_bytes", "Of popular prefixes' tokens and keys.", registry=registry
        )
        self.journal_lost = Counter(
            "prefixbus_router_journal_lost", "Decision records that could not be stored.", registry=registry
        )

    def of_class(self, model: str, pool: str, template: str, prefix_class: str) -> OfClass:
        """The labels that say what kind of request it is; `pool` is that of the worker it was last sent to."""
        return (
            model if model in self._models else labels.OTHER,
            self._pools.of(pool),
            self._templates.of(labels.template(template)),
            labels.prefix_class(prefix_class),
        )

    def ended(self, of_class: OfClass, decision: str, code: str, left: str) -> None:
        """A request ended; `code` is empty if it ended well, `left` unless it left a warm worker."""
        kind = by_code(code) if code else None
        label = "ok" if kind is None else kind.code if code == kind.code else PrefixbusError.code
        self._requests(*of_class, labels.decision(decision), label).inc()
        if left:
            self.left_warm_worker.labels(*of_class, left).inc()

    def gained(self, of_class: OfClass, saved_ms: float, extra_ms: float) -> None:
        """An answer came whose engine said what it reused."""
        self._prefill_saved_ms(*of_class).inc(saved_ms)
        self._extra_queue_ms(*of_class).inc(extra_ms)
