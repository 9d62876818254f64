# ruff: noqa: TID251 - the shell: it serves HTTP
"""The gateway's shell: OpenAI's HTTP interface on one side, the caller's own connection to the bus on the other.

    before a body is read     the API key is shown to the bus; a stranger's bytes are not kept
    before the first chunk    nothing is answered, so that whatever goes wrong has its HTTP status; a client that waits
                              longer than `headers_after_s` gets headers and comments, and errors as events then
    the client goes away      the handler is cancelled wherever it is, which ends the stream, which cancels the request
    a worker is lost          the client of the bus goes on with another (client.py)
    a slow reader             waits alone: frames wait for it within `buffer_bytes`, a write within `write_timeout_s`

Owns: the endpoints.   Must not know: how answers come about, which keys there are."""

import asyncio
import contextlib
import functools
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import orjson
from aiohttp import HttpVersion11, web

from ..bus import subjects, tls
from ..bus.config import Config, asked_name
from ..bus.errors import BadRequest, HeadersTooLarge, InvalidJson, PrefixbusError, TooLarge, UnknownModel
from ..bus.frames import completion_id
from ..bus.runtime import DRAIN_S, Runtime
from ..client import Client, Frame
from . import answers, faults, keys, lanes, prompts
from .answers import Whole
from .connections import SERVER_NAME, Connection
from .metrics import GatewayMetrics
from .pool import Pool

SERVICE = "gateway"
# What is served, as `METHOD path` below the base URL; also what a caller of something else is told.
SERVED = ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{model}")
# Below this, or below `/scopes/<scope>`, with which a request is one of that permission scope.
_SCOPED = "/scopes/{scope}"
_SECRET_BYTES = 32
# Ids on the bus have 64 characters at most; a caller's own makes the beginning of one. What follows it (16 digits and
# the number of a prompt) stays within the 60 that are kept when an answer goes on elsewhere (client.py).
_LABEL_CHARS = 40
# Of one request that are asked at once. Each of them is a request like any other, to its key's limit as to the bus.
_PROMPTS_AT_ONCE = 16
# Answers in progress when the process is told to end have a little less than the process itself.
_SHUTDOWN_S = DRAIN_S - 2.0
_GONE = 499

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx holds answers back otherwise.
    "X-Accel-Buffering": "no",
}
# Of the first chunk's headers; bridges name their worker only where the operator allows it.
_TOLD = (subjects.HEADER_DECISION, subjects.HEADER_PREDICTED_TOKENS, subjects.HEADER_WORKER)
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"

# Of each request: its id, and when its headers were there, in seconds of our clock.
_ID = web.RequestKey("id", str)
_AT = web.RequestKey("at", float)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A body and the number of its prompt: the frames of its answer.
Ask = Callable[[dict[str, Any], int], AsyncGenerator[Frame, None]]


