"""What the policy must reach on the study's figures, and whether it does.

Owns: the bars.   Must not know: how figures are measured or shown.   Source: DESIGN 12."""

from typing import NamedTuple

from prefixbus.lab.spread import Spread

from . import plan
from .cells import OURS
from .compare import Known, figure

# Rules of the bar "published": each at its published default.
AGAINST = ("round-robin", "least-loaded", "threshold", "overlap", "exploit-explore", "consistent-hash")
# Mean TTFT to the best overlap weight of the row, at most.
TUNED = {
    "conv x1": 0.98, "conv x2": 1.01, "conv x3": 1.01, "conv x4": 1.01, "conv x5": 0.95,
    "syn x1": 1.01, "syn x3": 1.01, "syn x5": 1.01, "syn x6": 0.95, "syn x7": 0.92,
}  # fmt: skip
# Of the way from the best overlap weight to the pooled LRU, with pulls: an ambition, no bar.
AMBITION, AMBITION_ROWS = 0.40, ("conv x1", "conv x5", "syn x6", "syn x7")


class Bar(NamedTuple):
    """`measured` to `limit`; at most that, or at least if `is_floor`. None: there is no figure, a run never ended.

    `chance`: how far seeds alone move it. `pooled`: where one LRU cache of all workers' memory, with free transfer,
    would be."""

    what: str
    limit: float
    measured: float | None
    is_floor: bool = False
    chance: float = 0.0
    pooled: float | None = None

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.is_floor else self.measured <= self.limit


def bars(tables: list[plan.Table], measured: Known) -> list[Bar]:
    """Those whose tables are among these."""
    by_key = {table.key: table for table in tables}
    some: list[Bar] = []
    if "published" in by_key:
        some += _published(by_key["published"], measured)
    if "published" in by_key and "overlap" in by_key:
        some += _tuned(by_key["overlap"], by_key["published"], measured)
    for key, column, limit in (
        ("routers", "8", 1.05),
        ("events", "10 s late", 1.05),
        ("estimate", "x0.5", 1.05),
        ("estimate", "x2", 1.05),
    ):
        if key in by_key:
            some += _columns(by_key[key], column, limit, measured)
    if "tiers" in by_key:
        some += _tiers(by_key["tiers"], measured)
    if "faults" in by_key:
        some += _faults(by_key["faults"], measured)
    if "scenarios" in by_key:
        some += _scenarios(by_key["scenarios"], measured)
    return some


def _chance(one: Spread | None, other: Spread | None) -> float:
    """Half the ranges of both, of their ratio."""
    if one is None or other is None:
        return 0.0
    return (one.width / one.mean + other.width / other.mean) / 2 * one.mean / other.mean


def _ratio(one: Spread | None, other: Spread | None) -> float | None:
    """Of two means; a rule that never ends is beaten by any."""
    if one is None:
        return None
    return 0.0 if other is None else one.mean / other.mean


def _ratio_to_ours(one: Spread | None, other: Spread | None) -> float | None:
    """Of two means, the other being ours under better circumstances: none, if that never ends."""
    return None if other is None else _ratio(one, other)


def _published(table: plan.Table, measured: Known) -> list[Bar]:
    row, columns = dict(table.rows)["conv x1"], dict(table.columns)
    some = []
    for other in AGAINST:
        for name, limit in (("mean", 0.86), ("p95", 0.91)):
            ours, theirs, pooled = (
                figure(table, row, columns[policy], name, measured) for policy in (OURS, other, "pooled-lru")
            )
            some.append(
                Bar(
                    f"conv x1, {name} TTFT to {other}",
                    limit,
                    _ratio(ours, theirs),
                    chance=_chance(ours, theirs),
                    pooled=None if pooled is None else _ratio(pooled, theirs),
                )
            )
    return some


def _tuned(table: plan.Table, published: plan.Table, measured: Known) -> list[Bar]:
    some = []
    for label, limit in TUNED.items():
        row = dict(table.rows)[label]
        ours, *others = [figure(table, row, column, "mean", measured) for _, column in table.columns]
        best = min((one for one in others if one is not None), key=lambda one: one.mean, default=None)
        pooled = None
        if label in dict(published.rows):
            pooled = figure(published, row, dict(published.columns)["pooled-lru"], "mean", measured)
        some.append(
            Bar(
                f"{label}, mean TTFT to overlap at its best weight",
                limit,
                _ratio(ours, best),
                chance=_chance(ours, best),
                pooled=None if pooled is None else _ratio(pooled, best),
            )
        )
    return some


