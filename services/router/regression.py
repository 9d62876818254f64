"""A few positive coefficients learned online by recursive least squares that nothing absurd can lead astray.

    measured = sum of theta_i * prior_i * x_i           every theta_i starts at 1

The error of a sample counts relative to what the prior says of it, so long and short prompts weigh the same. In the
information form of recursive least squares the prior is put back at the rate at which samples are forgotten: directions
that the samples say nothing about return to it, nothing winds up, and the matrix is never worse than the unit matrix. A
sample's surprise is clipped at a few times what surprises have been lately (Huber), which grows when they persist: an
outlier moves next to nothing, a real change is followed. What comes out is bounded whatever went in.

Owns: the sums.   Must not know: what is measured.   Arithmetic only, in a fixed order: the same on every machine.
Source: Kulhavy & Zarrop, "On a general concept of forgetting" (1993); Huber, "Robust estimation" (1964)."""

from collections.abc import Sequence

# Samples older than this many count for a third.
MEMORY = 256
# Against the prior's doubt of 100 %, a sample is good to 20 %: its weight.
_WEIGHT = 25.0
# The bound of each coefficient, as a factor of the prior: a 0.5B model on an H100 and a 70B one on an A100 are each
# about ten times off the profile that a model gets if none is named.
BOUND = 16.0
# Surprises are relative; a prior wrong by two is one of 1, which at the start passes uncut.
_FIRST_SURPRISE = 1 / 3
_LEAST_SURPRISE = 0.02
_MOST_SURPRISE = 1.0
_CLIP = 3.0
_SURPRISE_MEMORY = 32


class Regression:
    """`prior` are the coefficients before the first sample; one that is 0 stays 0."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        size = len(self._prior)
        self._theta = [1.0] * size
        self._information = [[1.0 if row == column else 0.0 for column in range(size)] for row in range(size)]
        self._pull = [0.0] * size
        self._surprise = _FIRST_SURPRISE

    def learn(self, features: Sequence[float], measured: float) -> bool:
        """Takes a sample in; False if it says nothing: not a positive number, or the prior expects nothing of it."""
        parts = [prior * feature for prior, feature in zip(self._prior, features, strict=True)]
        expected = 0.0
        for part in parts:
            expected += part
        # Also false of NaN.
        if not (0.0 < expected < 1e18 and 0.0 < measured < 1e18):
            return False
        shares = [part / expected for part in parts]
        predicted = _dot(shares, self._theta)
        limit = _CLIP * self._surprise
        surprise = min(limit, max(-limit, measured / expected - predicted))
        target = predicted + surprise - 1.0
        kept = 1.0 - 1.0 / MEMORY
        for row, share in enumerate(shares):
            for column, other in enumerate(shares):
                unit = 1.0 if row == column else 0.0
                old = self._information[row][column]
                self._information[row][column] = kept * old + unit / MEMORY + _WEIGHT * share * other
            self._pull[row] = kept * self._pull[row] + _WEIGHT * share * target
        self._theta = [min(BOUND, max(1.0 / BOUND, 1.0 + one)) for one in _solved(self._information, self._pull)]
        drift = abs(surprise) - self._surprise
        self._surprise = min(_MOST_SURPRISE, max(_LEAST_SURPRISE, self._surprise + drift / _SURPRISE_MEMORY))
        return True

    def predict(self, features: Sequence[float]) -> float:
        return _dot(self.coefficients, features)

    @property
    def coefficients(self) -> list[float]:
        return [prior * theta for prior, theta in zip(self._prior, self._theta, strict=True)]

    def __repr__(self) -> str:
        return f"<Regression {', '.join(f'{theta:.2f}' for theta in self._theta)} of its prior>"


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    total = 0.0
    for mine, theirs in zip(one, other, strict=True):
        total += mine * theirs
    return total


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """By elimination; without pivots, since the matrix is symmetric and at least the unit matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            for column in range(at, size + 1):
                rows[below][column] -= factor * rows[at][column]
    found = [0.0] * size
    for at in range(size - 1, -1, -1):
        rest = rows[at][size]
        for column in range(at + 1, size):
            rest -= rows[at][column] * found[column]
        found[at] = rest / rows[at][at]
    return found
