# ruff: noqa: TID251 - the adapter to vLLM's HTTP interface
"""The engine as the bridge sees it, and vLLM's HTTP interface as one of them.

Foreign exceptions end here: an engine that cannot be reached or hangs up is `WorkerLost`, one that answers with an
error is `EngineFailed`, one that finds the request at fault is `BadRequest`.

Owns: HTTP, JSON shapes of vLLM.   Must not know: NATS, tenants, what a salt means.
Source: facts/vllm.md, "HTTP API"."""

import asyncio
import contextlib
import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import aiohttp
import msgspec
import orjson
from prometheus_client.parser import text_string_to_metric_families

from ..bus.errors import BadRequest, EngineFailed, Overloaded, PrefixbusError, WorkerLost
from . import engine_chunks
from .chunks import Piece, Usage
from .engine_chunks import Chunk
from .misfits import EngineSettings, EventSource, ServedModel
from .sse import DONE, EventLines

T = TypeVar("T")

_CONNECT_S = 2.0
_ASK_S = 2.0
# Below vLLM's own (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s): a connection that it is about to close is not used.
_IDLE_S = 3.0
# With requests running vLLM waits for the step at hand.
_RESET_S = 30.0
_MAX_SENTENCE = 300
_ASKED_ANOTHER_TIER = re.compile(rb"^vllm:external_prefix_cache_queries_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TRUTH = {"True": True, "False": False}


class Generation(msgspec.Struct, frozen=True):
    """What the engine is asked. `tokens`: u32 LE, 4 bytes each. `params`: parameters by vLLM's names; with `messages`
    they are for its chat endpoint. `traceparent`: the client's trace (W3C Trace Context), empty for none. `model`: what
    the engine calls the adapter to use, empty for none. `wants_tokens`: pieces should have their tokens.
    `engine_renders`: the prompt is the engine's to make of `messages`, whose media are no tokens of ours."""

    engine_request_id: str
    tokens: bytes
    params: dict[str, object]
    salt: str
    traceparent: str = ""
    model: str = ""
    wants_tokens: bool = False
    engine_renders: bool = False

    @property
    def is_chat(self) -> bool:
        return "messages" in self.params


class Progress(msgspec.Struct):
    """What came at once: pieces in order, and usage with the end. `prompt` is what the engine says a chat's prompt is,
    u32 LE, with the first of it."""

    pieces: list[Piece]
    usage: Usage | None = None
    prompt: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self.pieces or self.usage or self.prompt is not None)

    def add(self, chunk: Chunk) -> None:
        self.pieces += chunk.pieces
        self.usage = chunk.usage or self.usage
        self.prompt = self.prompt if chunk.prompt is None else chunk.prompt


class Numbers(msgspec.Struct, frozen=True):
    """What its metrics say: sums over all series of each name, and its KV memory (0 for what it does not say)."""

    sums: dict[str, float]
    block_size: int
    blocks: int


class Engine(Protocol):
    """A vLLM server, or what stands in for one. Every method raises WorkerLost when the engine cannot be reached."""

    def generate(self, request: Generation) -> AbstractAsyncContextManager[AsyncIterator[Progress]]:
        """Runs a request; leaving the context before its end aborts it at the engine.

        Iterating raises WorkerLost, EngineFailed, Overloaded or BadRequest. It ends after the last piece."""
        ...

    async def health(self) -> None:
        """Returns if the engine works. :raises EngineFailed: it answers, and says it does not.

        :raises TimeoutError: it is there and does not answer."""
        ...

    async def served_models(self) -> list[ServedModel]: ...

    async def settings(self) -> EngineSettings:
        """How it was started, as far as it says so."""
        ...

    async def has_another_tier(self) -> bool:
        """Whether it has looked for blocks beyond its own memory: a KV connector is in it."""
        ...

    async def reset_prefix_cache(self) -> None:
        """:raises EngineFailed: it did not do so; the sentence says why."""
        ...

    async def close(self) -> None: ...


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None
    message: str = ""


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Version(msgspec.Struct):
    version: str = ""


