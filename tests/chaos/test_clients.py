"""Clients that vanish or change their minds: their requests leave the engine and the books."""

import asyncio
import json
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from support.cluster import MODEL, Cluster, ask, chat
from support.nats import eventually

from prefixbus.bus.errors import Cancelled, PrefixbusError
from prefixbus.client import Client
from prefixbus.cluster import deployment, state

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60)]

SUBJECT = f"pb.v1.infer.demo.{MODEL}"
SEED = int(os.environ.get("CHAOS_SEED", "1"))
# The bound is 1 s.
GONE_WITHIN_S = 4.0


async def connect(cluster: Cluster) -> Nats:
    return await nats.connect(
        cluster.url, user="demo", password=cluster.token, inbox_prefix=b"_INBOX.demo", allow_reconnect=False
    )


async def publish(connection: Nats, text: str) -> "asyncio.Queue[Msg]":
    """Asks for an answer that would take minutes; its frames."""
    frames: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = connection.new_inbox()
    await connection.subscribe(inbox, cb=frames.put)
    body = json.dumps(chat(text, max_tokens=2000)).encode()
    await connection.publish(SUBJECT, body, reply=inbox, headers={"Pb-Request-Id": uuid.uuid4().hex})
    await connection.flush()
    return frames


@pytest.fixture
async def paused_engines(cluster: Cluster) -> AsyncIterator[Callable[[], None]]:
    """Engines that take requests and do not step."""

    async def each(verb: str) -> None:
        async with aiohttp.ClientSession() as session:
            for engine in cluster.file.engines.values():
                async with session.post(f"{engine.url}/sim/{verb}") as response:
                    response.raise_for_status()

    await each("pause")
    yield lambda: None
    await each("resume")
    await cluster.settles()


async def test_a_client_that_vanishes_while_streaming(cluster: Cluster) -> None:
    connection = await connect(cluster)
    frames = await publish(connection, "Count to a million")
    assert (await asyncio.wait_for(frames.get(), 10)).data

    await connection.close()

    await cluster.settles(GONE_WITHIN_S)


async def test_a_client_that_vanishes_during_prefill(cluster: Cluster) -> None:
    connection = await connect(cluster)
    await publish(connection, f"{uuid.uuid4().hex} " + "words that nobody has asked about before " * 700)
    await eventually(lambda: cluster.engine_busy() > 0, "the engine has it")

    await connection.close()

    await cluster.settles(GONE_WITHIN_S)


@pytest.mark.usefixtures("paused_engines")
async def test_a_client_that_vanishes_while_it_is_queued(cluster: Cluster) -> None:
    connection = await connect(cluster)
    await publish(connection, "Will this ever begin?")
    await eventually(lambda: cluster.engine_busy() > 0, "the engine has it")

    await connection.close()

    await cluster.settles(GONE_WITHIN_S)


