"""SIGSTOP of each process for 1 s and for 10 s, then SIGCONT: suspected, lost and taken back; no double stream."""

import asyncio
import os
import signal

import pytest
from support.cluster import Cluster
from support.nats import eventually
from support.storm import Storm

from prefixbus.client import Client

# nats-py leaves a connection open that a server refused while it was coming back.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
pytestmark = [refused_connections, pytest.mark.chaos, pytest.mark.timeout(150)]

RATE_PER_S = 10.0
SEED = int(os.environ.get("CHAOS_SEED", "1"))
# Errors that may end a request which was inside the paused process when others had to take it for dead.
CLEAR = ("worker_lost", "silence", "engine_failed", "unavailable")
VICTIMS = ["tokenizer-1", "router-1", "directory-1", "auditor-1", "callout-1", "bridge-w1", "engine-w1", "nats-server"]


@pytest.mark.parametrize("seconds", [1, 10])
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_paused_process_comes_back_without_harm(
    cluster: Cluster, client: Client, victim: str, seconds: int
) -> None:
    pids = dict(cluster.file.processes)
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 5, "requests are answered")
        cluster.signal(victim, signal.SIGSTOP)
        # The pause is what is tested, not something waited for.
        await asyncio.sleep(seconds)
        cluster.signal(victim, signal.SIGCONT)
        await cluster.all_ready(20)
        before = storm.ended_ok
        await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered after it", 20)

    # A stream_gap would be frames lost, or two attempts in one answer. Without a bus, a request cannot be sent at all.
    allowed = (*CLEAR, "stream_gap", "bus_unavailable") if victim == "nats-server" else CLEAR
    assert not storm.failures(*allowed), f"seed {SEED}: {storm.failures(*allowed)[:5]} of {storm.codes()}"
    assert cluster.file.processes == pids, "nothing was restarted"
    await cluster.settles(20)


@pytest.mark.parametrize("victim", ["tokenizer-1", "router-1", "directory-1", "auditor-1"])
async def test_a_paused_copy_costs_no_request_while_another_runs(cluster: Cluster, client: Client, victim: str) -> None:
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 5, "requests are answered")
        cluster.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(1)
        cluster.signal(victim, signal.SIGCONT)

    assert not storm.failures(), f"seed {SEED}: {storm.failures()[:5]} of {storm.codes()}"
    await cluster.settles()
