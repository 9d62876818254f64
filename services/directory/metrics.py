"""What a replica of the directory tells Prometheus. Labels are bounded: reasons, kinds and turns are ours.

What it does not count: how its predictions turned out (worker_bridge/metrics.py), how long a look-up takes with its way
there and back (router/metrics.py).

Owns: names, labels, buckets.   Must not know: how anything is counted.   Source: DESIGN 11."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..bus.readings import Readings

PREFIX = "prefixbus_directory_"
GAUGES = {
    "shard": "Which shard this is.",
    "lag_events": "Stream sequences between the shard's last event and the last applied.",
    "entries": "Block keys known.",
    "bytes": "Estimated bytes of the index.",
    "namespaces": "Namespaces with entries.",
    "announced_requests": "Dispatches whose blocks are announced.",
    "announced_blocks": "Blocks announced and not yet settled.",
    "workers": "Workers with a lease.",
    "incomplete_workers": "Workers whose story has holes.",
    "popular_prefixes": "Prefixes whose reuse is counted.",
    "doubts": "Workers that outcomes made us trust less, by namespace.",
}
COUNTERS = {"shed_pairs": "(worker, block) facts given up for lack of memory."}
SNAPSHOT_GAUGES = {
    "snapshot_age_seconds": "Age of the shard's newest snapshot known here, -1 if none is.",
    "snapshot_bytes": "Its size.",
}


class DirectoryMetrics:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.lookup_seconds = Histogram(
            f"{PREFIX}lookup_seconds",
            "Time to answer one look-up, without its way there and back.",
            registry=registry,
            buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.05),
        )
        self.events = Counter(f"{PREFIX}events", "Event messages taken in.", registry=registry)
        self.dumps_asked = Counter(
            f"{PREFIX}dumps_asked", "Dumps asked of workers, by reason.", ["reason"], registry=registry
        )
        self.leases = Counter(
            f"{PREFIX}leases", "Turns of workers' leases: new, suspect, lost, back.", ["turn"], registry=registry
        )
        self.warm_orders = Counter(
            f"{PREFIX}warm_orders",
            "Prefixes that an idle worker was wanted to compute, by kind.",
            ["kind"],
            registry=registry,
        )
        self.snapshots = Counter(f"{PREFIX}snapshots", "Snapshots written here.", registry=registry)
        self.snapshot_failures = Counter(
            f"{PREFIX}snapshot_failures", "Snapshots not read or not written.", ["of"], registry=registry
        )

    def watch(self, read: Mapping[str, Callable[[], float]]) -> None:
        """What to read at each scrape, by name. :raises ValueError: a name is missing, or none of ours."""
        self._registry.register(Readings(PREFIX, GAUGES, COUNTERS, read))

    def watch_snapshot(self, read: Mapping[str, Callable[[], float]]) -> None:
        """The same of the shard's snapshot."""
        self._registry.register(Readings(PREFIX, SNAPSHOT_GAUGES, {}, read))
