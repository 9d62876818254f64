"""A router whose messages to and from bridges are late, lost or overtaken: real processes, a proxy in front of the bus.

A second router, which is not behind the proxy, takes a part of the requests."""

import asyncio
import os
import random
import sys
import uuid
from collections.abc import AsyncIterator

import aiohttp
import pytest
from support.cluster import Cluster, ask, chat, outcome_of
from support.nats import eventually
from support.processes import spawned
from support.proxy import Fate, Proxy
from support.storm import Storm
from support.watch import Rules

from prefixbus.bus.errors import PrefixbusError
from prefixbus.client import Client
from prefixbus.cluster import deployment

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

SEED = int(os.environ.get("CHAOS_SEED", "1"))
# How a request may end whose messages are lost; never: hang, short, internal.
CLEAR = ("worker_lost", "unavailable", "overloaded", "silence")
LOSSES = 0.1
DELAYS = 0.2
# Beyond `accept_timeout_ms`: the router takes what comes late for lost.
LATEST_S = 0.8


class LossyRouter:
    """One more router, behind the proxy."""

    def __init__(self, cluster: Cluster, proxy: Proxy, pid: int) -> None:
        self.proxy = proxy
        self._cluster = cluster
        self._pid = pid

    def metrics(self) -> dict[str, float]:
        file = next(file for file in deployment.run_files(self._cluster.state) if file.pid == self._pid)
        return self._cluster.metrics_of(file)

    def failovers(self) -> dict[str, float]:
        name = "prefixbus_router_failovers_total"
        return {key.split('"')[1]: value for key, value in self.metrics().items() if key.startswith(name)}


@pytest.fixture
async def lossy(cluster: Cluster) -> AsyncIterator[LossyRouter]:
    command = [sys.executable, "-m", "prefixbus", "run", "router", "--state", str(cluster.state), "--nats"]
    async with Proxy(int(cluster.url.rsplit(":", 1)[1])) as proxy:
        with spawned([*command, proxy.url]) as router:
            await eventually(lambda: cluster.is_ready(router.pid), "the router behind the proxy is ready", 40)
            yield LossyRouter(cluster, proxy, router.pid)
            router.terminate()
            assert await asyncio.to_thread(router.wait, 30) == 0


def of_work(subject: str) -> bool:
    """Dispatches, aborts and questions of a router, and what bridges answer to them."""
    tokens = subject.split(".")
    if subject.startswith("pb.v1.work.") or subject.startswith("pb.v1.ctl."):
        return True
    return tokens[:2] == ["_SVC", "router"] and len(tokens) == 6 and tokens[3] in ("d", "a", "s")


def at_random(chance: random.Random) -> Fate:
    def fate(subject: str) -> float | None:
        if subject.startswith("pb.v1.outcome."):
            return None if chance.random() < LOSSES else 0.0
        if not of_work(subject):
            return 0.0
        drawn = chance.random()
        if drawn < LOSSES:
            return None
        return chance.uniform(0.0, LATEST_S) if drawn < LOSSES + DELAYS else 0.0

    return fate


async def test_every_request_ends_once_whatever_is_late_or_lost(
    cluster: Cluster, client: Client, frames: Rules, lossy: LossyRouter
) -> None:
    """The client's second listener sees to it that no inbox has frames of two attempts, or two ends."""
    # A router that did not hear of the end keeps clients company.
    frames.keepalives_may_be_late = True
    lossy.proxy.fate = at_random(random.Random(SEED))
    async with Storm(client, 15.0, seed=SEED) as storm:
        await eventually(lambda: len(storm.results) >= 250, "requests have ended", 60)
    lossy.proxy.fate = lambda subject: 0.0

    assert not storm.failures(*CLEAR), f"seed {SEED}: {storm.failures(*CLEAR)[:5]} of {storm.codes()}"
    assert storm.ended_ok >= 200, f"seed {SEED}: {storm.codes()}"
    for kind in ("pb.v1.work.w1", "pb.v1.work.w2", "pb.v1.outcome.w1"):
        assert lossy.proxy.lost[kind], lossy.proxy.lost
    assert lossy.failovers().get("silent", 0) > 0
    # An announcement whose outcome was lost is believed until it expires.
    await cluster.settles(40)


async def test_a_worker_that_was_taken_for_lost_and_answers_later_says_nothing(
    cluster: Cluster, client: Client, frames: Rules, lossy: LossyRouter
) -> None:
    """It takes no step, its router hears none of its heartbeats, and it does not hear that it should stop."""
    # Until it finds out it keeps clients company.
    frames.keepalives_may_be_late = True
    superseded = "prefixbus_bridge_attempts_superseded_total"
    before = cluster.metrics("worker_bridge")[superseded]
    # Whoever has computed it is where all that ask for it go.
    shared = uuid.uuid4().hex + "Who answers this, and who thinks that it should? " * 200
    worker = await worker_of(cluster, client, shared)
    running: list[asyncio.Task[str]] = []

    def all_are_answered_or_stuck() -> bool:
        stuck = sum(not one.done() for one in running)
        return stuck == cluster.metrics("router")["prefixbus_router_in_hand"] == in_work(cluster, worker)

    async def one_is_stuck() -> bool:
        running.append(asyncio.create_task(code_of(client, f"{shared} {len(running)}")))
        await eventually(all_are_answered_or_stuck, "the others are answered", 20)
        return lossy.metrics()["prefixbus_router_in_hand"] > 0

    await control(cluster, worker, "pause")
    try:
        await eventually(one_is_stuck, "the router behind the proxy waits for it", 40)
        lossy.proxy.fate = without(worker)
        await eventually(lambda: lossy.failovers().get("lost", 0) > 0, "it takes the worker for lost", 20)
        await eventually(lambda: not lossy.metrics()["prefixbus_router_in_hand"], "the other worker answers", 20)
    finally:
        await control(cluster, worker, "resume")

    codes = await asyncio.gather(*running)
    assert set(codes) == {"ok"}, codes
    await eventually(lambda: cluster.metrics("worker_bridge")[superseded] > before, "it finds that it is late", 20)
    lossy.proxy.fate = lambda subject: 0.0
    await cluster.settles(40)


def without(worker: str) -> Fate:
    """Its heartbeats do not arrive, and it is not told to stop anything."""
    lost = (f"pb.v1.load.{worker}", f"pb.v1.ctl.{worker}.abort")
    return lambda subject: None if subject in lost else 0.0


def in_work(cluster: Cluster, worker: str) -> float:
    """Attempts that this worker's bridge has accepted and not ended."""
    bridge = next(file for file in deployment.run_files(cluster.state) if file.instance == worker)
    metrics = cluster.metrics_of(bridge)
    return metrics["prefixbus_bridge_running"] + metrics["prefixbus_bridge_waiting"]


async def worker_of(cluster: Cluster, client: Client, text: str) -> str:
    operator = await cluster.operator()
    await ask(client, chat(text), request_id=(request_id := uuid.uuid4().hex))
    worker = (await outcome_of(operator, request_id)).worker
    await operator.close()
    return worker


async def control(cluster: Cluster, worker: str, verb: str) -> None:
    url = f"{cluster.file.engines[worker].url}/sim/{verb}"
    async with aiohttp.ClientSession() as session, session.post(url) as reply:
        reply.raise_for_status()


async def code_of(client: Client, text: str) -> str:
    try:
        await ask(client, chat(text))
    except PrefixbusError as exc:
        return exc.code
    return "ok"
