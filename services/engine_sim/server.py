# ruff: noqa: TID251 - the shell: HTTP on the event loop, wall clock for `created`
"""vLLM's HTTP interface over a live engine. Parses, submits, streams; decides nothing about caching or scheduling.

Owns: routes, response ids, the process's life.   Must not know: blocks, event shapes."""

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from . import answers, api, calls, vocabulary
from .answers import Said, Whole
from .chat import ChatTemplate, has_images, image_names
from .core import DoesNotFit, EngineCore
from .events import HIGH_WATER_MARK, REPLAY_BATCHES, EventPublisher
from .faults import Fault, Faults
from .lifetimes import WatchedPool
from .live import Generation, LiveEngine, Scanner
from .metrics import EngineMetrics
from .pool import BlockPool
from .profile import PRESETS
from .request import Request
from .sequence import NO_TOKEN, EngineNamespace, Placed, TokenSequence
from .stops import StopScanner
from .tier import LeakyTier

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
LONG_TEXT_CHARS = 16_384
"""Text longer than this is tokenised in a thread: about 5 ms of the loop's time."""
SHUTDOWN_S = 1.0
"""How long open responses may take to notice a shutdown."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the command line can say. Names follow vLLM's flags where it has them."""

    model_dir: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port, told by the ready line."""
    block_size: int = 32
    """What vLLM on CPU uses."""
    num_gpu_blocks: int = 2048
    """One of them is the null block, as in vLLM."""
    max_model_len: int = 8192
    profile: str = "h100-8b"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    kv_events_buffer_steps: int = REPLAY_BATCHES
    """How many batches can be replayed."""
    enable_prompt_tokens_details: bool = False
    model_revision: str = ""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, each served under its own model name."""
    eos_one_in: int = 256
    """A token is end-of-sequence once in so many, by the digest of all before it, unless ignored; 0: never."""
    kv_cache_metrics: bool = False
    """Histograms of how long blocks live in the cache."""
    dev_mode: bool = False
    """Serve /reset_prefix_cache, as vLLM does with VLLM_SERVER_DEV_MODE=1."""
    ignore_salt: bool = False
    """Leave the salt out of block keys: provokes wrong hits, to prove that they are detected."""
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    """Both: calls of tools are found, whatever the parser is called."""
    reasoning_parser: str | None = None
    """Chats begin with a few tokens of reasoning, told apart, whatever the parser is called."""
    virtual_time: bool = False
    """Steps are not waited for; metrics say what they would have taken."""
    image_token: str = ""
    """What the template prints for an image; empty: it takes none."""
    image_tokens: int = 64
    """How many tokens an image is, whatever it shows."""
    leaky_tier: int = 0
    """Tokens in a chunk of a tier that keeps blocks without their salts; 0: there is no such tier."""


def make_core(config: EngineConfig, pool: BlockPool | None = None) -> EngineCore:
    """:raises ValueError: a size makes no sense, or no such profile."""
    if config.profile not in PRESETS:
        raise ValueError(f"no profile {config.profile!r}; there are {', '.join(PRESETS)}")
    profile = PRESETS[config.profile]
    limits = {"max_num_seqs": config.max_num_seqs, "step_tokens": config.max_num_batched_tokens}
    profile = msgspec.structs.replace(profile, **{name: value for name, value in limits.items() if value is not None})
    return EngineCore(
        profile,
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks - 1,  # vLLM sets its null block apart
        max_model_len=config.max_model_len,
        pool=pool,
    )