@pytest.fixture(scope="module")
def patient_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Whose routers wait for late workers longer than any test."""
    arguments = ("--workers", "2", "--scale", "router=2")
    environ = {"PREFIXBUS_ROUTER__LOST_AFTER_S": "120"}
    with Cluster(tmp_path_factory.mktemp("patient"), *arguments, environ=environ) as running:
        yield running


@pytest.fixture
async def late_workers(patient_cluster: Cluster) -> AsyncIterator[Callable[[], None]]:
    """All workers are late with their heartbeats, as every router sees it, until the value is called."""
    bridges = [name for name in patient_cluster.file.processes if name.startswith("bridge-")]
    before = turned_suspect(patient_cluster)

    def bring_back() -> None:
        for name in bridges:
            patient_cluster.signal(name, signal.SIGCONT)

    async def all_are_late() -> bool:
        counts = await asyncio.to_thread(turned_suspect, patient_cluster)
        return all(count - before[router] >= len(bridges) for router, count in counts.items())

    try:
        for name in bridges:
            patient_cluster.signal(name, signal.SIGSTOP)
        await eventually(all_are_late, "every router misses all workers", 20)
        yield bring_back
    finally:
        bring_back()


def turned_suspect(cluster: Cluster) -> dict[str, float]:
    """How often each router found a worker silent."""
    key = 'prefixbus_router_leases_total{turn="suspect"}'
    files = [file for file in deployment.run_files(cluster.state) if file.service == "router"]
    return {file.instance: cluster.metrics_of(file).get(key, 0.0) for file in files}


def prompt_tokens(cluster: Cluster) -> int:
    """Of all prompts that engines were ever given."""
    return sum(stats["totals"]["prompt_tokens"] for stats in cluster.engine_stats().values())


@pytest.mark.parametrize("way", ["a cancel", "a closed connection", "an idle inbox"])
async def test_a_client_that_vanishes_while_a_router_waits_for_workers(
    patient_cluster: Cluster, late_workers: Callable[[], None], way: str
) -> None:
    cluster = patient_cluster

    def given_up() -> float:
        return cluster.total("router", "prefixbus_router_requests_total", code="cancelled", decision="none")

    given_up_before = given_up()
    prompts_before = prompt_tokens(cluster)
    request_id = uuid.uuid4().hex
    connection = await connect(cluster)
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    body = json.dumps(chat("Is there anybody?", max_tokens=2000)).encode()

    async def in_hand(wanted: int) -> bool:
        return (await asyncio.to_thread(cluster.metrics, "router"))["prefixbus_router_in_hand"] == wanted

    await connection.publish(SUBJECT, body, reply=inbox, headers={"Pb-Request-Id": request_id})
    await connection.flush()
    await eventually(lambda: in_hand(1), "a router has it")
    match way:
        case "a cancel":
            await connection.publish(f"pb.v1.cancel.demo.{request_id}")
        case "a closed connection":
            await connection.close()
        case "an idle inbox":
            await subscription.unsubscribe()
    if connection.is_connected:
        await connection.flush()

    await eventually(lambda: in_hand(0), "it is off the routers' books", GONE_WITHIN_S)
    assert given_up() == given_up_before + 1
    late_workers()
    async with await cluster.client() as other:
        answer = await ask(other, chat("Who is back?"))
    assert prompt_tokens(cluster) - prompts_before == answer.usage["prompt_tokens"]
    await cluster.settles()
    await connection.close()


async def test_a_client_that_stops_listening_and_stays_connected(cluster: Cluster) -> None:
    connection = await connect(cluster)
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    await connection.publish(SUBJECT, json.dumps(chat("Count on", max_tokens=7000)).encode(), reply=inbox)
    await subscription.next_msg(timeout=10)

    await subscription.unsubscribe()
    await connection.flush()

    await cluster.settles(GONE_WITHIN_S)
    await connection.close()


async def test_leaving_a_stream_early_cancels_it(cluster: Cluster, client: Client) -> None:
    async for frame in client.stream(MODEL, chat("Count to a million", max_tokens=7000)):
        if frame.seq == 3:
            break

    await cluster.settles(GONE_WITHIN_S)


async def test_one_tenant_cannot_cancel_anothers_request(cluster: Cluster, client: Client) -> None:
    stranger = state.add_tenant(cluster.state, f"t{uuid.uuid4().hex[:8]}")
    request_id = uuid.uuid4().hex
    running = asyncio.create_task(ask(client, chat("Do not stop", max_tokens=400), request_id=request_id))
    await eventually(lambda: cluster.engine_busy() > 0, "it runs")

    async with await cluster.client(tenant=stranger.tenant, token=stranger.token) as other:
        # In its own name, and by force in the other's: the server denies the second.
        await other.cancel(request_id)
        await other._bus.publish(f"pb.v1.cancel.demo.{request_id}")
        await other._bus.flush()
        assert not running.done(), "the cancels came too late to mean anything"

    assert (await running).usage["completion_tokens"] == 400


async def test_a_tenants_flood_of_cancels_is_no_other_tenants_business(cluster: Cluster, client: Client) -> None:
    """Every router and bridge once heard each tenant's cancels, bodies and all, and one memory held all tenants'."""
    stranger = state.add_tenant(cluster.state, f"t{uuid.uuid4().hex[:8]}")
    overtaking = uuid.uuid4().hex
    await client.cancel(overtaking)
    await client._bus.flush()
    stop = asyncio.Event()

    async def flood() -> int:
        connection = await nats.connect(
            cluster.url,
            user=stranger.tenant,
            password=stranger.token,
            inbox_prefix=f"_INBOX.{stranger.tenant}".encode(),
        )
        body = b"x" * connection.max_payload
        rounds = 0
        while rounds < 20 or not stop.is_set():
            await connection.publish(f"pb.v1.cancel.{stranger.tenant}.x", body)
            for number in range(1000):
                await connection.publish(f"pb.v1.cancel.{stranger.tenant}.{rounds}-{number}", b"")
            await connection.flush(timeout=30)
            rounds += 1
        await connection.close()
        return rounds

    flooding = asyncio.create_task(flood())
    answers = await asyncio.gather(*(ask(client, chat(f"Question {n}", max_tokens=50)) for n in range(20)))
    stop.set()
    assert await flooding >= 20

    assert [answer.usage["completion_tokens"] for answer in answers] == [50] * 20
    with pytest.raises(Cancelled):
        await ask(client, chat("Too late", max_tokens=50), request_id=overtaking)
    await cluster.settles()


async def test_a_storm_of_cancels_leaves_nothing_behind(cluster: Cluster, client: Client) -> None:
    chance = random.Random(SEED)
    ended: list[str] = []

    async def one(number: int) -> None:
        request_id = f"storm-{SEED}-{number}-{uuid.uuid4().hex[:8]}"
        text = f"{chance.getrandbits(64)} " + "question " * chance.randrange(1, 2000)
        asked = asyncio.create_task(ask(client, chat(text, max_tokens=300), request_id=request_id))
        await asyncio.sleep(chance.uniform(0, 0.4))
        await client.cancel(request_id)
        try:
            await asked
            ended.append("ok")
        except Cancelled:
            ended.append("cancelled")
        except PrefixbusError as exc:
            ended.append(exc.code)

    for _ in range(4):
        await asyncio.gather(*(one(number) for number in range(50)))

    assert set(ended) <= {"ok", "cancelled"}, f"seed {SEED}: {ended}"
    assert ended.count("cancelled") > 100
    await cluster.settles(GONE_WITHIN_S)
