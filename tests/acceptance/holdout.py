"""Is one setting for all traffic more than a fit to it? Each trace is held out once: the setting that is best on the
others is chosen, and shown on the one that had no say.

Owns: that choice.   Must not know: how runs are made, how it is shown."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from prefixbus.lab.spread import Spread

from .compare import Known, figure
from .plan import SETTINGS, Fields, Table


class HeldOut(NamedTuple):
    """`row` is of the trace that was held out; mean TTFT there as shipped, by the setting that the others choose, and
    by the best of all settings. None: never ends."""

    row: str
    chosen: str
    shipped: Spread | None
    by_others: Spread | None
    best: Spread | None


def held_out(terms: Table, measured: Known) -> Iterator[HeldOut]:
    """Of a table whose columns begin with `SETTINGS`."""
    columns = dict(terms.columns)
    for label, row in terms.rows:
        others = [one for _, one in terms.rows if one["traffic"] != row["traffic"]]
        chosen = min((name for name, _ in SETTINGS), key=lambda name: _score(terms, others, columns[name], measured))
        means = [figure(terms, row, columns[name], "mean", measured) for name, _ in SETTINGS]
        yield HeldOut(
            row=label,
            chosen=chosen,
            shipped=means[0],
            by_others=figure(terms, row, columns[chosen], "mean", measured),
            best=min((one for one in means if one is not None), key=lambda one: one.mean, default=None),
        )


def _score(terms: Table, rows: list[Fields], column: Fields, measured: Known) -> float:
    """Logarithm of the geometric mean, a trace as much as another: their times differ tenfold."""
    by_trace: dict[str, list[float]] = {}
    for row in rows:
        value = figure(terms, row, column, "mean", measured)
        by_trace.setdefault(row["traffic"], []).append(math.inf if value is None else math.log(value.mean))
    return sum(sum(values) / len(values) for values in by_trace.values())
