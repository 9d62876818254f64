# ruff: noqa: TID251 - this is the one place where services meet the machine's clocks
"""The clock that shells hand to pure code: real in services, virtual in the lab and in tests.

Owns: nothing.   Must not know: who asks.   Units: seconds (float); `now` is monotonic, `wall` is Unix time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time. Differences are taken of `now`; deadlines that cross machines use `wall`."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


class RealClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to; `wall` runs beside `now` from `epoch`."""

    def __init__(self, start: float = 0.0, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
