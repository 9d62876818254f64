"""A model that thinks and sees, on engines that join a running deployment: what its parser makes of answers, what is
found again of images, and what becomes of its workers' revisions, stories and profile."""

import asyncio
import base64
import contextlib
import http.server
import json
import os
import re
import secrets
import signal
import struct
import subprocess
import sys
import threading
import urllib.request
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from support.cluster import Answer, ask, outcome_of
from support.load import Load
from support.nats import eventually
from support.ports import free_port
from support.processes import spawned
from support.vllm import BLOCK, VllmCluster, VllmEngine

from prefixbus.bus import config as config_module
from prefixbus.bus import messages, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import BadRequest, EngineFailed
from prefixbus.bus.messages import Outcome
from prefixbus.client import Client
from prefixbus.cluster import control, deployment, state
from prefixbus.router.choice import prior_of
from prefixbus.router.cost import prefill_ms

from .narrow import DEADLINE_S, HITS, reusable
from .seers import KEPT_BATCHES, KV_BLOCKS, SEER, Joined, Seers, WithSeer, worker

# Starting two engines beside the cluster's counts for the first test.
pytestmark = pytest.mark.timeout(900)

CHOICES = ["yes, it is", "no, it is not"]
LOOK = [{"type": "text", "text": "Look at it closely, please, and tell what it is that you see there: " * 5}]
TELL = [{"type": "text", "text": " What is it, and what is behind it? " * 8}]
COMPUTED = "vllm:prompt_tokens_total"


@pytest.fixture(scope="module")
def seers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seers]:
    with Seers(tmp_path_factory.mktemp("seers")) as running:
        yield running


@contextlib.asynccontextmanager
async def joined(at: VllmCluster, name: str, engine: VllmEngine, directory: Path) -> AsyncIterator[Joined]:
    """A worker of the model that has registered. Nothing is left of it afterwards."""
    with worker(at, directory / f"log-{secrets.token_hex(3)}", engine, "--name", name, model=SEER) as process:
        await process.says('"registered"')
        await eventually(lambda: at.is_ready(process.process.pid), f"{name} is ready", DEADLINE_S)
        yield process


@pytest.fixture
async def seer(seers: Seers, cluster: VllmCluster, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    """The engine of the model's only worker."""
    async with joined(cluster, "seer-old", seers.old, tmp_path):
        yield seers.old


def of_bridge(cluster: VllmCluster, name: str, **labels: str) -> float:
    """Of the model's bridges alone."""
    metrics = [
        cluster.metrics_of(file)
        for file in deployment.run_files(cluster.state)
        if file.service == "worker_bridge" and file.instance.startswith("seer-")
    ]
    pairs = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for each in metrics
        for key, value in each.items()
        if key.split("{")[0] == f"prefixbus_bridge_{name}" and all(pair in key for pair in pairs)
    )


async def told(client: Client, operator: Bus, body: dict[str, Any], **options: Any) -> tuple[Answer, Outcome]:
    label = secrets.token_hex(8)
    answer = await ask(client, body, model=SEER, request_id=label, **options)
    return answer, await outcome_of(operator, label, DEADLINE_S)


def long_text(words: int = 60) -> str:
    """What no other test has asked."""
    return " ".join(secrets.token_hex(3) for _ in range(words))


# --- thoughts ---


