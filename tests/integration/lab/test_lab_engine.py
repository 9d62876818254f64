"""The engine in the lab and the one that answers HTTP find the same hits for the same requests."""

import asyncio
import random
import struct

import pytest
import xxhash
from aiohttp import ClientSession
from support import models

from prefixbus.engine_sim.server import EngineConfig, serve
from prefixbus.lab.harness import run
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Arrival, Segment, Workload, keys_of, seed_of

BLOCK = 16
BLOCKS = 200


def dialogs(seed: int, count: int = 120) -> list[tuple[list[Segment], int]]:
    """(text, output tokens): a few documents with questions, and what was asked before with more of it. All together
    they are several times as long as the engine's memory."""
    rng = random.Random(seed)
    asked: list[list[Segment]] = [[]]
    found = []
    for name in range(100, 100 + count):
        if rng.random() < 0.5:
            said = [Segment(rng.randrange(8), 16 * rng.randrange(10, 30) + 5)]
        else:
            said = rng.choice(asked[-10:])
        said = [*said, Segment(name, rng.randrange(1, 120))]
        if sum(segment.tokens for segment in said) < 1200:
            asked.append(said)
            found.append((said, rng.randrange(1, 40)))
    return found


def tokens_of(segments: list[Segment]) -> list[int]:
    """Ids that are the same wherever a segment's name is."""
    return [
        xxhash.xxh3_64_intdigest(struct.pack("<QQ", name, place)) % 256 + 10
        for name, tokens in segments
        for place in range(tokens)
    ]


@pytest.mark.parametrize("seed", range(2))
async def test_the_labs_engine_finds_what_the_live_one_finds(seed: int) -> None:
    asked = dialogs(seed)
    arrivals = [
        Arrival(
            100.0 * number,
            keys_of(segments, BLOCK, seed_of("acme")),
            sum(segment.tokens for segment in segments),
            output,
        )
        for number, (segments, output) in enumerate(asked)
    ]

    live = await found_live(asked)
    lab = run(Setup(workers=1, kv_tokens=BLOCKS * BLOCK), Workload(arrivals, BLOCK))

    assert [one.cached_tokens for one in lab.served] == live
    # Of both there is plenty: hits, partial ones, and what was evicted.
    assert sum(hit > 0 for hit in live) > 30 and sum(hit == 0 for hit in live) > 10


async def found_live(asked: list[tuple[list[Segment], int]]) -> list[int]:
    """The cached tokens of each, by the engine's own count; one after the other."""
    config = EngineConfig(
        model_dir=models.tiny(),
        served_model_name="tiny",
        block_size=BLOCK,
        # One of them is set apart, as in vLLM.
        num_gpu_blocks=BLOCKS + 1,
        max_model_len=2048,
        profile="instant",
        enable_prompt_tokens_details=True,
    )
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(config, ready.set_result, stop))
    try:
        base = await asyncio.wait_for(ready, 10)
        found = []
        async with ClientSession() as session:
            for segments, output in asked:
                body = {
                    "model": "tiny",
                    "prompt": tokens_of(segments),
                    "max_tokens": output,
                    "ignore_eos": True,
                    "cache_salt": "acme",
                }
                async with session.post(f"{base}/v1/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found
    finally:
        stop.set()
        await server
