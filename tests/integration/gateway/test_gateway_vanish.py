"""HTTP clients that go away, in a deployment: engines and books are as if they had never asked."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from support.cluster import MODEL, Cluster, chat
from support.nats import eventually

# The bound is 1 s.
GONE_WITHIN_S = 4.0

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def asking(cluster: Cluster, http: aiohttp.ClientSession, text: str) -> AsyncIterator["asyncio.Queue[bytes]"]:
    """A request for an answer that would take minutes, and its lines; its client goes away with the context."""
    said: asyncio.Queue[bytes] = asyncio.Queue()

    async def read() -> None:
        body = {"model": MODEL, **chat(text, max_tokens=2000), "ignore_eos": True, "stream": True}
        async with http.post(f"{cluster.api}/chat/completions", json=body) as got:
            async for line in got.content:
                said.put_nowait(line)

    reading = asyncio.create_task(read())
    try:
        yield said
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def engines(cluster: Cluster, http: aiohttp.ClientSession, verb: str) -> None:
    for engine in cluster.file.engines.values():
        async with http.post(f"{engine.url}/sim/{verb}") as got:
            got.raise_for_status()


async def has_it(cluster: Cluster) -> None:
    await eventually(lambda: cluster.engine_busy() > 0, "an engine has it", 20)


async def test_a_client_that_goes_while_it_is_queued(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    await engines(cluster, http, "pause")
    try:
        async with asking(cluster, http, "Will this ever begin?"):
            await has_it(cluster)

        await eventually(lambda: cluster.engine_busy() == 0, "the engine is rid of it", GONE_WITHIN_S)
    finally:
        await engines(cluster, http, "resume")
    await cluster.settles(GONE_WITHIN_S)


async def test_a_client_that_goes_during_its_prefill(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    text = f"{uuid.uuid4().hex} " + "words that nobody has asked about before " * 700
    async with asking(cluster, http, text):
        await has_it(cluster)

    await cluster.settles(GONE_WITHIN_S)


async def test_a_client_that_goes_in_the_middle_of_its_answer(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    async with asking(cluster, http, "Count to a million") as said:
        assert (await asyncio.wait_for(said.get(), 20)).startswith(b"data: ")

    await cluster.settles(GONE_WITHIN_S)
