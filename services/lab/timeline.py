"""The virtual clock: a heap of what is to happen when, and nothing that waits.

Owns: the time, the order of events (equal times in the order they were asked for).
Must not know: what happens.   Units: seconds since the start of the run."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call it then. :raises ValueError: that is past."""
        if when < self.now:
            raise ValueError(f"{when} is before {self.now}")
        heapq.heappush(self._due, (when, self._count, call, args))
        self._count += 1

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """One event after the other, while `goes_on` and there are any."""
        due = self._due
        while due and goes_on():
            self.now, _, call, args = heapq.heappop(due)
            call(*args)

    def run_until(self, when: float) -> None:
        """All that is due by then."""
        due = self._due
        while due and due[0][0] <= when:
            self.now, _, call, args = heapq.heappop(due)
            call(*args)
        self.now = max(self.now, when)

    def __repr__(self) -> str:
        return f"<Timeline {self.now:.3f} s, {len(self._due)} due>"


class Life:
    """The timeline to one that may fail: what it is waiting for when it does never happens."""

    def __init__(self, timeline: Timeline) -> None:
        self.is_over = False
        self._timeline = timeline

    @property
    def now(self) -> float:
        return self._timeline.now

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """:raises ValueError: that is past."""
        self._timeline.at(when, self._happens, call, args)

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._timeline.after(seconds, self._happens, call, args)

    def end(self) -> None:
        self.is_over = True

    def _happens(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_over:
            call(*args)

    def __repr__(self) -> str:
        return f"<Life {'over' if self.is_over else 'goes on'} {self._timeline!r}>"
