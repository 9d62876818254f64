"""KV events as vLLM puts them on the wire: msgpack array [ts, [event, ...], dp_rank], each event a map with `type`.

Owns: the shapes and the order within a batch.   Must not know: sockets, sequence numbers.
Source: facts on vLLM 0.32 (events measured on the wire), its block pool for `extra_keys`."""

from collections.abc import Mapping

import msgspec

from .core import StepResult, Stored
from .sequence import TokenSequence

MEDIUM_GPU = "GPU"
"""What vLLM says for the KV memory of its own device, on CPU too."""

GROUP = 0
"""One KV cache group: every layer caches alike."""


ATTENTION = "full_attention"
"""What that group's layers are."""


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str | tuple[str, int]] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", omit_defaults=True, gc=False):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = 0


def events_of(result: StepResult, block_size: int, adapters: Mapping[str, int]) -> list[KvEvent]:
    """What a step has to report: a clearing before it, then removals (one event a copy), then what it stored."""
    events: list[KvEvent] = [AllBlocksCleared()] if result.cleared else []
    events += [BlockRemoved([key], MEDIUM_GPU, GROUP) for key in result.removed]
    events += [_stored(stored, block_size, adapters) for stored in result.stored]
    return events


def _stored(stored: Stored, block_size: int, adapters: Mapping[str, int]) -> BlockStored:
    request = stored.request
    sequence = request.sequence
    first, count = stored.first_block, len(stored.keys)
    tokens = []
    if isinstance(sequence, TokenSequence):
        tokens = sequence.ids[first * block_size : (first + count) * block_size].tolist()
    adapter = request.namespace.adapter
    # Hashes are made of tagged values, ("cache_salt", "..."); events tell them bare.
    every: list[str | tuple[str, int]] = [] if adapter is None else [adapter]
    extra: list[list[str | tuple[str, int]] | None] = [every or None] * count
    if isinstance(sequence, TokenSequence) and sequence.media:
        for number in range(count):
            extra[number] = [*every, *sequence.media_in((first + number) * block_size)] or None
    if first == 0 and request.namespace.salt is not None:
        extra[0] = [*(extra[0] or ()), request.namespace.salt]
    return BlockStored(
        block_hashes=stored.keys,
        parent_block_hash=stored.parent,
        token_ids=tokens,
        block_size=block_size,
        lora_id=None if adapter is None else adapters.get(adapter),
        medium=MEDIUM_GPU,
        lora_name=adapter,
        extra_keys=extra,
        group_idx=GROUP,
        kv_cache_spec_kind=ATTENTION,
    )
