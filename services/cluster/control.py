# ruff: noqa: TID251 - an adapter: requests on the bus and over HTTP
"""What an operator asks of a running deployment: switch the policy, reset a cache, look at workers.

Must not know: terminals."""

import asyncio
import json

import aiohttp
import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable, ConfigInvalid, Unavailable
from ..router import policy

POLICY_KEY = f"$KV.{subjects.BUCKET_POLICIES}.active"
_WAIT_S = 10.0


async def set_policy(operator: Bus, name: str) -> int:
    """Makes `name` the routers' policy, without a restart; the revision it got. Returns when it is stored.

    :raises BusUnavailable: not acknowledged."""
    return await operator.publish_acked(POLICY_KEY, json.dumps({"name": name}).encode())


class PolicyInForce(msgspec.Struct, frozen=True):
    """The routers' policy. `revision` is 0 when none was ever set: then it is the config's."""

    name: str
    version: str
    revision: int
    problem: str = ""

    def sentence(self) -> str:
        if self.problem:
            return f"revision {self.revision} is refused by the routers, which keep the one before: {self.problem}"
        version = f", version {self.version}" if self.version != policy.Policy().version else ""
        where = f"revision {self.revision}" if self.revision else "the config's; none was set"
        return f"{self.name}{version} ({where})"


async def policy_in_force(operator: Bus, configured: str) -> PolicyInForce:
    """What the bucket holds, else `configured`. :raises BusUnavailable: JetStream did not answer."""
    default = PolicyInForce(configured, policy.Policy().version, 0)
    try:
        last = await operator.jetstream.get_last_msg(subjects.STREAM_POLICIES, POLICY_KEY)
    except NotFoundError:
        return default
    except (APIError, nats.errors.Error, TimeoutError) as exc:
        raise BusUnavailable(f"bucket {subjects.BUCKET_POLICIES}: {exc or type(exc).__name__}") from exc
    if last.headers and last.headers.get("KV-Operation"):
        # It was deleted: routers take the configured one then.
        return default
    return read_policy(last.data or b"", last.seq or 0)


def read_policy(data: bytes, revision: int) -> PolicyInForce:
    """What the routers make of a record of the bucket."""
    try:
        chosen = policy.parse(data)
    except ConfigInvalid as exc:
        return PolicyInForce("", "", revision, problem=exc.sentence())
    return PolicyInForce(chosen.name, chosen.version, revision)


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
