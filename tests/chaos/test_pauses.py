"""SIGSTOP of each process for 1 s and for 10 s, then SIGCONT: suspected, lost and taken back; no double stream."""

import asyncio
import os
import signal
import time
from collections import Counter

import pytest
from support.cluster import Cluster
from support.journal import Journal
from support.nats import eventually
from support.storm import Outage, Result, Storm

from prefixbus.client import Client
from prefixbus.cluster import deployment

# nats-py leaves a connection open that a server refused while it was coming back.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
pytestmark = [refused_connections, pytest.mark.chaos, pytest.mark.timeout(150)]

RATE_PER_S = 10.0
SEED = int(os.environ.get("CHAOS_SEED", "1"))
# Errors that may end a request which was inside the paused process when others had to take it for dead.
CLEAR = ("worker_lost", "silence", "engine_failed", "unavailable")
# A stream_gap is frames lost. Without a bus, a request cannot be sent at all.
OF_THE_BUS = (*CLEAR, "stream_gap", "bus_unavailable")
WORKER = ("bridge-w1", "engine-w1")
VICTIMS = ["tokenizer-1", "router-1", "directory-1", "auditor-1", "callout-1", *WORKER, "nats-server"]
# A lease (DESIGN 5) is suspect after 0.6 s and lost after 3 s of silence. A bridge whose engine does not answer is
# silent, too, once it has found that out.
OUTLASTS_A_LEASE_S = 10


def lease_turns(cluster: Cluster) -> dict[str, Counter[str]]:
    """How often leases of workers have turned suspect or lost, and back, by the copy that says so; routers do not count
    the way back."""
    turns = {}
    for file in deployment.run_files(cluster.state):
        if file.service in ("directory", "router"):
            name = f"prefixbus_{file.service}_leases_total"
            found = cluster.metrics_of(file)
            of_service = {key.split('"')[1]: int(value) for key, value in found.items() if key.split("{")[0] == name}
            turns[file.instance] = Counter({key.removeprefix("Worker").lower(): n for key, n in of_service.items()})
    return turns


async def turns_since(cluster: Cluster, before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """The turns by copy since then, when no directory waits for a worker any more."""
    since: dict[str, Counter[str]] = {}

    async def all_back() -> bool:
        now = await asyncio.to_thread(lease_turns, cluster)
        since.update({copy: now[copy] - before[copy] for copy in now})
        return all(since[copy]["back"] >= since[copy]["suspect"] for copy in now if copy.startswith("directory"))

    await eventually(all_back, "all workers are back", 10)
    return since


def check_turns(victim: str, seconds: int, turns: dict[str, Counter[str]]) -> None:
    """A worker that outlasts its lease is lost once to each observer; of all else nobody is: an observer that was
    itself paused, or cut off, has heard nothing that it could tell from silence.

    A directory takes back whom it took for suspect, and nobody began a new life. That others are suspect for a moment
    on a busy machine is no harm."""
    is_worker = victim in WORKER
    lost = int(is_worker and seconds >= OUTLASTS_A_LEASE_S)
    assert len(turns) == 4
    for copy, turn in turns.items():
        assert turn["lost"] == lost, (copy, turns)
        assert turn["newincarnation"] == 0, (copy, turns)
        if victim == "bridge-w1" or lost:
            assert turn["suspect"] >= 1, (copy, turns)
        if copy.startswith("directory"):
            assert turn["back"] == turn["suspect"], (copy, turns)


@pytest.mark.parametrize("seconds", [1, OUTLASTS_A_LEASE_S])
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_paused_process_comes_back_without_harm(
    cluster: Cluster, client: Client, journal: Journal, victim: str, seconds: int
) -> None:
    pids = dict(cluster.file.processes)
    before = lease_turns(cluster)
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 5, "requests are answered")
        stopped_at = time.time()
        cluster.signal(victim, signal.SIGSTOP)
        # The pause is what is tested, not something waited for.
        await asyncio.sleep(seconds)
        cluster.signal(victim, signal.SIGCONT)
        await cluster.all_ready(20)
        outage = Outage(stopped_at, time.time())
        ended_ok = storm.ended_ok
        await eventually(lambda: storm.ended_ok >= ended_ok + 20, "requests are answered after it", 20)
    await cluster.settles(20)
    await journal.is_read()

    def was_inside(result: Result) -> bool:
        return outage.overlaps(result) and (
            victim not in WORKER
            or any(decision.selected_worker == "w1" for decision in journal.at(outage.until_at, result.name))
        )

    failures = storm.failures(*(OF_THE_BUS if victim == "nats-server" else CLEAR), of=was_inside)
    assert not failures, f"seed {SEED}: {failures[:5]} of {storm.codes()}"
    assert cluster.file.processes == pids, "nothing was restarted"
    check_turns(victim, seconds, await turns_since(cluster, before))


@pytest.mark.parametrize("victim", ["tokenizer-1", "router-1", "directory-1", "auditor-1"])
async def test_a_paused_copy_costs_no_request_while_another_runs(cluster: Cluster, client: Client, victim: str) -> None:
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 5, "requests are answered")
        cluster.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(1)
        cluster.signal(victim, signal.SIGCONT)

    assert not storm.failures(), f"seed {SEED}: {storm.failures()[:5]} of {storm.codes()}"
    await cluster.settles()
