"""The whole path through HTTP: what `path` measures, with clients of the gateway in place of clients of the bus.

The load generator is a lean HTTP client: kept connections, streams read as they come, no JSON. The same cluster answers
both ways, one after the other, so that what the gateway costs is told within one run: ratios of it to the bus.

Wrong keys: the rated part once more while strangers try keys, none of them twice, a thousand in a minute and a thousand
in the 8 s that it takes. Figures are ratios to the rated part without them."""

import asyncio
import itertools
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
    RATED_S,
    SATURATED_S,
    WARM_UP_S,
    Asks,
    Bodies,
    Load,
    closed_loop,
    cpu_s,
    engine_alone,
    open_loop,
    prompts_of,
    quantile,
)

# A thousand in a minute, and in the time of a rated part.
WRONG_KEYS_PER_S = {"1000_in_60_s": 1000 / 60, "1000_in_8_s": 1000 / RATED_S}


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


class Strangers:
    """Keys that nobody has, each tried once."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/models"
        self._next = 0
        self.errors: list[str] = []

    async def come(self, per_s: float) -> None:
        """Until cancelled, whatever their answers take."""
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                await asyncio.sleep(max(0.0, started + number / per_s - time.perf_counter()))
                tasks.create_task(self._try())

    async def _try(self) -> None:
        self._next += 1
        headers = {"Authorization": f"Bearer demo.wrong-{self._next}"}
        async with self._session.get(self._url, headers=headers) as response:
            # A machine that does much else does not come to all of them, and says so.
            if response.status not in (401, 503):
                self.errors.append(f"{response.status}: {await response.text()}")


def bench_gateway(prompt_tokens: int) -> dict[str, Any]:
    """One row; takes about 75 s."""
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
        requests_per_s, by_service = await _saturated(cluster, load)
        through_http = await open_loop(load.ask)
        with_strangers = {
            name: await _beside_strangers(session, cluster, load, per_s) for name, per_s in WRONG_KEYS_PER_S.items()
        }
    await closed_loop(beside, WARM_UP_S)
    bus_requests_per_s, bus_by_service = await _saturated(cluster, beside)
    through_bus = await open_loop(beside.ask)
    prompts = prompts_of(cluster, bodies)
    alone = await engine_alone(cluster, prompts)
    await bus.close()
    assert not load.errors and not beside.errors, (load.errors[:3], beside.errors[:3])

    def ttft(share: float) -> tuple[float, float, float]:
        return quantile(through_http, share), quantile(through_bus, share), quantile(alone, share)

    def ratios(share: float) -> dict[str, float]:
        return {name: round(quantile(times, share) / ttft(share)[0], 3) for name, times in with_strangers.items()}

    ours = {name: value for name, value in sorted(by_service.items()) if name != "engine"}
    bus_total = sum(value for name, value in bus_by_service.items() if name != "engine")
    return {
        "bench": "gateway",
        "prompt_tokens": len(prompts[0]),
        "requests_per_s": round(requests_per_s, 1),
        "cpu_ms_per_request": {
            **{name: round(value, 3) for name, value in ours.items()},
            "total": round(sum(ours.values()), 3),
        },
        "engine_cpu_ms_per_request": round(by_service["engine"], 3),
        "added_ttft_p50_ms": round(ttft(0.5)[0] - ttft(0.5)[2], 2),
        "added_ttft_p95_ms": round(ttft(0.95)[0] - ttft(0.95)[2], 2),
        "over_the_bus_p50_ms": round(ttft(0.5)[0] - ttft(0.5)[1], 2),
        "over_the_bus_p95_ms": round(ttft(0.95)[0] - ttft(0.95)[1], 2),
        "ttft_p50_ms": round(ttft(0.5)[0], 2),
        "bus_requests_per_s": round(bus_requests_per_s, 1),
        "bus_cpu_ms_per_request": round(bus_total, 3),
        "bus_added_ttft_p50_ms": round(ttft(0.5)[1] - ttft(0.5)[2], 2),
        "to_the_bus": {
            "requests_per_s": round(requests_per_s / bus_requests_per_s, 3),
            "cpu": round(sum(ours.values()) / bus_total, 3),
            "ttft_p50": round(ttft(0.5)[0] / ttft(0.5)[1], 3),
            "ttft_p95": round(ttft(0.95)[0] / ttft(0.95)[1], 3),
        },
        "wrong_keys": {"ttft_p50": ratios(0.5), "ttft_p95": ratios(0.95)},
        "rated_requests_per_s": RATE_PER_S,
    }


async def _saturated(cluster: Cluster, load: Asks) -> tuple[float, dict[str, float]]:
    """Requests a second, and CPU ms a request by service."""
    before, started = cpu_s(cluster), time.perf_counter()
    ended = await closed_loop(load, SATURATED_S)
    wall_s = time.perf_counter() - started
    return ended / wall_s, {name: 1000 * (value - before[name]) / ended for name, value in cpu_s(cluster).items()}


async def _beside_strangers(
    session: aiohttp.ClientSession, cluster: Cluster, load: HttpLoad, per_s: float
) -> list[float]:
    strangers = Strangers(session, cluster.api)
    coming = asyncio.create_task(strangers.come(per_s))
    times = await open_loop(load.ask)
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    assert not strangers.errors, strangers.errors[:3]
    return times


if __name__ == "__main__":
    for tokens in (4096, 230):
        sys.stdout.write(json.dumps(bench_gateway(tokens)) + "\n")
        sys.stdout.flush()
