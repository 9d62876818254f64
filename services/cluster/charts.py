"""Pictures of what the lab measured. matplotlib comes with the extra `dev`: nothing that serves requests needs it.

Owns: what is drawn and how.   Must not know: how it was measured."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..bus.errors import ConfigInvalid

# Points of a curve: more cannot be told apart in a picture.
_POINTS = 500


def require() -> None:
    """:raises ConfigInvalid: there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigInvalid(
            "needs matplotlib, which is not installed.",
            field="--plot",
            remedy="Install the extra dev: pip install 'prefixbus[dev]'.",
        )


def ttft_curves(curves: Mapping[str, Sequence[float]], title: str, file: Path) -> None:
    """Which share of requests had its first token by when; ms in ascending order, the first curve in black.

    :raises OSError: it cannot be written."""
    from matplotlib.figure import Figure

    # A figure of its own, not of pyplot: no window, nothing global.
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for number, (label, ordered) in enumerate(curves.items()):
        ranks = sorted({round(step * (len(ordered) - 1) / _POINTS) for step in range(_POINTS + 1)})
        shares = [(rank + 1) / len(ordered) for rank in ranks]
        # A logarithm has no 0.
        times = [max(0.1, ordered[rank]) for rank in ranks]
        if number == 0:
            axes.plot(times, shares, label=label, color="black", linewidth=2.2, zorder=5)
        else:
            axes.plot(times, shares, label=label, linewidth=1.2)
    axes.set(xscale="log", xlabel="TTFT, ms", ylabel="share of requests", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, format="png", dpi=120)
