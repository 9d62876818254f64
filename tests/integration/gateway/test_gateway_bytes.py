"""The bytes of HTTP: such as are no request, come slowly or not at all, or stop anywhere; and clients that do not take
what they asked for."""

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from support.nats import eventually

from .gateway_world import MAX_BODY_BYTES, MODEL, Asked, World, chat

BODY = json.dumps(chat()).encode()
# Of what the gateway ends by itself, after fractions of a second.
ENDED_WITHIN_S = 10.0


@asynccontextmanager
async def connected(world: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.rt.config.gateway.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(world: World, *headers: str, body: bytes = BODY, key: str = "", length: bool = True) -> bytes:
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key or world.key}", *headers]
    if length:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the next answer."""
    async with asyncio.timeout(ENDED_WITHIN_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, json.loads(content) if content else None


async def answered(world: World, data: bytes) -> tuple[int, dict[str, str], Any]:
    async with connected(world) as (reader, writer):
        writer.write(data)
        return await answer(reader)


NO_REQUESTS = {
    "not HTTP": b"\x16\x03\x01\x00 garbage\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bare line feeds": b"GET /v1/models HTTP/1.1\nHost: x\nAuthorization: Bearer %s\n\n",
    "a control character": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\x01\r\n\r\n",
    "a folded header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n %s\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n",
    "a path of bytes": b"GET /v1/models/\xff?key=%s HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} %s",
    "a length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n%s",
    "a huge length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n%s",
    "an unknown coding": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n%s",
    "many headers": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X: %s\r\n" * 500 + b"\r\n",
}


@pytest.mark.parametrize("name", NO_REQUESTS)
async def test_bytes_that_are_no_request_are_told_so_and_not_kept(
    world: World, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """With them comes a key as often as not."""
    data = NO_REQUESTS[name].replace(b"%s", world.key.encode())
    async with connected(world) as (reader, writer):
        writer.write(data)
        status, headers, content = await answer(reader)
        rest = await asyncio.wait_for(reader.read(), ENDED_WITHIN_S)

    assert (status, headers["content-type"], rest) == (400, "application/json", b"")
    assert content["error"]["code"] == "bad_request"
    assert world.server.demo.token not in json.dumps(content) + caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert world.metric("requests_total", endpoint="other", status="400") == 1
    assert world.asked == []


async def test_a_header_over_the_limit_is_too_large(world: World) -> None:
    status, _, content = await answered(world, request(world, f"X: {'a' * 20_000}"))

    assert (status, content["error"]["code"]) == (431, "headers_too_large")


async def test_no_answer_tells_what_the_gateway_is_made_of(world: World) -> None:
    for data in (request(world), request(world, key="demo.wrong"), b"garbage\r\n\r\n"):
        _, headers, _ = await answered(world, data)
        assert headers["server"] == "prefixbus"


async def test_two_keys_are_no_key(world: World) -> None:
    """Whoever looked at the one would be deceived by the other."""
    for headers in ([f"Authorization: Bearer {world.key}"], ["authorization: Bearer demo.wrong"]):
        status, _, content = await answered(world, request(world, *headers))
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")

    assert world.asked == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_is_json_whatever_its_type_says(world: World, kind: str) -> None:
    """Some clients say none, or a wrong one; whatever is not JSON is refused as such."""
    assert (await answered(world, request(world, f"Content-Type: {kind}")))[0] == 200


async def test_a_compressed_body_is_read_within_the_limit(world: World) -> None:
    gzipped = "Content-Encoding: gzip"
    bomb = gzip.compress(json.dumps(chat(padding="x" * 64 * MAX_BODY_BYTES)).encode())
    assert len(bomb) < MAX_BODY_BYTES

    assert (await answered(world, request(world, gzipped, body=gzip.compress(BODY))))[0] == 200
    status, _, content = await answered(world, request(world, gzipped, body=bomb))
    assert (status, content["error"]["code"]) == (413, "too_large")
    status, _, content = await answered(world, request(world, gzipped))
    assert (status, content["error"]["param"]) == (400, "body")


async def test_a_body_in_chunks_is_one(world: World) -> None:
    chunked = "Transfer-Encoding: chunked"
    whole = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:7], BODY[7:])) + b"0\r\n\r\n"

    assert (await answered(world, request(world, chunked, body=whole, length=False)))[0] == 200
    assert world.asked[0].body["messages"] == chat()["messages"]


@pytest.mark.parametrize("world", [{"read_timeout_s": 0.3}], indirect=True)
async def test_a_body_that_breaks_off_is_not_waited_for(world: World) -> None:
    async with connected(world) as (reader, writer):
        data = b"7\r\n" + BODY[:7] + b"\r\n"
        writer.write(request(world, "Transfer-Encoding: chunked", body=data, length=False))
        await eventually(lambda: world.metric("in_hand") == 1, "the head is read")
        writer.write(b"zz\r\n")
        status, _, content = await answer(reader)

    assert (status, content["error"]["code"]) == (408, "request_timeout")
    assert world.asked == []


async def test_a_body_is_asked_for_when_its_key_is_right(world: World) -> None:
    expects = "Expect: 100-continue"
    async with connected(world) as (reader, writer):
        writer.write(request(world, expects)[: -len(BODY)])
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ENDED_WITHIN_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await answer(reader))[0] == 200

    assert (await answered(world, request(world, expects, key="demo.wrong")[: -len(BODY)]))[0] == 401
    assert (await answered(world, request(world, "Expect: a miracle")))[0] == 200


async def test_requests_sent_at_once_are_answered_one_by_one(world: World) -> None:
    async with connected(world) as (reader, writer):
        writer.write(b"".join(request(world, f"X-Request-Id: r{number}") for number in range(5)))
        ids = [(await answer(reader))[1]["x-request-id"] for _ in range(5)]

    assert [each.split("-")[0] for each in ids] == [f"r{number}" for number in range(5)]


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_and_closed(world: World, stream: bool) -> None:
    body = json.dumps(chat(stream=stream)).encode()
    async with connected(world) as (reader, writer):
        writer.write(request(world, body=body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        said = await asyncio.wait_for(reader.read(), ENDED_WITHIN_S)

    head, _, content = said.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert b"chunked" not in head
    assert content.endswith(b"data: [DONE]\n\n") if stream else json.loads(content)["choices"]


@pytest.mark.parametrize("world", [{"keep_alive_s": 1.0}], indirect=True)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("sends", ["nothing", "headers by and by"])
async def test_a_connection_that_does_not_come_to_a_request_is_closed(world: World, sends: str, is_first: bool) -> None:
    async with connected(world) as (reader, writer):
        if not is_first:
            writer.write(request(world))
            assert (await answer(reader))[0] == 200

        async def drips() -> None:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ")
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drips()) if sends == "headers by and by" else None
        try:
            # What is on its way to a closed connection is answered with a reset.
            said = await asyncio.wait_for(reader.read(), ENDED_WITHIN_S)
        except ConnectionResetError:
            said = b""
        finally:
            if dripping is not None:
                dripping.cancel()

    assert said == b""


@pytest.mark.parametrize("world", [{"read_timeout_s": 0.3}], indirect=True)
async def test_a_body_that_comes_by_and_by_is_not_waited_for(world: World) -> None:
    async with connected(world) as (reader, writer):

        async def drips() -> None:
            writer.write(request(world, "X: y", body=b" " * 100_000)[:-100_000])
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drips())
        try:
            status, _, content = await answer(reader)
        finally:
            dripping.cancel()

    assert (status, content["error"]["code"]) == (408, "request_timeout")
    await world.idle()


@pytest.mark.parametrize("world", [{"keep_alive_s": 1.0}], indirect=True)
async def test_a_connection_with_a_request_may_be_silent_for_as_long_as_that_takes(world: World) -> None:
    go_on = asyncio.Event()

    async def waits(asked: Asked) -> None:
        while not go_on.is_set():
            asked.keep_alive()
            await asyncio.sleep(0.05)
        asked.whole()

    world.script = waits
    async with connected(world) as (reader, writer), connected(world) as (silent, _):
        writer.write(request(world))
        await eventually(lambda: bool(world.asked), "it is asked")
        # Both were made at about the same time.
        assert await asyncio.wait_for(silent.read(), ENDED_WITHIN_S) == b""
        go_on.set()

        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("world", [{"write_timeout_s": 0.3}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_take_an_answer_is_hung_up_on(world: World, stream: bool) -> None:
    """More than what sockets hold on the way, so that the end of it waits in the gateway."""

    async def much(asked: Asked) -> None:
        for _ in range(40):
            asked.say("x" * 500_000)
            await asyncio.sleep(0)
        asked.usage()
        asked.end()

    world.script = much
    async with connected(world) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's for sockets
        writer.write(request(world, body=json.dumps(chat(stream=stream)).encode()))

        await eventually(
            lambda: world.metric("requests_total", endpoint="chat", status="499") == 1, "it is given up", ENDED_WITHIN_S
        )
    await world.idle()


@pytest.mark.parametrize("world", [{"write_timeout_s": 7.5}], indirect=True)
async def test_a_client_that_vanished_without_a_word_is_given_up_by_the_kernel(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here can make a machine vanish: that its socket is told so must do."""
    found: list[int] = []
    prepare = web.StreamResponse.prepare

    async def looked_at(self: web.StreamResponse, request: web.BaseRequest) -> Any:
        assert request.transport is not None
        found.append(request.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return await prepare(self, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", looked_at)
    await answered(world, request(world))

    assert found and set(found) == {7500}


async def test_a_client_may_stop_sending_anywhere(world: World) -> None:
    whole = request(world)
    for end in range(0, len(whole), 3):
        async with connected(world) as (_, writer):
            writer.write(whole[:end])
            await asyncio.sleep(0)

    async with connected(world) as (reader, writer):
        writer.write(whole)
        assert (await answer(reader))[0] == 200
    await world.idle()
    assert len(world.asked) == 1


async def test_a_client_may_stop_reading_anywhere(world: World) -> None:
    async def words(asked: Asked) -> None:
        for _ in range(10):
            asked.say("word ")
            await asyncio.sleep(0)
        asked.say("", finish="stop")
        asked.usage()
        asked.end()

    world.script = words
    for stream in (False, True):
        data = request(world, body=json.dumps(chat(stream=stream)).encode())
        for end in range(1, 2000, 200):
            async with connected(world) as (reader, writer):
                writer.write(data)
                async with asyncio.timeout(ENDED_WITHIN_S):
                    await reader.read(end)

    await world.idle()
    assert (await answered(world, request(world)))[0] == 200
    assert world.rt.registry.get_sample_value("prefixbus_failures_total", {"code": "internal"}) is None


@pytest.mark.parametrize(
    "model", ["*", ">", "a.>", "a\r\nPUB x 1", "a\x00", " ", "a b", "x" * 100_000, "../..", "ключ", "tiny\n"]
)
async def test_a_models_name_is_no_way_to_other_subjects(world: World, model: str) -> None:
    await answered(world, request(world, body=json.dumps(chat(model=model)).encode()))

    parts = [asked.subject.split(".") for asked in world.asked]
    assert all(part[:4] == ["pb", "v1", "infer", "demo"] and len(part) == 5 for part in parts)
    assert all(part[4] not in ("*", ">", "", MODEL) for part in parts)
    assert world.metric("connections") == 1


@pytest.mark.parametrize("scope", ["*", "a.b", "%0d%0a", "%3e", "a%20b", "%2e%2e", "x" * 65, "%ff"])
async def test_a_scope_is_no_way_to_other_subjects(world: World, scope: str) -> None:
    data = request(world).replace(b"/v1/chat", f"/scopes/{scope}/v1/chat".encode(), 1)

    status, _, content = await answered(world, data)

    assert status in (400, 404)
    assert content["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert world.asked == []
