# ruff: noqa: TID251 - a shell: it waits on the event loop
"""The worker's block changes on the bus: events in order, and dumps when asked.

`seq` counts what should have been sent, whether or not it could be: after an outage the directory sees the gap and asks
for a dump. One task writes, so the stream's order is the story's.

Owns: seq, dump ids, what is waiting to be written.   Must not know: how the index comes by its content.
Source: DESIGN 5 (Order and loss) and 7; facts/index.md (batches near 16 events)."""

import asyncio
from collections.abc import Iterator

from ..bus import subjects
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable
from ..bus.messages import KV, VERSION, Cleared, KvDump, KvEvents, Removed, Stored
from .blocks import BlockIndex, Op, split

_SHARD = 0
_OPS_A_MESSAGE = 16
_KEYS_A_MESSAGE = 4096


class KvFeed:
    """`begin` an incarnation, `add` changes, `ask_dump`; `run` writes."""

    def __init__(self, bus: Bus, worker: str, index: BlockIndex) -> None:
        self.seq = 0
        self.unsent = 0
        """Messages that the bus did not take."""
        self.dumps = 0
        self._bus = bus
        self._worker = worker
        self._index = index
        self._subject = subjects.kv(_SHARD, worker)
        self._incarnation = 0
        self._waiting: list[Op] = []
        self._dump_asked = False
        self._dump_id = 0
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<KvFeed incarnation {self._incarnation} seq {self.seq}, {len(self._waiting)} waiting>"

    def begin(self, incarnation: int) -> None:
        """A new life: all that is held is told again, from seq 1. 0: no life, nothing is told."""
        self._incarnation = incarnation
        self.seq = 0
        self._dump_id = 0
        self._dump_asked = False
        self._waiting = list(self._index.runs()) if incarnation else []
        self._wake.set()

    def add(self, ops: list[Op]) -> None:
        if self._incarnation and ops:
            self._waiting.extend(ops)
            self._wake.set()

    def ask_dump(self) -> None:
        """Askers that come while one is waiting share it."""
        self._dump_asked = True
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._write_events()
            if self._dump_asked and self._incarnation:
                self._dump_asked = False
                await self._write_dump()

    async def _write_events(self) -> None:
        while self._waiting:
            ops, self._waiting = self._waiting, []
            incarnation = self._incarnation
            for message_ops in in_messages(ops):
                if incarnation != self._incarnation:
                    return
                self.seq += 1
                await self._send(KvEvents(VERSION, self._worker, incarnation, self.seq, message_ops))

    async def _write_dump(self) -> None:
        # Nothing waits here, and nothing can come before the dump is taken: it is true for this seq.
        incarnation, seq = self._incarnation, self.seq
        parts = self._index.dump()
        self._dump_id += 1
        dump_id = self._dump_id
        for number, runs in enumerate(parts):
            if incarnation != self._incarnation or not self._bus.connected:
                return
            await self._send(KvDump(VERSION, self._worker, incarnation, seq, dump_id, number, len(parts), runs))
        self.dumps += 1

    async def _send(self, message: KvEvents | KvDump) -> None:
        try:
            self._bus.send(self._subject, KV.encode(message))
        except BusUnavailable:
            self.unsent += 1


def in_messages(ops: list[Op]) -> Iterator[list[Stored | Removed | Cleared]]:
    """The changes in messages of bounded size, in order."""
    message: list[Stored | Removed | Cleared] = []
    room = _KEYS_A_MESSAGE
    for op in ops:
        for piece in _pieces(op):
            keys = 0 if isinstance(piece, Cleared) else len(piece.keys) // 8
            if message and (len(message) == _OPS_A_MESSAGE or keys > room):
                yield message
                message, room = [], _KEYS_A_MESSAGE
            message.append(piece)
            room -= keys
    if message:
        yield message


def _pieces(op: Op) -> Iterator[Op]:
    if isinstance(op, Stored):
        yield from split(op, _KEYS_A_MESSAGE, _KEYS_A_MESSAGE)
    elif isinstance(op, Removed):
        for start in range(0, len(op.keys), 8 * _KEYS_A_MESSAGE):
            yield Removed(op.ns_id, op.keys[start : start + 8 * _KEYS_A_MESSAGE])
    else:
        yield op
