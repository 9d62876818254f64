"""Several prompts in one request for completions: their answers come as one, and end as one."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from support.cluster import MODEL as SERVED
from support.cluster import Cluster
from support.nats import eventually

from prefixbus.bus import errors
from prefixbus.gateway.prompts import MAX_PROMPTS

from .gateway_world import MODEL, Asked, World

TEXTS = ["Once upon a time", "Blue is", "There were three"]
# The bound is 1 s.
GONE_WITHIN_S = 4.0


async def echoes(asked: Asked) -> None:
    """Each choice is the prompt and its own number, in two pieces."""
    for piece in (f"<{asked.body['prompt']}", ">"):
        for index in range(asked.body.get("n", 1)):
            asked.say(
                piece if piece == ">" else f"{piece}.{index}", index=index, finish="stop" if piece == ">" else None
            )
            await asyncio.sleep(0)
    asked.usage(prompt=5, completion=2, cached=3)
    asked.end()


async def goes_on(asked: Asked) -> None:
    while True:
        asked.say("word ")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1, 2], [3], [4, 5]]], ids=["texts", "token ids"])
async def test_choices_come_prompt_by_prompt_and_usage_is_summed(
    world: World, scripted: AsyncOpenAI, prompts: Any
) -> None:
    world.script = echoes
    expected = {2 * i + j: f"<{prompt}.{j}>" for i, prompt in enumerate(prompts) for j in range(2)}

    whole = await scripted.completions.create(model=MODEL, prompt=prompts, n=2)
    stream = await scripted.completions.create(
        model=MODEL, prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert [(choice.index, choice.text) for choice in whole.choices] == sorted(expected.items())
    streamed: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == expected
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for usage in (whole.usage, chunks[-1].usage):
        assert usage and usage.prompt_tokens_details
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (15, 6, 21)
        assert usage.prompt_tokens_details.cached_tokens == 9


async def test_a_request_of_several_prompts_has_one_id_and_one_end(world: World) -> None:
    body = {"model": MODEL, "prompt": TEXTS, "stream": True}
    async with world.session() as session, session.post(f"{world.api}/completions", json=body) as got:
        events = [line.strip() async for line in got.content if line.startswith(b"data: ")]

    assert got.headers["X-Request-Id"] == min((asked.request_id for asked in world.asked), key=len)
    assert len({asked.request_id for asked in world.asked}) == 3
    assert not [name for name in got.headers if name.startswith("Pb-")]
    assert events.count(b"data: [DONE]") == 1
    assert events[-1] == b"data: [DONE]"
    assert all("usage" not in json.loads(event[6:]) for event in events[:-1])


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_error_of_one_prompt_is_the_whole_requests_and_stops_the_others(world: World, is_begun: bool) -> None:
    async def fails(asked: Asked) -> None:
        if asked.body["prompt"] != TEXTS[1]:
            await goes_on(asked)
        if is_begun:
            asked.say("x")
        await eventually(lambda: len(world.asked) == 3, "all are asked")
        asked.fail(errors.ContextTooLong("prompt: 9000 tokens are over the model's 8192. Shorten the prompt."))

    world.script = fails
    body = {"model": MODEL, "prompt": TEXTS, "stream": is_begun}
    async with world.session() as session, session.post(f"{world.api}/completions", json=body) as got:
        said = (await got.read()).decode()

    last = said.rstrip().rpartition("data: ")[2] if is_begun else said
    assert json.loads(last)["error"] == {
        "message": "prompt[1]: 9000 tokens are over the model's 8192. Shorten the prompt.",
        "type": "invalid_request_error",
        "param": "prompt[1]",
        "code": "context_length_exceeded",
    }
    assert got.status == (200 if is_begun else 400)
    assert "[DONE]" not in said
    others = sorted(asked.request_id for asked in world.asked if asked.body["prompt"] != TEXTS[1])
    await eventually(lambda: sorted(world.cancelled) == others, "the others are cancelled", GONE_WITHIN_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_cancels_every_prompt(world: World, stream: bool) -> None:
    world.script = goes_on
    body = {"model": MODEL, "prompt": TEXTS, "stream": stream}
    async with world.session() as session:
        asking = asyncio.create_task(session.post(f"{world.api}/completions", json=body).__aenter__())
        await eventually(lambda: len(world.asked) == 3, "all are asked")
        if stream:
            (await asking).close()
        else:
            asking.cancel()

        ids = sorted(asked.request_id for asked in world.asked)
        await eventually(lambda: sorted(world.cancelled) == ids, "all are cancelled", GONE_WITHIN_S)
    await world.idle()


async def test_many_prompts_are_asked_few_at_a_time(world: World) -> None:
    running = most = 0

    async def counts(asked: Asked) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        await echoes(asked)

    world.script = counts
    texts = [f"p{number}" for number in range(MAX_PROMPTS)]
    body = {"model": MODEL, "prompt": texts}
    async with world.session() as session, session.post(f"{world.api}/completions", json=body) as got:
        choices = (await got.json())["choices"]

    assert [choice["text"] for choice in choices] == [f"<{text}.0>" for text in texts]
    assert 1 < most <= 16


@pytest.mark.parametrize("world", [{"max_requests_per_key": 2}], indirect=True)
async def test_every_prompt_counts_as_a_request_of_its_key(world: World) -> None:
    async def status(session: aiohttp.ClientSession, prompts: list[str]) -> int:
        async with session.post(f"{world.api}/completions", json={"model": MODEL, "prompt": prompts}) as got:
            return got.status

    async with world.session() as session:
        assert await status(session, TEXTS) == 429
        assert await status(session, TEXTS[:2]) == 200


async def test_more_prompts_than_one_request_takes_are_refused_by_name(world: World, scripted: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await scripted.completions.create(model=MODEL, prompt=["x"] * (MAX_PROMPTS + 1))

    assert raised.value.param == "prompt"
    assert world.asked == []


async def test_an_answer_to_one_of_them_goes_on_at_another_worker(world: World, scripted: AsyncOpenAI) -> None:
    async def lost_once(asked: Asked) -> None:
        number = TEXTS.index(asked.body["prompt"])
        ids = asked.body["resume"].get("token_ids", [])
        asked.say(f"{number}.{len(ids)} ", token_ids=[number], finish="stop" if ids else None)
        if ids:
            asked.usage()
            asked.end()
        else:
            asked.fail(errors.WorkerLost(), Pb_Resume="resumable")

    world.script = lost_once

    answer = await scripted.completions.create(model=MODEL, prompt=TEXTS)

    assert [choice.text for choice in answer.choices] == [f"{number}.0 {number}.1 " for number in range(3)]
    assert len({asked.request_id for asked in world.asked}) == 6


async def test_prompts_together_are_answered_as_one_by_one(cluster: Cluster, openai: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": SERVED, "max_tokens": 8, "temperature": 0}
    alone = [await openai.completions.create(prompt=text, **asked) for text in TEXTS]

    whole = await openai.completions.create(prompt=TEXTS, **asked)
    stream = await openai.completions.create(prompt=TEXTS, stream=True, **asked)
    streamed = dict.fromkeys(range(3), "")
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text

    expected = [answer.choices[0].text for answer in alone]
    assert len(set(expected)) == 3
    assert [choice.text for choice in whole.choices] == list(streamed.values()) == expected
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    assert whole.usage and whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


async def test_a_bad_prompt_among_good_ones_is_named(cluster: Cluster) -> None:
    async with AsyncOpenAI(base_url=cluster.api, api_key=cluster.key) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.completions.create(model=SERVED, prompt=["fine", "", "fine"])

    assert (raised.value.param, raised.value.code) == ("prompt[1]", "bad_request")
    await cluster.settles(20)
