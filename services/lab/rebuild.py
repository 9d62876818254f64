"""What a directory knew from events at a past moment of the event stream.

The production ledger and index, given the stream from its beginning, or from a snapshot on. Leases are in neither: a
worker that was lost and never came back is still here with what it held last. One that a snapshot left out, because its
story had holes, is here from its next event on.

Owns: nothing.   Must not know: where events come from.   Units: blocks. Names no namespace and no key (DESIGN 5)."""

import msgspec

from ..bus.messages import KvDump, KvEvents
from ..directory import snapshot
from ..directory.index import Index, Slots
from ..directory.ledger import Ledger

# No lease, expiry or dump request is decided here, so no time passes.
_NOW = 0.0


class Held(msgspec.Struct, frozen=True):
    """What a worker held in a shard. It may have held other blocks while its story is not `complete`."""

    shard: int
    worker: str
    incarnation: int
    last_event: int
    complete: bool
    gpu_blocks: int
    host_blocks: int


class _Shard:
    def __init__(self) -> None:
        self.index = Index(Slots())
        self.ledger = Ledger(self.index)


class Rebuild:
    """Takes the messages of KV_EVENTS in order, from the first one ever stored or, for a shard that began with a
    snapshot, from the one after that."""

    def __init__(self) -> None:
        self._shards: dict[int, _Shard] = {}

    def begin(self, shard: int, data: bytes | bytearray) -> None:
        """Takes a shard's snapshot, before all else of that shard. :raises SnapshotUnusable: it is damaged."""
        for _ in snapshot.verify(data):
            pass
        for _ in snapshot.restore(data, self._shards.setdefault(shard, _Shard()).ledger, _NOW):
            pass

    def take(self, shard: int, event: KvEvents | KvDump) -> None:
        ledger = self._shards.setdefault(shard, _Shard()).ledger
        if isinstance(event, KvEvents):
            ledger.events(event.worker, event.incarnation, event.seq, event.ops, _NOW)
        else:
            ledger.dump_chunk(
                event.worker, event.incarnation, event.dump_id, event.part, event.parts, event.seq, event.runs, _NOW
            )

    def held(self) -> list[Held]:
        """By shard and worker."""
        return [
            Held(
                number,
                view.worker,
                view.incarnation,
                view.last_seq,
                view.complete,
                _blocks(shard.index, view.slot),
                _blocks(shard.index, view.host_slot),
            )
            for number, shard in sorted(self._shards.items())
            for view in sorted(shard.ledger.views())
        ]

    @property
    def namespaces(self) -> int:
        """How many namespaces have blocks somewhere, a shard at a time."""
        return sum(shard.index.namespaces for shard in self._shards.values())


def _blocks(index: Index, slot: int | None) -> int:
    return index.held_by(slot) if slot is not None else 0
