"""One more copy of every service joins under load, works, and leaves again: no request is lost."""

import asyncio
import os
import subprocess
import sys

import pytest
from support.cluster import Cluster, ask, chat
from support.nats import eventually
from support.processes import spawned
from support.storm import Storm

from prefixbus.client import Client

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.parametrize("service", ["tokenizer", "directory", "router", "auditor", "callout"])
async def test_a_copy_joins_and_leaves_under_load(cluster: Cluster, client: Client, service: str) -> None:
    command = [sys.executable, "-m", "prefixbus", "run", service, "--state", str(cluster.state)]
    async with Storm(client, 15.0, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 5, "requests are answered")
        with spawned(command) as extra:
            await eventually(lambda: cluster.is_ready(extra.pid), f"one more {service} is ready", 40)
            before = storm.ended_ok
            await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered with it", 20)
            extra.terminate()
            status = await asyncio.to_thread(extra.wait, 30)
        before = storm.ended_ok
        await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered after it", 20)

    assert status == 0
    assert not storm.failures(), f"seed {SEED}: {storm.failures()[:5]} of {storm.codes()}"
    await cluster.settles()


async def test_a_second_bridge_of_a_workers_name_ends_and_says_why(cluster: Cluster, client: Client) -> None:
    engine = cluster.file.engines["w1"]
    options = {"--worker": "w1", "--engine-url": engine.url, "--kv-events": engine.events}
    command = [sys.executable, "-m", "prefixbus", "run", "worker_bridge", "--state", str(cluster.state)]
    command += [word for option in options.items() for word in option]

    with spawned(command, stderr=subprocess.PIPE) as second:
        _, said = await asyncio.to_thread(second.communicate, timeout=30)

    assert second.returncode == 1
    assert "Another bridge serves w1 (incarnation" in said.decode()
    assert "Give this one another name, or stop the other." in said.decode()
    assert (await ask(client, chat("Is the first one there?", max_tokens=1))).finish_reason
    await cluster.settles()
