"""How many blocks the engine has evicted, and how long each had been held: counted, not remembered.

Owns: the histogram.   Must not know: blocks, clocks, Prometheus.   Units: seconds."""

from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class Evictions:
    """`add` is called once a block: about 0.2 us."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def __repr__(self) -> str:
        return f"<Evictions {sum(self._counts)} blocks>"

    def add(self, age_s: float) -> None:
        """Engines stamp their events themselves: a clock that was set back makes an age of 0."""
        age_s = max(0.0, age_s)
        self.total_s += age_s
        self._counts[bisect_left(BOUNDS_S, age_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, blocks up to it), as Prometheus counts them; the last has all."""
        return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self._counts), strict=True))
