"""Who waits for a warm worker, and for how long: real processes, engines stopped in their tracks."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat, outcome_of
from support.nats import eventually

from prefixbus.client import Client

SENTENCE = "The router asks the directory who holds the longest part of a prompt before it decides. "


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Cluster]:
    """Two workers whose engines get one request at a time."""
    environ = {"PREFIXBUS_BRIDGE__PREFILL_WINDOW_TOKENS": "1"}
    with Cluster(tmp_path, "--workers", "2", environ=environ) as cluster:
        yield cluster


async def control(cluster: Cluster, worker: str, verb: str) -> None:
    url = f"{cluster.file.engines[worker].url}/sim/{verb}"
    async with aiohttp.ClientSession() as session, session.post(url) as reply:
        reply.raise_for_status()


@pytest.mark.timeout(TEST_TIMEOUT_S)
async def test_a_request_does_not_wait_for_its_hit_longer_than_it_is_worth(narrow: Cluster) -> None:
    """The engine that holds the prompt takes no step; the second to ask for it is answered by the other one."""
    operator = await narrow.operator()
    shared = uuid.uuid4().hex + SENTENCE * 250
    async with await narrow.client() as client:
        first = await ask_for(client, shared, "first")
        warm = (await outcome_of(operator, first)).worker
        await control(narrow, warm, "pause")
        stuck = uuid.uuid4().hex
        waiting = asyncio.create_task(ask(client, chat(f"{shared} stuck"), request_id=stuck))
        await eventually(lambda: narrow.metrics("worker_bridge")["prefixbus_bridge_waiting"] == 1, "one is waiting", 10)

        second = await ask_for(client, shared, "second")

        outcome = await outcome_of(operator, second)
        assert outcome.worker != warm
        assert (outcome.decision, outcome.attempt, outcome.cached_tokens) == ("spill-max-wait", 2, 0)
        assert narrow.metrics("router")['prefixbus_router_failovers_total{reason="waited"}'] == 1
        await control(narrow, warm, "resume")
        assert (await waiting).finish_reason == "length"
        assert (await outcome_of(operator, stuck)).worker == warm
        await narrow.settles()
    await operator.close()


async def ask_for(client: Client, shared: str, what: str) -> str:
    """Its request id, once it has been answered."""
    request_id = uuid.uuid4().hex
    assert (await ask(client, chat(f"{shared} {what}"), request_id=request_id)).finish_reason == "length"
    return request_id
