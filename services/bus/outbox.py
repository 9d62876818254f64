# ruff: noqa: TID251 - a shell: it waits on the event loop
"""Records that must reach their stream, delivered in the background until they are acknowledged.

Each has a message id, so that however often it is sent the stream keeps one. Past GIVE_UP_S the stream would no longer
know the id: then it is given up, and whoever owns the outbox is told.

Owns: what is not acknowledged yet (at most MOST_PENDING).   Must not know: what is in a record."""

import asyncio
from collections.abc import Callable

import anyio.abc

from .connection import Bus
from .errors import BusUnavailable, PrefixbusError

# Below the streams' duplicate window of 120 s.
GIVE_UP_S = 100.0
MOST_PENDING = 8192
_RETRY_FIRST_S = 0.2
_RETRY_MAX_S = 2.0


class Outbox:
    """`put` records, which never waits; `idle` when all are delivered or given up. `on_failure(error, subject)` hears
    of each that is given up, too late or because too many wait already."""

    def __init__(
        self,
        bus: Bus,
        tasks: anyio.abc.TaskGroup,
        on_failure: Callable[[PrefixbusError, str], None],
        *,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._bus = bus
        self._tasks = tasks
        self._on_failure = on_failure
        self._give_up_s = give_up_s
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Outbox {self._pending} pending>"

    def put(self, subject: str, payload: bytes, msg_id: str) -> None:
        if self._pending >= MOST_PENDING:
            self._on_failure(BusUnavailable(f"{MOST_PENDING} records wait for acknowledgement already."), subject)
            return
        if not self._pending:
            self._idle.clear()
        self._pending += 1
        self._tasks.start_soon(self._deliver, subject, payload, msg_id)

    async def idle(self) -> None:
        await self._idle.wait()

    async def _deliver(self, subject: str, payload: bytes, msg_id: str) -> None:
        try:
            await self._until_acknowledged(subject, payload, msg_id)
        except PrefixbusError as exc:
            self._on_failure(exc, subject)
        finally:
            self._pending -= 1
            if not self._pending:
                self._idle.set()

    async def _until_acknowledged(self, subject: str, payload: bytes, msg_id: str) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._give_up_s
        delay = _RETRY_FIRST_S
        while True:
            try:
                await self._bus.publish_acked(subject, payload, msg_id=msg_id, attempts=1)
                return
            except BusUnavailable:
                if loop.time() + delay > give_up_at:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_MAX_S)
