"""The HTTP side: what is no request, what is not served, how fast bytes leave."""

import asyncio
import io
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from .gateway_world import MAX_BODY_BYTES, World, chat


async def fault(response: aiohttp.ClientResponse) -> tuple[int, Any]:
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["X-Request-Id"]
    return response.status, error["code"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/responses", 404, "unknown_url"),
        ("POST", "/v1/images/generations", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_served_is_said_clearly(world: World, method: str, path: str, status: int, code: str) -> None:
    async with world.session() as session, session.request(method, world.api.removesuffix("/v1") + path) as got:
        assert await fault(got) == (status, code)
        assert status != 405 or got.headers["Allow"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b"{}", "bad_request"),
        (b'{"model": 7, "messages": []}', "bad_request"),
        (b'{"model": "", "messages": []}', "bad_request"),
        (b'{"model": "tiny", "prompt": "x"}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream": "no"}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream": 1}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream": 0.0}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream": true, "stream_options": "x"}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream": true, "stream_options": {"include_usage": 1}}', "bad_request"),
        (b'{"model": "tiny", "messages": [], "stream_options": {"include_usage": true}}', "bad_request"),
        (b'{"model": "tiny", "messages": ' + b"[" * 500 + b"]" * 500 + b"}", "bad_request"),
        (b'{"model": "tiny", "messages": [], "prompt": "x"}', "bad_request"),
    ],
)
async def test_what_is_no_request_goes_no_further(world: World, data: bytes, code: str) -> None:
    async with world.session() as session, session.post(f"{world.api}/chat/completions", data=data) as got:
        assert await fault(got) == (400, code)

    assert world.asked == []


@pytest.mark.parametrize("length_is_said", [True, False])
async def test_a_body_over_the_limit_is_refused(world: World, length_is_said: bool) -> None:
    data = json.dumps(chat(padding="x" * MAX_BODY_BYTES)).encode()

    async def pieces() -> Any:
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    async with world.session() as session:
        sent: Any = io.BytesIO(data) if length_is_said else pieces()
        async with session.post(f"{world.api}/chat/completions", data=sent) as got:
            assert await fault(got) == (413, "too_large")


@pytest.mark.parametrize("world", [{"read_timeout_s": 0.2}], indirect=True)
async def test_a_body_that_does_not_come_is_not_waited_for(world: World) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.rt.config.gateway.port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.key}\r\n"
        "Content-Length: 100\r\n\r\n{".encode()
    )
    try:
        said = await asyncio.wait_for(reader.readline(), 5)
    finally:
        writer.close()
        await writer.wait_closed()

    assert said.startswith(b"HTTP/1.1 408 ")


async def test_a_strangers_body_is_not_read(world: World) -> None:
    """It would be kept in memory, for who knows whom."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.rt.config.gateway.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    try:
        said = await asyncio.wait_for(reader.readline(), 5)
    finally:
        writer.close()
        await writer.wait_closed()

    assert said.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("deadline", ["soon", "nan", "1e400"])
async def test_a_deadline_that_is_none_is_refused(world: World, deadline: str) -> None:
    async with world.session() as session:
        async with session.post(f"{world.api}/chat/completions", json=chat(), headers={"Pb-Deadline": deadline}) as got:
            assert await fault(got) == (400, "bad_request")


async def test_tokens_leave_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm would hold each small chunk back until the one before it is acknowledged."""
    found: list[int] = []
    prepare = web.StreamResponse.prepare

    async def looked_at(self: web.StreamResponse, request: web.BaseRequest) -> Any:
        assert request.transport is not None
        found.append(request.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return await prepare(self, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", looked_at)
    async with world.session() as session, session.post(f"{world.api}/chat/completions", json=chat(stream=True)) as got:
        await got.read()

    assert found and all(found)


async def test_the_health_of_a_gateway_is_for_everybody(world: World) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(world.api.replace("/v1", "/health")) as got:
            assert got.status == 200
