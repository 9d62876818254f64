"""The time in which others could have been heard: the clock that leases run on (DESIGN 5).

While the observer is cut off from the bus, or is itself stopped (SIGSTOP, a laptop's lid, a loop that is held up),
silence says nothing about others: this clock stands still, so that coming back nobody takes the whole fleet for dead.

Owns: one observer's listening time.   Must not know: whom it listens to, real clocks.
Units: seconds; `now` on any monotonic clock."""

import math

# The longest gap between two readings that is taken for time spent listening: between readings that come ten times a
# second, a longer one is a pause. Whoever was paused has yet to read what arrived meanwhile.
MAX_STEP_S = 0.25


class ListeningClock:
    """Starts at 0, listening. Read it several times a second: what passes unread is not counted beyond MAX_STEP_S."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._read_at = -math.inf
        self._cut = False

    @property
    def is_cut(self) -> bool:
        return self._cut

    def seconds(self, now: float) -> float:
        """Listening time up to `now`; an earlier `now` than the last one changes nothing."""
        passed = now - self._read_at
        if passed > 0:
            self._read_at = now
            if not self._cut and passed < math.inf:
                self._seconds += min(passed, MAX_STEP_S)
        return self._seconds

    def cut(self, now: float) -> None:
        """The bus is gone."""
        self.seconds(now)
        self._cut = True

    def back(self, now: float) -> None:
        self.seconds(now)
        self._cut = False

    def __repr__(self) -> str:
        return f"<ListeningClock {self._seconds:.1f} s{' cut off' if self._cut else ''}>"