class Gateway:
    """The endpoints. `pool` has the callers' connections."""

    def __init__(self, rt: Runtime, pool: Pool, metrics: GatewayMetrics) -> None:
        self._rt = rt
        self._settings = rt.config.gateway
        self._pool = pool
        self._metrics = metrics
        self._models = models_of(rt.config, int(rt.clock.wall()))
        self._in_hand = 0
        metrics.watch(
            {
                "in_hand": lambda: self._in_hand,
                "connections": lambda: pool.connections,
                "resumed": lambda: pool.resumed,
            }
        )

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._edge], client_max_size=self._rt.config.limits.max_body_bytes)
        for base in ("/v1", f"{_SCOPED}/v1"):
            app.router.add_post(f"{base}/chat/completions", self.chat, expect_handler=_when_read)
            app.router.add_post(f"{base}/completions", self.completions, expect_handler=_when_read)
            app.router.add_get(f"{base}/models", self.models)
            app.router.add_get(base + "/models/{model:.+}", self.model)
        app.router.add_get("/health", self.health)
        app.on_response_prepare.append(_signed)
        return app

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._infer(http, is_chat=True)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._infer(http, is_chat=False)

    async def models(self, http: web.Request) -> web.StreamResponse:
        async with self._client_of(http):
            return _json({"object": "list", "data": list(self._models.values())})

    async def model(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["model"]
        async with self._client_of(http):
            if name not in self._models:
                raise UnknownModel(f"The model {name[:80]!r} does not exist.")
            return _json(self._models[name])

    async def health(self, http: web.Request) -> web.StreamResponse:
        """For load balancers in front of several gateways."""
        reason = self._rt.not_ready_because()
        return web.Response(status=503 if reason else 200, text=(reason or "ok") + "\n")

    @web.middleware
    async def _edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every answer has the request's id and is counted; whatever goes wrong is said in OpenAI's form."""
        request[_ID] = request_id(request.headers.get("X-Request-Id", ""))
        request[_AT] = self._rt.clock.now()
        status = _GONE
        self._in_hand += 1
        try:
            answer = await self._answered(request, handler)
            status = answer.status
            return answer
        finally:
            self._in_hand -= 1
            self._metrics.requests.labels(_endpoint(request), str(status)).inc()

    async def _answered(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await handler(http)
        except PrefixbusError as exc:
            answer = _fault(exc)
        except web.HTTPException as exc:
            answer = _fault(_of_http(exc, http))
            if isinstance(exc, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = exc.headers["Allow"]
        except ConnectionError:
            # It went away while it was written to.
            raise
        except Exception as exc:  # the edge: one request's failure is not the service's
            self._rt.caught(exc, "a request failed", request_id=http[_ID])
            answer = _fault(PrefixbusError())
        if not answer.prepared:
            answer.headers["X-Request-Id"] = http[_ID]
        await self._written(http, answer, answer.write_eof)
        return answer

    def _client_of(self, http: web.Request) -> AbstractAsyncContextManager[Client]:
        """:raises InvalidKey: there is no key, or more than one: who checked another one before would be deceived.

        Entering it raises what `Pool.client` does."""
        said = http.headers.getall("Authorization", [])
        return self._pool.client(keys.parse(said[0] if len(said) == 1 else ""))

    async def _infer(self, http: web.Request, *, is_chat: bool) -> web.StreamResponse:
        scope = http.match_info.get("scope", "")
        if scope:
            subjects.token(scope, "scope")
        async with contextlib.AsyncExitStack() as held:
            client = await held.enter_async_context(self._client_of(http))
            body = await self._body(http, is_chat=is_chat)
            is_streamed = body.pop("stream", None) is True
            options = _stream_options(body.get("stream_options"), is_streamed)
            body["stream_options"] = {**options, "include_usage": True}
            bodies = [body] if is_chat else prompts.bodies(body)
            for _ in bodies[1:_PROMPTS_AT_ONCE]:
                await held.enter_async_context(self._client_of(http))
            ask = self._asking(http, client, scope)
            frames = ask(body, 0) if len(bodies) == 1 else self._several(http, bodies, ask)
            try:
                async with contextlib.aclosing(frames):
                    if is_streamed:
                        return await self._stream(http, frames, include_usage=options.get("include_usage") is True)
                    return await self._whole(http, frames, is_chat=is_chat)
            except orjson.JSONEncodeError as exc:
                # What orjson reads may be deeper than what it writes.
                raise BadRequest("Values are nested too deeply.", field="body") from exc

    def _asking(self, http: web.Request, client: Client, scope: str) -> Ask:
        """:raises BadRequest: the caller's deadline is none."""
        deadline_at = self._rt.clock.now() + self._deadline_s(http)

        def ask(body: dict[str, Any], number: int) -> AsyncGenerator[Frame, None]:
            return client.stream(
                str(body["model"]),
                body,
                request_id=prompts.id_of(http[_ID], number),
                scope=scope,
                deadline_s=deadline_at - self._rt.clock.now(),
                prefix_class=http.headers.get(subjects.HEADER_PREFIX_CLASS, ""),
                traceparent=http.headers.get(subjects.HEADER_TRACEPARENT, ""),
                resume=True,
                buffer_bytes=self._settings.buffer_bytes,
            )

        return ask

    async def _several(self, http: web.Request, bodies: list[dict[str, Any]], ask: Ask) -> AsyncGenerator[Frame, None]:
        """The answers to several prompts as one. Its headers say nothing: each prompt has a decision of its own."""

        async def numbered(number: int, body: dict[str, Any]) -> AsyncGenerator[tuple[int, Frame], None]:
            try:
                async with contextlib.aclosing(ask(body, number)) as frames:
                    async for frame in frames:
                        yield number, frame
            except PrefixbusError as exc:
                raise prompts.of_prompt(exc, number) from exc

        whole = prompts.Several(bodies, completion_id("completions", http[_ID]))
        seq = 0
        streams = (numbered(number, body) for number, body in enumerate(bodies))
        async with contextlib.aclosing(lanes.together(streams, min(len(bodies), _PROMPTS_AT_ONCE))) as together:
            async for number, frame in together:
                chunk = frame.chunk if frame.seq is None else whole.taken(number, frame.chunk)
                if chunk is not None:
                    yield Frame(None if frame.seq is None else seq, frame.attempt, chunk)
                    seq += frame.seq is not None
        yield Frame(seq, 1, whole.last())

    async def _body(self, http: web.Request, *, is_chat: bool) -> dict[str, Any]:
        """:raises InvalidJson, BadRequest: it is no request of this endpoint; the rest is checked by the tokenizer."""
        limit = self._rt.config.limits.max_body_bytes
        if (http.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._settings.read_timeout_s):
                if http.headers.get("Expect", "").lower() == "100-continue" and http.version == HttpVersion11:
                    await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    # Of the answer nothing was sent.
                    http.writer.output_size = 0
                data = await http.read()
        except TimeoutError:
            raise faults.TooSlow from None
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(limit) from None
        except web.RequestPayloadError as exc:
            raise BadRequest("cannot be decoded.", field="body", remedy="Look at Content-Encoding.") from exc
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as exc:
            raise InvalidJson(f"is not JSON: {exc}.", field="body", remedy="Send one JSON object in UTF-8.") from exc
        if not isinstance(body, dict):
            raise InvalidJson("is no object.", field="body", remedy="Send one JSON object.")
        if not isinstance(body.get("model"), str) or not body["model"]:
            raise BadRequest("is missing.", field="model", remedy="Name a model of /v1/models.")
        if not isinstance(body.get("stream"), bool | None):
            raise BadRequest("is no boolean.", field="stream", remedy="Set it to true or false.")
        needed, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
        if body.get(needed) is None:
            raise BadRequest("is missing.", field=needed, remedy=f"{http.path} takes {needed}.")
        if body.get(other) is not None:
            raise BadRequest("does not belong here.", field=other, remedy=f"{http.path} takes {needed}.")
        return body

    def _deadline_s(self, http: web.Request) -> float:
        """:raises BadRequest: the caller's deadline is none."""
        text = http.headers.get(subjects.HEADER_DEADLINE, "")
        if not text:
            return self._rt.config.limits.default_deadline_s
        try:
            left_s = float(text) - self._rt.clock.wall()
        except ValueError:
            left_s = math.nan
        if not math.isfinite(left_s):
            raise BadRequest(f"{text[:40]!r} is no time.", field=subjects.HEADER_DEADLINE, remedy="Give Unix seconds.")
        return left_s

    async def _whole(self, http: web.Request, frames: AsyncIterator[Frame], *, is_chat: bool) -> web.StreamResponse:
        whole, headers = Whole(is_chat=is_chat), {}
        async for frame in frames:
            if frame.seq is None:
                continue
            if not frame.seq:
                headers = self._began(http, frame)
            whole.add(frame.chunk)
        details = (whole.usage or {}).get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            headers["Pb-Cached-Tokens"] = str(details["cached_tokens"])
        return _json(whole.body(), headers)

    async def _stream(
        self, http: web.Request, frames: AsyncIterator[Frame], *, include_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**_SSE_HEADERS, "X-Request-Id": http[_ID]})
        try:
            async for frame in frames:
                if frame.seq is None:
                    if response.prepared or self._rt.clock.now() - http[_AT] >= self._settings.headers_after_s:
                        await self._write(http, response, _COMMENT)
                    continue
                if not frame.seq:
                    began = self._began(http, frame)
                    if not response.prepared:
                        response.headers.update(began)
                chunk = answers.streamed(frame.chunk, include_usage=include_usage)
                if chunk is not None:
                    await self._write(http, response, b"data: " + orjson.dumps(chunk) + b"\n\n")
        except PrefixbusError as exc:
            if not response.prepared:
                raise
            self._metrics.failed_streams.labels(exc.code).inc()
            await self._write(http, response, b"data: " + faults.body(exc) + b"\n\n")
        else:
            await self._write(http, response, _DONE)
        return response

    async def _write(self, http: web.Request, response: web.StreamResponse, data: bytes) -> None:
        """:raises ConnectionError: as `_written`."""
        await self._written(http, response, functools.partial(response.write, data))

    async def _written(
        self, http: web.Request, response: web.StreamResponse, write: Callable[[], Awaitable[None]]
    ) -> None:
        """:raises ConnectionError: the client is gone, or has not read for too long."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                if not response.prepared:
                    await response.prepare(http)
                await write()
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ConnectionResetError("the client does not read") from None

    def _began(self, http: web.Request, frame: Frame) -> dict[str, str]:
        """Counts the first chunk; what its headers say that the caller may know, as headers of ours."""
        self._metrics.first_seconds.labels(_endpoint(http)).observe(self._rt.clock.now() - http[_AT])
        return {name: frame.headers[name] for name in _TOLD if name in frame.headers}


async def _when_read(http: web.Request) -> None:
    """A body is asked for when it is about to be read (`Gateway._body`): a stranger is told so without it."""


async def _signed(http: web.Request, response: web.StreamResponse) -> None:
    """aiohttp would tell its version, and Python's."""
    response.headers["Server"] = SERVER_NAME


