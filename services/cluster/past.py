"""What the stream KV_EVENTS tells of the past: the directory's state at a sequence, removals, lives of workers.

Owns: which sequences can be asked for.   Must not know: what events do to a directory."""

from typing import NamedTuple

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BadRequest
from ..bus.messages import Cleared, KvEvents, Removed
from ..lab.mismatches import Life, Removal
from ..lab.rebuild import Rebuild
from . import streams
from .records import AgedOut


async def directory_at(bus: Bus, seq: int) -> Rebuild:
    """All events up to and including stream sequence `seq`, taken in.

    :raises BadRequest: there is no such message yet.   :raises AgedOut: not all before it are there any more."""
    stream = subjects.STREAM_KV_EVENTS
    held = await streams.state(bus, stream)
    if seq > held.last_seq:
        newest = f"the newest is {held.last_seq}" if held.last_seq else "it is empty"
        raise BadRequest(f"{stream} has no message {seq} yet: {newest}.", field="--directory-at")
    if held.first_seq > 1:
        raise AgedOut(
            f"{stream} now begins at message {held.first_seq}: what came before is gone, and there is no snapshot. "
            "The oldest state that can be rebuilt is that of the first snapshot.",
            field="--directory-at",
        )
    rebuild = Rebuild()
    async for kept in streams.read(bus, stream, subjects.ALL_KV, last_seq=seq):
        rebuild.take(subjects.kv_shard(kept.subject), messages.KV.decode(kept.data))
    return rebuild


class Told(NamedTuple):
    """What was told of workers in a time, and since when events are kept (Unix seconds; None: there are none)."""

    removals: list[Removal]
    lives: list[Life]
    kept_since: float | None


async def told(bus: Bus, since: float | None, until: float | None) -> Told:
    """The removals and lives of all workers from `since` to `until`."""
    stream = subjects.STREAM_KV_EVENTS
    removals: list[Removal] = []
    lives: dict[tuple[str, int], Life] = {}
    async for kept in streams.read(bus, stream, subjects.ALL_KV, since=since, until=until):
        event = messages.KV.decode(kept.data)
        lives.setdefault((event.worker, event.incarnation), Life(event.worker, event.incarnation, kept.at))
        if isinstance(event, KvEvents):
            removals += [Removal(event.worker, ns_id, kept.at) for ns_id in _emptied(event)]
    return Told(removals, list(lives.values()), await streams.first_at(bus, stream))


def _emptied(event: KvEvents) -> dict[str, None]:
    """The namespaces (hex) of which blocks were removed; "" for all of them."""
    found: dict[str, None] = {}
    for op in event.ops:
        if isinstance(op, Removed):
            found[op.ns_id.hex()] = None
        elif isinstance(op, Cleared):
            found[""] = None
    return found
