"""What bus.runtime does for every service, seen from outside: a tiny service as a process of its own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.nats import NatsServer, eventually
from support.processes import spawned

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus

TESTS = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
pytestmark = pytest.mark.timeout(90)


class Service:
    """The process, and the operator's connection by which tests talk to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", state: Path, log: Path, operator: Bus) -> None:
        self.process = process
        self.run_files = state / "run"
        self._log = log
        self.operator = operator

    def run_file(self) -> Path:
        (found,) = self.run_files.glob("w1.*.json")
        return found

    async def tell(self, verb: str, text: str = "") -> bytes:
        """The answer to a command (see support.tiny_service)."""
        reply = await self.operator.request(subjects.control("w1", verb), text.encode(), timeout_s=DEADLINE_S)
        return reply.data

    async def srv(self, verb: str) -> dict[str, Any]:
        """The answer to `$SRV.PING` and the like."""
        answer: dict[str, Any] = json.loads((await self.operator.request(f"$SRV.{verb}", timeout_s=DEADLINE_S)).data)
        return answer

    def get(self, path: str) -> tuple[int, str]:
        http = json.loads(self.run_file().read_text())["http"]
        try:
            with urllib.request.urlopen(f"{http}{path}", timeout=DEADLINE_S) as reply:
                return reply.status, reply.read().decode().strip()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode().strip()

    def lines(self) -> list[dict[str, Any]]:
        """What it logged so far: whole lines, each of them JSON."""
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def logs(self, start: str) -> dict[str, Any]:
        """The first log line whose message begins so, once it is there."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [line for line in self.lines() if line["message"].startswith(start)]
            return bool(found)

        await eventually(is_there, f"a log line {start!r}", DEADLINE_S)
        return found[0]

    async def ends(self) -> int:
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=["w1"]) as running:
        await running.provision()
        yield running


@contextlib.asynccontextmanager
async def started(server: NatsServer, drain_s: float = DEADLINE_S) -> AsyncIterator[Service]:
    """The service, listening but not yet ready."""
    path = server.state / "logs" / "tiny.log"
    command = [sys.executable, "-m", "support.tiny_service", str(server.state), str(drain_s)]
    environ = {**os.environ, "PREFIXBUS_NATS__URL": server.url}
    with path.open("wb") as log, spawned(command, stderr=log, cwd=TESTS, env=environ) as process:
        service = Service(process, server.state, path, await server.bus("operator"))

        await service.logs("listening")
        yield service


@pytest.fixture
async def service(server: NatsServer) -> AsyncIterator[Service]:
    async with started(server) as running:
        await running.tell("begin")
        yield running


async def test_it_is_ready_when_it_says_so_and_not_before(server: NatsServer) -> None:
    async with started(server) as service:
        assert service.get("/healthz") == (200, "ok")
        assert service.get("/readyz") == (503, "starting")

        await service.tell("begin")

        assert service.get("/readyz") == (200, "ready")


async def test_readyz_gives_the_reason_for_as_long_as_there_is_one(service: Service) -> None:
    await service.tell("trouble", "the engine is silent")
    assert service.get("/readyz") == (503, "the engine is silent")
    assert service.get("/healthz") == (200, "ok")

    await service.tell("trouble", "")

    assert service.get("/readyz") == (200, "ready")


async def test_without_the_bus_it_is_alive_but_not_ready(server: NatsServer, service: Service) -> None:
    server.kill()
    await eventually(lambda: service.get("/readyz") == (503, "cut off from the bus"), "it notices", DEADLINE_S)
    assert service.get("/healthz") == (200, "ok")

    server.start_again()

    await eventually(lambda: service.get("/readyz") == (200, "ready"), "it is back", DEADLINE_S)


async def test_metrics_count_what_was_caught_at_the_edge_and_the_service_lives_on(service: Service) -> None:
    service.operator.send(subjects.control("w1", "stumble"))
    await service.tell("begin")

    status, text = service.get("/metrics")

    assert status == 200
    assert 'prefixbus_failures_total{code="internal"} 1.0' in text
    line = await service.logs("a message was dropped")
    assert (line["level"], line["subject"]) == ("error", "pb.v1.ctl.w1.stumble")
    assert "LookupError: nobody foresaw this" in line["exception"]


async def test_the_run_file_says_where_it_is_to_its_owner_alone_and_goes_with_it(service: Service) -> None:
    content = json.loads(service.run_file().read_text())
    assert content == {
        "service": "worker_bridge",
        "instance": "w1",
        "pid": service.process.pid,
        "http": content["http"],
    }
    assert content["http"].startswith("http://127.0.0.1:")
    assert service.run_file().stat().st_mode & 0o777 == 0o600

    service.process.send_signal(signal.SIGTERM)

    assert await service.ends() == 0
    assert not list(service.run_files.glob("w1.*.json"))


async def test_it_answers_the_services_protocol_also_on_a_client_made_anew(service: Service) -> None:
    before = await service.srv("PING")
    await service.tell("recreate")
    await service.logs("bus: recreated")

    after, info = await service.srv("PING.prefixbus-worker-bridge"), await service.srv("INFO")

    for answer in (before, after, info):
        assert answer["name"] == "prefixbus-worker-bridge"
        assert answer["metadata"]["instance"] == "w1"
    assert before["type"] == after["type"] == "io.nats.micro.v1.ping_response"
    assert info["type"] == "io.nats.micro.v1.info_response"
    assert 'prefixbus_bus_events_total{kind="recreated"} 1.0' in service.get("/metrics")[1]


async def test_each_log_line_is_json_and_names_its_request(service: Service) -> None:
    waiting = asyncio.create_task(service.tell("work", "r-17"))

    line = await service.logs("work begins")

    assert {key: line[key] for key in ("level", "service", "instance", "message", "request_id")} == {
        "level": "info",
        "service": "worker_bridge",
        "instance": "w1",
        "message": "work begins",
        "request_id": "r-17",
    }
    assert isinstance(line["at"], float)
    await service.tell("finish")
    assert await waiting == b"done"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_lets_work_in_hand_end(service: Service, signum: signal.Signals) -> None:
    waiting = asyncio.create_task(service.tell("work", "r-1"))
    await service.logs("work begins")

    service.process.send_signal(signum)
    await service.logs("stopping")
    assert service.process.poll() is None
    await service.tell("finish")

    assert await waiting == b"done"
    assert await service.ends() == 0


async def test_what_does_not_end_within_the_bound_is_cancelled(server: NatsServer) -> None:
    async with started(server, drain_s=0.1) as service:
        service.operator.send(subjects.control("w1", "work"), b"r-1")
        await service.logs("work begins")

        service.process.send_signal(signal.SIGTERM)

        assert await service.ends() == 0
        assert (await service.logs("work in hand did not end within 0.1 s"))["level"] == "warning"
        assert not list(service.run_files.glob("w1.*.json"))


async def test_an_unforeseen_exception_ends_it_with_status_1_and_a_traceback(service: Service) -> None:
    await service.tell("break")

    assert await service.ends() == 1
    line = await service.logs("the service ends: nobody foresaw this")
    assert line["level"] == "error"
    assert "Traceback (most recent call last)" in line["exception"]
    assert line["exception"].endswith("LookupError: nobody foresaw this")
    assert not list(service.run_files.glob("w1.*.json"))


def test_a_config_that_does_not_do_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.tiny_service", str(tmp_path), "1"]

    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["code"] == "config_invalid"
    assert "prefixbus init" in json.loads(line)["message"]
