# ruff: noqa: TID251 - adapter: a queue and its writers
"""Gets decision records into the journal stream without holding up a request.

A record waits for the bus as long as it takes; over MAX_WAITING the newest are given up, and counted.

Owns: records that are not stored yet.   Must not know: what they say."""

import asyncio

import anyio

from ..bus import subjects
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable, PrefixbusError
from ..bus.messages import DECISION, DecisionRecord
from .metrics import Metrics

MAX_WAITING = 10_000
# An acknowledgement takes a fraction of a millisecond; so many in flight keep up with any rate a router can decide at.
WRITERS = 16
_RETRY_S = 0.25


class Recorder:
    """Run `write_all` in a task; `record` never waits."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._waiting: asyncio.Queue[DecisionRecord] = asyncio.Queue(MAX_WAITING)

    def record(self, record: DecisionRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except asyncio.QueueFull:
            self._metrics.journal_lost.inc()

    async def write_all(self) -> None:
        async with anyio.create_task_group() as writers:
            for _ in range(WRITERS):
                writers.start_soon(self._write)

    async def flush(self, timeout_s: float) -> None:
        """Returns when all is stored, or the time is over."""
        with anyio.move_on_after(timeout_s):
            await self._waiting.join()

    async def _write(self) -> None:
        while True:
            record = await self._waiting.get()
            try:
                await self._store(record)
            except PrefixbusError:
                self._metrics.journal_lost.inc()
            finally:
                self._waiting.task_done()

    async def _store(self, record: DecisionRecord) -> None:
        payload = DECISION.encode(record)
        subject = subjects.journal(record.request_id)
        while True:
            try:
                await self._bus.publish_acked(subject, payload, msg_id=f"{record.request_id}.{record.attempt}")
                return
            except BusUnavailable:
                await anyio.sleep(_RETRY_S)

    def __repr__(self) -> str:
        return f"<Recorder waiting={self._waiting.qsize()}>"
