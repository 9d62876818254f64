"""The official client, unchanged: only its base URL and key are ours."""

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from support.cluster import MODEL, Cluster
from support.nats import eventually

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs" / "operating.md"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is in a KV cache?"}]


def test_a_chat_by_the_synchronous_client(cluster: Cluster) -> None:
    with OpenAI(base_url=cluster.api, api_key=cluster.key) as client:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8)

    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 8


def test_a_stream_by_the_synchronous_client(cluster: Cluster) -> None:
    with OpenAI(base_url=cluster.api, api_key=cluster.key) as client:
        stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, stream=True)
        chunks = list(stream)

    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for it"


async def test_a_stream_says_the_same_as_a_whole_answer(openai: AsyncOpenAI) -> None:
    whole = await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    stream = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True
    )

    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == whole.choices[0].message.content


async def test_usage_in_a_stream_comes_in_a_last_chunk_of_its_own(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )

    chunks = [chunk async for chunk in stream]

    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 4


async def test_a_prompt_that_was_asked_before_comes_from_the_cache(openai: AsyncOpenAI) -> None:
    text = f"{uuid.uuid4().hex} " + "a prompt of some blocks, which is asked twice " * 20

    async def cached() -> int:
        answer = await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
        )
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [await cached() > 100 for _ in range(2)] == [False, True]


async def test_a_completion_whole_and_streamed(openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0)
    stream = await openai.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )

    text = "".join([chunk.choices[0].text async for chunk in stream])

    assert whole.object == "text_completion"
    assert text == whole.choices[0].text != ""
    assert whole.usage and whole.usage.completion_tokens == 8


async def test_several_choices_come_whole_and_apart(openai: AsyncOpenAI) -> None:
    whole = await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, n=3)
    stream = await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, n=3, stream=True)

    ends = [
        (choice.index, choice.finish_reason)
        async for chunk in stream
        for choice in chunk.choices
        if choice.finish_reason
    ]

    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert all(choice.message.content for choice in whole.choices)
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]


async def test_a_tool_that_must_be_called_is_called_whole_and_streamed(openai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]

    whole = await openai.chat.completions.create(model=MODEL, messages=QUESTION, tools=tools, tool_choice="required")
    async with openai.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice="required"
    ) as stream:
        streamed = await stream.get_final_completion()

    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert "city" in json.loads(call.function.arguments)


async def test_log_probabilities_come_for_every_token(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=2
    )

    found = answer.choices[0].logprobs
    assert found and len(found.content or []) == 4
    assert "".join(each.token for each in found.content or []) == answer.choices[0].message.content


async def test_a_stop_string_ends_the_answer(openai: AsyncOpenAI) -> None:
    before = await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    words = (before.choices[0].message.content or "").split(" ")
    word = next(each for each in words[3:] if each and words.count(each) == 1)

    answer = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stop=[word]
    )

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == " ".join(words).split(word)[0]


async def test_models_are_listed_and_looked_up(openai: AsyncOpenAI) -> None:
    listed = [model.id async for model in await openai.models.list()]

    assert listed == [MODEL]
    assert (await openai.models.retrieve(MODEL)).owned_by == "prefixbus"
    with pytest.raises(Exception, match="does not exist") as raised:
        await openai.models.retrieve("gpt-4")
    assert getattr(raised.value, "code", None) == "model_not_found"


async def test_the_client_is_told_the_requests_id(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )

    assert (answer._request_id or "").startswith("mine-")


async def test_the_id_that_the_client_is_told_is_the_one_that_explain_takes(
    cluster: Cluster, openai: AsyncOpenAI
) -> None:
    answer = await openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    command = [sys.executable, "-m", "prefixbus", "explain", answer._request_id or "", "--state", str(cluster.state)]

    async def is_explained() -> bool:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=15)
        return done.returncode == 0 and b"decided" in done.stdout

    await eventually(is_explained, "its decision is on the record", 15)


@pytest.mark.parametrize(
    ("body", "kind", "code", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": []}, openai.BadRequestError, "bad_request", "messages"),
        ({"temperature": "hot"}, openai.BadRequestError, "bad_request", "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "bad_request", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"audio": {"voice": "x", "format": "mp3"}}, openai.BadRequestError, "unsupported", "audio"),
        ({"web_search_options": {}}, openai.BadRequestError, "unsupported", "web_search_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_is_the_clients_own_class_with_code_and_field(
    cluster: Cluster,
    body: dict[str, object],
    kind: type[openai.APIStatusError],
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    asked: dict[str, object] = {"model": MODEL, "messages": QUESTION, **body, "stream": stream}
    async with AsyncOpenAI(base_url=cluster.api, api_key=cluster.key) as client:
        with pytest.raises(kind) as raised:
            await client.chat.completions.create(**asked)  # type: ignore[call-overload]

    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id


async def test_usage_in_every_chunk_is_refused_by_name(openai: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}

    with pytest.raises(BadRequestError) as raised:
        await openai.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, stream_options=options)

    assert (raised.value.code, raised.value.param) == ("unsupported", "stream_options.continuous_usage_stats")


@pytest.mark.parametrize("key", ["demo.wrong", "nobody.wrong", "wrong", "demo.other.wrong"])
async def test_a_wrong_key_is_an_authentication_error_and_nothing_more(cluster: Cluster, key: str) -> None:
    async with AsyncOpenAI(base_url=cluster.api, api_key=key, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.chat.completions.create(model=MODEL, messages=QUESTION)

    assert raised.value.body == {
        "message": "Incorrect API key provided.",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


async def test_a_client_that_times_out_leaves_nothing_behind(cluster: Cluster, openai: AsyncOpenAI) -> None:
    from openai import APITimeoutError

    with pytest.raises(APITimeoutError):
        await openai.with_options(timeout=0.3).chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=2000, extra_body={"ignore_eos": True}
        )

    await cluster.settles(4.0)


async def test_a_stream_that_is_closed_early_is_cancelled(cluster: Cluster, openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))

    await stream.close()

    await cluster.settles(4.0)


async def test_many_at_once_by_one_client(openai: AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        answer = await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Number {number}"}], max_tokens=4
        )
        return answer.id

    ids = await asyncio.gather(*(ask(number) for number in range(30)))

    assert len(set(ids)) == 30


def test_the_program_that_the_documentation_shows_runs(cluster: Cluster) -> None:
    found = re.search(r"```python\n(from openai .*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert found
    environ = {**os.environ, "OPENAI_BASE_URL": cluster.api, "OPENAI_API_KEY": cluster.key}

    done = subprocess.run([sys.executable, "-c", found[1]], env=environ, capture_output=True, timeout=18)

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()
