"""Engines that somebody else started: one set up wrong in everything, which is told so, and one set up right, which
`prefixbus worker` brings into a running cluster."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ask, chat
from support.nats import eventually
from support.vllm import BLOCK, MODEL, VllmCluster, VllmEngine

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import EngineFailed, WorkerRefused
from prefixbus.cluster import control
from prefixbus.worker_bridge.engine import VllmHttp
from prefixbus.worker_bridge.handshake import EngineFacts, examine
from prefixbus.worker_bridge.misfits import shortcomings

from .seers import worker

# Starting two engines beside the cluster's counts for the first test.
pytestmark = pytest.mark.timeout(900)

WRONG_FLAGS = (
    "--no-enable-prefix-caching",
    "--no-enable-prompt-tokens-details",
    "--kv-events-config",
    '{"enable_kv_cache_events": false}',
)
KEY = secrets.token_hex(16)


class Strangers:
    """`wrong` has every flag wrong; `right` asks for a key, and binds the addresses of its events."""

    def __init__(self, directory: Path) -> None:
        self.wrong = VllmEngine(
            directory, *WRONG_FLAGS, environ={"VLLM_SERVER_DEV_MODE": "0"}, block_size=2 * BLOCK, max_model_len=2048
        )
        there = VllmEngine(directory)
        self.right = VllmEngine(
            directory,
            core=1,
            environ={"VLLM_API_KEY": KEY},
            max_model_len=8192,
            events=there.events.replace("127.0.0.1", "*"),
            replay=there.replay.replace("127.0.0.1", "*"),
        )
        self.key_file = directory / "engine.key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(KEY)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strangers]:
    made = Strangers(tmp_path_factory.mktemp("strangers"))
    engines = (made.wrong, made.right)
    try:
        for engine in engines:
            engine.begin()
        for engine in engines:
            engine.wait()
        yield made
    finally:
        for engine in engines:
            engine.stop()


async def examined(engine: VllmEngine, model: str = MODEL, key: str = "") -> EngineFacts:
    http = VllmHttp(engine.url, model, key)
    try:
        return await examine(http, model=model, block_size=BLOCK, one_time_salt=lambda: secrets.token_hex(16))
    finally:
        await http.close()


async def test_an_engine_is_told_of_everything_that_it_lacks_at_once(strangers: Strangers) -> None:
    with pytest.raises(WorkerRefused) as refused:
        await examined(strangers.wrong)

    said = str(refused.value)
    for sentence, flag in (
        ("The engine keeps no prefixes.", "--enable-prefix-caching"),
        ("The engine's blocks have 64 tokens, the config says 32.", "--block-size"),
        ("The engine publishes no KV events.", "--kv-events-config"),
        ("The engine does not report cached tokens.", "--enable-prompt-tokens-details"),
    ):
        assert sentence in said and flag in said


async def test_an_engine_of_another_model_is_refused_by_name(strangers: Strangers) -> None:
    with pytest.raises(WorkerRefused, match=f"The engine serves {MODEL}, not another"):
        await examined(strangers.wrong, "another")


async def test_an_engine_that_asks_for_a_key_says_so(strangers: Strangers) -> None:
    with pytest.raises(EngineFailed, match=r"asks for a key.*--engine-key-file"):
        await examined(strangers.right, key="wrong")


def test_an_engine_that_asks_for_a_key_is_measured_with_it(strangers: Strangers, cluster: VllmCluster) -> None:
    asked = ["calibrate", "--engine-url", strangers.right.url, "--model", MODEL, "--most-tokens", "512", "--dry-run"]
    command = [sys.executable, "-m", "prefixbus", *asked, "--state", str(cluster.state)]

    without = subprocess.run(command, capture_output=True, text=True)
    with_it = subprocess.run([*command, "--engine-key-file", strangers.key_file], capture_output=True, text=True)

    assert (without.returncode, with_it.returncode) == (1, 0), with_it.stderr
    assert "--engine-key-file" in without.stderr
    assert "ms" in with_it.stderr and KEY not in with_it.stderr


async def test_an_engine_that_is_set_up_right_lacks_nothing(strangers: Strangers) -> None:
    facts = await examined(strangers.right, key=KEY)

    assert facts.shortcomings == []
    assert facts.version == "0.32.0"
    assert facts.max_model_len == 8192
    assert facts.kv_tokens >= facts.max_model_len
    assert facts.topic == strangers.right.settings.topic


async def test_without_dev_endpoints_it_is_said_that_nothing_can_be_reset(strangers: Strangers) -> None:
    http = VllmHttp(strangers.wrong.url, MODEL)
    try:
        settings = await http.settings()
    finally:
        await http.close()

    (sentence,) = shortcomings(settings)
    assert "/reset_prefix_cache" in sentence and "VLLM_SERVER_DEV_MODE=1" in sentence


async def test_a_bridge_waits_for_a_wrong_engine_and_says_why(
    strangers: Strangers, cluster: VllmCluster, tmp_path: Path
) -> None:
    with worker(cluster, tmp_path / "log", strangers.wrong, "--name", "wrong") as joined:
        await joined.says("not serving: The engine keeps no prefixes")

    assert "registered" not in joined.said


async def test_a_vllm_that_runs_already_joins_and_serves(
    strangers: Strangers, cluster: VllmCluster, operator: Bus, tmp_path: Path
) -> None:
    record = f"$KV.{subjects.BUCKET_WORKERS}.joined"
    served = "vllm:request_success_total"
    text = " ".join(secrets.token_hex(3) for _ in range(100))

    key = ("--engine-key-file", str(strangers.key_file))
    with worker(cluster, tmp_path / "log", strangers.right, "--name", "joined", *key) as joined:
        await joined.says('"registered"')
        registered = await operator.jetstream.get_last_msg("KV_WORKERS", record)
        before = strangers.right.metric(served)
        async with await cluster.client() as client:

            async def is_asked() -> bool:
                await ask(client, chat(f"{secrets.token_hex(8)} {text}", max_tokens=1))
                return strangers.right.metric(served) > before

            await eventually(is_asked, "it gets a request", 60.0)

    assert registered.data is not None
    assert b'"engine_version":"0.32.0"' in registered.data and b'"model_revision":"sha256:' in registered.data
    assert b'"lacks":[]' in registered.data
    assert KEY not in joined.said


async def test_an_engines_cache_is_emptied_through_its_bridge(cluster: VllmCluster, operator: Bus) -> None:
    body = chat(" ".join(secrets.token_hex(3) for _ in range(100)), max_tokens=1)
    async with await cluster.client() as client:
        await ask(client, body)
        await cluster.settles()
        warm = await ask(client, body)
        await cluster.settles()

        for name in ("w1", "w2"):
            await control.reset_cache(operator, name)
        cold = await ask(client, body)

    assert warm.cached_tokens > 0
    assert cold.cached_tokens == 0


def children_of(pid: int) -> list[int]:
    """All below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # One that ends now takes its file away under our eyes.
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [below for child in found for below in children_of(child)]


def is_running(pid: int) -> bool:
    """Whether it computes still: a killed one whose new parent has not asked for it yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_killed_engine_leaves_no_process_behind(strangers: Strangers) -> None:
    below = children_of(strangers.wrong.process.pid)
    assert len(below) >= 2, "an engine core and its worker"

    strangers.wrong.kill()

    await eventually(lambda: not any(map(is_running, below)), "all of it has ended", 30.0)
