"""Figures of several runs beside each other.

A difference smaller than the spread of either side over the seeds is said to be none.

Owns: how figures are compared.   Must not know: how they are measured or shown."""

import statistics
from typing import NamedTuple

from .cells import Measured
from .plan import Fields, Table

Known = dict[str, Measured]


class Spread(NamedTuple):
    """A figure over the seeds."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.0f}" if self.half_width < 0.5 else f"{self.mean:.0f} ± {self.half_width:.0f}"


def spread(values: list[float]) -> Spread:
    return Spread(statistics.fmean(values), (max(values) - min(values)) / 2)


def figure(table: Table, row: Fields, column: Fields, name: str, measured: Known) -> Spread | None:
    """None where a run never ended."""
    values = []
    for cell in table.cells_of(row, column):
        figures = measured[cell.key].figures
        if figures is None or figures.ttft_ms is None:
            return None
        values.append(
            {
                "mean": figures.ttft_ms.mean,
                "p50": figures.ttft_ms.p50,
                "p95": figures.ttft_ms.p95,
                "reuse": figures.token_reuse,
                "imbalance": figures.imbalance_requests,
            }[name]
        )
    return spread(values)


def difference(ours: Spread, other: Spread) -> str:
    """Ours to the other's, in percent; "none" within the spread."""
    if abs(ours.mean - other.mean) <= ours.half_width + other.half_width:
        return "none"
    return f"{100 * (ours.mean / other.mean - 1):+.1f} %"
