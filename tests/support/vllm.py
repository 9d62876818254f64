"""Real vLLM engines for tests, with a tiny model of random weights: alone, or as a whole deployment."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from prefixbus.engine_vllm import flags

from . import models
from .cluster import Cluster, total_of
from .ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
# The tiny model has loaded after 20 to 70 s on two cores that do nothing else.
START_DEADLINE_S = 630.0
MODEL = "smollm2"
BLOCK = 32
MAX_MODEL_LEN = 4096


@functools.cache
def tiny_weights() -> Path:
    """Of a Llama that says nothing. Made once and kept beside vLLM."""
    return _made("tiny_weights.py", "tiny")


@functools.cache
def seers_weights() -> Path:
    """Of an Idefics3 that says as little, for the tokenizer of `models.seer`. Made once and kept beside vLLM."""
    return _made("tiny_seer.py", "seer", models.seer())


def _made(script_name: str, name: str, *sources: Path) -> Path:
    """The directory that this script writes from these."""
    assert PYTHON.exists(), f"there is no {PYTHON}: make vllm"
    script = Path(__file__).with_name(script_name)
    made_from = hashlib.sha256(script.read_bytes())
    for source in sources:
        for file in sorted(source.iterdir()):
            made_from.update(file.read_bytes())
    directory = PYTHON.parent.parent / "models" / f"{name}-{made_from.hexdigest()[:16]}"
    if not directory.exists():
        scratch = directory.with_name(f".{directory.name}-{os.getpid()}")
        subprocess.run([PYTHON, script, scratch, *sources], check=True, capture_output=True)
        with contextlib.suppress(OSError):
            scratch.replace(directory)
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


class VllmEngine:
    """One engine as a process. `with` waits until it answers and ends it; `begin` alone does not wait, so that several
    load at once. `events` and `replay` are what it was told, and what its bridge must be told.

    `changes` replace values of `flags.Settings`; `environ` is set beside ours; `more` are further flags, and win."""

    def __init__(
        self,
        directory: Path,
        *more: str,
        core: int = 0,
        environ: dict[str, str] | None = None,
        command: list[str] | None = None,
        **changes: Any,
    ) -> None:
        self.port, events_port, replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"vllm-{self.port}.log"
        settings: dict[str, Any] = {
            "weights": str(tiny_weights()),
            "tokenizer": str(models.smollm2()),
            "served_model_name": MODEL,
            "port": self.port,
            "block_size": BLOCK,
            "max_model_len": MAX_MODEL_LEN,
            "events": f"tcp://127.0.0.1:{events_port}",
            "replay": f"tcp://127.0.0.1:{replay_port}",
            "topic": "kv@w1",
        }
        self.settings = flags.Settings(**(settings | changes))
        self.events, self.replay = self.settings.events, self.settings.replay
        self._command = command or flags.command(str(PYTHON), self.settings, more)
        self._environ = {**os.environ, **flags.environment([core], 1), **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.begin()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process

    def begin(self) -> None:
        """Starts it, on the same addresses as before if it ran already."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)

    def wait(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when it takes requests."""
        end = time.monotonic() + deadline_s
        while not self.answers():
            assert self.process.poll() is None, f"vLLM ended: {self.tail()}"
            assert time.monotonic() < end, f"vLLM does not answer after {deadline_s} s: {self.tail()}"
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL; its other processes die with it."""
        self.process.kill()
        self.process.wait(timeout=30)

    def stop(self) -> None:
        """Ends it the ordinary way; may be called when it was not started or has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=30)
        self._process = None

    def pause(self) -> None:
        """SIGSTOP for its API server: sockets stay open, nothing is answered; the engine core goes on."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of this name, such as `vllm:prefix_cache_hits_total`, that have these labels."""
        return metric_of(self.url, name, **labels)

    def reset(self) -> None:
        """Empties its prefix cache. :raises HTTPError: it has no dev mode."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def tail(self) -> str:
        return self.log.read_text("utf-8", "replace")[-3000:]


class VllmCluster(Cluster):
    """`prefixbus up --engine vllm` with the tiny model. `engine_stats` are vLLM's own numbers."""

    start_deadline_s = START_DEADLINE_S

    def __init__(self, directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        super().__init__(
            directory,
            *("--engine", "vllm", "--vllm-python", str(PYTHON), "--weights", str(tiny_weights())),
            *arguments,
            environ=environ,
        )

    def engine_stats(self) -> dict[str, dict[str, Any]]:
        """By worker; `blocks_used` and `wrong_hits` are no engine's own to tell, and 0."""
        stats = {}
        for worker, engine in self.file.engines.items():
            metrics = metrics_of(engine.url)
            stats[worker] = {
                "running": total_of(metrics, "vllm:num_requests_running"),
                "waiting": total_of(metrics, "vllm:num_requests_waiting"),
                "blocks_used": 0,
                "wrong_hits": 0,
            }
        return stats

    def engine_metric(self, worker: str, name: str, **labels: str) -> float:
        """The sum over all series of this name at one worker's engine."""
        return metric_of(self.file.engines[worker].url, name, **labels)


def metrics_of(url: str) -> dict[str, float]:
    """An engine's metrics by `name` or `name{a="b"}`; labels stand as the engine wrote them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {name: float(value) for name, value in re.findall(r"^([a-z_:]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def metric_of(url: str, name: str, **labels: str) -> float:
    """The sum over all series of this name that have these labels."""
    return total_of(metrics_of(url), name, **labels)
