"""Real engines through the gateway, with the official client: what their parsers and grammars make reaches it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.cluster import MODEL
from support.vllm import VllmCluster

from .test_chat import TOOLS, long_chat


@pytest.fixture
async def openai(cluster: VllmCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=cluster.api, api_key=cluster.key, max_retries=0) as client:
        yield client


async def whole_and_streamed(openai: AsyncOpenAI, **asked: Any) -> tuple[list[Any], list[Any]]:
    """The choices of one chat: of its whole answer, and of all chunks of its stream."""
    body = {"model": MODEL, **long_chat(), **asked}
    extra = {"ignore_eos": body.pop("ignore_eos")}
    whole = await openai.chat.completions.create(**body, extra_body=extra)
    stream = await openai.chat.completions.create(**body, extra_body=extra, stream=True)
    return whole.choices, [choice async for chunk in stream for choice in chunk.choices]


def text(choices: list[Any]) -> str:
    return "".join(choice.delta.content or "" for choice in choices)


async def test_a_call_comes_out_in_openais_form_whole_and_streamed(openai: AsyncOpenAI) -> None:
    """Random weights may fill its arguments up with blanks until there are no tokens left."""
    (whole,), streamed = await whole_and_streamed(
        openai, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "prefill"}}
    )

    (call,) = whole.message.tool_calls
    pieces = [call for choice in streamed for call in choice.delta.tool_calls or []]
    assert (call.type, call.function.name) == (pieces[0].type, pieces[0].function.name) == ("function", "prefill")
    assert call.id and pieces[0].id
    assert {piece.index for piece in pieces} == {0}
    assert call.function.arguments == "".join(piece.function.arguments or "" for piece in pieces)
    if whole.finish_reason != "length":
        assert json.loads(call.function.arguments)["hours"] in (1, 2)


async def test_a_schema_is_kept_whole_and_streamed(openai: AsyncOpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "hours", "schema": {"enum": ["one hour", "two hours"]}}}

    (whole,), streamed = await whole_and_streamed(openai, response_format=schema, ignore_eos=False)

    assert json.loads(whole.message.content) in ("one hour", "two hours")
    assert text(streamed) == whole.message.content
    assert whole.finish_reason == streamed[-1].finish_reason == "stop"


async def test_log_probabilities_are_the_same_whole_and_streamed(openai: AsyncOpenAI) -> None:
    (whole,), streamed = await whole_and_streamed(openai, max_tokens=12, logprobs=True, top_logprobs=2)

    entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content or []]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]
    assert entries and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert text(streamed) == whole.message.content


async def test_choices_come_apart_whole_and_streamed(openai: AsyncOpenAI) -> None:
    whole, streamed = await whole_and_streamed(openai, n=2, temperature=1.0, max_tokens=4)

    assert [choice.index for choice in whole] == [0, 1]
    assert sorted(choice.index for choice in streamed if choice.finish_reason) == [0, 1]
