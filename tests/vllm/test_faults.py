"""Clients, services and engines that stop in the middle, with real engines: what goes on, and how each request ends."""

import asyncio
import json
import secrets
import signal
import time
from array import array
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client as Nats
from support.cluster import Answer, ask, chat, outcome_of
from support.nats import eventually
from support.vllm import BLOCK, START_DEADLINE_S, VllmCluster

from prefixbus.bus import config as config_module
from prefixbus.bus import identity, messages, namespace, revision, secretfile, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import Cancelled, WorkerLost
from prefixbus.bus.messages import VERSION, Dispatch, Job
from prefixbus.client import Client
from prefixbus.cluster import deployment

from .narrow import DEADLINE_S, MODEL, TEST_TIMEOUT_S, WORKER, Narrow, answered
from .story import read
from .test_events import ids, past_the_bridge

# nats-py leaves a connection open that a server refused while it was coming back.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
pytestmark = [refused_connections, pytest.mark.timeout(TEST_TIMEOUT_S)]

RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
# Longer than any test waits for it.
ENDLESS_TOKENS = 3500


@pytest.fixture
async def plain(narrow: Narrow) -> AsyncIterator[Nats]:
    """The demo tenant with nothing of ours."""
    connection = await nats.connect(narrow.url, user="demo", password=narrow.token, inbox_prefix=b"_INBOX.demo")
    yield connection
    await connection.close()


async def is_idle(cluster: Narrow) -> None:
    """Returns when the engine works on nothing."""

    async def idle() -> bool:
        return await asyncio.to_thread(cluster.of_engine, RUNNING) == 0

    await eventually(idle, "an idle engine", DEADLINE_S)


async def begun(client: Client, model: str, label: str, frames: int = 5) -> "asyncio.Task[Answer]":
    """An endless answer, of which so many frames have come."""
    has_begun = asyncio.Event()

    async def collect() -> Answer:
        answer = Answer()
        body = chat(f"{secrets.token_hex(8)} Go on", max_tokens=ENDLESS_TOKENS)
        async for frame in client.stream(model, body, request_id=label):
            answer.frames += frame.seq is not None
            if answer.frames == frames:
                has_begun.set()
        return answer

    task = asyncio.create_task(collect())
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    return task


# --- who asked ---


async def test_a_cancel_reaches_the_engine(narrow: Narrow, narrow_client: Client, narrow_operator: Bus) -> None:
    label = secrets.token_hex(8)
    answer = await begun(narrow_client, MODEL, label)
    assert narrow.of_engine(RUNNING) == 1

    await narrow_client.cancel(label)

    with pytest.raises(Cancelled):
        await answer
    await is_idle(narrow)
    outcome = await outcome_of(narrow_operator, label, DEADLINE_S)
    assert outcome.status == "cancelled"
    assert 0 < outcome.output_tokens < ENDLESS_TOKENS


async def test_a_client_that_disconnects_ends_the_engines_work(
    narrow: Narrow, narrow_operator: Bus, plain: Nats
) -> None:
    label, inbox = secrets.token_hex(8), plain.new_inbox()
    frames = await plain.subscribe(inbox)
    body = json.dumps(chat(f"{secrets.token_hex(8)} Go on", max_tokens=ENDLESS_TOKENS)).encode()
    await plain.publish(subjects.infer("demo", MODEL), body, reply=inbox, headers={"Pb-Request-Id": label})
    while "Pb-Seq" not in ((await frames.next_msg(timeout=DEADLINE_S)).headers or {}):
        pass
    assert narrow.of_engine(RUNNING) == 1

    await plain.close()

    await is_idle(narrow)
    outcome = await outcome_of(narrow_operator, label, DEADLINE_S)
    assert outcome.status == "cancelled"


async def test_a_request_that_arrives_twice_is_generated_once(narrow: Narrow, plain: Nats) -> None:
    router = await deployment.connect(narrow.state, "router", narrow.url)
    config = config_module.load(narrow.state / "config.toml", {})
    section = config.models[MODEL]
    served = identity.of_model(MODEL, section, revision.of_directory(narrow.state / section.tokenizer))
    prompt, wall, request_id = ids(4), time.time(), secrets.token_hex(8)
    job = Job(
        v=VERSION,
        request_id=request_id,
        client_request_id=request_id,
        reply=plain.new_inbox(),
        namespace=served.namespace("demo", ""),
        tokens=array("I", prompt).tobytes(),
        kind="completions",
        params=b'{"max_tokens": 12, "ignore_eos": true}',
        include_usage=False,
        created_at=int(wall),
        deadline_at=wall + DEADLINE_S,
    )
    dispatch = Dispatch(
        v=VERSION,
        request_id=request_id,
        attempt=1,
        incarnation=int(narrow.of_bridge("incarnation")),
        max_queue_ms=1e9,
        accept_by_at=wall + DEADLINE_S,
        prefill_ms=5.0,
        predicted_tokens=0,
        decision="balanced-cold",
        ns_id=namespace.ns_id(secretfile.purpose_key(narrow.state, "namespace"), job.namespace),
        job=messages.JOB.encode(job),
    )
    generated, computed = narrow.of_engine(GENERATED), narrow.of_engine("vllm:prompt_tokens_total")
    frames = await plain.subscribe(job.reply)
    await plain.flush()

    for _ in range(3):
        await router.publish(
            subjects.work(WORKER), messages.DISPATCH.encode(dispatch), reply=f"{router.inbox_prefix}.d.{request_id}.1"
        )
    heard = [await frames.next_msg(timeout=DEADLINE_S)]
    while heard[-1].data:
        heard.append(await frames.next_msg(timeout=DEADLINE_S))
    await narrow.settles(DEADLINE_S)
    await router.close()

    numbers = [int(frame.headers["Pb-Seq"]) for frame in heard[:-1] if frame.headers and "Pb-Seq" in frame.headers]
    assert numbers == list(range(len(numbers)))
    assert frames.pending_msgs == 0, "nothing comes after the end"
    assert narrow.of_engine(GENERATED) - generated == 12
    assert narrow.of_engine("vllm:prompt_tokens_total") - computed == len(prompt)


