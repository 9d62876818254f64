# ruff: noqa: TID251 - a shell: it waits on the event loop
"""The worker's block changes on the bus: to each shard of the directory, events in order and dumps when asked.

`seq` counts what should have been sent, whether or not it could be: after an outage the directory sees the gap and asks
for a dump. One task writes, so the stream's order is the story's.

Each shard is told of its own namespaces alone, with seqs and dumps of its own; what clears the whole cache goes to all.

A large story is told in slices, so that frames need not wait for it. A dump is of a snapshot; what changes meanwhile is
written between its parts, with the higher seqs of events that it does not cover.

Owns: seq, dump ids, what is waiting to be written.   Must not know: how the index comes by its content.
Source: DESIGN 5 (Order and loss) and 7; facts/index.md (batches near 16 events)."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..bus import namespace, subjects
from ..bus.errors import BusUnavailable
from ..bus.messages import KV, VERSION, Cleared, KvDump, KvEvents, Removed, Stored
from .blocks import DUMP_KEYS, SLICE_KEYS, BlockIndex, Op, Snapshot, split

_OPS_A_MESSAGE = 16
_KEYS_A_MESSAGE = 4096
# A message costs about 20 us.
_MESSAGES_IN_A_GO = 32


class Outlet(Protocol):
    """What the feed needs of the bus."""

    @property
    def connected(self) -> bool: ...

    def send(self, subject: str, payload: bytes = b"") -> None:
        """:raises BusUnavailable: not sent."""
        ...


class KvFeeds:
    """The feeds to all shards, as one."""

    def __init__(self, bus: Outlet, worker: str, index: BlockIndex, shards: int) -> None:
        self._shards = shards
        self._feeds = [KvFeed(bus, worker, index, shard=shard, shards=shards) for shard in range(shards)]

    def __repr__(self) -> str:
        return f"<KvFeeds {self._feeds}>"

    @property
    def seqs(self) -> list[int]:
        """By shard."""
        return [feed.seq for feed in self._feeds]

    @property
    def unsent(self) -> int:
        return sum(feed.unsent for feed in self._feeds)

    @property
    def dumps(self) -> int:
        return sum(feed.dumps for feed in self._feeds)

    def begin(self, incarnation: int) -> None:
        for feed in self._feeds:
            feed.begin(incarnation)

    def add(self, ops: list[Op]) -> None:
        if self._shards == 1:
            self._feeds[0].add(ops)
            return
        by_shard: list[list[Op]] = [[] for _ in self._feeds]
        for op in ops:
            if isinstance(op, Cleared):
                for mine in by_shard:
                    mine.append(op)
            else:
                by_shard[namespace.shard_of(op.ns_id, self._shards)].append(op)
        for feed, mine in zip(self._feeds, by_shard, strict=True):
            feed.add(mine)

    def ask_dump(self, shard: int) -> bool:
        """False: there is no such shard."""
        if not 0 <= shard < self._shards:
            return False
        self._feeds[shard].ask_dump()
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for feed in self._feeds:
                group.create_task(feed.run())


class KvFeed:
    """One shard's. `begin` an incarnation, `add` changes, `ask_dump`; `run` writes, in slices of so many keys."""

    def __init__(
        self,
        bus: Outlet,
        worker: str,
        index: BlockIndex,
        *,
        shard: int = 0,
        shards: int = 1,
        dump_keys: int = DUMP_KEYS,
        slice_keys: int = SLICE_KEYS,
    ) -> None:
        self.seq = 0
        self.unsent = 0
        """Messages that the bus did not take."""
        self.dumps = 0
        self._bus = bus
        self._worker = worker
        self._index = index
        self._dump_keys = dump_keys
        self._slice_keys = slice_keys
        self._shard = shard
        self._shards = shards
        self._subject = subjects.kv(shard, worker)
        self._incarnation = 0
        self._story: Snapshot | None = None
        self._waiting: list[Op] = []
        self._dump_asked = False
        self._dump_id = 0
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        state = f"incarnation {self._incarnation} seq {self.seq}, {len(self._waiting)} waiting"
        return f"<KvFeed of shard {self._shard} {state}>"

    def begin(self, incarnation: int) -> None:
        """A new life: all that is held is told again, from seq 1. 0: no life, nothing is told."""
        self._incarnation = incarnation
        self.seq = 0
        self._dump_id = 0
        self._dump_asked = False
        self._story = self._snapshot() if incarnation else None
        self._waiting = []
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
        """Returns when all is told, without a pause after the last word."""
        while self._story is not None or self._waiting:
            if self._story is not None:
                story, self._story = self._story, None
                await self._tell(story.runs())
            else:
                ops, self._waiting = self._waiting, []
                await self._tell(ops)

    async def _tell(self, ops: Iterable[Op | None]) -> None:
        incarnation = self._incarnation
        for number, message_ops in enumerate(in_messages(ops), 1):
            if message_ops is not None:
                self.seq += 1
                self._send(KvEvents(VERSION, self._worker, incarnation, self.seq, message_ops))
            if message_ops is None or not number % _MESSAGES_IN_A_GO:
                await asyncio.sleep(0)
                if incarnation != self._incarnation:
                    return

    async def _write_dump(self) -> None:
        # Nothing has waited since the last event was written: the snapshot is true for its seq.
        incarnation, seq, clears = self._incarnation, self.seq, self._index.clears
        snapshot = self._snapshot()
        parts = snapshot.parts(self._dump_keys)
        self._dump_id += 1
        dump_id, number = self._dump_id, 0
        for runs in snapshot.dump(self._dump_keys):
            if runs is not None:
                self._send(KvDump(VERSION, self._worker, incarnation, seq, dump_id, number, parts, runs))
                number += 1
                continue
            await asyncio.sleep(0)
            await self._write_events()
            # After a cleared cache the dump is void to whoever reads it.
            if incarnation != self._incarnation or clears != self._index.clears or not self._bus.connected:
                return
        self.dumps += 1

    def _snapshot(self) -> Snapshot:
        if self._shards == 1:
            return self._index.snapshot(self._slice_keys)
        return self._index.snapshot(
            self._slice_keys, lambda ns_id: namespace.shard_of(ns_id, self._shards) == self._shard
        )

    def _send(self, message: KvEvents | KvDump) -> None:
        try:
            self._bus.send(self._subject, KV.encode(message))
        except BusUnavailable:
            self.unsent += 1


def in_messages(ops: Iterable[Op | None]) -> Iterator[list[Stored | Removed | Cleared] | None]:
    """The changes in messages of bounded size, in order; pauses (None) stay pauses."""
    message: list[Stored | Removed | Cleared] = []
    room = _KEYS_A_MESSAGE
    for op in ops:
        if op is None:
            yield None
            continue
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
