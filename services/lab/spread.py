"""One figure over several runs of different seeds: its mean, how far the runs lie apart, and what is no difference.

Owns: that rule.   Must not know: what is measured, or in what."""

from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """`width` is from the lowest to the highest of `count` runs: 0 of a single one, which tells nothing of chance."""

    mean: float
    width: float
    count: int

    def against(self, other: "Spread") -> float | None:
        """How much this is above (or below) the other, as a share of it; None if there is no difference: it is not
        larger than either spread.

        :raises ZeroDivisionError: the other is 0."""
        difference = self.mean - other.mean
        if abs(difference) <= max(self.width, other.width):
            return None
        return difference / other.mean


def spread(numbers: Sequence[float]) -> Spread:
    """:raises ValueError: of none."""
    if not numbers:
        raise ValueError("no runs")
    return Spread(sum(numbers) / len(numbers), max(numbers) - min(numbers), len(numbers))
