"""One more gateway beside a running cluster: it shares the port, the kernel gives it connections, and it leaves in
order."""

import asyncio
import sys

import aiohttp
import pytest
from support.cluster import MODEL, Cluster, chat
from support.nats import eventually
from support.processes import spawned

from prefixbus.cluster import deployment


async def ask_on_a_new_connection(cluster: Cluster) -> int:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {cluster.key}"}) as session:
        body = {"model": MODEL, **chat("Who are you?", max_tokens=1)}
        async with session.post(f"{cluster.api}/chat/completions", json=body) as response:
            await response.read()
            return response.status


@pytest.mark.timeout(120)
async def test_a_second_gateway_shares_the_port_and_leaves_in_order(cluster: Cluster) -> None:
    """The cluster's, which is not the config's: `up` chose a free one."""
    command = [sys.executable, "-m", "prefixbus", "run", "gateway", "--state", str(cluster.state)]

    def answered_by(pid: int) -> float:
        file = next(file for file in deployment.run_files(cluster.state) if file.pid == pid)
        metrics = cluster.metrics_of(file)
        return sum(value for key, value in metrics.items() if key.startswith("prefixbus_gateway_requests_total"))

    with spawned(command) as extra:
        await eventually(lambda: cluster.is_ready(extra.pid), "the copy is ready", 60)
        for _ in range(10):
            statuses = await asyncio.gather(*(ask_on_a_new_connection(cluster) for _ in range(10)))
            assert set(statuses) == {200}
            if await asyncio.to_thread(answered_by, extra.pid):
                break
        else:
            pytest.fail("the copy got none of 100 connections")
        extra.terminate()
        assert await asyncio.to_thread(extra.wait, 60) == 0

    assert await ask_on_a_new_connection(cluster) == 200
