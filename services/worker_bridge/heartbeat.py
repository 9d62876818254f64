# ruff: noqa: TID251 - a shell: it waits on the event loop
"""The worker's heartbeat: its lease with the directory and the routers, and its load.

Sent on changes and at least every `period_s`; never kept for later. Small changes of a busy worker share a report,
since each costs every listener as much as it costs here (40 us); what would mislead a router does not wait. While it
may not be sent the lease runs out, and whoever answers for the requests here gives them to others: after such a lapse
none of them may go on, which `on_lapse` sees to.

Owns: when, and the count of reports.   Must not know: what is in a report.   Units: seconds, monotonic.
Source: DESIGN 5 (Leases) and 7."""

import asyncio
import contextlib
from collections.abc import Callable

from ..bus.clock import Clock
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable

# Between two reports; routers hear of each dispatch by its announcement.
_COALESCE_S = 0.02
# Between two reports if the second cannot wait.
_AT_ONCE_S = 0.005
# A change of the queue that may turn a decision: more than this, and more than a quarter.
_MUCH_MS = 20.0


def is_urgent(told_busy: bool, told_queue_ms: float, busy: bool, queue_ms: float) -> bool:
    """Whether the load is so different from what was told that the next report should not wait."""
    return (busy and not told_busy) or abs(queue_ms - told_queue_ms) > max(_MUCH_MS, told_queue_ms / 4)


class Heartbeat:
    """`report()` makes the message, None if the worker may not speak now; `on_sent` is called when it is on its way."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        subject: str,
        *,
        period_s: float,
        lapse_s: float,
        report: Callable[[], bytes | None],
        on_sent: Callable[[], None],
        on_lapse: Callable[[], None],
    ) -> None:
        self.sent = 0
        self.skipped = 0
        self._bus = bus
        self._clock = clock
        self._subject = subject
        self._period_s = period_s
        self._lapse_s = lapse_s
        self._report = report
        self._on_sent = on_sent
        self._on_lapse = on_lapse
        self._sent_at: float | None = None
        self._tried_at = -_COALESCE_S
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Heartbeat {self._subject} sent {self.sent}, skipped {self.skipped}>"

    def changed(self, *, urgent: bool = True) -> None:
        self._changed.set()
        if urgent:
            self._urgent.set()

    def restart(self) -> None:
        """A new lease begins with the next report."""
        self._sent_at = None
        self.changed()

    def lapsed(self) -> bool:
        """Whether others may have given the worker up since its last report."""
        return self._sent_at is not None and self._clock.now() - self._sent_at > self._lapse_s

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._changed.wait()
                    await self._gather()
            self._changed.clear()
            self._urgent.clear()
            self._beat()

    async def _gather(self) -> None:
        """Lets more changes come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._tried_at + _COALESCE_S - self._clock.now()):
                await self._urgent.wait()
        await asyncio.sleep(self._tried_at + _AT_ONCE_S - self._clock.now())

    def _beat(self) -> None:
        if self.lapsed():
            self._sent_at = None
            self._on_lapse()
        message = self._report()
        if message is None:
            return
        sent_at = self._tried_at = self._clock.now()
        try:
            self._bus.send(self._subject, message)
        except BusUnavailable:
            self.skipped += 1
            return
        self._sent_at = sent_at
        self.sent += 1
        self._on_sent()
