"""The directory's event-derived state at a past sequence of KV_EVENTS, from the stream alone.

Owns: which sequences can be asked for.   Must not know: what events do to a directory."""

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BadRequest
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
