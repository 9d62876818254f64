"""A replica answers when it knows what its workers hold, and not before: a wrong answer is worse than none."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.nats import NatsServer, eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import Config
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import BusUnavailable
from prefixbus.bus.messages import DumpRequest, Holdings, KvDump, KvEvents, Load, Lookup, Stored
from prefixbus.bus.runtime import Runtime
from prefixbus.directory import service

NS = bytes(16)
KEYS = array("Q", [1, 2, 3]).tobytes()
EVENTS = 3


class Bridge:
    """One whose engine holds `KEYS`; its dumps wait for `tell`."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.asked: list[DumpRequest] = []

    async def run(self) -> None:
        await self.bus.listen(
            subjects.control("w1", "dump"),
            lambda message: self.asked.append(messages.DUMP_REQUEST.decode(message.data)),
        )
        report = 0
        while True:
            report += 1
            load = Load(1, "w1", 1, report, EVENTS, "m", "s", 0.0, 0, 0, 8, 0.0, 1000, 16, False, [])
            await self.bus.publish(subjects.load("w1"), messages.LOAD.encode(load))
            await anyio.sleep(0.05)

    async def publish(self, seq: int) -> None:
        event = KvEvents(1, "w1", 1, seq, [Stored(NS, seq - 1, array("Q", [seq]).tobytes())])
        await self.bus.publish_acked(subjects.kv(0, "w1"), messages.KV.encode(event))

    async def tell(self) -> None:
        dump = KvDump(1, "w1", 1, EVENTS, 1, 0, 1, [Stored(NS, 0, KEYS)])
        await self.bus.publish_acked(subjects.kv(0, "w1"), messages.KV.encode(dump))


class Scene:
    """A server, a bridge, and a router's look-ups."""

    def __init__(self, server: NatsServer, tasks: anyio.abc.TaskGroup) -> None:
        self.server = server
        self.tasks = tasks
        self.router: Bus
        self.bridge: Bridge

    async def replica(self, name: str) -> Runtime:
        rt = Runtime("directory", name, self.server.state, Config(), RealClock())
        rt.bus = await self.server.bus("directory", instance=name, echo=False)
        rt.task_group = self.tasks
        self.tasks.start_soon(service.run, rt)
        return rt

    async def ask(self) -> Holdings | None:
        """None: the server says that nobody listens, and a router decides blind."""
        payload = messages.LOOKUP.encode(Lookup(messages.VERSION, NS, KEYS))
        try:
            reply = await self.router.request(subjects.lookup(0), payload, timeout_s=5)
        except BusUnavailable as exc:
            assert "nobody listens" in str(exc), exc
            return None
        return messages.HOLDINGS.decode(reply.data)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not tell is waited for as long as the test takes."""
    monkeypatch.setattr(service, "CATCH_UP_S", 60.0)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Scene]:
    async with NatsServer(path, ["w1"]) as server:
        await server.provision()
        async with anyio.create_task_group() as tasks:
            made = Scene(server, tasks)
            made.router = await server.bus("router")
            made.bridge = Bridge(await server.bus("worker_bridge", "w1"))
            tasks.start_soon(made.bridge.run)
            yield made
            tasks.cancel_scope.cancel()


async def test_a_replica_that_does_not_know_what_its_workers_hold_does_not_answer(tmp_path: Path) -> None:
    """It began after the worker's events, without a snapshot."""
    async with running(tmp_path) as scene:
        for seq in range(1, EVENTS + 1):
            await scene.bridge.publish(seq)
        rt = await scene.replica("d1")

        await eventually(lambda: len(scene.bridge.asked) >= 1, "it asks for a dump", 10)
        assert await scene.ask() is None
        assert rt.not_ready_because() == "starting"

        await scene.bridge.tell()
        await eventually(lambda: not rt.not_ready_because(), "it is ready", 10)
        found = await scene.ask()
        assert found is not None
        assert [(level.depth, level.workers) for level in found.levels] == [(3, ["w1"])]
        assert found.incomplete == []


async def test_beside_one_that_knows_a_replica_that_does_not_is_never_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as scene:
        first = await scene.replica("d1")
        await eventually(lambda: len(scene.bridge.asked) >= 1, "the first asks", 10)
        await scene.bridge.tell()
        await eventually(lambda: not first.not_ready_because(), "the first is ready", 10)
        asked = len(scene.bridge.asked)
        second = await scene.replica("d2")
        await eventually(lambda: len(scene.bridge.asked) > asked, "the second asks", 10)

        answers = [await scene.ask() for _ in range(20)]

        assert second.not_ready_because() == "starting"
        assert {found.replica if found is not None else "" for found in answers} == {"d1"}
