# ruff: noqa: TID251 - a shell: it keeps timers on the event loop
"""Records that must reach their stream, delivered in the background until they are acknowledged.

Each has a message id, so that however often it is sent the stream keeps one. Past GIVE_UP_S the stream would no longer
know the id: then it is given up, and whoever owns the outbox is told. No task waits for an acknowledgement: there is a
record for each request, and a task costs more than all else that is done for one here.

Owns: what is not acknowledged yet (at most MOST_PENDING).   Must not know: what is in a record."""

import asyncio
import functools
from collections.abc import Callable

import msgspec

from .connection import Bus
from .errors import BusUnavailable, PrefixbusError

# Below the streams' duplicate window of 120 s.
GIVE_UP_S = 100.0
MOST_PENDING = 8192
# A stream answers in 0.2 ms; each try waits this long for it.
PATIENCE_S = 5.0
_RETRY_FIRST_S = 0.2
_RETRY_MAX_S = 2.0


class _Record(msgspec.Struct):
    """`retry_s`: how long after a failure the next try comes."""

    subject: str
    payload: bytes
    msg_id: str
    give_up_at: float
    retry_s: float = _RETRY_FIRST_S


class Outbox:
    """`put` records, which never waits; `idle` when all are delivered or given up. `on_failure(error, subject)` hears
    of each that is given up, too late or because too many wait already."""

    def __init__(
        self, bus: Bus, on_failure: Callable[[PrefixbusError, str], None], *, give_up_s: float = GIVE_UP_S
    ) -> None:
        self._bus = bus
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
        self._pending += 1
        self._idle.clear()
        self._send(_Record(subject, payload, msg_id, asyncio.get_running_loop().time() + self._give_up_s))

    async def idle(self) -> None:
        await self._idle.wait()

    def _send(self, record: _Record) -> None:
        settled = functools.partial(self._settled, record)
        self._bus.store(record.subject, record.payload, settled, timeout_s=PATIENCE_S, msg_id=record.msg_id)

    def _settled(self, record: _Record, failure: PrefixbusError | None) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(failure, BusUnavailable) and loop.time() + record.retry_s <= record.give_up_at:
            loop.call_later(record.retry_s, self._send, record)
            record.retry_s = min(2 * record.retry_s, _RETRY_MAX_S)
            return
        self._pending -= 1
        if not self._pending:
            self._idle.set()
        if failure is not None:
            self._on_failure(failure, record.subject)
