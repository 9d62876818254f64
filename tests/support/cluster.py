"""A whole deployment for tests: `prefixbus up` as a process of its own, as a user would start it."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from prefixbus.bus import messages
from prefixbus.bus.connection import Bus
from prefixbus.client import Client
from prefixbus.cluster import deployment

from .nats import eventually

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 60.0
# For tests that start or stop a cluster within the test itself, on a machine that does other things too.
TEST_TIMEOUT_S = 120
MODEL = "smollm2"

# What must be zero in every copy of a service when nothing is being done, under all its labels.
IDLE = {
    "tokenizer": ("prefixbus_tokenizer_in_work",),
    "router": (
        "prefixbus_router_in_hand",
        "prefixbus_router_in_flight",
        "prefixbus_router_worker_in_flight",
        "prefixbus_router_worker_reported",
        "prefixbus_router_worker_queue_ms",
    ),
    "gateway": ("prefixbus_gateway_in_hand",),
    "directory": ("prefixbus_directory_announced_requests", "prefixbus_directory_announced_blocks"),
    "worker_bridge": (
        "prefixbus_bridge_running",
        "prefixbus_bridge_waiting",
        "prefixbus_bridge_held_back",
        "prefixbus_bridge_warming",
        "prefixbus_bridge_attempts",
        "prefixbus_bridge_prompt_tokens",
        "prefixbus_bridge_queue_ms",
        "prefixbus_wrong_hits_total",
    ),
}
# A router that has heard of no worker yet shows none of these.
OF_EACH_WORKER = "prefixbus_router_worker_"
# The same of `/sim/stats`; a block that is used is one that a request pins.
ENGINE_IDLE = ("running", "waiting", "blocks_used", "wrong_hits")


class Cluster:
    """`prefixbus up` on a state directory; `with` starts it and ends it, also one that did not get up.

    Environment overrides of the config go in `environ`."""

    start_deadline_s = START_DEADLINE_S

    def __init__(self, directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.state = directory / "state"
        self._arguments = arguments
        self._environ = environ or {}
        self._said: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.token = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def said(self) -> str:
        """What `up` has printed so far, as far as it was waited for."""
        return "".join(self._said)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process

    def init(self) -> None:
        """`prefixbus init`, for tests that edit the config before `start`."""
        command = [sys.executable, "-m", "prefixbus", "init", "--state", str(self.state)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        self.token = made.stdout.split("PREFIXBUS_TOKEN=")[1].split()[0]

    def start(self) -> None:
        ports = ["--port", "0", "--api-port", "0"]
        command = [sys.executable, "-m", "prefixbus", "up", "--state", str(self.state), *ports, *self._arguments]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # What Python had read ahead, `select` would not see.
            bufsize=0,
            env={**os.environ, **self._environ},
        )
        self.wait_for_line("up: ", self.start_deadline_s)
        # The token of a new state directory comes after that line, and before this one.
        self.wait_for_line("Ctrl-C ", START_DEADLINE_S)
        for line in self._said:
            if match := re.match(r"export PREFIXBUS_TOKEN=(\S+)", line):
                self.token = match[1]

    def wait_for_line(self, start: str, deadline_s: float) -> str:
        """The next line of output that begins so."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        descriptor = self.process.stdout.fileno()
        while time.monotonic() < end:
            if not select.select([descriptor], [], [], 0.2)[0]:
                continue
            line = self.process.stdout.readline().decode()
            assert line, f"`up` ended: {''.join(self._said)}"
            self._said.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"`up` did not say {start!r} in {deadline_s} s: {''.join(self._said)}{self.logs()}")

    def stop(self) -> int:
        """Ends `up` the ordinary way and returns its exit status; may be called again, and when nothing was started."""
        if self._process is None:
            return 0
        self._process.terminate()
        with self._process as process:
            try:
                return process.wait(timeout=STOP_DEADLINE_S)
            finally:
                # Its children die with it.
                process.kill()

    @property
    def file(self) -> deployment.ClusterFile:
        return deployment.read_cluster(self.state)

    @property
    def url(self) -> str:
        return self.file.nats_url

    @property
    def api(self) -> str:
        """The base URL of OpenAI's API."""
        return f"{self.file.gateway_url}/v1"

    @property
    def key(self) -> str:
        """The demo tenant's API key."""
        return f"demo.{self.token}"

    def pid(self, name: str) -> int:
        """The pid of a process by its name in cluster.json: router-1, bridge-w2, engine-w1, nats-server ..."""
        return self.file.processes[name]

    def signal(self, name: str, signum: signal.Signals) -> int:
        pid = self.pid(name)
        os.kill(pid, signum)
        return pid

    async def client(self, tenant: str = "demo", token: str = "", scope: str = "") -> Client:
        tls = deployment.tls_of(self.state)
        return await Client.connect(self.url, tenant=tenant, token=token or self.token, scope=scope, tls=tls)

    async def operator(self) -> Bus:
        return await deployment.connect(self.state, "operator", self.url)

    def metrics(self, service: str) -> dict[str, float]:
        """The sum over all copies of a service, by metric and labels: `name` or `name{a="b"}`."""
        total: dict[str, float] = {}
        for file in deployment.run_files(self.state):
            if file.service == service:
                for key, value in self.metrics_of(file).items():
                    total[key] = total.get(key, 0.0) + value
        return total

    def total(self, service: str, name: str, **labels: str) -> float:
        """The sum over all copies of a service, and over all series of this name that have these labels."""
        return total_of(self.metrics(service), name, **labels)

    def metrics_of(self, file: deployment.RunFile) -> dict[str, float]:
        """One process's metrics, by `name` or `name{a="b"}`."""
        with self.open(f"{file.http}/metrics") as reply:
            text = reply.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def open(self, url: str) -> Any:
        """A GET of a service's HTTP port; a context manager, as urlopen gives it."""
        return urllib.request.urlopen(url, timeout=5, context=deployment.tls_of(self.state))

    def is_ready_again(self, name: str, old_pid: int) -> bool:
        """Whether the process of this name is another one than before, and ready."""
        pid = self.file.processes.get(name, old_pid)
        return pid != old_pid and self.is_ready(pid)

    def is_ready(self, pid: int) -> bool:
        """Whether this process has announced itself and says that it is ready."""
        for file in deployment.run_files(self.state):
            if file.pid == pid:
                try:
                    with self.open(f"{file.http}/readyz") as reply:
                        return bool(reply.status == 200)
                except OSError:
                    return False
        return False

    async def is_whole_again(self, name: str, old_pid: int, deadline_s: float) -> None:
        """Returns when the process of this name is another one, and everything is ready."""
        replaced = lambda: self.file.processes.get(name, old_pid) != old_pid  # noqa: E731
        await eventually(replaced, f"{name} is started again", deadline_s)
        await self.all_ready(deadline_s)

    async def all_ready(self, deadline_s: float) -> None:
        """Returns when every service process has announced itself and is ready, and every engine answers."""

        def ready() -> bool:
            try:
                return all(self.is_ready(pid) for pid in self.service_pids().values()) and len(self.engine_stats()) > 0
            except OSError:
                return False

        async def asked() -> bool:
            return await asyncio.to_thread(ready)

        await eventually(asked, "everything is ready", deadline_s)

    def engine_busy(self) -> int:
        """Requests that engines have in hand."""
        return sum(stats["running"] + stats["waiting"] for stats in self.engine_stats().values())

    def engine_stats(self) -> dict[str, dict[str, Any]]:
        """`/sim/stats` by worker."""
        stats = {}
        for worker, engine in self.file.engines.items():
            with urllib.request.urlopen(f"{engine.url}/sim/stats", timeout=5) as reply:
                stats[worker] = json.load(reply)
        return stats

    def leftovers(self) -> list[str]:
        """Whatever is still booked somewhere, and hits that were wrong; empty when all is idle and well. The one
        invariant of every storm. Each copy is looked at by itself: a sum would let one's excess hide another's
        deficit."""
        found = []
        files = deployment.run_files(self.state)
        announced = {file.pid for file in files}
        found += [f"{name}: not announced" for name, pid in self.service_pids().items() if pid not in announced]
        for file in files:
            metrics = self.metrics_of(file)
            for name in IDLE.get(file.service, ()):
                values = {key: value for key, value in metrics.items() if key.split("{")[0] == name}
                if not values and not name.startswith(OF_EACH_WORKER):
                    found.append(f"{file.instance}: no {name}")
                found += [f"{file.instance}: {key} = {value:g}" for key, value in values.items() if value]
        for worker, stats in self.engine_stats().items():
            found += [f"engine {worker}: {key} = {stats[key]}" for key in ENGINE_IDLE if stats[key]]
        return found

    def service_pids(self) -> dict[str, int]:
        """The processes that are ours, by name: neither nats-server nor engines."""
        processes = self.file.processes
        return {name: pid for name, pid in processes.items() if name != "nats-server" and "engine" not in name}

    async def settles(self, deadline_s: float = 10.0) -> None:
        """Returns when nothing is booked anywhere any more."""
        left: list[str] = ["not asked yet"]

        async def idle() -> bool:
            left[:] = await asyncio.to_thread(self._leftovers_or_why)
            return not left

        try:
            await eventually(idle, "everything is idle", deadline_s)
        except AssertionError:
            raise AssertionError(f"still booked after {deadline_s} s: {left}") from None

    def _leftovers_or_why(self) -> list[str]:
        try:
            return self.leftovers()
        except OSError as exc:
            return [f"not answering: {exc}"]

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        folder = self.state / "logs"
        tails = [
            f"== {path.name}\n{path.read_text('utf-8', 'replace')[-1500:]}" for path in sorted(folder.glob("*.log"))
        ]
        return "\n".join(tails)


