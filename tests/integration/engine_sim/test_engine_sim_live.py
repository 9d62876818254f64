"""A live engine, spoken to as vLLM would be: by a real HTTP client and a real subscriber of its events."""

import asyncio
import contextlib
import json
import re
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientError, ClientSession, TCPConnector
from support import models as tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.engine_sim.server import EngineConfig, serve
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.work import Workshop

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with two special tokens and a chat template, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("model")
    words = [f"{a}{b}{c}" for a in "bdfglm" for b in "aeiou" for c in "nrst"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


class Client:
    """A plain HTTP client of one engine."""

    def __init__(self, session: ClientSession, base: str) -> None:
        self.session = session
        self.base = base
        self.replay_endpoint = ""

    async def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with self.session.post(self.base + path, json=body or {}, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.base + path) as response:
            assert response.status == 200
            return await response.json()

    async def text(self, path: str) -> str:
        async with self.session.get(self.base + path) as response:
            return await response.text()

    async def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
        """The events of a stream, decoded; checks its form and that it ends as it must."""
        async with self.session.post(self.base + path, json=body | {"stream": True}, headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def complete(self, prompt: str | list[int], **more: Any) -> Any:
        status, body = await self.post("/v1/completions", {"prompt": prompt, "ignore_eos": True} | more)
        assert status == 200, body
        return body

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the engine's state until a condition holds (the test's timeout is the limit)."""
        while True:
            stats: dict[str, Any] = await self.get("/sim/stats")
            if holds(stats):
                return stats


StartEngine = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start_engine(model_dir: Path) -> AsyncIterator[StartEngine]:
    """Starts engines with the given settings over quick defaults; they are stopped with the test."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(**settings: Any) -> Client:
            defaults: dict[str, Any] = {
                "model_dir": model_dir,
                "served_model_name": "tiny",
                "block_size": 4,
                "num_gpu_blocks": 65,
                "max_model_len": 128,
                "profile": "instant",
                "enable_prompt_tokens_details": True,
                "dev_mode": True,
            }
            stop = asyncio.Event()
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            server = asyncio.create_task(serve(EngineConfig(**defaults | settings), ready.set_result, stop))

            async def shut() -> None:
                stop.set()
                await server

            cleanup.push_async_callback(shut)
            both: set[asyncio.Future[Any]] = {server, ready}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if server.done():
                await server
            session = await cleanup.enter_async_context(ClientSession(connector=TCPConnector(limit=0)))
            client = Client(session, await ready)
            client.replay_endpoint = (await client.get("/sim/stats"))["kv_events_replay_endpoint"]
            return client

        yield start


class Subscriber:
    """Reads an engine's events; binds, since the engine connects to plain tcp endpoints."""

    def __init__(self, context: zmq.asyncio.Context, topic: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def next(self) -> tuple[bytes, int, list[Any]]:
        topic, seq, payload = await self._socket.recv_multipart()
        return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)

    async def hears_within_ms(self, milliseconds: int) -> bool:
        return bool(await self._socket.poll(milliseconds))


@pytest.fixture
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


PROMPT = list(range(10, 31))  # 21 tokens: five full blocks of 4 and one over


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def cached(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


# -- completions


async def test_a_completion_answers_in_vllms_shape(start_engine: StartEngine) -> None:
    engine = await start_engine()

    status, body = await engine.post(
        "/v1/completions",
        {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "seed": 1},
        {"X-Request-Id": "mine"},
    )

    assert status == 200
    assert (body["id"], body["object"], body["model"]) == ("cmpl-mine", "text_completion", "tiny")
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["prompt_token_ids"] == PROMPT and len(choice["token_ids"]) == 3
    assert re.fullmatch(r"( [a-z]+){3}", choice["text"])
    assert body["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("directory", [tokenizers.tiny, tokenizers.tiny_vocabulary], ids=["tokenizer.json", "vocab"])
async def test_a_second_models_prompts_are_reused_as_far_as_their_blocks_go(
    start_engine: StartEngine, directory: Callable[[], Path]
) -> None:
    """From a client's body to the engine's cache, with another tokenizer than the default one."""
    engine = await start_engine(model_dir=directory(), max_model_len=512, num_gpu_blocks=257)
    body = {"messages": [{"role": "user", "content": "The quick brown fox, съешь же ещё, 人工智能."}]}
    at = Workshop(Memo(tenant_bytes=1 << 20, total_bytes=1 << 20), b"k" * 32, VirtualClock())
    request = intake.parse(json.dumps(body).encode(), "tiny", LimitsSection())
    made = await at.tokens(tokenizers.load(directory()), "acme", "", request, 512, 0)
    ids = array("I", made.ids).tolist()

    cold = await engine.complete(ids, max_tokens=1)
    warm = await engine.complete(ids, max_tokens=1)
    _, told = await engine.post("/tokenize", body)

    assert told["tokens"] == ids
    assert (cached(cold), cached(warm)) == (0, (len(ids) - 1) // 4 * 4)
    assert warm["choices"][0]["text"]


async def test_a_stream_has_a_chunk_for_each_token_then_usage_then_done(start_engine: StartEngine) -> None:
    engine = await start_engine()
    whole = await engine.complete(PROMPT, max_tokens=4)

    chunks = await engine.stream(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream_options": {"include_usage": True}},
        {"X-Request-Id": "mine"},
    )

    assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert text_of(chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert cached(chunks[-1]) == 20


async def test_a_stream_brings_token_ids_when_asked(start_engine: StartEngine) -> None:
    engine = await start_engine()
    whole = await engine.complete(PROMPT, max_tokens=4, return_token_ids=True)

    chunks = await engine.stream(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    )

    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]


async def test_text_prompts_are_tokenised_and_output_text_is_its_tokens(start_engine: StartEngine) -> None:
    engine = await start_engine()
    _, tokenized = await engine.post("/tokenize", {"prompt": "ban bar", "return_token_strs": True})

    body = await engine.complete("ban bar", max_tokens=5, return_token_ids=True)

    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == tokenized["tokens"] and tokenized["count"] == len(tokenized["token_strs"])
    _, again = await engine.post("/tokenize", {"prompt": choice["text"]})
    assert again["tokens"] == choice["token_ids"]


async def test_an_interrupted_output_is_continued_exactly_on_another_engine(start_engine: StartEngine) -> None:
    one, two = await start_engine(), await start_engine(profile="h100-8b", num_gpu_blocks=40)
    whole = (await one.complete(PROMPT, max_tokens=8, return_token_ids=True))["choices"][0]

    rest = await two.complete(PROMPT + whole["token_ids"][:3], max_tokens=5, cache_salt="s", return_token_ids=True)

    assert rest["choices"][0]["token_ids"] == whole["token_ids"][3:]


async def test_a_stop_string_ends_the_text_before_it(start_engine: StartEngine) -> None:
    engine = await start_engine()
    words = (await engine.complete(PROMPT, max_tokens=6))["choices"][0]["text"].split()
    stop = words[2] + " " + words[3][0]

    body = await engine.complete(PROMPT, max_tokens=6, stop=stop)
    chunks = await engine.stream(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "stop": stop}
    )

    expected = f" {words[0]} {words[1]} "
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    assert body["usage"]["completion_tokens"] == 4
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    assert (await engine.get("/sim/stats"))["blocks_used"] == 0


async def test_an_output_ends_by_itself_unless_end_of_sequence_is_ignored(start_engine: StartEngine) -> None:
    engine = await start_engine(eos_one_in=3)

    _, body = await engine.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 100})
    longer = await engine.complete(PROMPT, max_tokens=100)

    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < 100
    assert (longer["choices"][0]["finish_reason"], longer["usage"]["completion_tokens"]) == ("length", 100)


# -- the cache


async def test_salts_and_adapters_separate_and_a_repeat_hits(start_engine: StartEngine) -> None:
    engine = await start_engine(adapters=("tuned",))
    await engine.complete(PROMPT, cache_salt="a")

    assert cached(await engine.complete(PROMPT, cache_salt="a")) == 20
    assert cached(await engine.complete(PROMPT, cache_salt="b")) == 0
    assert cached(await engine.complete(PROMPT)) == 0
    assert cached(await engine.complete(PROMPT, model="tuned", cache_salt="a")) == 0
    assert (await engine.get("/sim/stats"))["wrong_hits"] == 0


async def test_wrong_hits_are_seen_when_the_engine_ignores_salts(start_engine: StartEngine) -> None:
    engine = await start_engine(ignore_salt=True)
    await engine.complete(PROMPT, cache_salt="a")

    assert cached(await engine.complete(PROMPT, cache_salt="b")) == 20

    assert (await engine.get("/sim/stats"))["wrong_hits"] == 5
    assert 'engine_sim_wrong_hits_total{engine="0",model_name="tiny"} 5.0' in await engine.text("/metrics")


async def test_cached_tokens_are_null_without_the_flag(start_engine: StartEngine) -> None:
    engine = await start_engine(enable_prompt_tokens_details=False)

    body = await engine.complete(PROMPT)

    assert body["usage"]["prompt_tokens_details"] is None


async def test_a_reset_is_refused_while_requests_run_unless_they_are_reset_too(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1)
    await engine.complete(PROMPT)
    await engine.post("/sim/pause")
    running = asyncio.create_task(engine.complete(PROMPT, max_tokens=30, return_token_ids=True))
    await engine.post("/sim/step")
    await engine.until(lambda stats: stats["running"] == 1)

    refused = await engine.post("/reset_prefix_cache")
    done = await engine.post("/reset_prefix_cache?reset_running_requests=true")
    await engine.post("/sim/resume")
    body = await running

    assert refused == (200, {"success": False})
    assert done == (200, {"success": True})
    assert body["usage"]["completion_tokens"] == 30
    assert body == await engine.complete(PROMPT, max_tokens=30, return_token_ids=True) | {
        "id": body["id"],
        "created": body["created"],
        "usage": body["usage"],
    }
    assert (await engine.get("/sim/stats"))["totals"]["preemptions"] == 1


async def test_a_reset_of_an_external_cache_is_taken_though_there_is_none(start_engine: StartEngine) -> None:
    engine = await start_engine()

    assert await engine.post("/reset_prefix_cache?reset_external=true") == (200, {"success": True})


async def test_prompt_logprobs_make_the_engine_skip_cache_reads(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await engine.complete(PROMPT)

    body = await engine.complete(PROMPT, prompt_logprobs=1)

    assert cached(body) == 0
    assert cached(await engine.complete(PROMPT)) == 20


async def test_the_sources_of_events_are_told(start_engine: StartEngine, tmp_path: Path) -> None:
    silent = await start_engine()
    endpoint = f"ipc://{tmp_path}/events"
    telling = await start_engine(kv_events_endpoint=endpoint, kv_events_topic="kv@w1")

    assert await silent.get("/kv_event_sources") == {}
    (told,) = (await telling.get("/kv_event_sources")).values()
    assert (told["endpoint"], told["replay_endpoint"], told["topic"]) == (endpoint, None, "kv@w1")


async def test_lifetimes_of_evicted_blocks_are_told_when_asked(start_engine: StartEngine) -> None:
    engine = await start_engine(kv_cache_metrics=True, num_gpu_blocks=9)
    await engine.complete(PROMPT, max_tokens=4)
    await engine.complete([token + 100 for token in PROMPT], max_tokens=4)

    told = await engine.text("/metrics")

    for name in ("kv_block_lifetime", "kv_block_idle_before_evict", "kv_block_reuse_gap"):
        assert f"vllm:{name}_seconds_bucket" in told
    assert re.search(r"vllm:kv_block_lifetime_seconds_count\{[^}]*\} [1-9]", told)


async def test_the_reset_exists_in_dev_mode_only(start_engine: StartEngine) -> None:
    engine = await start_engine(dev_mode=False)

    assert (await engine.post("/reset_prefix_cache"))[0] == 404


# -- clients that leave, many at once


async def test_a_client_that_leaves_aborts_its_request(start_engine: StartEngine) -> None:
    engine = await start_engine(profile="h100-8b")
    await engine.post("/sim/pause")
    await engine.post("/sim/step")
    async with ClientSession() as session:
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
        response = await session.post(engine.base + "/v1/completions", json=body)
        await response.content.readline()
        response.close()

    stats = await engine.until(lambda stats: stats["running"] == 0)

    assert stats["blocks_used"] == 0
    assert stats["totals"]["finished"] == {"abort": 1}


async def test_a_client_that_leaves_before_the_first_token_aborts_its_request(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await engine.post("/sim/pause")
    gone = asyncio.create_task(engine.complete(PROMPT))
    await engine.until(lambda stats: stats["waiting"] == 1)

    gone.cancel()

    stats = await engine.until(lambda stats: stats["waiting"] == 0)
    assert stats["totals"]["finished"] == {"abort": 1}


async def test_many_requests_at_once_each_get_their_own_answer(start_engine: StartEngine) -> None:
    engine = await start_engine(num_gpu_blocks=30)
    prompts = [[*PROMPT[: 5 + number], 40 + number] for number in range(16)]
    alone = [(await engine.complete(prompt, max_tokens=12))["choices"] for prompt in prompts]

    together = await asyncio.gather(*[engine.complete(prompt, max_tokens=12) for prompt in prompts])

    assert [body["choices"] for body in together] == alone
    assert (await engine.get("/sim/stats"))["blocks_used"] == 0


async def test_the_same_request_id_twice_in_flight_is_two_generations(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await engine.post("/sim/pause")
    headers = {"X-Request-Id": "same"}
    both = [asyncio.create_task(engine.post("/v1/completions", {"prompt": PROMPT}, headers)) for _ in range(2)]
    await engine.until(lambda stats: stats["waiting"] == 2)
    await engine.post("/sim/resume")

    (_, one), (_, two) = await asyncio.gather(*both)

    assert one["id"] == two["id"] == "cmpl-same"
    assert one["choices"] == two["choices"]


# -- chat


async def test_chat_renders_the_models_template_and_a_next_turn_hits_the_last(start_engine: StartEngine) -> None:
    engine = await start_engine()
    messages = [{"role": "system", "content": "ban"}, {"role": "user", "content": [{"type": "text", "text": "bar"}]}]
    asked = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}

    _, first = await engine.post("/v1/chat/completions", asked | {"messages": messages}, {"X-Request-Id": "c"})
    answer = first["choices"][0]["message"]
    _, tokenized = await engine.post("/tokenize", {"messages": messages})
    turn = [*messages, answer, {"role": "user", "content": "bas"}]
    _, second = await engine.post("/v1/chat/completions", asked | {"messages": turn})

    assert (first["id"], first["object"], answer["role"]) == ("chatcmpl-c", "chat.completion", "assistant")
    assert first["prompt_token_ids"] == tokenized["tokens"]
    with_kv = len(tokenized["tokens"]) + 5  # all of the answer but its last token
    assert cached(second) == with_kv // 4 * 4


async def test_a_chat_stream_opens_with_the_role(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"messages": [{"role": "user", "content": "ban"}], "max_tokens": 3, "ignore_eos": True}
    _, whole = await engine.post("/v1/chat/completions", body)

    chunks = await engine.stream("/v1/chat/completions", body)

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "ban"}], "max_tokens": 60, "ignore_eos": True}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 3},
                "unit": {"enum": ["C", "F"]},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "days", "unit"],
        },
    },
}
SEND = {"type": "function", "function": {"name": "send"}}
ARGUMENTS = {"city": "made up", "days": 3, "unit": "C"}
FINDS_CALLS: dict[str, Any] = {"tool_call_parser": "any", "enable_auto_tool_choice": True, "max_model_len": 256}


