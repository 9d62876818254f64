"""What comes over the bus comes out in OpenAI's form, and what a caller sends goes in unchanged."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from prefixbus.bus import errors, subjects

from .gateway_world import MODEL, Asked, World, chat

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_a_request_goes_in_as_it_came_with_its_headers(world: World) -> None:
    body = chat(temperature=0.5, max_tokens=3, tools=TOOLS, user="u", stream=True, response_format={"type": "text"})
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": trace, "Pb-Prefix-Class": "rag", "X-Request-Id": "abc"}

    async with (
        world.session() as session,
        session.post(f"{world.api}/chat/completions", json=body, headers=headers) as got,
    ):
        assert got.status == 200
        await got.read()

    (asked,) = world.asked
    del body["stream"]
    assert asked.subject == f"pb.v1.infer.demo.{MODEL}"
    assert asked.body == {**body, "stream_options": {"include_usage": True}, "resume": {}}
    assert asked.headers[subjects.HEADER_TRACEPARENT] == trace
    assert asked.headers[subjects.HEADER_PREFIX_CLASS] == "rag"
    assert asked.request_id.startswith("abc-")
    assert got.headers["X-Request-Id"] == asked.request_id


async def test_a_scope_in_the_url_is_the_requests_scope(world: World) -> None:
    url = world.api.replace("/v1", "/scopes/hr/v1")
    async with AsyncOpenAI(base_url=url, api_key=world.key) as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert world.asked[0].subject == f"pb.v1.infer.demo.{MODEL}.hr"


async def test_a_key_of_other_scopes_is_a_permission_error(world: World) -> None:
    key = f"acme.alice.{world.server.token('acme', ['sales'], label='alice')}"
    for base in (world.api, world.api.replace("/v1", "/scopes/hr/v1")):
        async with AsyncOpenAI(base_url=base, api_key=key) as client:
            with pytest.raises(openai.PermissionDeniedError) as raised:
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert raised.value.code == "permission_denied"

    async with AsyncOpenAI(base_url=world.api.replace("/v1", "/scopes/sales/v1"), api_key=key) as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert [asked.subject for asked in world.asked] == [f"pb.v1.infer.acme.{MODEL}.sales"]


async def test_tool_calls_come_out_whole_and_as_deltas(world: World, scripted: AsyncOpenAI) -> None:
    async def calls(asked: Asked) -> None:
        first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
        asked.chunk(
            {"index": 0, "delta": {"role": "assistant", "content": None, "tool_calls": [first]}, "finish_reason": None}
        )
        for piece in ('{"a": 1, ', '"b": 2}'):
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
            asked.chunk({"index": 0, "delta": delta, "finish_reason": None})
        asked.chunk({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
        asked.usage()
        asked.end()

    world.script = calls
    messages: list[Any] = [{"role": "user", "content": "1 + 2"}]

    whole = await scripted.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    async with scripted.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        streamed = await stream.get_final_completion()

    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.type == "function"
        assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("call_1", "add", {"a": 1, "b": 2})


class Hours(BaseModel):
    city: str
    open_at: int


async def test_a_format_goes_in_as_the_official_client_says_it_and_its_answer_is_parsed(
    world: World, scripted: AsyncOpenAI
) -> None:
    async def keeps_to_it(asked: Asked) -> None:
        asked.whole('{"city": "Bonn", "open_at": 9}')

    world.script = keeps_to_it
    messages: list[Any] = [{"role": "user", "content": "When?"}]

    parsed = await scripted.chat.completions.parse(model=MODEL, messages=messages, response_format=Hours)
    async with scripted.chat.completions.stream(model=MODEL, messages=messages, response_format=Hours) as stream:
        streamed = await stream.get_final_completion()
    await scripted.chat.completions.create(model=MODEL, messages=messages, response_format={"type": "json_object"})

    for answer in (parsed, streamed):
        assert answer.choices[0].message.parsed == Hours(city="Bonn", open_at=9)
    schema, as_stream, plain = (asked.body["response_format"] for asked in world.asked)
    assert schema == as_stream
    assert schema["json_schema"]["schema"]["required"] == ["city", "open_at"]
    assert plain == {"type": "json_object"}


async def test_reasoning_and_logprobs_come_out(world: World, scripted: AsyncOpenAI) -> None:
    def logprobs(token: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}

    async def thinks(asked: Asked) -> None:
        asked.chunk({"index": 0, "delta": {"role": "assistant", "reasoning": "hm"}, "logprobs": None})
        for token in "ab":
            asked.chunk({"index": 0, "delta": {"content": token}, "logprobs": logprobs(token), "finish_reason": None})
        asked.chunk({"index": 0, "delta": {}, "finish_reason": "stop"})
        asked.usage()
        asked.end()

    world.script = thinks
    answer = await scripted.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True
    )

    choice = answer.choices[0]
    assert choice.message.content == "ab"
    assert choice.message.model_dump()["reasoning"] == "hm"
    assert choice.logprobs and [each.token for each in choice.logprobs.content or []] == ["a", "b"]


async def test_several_choices_come_out_in_order(world: World, scripted: AsyncOpenAI) -> None:
    async def two(asked: Asked) -> None:
        for index, text in ((1, "B"), (0, "A"), (1, "b"), (0, "a")):
            asked.say(text, index=index, finish="stop" if text.islower() else None)
        asked.usage()
        asked.end()

    world.script = two

    answer = await scripted.completions.create(model=MODEL, prompt="x", n=2)

    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "Aa"), (1, "Bb")]


async def test_headers_tell_of_the_callers_own_request(world: World) -> None:
    async def told(asked: Asked) -> None:
        headers = {"Pb-Decision": "partial-hit", "Pb-Predicted-Tokens": "4", "Pb-Prompt-Tokens": "5", "Pb-Other": "w7"}
        asked.chunk({"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}, told=headers)
        asked.usage(cached=3)
        asked.end()

    world.script = told
    for stream in (False, True):
        async with world.session() as session:
            async with session.post(f"{world.api}/chat/completions", json=chat(stream=stream)) as got:
                await got.read()
        said = {name: value for name, value in got.headers.items() if name.startswith("Pb-")}
        cached = {} if stream else {"Pb-Cached-Tokens": "3"}
        assert said == {"Pb-Decision": "partial-hit", "Pb-Predicted-Tokens": "4", **cached}


async def test_a_refusal_has_its_status_and_says_when_to_come_again(world: World) -> None:
    async def full(asked: Asked) -> None:
        asked.keep_alive()
        asked.fail(errors.Overloaded(), Retry_After="7")

    world.script = full
    async with world.session() as session, session.post(f"{world.api}/chat/completions", json=chat(stream=True)) as got:
        content = await got.json()

    assert (got.status, got.headers["Retry-After"], got.headers["x-should-retry"]) == (503, "7", "true")
    assert content["error"]["code"] == "overloaded"


async def test_the_official_client_tries_again_what_may_be_tried_again(world: World) -> None:
    async def full_once(asked: Asked) -> None:
        if len(world.asked) == 1:
            asked.fail(errors.Overloaded(), Retry_After="1")
        else:
            asked.whole("now")

    world.script = full_once
    async with AsyncOpenAI(base_url=world.api, api_key=world.key, max_retries=1) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert answer.choices[0].message.content == "now"
    assert len({asked.request_id for asked in world.asked}) == 2


async def test_the_official_client_does_not_try_again_what_was_too_late(world: World) -> None:
    async def late(asked: Asked) -> None:
        asked.fail(errors.DeadlineExceeded())

    world.script = late
    async with AsyncOpenAI(base_url=world.api, api_key=world.key, max_retries=3) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
    assert len(world.asked) == 1


async def test_a_stream_that_fails_after_its_beginning_says_so_as_an_event(world: World, scripted: AsyncOpenAI) -> None:
    async def breaks(asked: Asked) -> None:
        asked.say("a")
        asked.fail(errors.EngineFailed())

    world.script = breaks
    stream = await scripted.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
    )

    first = await anext(aiter(stream))
    with pytest.raises(openai.APIError) as raised:
        await anext(aiter(stream))

    assert first.choices[0].delta.content == "a"
    assert raised.value.code == "engine_failed"
    assert world.metric("failed_streams_total", code="engine_failed") == 1


@pytest.mark.parametrize("world", [{"headers_after_s": 0.1}], indirect=True)
async def test_a_stream_that_waits_long_gets_its_headers_and_comments(world: World) -> None:
    go_on = asyncio.Event()

    async def waits(asked: Asked) -> None:
        while not go_on.is_set():
            asked.keep_alive()
            await asyncio.sleep(0.05)
        asked.fail(errors.Overloaded())

    world.script = waits
    async with world.session() as session, session.post(f"{world.api}/chat/completions", json=chat(stream=True)) as got:
        assert got.status == 200
        assert (await got.content.readline()).startswith(b": ")
        go_on.set()
        events = [line async for line in got.content if line.startswith(b"data: ")]

    (event,) = events
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "overloaded"


async def test_an_answer_goes_on_at_another_worker_and_reads_as_one(world: World, scripted: AsyncOpenAI) -> None:
    async def lost_once(asked: Asked) -> None:
        if "token_ids" not in asked.body["resume"]:
            asked.chunk(
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": "one "},
                    "token_ids": [11],
                    "finish_reason": None,
                },
                told={"Pb-Prompt-Tokens": "5"},
            )
            asked.say("two ", token_ids=[12, 13])
            asked.fail(errors.WorkerLost(), Pb_Resume="resumable")
            return
        asked.chunk({"index": 0, "delta": {"content": "three"}, "token_ids": [14], "finish_reason": "stop"})
        asked.usage(prompt=5, completion=4)
        asked.end()

    world.script = lost_once
    stream = await scripted.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    first, second = world.asked
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two three"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices] == ["assistant", None, None]
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 4
    assert second.body == {**first.body, "resume": {"token_ids": [11, 12, 13]}}
    assert second.request_id != first.request_id
    assert second.headers["Pb-Sending"] == "1"
    assert "token_ids" not in chunks[0].choices[0].model_dump()
    assert world.metric("resumed_total") == 1


async def test_an_answer_whose_usage_was_lost_is_whole_all_the_same(world: World, scripted: AsyncOpenAI) -> None:
    async def lost_at_the_end(asked: Asked) -> None:
        asked.chunk(
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "done"},
                "token_ids": [1, 2],
                "finish_reason": "stop",
            },
            told={"Pb-Prompt-Tokens": "5"},
        )
        asked.fail(errors.WorkerLost(), Pb_Resume="resumable")

    world.script = lost_at_the_end
    answer = await scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert answer.choices[0].message.content == "done"
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2)
    assert len(world.asked) == 1


async def test_an_answer_that_cannot_be_resumed_ends_with_what_happened(world: World, scripted: AsyncOpenAI) -> None:
    async def lost(asked: Asked) -> None:
        asked.say("text of unknown tokens")
        asked.fail(errors.WorkerLost(), Pb_Resume="not_resumable")

    world.script = lost
    with pytest.raises(openai.InternalServerError) as raised:
        await scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert (raised.value.status_code, raised.value.code) == (502, "worker_lost")
    assert len(world.asked) == 1


async def test_an_answer_goes_on_as_long_as_it_comes_on(world: World, scripted: AsyncOpenAI) -> None:
    """Workers that are lost again and again: only those that brought nothing count."""

    async def lost_after_each_word(asked: Asked) -> None:
        ids = asked.body["resume"].get("token_ids", [])
        asked.say(f"{len(ids)} ", token_ids=[len(ids)], finish="stop" if len(ids) == 7 else None)
        if len(ids) < 7:
            asked.fail(errors.WorkerLost(), Pb_Resume="resumable")
        else:
            asked.usage()
            asked.end()

    world.script = lost_after_each_word
    answer = await scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert answer.choices[0].message.content == "0 1 2 3 4 5 6 7 "


async def test_an_answer_that_does_not_come_on_ends(world: World, scripted: AsyncOpenAI) -> None:
    async def lost(asked: Asked) -> None:
        if not asked.body["resume"]:
            asked.say("one", token_ids=[1])
        asked.fail(errors.WorkerLost(), Pb_Resume="resumable")

    world.script = lost
    with pytest.raises(openai.InternalServerError) as raised:
        await scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    assert raised.value.code == "worker_lost"
    assert len(world.asked) == 4


async def test_an_answer_with_a_hole_in_it_is_asked_for_again_from_the_hole(
    world: World, scripted: AsyncOpenAI
) -> None:
    """What the server drops for a slow reader is missing; the old worker is told to stop."""

    async def with_a_hole(asked: Asked) -> None:
        if asked.body["resume"]:
            asked.say("two", token_ids=[2], finish="stop")
            asked.usage()
            asked.end()
            return
        asked.say("one ", token_ids=[1])
        asked.skip()
        asked.say("three", token_ids=[3])

    world.script = with_a_hole
    answer = await scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])

    first, second = world.asked
    assert answer.choices[0].message.content == "one two"
    assert second.body["resume"] == {"token_ids": [1]}
    assert world.cancelled == [first.request_id]
