# ruff: noqa: TID251 - a shell: it waits on the event loop
"""Whether the engine is what this worker's config says it is: asked before every registration, of its salts also when
they are in doubt.

- It serves the configured model (an address may have been taken over by another engine), and its adapters.
- A prompt repeated under one salt hits exactly its full blocks, so caching is on, cached tokens are reported and the
  block size divides ours; the same prompt under another salt hits nothing, so salts isolate. If the engine looks for
  blocks beyond its own memory, too (a KV connector), so does a long prompt under one salt after the other.
- It publishes what it computes, in blocks of our size.

Owns: the questions.   Must not know: NATS, what is done about a refusal.   Source: DESIGN 7 (Handshake)."""

import array
import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..bus.errors import EngineFailed, WorkerRefused
from .engine import Engine, Generation
from .misfits import foreign_events, misfits, no_events, shortcomings, wrong_block_size

_PATIENCE_S = 30.0
_EVENTS_WITHIN_S = 5.0
_POLL_S = 0.02
# Longer than any chunk that a connector keeps (LMCache: 256 tokens), short enough for an engine on a CPU.
_TIER_TOKENS = 1024
# The first computes it; it is found in the third at the latest, if it is written within so long.
_TIER_LOOKS = 3
_TIER_WRITES_S = 0.3
_LEAKS = "The engine reuses blocks across salts: tenants would share its cache."
_ISOLATE = "Use a vLLM whose cache_salt works in every tier, or take the KV connector out."
# Token ids that every vocabulary has.
_FIRST_ID, _IDS = 5, 100


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine said of itself, 0 for what it did not say; `shortcomings` are sentences, see misfits. `topic` is
    what it marks its events with, None if it did not say."""

    version: str
    max_model_len: int
    kv_tokens: int
    shortcomings: list[str]
    topic: str | None = None


class EventsSeen(Protocol):
    """What was heard of the engine since its session began."""

    @property
    def batches(self) -> int: ...

    @property
    def engine_block_size(self) -> int:
        """Of the last stored block; 0 before any."""
        ...

    @property
    def foreign_topics(self) -> tuple[str, str] | None:
        """What another engine's batches were marked with, and what the engine marks its own with; None: none came."""
        ...


async def examine(
    engine: Engine,
    *,
    model: str,
    adapters: Sequence[str] = (),
    block_size: int,
    one_time_salt: Callable[[], str],
) -> EngineFacts:
    """Before its events are listened to: so that an engine that publishes none is told what else it lacks. `adapters`
    are what the engine calls those that it must serve.

    :raises WorkerRefused: it does not match; the sentences say in what, all of it at once.

    :raises EngineFailed, WorkerLost: it cannot be asked now."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            served = {each.id: each for each in await engine.served_models()}
            settings = await engine.settings()
            found = misfits(settings, served, model=model, adapters=adapters, block_size=block_size)
            max_model_len = 0
            if model in served:
                max_model_len = served[model].max_model_len or 0
                is_said = settings.caches_prefixes is False or settings.block_size not in (0, block_size)
                found += await _probe_cache(engine, block_size, one_time_salt, is_said=is_said)
            if found:
                raise WorkerRefused(" ".join(each.sentence() for each in found))
            await _probe_other_tiers(engine, block_size, max_model_len, one_time_salt)
            sources = settings.event_sources
            return EngineFacts(
                version=settings.version,
                max_model_len=max_model_len,
                kv_tokens=settings.kv_blocks * block_size,
                shortcomings=shortcomings(settings),
                topic=sources[0].topic if sources else None,
            )
    except TimeoutError as exc:
        raise EngineFailed("The engine does not answer.") from exc


async def hear_events(engine: Engine, events: EventsSeen, block_size: int, one_time_salt: Callable[[], str]) -> None:
    """Once its events are listened to: that they come, in our blocks.

    :raises WorkerRefused: they do not.   :raises EngineFailed, WorkerLost: it cannot be asked now."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            before = events.batches
            await _cached_tokens(engine, block_size + 1, one_time_salt())
            await _await_events(events, before, block_size)
    except TimeoutError as exc:
        raise EngineFailed("The engine does not answer.") from exc


async def probe_isolation(
    engine: Engine, block_size: int, max_model_len: int, one_time_salt: Callable[[], str]
) -> None:
    """Of an engine that shook hands before, and is in doubt since.

    :raises WorkerRefused: salts do not isolate.   :raises EngineFailed, WorkerLost: it cannot be asked now."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await _repeat(engine, block_size, one_time_salt)
            await _probe_other_tiers(engine, block_size, max_model_len, one_time_salt)
    except TimeoutError as exc:
        raise EngineFailed("The engine does not answer.") from exc


async def _probe_cache(
    engine: Engine, block_size: int, one_time_salt: Callable[[], str], *, is_said: bool
) -> list[WorkerRefused]:
    """What a repeated prompt shows. `is_said`: its settings say already why nothing is hit."""
    again = await _repeat(engine, block_size, one_time_salt)
    if again is None:
        return [
            WorkerRefused(
                "The engine does not report cached tokens.", remedy="Start it with --enable-prompt-tokens-details."
            )
        ]
    if again != block_size and not is_said:
        return [
            WorkerRefused(
                f"A repeated prompt of {block_size + 1} tokens hit {again} of them, not {block_size}.",
                remedy="Start the engine with --enable-prefix-caching and the config's block_size.",
            )
        ]
    return []


async def _repeat(engine: Engine, block_size: int, one_time_salt: Callable[[], str]) -> int | None:
    """What a prompt of one block and a token finds of itself under its own salt; under another it finds nothing."""
    one = one_time_salt()
    first = await _cached_tokens(engine, block_size + 1, one)
    again = await _cached_tokens(engine, block_size + 1, one)
    elsewhere = await _cached_tokens(engine, block_size + 1, one_time_salt())
    if first or elsewhere:
        raise WorkerRefused(_LEAKS, remedy=_ISOLATE)
    return again


async def _probe_other_tiers(
    engine: Engine, block_size: int, max_model_len: int, one_time_salt: Callable[[], str]
) -> None:
    """What lies behind the engine's own memory may keep long prompts alone, and write them when it has time."""
    if not await engine.has_another_tier():
        return
    room = min(_TIER_TOKENS, max_model_len - block_size) if max_model_len else _TIER_TOKENS
    # Far from where blocks begin and end: vLLM's ExampleConnector looks for a prompt of whole blocks and a token under
    # another name than it has kept it by.
    tokens = room // block_size * block_size + block_size // 2 + 1
    for _ in range(_TIER_LOOKS):
        if await _cached_tokens(engine, tokens, one_time_salt()):
            raise WorkerRefused(f"{_LEAKS} It does so in a tier beyond its own memory.", remedy=_ISOLATE)
        await asyncio.sleep(_TIER_WRITES_S)


async def _cached_tokens(engine: Engine, tokens: int, salt: str) -> int | None:
    """How much of a prompt so long came from cache; None if the engine does not say."""
    ids = array.array("I", (_FIRST_ID + number % _IDS for number in range(tokens)))
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
        foreign = events.foreign_topics
        raise no_events() if foreign is None else foreign_events(*foreign)
    if events.engine_block_size != block_size:
        raise wrong_block_size(events.engine_block_size, block_size)
