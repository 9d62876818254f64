"""What the engine did without us, and what we missed: counted, and never told as something else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from support.nats import eventually
from support.ports import free_port

from prefixbus.bus.messages import KvDump, KvEvents, Stored
from prefixbus.worker_bridge.service import Bridge

from .bridge_world import BLOCK, MODEL, EngineProcess, World, prompt, world


async def bypass(at: World | EngineProcess, tokens: list[int], **params: Any) -> int:
    """Asks the engine itself, as somebody who knows its address might; how much came from cache."""
    engine = at.engine if isinstance(at, World) else at
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "ignore_eos": True, **params}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{engine.url}/v1/completions", json=body) as response:
            found: int = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found


def told_blocks(at: World) -> int:
    events = [op for each in at.kv if isinstance(each, KvEvents) for op in each.ops]
    dumped = [run for each in at.kv if isinstance(each, KvDump) for run in each.runs]
    return sum(len(op.keys) // 8 for op in (*events, *dumped) if isinstance(op, Stored))


async def all_is_accounted_for(at: World, bridge: Bridge) -> None:
    """Every block that the engine has is one of ours or a foreign one."""
    index = bridge.index

    async def agrees() -> bool:
        return bool(index.held_keys + index.foreign == (await at.engine.stats())["keys_cached"])

    await eventually(agrees, f"what the engine has; {index!r}")
    assert index.complete
    assert (index.unused.malformed, index.unused.unknown_parent) == (0, 0)


async def test_blocks_of_requests_past_the_bridge_are_counted_and_told_to_nobody(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        before = bridge.index.foreign
        tokens = prompt(1, 4 * BLOCK + 1)

        for salt in ({}, {"cache_salt": "somebody-elses"}):
            assert await bypass(here, tokens, **salt) == 0
            assert await bypass(here, tokens, **salt) == 4 * BLOCK

        await eventually(lambda: here.metric("prefixbus_bridge_foreign_blocks") == before + 8, "eight foreign blocks")
        assert here.metric("prefixbus_bridge_held_blocks") == 0
        await all_is_accounted_for(here, bridge)
        mine = here.job(tokens)
        await here.ask(mine)
        assert (await here.outcome(mine)).cached_tokens == 0, "and nothing of them is found for a tenant"
        await eventually(lambda: told_blocks(here) == 4, "the tenant's own blocks are told")
        await here.until_idle(bridge)
        assert told_blocks(here) == 4


async def test_a_bridge_that_goes_in_the_middle_of_streams_and_comes_back_misses_no_block(tmp_path: Path) -> None:
    # As slow as a GPU: an answer of an instant engine may be whole in two frames, and there is no middle then.
    async with world(tmp_path, engine={"num_gpu_blocks": "60", "profile": "h100-8b"}) as here:
        async with here.bridge() as bridge:
            await here.until_serving(bridge)
            last = bridge.life.incarnation
        strangers = asyncio.create_task(keep_busy(here))
        for life in range(3):
            async with here.bridge() as bridge:
                await here.until_serving(bridge, after=last)
                last = bridge.life.incarnation
                await has_begun(here, prompt(life, 3 * BLOCK), last)
                # The bridge goes here, and nobody waits for anything.
        assert not strangers.done(), "the engine was kept busy all the time"
        strangers.cancel()
        await asyncio.gather(strangers, return_exceptions=True)

        async with here.bridge() as bridge:
            await here.until_serving(bridge, after=last)

            assert (await here.engine.stats())["totals"]["evictions"] > 0
            await all_is_accounted_for(here, bridge)


async def has_begun(at: World, tokens: list[int], incarnation: int) -> None:
    job = at.job(tokens, params={"max_tokens": 200})
    answer = await at.listen(job)
    await at.send(at.dispatch(job, incarnation=incarnation))
    await eventually(lambda: len(answer.chunks) > 2, "the answer has begun")


async def keep_busy(at: World) -> None:
    """Others' prompts, until cancelled: the small cache evicts all the time."""
    seed = 100
    while True:
        seed += 1
        await bypass(at, prompt(seed, 5 * BLOCK), cache_salt="others")