def _stream_options(given: Any, is_streamed: bool) -> dict[str, Any]:
    """:raises BadRequest: they are none, or there is no stream; what else is in them is checked by the tokenizer."""
    if given is None:
        return {}
    if not is_streamed:
        raise BadRequest("needs stream: true.", field="stream_options", remedy="Set it, or leave this out.")
    if not isinstance(given, dict) or not isinstance(given.get("include_usage"), bool | None):
        raise BadRequest("is no options object.", field="stream_options", remedy='Use {"include_usage": true}.')
    return given


def models_of(config: Config, created_at: int) -> dict[str, dict[str, Any]]:
    """OpenAI's objects for what is served, by the name that clients use."""
    names = [asked_name(model, name) for model, section in config.models.items() for name in ("", *section.adapters)]
    return {
        name: {"id": name, "object": "model", "created": created_at, "owned_by": "prefixbus"} for name in sorted(names)
    }


def request_id(asked: str) -> str:
    """A new id for a request. One that its caller named begins with that name; the rest keeps what is sent twice (by
    clients that try again) two requests, of which cancelling one does not mean the other."""
    unique = secrets.token_hex(8)
    return f"{asked}-{unique}" if subjects.is_token(asked) and len(asked) <= _LABEL_CHARS else unique


def _endpoint(http: web.Request) -> str:
    resource = http.match_info.route.resource
    path = resource.canonical if resource is not None else ""
    for name in ("chat", "completions", "models"):
        if f"/v1/{name}" in path:
            return name
    return "other"


