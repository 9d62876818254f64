"""Many streams at once: none lost, none mixed. `-m slow` keeps 200 of them going for a minute and watches memory."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cluster import MODEL, Cluster

TOKENS = 24


async def stream(session: aiohttp.ClientSession, cluster: Cluster, text: str) -> tuple[str, int]:
    """The text of an answer, and how many tokens its usage counts. What is refused as overload is asked again when it
    was said: a machine that does much else is full sometimes."""
    while True:
        answer = await answered(session, cluster, text)
        if not isinstance(answer, float):
            return answer
        await asyncio.sleep(answer)


async def answered(session: aiohttp.ClientSession, cluster: Cluster, text: str) -> tuple[str, int] | float:
    """As `stream`; or in how many seconds to ask again."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{cluster.api}/chat/completions", json=body) as response:
        if response.status == 503:
            assert (await response.json())["error"]["code"] == "overloaded"
            return float(response.headers["Retry-After"])
        assert response.status == 200, await response.text()
        said = ""
        counted = 0
        last = b""
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            last = line.strip()
            if last == b"data: [DONE]":
                break
            chunk = json.loads(last[6:])
            assert "error" not in chunk, chunk
            said += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
        assert last == b"data: [DONE]"
        return said, counted


async def rounds(cluster: Cluster, clients: int, *, until: float) -> int:
    """Each client asks one question again and again until then; how many answers there were. Greedy answers depend on
    the question alone, so one that is mixed with another's differs from its first."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {cluster.key}"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

        async def client(number: int) -> tuple[str, int]:
            text = f"Question number {number}"
            first = await stream(session, cluster, text)
            answers = 1
            while time.monotonic() < until:
                assert await stream(session, cluster, text) == first
                answers += 1
            assert first[1] == TOKENS
            return first[0], answers

        found = await asyncio.gather(*(client(number) for number in range(clients)))
    assert len({said for said, _ in found}) == clients, "every question has its own answer"
    return sum(answers for _, answers in found)


def memory_mb(cluster: Cluster) -> float:
    status = Path(f"/proc/{cluster.pid('gateway-1')}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.timeout(120)
async def test_two_hundred_streams_at_once_are_whole_and_apart(cluster: Cluster) -> None:
    assert await rounds(cluster, 200, until=time.monotonic()) == 200
    await cluster.settles(20)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_hundred_streams_for_a_minute_take_no_more_memory(cluster: Cluster) -> None:
    await rounds(cluster, 200, until=time.monotonic() + 10)
    before = memory_mb(cluster)

    answers = await rounds(cluster, 200, until=time.monotonic() + 60)

    assert answers > 200
    assert memory_mb(cluster) < before * 1.1 + 8
    await cluster.settles(20)