async def test_thoughts_come_apart_from_the_answer_and_the_prompt_was_our_own(
    seer: VllmEngine, cluster: VllmCluster, client: Client, operator: Bus
) -> None:
    """The template begins the thoughts, their budget ends them, and a grammar says what comes then."""
    body = {
        "messages": [{"role": "user", "content": long_text()}],
        "max_tokens": 40,
        "thinking_token_budget": 6,
        "structured_outputs": {"choice": CHOICES},
    }

    async def asked() -> tuple[list[dict[str, Any]], dict[str, Any], Outcome]:
        label = secrets.token_hex(8)
        choices: list[dict[str, Any]] = []
        usage: dict[str, Any] = {}
        async for frame in client.stream(SEER, body, request_id=label):
            choices += frame.chunk["choices"]
            usage = frame.chunk.get("usage") or usage
        assert choices[-1]["finish_reason"] == "stop"
        return [choice["delta"] for choice in choices], usage, await outcome_of(operator, label, DEADLINE_S)

    _, _, first = await asked()
    await cluster.settles(DEADLINE_S)
    hits = seer.metric(HITS)
    deltas, usage, second = await asked()

    kinds = [name for delta in deltas for name in ("reasoning", "content") if delta.get(name)]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning", "content"}
    assert "".join(delta.get("content", "") for delta in deltas) in CHOICES
    assert "think>" not in "".join(delta.get("reasoning", "") for delta in deltas)
    assert "reasoning_tokens" in usage["completion_tokens_details"]
    assert (first.cached_tokens, first.engine_differs_at, second.engine_differs_at) == (0, None, None)
    assert second.predicted_tokens == second.cached_tokens == seer.metric(HITS) - hits == reusable(second.prompt_tokens)
    assert of_bridge(cluster, "engine_prompts_total", verdict="same") == 2
    assert of_bridge(cluster, "engine_prompts_total", verdict="differs") == 0
    assert of_bridge(cluster, "engine_prompts_total", verdict="untold") == 0


async def test_thoughts_that_are_not_wanted_are_not_told(seer: VllmEngine, client: Client) -> None:
    body = {"messages": [{"role": "user", "content": long_text(5)}], "max_tokens": 12, "ignore_eos": True}

    deltas = [
        choice["delta"]
        async for frame in client.stream(SEER, {**body, "include_reasoning": False})
        for choice in frame.chunk["choices"]
    ]

    assert not any(delta.get("reasoning") for delta in deltas)


# --- images ---


def png(colour: bytes, side: int = 64) -> bytes:
    """A square of one colour (3 bytes)."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + colour * side) * side
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def about(url: str, unique: str, **part: str) -> dict[str, Any]:
    """A question on what is at this URL; all but that is alike of equal `unique`."""
    content = [{"type": "text", "text": unique}, *LOOK, {"type": "image_url", "image_url": {"url": url}, **part}, *TELL]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "ignore_eos": True}


async def test_of_an_image_kv_is_found_again_for_the_same_image_and_tenant_alone(
    seer: VllmEngine, cluster: VllmCluster, client: Client, operator: Bus
) -> None:
    """By the engine's counters: of prompts that it makes itself, as it does of images, nothing is told on reuse."""
    unique = secrets.token_hex(8)
    red, blue = (data_url(png(colour)) for colour in (b"\xff\0\0", b"\0\0\xff"))
    stranger = state.add_tenant(cluster.state, f"t{secrets.token_hex(4)}")
    hits: list[int] = []
    prompts: list[int] = []
    predicted: list[int] = []

    async def asked(caller: Client, url: str, **part: str) -> None:
        before = seer.metric(HITS)
        answer, outcome = await told(caller, operator, about(url, unique, **part))
        hits.append(int(seer.metric(HITS) - before))
        prompts.append(answer.usage["prompt_tokens"])
        predicted.append(outcome.predicted_tokens)
        await cluster.settles(DEADLINE_S)

    # A client's own name for an image is no reason to take two for one.
    await asked(client, red, uuid="mine")
    async with (
        await cluster.client(tenant=stranger.tenant, token=stranger.token) as other,
        await cluster.client(scope="team-legal") as legal,
    ):
        await asked(other, red)
        await asked(legal, red)
    await asked(client, red, uuid="another")
    await asked(client, blue, uuid="mine")

    whole = reusable(prompts[0])
    assert prompts == [prompts[0]] * 5
    assert hits[:4] == [0, 0, 0, whole], "the same image of the same tenant and scope"
    assert 0 < hits[4] < whole - 2 * BLOCK, "what comes before another image"
    assert predicted == [0, 0, 0, hits[4], hits[4]], "nobody but the engine knows how many tokens an image has"
    assert cluster.total("worker_bridge", "prefixbus_wrong_hits_total") == 0


