# ruff: noqa: TID251 - a shell: it waits, and takes its chance
"""Where a shard's snapshot is kept: the object store, one object a shard, written by whichever replica comes first.

All replicas would write the same, so each waits a different while and writes only if no other has: about one writes in
`snapshot_every_s`. Two at once do no harm (bus/objects.py). What cannot be read is counted, said, and done without: the
workers are asked for dumps, as if there had never been one.

Owns: when a snapshot is written, and whether one is to be believed.   Must not know: what is in it (snapshot.py)."""

import random
from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import anyio.lowlevel

from ..bus import subjects
from ..bus.connection import WrongSequence
from ..bus.errors import BusUnavailable, PrefixbusError
from ..bus.objects import Object, ObjectDamaged, Objects
from ..bus.runtime import Runtime
from . import snapshot
from .ledger import Effect
from .metrics import DirectoryMetrics
from .shard import Shard
from .snapshot import Header, SnapshotUnusable

# Of `snapshot_every_s`: between which shares of it a replica waits, and how old another's snapshot must be.
_WAITS = (0.75, 1.25)
_DUE = 0.5
# Where nothing happens the same is not written again before it has this age; the bucket keeps it for two hours.
_REFRESHED_S = 1800.0
# What the clocks of two replicas may be apart.
_CLOCKS_DIFFER_S = 60.0
# Bytes of pieces made without a pause: 2048 keys, about 0.6 ms.
_SLICE_BYTES = 16 * 1024
# One that is replaced twice while it is read is not there any more: the next one is.
_READS = 3


class Shelf:
    """One replica's access to its shard's snapshot. `applied()` is the last stream sequence that is in its state."""

    def __init__(
        self, rt: Runtime, core: Shard, shard: int, applied: Callable[[], int], metrics: DirectoryMetrics
    ) -> None:
        self._rt = rt
        self._core = core
        self._shard = shard
        self._shards = rt.config.directory.shards
        self._every_s = rt.config.directory.snapshot_every_s
        self._applied = applied
        self._objects = Objects(rt.bus, subjects.BUCKET_DIRECTORY)
        self._name = snapshot.name_of(shard, self._shards)
        self._taken_at = 0.0
        self._bytes = 0
        self._metrics = metrics
        metrics.watch_snapshot({"snapshot_age_seconds": self._age_s, "snapshot_bytes": lambda: self._bytes})

    def __repr__(self) -> str:
        return f"<Shelf {self._name}>"

    async def load(self, perform: Callable[[Sequence[Effect]], None]) -> int | None:
        """Tells the ledger, which must have heard nothing yet, what is in the newest snapshot.

        The sequence after which the event stream is to be followed; None if there is no snapshot that can be used."""
        try:
            data = await self._read()
            if data is None:
                return None
            header = await self._checked(data)
            for effects in snapshot.restore(data, self._core.ledger, self._rt.clock.now()):
                perform(effects)
                await anyio.lowlevel.checkpoint()
        except (SnapshotUnusable, ObjectDamaged, BusUnavailable) as exc:
            self._metrics.snapshot_failures.labels("read").inc()
            self._rt.caught(exc, "the snapshot is not used; workers are asked for dumps", snapshot=self._name)
            return None
        self._taken_at, self._bytes = header.taken_at, len(data)
        fields = {"snapshot": self._name, "bytes": len(data), "stream_seq": header.stream_seq, "age_s": self._age_s()}
        self._rt.log.info("a snapshot was loaded", extra={"fields": fields})
        return header.stream_seq

    async def run(self) -> None:
        """Writes snapshots for ever."""
        chance = random.Random()
        while True:
            await anyio.sleep(self._every_s * chance.uniform(*_WAITS))
            try:
                await self.write_if_due()
            except WrongSequence:
                self._rt.log.info("another replica writes the snapshot")
            except PrefixbusError as exc:
                self._metrics.snapshot_failures.labels("write").inc()
                self._rt.caught(exc, "a snapshot was not written", snapshot=self._name)

    async def write_if_due(self) -> None:
        """Writes a snapshot unless there is one that is as good.

        :raises WrongSequence: another replica writes one just now.   :raises BusUnavailable: it could not be stored."""
        stream = await self._rt.bus.stream_state(subjects.STREAM_KV_EVENTS)
        newest = await self._newest()
        now = self._rt.clock.wall()
        said = _said(newest, stream.made)
        if newest is not None and said is not None:
            taken_at, theirs = said
            ours = self._applied()
            age_s = now - taken_at
            # One from the future is as old as it likes: somebody's clock was wrong.
            is_recent = -_CLOCKS_DIFFER_S <= age_s < (_REFRESHED_S if theirs == ours else self._every_s * _DUE)
            # One that is behind does not undo what another has done; what the stream never had, nobody has.
            if is_recent or ours < theirs <= stream.last_seq:
                self._taken_at, self._bytes = taken_at, newest.size
                return
        header = Header(self._shard, self._shards, stream.made, self._applied(), now)
        about = {"stream": header.stream, "stream_seq": str(header.stream_seq), "taken_at": repr(header.taken_at)}
        written = await self._objects.write(self._name, self._pieces(header), about)
        self._taken_at, self._bytes = header.taken_at, written.size
        self._metrics.snapshots.inc()

    async def _read(self) -> bytearray | None:
        for reads in range(_READS):
            found = await self._objects.find(self._name)
            if found is None:
                return None
            try:
                return await self._objects.read(found.object)
            except ObjectDamaged:
                again = await self._objects.find(self._name)
                if reads == _READS - 1 or again is None or again.seq == found.seq:
                    raise
        return None

    async def _checked(self, data: bytearray) -> Header:
        """:raises SnapshotUnusable: it is damaged, of another version, or of another shard or life of the stream."""
        header = snapshot.header_of(data)
        if (header.shard, header.shards) != (self._shard, self._shards):
            raise SnapshotUnusable(f"It is of shard {header.shard} of {header.shards}.")
        stream = await self._rt.bus.stream_state(subjects.STREAM_KV_EVENTS)
        if header.stream != stream.made or header.stream_seq > stream.last_seq:
            raise SnapshotUnusable("It is of events that the stream does not have: the stream was made anew.")
        for _ in snapshot.verify(data):
            await anyio.lowlevel.checkpoint()
        return header

    async def _newest(self) -> Object | None:
        try:
            found = await self._objects.find(self._name)
        except ObjectDamaged:
            return None
        return found.object if found is not None else None

    async def _pieces(self, header: Header) -> AsyncIterator[bytes]:
        made = 0
        for piece in snapshot.take(self._core.ledger, self._core.index, header):
            yield piece
            made += len(piece)
            if made >= _SLICE_BYTES:
                made = 0
                await anyio.lowlevel.checkpoint()

    def _age_s(self) -> float:
        return self._rt.clock.wall() - self._taken_at if self._taken_at else -1.0


def _said(newest: Object | None, stream: str) -> tuple[float, int] | None:
    """When it was taken, and after which event of this life of the stream; None if that is nowhere to be read."""
    if newest is None or newest.metadata.get("stream") != stream:
        return None
    try:
        return float(newest.metadata["taken_at"]), int(newest.metadata["stream_seq"])
    except (KeyError, ValueError):
        # As another version may write it.
        return None
