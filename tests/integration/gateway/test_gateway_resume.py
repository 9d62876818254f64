"""A worker that dies in the middle of an answer: the client reads on, and reads what it would have read anyway."""

import asyncio
import signal
import uuid
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.cluster import MODEL, Cluster

# nats-py leaves a connection open that a server refused while it was coming back.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
WHOLE_AGAIN_S = 60.0
MAX_TOKENS = 150


async def asked(openai: AsyncOpenAI, *, is_chat: bool, text: str) -> Any:
    more: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    if is_chat:
        return await openai.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": text}], **more
        )
    return await openai.completions.with_raw_response.create(model=MODEL, prompt=text, **more)


def said(chunk: Any) -> str:
    choice = chunk.choices[0] if chunk.choices else None
    if choice is None:
        return ""
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("victim", ["engine", "bridge"])
async def test_an_answer_survives_its_worker(cluster: Cluster, openai: AsyncOpenAI, victim: str, is_chat: bool) -> None:
    text = f"{uuid.uuid4().hex} Tell me a long story."
    undisturbed = await asked(openai, is_chat=is_chat, text=text)
    expected = "".join([said(chunk) async for chunk in undisturbed.parse()])
    before = cluster.total("gateway", "prefixbus_gateway_resumed_total")

    answer = await asked(openai, is_chat=is_chat, text=text)
    worker = answer.headers["pb-worker"]
    chunks = []
    pid = 0
    async for chunk in answer.parse():
        chunks.append(chunk)
        if len(chunks) == 10:
            pid = cluster.signal(f"{victim}-{worker}", signal.SIGKILL)
    await cluster.is_whole_again(f"{victim}-{worker}", pid, WHOLE_AGAIN_S)

    assert "".join(map(said, chunks)) == expected
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == MAX_TOKENS
    assert await asyncio.to_thread(cluster.total, "gateway", "prefixbus_gateway_resumed_total") == before + 1
    await cluster.settles(20)


async def test_a_killed_gateway_leaves_nothing_behind_and_is_there_again(cluster: Cluster, openai: AsyncOpenAI) -> None:
    answer = await asked(openai, is_chat=True, text="Tell me another one.")
    chunks = aiter(answer.parse())
    await anext(chunks)

    pid = cluster.signal("gateway-1", signal.SIGKILL)

    with pytest.raises(Exception, match=r"."):
        while True:
            await anext(chunks)
    await cluster.is_whole_again("gateway-1", pid, WHOLE_AGAIN_S)
    await cluster.settles(20)
    assert [model.id async for model in await openai.models.list()] == [MODEL]
