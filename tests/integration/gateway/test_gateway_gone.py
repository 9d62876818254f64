"""Clients that go away, at any moment, and such as read slowly: their requests are cancelled, nobody else waits."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.nats import eventually

from .gateway_world import Asked, World, chat

# The bound is 1 s.
GONE_WITHIN_S = 4.0


@asynccontextmanager
async def sent(
    world: World, *, stream: bool = True
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request on a connection of its own, which may be torn down."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.rt.config.gateway.port, limit=4096)
    data = json.dumps(chat(stream=stream)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.key}\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def is_cancelled(world: World) -> None:
    await eventually(lambda: bool(world.asked), "it is asked")
    await eventually(
        lambda: world.cancelled == [asked.request_id for asked in world.asked], "it is cancelled", GONE_WITHIN_S
    )
    await world.idle()
    assert world.metric("requests_total", endpoint="chat", status="499") >= 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["reset", "half-closed"])
async def test_a_client_that_goes_while_it_waits(world: World, stream: bool, way: str) -> None:
    async def waits(asked: Asked) -> None:
        while True:
            asked.keep_alive()
            await asyncio.sleep(0.05)

    world.script = waits
    async with sent(world, stream=stream) as (_, writer):
        await eventually(lambda: bool(world.asked), "it is asked")
        if way == "reset":
            writer.transport.abort()
        else:
            writer.close()

        await is_cancelled(world)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_in_the_middle_of_its_answer(world: World, stream: bool) -> None:
    said = asyncio.Event()

    async def goes_on(asked: Asked) -> None:
        while True:
            asked.say("word ")
            said.set()
            await asyncio.sleep(0.02)

    world.script = goes_on
    async with sent(world, stream=stream) as (reader, writer):
        await said.wait()
        if stream:
            await reader.readuntil(b"data: ")
        writer.transport.abort()

        await is_cancelled(world)


@pytest.mark.parametrize("world", [{"headers_after_s": 0.0}], indirect=True)
async def test_a_client_that_goes_between_its_headers_and_its_first_token(world: World) -> None:
    async def waits(asked: Asked) -> None:
        while True:
            asked.keep_alive()
            await asyncio.sleep(0.05)

    world.script = waits
    async with sent(world) as (reader, writer):
        await reader.readuntil(b": waiting\n\n")
        writer.transport.abort()

        await is_cancelled(world)


async def test_a_client_that_goes_before_its_body_was_read_asks_for_nothing(world: World) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", world.rt.config.gateway.port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.key}\r\n"
        "Content-Length: 100\r\n\r\n{".encode()
    )
    await eventually(lambda: world.metric("in_hand") == 1, "the gateway has it")

    writer.transport.abort()

    await world.idle()
    assert (world.asked, world.cancelled) == ([], [])


async def test_a_slow_reader_holds_up_nobody_and_is_given_up_beyond_its_bound(world: World) -> None:
    frames_bytes = 4096
    go_on = asyncio.Event()

    async def much(asked: Asked) -> None:
        if len(world.asked) > 1:
            asked.whole()
            return
        # More than what sockets, the gateway's buffer and its own bound hold together.
        for _ in range(4 * world.rt.config.gateway.buffer_bytes // frames_bytes + 2000):
            asked.say("x" * frames_bytes)
            if asked.request_id in world.cancelled:
                break
            await asyncio.sleep(0)
        go_on.set()

    world.script = much
    async with sent(world):
        await eventually(lambda: bool(world.asked), "it is asked")
        async with world.session() as session, session.post(f"{world.api}/chat/completions", json=chat()) as got:
            assert got.status == 200

        await asyncio.wait_for(go_on.wait(), 15)

        await eventually(lambda: world.cancelled == [world.asked[0].request_id], "it is cancelled", GONE_WITHIN_S)


@pytest.mark.parametrize("world", [{"write_timeout_s": 0.3, "buffer_bytes": 64 * 1024 * 1024}], indirect=True)
async def test_a_client_that_reads_nothing_is_hung_up_on(world: World) -> None:
    async def much(asked: Asked) -> None:
        for _ in range(3000):
            asked.say("x" * 4096)
            await asyncio.sleep(0)

    world.script = much
    async with sent(world):
        await is_cancelled(world)