# --- services that stop ---


async def test_without_nats_the_engine_goes_on_and_the_directory_is_right_when_it_is_back(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    await answered(narrow_client, narrow_operator, {"prompt": ids(60), "max_tokens": 1, "ignore_eos": True})
    await narrow.in_step()
    batches, held = narrow.of_bridge("engine_batches_total"), narrow.of_bridge("held_blocks")

    narrow.signal("nats-server", signal.SIGSTOP)
    try:
        for _ in range(3):
            answer = await asyncio.to_thread(past_the_bridge, narrow, ids(40), max_tokens=8)
            assert answer["usage"]["completion_tokens"] == 8

        async def heard() -> bool:
            return await asyncio.to_thread(narrow.of_bridge, "engine_batches_total") > batches

        await eventually(heard, "the bridge hears of it without NATS", DEADLINE_S)
    finally:
        narrow.signal("nats-server", signal.SIGCONT)

    await narrow.in_step(2 * DEADLINE_S)
    assert narrow.of_bridge("held_blocks") < held, "some of ours were evicted meanwhile"
    await narrow.all_ready(DEADLINE_S)
    await narrow.settles(DEADLINE_S)


async def test_with_the_directory_paused_answers_come_and_it_is_right_when_it_goes_on(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    body = {"prompt": ids(20), "max_tokens": 20, "ignore_eos": True}
    narrow.signal("directory-1", signal.SIGSTOP)
    try:
        answer, outcome = await answered(narrow_client, narrow_operator, body)
    finally:
        narrow.signal("directory-1", signal.SIGCONT)

    assert answer.usage["completion_tokens"] == 20
    assert outcome.decision == "blind"
    await narrow.in_step()
    again, outcome = await answered(narrow_client, narrow_operator, body)
    assert outcome.predicted_tokens == again.cached_tokens == 20 * BLOCK


# --- engines that stop ---


async def test_an_engine_that_hangs_ends_its_answers_and_serves_again_when_it_goes_on(
    narrow: Narrow, narrow_client: Client
) -> None:
    answer = await begun(narrow_client, MODEL, secrets.token_hex(8))

    narrow.signal("engine-w1", signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLost):
            await answer
    finally:
        narrow.signal("engine-w1", signal.SIGCONT)

    await narrow.all_ready(DEADLINE_S)
    await is_idle(narrow)
    assert (await ask(narrow_client, chat("Hello", max_tokens=3), model=MODEL)).usage["completion_tokens"] == 3
    await narrow.settles(DEADLINE_S)
    await narrow.in_step()


@pytest.mark.timeout(START_DEADLINE_S + 60)
async def test_a_killed_engine_ends_what_had_begun_and_leaves_the_rest_to_the_other_one(
    cluster: VllmCluster, client: Client, operator: Bus
) -> None:
    """And the next engine's story, which counts from 0 again, is told anew."""
    label = secrets.token_hex(8)
    begun_answer = await begun(client, "smollm2", label)
    victim = next(worker for worker in ("w1", "w2") if cluster.engine_metric(worker, RUNNING) == 1)
    other = "w2" if victim == "w1" else "w1"
    # Long prompts, of which about every second one goes to either engine.
    prompts = [[1000 + secrets.randbelow(40000) for _ in range(7000)] for _ in range(4)]
    waiting = [
        asyncio.create_task(ask(client, {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})) for prompt in prompts
    ]

    async def at_work() -> bool:
        return await asyncio.to_thread(cluster.engine_metric, victim, RUNNING) >= 2

    await eventually(at_work, "a prompt at the engine that will be killed", DEADLINE_S)
    batches = read(cluster.file.engines[victim].replay).batches
    old = cluster.signal(f"engine-{victim}", signal.SIGKILL)

    with pytest.raises(WorkerLost):
        await begun_answer
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 4 * DEADLINE_S)
    assert [answer.usage["completion_tokens"] for answer in answers] == [2] * 4
    assert any(len(answer.attempts) == 1 and min(answer.attempts) > 1 for answer in answers), "one was tried before"
    assert cluster.engine_metric(other, RUNNING) == 0
    await cluster.is_whole_again(f"engine-{victim}", old, START_DEADLINE_S)
    story = read(cluster.file.engines[victim].replay)
    assert story.batches < batches
    await cluster.settles(DEADLINE_S)

    def in_step() -> bool:
        stories = [read(cluster.file.engines[worker].replay) for worker in ("w1", "w2")]
        held, foreign = (
            cluster.total("worker_bridge", f"prefixbus_bridge_{kind}_blocks") for kind in ("held", "foreign")
        )
        listed = cluster.total("directory", "prefixbus_directory_entries")
        return held + foreign == sum(len(each.copies) for each in stories) and listed == held

    await eventually(lambda: asyncio.to_thread(in_step), "both stories are told", DEADLINE_S)
