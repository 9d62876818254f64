"""Core NATS is at most once: a request that a dying process had taken is sent again, and answered."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.cluster import Cluster
from support.nats import eventually
from support.processes import spawned

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]


async def test_send_sends_again_what_a_dying_tokenizer_had_taken(cluster: Cluster) -> None:
    """Stopped tokenizers take the first sending and do nothing; killed, they take it along."""
    # The cluster is shared: clients of earlier tests are open, or closed.
    known = {*client_connections(cluster, "open"), *client_connections(cluster, "closed")}
    tokenizers = [name for name in cluster.file.processes if name.startswith("tokenizer-")]
    killed = {name: cluster.signal(name, signal.SIGSTOP) for name in tokenizers}
    command = [sys.executable, "-m", "prefixbus", "send", "--state", str(cluster.state), "Is anybody there?"]
    environ = {**os.environ, "PREFIXBUS_TOKEN": cluster.token}

    async def published() -> bool:
        connections = await asyncio.to_thread(client_connections, cluster, "open")
        return any(one["in_msgs"] for cid, one in connections.items() if cid not in known)

    with spawned(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sending:
        try:
            await eventually(published, "the request is sent", 30)
        finally:
            for pid in killed.values():
                os.kill(pid, signal.SIGKILL)
        answer, said = await asyncio.to_thread(sending.communicate, timeout=60)

    assert sending.returncode == 0, said.decode()
    assert answer.strip(), said.decode()
    [sender] = [one for cid, one in client_connections(cluster, "closed").items() if cid not in known]
    assert sender["in_msgs"] >= 2, "it was sent once"
    for name, pid in killed.items():
        await cluster.is_whole_again(name, pid, 20)
    await cluster.settles()


def client_connections(cluster: Cluster, state: str) -> dict[int, dict[str, Any]]:
    """The server's account of clients' connections that are open, or closed, by their number."""
    url = f"http://127.0.0.1:{cluster.file.monitor_port}/connz?state={state}&limit=4096"
    with cluster.open(url) as reply:
        found = json.load(reply)["connections"]
    return {one["cid"]: one for one in found if one.get("name") == "client of demo"}
