"""What vLLM says about its blocks, decoded from one ZMQ payload.

A payload is a msgpack array [ts, [event, ...], dp_rank]; each event is a map with `type`. Kinds of event this version
does not know are counted and skipped.

Owns: the shapes.   Must not know: sockets, sequence numbers, what an event means for us.
Units: token ids and block hashes as the engine gives them (hashes are u64, or 32 bytes); `ts` Unix seconds.
Source: facts/vllm.md, "KV events over ZMQ"."""

from typing import Any

import msgspec

from ..bus.errors import PrefixbusError

Hash = int | bytes


class EventsInvalid(PrefixbusError):
    """The engine's event batch cannot be read."""

    code = "engine_events_invalid"
    status = 502


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", gc=False):
    """A run of full blocks got cached, in chain order; `token_ids` are all their tokens, one block after another.

    `extra_keys` has one entry a block: None, or what went into its hash beside tokens. The salt stands raw in the first
    block of a prompt only."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", gc=False):
    """One physical copy of each of these went."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The prefix cache was reset."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True):
    """One payload: what could be read, and how many events of unknown kinds were skipped."""

    ts: float
    events: list[EngineEvent]
    skipped: int = 0


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[EngineEvent]


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Kind(msgspec.Struct, frozen=True):
    type: str


_KNOWN = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))

_batch = msgspec.msgpack.Decoder(_Batch)
_raw_batch = msgspec.msgpack.Decoder(_RawBatch)
_event = msgspec.msgpack.Decoder(EngineEvent)
_kind = msgspec.msgpack.Decoder(_Kind)


def decode(payload: bytes) -> Batch:
    """:raises EventsInvalid: not a batch, or an event of a known kind that is not what it should be."""
    try:
        batch = _batch.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _decode_one_by_one(payload)
    return Batch(batch.ts, batch.events)


def _decode_one_by_one(payload: bytes) -> Batch:
    events: list[EngineEvent] = []
    skipped = 0
    try:
        raw = _raw_batch.decode(payload)
        for each in raw.events:
            if _kind.decode(each).type in _KNOWN:
                events.append(_event.decode(each))
            else:
                skipped += 1
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise EventsInvalid(str(exc)) from exc
    return Batch(raw.ts, events, skipped)