async def test_a_story_of_which_the_engine_kept_too_little_is_incomplete_and_says_so_until_the_cache_is_reset(
    tmp_path: Path,
) -> None:
    """As after 10,000 batches, of which an engine keeps no more."""
    async with world(tmp_path, engine={"kv-events-buffer-steps": "5"}) as here:
        async with here.serving() as bridge:
            early = here.job(prompt(1, 3 * BLOCK + 1))
            await here.ask(early)
            await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
            assert not here.loads[-1].incomplete
            last = bridge.life.incarnation
        for seed in range(2, 12):
            await bypass(here, prompt(seed, 2 * BLOCK))

        async with here.bridge() as bridge:
            load = await here.until_serving(bridge, after=last)

            assert load.incomplete
            assert here.metric("prefixbus_bridge_story_complete") == 0
            assert bridge.index.held_keys == 0, "what it cannot be sure of is not advertised"
            again = here.job(prompt(1, 3 * BLOCK + 1))
            await here.ask(again, incarnation=load.incarnation)
            assert (await here.outcome(again)).cached_tokens == 3 * BLOCK, "the engine has it all the same"
            await eventually(lambda: here.metric("prefixbus_bridge_hits_unverified_total") == 1, "nobody can judge it")
            assert here.metric("prefixbus_wrong_hits_total") == 0

            assert (await here.control("reset")).error == ""
            await eventually(lambda: not here.loads[-1].incomplete, "all is known again")
            assert here.metric("prefixbus_bridge_story_complete") == 1
            await here.ask(here.job(prompt(1, 3 * BLOCK + 1)), incarnation=load.incarnation)
            await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")


# --- two deployments that chose one port ---


@contextlib.asynccontextmanager
async def stranger(at: World, directory: Path) -> AsyncIterator[EngineProcess]:
    """Another deployment's engine, which publishes to this one's bridge."""
    other = EngineProcess(directory)
    other.events = at.engine.events
    await other.start(kv_events_topic="kv@w1@of-another")
    try:
        yield other
    finally:
        await other.stop()


async def is_overheard(at: World, other: EngineProcess, batches: int = 3) -> None:
    """Returns when so many more of its batches have come here."""
    name = "prefixbus_bridge_foreign_batches_total"
    wanted = at.metric(name) + batches
    seeds = iter(range(50, 10_000))

    async def heard() -> bool:
        # Until it is connected what it publishes goes nowhere; until it serves it publishes nothing.
        with contextlib.suppress(aiohttp.ClientConnectionError):
            await bypass(other, prompt(next(seeds), 2 * BLOCK))
        return at.metric(name) >= wanted

    await eventually(heard, "another engine's batches")


async def test_another_engine_that_publishes_to_the_same_address_is_passed_over(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        incarnation = bridge.life.incarnation
        async with stranger(here, tmp_path) as other:
            await is_overheard(here, other)

            job = here.job(prompt(1, 3 * BLOCK + 1))
            await here.ask(job)
            await is_overheard(here, other)

            await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
            await all_is_accounted_for(here, bridge)
            assert bridge.life.incarnation == incarnation
            assert here.metric("prefixbus_bridge_engine_event_gaps_total") == 0


async def test_a_story_that_another_engine_has_begun_is_told_anew_by_the_engines_own_batches(tmp_path: Path) -> None:
    """The bridge hears the other one before it knows what its own marks its batches with."""
    async with world(tmp_path) as here, stranger(here, tmp_path) as other:
        async with here.bridge() as bridge:
            busy = asyncio.create_task(is_overheard(here, other, 10))
            await here.until_serving(bridge)
            await busy

            await here.ask(here.job(prompt(1, 3 * BLOCK + 1)))

            await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
            await all_is_accounted_for(here, bridge)


async def test_an_engine_in_whose_place_another_publishes_is_told_so(tmp_path: Path) -> None:
    elsewhere = f"tcp://127.0.0.1:{free_port()}"
    async with world(tmp_path, engine={"kv_events_endpoint": elsewhere}) as here, here.bridge() as bridge:
        async with stranger(here, tmp_path) as other:
            busy = asyncio.create_task(is_overheard(here, other, 10_000))
            try:
                await eventually(lambda: "and those of another do" in bridge.life.why_not, "it says why", 30.0)
            finally:
                busy.cancel()

            assert "'kv@w1@of-another', the engine's 'kv@w1'" in bridge.life.why_not
            assert bridge.life.incarnation == 0
