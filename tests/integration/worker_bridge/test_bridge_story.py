"""What the engine did without us, and what we missed: counted, and never told as something else."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
from support.nats import eventually

from prefixbus.bus.messages import KvDump, KvEvents, Stored
from prefixbus.worker_bridge.service import Bridge

from .bridge_world import BLOCK, MODEL, World, prompt, world


async def bypass(at: World, tokens: list[int], **params: Any) -> int:
    """Asks the engine itself, as somebody who knows its address might; how much came from cache."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "ignore_eos": True, **params}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{at.engine.url}/v1/completions", json=body) as response:
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