class _Source(msgspec.Struct):
    """Of one data-parallel rank; a publisher that is told to publish nothing is none."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str | None = None


class _Reset(msgspec.Struct):
    success: bool = True


_error_body = msgspec.json.Decoder(_ErrorBody)
_models = msgspec.json.Decoder(_Models)
_version = msgspec.json.Decoder(_Version)
_sources: msgspec.json.Decoder[dict[str, _Source] | None] = msgspec.json.Decoder(dict[str, _Source] | None)
_reset = msgspec.json.Decoder(_Reset)


class VllmHttp:
    """A vLLM server (or engine_sim) at `url`, serving `model`. Make it inside the running loop; `close` it.

    `key` is what the engine asks for (vLLM: --api-key), empty for one that asks for none."""

    def __init__(self, url: str, model: str, key: str = "") -> None:
        self._url = url.rstrip("/")
        self._completions = f"{self._url}/v1/completions"
        self._chat = f"{self._url}/v1/chat/completions"
        self._model = model
        # No limit on connections: admission bounds them. TCP_NODELAY is aiohttp's default.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            # Engines are spoken to directly; a proxy variable in the environment must not see prompts.
            trust_env=False,
            auto_decompress=False,
            # What no engine looks at need not be made for each request.
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            read_bufsize=256 * 1024,
        )

    def __repr__(self) -> str:
        return f"<VllmHttp {self._url} {self._model}>"

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        model = request.model or self._model
        tokens = array("I", request.tokens).tolist()
        body = {
            **request.params,
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": request.salt,
        }
        if request.is_chat:
            # vLLM takes a chat's prompt from here if it is given one (meant for prompts that another engine prefilled),
            # and renders the chat if it does not know this; it says which prompt it was.
            body["return_token_ids"] = True
            if not request.engine_renders:
                body["kv_transfer_params"] = {"prompt_token_ids": tokens}
        else:
            body["prompt"] = tokens
            if request.wants_tokens:
                body["return_token_ids"] = True
        headers = {"X-Request-Id": request.engine_request_id, "Content-Type": "application/json"}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        response: aiohttp.ClientResponse | None = None
        try:
            try:
                with _translated():
                    url = self._chat if request.is_chat else self._completions
                    response = await self._session.post(url, data=orjson.dumps(body), headers=headers)
                    if response.status != 200:
                        raise _error(response.status, await response.content.read(64 * 1024))
            except TimeoutError as exc:
                raise WorkerLost(str(exc)) from exc
            read = engine_chunks.of_chat if request.is_chat else engine_chunks.of_completions
            async with contextlib.aclosing(_progress(response, model, read)) as progress:
                yield progress
        finally:
            # Closing a response that was read to its end keeps the connection; otherwise it hangs up, and the engine
            # aborts the request.
            if response is not None:
                if response.content.is_eof():
                    response.release()
                else:
                    response.close()

    async def health(self) -> None:
        status, body = await self._ask("GET", "/health", _ASK_S)
        if status != 200:
            raise EngineFailed(f"The engine is not healthy: {_sentence(status, body)}")

    async def served_models(self) -> list[ServedModel]:
        status, body = await self._ask("GET", "/v1/models", _ASK_S)
        if status != 200:
            raise _error(status, body)
        try:
            return _models.decode(body).data
        except msgspec.MsgspecError as exc:
            raise EngineFailed(f"The engine's list of models cannot be read: {exc}") from exc

    async def settings(self) -> EngineSettings:
        version_status, version = await self._ask("GET", "/version", _ASK_S)
        metrics_status, metrics = await self._ask("GET", "/metrics", _ASK_S)
        sources_status, sources = await self._ask("GET", "/kv_event_sources", _ASK_S)
        # It resets on POST alone.
        resets, _ = await self._ask("GET", "/reset_prefix_cache", _ASK_S)
        cache = _cache_config(metrics) if metrics_status == 200 else {}
        return EngineSettings(
            version=_decoded(_version, version, _Version()).version if version_status == 200 else "",
            block_size=_number(cache.get("block_size", "")),
            kv_blocks=_number(cache.get("num_gpu_blocks", "")),
            caches_prefixes=_TRUTH.get(cache.get("enable_prefix_caching", "")),
            event_sources=_event_sources(sources) if sources_status == 200 else None,
            resets={405: True, 404: False}.get(resets),
        )

    async def numbers(self) -> Numbers:
        """:raises EngineFailed: it has no metrics, or none that can be read."""
        status, body = await self._ask("GET", "/metrics", _ASK_S)
        if status != 200:
            raise EngineFailed(f"The engine has no metrics (HTTP {status}).")
        sums: dict[str, float] = {}
        memory: dict[str, str] = {}
        try:
            for family in text_string_to_metric_families(body.decode()):
                for sample in family.samples:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                    if sample.name == "vllm:cache_config_info":
                        memory = sample.labels
            return Numbers(sums, _number(memory.get("block_size", "")), _number(memory.get("num_gpu_blocks", "")))
        except (ValueError, KeyError, IndexError) as exc:
            raise EngineFailed(f"The engine's metrics cannot be read: {str(exc)[:_MAX_SENTENCE]}") from exc

    async def has_another_tier(self) -> bool:
        status, body = await self._ask("GET", "/metrics", _ASK_S)
        asked = _ASKED_ANOTHER_TIER.findall(body) if status == 200 else []
        return any(float(tokens) > 0 for tokens in asked)

    async def reset_prefix_cache(self) -> None:
        status, body = await self._ask("POST", "/reset_prefix_cache", _RESET_S)
        if status == 404:
            raise EngineFailed(
                "The engine has no /reset_prefix_cache.",
                remedy="Start it with VLLM_SERVER_DEV_MODE=1 (vLLM's dev mode).",
            )
        if status != 200:
            raise _error(status, body)
        try:
            done = not body or _reset.decode(body).success
        except msgspec.MsgspecError as exc:
            raise EngineFailed(f"The engine's answer to a reset cannot be read: {exc}") from exc
        if not done:
            raise EngineFailed(
                "The engine did not reset its cache: requests are running.", remedy="Try when it is idle."
            )

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        with _translated():
            async with asyncio.timeout(timeout_s), self._session.request(method, self._url + path) as response:
                return response.status, await response.read()


async def _progress(
    response: aiohttp.ClientResponse, model: str, read: Callable[[bytes], Chunk]
) -> AsyncGenerator[Progress, None]:
    lines = EventLines()
    has_begun = False
    while True:
        with _translated():
            data = await response.content.readany()
        if not data:
            raise WorkerLost("The engine ended its answer before it was complete.")
        progress = Progress([])
        for line in lines.feed(data):
            if line == DONE:
                if progress:
                    yield progress
                with _translated():
                    await response.content.read()
                return
            chunk = read(line)
            if chunk.error:
                # What it could not answer at all may be the request's fault, or a matter of time; what it began is not.
                status = 500 if has_begun else chunk.status
                raise _error(status, msgspec.json.encode({"message": chunk.error}))
            has_begun = has_begun or bool(chunk.pieces)
            if chunk.model != model:
                raise WorkerLost("The engine serves another model now.")
            progress.add(chunk)
        if progress:
            yield progress


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """TimeoutError passes: silence is not absence."""
    try:
        yield
    except TimeoutError as exc:
        raise TimeoutError("The engine does not answer.") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise WorkerLost(f"The engine cannot be reached: {str(exc)[:_MAX_SENTENCE] or type(exc).__name__}") from exc


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes, otherwise: T) -> T:
    """What an engine says beside its API, if it can be read."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return otherwise


