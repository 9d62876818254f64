"""The whole path on one machine: requests a second, CPU a request by service, and the time to first token that it adds.

A cluster as `prefixbus up` starts it, with an engine that takes no time. Each request is a warm chat: a long common
part and a new question, 8 tokens back. Two measurements:

- saturated: `CONCURRENCY` clients in a closed loop; CPU from /proc, of all processes of ours and the NATS server,
  without engines and this load generator;
- at 50 requests/s: time to first token through the bus, less that of the same prompts sent to an engine alone.

Everything shares the machine's cores, the load generator too: figures are for comparing two states of the code."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import orjson
from support.cluster import MODEL, Cluster
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus

CONCURRENCY = 64
SATURATED_S = 8.0
WARM_UP_S = 2.0
RATE_PER_S = 50.0
RATED_S = 8.0
MAX_TOKENS = 8
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SENTENCE = "The router asks the directory who holds the longest part of a prompt before it decides. "


class Asks(Protocol):
    """What loops drive."""

    async def ask(self) -> tuple[float, float]:
        """(first, end) in ms."""
        ...


class Load:
    """A lean client: one connection, one wildcard inbox, the time of the first frame and of the end."""

    def __init__(self, bus: Bus, body_of: "Bodies") -> None:
        self._bus = bus
        self._bodies = body_of
        self._waiting: dict[str, asyncio.Future[float]] = {}
        self._first: dict[str, float] = {}
        self._next = 0
        self.errors: list[str] = []

    async def start(self) -> None:
        await self._bus.subscribe(f"{self._bus.inbox_prefix}.s.*", self._hear)
        await self._bus.flush()

    async def ask(self) -> tuple[float, float]:
        """(first frame, end) in ms after the request was published."""
        token = str(self._next)
        self._next += 1
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[token] = ended
        body = self._bodies.chat(self._next)
        started = time.perf_counter()
        await self._bus.publish(subjects.infer("demo", MODEL), body, reply=f"{self._bus.inbox_prefix}.s.{token}")
        async with asyncio.timeout(30):
            end = await ended
        del self._waiting[token]
        return 1000 * (self._first.pop(token, end) - started), 1000 * (end - started)

    async def _hear(self, message: Any) -> None:
        token = message.subject.rsplit(".", 1)[1]
        headers = message.headers or {}
        if "Pb-Seq" in headers and token not in self._first:
            self._first[token] = time.perf_counter()
        if "Pb-Final" in headers and token in self._waiting:
            if "Pb-Error" in headers:
                self.errors.append(headers["Pb-Error"])
            self._waiting[token].set_result(time.perf_counter())


class Bodies:
    """Prompts of about `tokens` tokens: a common beginning, and a question that is new each time."""

    def __init__(self, tokens: int) -> None:
        self._common = _SENTENCE * max(1, (tokens - 50) // 16)

    def text(self, number: int) -> str:
        return f"{self._common}\nQuestion {number}: what happens to request {number * 7919} then?"

    def chat(self, number: int) -> bytes:
        return orjson.dumps(
            {
                "messages": [{"role": "user", "content": self.text(number)}],
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
            }
        )


def bench_path(prompt_tokens: int) -> dict[str, Any]:
    """One row; takes about 35 s."""
    with tempfile.TemporaryDirectory(prefix="prefixbus-bench-") as folder:
        environ = {"PREFIXBUS_MODELS__SMOLLM2__PROFILE": "instant"}
        with Cluster(Path(folder), "--workers", "2", environ=environ) as cluster:
            return asyncio.run(_measure(cluster, prompt_tokens))


async def _measure(cluster: Cluster, prompt_tokens: int) -> dict[str, Any]:
    bodies = Bodies(prompt_tokens)
    inbox = "_INBOX.demo.bench"
    bus = await Bus.connect(cluster.url, name="bench", inbox_prefix=inbox, user="demo", password=cluster.token)
    load = Load(bus, bodies)
    await load.start()

    await closed_loop(load, WARM_UP_S)
    cpu_before, started = cpu_s(cluster), time.perf_counter()
    ended = await closed_loop(load, SATURATED_S)
    wall_s = time.perf_counter() - started
    by_service = {name: 1000 * (value - cpu_before[name]) / ended for name, value in cpu_s(cluster).items()}
    ours = {name: round(value, 3) for name, value in sorted(by_service.items()) if name != "engine"}

    through_bus = await open_loop(load.ask)
    prompts = prompts_of(cluster, bodies)
    alone = await engine_alone(cluster, prompts)
    await bus.close()
    assert not load.errors, load.errors[:3]
    return {
        "bench": "path",
        "prompt_tokens": len(prompts[0]),
        "requests_per_s": round(ended / wall_s, 1),
        "cpu_ms_per_request": {**ours, "total": round(sum(ours.values()), 3)},
        "engine_cpu_ms_per_request": round(by_service["engine"], 3),
        "added_ttft_p50_ms": round(quantile(through_bus, 0.5) - quantile(alone, 0.5), 2),
        "added_ttft_p95_ms": round(quantile(through_bus, 0.95) - quantile(alone, 0.95), 2),
        "ttft_p50_ms": round(quantile(through_bus, 0.5), 2),
        "engine_ttft_p50_ms": round(quantile(alone, 0.5), 2),
        "rated_requests_per_s": RATE_PER_S,
    }


async def closed_loop(load: Asks, seconds: float) -> int:
    """Requests that ended while `CONCURRENCY` clients asked for this long."""
    until = time.perf_counter() + seconds
    ended = 0

    async def client() -> None:
        nonlocal ended
        while time.perf_counter() < until:
            await load.ask()
            ended += 1

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return ended


async def open_loop(ask: Any) -> list[float]:
    """Times to first token in ms, at `RATE_PER_S` whatever the answers take."""
    started = time.perf_counter()
    running = []
    for number in range(int(RATED_S * RATE_PER_S)):
        await asyncio.sleep(max(0.0, started + number / RATE_PER_S - time.perf_counter()))
        running.append(asyncio.create_task(ask()))
    return [first for first, _ in await asyncio.gather(*running)]


async def engine_alone(cluster: Cluster, prompts: list[list[int]]) -> list[float]:
    """As many prompts, as token ids, straight to one engine."""
    url = f"{next(iter(cluster.file.engines.values())).url}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        unsent = iter(prompts)

        async def ask() -> tuple[float, float]:
            ids = next(unsent)
            body = {"model": MODEL, "prompt": ids, "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
            data = orjson.dumps(body)
            started = time.perf_counter()
            async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
                response.raise_for_status()
                await response.content.readany()
                first = time.perf_counter()
                await response.read()
            return 1000 * (first - started), 1000 * (time.perf_counter() - started)

        await ask()
        return await open_loop(ask)


def prompts_of(cluster: Cluster, bodies: Bodies) -> list[list[int]]:
    """The ids of new chats of the same kind, in the model's template: one to warm the engine, and those of the rated
    run."""
    directory = cluster.state / "models" / MODEL
    template = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    found = []
    for number in range(1 + int(RATED_S * RATE_PER_S)):
        dialog = [{"role": "user", "content": bodies.text(10**6 + number)}]
        text = template.apply_chat_template(dialog, add_generation_prompt=True, tokenize=False)
        found.append(tokenizer.encode(text, add_special_tokens=False).ids)
    return found


def cpu_s(cluster: Cluster) -> dict[str, float]:
    """CPU seconds so far, by service."""
    spent: dict[str, float] = defaultdict(float)
    for name, pid in cluster.file.processes.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        service = name if name == "nats-server" else name.rsplit("-", 1)[0]
        spent[service] += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return dict(spent)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    for tokens in (4096, 230):
        sys.stdout.write(json.dumps(bench_path(tokens)) + "\n")
        sys.stdout.flush()