def calls_of(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """A stream's calls, put together as OpenAI's clients do."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                call = found.setdefault(delta["index"], {"arguments": ""})
                call |= {name: delta[name] for name in ("id", "type") if name in delta}
                call |= {"name": delta["function"]["name"]} if "name" in delta["function"] else {}
                call["arguments"] += delta["function"].get("arguments", "")
    return found


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ({"type": "function", "function": {"name": "lookup"}}, ["lookup"], "stop"),
        ("required", ["lookup", "send"], "tool_calls"),
    ],
    ids=["named", "required"],
)
async def test_a_forced_call_has_arguments_of_its_schema(
    start_engine: StartEngine, choice: Any, names: list[str], reason: str
) -> None:
    engine = await start_engine(**FINDS_CALLS)
    body = CHAT | {"tools": [LOOKUP, SEND], "tool_choice": choice}

    chunks = await engine.stream("/v1/chat/completions", body)
    _, whole = await engine.post("/v1/chat/completions", body)

    found = calls_of(chunks)
    assert [found[index]["name"] for index in sorted(found)] == names
    assert json.loads(found[0]["arguments"]) == ARGUMENTS
    assert {call["type"] for call in found.values()} == {"function"}
    assert len({call["id"] for call in found.values()}) == len(names)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    (told,) = whole["choices"]
    assert (told["finish_reason"], told["message"]["content"]) == (reason, "")
    assert [call["function"] for call in told["message"]["tool_calls"]] == [
        {"name": call["name"], "arguments": call["arguments"]} for call in found.values()
    ]
    assert (await engine.get("/sim/stats"))["blocks_used"] == 0


async def test_calls_one_by_one_if_asked_for_and_cut_short_by_the_limit(start_engine: StartEngine) -> None:
    engine = await start_engine(**FINDS_CALLS)
    body = CHAT | {"tools": [LOOKUP, SEND], "tool_choice": "required"}

    single = await engine.stream("/v1/chat/completions", body | {"parallel_tool_calls": False})
    short = await engine.stream("/v1/chat/completions", body | {"max_tokens": 2})

    assert list(calls_of(single)) == [0]
    assert short[-1]["choices"][0]["finish_reason"] == "length"
    assert calls_of(single)[0]["arguments"].startswith(calls_of(short)[0]["arguments"])


async def test_an_engine_without_parsers_refuses_tools_that_may_be_called(start_engine: StartEngine) -> None:
    engine = await start_engine()

    refused = [
        await engine.post("/v1/chat/completions", CHAT | {"tools": [LOOKUP]} | asked)
        for asked in ({}, {"tool_choice": "required"}, {"tool_choice": "none"})
    ]

    assert [status for status, _ in refused] == [400, 400, 200]
    assert "--enable-auto-tool-choice and --tool-call-parser" in refused[0][1]["error"]["message"]
    assert 'tool_choice="required" requires --tool-call-parser' in refused[1][1]["error"]["message"]


async def test_tools_by_choice_are_never_chosen(start_engine: StartEngine) -> None:
    engine = await start_engine(**FINDS_CALLS)

    chunks = await engine.stream("/v1/chat/completions", CHAT | {"tools": [LOOKUP], "max_tokens": 3})

    assert not calls_of(chunks) and "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


async def test_a_chat_begins_with_its_reasoning_if_there_is_a_parser_for_it(start_engine: StartEngine) -> None:
    engine = await start_engine(reasoning_parser="any", model_revision="r")
    plain = await start_engine(model_revision="r")
    body = CHAT | {"max_tokens": 6, "stream_options": {"include_usage": True}}

    *chunks, usage = await engine.stream("/v1/chat/completions", body)
    hidden = await engine.stream("/v1/chat/completions", body | {"include_reasoning": False})
    _, off = await engine.post("/v1/chat/completions", CHAT | {"max_tokens": 6, "reasoning_effort": "none"})
    _, said = await plain.post("/v1/chat/completions", CHAT | {"max_tokens": 6})

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    assert ["reasoning" in delta for delta in deltas] == [True] * 4 + [False] * 2
    text = said["choices"][0]["message"]["content"]
    assert "".join(delta.get("reasoning", "") + delta.get("content", "") for delta in deltas) == text
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert not any("reasoning" in choice["delta"] for chunk in hidden for choice in chunk["choices"])
    assert (off["choices"][0]["message"]["content"], off["choices"][0]["message"]["reasoning"]) == (text, None)


async def test_a_chats_prompt_may_be_given_in_tokens(start_engine: StartEngine) -> None:
    """As vLLM takes it of a prompt that another engine prefilled; the messages are not rendered."""
    engine = await start_engine()
    body = CHAT | {"max_tokens": 3, "return_token_ids": True, "kv_transfer_params": {"prompt_token_ids": PROMPT}}

    chunks = await engine.stream("/v1/chat/completions", body)
    completed = await engine.complete(PROMPT, max_tokens=3, return_token_ids=True)
    status, error = await engine.post(
        "/v1/chat/completions", CHAT | {"kv_transfer_params": {"prompt_token_ids": [1, "x"]}}
    )

    assert chunks[0]["prompt_token_ids"] == PROMPT
    told = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert told == completed["choices"][0]["token_ids"]
    assert (status, error["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")


async def test_several_choices_each_say_something_else(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "n": 3, "return_token_ids": True}

    _, whole = await engine.post("/v1/completions", body)
    chunks = await engine.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    _, alone = await engine.post("/v1/completions", body | {"n": 1})

    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 3 and texts[0] == alone["choices"][0]["text"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(c["text"] for c in choices if c["index"] == index) for index in range(3)] == texts
    assert sorted(c["index"] for c in choices if c["finish_reason"] == "length") == [0, 1, 2]
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [PROMPT] * 3
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 12
    assert (await engine.get("/sim/stats"))["blocks_used"] == 0


async def test_logprobs_come_in_the_form_of_each_endpoint(start_engine: StartEngine) -> None:
    """A chat has as many alternatives as it asked for, a completion one token more, unless that is among them."""
    engine = await start_engine()
    chat = CHAT | {"max_tokens": 2, "logprobs": True, "kv_transfer_params": {"prompt_token_ids": PROMPT}}

    completed = await engine.complete(PROMPT, max_tokens=2, logprobs=2)
    chunks = await engine.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "logprobs": 2})
    chatted = await engine.stream("/v1/chat/completions", chat | {"top_logprobs": 2})
    bare = await engine.stream("/v1/chat/completions", chat)

    told = completed["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == completed["choices"][0]["text"]
    assert told["text_offset"] == [0, len(told["tokens"][0])]
    assert [next(iter(top)) for top in told["top_logprobs"]] == told["tokens"]
    assert [len(top) for top in told["top_logprobs"]] == [2, 2]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in told:
        assert [value for one in streamed for value in one[name]] == told[name]
    content = [entry for chunk in chatted[1:] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == told["tokens"]
    assert [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content] == told[
        "top_logprobs"
    ]
    assert [bytes(entry["bytes"]).decode() for entry in content] == told["tokens"]
    assert all(not entry["top_logprobs"] for chunk in bare[1:] for entry in chunk["choices"][0]["logprobs"]["content"])


async def test_requests_fail_as_they_are_told_to(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}

    await engine.post("/sim/fault", {"kind": "error"})
    await engine.post("/sim/fault", {"kind": "full"})
    before = [await engine.post("/v1/completions", body) for _ in range(3)]
    await engine.post("/sim/fault", {"kind": "error", "after_tokens": 2})
    await engine.post("/sim/fault", {"kind": "abort", "after_tokens": 2})
    within = [await engine.stream("/v1/completions", body) for _ in range(2)]
    await engine.post("/sim/fault", {"kind": "reset", "after_tokens": 2})
    with pytest.raises(ClientError):
        await engine.stream("/v1/completions", body)
    await engine.post("/sim/fault", {"kind": "reset", "count": 2})
    for _ in range(2):
        with pytest.raises(ClientError):
            await engine.post("/v1/completions", body)

    assert [status for status, _ in before] == [500, 503, 200]
    assert [len(chunks) for chunks in within] == [3, 3]
    assert within[0][-1]["error"]["code"] == 500
    assert within[1][-1]["choices"][0]["finish_reason"] == "abort"
    assert (await engine.get("/sim/stats"))["blocks_used"] == 0


# -- errors and the other routes


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/completions", {"prompt": list(range(129))}, 400, "maximum context length is 128 tokens"),
        ("/v1/completions", {"prompt": list(range(128))}, 400, "max_tokens must be at least 1, got 0"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 129}, 400, "max_tokens=129 cannot be greater"),
        ("/v1/completions", {"prompt": [5000]}, 400, "Token id 5000 is out of vocabulary"),
        ("/v1/completions", {"prompt": [-1]}, 400, "token ids"),
        ("/v1/completions", {"prompt": [1, "x"]}, 400, "token ids"),
        ("/v1/completions", {"prompt": ""}, 400, "must be provided and non-empty"),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "message"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "audio"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "exactly one"),
    ],
)
async def test_errors_have_vllms_shape(
    start_engine: StartEngine, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    engine = await start_engine()

    got, answer = await engine.post(path, body)

    assert got == status
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == status
    if status == 404:
        assert answer["error"]["type"] == "NotFoundError"
    else:
        assert answer["error"]["type"] == ("Bad Request" if says == "token ids" else "BadRequestError")
    assert says in answer["error"]["message"]


async def test_a_body_that_is_not_json_is_a_bad_request(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with engine.session.post(engine.base + "/v1/completions", data=b"{") as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert (error["type"], error["param"]) == ("Bad Request", "body.1")


async def test_what_only_the_engine_finds_is_told_in_a_stream_that_has_begun(start_engine: StartEngine) -> None:
    engine = await start_engine()

    events = await engine.stream("/v1/completions", {"prompt": [5000]})

    assert events == [
        {
            "error": {
                "message": "Token id 5000 is out of vocabulary",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        }
    ]
    assert (await engine.get("/sim/stats"))["running"] == 0


async def test_an_answer_is_as_long_as_there_is_room_behind_its_prompt(start_engine: StartEngine) -> None:
    engine = await start_engine()

    body = await engine.complete([1] * 100, max_tokens=128)

    assert body["usage"]["completion_tokens"] == 28
    assert body["choices"][0]["finish_reason"] == "length"


async def test_models_are_listed_with_adapters_under_their_parent(start_engine: StartEngine) -> None:
    engine = await start_engine(adapters=("tuned",))

    listed = (await engine.get("/v1/models"))["data"]

    assert [(card["id"], card["parent"], card["max_model_len"]) for card in listed] == [
        ("tiny", None, 128),
        ("tuned", "tiny", 128),
    ]


async def test_metrics_carry_vllms_names(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await engine.complete(PROMPT, max_tokens=2)
    await engine.complete(PROMPT, max_tokens=2)

    text = await engine.text("/metrics")

    labels = 'engine="0",model_name="tiny"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 42.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 20.0",
        f"vllm:generation_tokens_total{{{labels}}} 4.0",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 20.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0",
        f"vllm:request_queue_time_seconds_count{{{labels}}} 2.0",
        f"vllm:num_preemptions_total{{{labels}}} 0.0",
    ):
        assert line in text


# -- events


async def test_events_have_vllms_frames_and_replay_gives_the_same_again(
    start_engine: StartEngine, zmq_context: zmq.asyncio.Context
) -> None:
    subscriber = Subscriber(zmq_context, "kv@tiny")
    engine = await start_engine(
        kv_events_endpoint=subscriber.endpoint, kv_events_replay_endpoint="tcp://127.0.0.1:*", kv_events_topic="kv@tiny"
    )
    sent = 0
    while not await subscriber.hears_within_ms(50):  # what was sent before the connection stood is gone, as with vLLM
        await engine.complete([sent, *PROMPT], max_tokens=1, cache_salt="pepper")
        sent += 1
    topic, seq, batch = await subscriber.next()

    replayed = await _replay(zmq_context, engine.replay_endpoint, first=0)

    assert topic == b"kv@tiny"
    assert [number for number, _ in replayed] == list(range(sent)), "seq starts at 0 in every process"
    assert replayed[seq] == (seq, batch)
    timestamp, (event,), rank = batch
    assert timestamp > 1e9 and rank == 0
    assert event["type"] == "BlockStored" and event["medium"] == "GPU" and event["block_size"] == 4
    assert len(event["block_hashes"]) == 5 and event["token_ids"] == [seq, *PROMPT[:19]]
    assert event["parent_block_hash"] is None
    assert event["extra_keys"] == [["pepper"], None, None, None, None]
    assert await _replay(zmq_context, engine.replay_endpoint, first=sent) == []


async def test_evictions_and_clearings_reach_the_subscriber_in_order(
    start_engine: StartEngine, zmq_context: zmq.asyncio.Context
) -> None:
    engine = await start_engine(
        num_gpu_blocks=8, kv_events_endpoint="tcp://127.0.0.1:1", kv_events_replay_endpoint="tcp://127.0.0.1:*"
    )
    await engine.complete(PROMPT, max_tokens=1)
    await engine.complete([50, *PROMPT], max_tokens=1)
    await engine.post("/reset_prefix_cache")
    before = await _replay(zmq_context, engine.replay_endpoint, first=0)
    await engine.complete(PROMPT, max_tokens=1)

    after = await _replay(zmq_context, engine.replay_endpoint, first=0)

    kinds = [[event["type"] for event in batch[1]] for _, batch in before]
    assert kinds == [["BlockStored"], ["BlockRemoved"] * 4 + ["BlockStored"]], "an idle engine does not tell of a reset"
    first, second = before[0][1][1][0]["block_hashes"], [e["block_hashes"] for e in before[1][1][1][:4]]
    assert second == [[key] for key in reversed(first[1:])], "tail first, one event a copy"
    assert [event["type"] for event in after[2][1][1]] == ["AllBlocksCleared", "BlockStored"]


async def _replay(context: zmq.asyncio.Context, endpoint: str, first: int) -> list[tuple[int, Any]]:
    """What the replay socket has from `first` on, by vLLM's DEALER protocol."""
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while True:
            empty, _topic, seq, payload = await dealer.recv_multipart()
            assert empty == b""
            if seq == b"\xff" * 8:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))
    finally:
        dealer.close(linger=0)


# -- the process


async def test_the_process_tells_its_address_serves_and_stops_on_sigterm(model_dir: Path) -> None:
    flags = ["--model-dir", str(model_dir), "--served-model-name", "tiny", "--port", "0", "--profile", "instant"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prefixbus.engine_sim", *flags, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        ready = (await process.stdout.readline()).decode()
        match = re.fullmatch(r"engine_sim ready (http://127\.0\.0\.1:\d+)\n", ready)
        assert match, ready
        async with ClientSession() as session:
            body = await Client(session, match[1]).complete(PROMPT)
        assert body["usage"]["completion_tokens"] == 16
    finally:
        process.send_signal(signal.SIGTERM)
        code = await process.wait()
    assert code == 0


async def test_an_unusable_model_directory_is_told_in_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prefixbus.engine_sim",
        "--model-dir",
        str(tmp_path),
        "--served-model-name",
        "x",
        stderr=asyncio.subprocess.PIPE,
    )

    _, said = await process.communicate()

    assert process.returncode == 2
    assert said.decode().count("\n") == 1 and "tokenizer.json" in said.decode()
