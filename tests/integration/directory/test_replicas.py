"""Shards, replicas and snapshots of the directory, over a real cluster."""

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat, outcome_of
from support.journal import Journal
from support.nats import eventually
from support.storm import Storm

from prefixbus.bus import messages, namespace, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import Dispatched, Holdings, Lookup
from prefixbus.client import Client
from prefixbus.cluster import deployment

SHARDS = 2
SCOPES = [f"team-{number}" for number in range(8)]
OFTEN = {"PREFIXBUS_DIRECTORY__SNAPSHOT_EVERY_S": "0.4"}
WHOLE_AGAIN_S = 40.0

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two shards of two replicas each, two workers."""
    environ = {**OFTEN, "PREFIXBUS_DIRECTORY__SHARDS": str(SHARDS)}
    directory = tmp_path_factory.mktemp("sharded")
    with Cluster(directory, "--workers", "2", "--scale", "directory=2", environ=environ) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One directory, two workers."""
    with Cluster(tmp_path_factory.mktemp("alone"), "--workers", "2", environ=OFTEN) as running:
        yield running
        assert running.stop() == 0


def directories(cluster: Cluster) -> dict[int, dict[str, float]]:
    """The metrics of each directory process, by pid."""
    files = [file for file in deployment.run_files(cluster.state) if file.service == "directory"]
    return {file.pid: cluster.metrics_of(file) for file in files}


def dumps_asked(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("prefixbus_directory_dumps_asked_total"))


class Dispatches:
    """The first dispatch of each namespace, as routers announce it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.found: dict[bytes, Dispatched] = {}

    async def start(self) -> "Dispatches":
        await self.bus.listen(subjects.DISPATCHED, self._hear)
        return self

    def _hear(self, message: Any) -> None:
        sent = messages.DISPATCHED.decode(message.data)
        if sent.worker:
            self.found.setdefault(sent.ns_id, sent)

    async def ask(self, shard: int, sent: Dispatched) -> Holdings:
        """What one of the shard's replicas says."""
        payload = messages.LOOKUP.encode(Lookup(messages.VERSION, sent.ns_id, sent.keys))
        return messages.HOLDINGS.decode((await self.bus.request(subjects.lookup(shard), payload, timeout_s=5)).data)


@pytest.fixture
async def dispatches(sharded: Cluster) -> AsyncIterator[Dispatches]:
    bus = await deployment.connect(sharded.state, "router", sharded.url)
    yield await Dispatches(bus).start()
    await bus.close()


async def warm_repeat(client: Client, operator: Bus, body: dict[str, Any]) -> tuple[int, int]:
    """(predicted, cached) tokens of a body that is sent for the second time."""
    await reuse_of(client, operator, body)
    return await reuse_of(client, operator, body)


async def reuse_of(client: Client, operator: Bus, body: dict[str, Any]) -> tuple[int, int]:
    """(predicted, cached) tokens of a request with this body."""
    request_id = uuid.uuid4().hex
    answer = await ask(client, body, request_id=request_id)
    return (await outcome_of(operator, request_id)).predicted_tokens, answer.cached_tokens


async def test_each_namespace_is_known_to_its_own_shard_alone_and_predicted_to_the_token(
    sharded: Cluster, dispatches: Dispatches
) -> None:
    operator = await sharded.operator()
    reused = []
    for scope in SCOPES:
        async with await sharded.client(scope=scope) as client:
            reused.append(await warm_repeat(client, operator, chat("Which shard? " * 60, system=scope)))
    await operator.close()

    assert all(predicted == cached > 0 for predicted, cached in reused), reused
    assert len(dispatches.found) == len(SCOPES)
    shards = {ns_id: namespace.shard_of(ns_id, SHARDS) for ns_id in dispatches.found}
    assert set(shards.values()) == set(range(SHARDS)), "so many namespaces are in both shards"
    for ns_id, sent in dispatches.found.items():
        for _ in range(4):  # whichever replica answers
            own, other = [await dispatches.ask(shard, sent) for shard in (shards[ns_id], 1 - shards[ns_id])]
            assert own.levels[0].depth == len(sent.keys) // 8
            # A router that counts the shards otherwise must not take this for "nobody holds it".
            assert "not of shard" in other.refused
            assert (other.levels, other.announced, own.refused) == ([], {}, "")


async def test_replicas_of_a_shard_hold_the_same_and_together_what_the_workers_hold(sharded: Cluster) -> None:
    async with await sharded.client(scope="alike") as client:
        await asyncio.gather(*(ask(client, chat(f"{number} asks. " * 60)) for number in range(8)))
    await sharded.settles()

    def are_alike() -> bool:
        by_shard: dict[float, set[float]] = {}
        for metrics in directories(sharded).values():
            entries = metrics["prefixbus_directory_entries"]
            by_shard.setdefault(metrics["prefixbus_directory_shard"], set()).add(entries)
        held = sharded.metrics("worker_bridge")["prefixbus_bridge_held_blocks"]
        return (
            set(by_shard) == {0.0, 1.0}
            and all(len(entries) == 1 for entries in by_shard.values())
            and held / 2 <= sum(max(entries) for entries in by_shard.values()) <= held
        )

    await eventually(lambda: asyncio.to_thread(are_alike), "replicas agree", 10)


