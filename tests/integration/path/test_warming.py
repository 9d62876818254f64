"""A worker that lost its cache gets its popular prefixes back before anybody asks for them."""

import asyncio
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, ask, chat, outcome_of
from support.nats import eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.messages import Outcome
from prefixbus.cluster import records, streams

BLOCK = 32
RESTART_S = 60.0
pytestmark = pytest.mark.timeout(120)
SYSTEM = "You route requests to workers that hold what they need. " * 80
"""About 900 tokens."""


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its engines are killed. Twice the routers and directories: orders come twice, and two hear them."""
    path: Path = tmp_path_factory.mktemp("warming")
    with Cluster(path, "--workers", "2", "--scale", "router=2,directory=2") as running:
        yield running
        assert running.stop() == 0


async def outcomes(cluster: Cluster) -> list[Outcome]:
    """All that were recorded so far."""
    async with records.operator(cluster.state) as bus:
        return [
            messages.OUTCOME.decode(kept.data)
            async for kept in streams.read(bus, subjects.STREAM_JOURNAL, subjects.ALL_OUTCOME)
        ]


async def warmed(cluster: Cluster, worker: str) -> list[Outcome]:
    return [
        outcome
        for outcome in await outcomes(cluster)
        if (outcome.decision, outcome.worker, outcome.status) == ("warm", worker, "ok")
    ]


async def test_after_a_restart_the_next_request_hits_what_no_request_has_computed(own_cluster: Cluster) -> None:
    cluster = own_cluster
    # The same question each time: what differs behind a prefix that all traffic shares is spread over the fleet.
    body = chat("Which worker?", system=f"{uuid.uuid4().hex} {SYSTEM}")
    async with await cluster.client() as client:
        operator = await cluster.operator()
        served = []
        for _ in range(6):
            request_id = uuid.uuid4().hex
            await ask(client, body, request_id=request_id)
            served.append((await outcome_of(operator, request_id)).worker)
        holder = served[-1]
        assert set(served) == {holder}, "an idle fleet sends all to the one that holds it"
        requests_before = cluster.metrics("worker_bridge")

        name = f"engine-{holder}"
        pid = cluster.signal(name, signal.SIGKILL)
        await cluster.is_whole_again(name, pid, RESTART_S)

        async def is_warmed() -> bool:
            return bool(await warmed(cluster, holder))

        await eventually(is_warmed, f"{holder} is warmed; {cluster.metrics('router')}", 30)
        [order] = await warmed(cluster, holder)
        requests_after = cluster.metrics("worker_bridge")
        request_id = uuid.uuid4().hex
        answer = await ask(client, body, request_id=request_id)
        outcome = await outcome_of(operator, request_id)
        async with records.operator(cluster.state) as bus:
            found, _ = await records.of_request(bus, request_id)
        await operator.close()

    requests = [key for key in requests_after if key.startswith("prefixbus_bridge_requests_total")]
    assert {key: requests_after[key] for key in requests} == {key: requests_before[key] for key in requests}
    assert order.prefill_tokens and order.prefill_tokens >= 512
    assert outcome.worker == holder
    assert found.decisions[0].decision == "prefer-warm-worker"
    # Of a prompt of exactly n blocks the last is computed again: where it ends depends on how the text is tokenised.
    reusable = (answer.usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert answer.cached_tokens == outcome.predicted_tokens == min(order.prompt_tokens, reusable)
    await cluster.settles()


async def test_it_is_counted_by_all_who_took_part_and_apart_from_requests(own_cluster: Cluster) -> None:
    directory, router, bridge = await asyncio.gather(
        *(asyncio.to_thread(own_cluster.metrics, service) for service in ("directory", "router", "worker_bridge"))
    )

    assert directory['prefixbus_directory_warm_orders_total{kind="rewarm"}'] >= 1
    assert router['prefixbus_router_warm_orders_total{kind="rewarm",result="taken"}'] == 1
    assert bridge['prefixbus_bridge_warm_orders_total{result="done"}'] == 1
    assert not [key for key in bridge if "prefixbus_bridge_requests_total" in key and "warm" in key]
    assert bridge["prefixbus_wrong_hits_total"] == 0
