"""A model that thinks and sees, whose engines were started by somebody else, and bridges that join with them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from support import models
from support.nats import eventually
from support.ports import free_port
from support.vllm import MODEL, VllmCluster, VllmEngine, seers_weights

from prefixbus.cluster import state

SEER = "seer"
# A worker that is new to the server makes it read its users again, which cuts tenants off for a moment.
WORKERS = ("seer-old", "seer-new")
MAX_MODEL_LEN = 4096
KV_BLOCKS = 130
# Batches that an engine keeps to be asked for again; by itself it keeps 10,000.
KEPT_BATCHES = 40
# A process that starts, asks an engine, and waits for the bus.
JOIN_S = 60.0


class WithSeer(VllmCluster):
    """A deployment whose config has the model besides its own, and none of its workers."""

    def init(self) -> None:
        super().init()
        shutil.copytree(models.seer(), self.state / "models" / SEER)
        config = self.state / "config.toml"
        config.write_text(
            f'{config.read_text()}\n[models.{SEER}]\ntokenizer = "models/{SEER}"\nmax_model_len = {MAX_MODEL_LEN}\n'
            'model_revision = "sha256:seer-1"\nprofile = "instant"\nreasoning_parser = "deepseek_r1"\n'
            'media_revision = "sha256:of-its-processor"\n'
            # What tests find must be what they have asked for.
            "[placement]\nrewarm_share = 0.0\ncopies_max = 0\n"
        )
        for name in WORKERS:
            state.add_worker(self.state, name)

    def start(self) -> None:
        self.init()
        super().start()

    def upgrade_seer(self, revision: str) -> None:
        """For whoever reads the config from now on."""
        path = self.state / "config.toml"
        before, header, section = path.read_text().partition(f"[models.{SEER}]\n")
        changed, count = re.subn("^model_revision = .*", f'model_revision = "{revision}"', section, flags=re.MULTILINE)
        assert count == 1, section
        path.write_text(before + header + changed)


class Seers:
    """`old` and `new` are alike, but that `new` keeps few batches of its events."""

    def __init__(self, directory: Path) -> None:
        flags = ("--reasoning-parser", "deepseek_r1")
        alike: dict[str, Any] = {
            "weights": str(seers_weights()),
            "tokenizer": str(models.seer()),
            "served_model_name": SEER,
            "kv_blocks": KV_BLOCKS,
            "max_model_len": MAX_MODEL_LEN,
        }
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        publishing = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
            "topic": "kv@new",
            "buffer_steps": KEPT_BATCHES,
        }
        self.old = VllmEngine(directory, *flags, core=0, topic="kv@old", **alike)
        self.new = VllmEngine(
            directory,
            *flags,
            "--kv-events-config",
            json.dumps(publishing),
            core=1,
            events=events,
            replay=replay,
            **alike,
        )
        self._engines = (self.old, self.new)

    def __enter__(self) -> Self:
        try:
            for engine in self._engines:
                engine.begin()
            for engine in self._engines:
                engine.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for engine in self._engines:
            engine.stop()


class Joined:
    """The bridge of `prefixbus worker`, as a process; its log is `log`."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    async def says(self, words: str, deadline_s: float = JOIN_S) -> None:
        """Returns when it has said so."""
        try:
            await eventually(lambda: words in self.said, "", deadline_s)
        except AssertionError:
            raise AssertionError(f"it does not say {words!r}: {self.said[-2000:]}") from None


@contextlib.contextmanager
def worker(cluster: VllmCluster, log: Path, engine: VllmEngine, *more: str, model: str = MODEL) -> Iterator[Joined]:
    """A bridge before this engine, ended the ordinary way. It need not register."""
    command = [sys.executable, "-m", "prefixbus", "worker", "--state", str(cluster.state), "--engine-url", engine.url]
    command += ["--kv-events", engine.events, "--replay", engine.replay, "--model", model, *more]
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=os.environ) as process:
        try:
            yield Joined(process, log)
        finally:
            process.terminate()
            process.wait(timeout=60)
