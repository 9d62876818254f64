# ruff: noqa: TID251 - an adapter: requests on the bus and over HTTP
"""What an operator asks of a running deployment: switch the policy, reset a cache, look at workers.

Must not know: terminals."""

import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BusUnavailable, ConfigInvalid, Unavailable
from ..router import policy
from ..router.rollout import Role, Rollout, changed
from . import deployment

_POLICIES = f"$KV.{subjects.BUCKET_POLICIES}"
_WAIT_S = 10.0
# A router that starts hears the last record alone.
_KEPT = "which keep the one before (started since: the config's)"
_KEPT_BESIDE = "which keep the one before (started since: none)"
_NOTHING = Rollout(policy.Policy())


async def set_policy(operator: Bus, name: str) -> int:
    """Makes `name` the routers' policy, without a restart; the revision it got. Returns when it is stored.

    :raises BusUnavailable: not acknowledged."""
    return await put_policy(operator, "active", json.dumps({"name": name}).encode())


async def put_policy(operator: Bus, role: Role, record: bytes) -> int:
    """Makes this record the routers' active policy, canary or shadow, without a restart; the revision it got.

    :raises BusUnavailable: not acknowledged."""
    return await operator.publish_acked(f"{_POLICIES}.{role}", record)


async def clear_policy(operator: Bus, role: Role) -> int:
    """Takes the canary or the shadow away; of the active policy, returns to the config's.

    :raises BusUnavailable: not acknowledged."""
    return await operator.publish_acked(f"{_POLICIES}.{role}", b"", headers={"KV-Operation": "DEL"})


def policy_weights(name: str) -> bytes:
    """The policy of this name, or the one in the JSON file of this name, as JSON.

    :raises ConfigInvalid: there is neither, or it is no policy."""
    if name in policy.SCHEMES:
        return json.dumps({"name": name}).encode()
    if not Path(name).is_file():
        raise ConfigInvalid(
            f"{name!r} is no policy, and no file.",
            field="policy",
            remedy=f"Name one of {', '.join(policy.SCHEMES)}, or a JSON file with weights.",
        )
    return policy_file(Path(name))


def policy_record(name: str, role: Role, *, share: float = 0.0, prefix_class: str = "") -> bytes:
    """What to put for a policy of this name, or with the weights in the JSON file of this name.

    :raises ConfigInvalid: there is neither, or the routers would refuse it."""
    weights = msgspec.Raw(policy_weights(name))
    content = {
        "active": weights,
        "canary": {"policy": weights, "share": share, "prefix_class": prefix_class},
        "shadow": {"policy": weights},
    }
    record = msgspec.json.encode(content[role])
    changed(_NOTHING, role, record, _NOTHING.active)
    return record


def policy_file(path: Path) -> bytes:
    """:raises ConfigInvalid: it cannot be read, or is no policy."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigInvalid(str(exc), field=path.name, remedy="Name a JSON file with a policy's weights.") from exc
    policy.parse(data)
    return data


class PolicyInForce(msgspec.Struct, frozen=True):
    """The routers' policy. It is the config's when none was ever set (`revision` is 0), or when that was taken back by
    this revision (`cleared`)."""

    name: str
    version: str
    revision: int
    problem: str = ""
    cleared: bool = False

    def sentence(self) -> str:
        if self.problem:
            return f"revision {self.revision} is refused by the routers, {_KEPT}: {self.problem}"
        version = f", version {self.version}" if self.version != policy.Policy().version else ""
        where = f"revision {self.revision}" if self.revision else "the config's; none was set"
        if self.cleared:
            where = f"the config's, since revision {self.revision} cleared any other"
        return f"{self.name}{version} ({where})"


async def policy_in_force(operator: Bus, configured: str) -> PolicyInForce:
    """What the bucket holds, else `configured`. :raises BusUnavailable: JetStream did not answer."""
    data, revision = await _last(operator, "active")
    if data is None:
        return PolicyInForce(configured, policy.Policy().version, revision, cleared=revision > 0)
    return read_policy(data, revision)


async def beside_the_policy(operator: Bus) -> list[str]:
    """A line for the canary and one for the shadow, where there are such.

    :raises BusUnavailable: JetStream did not answer."""
    lines = []
    roles: tuple[Role, ...] = ("canary", "shadow")
    for role in roles:
        data, revision = await _last(operator, role)
        if data is not None:
            lines.append(f"{role}: {read_beside(role, data, revision)}")
    return lines


def read_beside(role: Role, data: bytes, revision: int) -> str:
    """What the routers make of a canary's or a shadow's record."""
    try:
        found = changed(_NOTHING, role, data, _NOTHING.active)
    except ConfigInvalid as exc:
        return f"revision {revision} is refused by the routers, {_KEPT_BESIDE}: {exc.sentence()}"
    what = found.shadow.policy.label if found.shadow is not None else str(found.canary)
    return f"{what} (revision {revision})"


async def _last(operator: Bus, role: Role) -> tuple[bytes | None, int]:
    """The record and its revision; None if it was deleted by that revision, or there never was one (0)."""
    try:
        last = await operator.jetstream.get_last_msg(subjects.STREAM_POLICIES, f"{_POLICIES}.{role}")
    except NotFoundError:
        return None, 0
    except (APIError, nats.errors.Error, TimeoutError) as exc:
        raise BusUnavailable(f"bucket {subjects.BUCKET_POLICIES}: {exc or type(exc).__name__}") from exc
    if last.headers and last.headers.get("KV-Operation"):
        # Routers take what was configured then.
        return None, last.seq or 0
    return last.data or b"", last.seq or 0


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
        load = load_in(message)
        if load is not None:
            heard[load.worker] = load

    subscription = await operator.subscribe(subjects.ALL_LOAD, hear)
    await asyncio.sleep(within_s)
    await subscription.unsubscribe()
    return heard


def load_in(message: Msg) -> messages.Load | None:
    """None of what routers refuse, too, and count: it cannot be read, or speaks for another worker."""
    try:
        load = messages.LOAD.decode(message.data)
    except messages.MessageInvalid:
        return None
    return load if message.subject == subjects.load(load.worker) else None


async def wrong_hits(engine_urls: list[str]) -> int:
    """Blocks that simulated engines reused for anything but what they were computed from; 0 unless isolation broke."""
    total = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_WAIT_S)) as session:
        for url in engine_urls:
            async with session.get(f"{url}/sim/stats") as response:
                response.raise_for_status()
                total += int((await response.json())["wrong_hits"])
    return total


async def wrong_hits_seen(directory: Path) -> int:
    """Requests whose engine said it reused more than it can have, as the bridges of this deployment counted them."""
    total = 0.0
    async with deployment.http_session(directory) as session:
        for file in deployment.run_files(directory):
            if file.service != "worker_bridge":
                continue
            async with session.get(f"{file.http}/metrics") as response:
                response.raise_for_status()
                for family in text_string_to_metric_families(await response.text()):
                    total += sum(each.value for each in family.samples if each.name == "prefixbus_wrong_hits_total")
    return int(total)
