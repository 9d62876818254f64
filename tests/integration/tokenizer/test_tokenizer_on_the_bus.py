"""The tokenizer under a real server's permissions: what a tenant's plain client sees on the wire."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import orjson
from nats.aio.msg import Msg
from support import models
from support.nats import NatsServer, eventually

from prefixbus.bus import config, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import ModelSection
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import FACT, JOB, ROUTE, Fact, Route
from prefixbus.bus.runtime import Runtime
from prefixbus.tokenizer import service

BODY = orjson.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})


@asynccontextmanager
async def tokenizer(server: NatsServer, instance: str) -> AsyncIterator[Runtime]:
    section = ModelSection(tokenizer=str(models.tiny()), model_revision="sha256:w")
    settings = msgspec.structs.replace(config.Config(), models={"tiny": section})
    rt = Runtime("tokenizer", instance, server.state, settings, RealClock())
    rt.bus = await Bus.connect(
        server.url,
        name=instance,
        inbox_prefix=subjects.service_inbox("tokenizer", instance),
        nkey_seed=server.seed("tokenizer"),
        on_event=rt.bus_event,
    )
    task = asyncio.create_task(service.run(rt))
    try:
        await eventually(lambda: not rt.not_ready_because(), "the tokenizer is ready")
        await rt.bus.flush()
        yield rt
    finally:
        rt.stopping.set()
        await task
        await rt.bus.close()


class Inbox:
    """What comes to one reply subject of a tenant."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus = bus
        self.subject = f"{subjects.tenant_inbox(tenant)}.c1.x1"
        self.frames: asyncio.Queue[Msg] = asyncio.Queue()

    async def listen(self) -> None:
        await self.bus.subscribe(self.subject, self.frames.put)
        await self.bus.flush()

    async def end(self) -> dict[str, str]:
        """Headers of the ending frame."""
        while True:
            frame = await asyncio.wait_for(self.frames.get(), 10)
            if "Pb-Final" in (frame.headers or {}):
                assert frame.data == b""
                return dict(frame.headers or {})


async def test_two_copies_share_requests_and_a_router_gets_each_once(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, workers=[]) as server:
        await server.callout()
        tenant = await server.tenant_bus(server.demo.tenant, server.demo.token)
        router = await server.bus("router")
        routes: list[Route] = []

        async def routed(message: Msg) -> None:
            routes.append(ROUTE.decode(message.data))

        await router.subscribe(subjects.ALL_ROUTE, routed, queue="router")
        await router.flush()
        async with tokenizer(server, "t1") as one, tokenizer(server, "t2") as two:
            for number in range(40):
                await tenant.publish(
                    subjects.infer(server.demo.tenant, "tiny"),
                    BODY,
                    reply=f"{subjects.tenant_inbox(server.demo.tenant)}.c1.x",
                    headers={"Pb-Request-Id": f"r{number}"},
                )
            await eventually(lambda: len(routes) >= 40, "40 routes")

            counts = [
                rt.registry.get_sample_value("prefixbus_tokenizer_requests_total", {"code": "ok"}) for rt in (one, two)
            ]

        assert sorted(route.client_request_id for route in routes) == sorted(f"r{number}" for number in range(40))
        assert all(counts)
        assert JOB.decode(routes[0].job).namespace.tenant == server.demo.tenant


async def test_without_a_router_the_client_hears_unavailable(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, workers=[]) as server:
        await server.callout()
        inbox = Inbox(await server.tenant_bus(server.demo.tenant, server.demo.token), server.demo.tenant)
        await inbox.listen()
        async with tokenizer(server, "t1"):
            await inbox.bus.publish(
                subjects.infer(server.demo.tenant, "tiny"), BODY, reply=inbox.subject, headers={"Pb-Request-Id": "mine"}
            )

            headers = await inbox.end()

        assert (headers["Pb-Error"], headers["Pb-Request-Id"]) == ("unavailable", "mine")
        assert headers["Nats-Service-Error-Code"] == "503"


async def test_a_megabyte_of_headers_and_a_bad_body_are_survived(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, workers=[]) as server:
        await server.callout()
        inbox = Inbox(await server.tenant_bus(server.demo.tenant, server.demo.token), server.demo.tenant)
        await inbox.listen()
        infer = subjects.infer(server.demo.tenant, "tiny")
        async with tokenizer(server, "t1"):
            await inbox.bus.publish(infer, BODY, reply=inbox.subject, headers={"X": "y" * 1_000_000})
            large = await inbox.end()
            await inbox.bus.publish(infer, b"[" * 10_000, reply=inbox.subject)
            nested = await inbox.end()

        assert large["Pb-Error"] == "headers_too_large"
        assert nested["Pb-Error"] == "invalid_json"


async def test_a_forged_reply_is_on_the_record_and_nowhere_else(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, workers=[]) as server:
        await server.provision()
        await server.callout()
        tenant = await server.tenant_bus(server.demo.tenant, server.demo.token)
        other = await server.tenant_bus("other", server.token("other"))
        router, operator = await server.bus("router"), await server.bus("operator")
        forged = [f"{other.inbox_prefix}.x", f"{router.inbox_prefix}.x", "$JS.API.STREAM.DELETE.AUDIT"]
        strayed: list[Msg] = []
        facts: list[Fact] = []

        async def stray(message: Msg) -> None:
            strayed.append(message)

        async def record(message: Msg) -> None:
            facts.append(FACT.decode(message.data))

        await other.subscribe(forged[0], stray)
        await router.subscribe(forged[1], stray)
        await router.subscribe(subjects.ALL_ROUTE, stray, queue="router")
        await operator.follow(subjects.STREAM_AUDIT, subjects.audit("tokenizer", "*"), record, start="all")
        async with tokenizer(server, "t1"):
            for reply in forged:
                await tenant.publish(subjects.infer(server.demo.tenant, "tiny"), BODY, reply=reply)

            await eventually(lambda: len(facts) == len(forged), "facts")
        await other.flush()
        await router.flush()

        assert [(fact.kind, fact.tenant, fact.detail) for fact in facts] == [
            ("forged_reply", server.demo.tenant, reply) for reply in forged
        ]
        assert not strayed


def test_loading_a_model_writes_no_lines_of_its_own() -> None:
    """transformers says on import that there is no torch: a line that was no JSON in the tokenizer's log."""
    load = "import sys; from pathlib import Path; from prefixbus.tokenizer.model import TokenizerModel"
    made = subprocess.run(
        [sys.executable, "-c", f"{load}; TokenizerModel.load(Path(sys.argv[1]))", str(models.tiny_vocabulary())],
        capture_output=True,
        text=True,
        check=True,
    )

    assert made.stdout + made.stderr == ""
