"""What goes to an engine over HTTP."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from prefixbus.worker_bridge.engine import Generation, VllmHttp

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextlib.asynccontextmanager
async def engine(heard: list[web.Request]) -> AsyncIterator[VllmHttp]:
    """An engine that answers with one token and keeps the requests it got."""

    async def completions(request: web.Request) -> web.Response:
        await request.read()
        heard.append(request)
        lines = (
            b'data: {"model":"m","choices":[{"index":0,"text":"a","finish_reason":"length"}]}',
            b'data: {"model":"m","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}',
            b"data: [DONE]",
        )
        return web.Response(body=b"\n\n".join(lines) + b"\n\n", content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = VllmHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", "m")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize("trace", [TRACE, ""])
async def test_the_engine_is_told_whose_request_it_is(trace: str) -> None:
    heard: list[web.Request] = []
    request = Generation("R1-1", bytes(8), {"max_tokens": 1}, "salt", trace)

    async with engine(heard) as client, client.generate(request) as progress:
        texts = [piece.text async for step in progress for piece in step.pieces]

    assert texts == ["a"]
    (got,) = heard
    assert got.headers["X-Request-Id"] == "R1-1"
    assert got.headers.get("traceparent", "") == trace
