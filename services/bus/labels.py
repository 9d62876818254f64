"""Values of metric labels: always one of few, whatever comes from outside.

A label's value makes a time series in whoever scrapes, for as long as the process lives. So what a client, a config of
another process or a message can say is one of a known set, or `other`; requests, prefixes and tenants are no labels.

Owns: the sets that more than one service speaks of.   Must not know: which metric has which label.
Source: DESIGN 11; prometheus.io/docs/practices/naming."""

from collections.abc import Callable
from typing import TypeVar

from prometheus_client import Counter, Histogram

M = TypeVar("M", Counter, Histogram)

PREFIX_CLASSES = ("system", "document", "session", "rag")
DECISIONS = (
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
FACTS = ("reuse", "warm", "forged_reply", "refused_namespace", "wrong_hit")
OTHER = "other"
NONE = "none"
"""What stands for an empty value: to Prometheus an empty label is none at all."""
# Revisions and pools come and go with deployments; beyond so many in one process they are one.
FEW = 64
_TEMPLATE_DIGITS = 12


def prefix_class(value: str) -> str:
    return value if value in PREFIX_CLASSES else OTHER


def fact(kind: str) -> str:
    return kind if kind in FACTS else OTHER


def decision(value: str) -> str:
    """By name; `none` of requests that ended before any."""
    return value if value in DECISIONS else OTHER if value else NONE


def template(version: str) -> str:
    """A template's version for people to compare: of a digest (`sha256:...`) the first 12 digits."""
    return version.removeprefix("sha256:")[:_TEMPLATE_DIGITS] or NONE


def series(metric: M) -> Callable[..., M]:
    """`metric.labels`, in a tenth of its 1.3 us for labels that were there before; positional, all of them texts.

    A request has a dozen of them. What is remembered is bounded as the labels are."""
    known: dict[tuple[str, ...], M] = {}

    def of(*values: str) -> M:
        found = known.get(values)
        if found is None:
            found = known[values] = metric.labels(*values)
        return found

    return of


class Few:
    """Lets the first `FEW` different values through, as themselves; later ones are `other`, empty ones `none`."""

    def __init__(self, most: int = FEW) -> None:
        self._most = most
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"<Few {len(self._seen)} of {self._most}>"

    def of(self, value: str) -> str:
        if value in self._seen:
            return value
        if not value:
            return NONE
        if len(self._seen) >= self._most:
            return OTHER
        self._seen.add(value)
        return value