async def test_status_shows_each_shards_replicas(sharded: Cluster) -> None:
    await snapshots_are_there(sharded)

    command = [sys.executable, "-m", "prefixbus", "status", "--state", str(sharded.state)]
    shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)

    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith("directory-s")]
    in_table = [row[:2] for row in rows if row[-1] in ("old", "none")]
    assert in_table == [[f"directory-s{shard}-{number}", str(shard)] for shard in (0, 1) for number in (1, 2)]


async def test_of_two_replicas_one_killed_changes_nothing(sharded: Cluster) -> None:
    """Not one request is decided blind, and none fails; the killed one comes back without asking anybody for a dump."""
    async with await sharded.client() as client, await Journal.of(sharded) as journal:
        async with Storm(client, 15.0) as storm:
            await eventually(lambda: storm.ended_ok >= 20, "requests are answered", 20)
            await snapshots_are_there(sharded)
            shard = next(
                namespace.shard_of(bytes.fromhex(each.ns_id), SHARDS)
                for outcomes in journal.outcomes.values()
                for each in outcomes
            )
            old_pid = sharded.signal(f"directory-s{shard}-1", signal.SIGKILL)
            await sharded.is_whole_again(f"directory-s{shard}-1", old_pid, WHOLE_AGAIN_S)
            before = storm.ended_ok
            await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered after it", 20)
        await journal.is_read()

        assert not storm.failures()
        made = [each for decisions in journal.decisions.values() for each in decisions]
        # What was in the killed one's hands got no answer: at most that.
        assert sum(each.blind for each in made) <= 2, [each.directory for each in made if each.blind]
        new_pid = sharded.pid(f"directory-s{shard}-1")
        assert dumps_asked(directories(sharded)[new_pid]) == 0
        await sharded.settles()


async def snapshots_are_there(cluster: Cluster) -> None:
    """Returns when each shard has a snapshot that some replica of it knows of."""

    def are_there() -> bool:
        found = {
            metrics["prefixbus_directory_shard"]
            for metrics in directories(cluster).values()
            if metrics["prefixbus_directory_snapshot_bytes"] > 0
        }
        return found == {metrics["prefixbus_directory_shard"] for metrics in directories(cluster).values()}

    await eventually(lambda: asyncio.to_thread(are_there), "snapshots are written", 20)


async def test_without_any_directory_routers_decide_blind_and_afterwards_know_all_again(alone: Cluster) -> None:
    """The only one is killed under load. Requests go on, and their decisions say that they are blind; the next one
    loads the snapshot, and hits are back without a worker having been asked for anything."""
    # Long enough to be worth the wait for a worker that the load keeps busy.
    known = [chat(f"{number} was asked before the directory died. " * 400) for number in range(4)]
    operator = await alone.operator()
    async with await alone.client() as client, await Journal.of(alone) as journal:
        for body in known:
            await warm_repeat(client, operator, body)
        async with Storm(client, 15.0) as storm:
            await eventually(lambda: storm.ended_ok >= 20, "requests are answered", 20)
            await snapshots_are_there(alone)
            old_pid = alone.signal("directory-1", signal.SIGKILL)
            await eventually(
                lambda: any(each.blind for made in journal.decisions.values() for each in made), "blind decisions", 20
            )
            await alone.is_whole_again("directory-1", old_pid, WHOLE_AGAIN_S)
            again = [await reuse_of(client, operator, body) for body in known]
        await journal.is_read()

        assert not storm.failures()
        assert all(predicted == cached > 0 for predicted, cached in again), again
        made = [each for decisions in journal.decisions.values() for each in decisions]
        blind = [each for each in made if each.blind]
        assert {each.decision for each in blind} == {"blind"}
        assert {each.directory for each in blind} == {""}
        assert len({each.directory for each in made} - {""}) == 2, "two lives of the directory answered"
        (metrics,) = directories(alone).values()
        assert dumps_asked(metrics) == 0
        assert metrics["prefixbus_directory_snapshot_age_seconds"] >= 0
        assert not any(name.startswith("prefixbus_directory_snapshot_failures_total") for name in metrics)
        await alone.settles()
    await operator.close()


async def test_a_damaged_snapshot_is_said_and_done_without(alone: Cluster) -> None:
    """The workers are asked for dumps, as if there had never been one."""
    await snapshots_are_there(alone)
    writer = await deployment.connect(alone.state, "directory", alone.url)
    async with await alone.client() as client:
        operator = await alone.operator()
        body = chat("What does a damaged snapshot cost? " * 30)
        await warm_repeat(client, operator, body)
        # Whatever is written from now on has these chunks' place or the other: both are spoilt until it is gone.
        alone.signal("directory-1", signal.SIGSTOP)
        old_pid = alone.pid("directory-1")
        for place in ("a", "b"):
            subject = f"$O.{subjects.BUCKET_DIRECTORY}.C.shard-0-of-1-{place}"
            await writer.publish_acked(subject, b"spoilt", headers={"Nats-Rollup": "sub"})
        alone.signal("directory-1", signal.SIGKILL)
        await alone.is_whole_again("directory-1", old_pid, WHOLE_AGAIN_S)

        predicted, cached = await warm_repeat(client, operator, body)

        assert predicted == cached > 0
        (metrics,) = directories(alone).values()
        assert metrics['prefixbus_directory_snapshot_failures_total{of="read"}'] == 1
        assert dumps_asked(metrics) >= 1
        await operator.close()
    await writer.close()
