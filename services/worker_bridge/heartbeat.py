# ruff: noqa: TID251 - a shell: it waits on the event loop
"""The worker's heartbeat: its lease with the directory and the routers, and its load.

Sent on every change (a burst makes one) and at least every `period_s`; never kept for later. While it may not be sent
the lease runs out, and whoever answers for the requests here gives them to others: after such a lapse none of them may
go on, which `on_lapse` sees to.

Owns: when, and the count of reports.   Must not know: what is in a report.   Units: seconds, monotonic.
Source: DESIGN 5 (Leases) and 7."""

import asyncio
import contextlib
from collections.abc import Callable

from ..bus.clock import Clock
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable

# Changes within this time make one report: at most 200 a second (a report costs about 40 us here, as much again at
# every listener).
_COALESCE_S = 0.005


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

    def __repr__(self) -> str:
        return f"<Heartbeat {self._subject} sent {self.sent}, skipped {self.skipped}>"

    def changed(self) -> None:
        self._changed.set()

    def restart(self) -> None:
        """A new lease begins with the next report."""
        self._sent_at = None
        self._changed.set()

    def lapsed(self) -> bool:
        """Whether others may have given the worker up since its last report."""
        return self._sent_at is not None and self._clock.now() - self._sent_at > self._lapse_s

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._changed.wait()
                    await asyncio.sleep(self._tried_at + _COALESCE_S - self._clock.now())
            self._changed.clear()
            await self._beat()

    async def _beat(self) -> None:
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
