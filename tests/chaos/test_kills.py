"""kill -9 of any one process under load: what was not inside it succeeds, the rest ends clearly."""

import asyncio
import os
import signal
import uuid

import pytest
from support.cluster import Cluster, ask, chat, outcome_of
from support.nats import eventually
from support.storm import Storm

from prefixbus.client import Client

# nats-py leaves a connection open that a server refused while it was coming back.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
pytestmark = [refused_connections, pytest.mark.chaos, pytest.mark.timeout(120)]

# The bound is 5 s; a deadline in a test is four times that. `make bench ONLY=recovery` prints the real figures.
WHOLE_AGAIN_S = 20.0
RATE_PER_S = 15.0
SEED = int(os.environ.get("CHAOS_SEED", "1"))

# (process, errors that requests inside it may end with)
VICTIMS = [
    ("tokenizer-1", ()),
    ("directory-1", ()),
    ("auditor-1", ()),
    ("callout-1", ()),
    # A request that a router had told the client of, and not yet dispatched, ends as a silence.
    ("router-1", ("silence",)),
    ("bridge-w1", ("worker_lost", "silence")),
    ("engine-w1", ("worker_lost", "engine_failed")),
]


@pytest.mark.parametrize(("victim", "allowed"), VICTIMS, ids=[name for name, _ in VICTIMS])
async def test_a_killed_process_takes_only_its_own_requests_along(
    cluster: Cluster, client: Client, victim: str, allowed: tuple[str, ...]
) -> None:
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 10, "requests are answered")
        killed = cluster.signal(victim, signal.SIGKILL)
        await cluster.is_whole_again(victim, killed, WHOLE_AGAIN_S)
        before = storm.ended_ok
        await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered after it", 10)

    assert not storm.failures(*allowed), f"seed {SEED}: {storm.failures(*allowed)[:5]} of {storm.codes()}"
    await cluster.settles()


async def test_a_killed_nats_server_is_survived_by_every_service(cluster: Cluster, client: Client) -> None:
    services = {name: pid for name, pid in cluster.file.processes.items() if name != "nats-server"}
    async with Storm(client, RATE_PER_S, seed=SEED) as storm:
        await eventually(lambda: storm.ended_ok >= 10, "requests are answered")
        cluster.signal("nats-server", signal.SIGKILL)
        await cluster.all_ready(WHOLE_AGAIN_S)
        before = storm.ended_ok
        await eventually(lambda: storm.ended_ok >= before + 20, "requests are answered after it", WHOLE_AGAIN_S)

    # Streams that were cut end as gaps or silences at the client; nothing hangs, nothing is mixed.
    allowed = ("silence", "stream_gap", "bus_unavailable", "worker_lost", "unavailable")
    assert not storm.failures(*allowed), f"seed {SEED}: {storm.failures(*allowed)[:5]} of {storm.codes()}"
    assert {name: cluster.file.processes[name] for name in services} == services, "no service was restarted"
    await cluster.settles(20)


@pytest.mark.parametrize("victim", ["bridge-w1", "engine-w1"])
async def test_no_stale_hit_after_a_restart(cluster: Cluster, client: Client, victim: str) -> None:
    bodies = [chat(f"{uuid.uuid4().hex} the same long document " * 30, max_tokens=2) for _ in range(8)]
    await asyncio.gather(*(ask(client, body) for body in bodies))
    await cluster.settles()

    killed = cluster.signal(victim, signal.SIGKILL)
    await cluster.is_whole_again(victim, killed, WHOLE_AGAIN_S)
    await cluster.settles(20)

    operator = await cluster.operator()
    for body in bodies:
        request_id = uuid.uuid4().hex
        answer = await ask(client, body, request_id=request_id)
        outcome = await outcome_of(operator, request_id)
        assert outcome.predicted_tokens <= answer.cached_tokens, outcome
    await operator.close()
