"""The study's pictures.

Owns: what is drawn and how.   Must not know: how it is measured."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import compare, plan
from .cells import OURS

_SHARES = [step / 200 for step in range(201)]


def draw(measured: compare.Known, folder: Path) -> None:
    """:raises KeyError: a table of the plan was not measured."""
    by_key = {table.key: table for table in plan.TABLES}
    _cdfs(by_key["published"], measured, folder / "ttft-cdf.png")
    _load(by_key["load"], measured, folder / "ttft-load.png")
    _cache(by_key["cache"], measured, folder / "reuse-cache.png")
    _delay(by_key["events"], measured, folder / "ttft-delay.png")


def _style(policy: str, number: int) -> dict[str, Any]:
    """The `number`th of a picture: with ten colours, the next ten are dashed."""
    if policy == OURS:
        return {"color": "black", "linewidth": 2.2, "zorder": 5}
    return {"color": f"C{number % 10}", "linewidth": 1.2, "linestyle": "-" if number < 10 else "--"}


def _cdfs(table: plan.Table, measured: compare.Known, file: Path) -> None:
    wanted = ["conv x1", "conv x5", "syn x6", "tau x20"]
    figure, places = plt.subplots(2, 2, figsize=(11, 8))
    for place, label in zip(places.flat, wanted, strict=True):
        row = dict(table.rows)[label]
        for number, (policy, column) in enumerate(table.columns):
            one = measured[table.cells_of(row, column)[0].key]
            if one.ttft_ms:
                place.plot([max(1.0, ms) for ms in one.ttft_ms], _SHARES, label=policy, **_style(policy, number))
        place.set_xscale("log")
        place.set_title(label)
        place.set_xlabel("TTFT, ms")
        place.set_ylabel("share of requests")
        place.grid(alpha=0.3)
    places.flat[0].legend(fontsize=7)
    _save(figure, file)


def _lines(place: Axes, table: plan.Table, measured: compare.Known, prefix: str, name: str, xs: list[float]) -> None:
    rows = [row for label, row in table.rows if label.startswith(prefix)]
    for number, (policy, column) in enumerate(table.columns):
        values = [compare.figure(table, row, column, name, measured) for row in rows]
        known = [(x, value.mean) for x, value in zip(xs, values, strict=True) if value is not None]
        place.plot([x for x, _ in known], [y for _, y in known], marker="o", label=policy, **_style(policy, number))
    place.grid(alpha=0.3)
    place.set_title(prefix.strip())


def _load(table: plan.Table, measured: compare.Known, file: Path) -> None:
    figure, places = plt.subplots(1, 2, figsize=(12, 5))
    for place, traffic in zip(places, ("conv", "syn"), strict=True):
        speeds = [row["speed"] for _, row in table.rows if row["traffic"] == traffic]
        _lines(place, table, measured, f"{traffic} ", "mean", speeds)
        place.set_yscale("log")
        place.set_xlabel("arrivals, times as fast as recorded")
        place.set_ylabel("mean TTFT, ms")
    places[0].legend(fontsize=8)
    _save(figure, file)


def _cache(table: plan.Table, measured: compare.Known, file: Path) -> None:
    figure, places = plt.subplots(1, 2, figsize=(12, 5))
    sizes = [tokens / (1 << 20) for tokens in plan.CACHE_SIZES]
    for place, prefix in zip(places, ("conv x1", "syn x1"), strict=True):
        _lines(place, table, measured, prefix, "reuse", sizes)
        place.set_xscale("log", base=2)
        place.set_xlabel("KV of a worker, million tokens (8 workers)")
        place.set_ylabel("token reuse")
    places[0].legend(fontsize=8)
    _save(figure, file)


def _delay(table: plan.Table, measured: compare.Known, file: Path) -> None:
    figure, place = plt.subplots(figsize=(7, 5))
    delays = [(label, column) for label, column in table.columns if label.endswith(" late")]
    for label, row in table.rows:
        values = [compare.figure(table, row, column, "mean", measured) for _, column in delays]
        base = values[0]
        if base is not None:
            place.plot(
                [name for name, _ in delays],
                [100 * (value.mean / base.mean - 1) if value else float("nan") for value in values],
                marker="o",
                label=label,
            )
    place.set_ylabel("mean TTFT to that without delay, %")
    place.set_xlabel("KV events reach the directory")
    place.grid(alpha=0.3)
    place.legend(fontsize=8)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