def _cache_config(metrics: bytes) -> dict[str, str]:
    found = _CACHE_CONFIG.search(metrics)
    return dict(_LABEL.findall(found.group(1).decode("utf-8", "replace"))) if found else {}


def _number(text: str) -> int:
    """0 for what is none, such as vLLM's `None`."""
    return int(text) if text.isdecimal() else 0


def _event_sources(body: bytes) -> list[EventSource] | None:
    """None when it cannot be read."""
    sources = _decoded(_sources, body, None)
    if sources is None:
        return None
    return [
        EventSource(each.endpoint, each.replay_endpoint, each.topic)
        for each in sources.values()
        if each.enable_kv_cache_events and each.publisher == "zmq"
    ]


def _error(status: int, body: bytes) -> PrefixbusError:
    """The engine's error as one of ours."""
    sentence = _sentence(status, body)
    if status == 401:
        return EngineFailed("The engine asks for a key.", remedy="Give its bridge the right one: --engine-key-file.")
    if status in (400, 413, 422):
        return BadRequest(f"The engine refuses the request: {sentence}")
    # vLLM's queue at its bound (--max-num-queued-requests) is a 503.
    if status in (429, 503):
        return Overloaded(f"The engine is full: {sentence}")
    if status == 404:
        return WorkerLost(f"The engine serves another model now: {sentence}")
    return EngineFailed(f"The engine failed: {sentence}")


def _sentence(status: int, body: bytes) -> str:
    """The engine's own, cut to a bounded length."""
    try:
        decoded = _error_body.decode(body)
        sentence = (decoded.error.message if decoded.error is not None else "") or decoded.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        sentence = body[:_MAX_SENTENCE].decode("utf-8", "replace")
    return sentence[:_MAX_SENTENCE] or f"HTTP {status}"
