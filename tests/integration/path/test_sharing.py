"""Two copies of every service share the work; stopping one loses no accepted request."""

import asyncio
import signal
import uuid
from pathlib import Path

import pytest
from support.cluster import Cluster, ask, chat
from support.nats import eventually

from prefixbus.client import Client
from prefixbus.cluster import deployment, state

REQUESTS = 60
# Tests that stop a process wait for its successor, which imports for seconds on a busy machine.
RESTART_S = 60
restarts = pytest.mark.timeout(120)


async def storm(client: Client, count: int = REQUESTS, max_tokens: int = 16) -> list[str]:
    """Many requests at once; their texts."""
    bodies = [chat(f"{uuid.uuid4().hex} question {n}", max_tokens=max_tokens) for n in range(count)]
    answers = await asyncio.gather(*(ask(client, body) for body in bodies))
    return [answer.text for answer in answers]


async def test_both_copies_of_every_service_do_a_part_of_the_work(cluster: Cluster, client: Client) -> None:
    def by_copy(service: str, metric: str) -> dict[str, float]:
        found = {}
        for file in deployment.run_files(cluster.state):
            if file.service == service:
                found[file.instance] = sum(
                    value for key, value in cluster.metrics_of(file).items() if key.split("{")[0] == metric
                )
        return found

    watched = {
        "tokenizer": "prefixbus_tokenizer_requests_total",
        "router": "prefixbus_router_requests_total",
        "directory": "prefixbus_directory_lookup_seconds_count",
        "auditor": "prefixbus_audit_facts_total",
        "worker_bridge": "prefixbus_bridge_requests_total",
    }
    before = {service: by_copy(service, metric) for service, metric in watched.items()}

    assert all(await storm(client))
    await cluster.settles()

    def grown() -> dict[str, int]:
        """How many copies of each service counted something."""
        return {
            service: sum(value > before[service].get(copy, 0) for copy, value in by_copy(service, metric).items())
            for service, metric in watched.items()
        }

    await eventually(lambda: set(grown().values()) == {2}, f"two copies of each: {grown()}", 10)


@restarts
@pytest.mark.parametrize("service", ["tokenizer", "router", "directory", "auditor"])
async def test_stopping_a_copy_under_load_loses_no_request(cluster: Cluster, client: Client, service: str) -> None:
    running = asyncio.create_task(storm(client, max_tokens=60))
    await eventually(lambda: bool(cluster.engine_busy()), "requests run")

    stopped = cluster.signal(f"{service}-1", signal.SIGTERM)
    texts = await running

    assert len(texts) == REQUESTS
    assert all(texts)
    # The supervisor starts it again, since nobody told the supervisor.
    await eventually(lambda: cluster.is_ready_again(f"{service}-1", stopped), f"{service}-1 is back", RESTART_S)
    await cluster.settles()


@restarts
async def test_stopping_a_bridge_under_load_lets_its_requests_end(cluster: Cluster, client: Client) -> None:
    running = asyncio.create_task(storm(client, max_tokens=60))
    await eventually(lambda: bool(cluster.engine_busy()), "requests run")

    stopped = cluster.signal("bridge-w1", signal.SIGTERM)
    texts = await running

    assert all(texts)
    await eventually(lambda: cluster.is_ready_again("bridge-w1", stopped), "bridge-w1 is back", RESTART_S)
    await cluster.settles()


@restarts
async def test_new_tenants_connect_while_a_copy_of_the_callout_is_stopped(cluster: Cluster) -> None:
    stopped = cluster.signal("callout-1", signal.SIGTERM)
    answers = []

    async def come_and_ask() -> None:
        new = state.add_tenant(cluster.state, f"t{uuid.uuid4().hex[:8]}")
        async with await cluster.client(tenant=new.tenant, token=new.token) as client:
            answers.append(await ask(client, chat("May I?", max_tokens=2)))

    while not await asyncio.to_thread(cluster.is_ready_again, "callout-1", stopped):
        await asyncio.gather(*(come_and_ask() for _ in range(4)))

    assert answers
    assert all(answer.text for answer in answers)
    await cluster.settles()


async def test_no_reuse_crosses_from_one_tenant_or_scope_to_another(cluster: Cluster, client: Client) -> None:
    stranger = state.add_tenant(cluster.state, f"t{uuid.uuid4().hex[:8]}")
    body = chat(f"{uuid.uuid4().hex} the same document " * 40)
    await ask(client, body)
    own = await ask(client, body)

    async with await cluster.client(tenant=stranger.tenant, token=stranger.token) as other:
        foreign = await ask(other, body)
    async with await cluster.client(scope="team-legal") as scoped:
        of_scope = await ask(scoped, body)

    assert own.cached_tokens > 0
    assert foreign.cached_tokens == 0
    assert of_scope.cached_tokens == 0
    assert all(stats["wrong_hits"] == 0 for stats in cluster.engine_stats().values())


def test_the_state_directory_is_for_its_owner_alone(cluster: Cluster) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    assert mode(cluster.state) == 0o700
    assert all(
        mode(path) & 0o077 == 0 for path in cluster.state.rglob("*") if path.is_file() and "models" not in path.parts
    )
