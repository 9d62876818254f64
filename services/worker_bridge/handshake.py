# ruff: noqa: TID251 - a shell: it waits on the event loop
"""Whether the engine is what this worker's config says it is: asked before every registration.

- It serves the configured model (an address may have been taken over by another engine), and its adapters.
- A prompt repeated under one salt hits exactly its full blocks, so caching is on, cached tokens are reported and the
  block size divides ours; the same prompt under another salt hits nothing, so salts isolate.
- It publishes what it computes, in blocks of our size.

Owns: the questions.   Must not know: NATS, what is done about a refusal.   Source: DESIGN 7 (Handshake)."""

import array
import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..bus.errors import EngineFailed, WorkerRefused
from .engine import Engine, Generation

_PATIENCE_S = 30.0
_EVENTS_WITHIN_S = 5.0
_POLL_S = 0.02
# Token ids that every vocabulary has.
_FIRST_ID, _IDS = 5, 100


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine said of itself; 0 for what it did not say."""

    max_model_len: int
    kv_tokens: int


class EventsSeen(Protocol):
    """What was heard of the engine since its session began."""

    @property
    def batches(self) -> int: ...

    @property
    def engine_block_size(self) -> int:
        """Of the last stored block; 0 before any."""
        ...


async def shake_hands(
    engine: Engine,
    *,
    model: str,
    adapters: Sequence[str] = (),
    block_size: int,
    events: EventsSeen,
    one_time_salt: Callable[[], str],
) -> EngineFacts:
    """`adapters` are what the engine calls those that it must serve.

    :raises WorkerRefused: it does not match; the sentence says in what.

    :raises EngineFailed, WorkerLost: it cannot be asked now."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            served = {each.id: each for each in await engine.served_models()}
            if model not in served:
                raise WorkerRefused(
                    f"The engine serves {', '.join(sorted(served)) or 'nothing'}, not {model}.",
                    remedy="Start it with --served-model-name, or correct the worker's address.",
                )
            for adapter in adapters:
                if adapter not in served or served[adapter].parent != model:
                    raise WorkerRefused(
                        f"The engine serves no adapter {adapter} of {model}.",
                        remedy=f"Start it with --enable-lora --lora-modules {adapter}=PATH, or correct the config.",
                    )
            before = events.batches
            await _probe_cache(engine, block_size, one_time_salt)
            await _await_events(events, before, block_size)
            return EngineFacts(served[model].max_model_len or 0, await engine.kv_blocks() * block_size)
    except TimeoutError as exc:
        raise EngineFailed("The engine does not answer.") from exc


async def _probe_cache(engine: Engine, block_size: int, one_time_salt: Callable[[], str]) -> None:
    one, other = one_time_salt(), one_time_salt()
    first = await _cached_tokens(engine, block_size, one)
    again = await _cached_tokens(engine, block_size, one)
    elsewhere = await _cached_tokens(engine, block_size, other)
    if first or elsewhere:
        raise WorkerRefused(
            "The engine reuses blocks across salts: tenants would share its cache.",
            remedy="Use a vLLM whose cache_salt works in every tier, or take the KV connector out.",
        )
    if again is None:
        raise WorkerRefused(
            "The engine does not report cached tokens.", remedy="Start it with --enable-prompt-tokens-details."
        )
    if again != block_size:
        raise WorkerRefused(
            f"A repeated prompt of {block_size + 1} tokens hit {again} of them, not {block_size}.",
            remedy="Start the engine with --enable-prefix-caching and the config's block_size.",
        )


async def _cached_tokens(engine: Engine, block_size: int, salt: str) -> int | None:
    """How much of a prompt one token longer than a block came from cache; None if the engine does not say."""
    ids = array.array("I", (_FIRST_ID + number % _IDS for number in range(block_size + 1)))
    request = Generation(
        engine_request_id=f"probe-{salt[:16]}",
        tokens=ids.tobytes(),
        params={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        salt=salt,
    )
    cached: int | None = None
    async with engine.generate(request) as progress:
        async for step in progress:
            if step.usage is not None:
                cached = step.usage.cached_tokens
    return cached


async def _await_events(events: EventsSeen, before: int, block_size: int) -> None:
    give_up_at = asyncio.get_running_loop().time() + _EVENTS_WITHIN_S
    while events.batches == before or not events.engine_block_size:
        if asyncio.get_running_loop().time() > give_up_at:
            break
        await asyncio.sleep(_POLL_S)
    if events.batches == before:
        raise WorkerRefused(
            "The engine computes blocks and publishes no events.",
            remedy="Start it with --kv-events-config, its endpoint being this bridge's.",
        )
    if events.engine_block_size != block_size:
        raise WorkerRefused(
            f"The engine's blocks have {events.engine_block_size} tokens, the config says {block_size}.",
            remedy="Start it with --block-size, or correct block_size.",
        )