class Pictures(http.server.BaseHTTPRequestHandler):
    """Answers everything with a picture."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(png(b"\0\xff\0"))

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def pictures() -> Iterator[str]:
    """A URL of a picture."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/picture.png"
        server.shutdown()
        thread.join()


async def test_an_image_that_only_the_engine_can_fetch_is_answered_and_shares_nothing(
    seer: VllmEngine, cluster: VllmCluster, client: Client, operator: Bus, pictures: str
) -> None:
    unique = secrets.token_hex(8)
    await cluster.settles(DEADLINE_S)
    held, hits = of_bridge(cluster, "held_blocks"), seer.metric(HITS)
    foreign = of_bridge(cluster, "foreign_blocks")

    answers = [await told(client, operator, about(pictures, unique)) for _ in range(2)]

    assert [answer.usage["completion_tokens"] for answer, _ in answers] == [3, 3]
    assert [answer.cached_tokens for answer, _ in answers] == [0, 0]
    assert [outcome.predicted_tokens for _, outcome in answers] == [0, 0]
    assert seer.metric(HITS) == hits
    blocks = sum(answer.usage["prompt_tokens"] // BLOCK for answer, _ in answers)
    await eventually(
        lambda: of_bridge(cluster, "foreign_blocks") == foreign + blocks, "its blocks are nobody's", DEADLINE_S
    )
    assert of_bridge(cluster, "held_blocks") == held


MALFORMED: dict[str, dict[str, Any]] = {
    "no base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}},
    "no image": {"type": "image_url", "image_url": {"url": "data:image/png;base64,Y2F0"}},
    "cut short": {"type": "image_url", "image_url": {"url": data_url(png(b"\1\2\3")[:60])}},
    "no URL": {"type": "image_url", "image_url": {"url": "cat.png"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "a file": {"type": "file", "file": {"file_id": "of-mine"}},
    "what nobody knows": {"type": "hologram", "hologram": "?"},
}


async def test_media_that_are_malformed_or_unknown_are_the_engines_to_refuse_and_break_nothing(
    seer: VllmEngine, cluster: VllmCluster, client: Client
) -> None:
    incarnation = of_bridge(cluster, "incarnation")
    shared_nothing = cluster.total("tokenizer", "prefixbus_tokenizer_uncacheable_total")
    refused = {}

    for name, part in MALFORMED.items():
        body = about("", secrets.token_hex(8))
        body["messages"][0]["content"][2] = part
        try:
            await ask(client, body, model=SEER)
        except BadRequest as exc:
            refused[name] = exc.sentence()

    assert refused.keys() == MALFORMED.keys(), refused
    # This the engine takes for a fault of its own (HTTP 500).
    with pytest.raises(EngineFailed):
        await ask(client, about(f"http://127.0.0.1:{free_port()}/picture.png", secrets.token_hex(8)), model=SEER)
    # The bytes of "no image" and "cut short" can be named, though nobody can look at them.
    shared_nothing = cluster.total("tokenizer", "prefixbus_tokenizer_uncacheable_total") - shared_nothing
    assert shared_nothing == len(MALFORMED) - 2 + 1
    answer = await ask(client, {"messages": [{"role": "user", "content": long_text(5)}], "max_tokens": 3}, model=SEER)
    assert answer.usage["completion_tokens"] > 0
    assert of_bridge(cluster, "incarnation") == incarnation
    await cluster.settles(DEADLINE_S)


# --- revisions ---


def questions(number: int) -> list[dict[str, Any]]:
    system = "You answer in the shortest words that will do, and say so if you do not know. " * 8
    return [
        {"prompt": f"{system} Question {number} of {which}?", "max_tokens": 4, "ignore_eos": True} for which in range(4)
    ]


async def of_the_new_tokenizer(cluster: VllmCluster) -> None:
    """Returns when the only tokenizer is one that has read the config of now."""
    old = cluster.signal("tokenizer-1", signal.SIGTERM)
    await eventually(lambda: cluster.is_ready_again("tokenizer-1", old), "another tokenizer", DEADLINE_S)


async def test_a_new_revision_takes_over_and_no_request_fails_and_no_hit_crosses(
    seers: Seers, cluster: WithSeer, operator: Bus, tmp_path: Path
) -> None:
    outcomes: list[Outcome] = []

    async def hear(message: Msg) -> None:
        outcome = messages.OUTCOME.decode(message.data)
        if outcome.model == SEER:
            outcomes.append(outcome)

    await operator.follow(subjects.STREAM_JOURNAL, "pb.v1.outcome.*.*", hear, start="new")
    hits = []
    async with await cluster.client() as client, contextlib.AsyncExitStack() as stack:
        before = await stack.enter_async_context(joined(cluster, "seer-old", seers.old, tmp_path))
        hits.append(seers.old.metric(HITS))
        load = Load(client, questions, SEER)
        asking = asyncio.create_task(load.run())
        try:
            await load.goes_on("before")
            cluster.upgrade_seer(f"sha256:{secrets.token_hex(4)}")
            await stack.enter_async_context(joined(cluster, "seer-new", seers.new, tmp_path))
            hits.append(seers.new.metric(HITS))
            await load.goes_on("with the new worker there")
            # One of the old revision goes on until one of the new is there.
            adding = [sys.executable, "-m", "prefixbus", "run", "tokenizer", "--state", str(cluster.state)]
            added = stack.enter_context(spawned(adding))
            await eventually(lambda: cluster.is_ready(added.pid), "a second tokenizer", DEADLINE_S)
            await load.goes_on("with both tokenizers")
            await of_the_new_tokenizer(cluster)
            await load.goes_on("with the new tokenizers alone")
            os.kill(before.process.pid, signal.SIGTERM)
            await asyncio.to_thread(before.process.wait, DEADLINE_S)
            await load.goes_on("without the old worker")
        finally:
            load.stop()
            await asking
        await eventually(lambda: len(outcomes) >= len(load.answers), "an outcome for each answer", DEADLINE_S)

    assert not load.failed
    assert {(one.status, one.error) for one in outcomes} == {("ok", "")}
    assert all(answer.usage["completion_tokens"] == 4 for answer in load.answers)
    by_revision: dict[str, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda each: each.ended_at):
        by_revision.setdefault(one.ns_id, []).append(one)
    assert [{one.worker for one in each} for each in by_revision.values()] == [{"seer-old"}, {"seer-new"}]
    engines = (seers.old, seers.new)
    for engine, before_it, each in zip(engines, hits, by_revision.values(), strict=True):
        assert each[0].cached_tokens == 0, "a revision begins cold"
        assert max(one.cached_tokens or 0 for one in each) > 2 * BLOCK, "and becomes warm"
        assert engine.metric(HITS) - before_it == sum(one.cached_tokens or 0 for one in each)
    assert cluster.total("worker_bridge", "prefixbus_wrong_hits_total") == 0


async def test_two_revisions_share_nothing_in_one_engine(
    seers: Seers, cluster: WithSeer, client: Client, operator: Bus, tmp_path: Path
) -> None:
    body = {"prompt": f"{secrets.token_hex(8)} {long_text()}", "max_tokens": 2, "ignore_eos": True}

    async with joined(cluster, "seer-old", seers.old, tmp_path):
        one = [(await told(client, operator, body))[0].cached_tokens for _ in range(2)]
    cluster.upgrade_seer(f"sha256:{secrets.token_hex(4)}")
    await of_the_new_tokenizer(cluster)
    async with joined(cluster, "seer-old", seers.old, tmp_path):
        hits = seers.old.metric(HITS)
        first, outcome = await told(client, operator, body)
        across = seers.old.metric(HITS) - hits
        again, _ = await told(client, operator, body)

    whole = reusable(first.usage["prompt_tokens"])
    assert one == [0, whole]
    assert (first.cached_tokens, outcome.predicted_tokens, across) == (0, 0, 0)
    assert again.cached_tokens == whole


# --- a story that is broken ---


def past_the_bridge(engine: VllmEngine) -> None:
    body = {"model": SEER, "prompt": [1000 + secrets.randbelow(40000) for _ in range(BLOCK + 1)], "max_tokens": 1}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=DEADLINE_S).close()


def is_incomplete(cluster: VllmCluster) -> bool:
    """As heartbeats say, and `prefixbus status` shows."""
    command = [sys.executable, "-m", "prefixbus", "status", "--state", str(cluster.state)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    return re.search(r"seer-new .*incomplete", said) is not None


async def test_a_story_that_the_engine_has_forgotten_is_incomplete_and_says_so_until_a_reset(
    seers: Seers, cluster: VllmCluster, client: Client, operator: Bus, tmp_path: Path
) -> None:
    """The engine keeps 40 batches here instead of 10,000, and a bridge was gone for more."""
    engine = seers.new
    body = {"prompt": long_text(), "max_tokens": 2, "ignore_eos": True}
    engine.reset()
    async with joined(cluster, "seer-new", engine, tmp_path) as bridge:
        await told(client, operator, body)
        await cluster.settles(DEADLINE_S)
        known, known_outcome = await told(client, operator, body)
        assert of_bridge(cluster, "story_complete") == 1
        bridge.process.kill()
        bridge.process.wait(timeout=DEADLINE_S)
    for _ in range(KEPT_BATCHES + 5):
        await asyncio.to_thread(past_the_bridge, engine)

    async with joined(cluster, "seer-new", engine, tmp_path) as bridge:
        assert "events of the engine are lost: what it holds is known in part" in bridge.said
        assert of_bridge(cluster, "story_complete") == 0
        assert of_bridge(cluster, "held_blocks") == 0
        await eventually(lambda: asyncio.to_thread(is_incomplete, cluster), "it is told", DEADLINE_S)
        unsure, unsure_outcome = await told(client, operator, body)
        await eventually(lambda: of_bridge(cluster, "hits_unverified_total") == 1, "nobody can judge it", DEADLINE_S)

        await control.reset_cache(operator, "seer-new")
        assert of_bridge(cluster, "story_complete") == 1
        assert not is_incomplete(cluster)
        cold, cold_outcome = await told(client, operator, body)
        await cluster.settles(DEADLINE_S)
        warm, warm_outcome = await told(client, operator, body)

        assert cluster.total("worker_bridge", "prefixbus_wrong_hits_total") == 0

    whole = reusable(known.usage["prompt_tokens"])
    assert known_outcome.predicted_tokens == known.cached_tokens == whole
    assert (unsure_outcome.predicted_tokens, unsure.cached_tokens) == (0, whole), "the engine has it all the same"
    assert (cold_outcome.predicted_tokens, cold.cached_tokens) == (0, 0)
    assert warm_outcome.predicted_tokens == warm.cached_tokens == whole


# --- its profile ---


async def test_its_profile_is_learned_by_short_probes_and_written_where_routers_begin_from_it(
    seers: Seers, cluster: VllmCluster, tmp_path: Path
) -> None:
    engine = seers.old
    most = 1024
    computed, hits = engine.metric(COMPUTED), engine.metric(HITS)
    command = [sys.executable, "-m", "prefixbus", "calibrate", "--state", str(cluster.state), "--model", SEER]
    command += ["--engine-url", engine.url, "--most-tokens", str(most)]

    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=4 * DEADLINE_S)

    assert done.returncode == 0, done.stderr
    section = config_module.load(cluster.state / "config.toml", {}).models[SEER]
    assert section.measured is not None
    assert (section.measured.block_size, section.measured.kv_tokens) == (BLOCK, KV_BLOCKS * BLOCK)
    prior = prior_of(SEER, section)
    assert 0.0 < prefill_ms(prior, BLOCK, BLOCK) < prefill_ms(prior, most, most), "longer prompts take longer"
    assert prefill_ms(prior, BLOCK, most) < prefill_ms(prior, most, most), "and what is cached takes no time"
    asked, reused = engine.metric(COMPUTED) - computed, engine.metric(HITS) - hits
    assert asked - reused <= 7 * most + 3 * 2 * 33
    # What was written is what the next bridge starts with.
    async with joined(cluster, "seer-old", engine, tmp_path) as bridge:
        assert '"registered"' in bridge.said
