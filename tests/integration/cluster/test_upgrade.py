"""A new revision of a model takes over under load: its workers join, the old ones leave, and nobody notices.

What an operator does: change the config, add workers, add a tokenizer, let the old ones go."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from support.cluster import Cluster, chat
from support.load import Load
from support.nats import eventually
from support.ports import free_port
from support.processes import spawned

from prefixbus.bus import messages, subjects
from prefixbus.cluster import deployment, state

pytestmark = pytest.mark.timeout(300)

SYSTEM = "You answer in the shortest words that will do, and say so if you do not know. " * 8
READY_S = 90.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "--workers", "1")
    cluster.init()
    # A worker that is new to the server makes it read its users again, which cuts tenants off for a moment.
    for name in ("w8", "w9"):
        state.add_worker(cluster.state, name)
    with cluster:
        yield cluster


@contextlib.contextmanager
def worker(at: Cluster, name: str) -> Iterator[tuple[int, str]]:
    """An engine and its bridge beside the cluster, by the config of now; the bridge's pid, and the engine's address."""
    ports = [free_port() for _ in range(3)]
    place = deployment.Engine(
        url=f"http://127.0.0.1:{ports[0]}",
        events=f"tcp://127.0.0.1:{ports[1]}",
        replay=f"tcp://127.0.0.1:{ports[2]}",
    )
    plan = deployment.Deployment(at.state, deployment.Options(workers=1), say=lambda line: None)
    bridge = [
        *(sys.executable, "-m", "prefixbus", "run", "worker_bridge", "--state", str(at.state), "--worker", name),
        *("--engine-url", place.url, "--kv-events", place.events, "--kv-replay", place.replay),
    ]
    with spawned(plan.engine_command(name, place)), spawned(bridge) as process:
        yield process.pid, place.url


def questions(number: int) -> list[dict[str, Any]]:
    return [chat(f"Question {number} of {which}?", system=SYSTEM, max_tokens=8) for which in range(4)]


async def test_a_new_revision_takes_over_and_no_request_fails_and_no_hit_crosses(running: Cluster) -> None:
    outcomes: list[messages.Outcome] = []

    async def hear(message: Msg) -> None:
        outcomes.append(messages.OUTCOME.decode(message.data))

    operator = await running.operator()
    try:
        await operator.follow(subjects.STREAM_JOURNAL, "pb.v1.outcome.*.*", hear, start="all")
        async with await running.client() as client:
            load = Load(client, questions)
            asking = asyncio.create_task(load.run())
            try:
                await take_over(running, load)
            finally:
                load.stop()
                await asking
        await eventually(lambda: len(outcomes) >= len(load.answers), "an outcome for each answer", READY_S)
    finally:
        await operator.close()

    assert {(one.status, one.error) for one in outcomes} == {("ok", "")}
    assert all(answer.text and answer.usage["completion_tokens"] == 8 for answer in load.answers)
    workers_of: dict[str, set[str]] = {}
    first_of: dict[str, messages.Outcome] = {}
    for one in sorted(outcomes, key=lambda each: each.ended_at):
        workers_of.setdefault(one.ns_id, set()).add(one.worker)
        first_of.setdefault(one.ns_id, one)
    assert sorted(map(sorted, workers_of.values())) in ([["w1", "w8"], ["w9"]], [["w1"], ["w9"]], [["w8"], ["w9"]])
    assert [one.cached_tokens for one in first_of.values()] == [0, 0], "a new revision begins cold"
    newest = [one for one in outcomes if one.worker == "w9"]
    assert max(one.cached_tokens or 0 for one in newest) > 64, "and becomes warm"
    assert running.total("worker_bridge", "prefixbus_wrong_hits_total") == 0


async def take_over(running: Cluster, load: Load) -> None:
    with contextlib.ExitStack() as stack:
        old_bridge, old_engine = stack.enter_context(worker(running, "w8"))
        await eventually(lambda: running.is_ready(old_bridge), "the worker of the old revision is ready", READY_S)
        await load.goes_on("before")

        config = running.state / "config.toml"
        lines = config.read_text().splitlines()
        changed = ['model_revision = "sha256:new"' if line.startswith("model_revision") else line for line in lines]
        assert changed != lines
        config.write_text("\n".join(changed) + "\n")

        new_bridge, new_engine = stack.enter_context(worker(running, "w9"))
        await eventually(lambda: running.is_ready(new_bridge), "the worker of the new revision is ready", READY_S)
        await load.goes_on("with the new worker there")
        tokenizer = [sys.executable, "-m", "prefixbus", "run", "tokenizer", "--state", str(running.state)]
        added = stack.enter_context(spawned(tokenizer))
        await eventually(lambda: running.is_ready(added.pid), "a tokenizer of the new revision is ready", READY_S)
        await load.goes_on("with both tokenizers")
        old_tokenizer = running.signal("tokenizer-1", signal.SIGTERM)
        await eventually(
            lambda: running.is_ready_again("tokenizer-1", old_tokenizer), "the old one is of the new, too", READY_S
        )
        await load.goes_on("with the new tokenizers alone")
        os.kill(old_bridge, signal.SIGTERM)
        await eventually(
            lambda: all(file.pid != old_bridge for file in deployment.run_files(running.state)),
            "the old worker has left",
            READY_S,
        )
        await load.goes_on("without the old worker")
        stats = running.engine_stats()["w1"], *[sim_stats(url) for url in (old_engine, new_engine)]
        assert [each["wrong_hits"] for each in stats] == [0, 0, 0]


def sim_stats(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/sim/stats", timeout=5) as reply:
        found: dict[str, int] = json.load(reply)
        return found
