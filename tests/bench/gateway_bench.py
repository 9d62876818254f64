"""The whole path through HTTP: what `path` measures, with clients of the gateway in place of clients of the bus.

The load generator is a lean HTTP client: kept connections, streams read as they come, no JSON. In the rated part the
same cluster answers both ways, one after the other, so that the gateway's own share of the time to first token is told
within one run."""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from support.cluster import MODEL, Cluster

from prefixbus.bus.connection import Bus

from .path_bench import (
    RATE_PER_S,
    SATURATED_S,
    WARM_UP_S,
    Bodies,
    Load,
    closed_loop,
    cpu_s,
    engine_alone,
    open_loop,
    prompts_of,
    quantile,
)


class HttpLoad:
    """Streams of chat completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str, bodies: Bodies) -> None:
        self._session = session
        self._url = f"{url}/chat/completions"
        self._bodies = bodies
        self._next = 10**7
        self.errors: list[str] = []

    async def ask(self) -> tuple[float, float]:
        """(first chunk, end) in ms after the request was sent."""
        self._next += 1
        body = {**orjson.loads(self._bodies.chat(self._next)), "model": MODEL, "stream": True}
        data = orjson.dumps(body)
        started = time.perf_counter()
        async with self._session.post(self._url, data=data, headers={"Content-Type": "application/json"}) as response:
            first = time.perf_counter()
            said = await response.content.readany()
            if said:
                first = time.perf_counter()
            said += await response.read()
            if response.status != 200 or not said.endswith(b"data: [DONE]\n\n"):
                self.errors.append(f"{response.status}: {said[-200:]!r}")
        return 1000 * (first - started), 1000 * (time.perf_counter() - started)


def bench_gateway(prompt_tokens: int) -> dict[str, Any]:
    """One row; takes about 45 s."""
    with tempfile.TemporaryDirectory(prefix="prefixbus-bench-") as folder:
        environ = {"PREFIXBUS_MODELS__SMOLLM2__PROFILE": "instant"}
        with Cluster(Path(folder), "--workers", "2", environ=environ) as cluster:
            return asyncio.run(_measure(cluster, prompt_tokens))


async def _measure(cluster: Cluster, prompt_tokens: int) -> dict[str, Any]:
    bodies = Bodies(prompt_tokens)
    inbox = "_INBOX.demo.bench"
    bus = await Bus.connect(cluster.url, name="bench", inbox_prefix=inbox, user="demo", password=cluster.token)
    beside = Load(bus, bodies)
    await beside.start()
    headers = {"Authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        load = HttpLoad(session, cluster.api, bodies)
        await closed_loop(load, WARM_UP_S)
        before, started = cpu_s(cluster), time.perf_counter()
        ended = await closed_loop(load, SATURATED_S)
        wall_s = time.perf_counter() - started
        by_service = {name: 1000 * (value - before[name]) / ended for name, value in cpu_s(cluster).items()}
        through_http = await open_loop(load.ask)
    through_bus = await open_loop(beside.ask)
    prompts = prompts_of(cluster, bodies)
    alone = await engine_alone(cluster, prompts)
    await bus.close()
    assert not load.errors and not beside.errors, (load.errors[:3], beside.errors[:3])
    ours = {name: round(value, 3) for name, value in sorted(by_service.items()) if name != "engine"}
    return {
        "bench": "gateway",
        "prompt_tokens": len(prompts[0]),
        "requests_per_s": round(ended / wall_s, 1),
        "cpu_ms_per_request": {**ours, "total": round(sum(ours.values()), 3)},
        "engine_cpu_ms_per_request": round(by_service["engine"], 3),
        "added_ttft_p50_ms": round(quantile(through_http, 0.5) - quantile(alone, 0.5), 2),
        "added_ttft_p95_ms": round(quantile(through_http, 0.95) - quantile(alone, 0.95), 2),
        "over_the_bus_p50_ms": round(quantile(through_http, 0.5) - quantile(through_bus, 0.5), 2),
        "over_the_bus_p95_ms": round(quantile(through_http, 0.95) - quantile(through_bus, 0.95), 2),
        "ttft_p50_ms": round(quantile(through_http, 0.5), 2),
        "rated_requests_per_s": RATE_PER_S,
    }


if __name__ == "__main__":
    for tokens in (4096, 230):
        sys.stdout.write(json.dumps(bench_gateway(tokens)) + "\n")
        sys.stdout.flush()