def total_of(metrics: dict[str, float], name: str, **labels: str) -> float:
    """The sum over all series of this name that have these labels; `metrics` as in `Cluster.metrics`."""
    pairs = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value for key, value in metrics.items() if key.split("{")[0] == name and all(pair in key for pair in pairs)
    )


class Answer:
    """A finished stream, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.frames = 0
        self.keepalives = 0
        self.attempts: set[int] = set()
        self.finish_reason = ""
        self.usage: dict[str, Any] = {}

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


async def ask(client: Client, body: dict[str, Any], *, model: str = MODEL, **options: Any) -> Answer:
    """Sends a request and collects its whole answer. :raises PrefixbusError: see `Client.stream`."""
    answer = Answer()
    async for frame in client.stream(model, body, **options):
        if frame.seq is None:
            answer.keepalives += 1
            continue
        answer.frames += 1
        answer.attempts.add(frame.attempt)
        for choice in frame.chunk["choices"]:
            answer.text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.usage = frame.chunk.get("usage") or answer.usage
    return answer


def chat(text: str, *, system: str = "", max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A chat-completions body of one question."""
    dialog = [{"role": "system", "content": system}] if system else []
    dialog.append({"role": "user", "content": text})
    return {"messages": dialog, "max_tokens": max_tokens, "ignore_eos": True, **more}


async def outcome_of(operator: Bus, request_id: str, deadline_s: float = 10.0) -> messages.Outcome:
    """The last outcome in the journal of a client's request id."""
    found: list[messages.Outcome] = []

    async def hear(message: Any) -> None:
        outcome = messages.OUTCOME.decode(message.data)
        if outcome.client_request_id == request_id:
            found.append(outcome)

    subscription = await operator.follow("JOURNAL", "pb.v1.outcome.*.*", hear, start="all")
    await eventually(lambda: bool(found), f"an outcome of {request_id}", deadline_s)
    await subscription.unsubscribe()
    return found[-1]
