"""Figures of several runs beside each other.

Owns: how figures are compared.   Must not know: how they are measured or shown."""

from prefixbus.lab.spread import Spread, spread

from .cells import Measured
from .plan import Fields, Table

Known = dict[str, Measured]


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
                "queue": figures.queue_ms.mean if figures.queue_ms else 0.0,
                "imbalance": figures.imbalance_requests,
                "lost": float(figures.requests - figures.ended.get("ok", 0)),
            }[name]
        )
    return spread(values)


def difference(ours: Spread, other: Spread) -> str:
    """Ours to the other's, in percent; "none" within the spread, which a single seed does not tell."""
    share = ours.against(other)
    alone = ", of one seed" if min(ours.count, other.count) == 1 else ""
    return "none" if share is None else f"{100 * share:+.1f} %{alone}"