class EngineServer:
    """Handlers of one engine. `app` is ready to be served once `engine.run` is running."""

    def __init__(
        self,
        config: EngineConfig,
        texts: vocabulary.TokenTexts,
        publisher: EventPublisher | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._texts = texts
        self._publisher = publisher
        self._wall = wall
        self._started = int(wall())
        self._chat = ChatTemplate(config.model_dir, takes_images=bool(config.image_token))
        self._metrics = EngineMetrics(config.served_model_name)
        pool = None
        if config.kv_cache_metrics:
            pool = WatchedPool(config.num_gpu_blocks - 1, time.monotonic, self._metrics.watch_evictions())
        self._core = make_core(config, pool)
        self._faults = Faults()
        self._ignores_salt = config.ignore_salt
        self._tier = LeakyTier(config.leaky_tier) if config.leaky_tier else None
        self._metrics.read(self._core, self._tier)
        adapters = {name: number for number, name in enumerate(config.adapters, 1)}
        self._adapters = adapters
        self.engine = LiveEngine(
            self._core,
            texts.text,
            publisher=publisher,
            watcher=self._metrics,
            adapters=adapters,
            is_virtual=config.virtual_time,
        )
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        routes = [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.post("/tokenize", self.tokenize),
            web.get("/health", self.health),
            web.get("/kv_event_sources", self.kv_event_sources),
            web.get("/metrics", self.metrics),
            web.get("/sim/stats", self.sim_stats),
            web.post("/sim/pause", self.sim_pause),
            web.post("/sim/step", self.sim_step),
            web.post("/sim/resume", self.sim_resume),
            web.post("/sim/leak", self.sim_leak),
            web.post("/sim/fault", self.sim_fault),
            web.delete("/sim/fault", self.sim_no_fault),
        ]
        if config.dev_mode:
            routes.append(web.post("/reset_prefix_cache", self.reset_prefix_cache))
        self.app.add_routes(routes)

    # -- generation

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = _decoded(api.decode_completion, await http.read())
        body.check()
        given = body.single_prompt()
        adapter = self._adapter_of(body.model)
        config = self._config
        api.check_asked(body.token_limit, config.max_model_len, "max_tokens")
        is_text = isinstance(given, str)
        prompt = await self._encode(given, body.add_special_tokens) if isinstance(given, str) else given
        api.check_length(len(prompt), config.max_model_len, is_text)
        answer = answers.Answer(self._asked(http, body, prompt, answers.Answer.id_prefix))
        return await self._generate(http, body, prompt, body.token_limit, adapter, answer)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = _decoded(api.decode_chat, await http.read())
        body.check()
        adapter = self._adapter_of(body.model)
        config = self._config
        body.check_parser(config.enable_auto_tool_choice and config.tool_call_parser is not None)
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        api.check_asked(body.token_limit, config.max_model_len, param)
        prompt = body.given_prompt
        is_text = prompt is None
        if not config.image_token and has_images(body.messages):
            raise api.BadRequest(f"{config.served_model_name} is not a multimodal model")
        media: list[Placed] = []
        if prompt is None:
            prompt = await self._encode(await self._render(body), body.add_special_tokens)
            prompt, media = self._with_images(prompt, image_names(body.messages))
        api.check_length(len(prompt), config.max_model_len, is_text)
        forced = calls.made_up(body.tools, body.choice_of_tool, body.parallel_tool_calls is not False)
        asked = msgspec.structs.replace(
            self._asked(http, body, prompt, answers.ChatAnswer.id_prefix),
            calls=forced,
            call_ids=[[f"chatcmpl-tool-{secrets.token_hex(16)}" for _ in forced] for _ in range(body.choices)],
            is_call_named=isinstance(body.choice_of_tool, dict),
            # Who is made to call has no time to think.
            thinks=config.reasoning_parser is not None
            and not forced
            and body.template_kwargs.get("enable_thinking") is not False,
            shows_thoughts=body.include_reasoning,
        )
        answer = answers.ChatAnswer(asked)
        return await self._generate(http, body, prompt, body.token_limit, adapter, answer, asked, media)

    def _with_images(self, prompt: list[int], names: list[str]) -> tuple[list[int], list[Placed]]:
        """The prompt with so many tokens for each image, and where these are.

        :raises BadRequest: this model takes no images, or its template has no place for one."""
        if not names:
            return prompt, []
        config = self._config
        token = self._texts.tokenizer.token_to_id(config.image_token) if config.image_token else None
        if token is None or prompt.count(token) != len(names):
            raise api.BadRequest("At most 0 image(s) may be provided in one prompt.", "messages")
        made: list[int] = []
        media: list[Placed] = []
        left = iter(names)
        for given in prompt:
            if given == token:
                media.append((len(made), config.image_tokens, next(left)))
                made += [token] * config.image_tokens
            else:
                made.append(given)
        return made, media

    def _asked(
        self, http: web.Request, body: api.CompletionRequest | api.ChatRequest, prompt: list[int], id_prefix: str
    ) -> answers.Asked:
        # Raw bytes come as surrogates.
        given_id = http.headers.get("X-Request-Id", "").encode(errors="replace").decode()
        return answers.Asked(
            response_id=id_prefix + (given_id or secrets.token_hex(16)),
            model=body.model or self._config.served_model_name,
            created=int(self._wall()),
            choices=body.choices,
            prompt_ids=prompt if body.return_token_ids else None,
            alternatives=body.alternatives,
            spoken=tuple(self._texts.vocabulary.spoken),
            text=self._texts.name,
        )

    async def _generate(
        self,
        http: web.Request,
        body: api.CompletionRequest | api.ChatRequest,
        prompt: list[int],
        max_tokens: int | None,
        adapter: str | None,
        answer: answers.Answer,
        asked: answers.Asked | None = None,
        media: Sequence[Placed] = (),
    ) -> web.StreamResponse:
        fault = self._faults.next()
        if fault is not None and not fault.after_tokens:
            return _fail(http, fault)
        limit = api.output_limit(max_tokens, self._config.max_model_len - len(prompt), body.min_tokens)
        forced = asked.calls if asked is not None else []
        requests: list[Request] = []
        generations: list[Generation] = []
        try:
            requests += [
                self._request(answer.response_id, body, prompt, limit, adapter, choice, media)
                for choice in range(body.choices)
            ]
            api.check_logprobs(body.alternatives, self._texts.size)
            # One by one: those before one that does not fit are aborted, too.
            generations.extend(self.engine.submit(request, _scanner(body, forced)) for request in requests)
            if body.stream:
                return await self._stream(http, generations, answer, body.include_usage, fault)
            return await self._whole(generations, answer)
        except DoesNotFit as error:
            raise api.BadRequest(str(error), "input_tokens") from error
        except api.EngineRefuses as error:
            if not body.stream:
                raise
            return await _refuse_in_stream(http, error)
        finally:
            for request in requests:
                if self._tier is not None and isinstance(request.sequence, TokenSequence):
                    self._tier.keep(request.sequence)
            for generation in generations:
                self.engine.abort(generation)  # the client left, or writing failed; nothing if the request has ended

    def _request(
        self,
        request_id: str,
        body: api.CompletionRequest | api.ChatRequest,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None,
        choice: int,
        media: Sequence[Placed],
    ) -> Request:
        config = self._config
        namespace = EngineNamespace(body.cache_salt, adapter, config.model_revision)
        try:
            sequence = TokenSequence(
                prompt,
                self._texts.vocabulary,
                config.block_size,
                namespace,
                ignore_salt=self._ignores_salt,
                choice=choice,
                media=media,
            )
        except (OverflowError, TypeError) as error:
            for index, token in enumerate(prompt):
                if type(token) is not int or token < 0:
                    raise api.Malformed("prompt must be a list of token ids.", f"body.prompt.{index}") from error
            raise api.EngineRefuses(f"Token id {max(prompt)} is out of vocabulary") from error
        if max(sequence.ids) >= self._texts.size:
            raise api.EngineRefuses(f"Token id {max(sequence.ids)} is out of vocabulary")
        request = Request(
            request_id,
            sequence,
            max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            skips_cache=body.prompt_logprobs is not None,
            namespace=namespace,
            now_ms=self.engine.now_ms(),
        )
        if self._tier is not None and not request.skips_cache:
            request.delivered = range(self._tier.find(sequence) // config.block_size)
        return request

    async def _stream(
        self,
        http: web.Request,
        generations: list[Generation],
        answer: answers.Answer,
        include_usage: bool,
        fault: Fault | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        ready = answer.opening()
        tokens = 0
        async with contextlib.aclosing(_arrivals(generations)) as arrivals:
            async for index, pieces in arrivals:
                generation = generations[index]
                *earlier, (token, text) = pieces
                for earlier_token, earlier_text in earlier:
                    ready += answer.chunk(Said(index, earlier_token, earlier_text))
                is_last = generation.has_ended
                reason = generation.finish_reason if is_last else None
                ready += answer.chunk(Said(index, token, text, reason, generation.stop_reason if is_last else None))
                tokens += len(pieces)
                if fault is not None and tokens >= fault.after_tokens:
                    await response.write(ready)
                    return await _fail_in_stream(http, response, answer, fault)
                if ready:
                    await response.write(ready)
                ready = b""
        if include_usage:
            ready += answer.usage_chunk(self._usage(generations, answer))
        ready += answers.DONE
        await response.write(ready)
        await response.write_eof()
        return response

    async def _whole(self, generations: list[Generation], answer: answers.Answer) -> web.Response:
        said: list[list[tuple[int, str]]] = [[] for _ in generations]
        async with contextlib.aclosing(_arrivals(generations)) as arrivals:
            async for index, pieces in arrivals:
                said[index] += pieces
        choices = []
        for generation, pieces in zip(generations, said, strict=True):
            tokens = [token for token, _ in pieces if token != NO_TOKEN]
            thought = "".join(text for _, text in pieces[: answer.thoughts])
            text = "".join(text for _, text in pieces[answer.thoughts :])
            choices.append(
                Whole(tokens, text, generation.finish_reason or "length", generation.stop_reason, thought=thought)
            )
        return _json(answer.whole(choices, self._usage(generations, answer)))

    def _usage(self, generations: list[Generation], answer: answers.Answer) -> dict[str, object]:
        """What vLLM says of several choices: the prompt once, and what the first one found in the cache."""
        requests = [generation.request for generation in generations]
        cached = requests[0].cached_tokens if self._config.enable_prompt_tokens_details else None
        reasoning = None
        if self._config.reasoning_parser is not None and isinstance(answer, answers.ChatAnswer):
            reasoning = sum(min(answer.thoughts, request.outputs) for request in requests)
        outputs = sum(request.outputs for request in requests)
        return api.usage(requests[0].prompt_tokens, outputs, cached, reasoning)

    def _adapter_of(self, model: str | None) -> str | None:
        """The adapter a model name stands for; None for the base model.

        :raises NotFound: it is neither."""
        if model is None or model == self._config.served_model_name:
            return None
        if model in self._adapters:
            return model
        raise api.NotFound(
            f"The model `{model}` does not exist. Valid aliases: {self._config.served_model_name}.", "model"
        )

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._texts.encode, text, add_special_tokens)
        return self._texts.encode(text, add_special_tokens)

    async def _render(self, body: api.ChatRequest | api.TokenizeRequest) -> str:
        return await self._chat.render(
            body.messages or [],
            body.tools,
            body.add_generation_prompt,
            body.continue_final_message,
            body.template_kwargs,
        )

    # -- the rest of vLLM's routes

    async def models(self, http: web.Request) -> web.Response:
        base = self._config.served_model_name
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": str(self._config.model_dir) if name == base else name,
                "parent": None if name == base else base,
                "max_model_len": self._config.max_model_len,
            }
            for name in (base, *self._config.adapters)
        ]
        return _json(orjson.dumps({"object": "list", "data": cards}))

    async def tokenize(self, http: web.Request) -> web.Response:
        body = _decoded(api.decode_tokenize, await http.read())
        self._adapter_of(body.model)
        body.check()
        if body.prompt is not None:
            tokens = await self._encode(body.prompt, body.add_special_tokens is not False)
        else:
            tokens = await self._encode(await self._render(body), body.add_special_tokens is True)
        strings = [self._texts.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": self._config.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        return _json(orjson.dumps(answer))

    async def health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def kv_event_sources(self, http: web.Request) -> web.Response:
        """How the events are published, by data-parallel rank; nothing where they are not."""
        config = self._config
        sources = {}
        if self._publisher is not None:
            sources["0"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": config.kv_events_endpoint,
                "replay_endpoint": config.kv_events_replay_endpoint,
                "buffer_steps": config.kv_events_buffer_steps,
                "hwm": HIGH_WATER_MARK,
                "max_queue_size": HIGH_WATER_MARK,
                "topic": config.kv_events_topic,
            }
        return _json(orjson.dumps(sources))

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """HTTP 200 either way, as vLLM answers; the body tells whether it was done. `reset_external` is taken and means
        nothing: there is no connector."""
        running_too = http.query.get("reset_running_requests", "false").lower() in ("true", "1")
        return _json(orjson.dumps({"success": self._core.reset_prefix_cache(running_too)}))

    # -- for tests and demos only; vLLM has none of these

    async def sim_stats(self, http: web.Request) -> web.Response:
        core = self._core
        stats = {
            "wrong_hits": core.totals.wrong_hits,
            "running": len(core.running),
            "waiting": len(core.waiting),
            "blocks_used": core.pool.used_count,
            "blocks_total": core.pool.capacity,
            "keys_cached": core.pool.cached_keys,
            "paused": self.engine.paused,
            "totals": core.totals,
            "kv_events_endpoint": None if self._publisher is None else self._publisher.endpoint,
            "kv_events_replay_endpoint": None if self._publisher is None else self._publisher.replay_endpoint,
            "kv_events_next_seq": None if self._publisher is None else self._publisher.next_seq,
        }
        return _json(msgspec.json.encode(stats))

    async def sim_pause(self, http: web.Request) -> web.Response:
        self.engine.pause()
        return _json(b"{}")

    async def sim_step(self, http: web.Request) -> web.Response:
        self.engine.step_once()
        return _json(b"{}")

    async def sim_fault(self, http: web.Request) -> web.Response:
        """See faults.py."""
        self._faults.order(_decoded(msgspec.json.Decoder(Fault).decode, await http.read()))
        return _json(b"{}")

    async def sim_no_fault(self, http: web.Request) -> web.Response:
        self._faults.clear()
        return _json(b"{}")

    async def sim_resume(self, http: web.Request) -> web.Response:
        self.engine.resume()
        return _json(b"{}")

    async def sim_leak(self, http: web.Request) -> web.Response:
        """From now on salts are left out of block keys, as with --ignore-salt: an engine that breaks while it runs."""
        self._ignores_salt = True
        return _json(b"{}")


def _scanner(body: api.CompletionRequest | api.ChatRequest, forced: list[calls.Call]) -> Scanner | None:
    if forced:
        return calls.CallScript(forced)
    return StopScanner(body.stops, body.include_stop_str_in_output) if body.stops else None


async def _arrivals(generations: list[Generation]) -> AsyncGenerator[tuple[int, list[tuple[int, str]]], None]:
    """What comes of each, as it comes, until all have ended."""
    if len(generations) == 1:
        while not generations[0].has_ended:
            yield 0, await generations[0].next()
        return
    waiting = {asyncio.ensure_future(generation.next()): index for index, generation in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                yield index, task.result()
                if not generations[index].has_ended:
                    waiting[asyncio.ensure_future(generations[index].next())] = index
    finally:
        for task in waiting:
            task.cancel()


def _fail(http: web.Request, fault: Fault) -> web.StreamResponse:
    """:raises ApiError, ConnectionResetError: as the fault wants it."""
    if fault.kind == "reset":
        _reset(http)
    if fault.kind == "full":
        raise api.Full("The request queue is full.")
    raise api.CoreFailed("EngineCore encountered an issue. See stack trace (above) for the root cause.")


async def _fail_in_stream(
    http: web.Request, response: web.StreamResponse, answer: answers.Answer, fault: Fault
) -> web.StreamResponse:
    if fault.kind == "reset":
        _reset(http)
    if fault.kind == "abort":
        await response.write(answer.chunk(Said(0, NO_TOKEN, "", "abort")))
    else:
        await response.write(answers.error_event("Internal server error", api.CoreFailed.kind, 500))
    await response.write(answers.DONE)
    await response.write_eof()
    return response


async def _refuse_in_stream(http: web.Request, error: api.EngineRefuses) -> web.StreamResponse:
    """As vLLM does, whose headers are out by then: HTTP 200, and the error as the only event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    await response.write(b"data: " + error.body() + b"\n\n" + answers.DONE)
    await response.write_eof()
    return response


def _reset(http: web.Request) -> None:
    """:raises ConnectionResetError: always: there is nobody to write to any more."""
    if http.transport is not None:
        # The peer sees a reset, not an end.
        linger = struct.pack("ii", 1, 0)
        http.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        http.transport.abort()
    raise ConnectionResetError("as ordered")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise api.Malformed(str(error), _place(str(error), len(body))) from error


def _place(sentence: str, length: int) -> str:
    """Where a body is wrong, in vLLM's form: the field, or the byte."""
    if missing := re.search(r"missing required field `(\w+)`", sentence):
        return f"body.{missing[1]}"
    if field := re.search(r"at `\$\.?([^`]+)`", sentence):
        return "body." + field[1].replace("[", ".").replace("]", "")
    if byte := re.search(r"\(byte (\d+)\)", sentence):
        return f"body.{byte[1]}"
    return f"body.{length}" if length and "truncated" in sentence else "body"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors leave in vLLM's shape; what nobody expected is logged and told apart from the client's mistakes."""
    try:
        return await handler(request)
    except api.ApiError as error:
        return web.Response(status=error.status, body=error.body(), content_type="application/json")
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)  # what FastAPI answers
    except ConnectionResetError:
        raise  # the client left while we wrote: there is nobody to answer
    except Exception:
        _log.exception("request failed")
        message = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
        return web.Response(status=500, body=orjson.dumps({"error": message}), content_type="application/json")


async def serve(config: EngineConfig, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set; `ready` is called with the base address once requests are taken.

    :raises ValueError, FileNotFoundError, OSError: the configuration, the model directory or an address is unusable."""
    texts = vocabulary.load(config.model_dir, config.eos_one_in)
    publisher = None
    if config.kv_events_endpoint is not None:
        publisher = EventPublisher(
            config.kv_events_endpoint,
            config.kv_events_replay_endpoint,
            config.kv_events_topic,
            config.kv_events_buffer_steps,
        )
    try:
        server = EngineServer(config, texts, publisher)
        runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, config.host, config.port, backlog=1024)
            await site.start()
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(server.engine.run())]
                if publisher is not None:
                    background.append(tasks.create_task(publisher.answer_replays()))
                port = runner.addresses[0][1]
                ready(f"http://{config.host}:{port}")
                await stop.wait()
                for task in background:
                    task.cancel()
        finally:
            await runner.cleanup()
    finally:
        if publisher is not None:
            publisher.close()


async def run(config: EngineConfig) -> None:
    """The process: serve until SIGTERM or SIGINT, telling the address on stdout."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def announce(address: str) -> None:
        sys.stdout.write(f"engine_sim ready {address}\n")
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()

    await serve(config, announce, stop)