def _json(content: object, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json", headers=headers)


def _fault(error: PrefixbusError) -> web.Response:
    return web.Response(
        status=error.status,
        body=faults.body(error),
        content_type="application/json",
        headers=faults.headers(error),
    )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"is over the limit of {limit} bytes.", field="body", remedy="Send less.")


def _of_http(exc: web.HTTPException, http: web.Request) -> PrefixbusError:
    """What aiohttp refuses, as an error of ours."""
    match exc:
        case web.HTTPMethodNotAllowed():
            return faults.WrongMethod(f"{http.path} takes {exc.headers['Allow']}, not {http.method}.")
        case web.HTTPNotFound():
            return faults.NotServed(
                f"{http.method} {http.path[:200]} is not served.", remedy=f"There is {', '.join(SERVED)}."
            )
        case web.HTTPRequestHeaderFieldsTooLarge():
            return HeadersTooLarge()
    return BadRequest(f"{exc.reason}.")


async def run(rt: Runtime) -> None:
    """Serves until `rt.stopping`, and ends what it has begun."""
    settings = rt.config.gateway
    metrics = GatewayMetrics(rt.registry)
    async with anyio.create_task_group() as tasks:
        pool = Pool(
            rt.config.nats.url,
            tls.client_context(rt.config.tls, rt.state),
            clock=rt.clock,
            tasks=tasks,
            secret=secrets.token_bytes(_SECRET_BYTES),
            most=settings.max_keys,
            most_users=settings.max_requests_per_key,
            idle_s=settings.idle_s,
            on_result=lambda result: metrics.keys.labels(result).inc(),
        )
        tasks.start_soon(pool.tend)
        gateway = Gateway(rt, pool, metrics)
        runner = web.AppRunner(
            gateway.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        try:
            listening = await _listening(rt, runner, metrics)
            try:
                rt.log.info("serving on %s:%d", settings.host, settings.port)
                rt.ready()
                await rt.stopping.wait()
            finally:
                listening.close()
        finally:
            await runner.cleanup()
            pool.close()


async def _listening(rt: Runtime, runner: web.AppRunner, metrics: GatewayMetrics) -> asyncio.Server:
    settings, server = rt.config.gateway, runner.server
    assert server is not None

    def connection() -> Connection:
        return Connection(
            server,
            keep_alive_s=settings.keep_alive_s,
            write_timeout_s=settings.write_timeout_s,
            on_fault=lambda status: metrics.requests.labels("other", str(status)).inc(),
        )

    return await asyncio.get_running_loop().create_server(
        connection,
        settings.host,
        settings.port,
        ssl=tls.server_context(rt.config.tls, rt.state),
        # Copies share the port, and the kernel gives each of them connections.
        reuse_port=True,
        backlog=1024,
    )
