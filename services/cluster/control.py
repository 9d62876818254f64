# ruff: noqa: TID251 - an adapter: requests on the bus and over HTTP
"""What an operator asks of a running deployment: switch the policy, reset a cache, look at workers.

Must not know: terminals."""

import asyncio
import json

import aiohttp
from nats.aio.msg import Msg

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import Unavailable

POLICY_KEY = f"$KV.{subjects.BUCKET_POLICIES}.active"
_WAIT_S = 10.0


async def set_policy(operator: Bus, name: str) -> int:
    """Makes `name` the routers' policy, without a restart; the revision it got. Returns when it is stored.

    :raises BusUnavailable: not acknowledged."""
    return await operator.publish_acked(POLICY_KEY, json.dumps({"name": name}).encode())


async def reset_cache(operator: Bus, worker: str) -> None:
    """Empties the prefix cache of a worker's engine.

    :raises Unavailable: the worker is not there, or its engine refused (it does while requests run)."""
    reply = await operator.request(subjects.control(worker, "reset"), timeout_s=_WAIT_S)
    answer = messages.CONTROL_REPLY.decode(reply.data)
    if answer.error:
        raise Unavailable(answer.error, field=f"worker {worker}")


async def loads(operator: Bus, within_s: float) -> dict[str, messages.Load]:
    """The latest heartbeat of every worker that sends one within this time."""
    heard: dict[str, messages.Load] = {}

    async def hear(message: Msg) -> None:
        load = messages.LOAD.decode(message.data)
        heard[load.worker] = load

    subscription = await operator.subscribe(subjects.ALL_LOAD, hear)
    await asyncio.sleep(within_s)
    await subscription.unsubscribe()
    return heard


async def wrong_hits(engine_urls: list[str]) -> int:
    """Blocks that simulated engines reused for anything but what they were computed from; 0 unless isolation broke."""
    total = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_WAIT_S)) as session:
        for url in engine_urls:
            async with session.get(f"{url}/sim/stats") as response:
                response.raise_for_status()
                total += int((await response.json())["wrong_hits"])
    return total
