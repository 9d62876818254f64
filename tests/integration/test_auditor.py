"""The auditor against a real server: it reads every fact once, and says when it does not or soon cannot."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from support.nats import NatsServer, eventually

from prefixbus.auditor import service
from prefixbus.bus import subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import Config
from prefixbus.bus.messages import FACT, VERSION, Fact
from prefixbus.bus.runtime import Runtime


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=["w1"]) as running:
        await running.provision()
        yield running


async def start(server: NatsServer, instance: str) -> tuple[Runtime, "asyncio.Task[None]"]:
    rt = Runtime("auditor", instance, server.state, Config(), RealClock())
    rt.bus = await server.bus("auditor", instance=instance)

    async def work() -> None:
        async with anyio.create_task_group() as rt.task_group:
            await service.run(rt)
            rt.task_group.cancel_scope.cancel()

    return rt, asyncio.create_task(work())


def counted(rt: Runtime, kind: str) -> float:
    return rt.registry.get_sample_value("prefixbus_audit_facts_total", {"kind": kind}) or 0.0


async def test_copies_count_every_fact_once(server: NatsServer) -> None:
    bridge = await server.bus("worker_bridge", "w1")
    running = [await start(server, name) for name in ("a1", "a2")]
    fact = FACT.encode(Fact(VERSION, "reuse", 1.0, "worker_bridge", "acme", worker="w1"))

    for _ in range(200):
        await bridge.publish_acked(subjects.audit("worker_bridge", "w1"), fact)
    forged = [
        Fact(VERSION, "reuse", 1.0, "worker_bridge", "acme", worker="w2"),
        Fact(VERSION, "reuse", 1.0, "tokenizer", "acme"),
    ]
    for payload in (b"no fact", *(FACT.encode(one) for one in forged)):
        await bridge.publish_acked(subjects.audit("worker_bridge", "w1"), payload)

    await eventually(lambda: sum(counted(rt, "reuse") for rt, _ in running) >= 200, "all are read", 10)
    unreadable = "prefixbus_audit_unreadable_total"
    await eventually(
        lambda: sum(rt.registry.get_sample_value(unreadable) or 0 for rt, _ in running) == 3, "three are not"
    )
    assert sum(counted(rt, "reuse") for rt, _ in running) == 200
    for rt, task in running:
        rt.stopping.set()
        await task


async def test_no_bridge_makes_a_time_series_by_a_word_of_its_own(server: NatsServer) -> None:
    bridge = await server.bus("worker_bridge", "w1")
    rt, task = await start(server, "a1")

    for number in range(50):
        fact = Fact(VERSION, f"kind {number}", 1.0, "worker_bridge", "acme", worker="w1")
        await bridge.publish_acked(subjects.audit("worker_bridge", "w1"), FACT.encode(fact))

    await eventually(lambda: counted(rt, "other") == 50, "all are read", 10)
    rt.stopping.set()
    await task


async def test_it_is_ready_only_while_it_reads(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    deploy = await server.bus("deploy")
    rt, task = await start(server, "a1")
    await eventually(lambda: rt.not_ready_because() == "", "it reads")

    server.kill()
    await eventually(lambda: rt.not_ready_because() != "", "it notices")
    server.start_again()

    await eventually(lambda: rt.not_ready_because() == "", f"it reads again: {rt.not_ready_because()}", 15)
    rt.stopping.set()
    await task
    await deploy.close()


def test_a_record_that_fills_up_is_an_alarm() -> None:
    reader = service._Reader()
    reader.is_bound = True

    reader.fill = service.FILL_ALARM - 0.01
    assert reader.not_ready_because() == ""
    reader.fill = service.FILL_ALARM
    assert "80% full" in reader.not_ready_because()
