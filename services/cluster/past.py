"""What streams tell of the past: the directory's state at a sequence, what workers removed, and their lives.

Owns: which sequences can be asked for.   Must not know: what events do to a directory."""

from typing import NamedTuple

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BadRequest
from ..bus.messages import Cleared, KvDump, KvEvents, MessageInvalid, Removed
from ..bus.objects import Objects
from ..directory import snapshot
from ..directory.snapshot import Header
from ..lab.mismatches import Life, Removal
from ..lab.rebuild import Rebuild
from . import streams
from .records import AgedOut


class State(NamedTuple):
    """All events up to a sequence, taken in. `unreadable` are the subjects of those that no directory would take."""

    rebuild: Rebuild
    unreadable: list[str]


async def directory_at(bus: Bus, seq: int, shards: int) -> State:
    """The directory after stream sequence `seq`, if it has so many shards.

    :raises BadRequest: there is no such message yet.   :raises AgedOut: not all before it are there any more, and no
    snapshot stands for them.   :raises SnapshotUnusable, ObjectDamaged: a snapshot cannot be read."""
    stream = subjects.STREAM_KV_EVENTS
    held = await streams.state(bus, stream)
    if seq > held.last_seq:
        newest = f"the newest is {held.last_seq}" if held.last_seq else "it is empty"
        raise BadRequest(f"{stream} has no message {seq} yet: {newest}.", field="--directory-at")
    rebuild = Rebuild()
    unreadable: list[str] = []
    begun: dict[int, int] = {}
    if held.first_seq > 1:
        for shard, (header, data) in (await _snapshots(bus, held.first_seq, seq, shards)).items():
            rebuild.begin(shard, data)
            begun[shard] = header.stream_seq
    async for kept in streams.read(bus, stream, subjects.ALL_KV, last_seq=seq):
        shard = subjects.kv_shard(kept.subject)
        if kept.seq <= begun.get(shard, 0):
            continue
        if (event := _event(kept)) is not None:
            rebuild.take(shard, event)
        else:
            unreadable.append(kept.subject)
    return State(rebuild, unreadable)


async def _snapshots(bus: Bus, first_seq: int, seq: int, shards: int) -> dict[int, tuple[Header, bytearray]]:
    """By shard: each true for a moment up to `seq`, and followed by events that are all there."""
    stream, objects = subjects.STREAM_KV_EVENTS, Objects(bus, subjects.BUCKET_DIRECTORY)
    gone = f"{stream} now begins at message {first_seq}: what came before is gone"
    life = (await bus.stream_state(stream)).made
    found: dict[int, tuple[Header, bytearray]] = {}
    for shard in range(shards):
        kept = await objects.find(snapshot.name_of(shard, shards))
        data = await objects.read(kept.object) if kept is not None else bytearray()
        if data and (header := snapshot.header_of(data)).stream == life and header.stream_seq >= first_seq - 1:
            found[shard] = (header, data)
    if len(found) < shards:
        raise AgedOut(
            f"{gone}, and there is no snapshot to begin with yet. The oldest state that can be rebuilt is that of the "
            "next snapshot.",
            field="--directory-at",
        )
    oldest = max(header.stream_seq for header, _ in found.values())
    if seq < oldest:
        raise AgedOut(
            f"{gone}. The oldest state that can be rebuilt is that of the snapshots, after message {oldest}.",
            field="--directory-at",
        )
    return found


class Told(NamedTuple):
    """What was told of workers in a time, and since when events are kept (Unix seconds; None: there are none).
    `unreadable` are the subjects of events that no directory would take."""

    removals: list[Removal]
    lives: list[Life]
    kept_since: float | None
    unreadable: list[str]


async def told(bus: Bus, since: float | None, until: float | None) -> Told:
    """The removals of all workers from `since` to `until`, and their lives until then.

    A life begins with its registration, of which the last few of a worker are kept; of an older one its first event is
    heard of."""
    stream = subjects.STREAM_KV_EVENTS
    removals: list[Removal] = []
    unreadable: list[str] = []
    lives: dict[tuple[str, int], Life] = {}
    async for kept in streams.read(bus, subjects.STREAM_WORKERS, f"$KV.{subjects.BUCKET_WORKERS}.*", until=until):
        worker = kept.subject.rpartition(".")[2]
        lives[worker, kept.seq] = Life(worker, kept.seq, kept.at)
    async for kept in streams.read(bus, stream, subjects.ALL_KV, since=since, until=until):
        event = _event(kept)
        if event is None:
            unreadable.append(kept.subject)
            continue
        lives.setdefault((event.worker, event.incarnation), Life(event.worker, event.incarnation, kept.at))
        if isinstance(event, KvEvents):
            removals += [Removal(event.worker, ns_id, kept.at) for ns_id in _emptied(event)]
    return Told(removals, list(lives.values()), await streams.first_at(bus, stream), unreadable)


def _event(kept: streams.Kept) -> KvEvents | KvDump | None:
    """None of what a directory drops, too, and counts: it cannot be read, or speaks for another worker."""
    try:
        event = messages.KV.decode(kept.data)
    except MessageInvalid:
        return None
    return event if kept.subject.rpartition(".")[2] == event.worker else None


def _emptied(event: KvEvents) -> dict[str, None]:
    """The namespaces (hex) of which blocks were removed; "" for all of them."""
    found: dict[str, None] = {}
    for op in event.ops:
        if isinstance(op, Removed):
            found[op.ns_id.hex()] = None
        elif isinstance(op, Cleared):
            found[""] = None
    return found