class Closed(NamedTuple):
    """Mean TTFT of a row: of overlap at its best weight, of the pooled LRU, of ours with pulls."""

    row: str
    tuned: float
    pooled: float
    ours: float

    @property
    def share(self) -> float:
        return (self.tuned - self.ours) / (self.tuned - self.pooled)


def gap_closed(tables: list[plan.Table], measured: Known) -> list[Closed]:
    """How much of what placement could still gain is gained; rows in which a run never ended, or there is
    no gap, are left out."""
    by_key = {table.key: table for table in tables}
    overlap, tiers = by_key["overlap"], by_key["tiers"]
    some = []
    for label in AMBITION_ROWS:
        weights = [
            figure(overlap, dict(overlap.rows)[label], column, "mean", measured)
            for name, column in overlap.columns
            if name.startswith("overlap:")
        ]
        tuned = min((one.mean for one in weights if one is not None), default=None)
        row, columns = dict(tiers.rows)[label], dict(tiers.columns)
        pooled = figure(tiers, row, columns["pooled-lru"], "mean", measured)
        ours = figure(tiers, row, columns[f"{OURS}, pulls"], "mean", measured)
        if tuned is not None and pooled is not None and ours is not None and pooled.mean < tuned:
            some.append(Closed(label, tuned, pooled.mean, ours.mean))
    return some


def _columns(table: plan.Table, column: str, limit: float, measured: Known) -> list[Bar]:
    """Each row's mean under a fault, to that without."""
    columns = dict(table.columns)
    first = table.columns[0][1]
    return [
        Bar(
            f"{label}, {table.key} {column}: mean TTFT to {table.columns[0][0]}",
            limit,
            _ratio_to_ours(
                figure(table, row, columns[column], "mean", measured), figure(table, row, first, "mean", measured)
            ),
        )
        for label, row in table.rows
        if table.key != "estimate" or not label.startswith("tau")
    ]


def _tiers(table: plan.Table, measured: Known) -> list[Bar]:
    """A host tier against none, the rest the same."""
    row, columns = dict(table.rows)["conv x1"], dict(table.columns)
    some = []
    for with_tier, without in ((f"{OURS}, host tier of 4x", OURS), (f"{OURS}, both", f"{OURS}, pulls")):
        for name in ("mean", "p95"):
            one, other = (figure(table, row, columns[which], name, measured) for which in (with_tier, without))
            some.append(
                Bar(f"conv x1, {name} TTFT: {with_tier} to {without}", 0.90, _ratio_to_ours(one, other),
                    chance=_chance(one, other))
            )  # fmt: skip
    return some


def _faults(table: plan.Table, measured: Known) -> list[Bar]:
    rows, columns = dict(table.rows), dict(table.columns)
    some = []
    for label in ("conv x1, false directory", "syn x1, false directory"):
        row = rows[label]
        ours = figure(table, row, columns[OURS], "mean", measured)
        turns = figure(table, row, columns["round-robin"], "mean", measured)
        some.append(Bar(f"{label}: mean to round-robin", 1.0, _ratio(ours, turns)))
    return some


def _scenarios(table: plan.Table, measured: Known) -> list[Bar]:
    rows, columns = dict(table.rows), dict(table.columns)

    def of(label: str, policy: str, name: str) -> Spread | None:
        return figure(table, rows[label], columns[policy], name, measured)

    hot, new, sessions = "one hot prefix, near saturation", "never repeats", "sessions, one system prompt"
    reuse, imbalance = of(sessions, OURS, "reuse"), of(sessions, OURS, "imbalance")
    siblings = of("200 siblings at once", OURS, "reuse")
    return [
        Bar(f"{hot}: mean to round-robin", 1.0, _ratio(of(hot, OURS, "mean"), of(hot, "round-robin", "mean"))),
        Bar(f"{hot}: p95 to round-robin", 1.0, _ratio(of(hot, OURS, "p95"), of(hot, "round-robin", "p95"))),
        Bar(f"{new}: mean to least-loaded", 1.01, _ratio(of(new, OURS, "mean"), of(new, "least-loaded", "mean"))),
        Bar("200 siblings at once: token reuse", 0.75, siblings.mean if siblings else None, is_floor=True),
        Bar(f"{sessions}: token reuse", 0.82, reuse.mean if reuse else None, is_floor=True),
        Bar(f"{sessions}: busiest worker to mean", 2.0, imbalance.mean if imbalance else None),
    ]
