"""What the auditor and the callout tell Prometheus. Labels are bounded: kinds of facts, and results.

Owns: names and labels.   Must not know: how anything is counted."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class AuditMetrics:
    """The reader's of the record."""

    def __init__(self, registry: CollectorRegistry, fill: Callable[[], float]) -> None:
        self.facts = Counter("prefixbus_audit_facts", "Facts on the record, by kind.", ["kind"], registry=registry)
        self.unreadable = Counter(
            "prefixbus_audit_unreadable",
            "Records that are not facts of ours, or of another than their subject's.",
            registry=registry,
        )
        Gauge("prefixbus_audit_fill_ratio", "Bytes of the record over its bound.", registry=registry).set_function(fill)


class CalloutMetrics:
    """The authentication's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.authorizations = Counter(
            "prefixbus_authorizations",
            "Tenants' connections, by result: allowed, denied, failed.",
            ["result"],
            registry=registry,
        )
