"""One bridge with all it meets: a real nats-server, a real engine_sim process, a router's and a tenant's connection."""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry
from support import models
from support.nats import NatsServer, eventually
from support.ports import free_port

from prefixbus.bus import config, identity, messages, namespace, revision, secretfile, subjects
from prefixbus.bus.clock import Clock, RealClock
from prefixbus.bus.connection import Bus, Subscription
from prefixbus.bus.messages import VERSION, Abort, Accept, ControlReply, Dispatch, Job, KvDump, KvEvents, Load, Outcome
from prefixbus.bus.runtime import Runtime
from prefixbus.cluster import provision
from prefixbus.worker_bridge.engine import Engine, Generation, VllmHttp
from prefixbus.worker_bridge.service import Bridge, BridgeOptions

MODEL = "org/tiny"
BLOCK = 8
WORKER = "w1"
DEADLINE_S = 10.0


class EngineProcess:
    """A simulated engine in a process of its own, which tests kill, pause and start again on the same addresses."""

    def __init__(self, directory: Path, *, ipc: bool = False) -> None:
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"ipc://{directory}/ev.sock" if ipc else f"tcp://127.0.0.1:{self.events_port}"
        self.replay = f"tcp://127.0.0.1:{self.replay_port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, **changes: str | None) -> None:
        arguments: dict[str, str | None] = {
            "model-dir": str(models.tiny()),
            "served-model-name": MODEL,
            "port": str(self.port),
            "block-size": str(BLOCK),
            "num-gpu-blocks": "400",
            "max-model-len": "2000",
            "profile": "instant",
            "kv-events-endpoint": self.events,
            "kv-events-replay-endpoint": self.replay,
            "kv-events-topic": "kv@w1",
            "enable-prompt-tokens-details": "",
            "dev-mode": "",
            "eos-one-in": "0",
        }
        arguments |= {name.replace("_", "-"): value for name, value in changes.items()}
        flags = [
            text
            for name, value in arguments.items()
            if value is not None
            for text in ((f"--{name}", value) if value else (f"--{name}",))
        ]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3] / ".typing"), os.environ.get("PYTHONPATH")]))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prefixbus.engine_sim",
            *flags,
            env={**os.environ, "PYTHONPATH": path},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        await self._process.wait()

    async def stats(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/sim/stats") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}{path}", json=body) as response:
            await response.read()


class Answer:
    """What came to one request's inbox."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []
        self.subscription: Subscription

    def headers(self, position: int) -> dict[str, str]:
        return self.messages[position].headers or {}

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Bodies of the numbered chunks; checks that they are numbered from 0 without gaps."""
        numbered = [message for message in self.messages if message.data and "Pb-Seq" in (message.headers or {})]
        assert [message.headers["Pb-Seq"] for message in numbered if message.headers] == [
            str(number) for number in range(len(numbered))
        ]
        return [json.loads(message.data) for message in numbered]

    @property
    def keepalives(self) -> list[dict[str, Any]]:
        return [json.loads(m.data) for m in self.messages if m.data and "Pb-Seq" not in (m.headers or {})]

    @property
    def finals(self) -> list[dict[str, str]]:
        return [message.headers or {} for message in self.messages if not message.data]

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            for chunk in self.chunks
            for choice in chunk["choices"]
        )


class World:
    """What a test holds. Everything heard is kept, by kind."""

    def __init__(self, server: NatsServer, engine: EngineProcess, settings: config.Config) -> None:
        self.server = server
        self.engine = engine
        self.config = settings
        self.clock: Clock = RealClock()
        self.router: Bus
        self.operator: Bus
        self.tenant: Bus
        self.tokenizer: Bus
        self.accepting: Subscription
        self.stopping: anyio.Event
        """Of the last bridge: what SIGTERM sets."""
        self.registry: CollectorRegistry
        self.identity = identity.of_model(MODEL, settings.models[MODEL], revision.of_directory(models.tiny()))
        self.namespace_key = secretfile.purpose_key(server.state, "namespace")
        self.loads: list[Load] = []
        self.outcomes: list[Outcome] = []
        self.kv: list[KvEvents | KvDump] = []
        self.accepts: dict[tuple[str, int], list[Accept]] = {}
        self._numbers = itertools.count(1)

    async def open(self, *, without_stream: str = "") -> None:
        if without_stream:
            deploy = await self.server.bus("deploy")
            for wanted in provision.stream_configs():
                if wanted.name != without_stream:
                    await deploy.jetstream.add_stream(wanted)
        else:
            await self.server.provision()
        await self.server.callout()
        self.router = await self.server.bus("router")
        directory = await self.server.bus("directory")
        self.operator = await self.server.bus("operator")
        self.tokenizer = await self.server.bus("tokenizer")
        self.tenant = await self.server.tenant_bus("acme", self.server.token("acme"))

        async def load(message: Msg) -> None:
            self.loads.append(messages.LOAD.decode(message.data))

        async def outcome(message: Msg) -> None:
            self.outcomes.append(messages.OUTCOME.decode(message.data))

        async def kv(message: Msg) -> None:
            self.kv.append(messages.KV.decode(message.data))

        await self.router.subscribe(subjects.ALL_LOAD, load)
        await self.router.subscribe(subjects.ALL_OUTCOME, outcome)
        await self.hear_accepts()
        await directory.follow(subjects.STREAM_KV_EVENTS, subjects.kv(0, "*"), kv, start="all")
        await self.router.flush()

    async def hear_accepts(self) -> None:
        async def accept(message: Msg) -> None:
            heard = messages.ACCEPT.decode(message.data)
            self.accepts.setdefault((heard.request_id, heard.attempt), []).append(heard)

        self.accepting = await self.router.subscribe(f"{self.router.inbox_prefix}.d.*.*", accept)

    @contextlib.asynccontextmanager
    async def bridge(self, engine: Engine | None = None, **options: Any) -> AsyncIterator[Bridge]:
        """A bridge as its process runs it, in this one."""
        rt = Runtime("worker_bridge", WORKER, self.server.state, self.config, self.clock)
        rt.bus = await self.server.bus("worker_bridge", WORKER, echo=False)
        engine = engine or VllmHttp(self.engine.url, MODEL)
        wanted = BridgeOptions(
            worker=WORKER,
            model=MODEL,
            engine_url=self.engine.url,
            kv_events=self.engine.events,
            kv_replay=self.engine.replay,
            **options,
        )
        try:
            async with anyio.create_task_group() as tasks:
                rt.task_group = tasks
                bridge = Bridge(rt, wanted, engine)
                self.stopping, self.registry = rt.stopping, rt.registry
                tasks.start_soon(bridge.run)
                try:
                    yield bridge
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            await engine.close()
            await rt.bus.close()

    @contextlib.asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[Bridge]:
        async with self.bridge(**options) as bridge:
            await self.until_serving(bridge)
            yield bridge

    async def until_serving(self, bridge: Bridge, after: int = 0) -> Load:
        """The first heartbeat of an incarnation greater than `after`."""
        await eventually(
            lambda: any(load.incarnation > after for load in self.loads),
            f"a heartbeat of a new incarnation; {bridge!r}",
            DEADLINE_S,
        )
        return next(load for load in self.loads if load.incarnation > after)

    # --- requests

    def job(self, tokens: list[int], **changes: Any) -> Job:
        number = next(self._numbers)
        wall = time.time()
        scope, adapter = changes.pop("scope", ""), changes.pop("adapter", "")
        params = {"max_tokens": 4, "ignore_eos": True, **changes.pop("params", {})}
        made = Job(
            v=VERSION,
            request_id=f"R{number}",
            client_request_id=f"c{number}",
            reply=f"_INBOX.acme.c1.answers.{number}",
            namespace=self.identity.namespace("acme", scope, adapter=adapter),
            tokens=array("I", tokens).tobytes(),
            kind="chat",
            params=json.dumps(params).encode(),
            include_usage=False,
            created_at=int(wall),
            deadline_at=wall + 15,
        )
        return msgspec.structs.replace(made, **changes)

    def dispatch(self, job: Job, **changes: Any) -> Dispatch:
        ns_id = namespace.ns_id(self.namespace_key, job.namespace)
        made = Dispatch(
            v=VERSION,
            request_id=job.request_id,
            attempt=1,
            incarnation=self.loads[-1].incarnation if self.loads else 1,
            max_queue_ms=1e9,
            accept_by_at=time.time() + 1,
            prefill_ms=5.0,
            predicted_tokens=0,
            decision="balanced-cold",
            ns_id=ns_id,
            job=messages.JOB.encode(job),
        )
        return msgspec.structs.replace(made, **changes)

    async def cancel(self, job: Job) -> None:
        """As a tokenizer passes it on."""
        await self.tokenizer.publish(subjects.cancelled("acme", job.client_request_id))
        await self.tokenizer.flush()

    async def listen(self, job: Job) -> Answer:
        answer = Answer()

        async def heard(message: Msg) -> None:
            answer.messages.append(message)

        answer.subscription = await self.tenant.subscribe(job.reply, heard)
        await self.tenant.flush()
        return answer

    async def send(self, dispatch: Dispatch) -> Accept:
        """Dispatches, and returns the bridge's first word."""
        name = (dispatch.request_id, dispatch.attempt)
        before = len(self.accepts.get(name, []))
        await self.router.publish(
            subjects.work(WORKER),
            messages.DISPATCH.encode(dispatch),
            reply=f"{self.router.inbox_prefix}.d.{dispatch.request_id}.{dispatch.attempt}",
        )
        await eventually(lambda: len(self.accepts.get(name, [])) > before, f"an answer to {name}", DEADLINE_S)
        return self.accepts[name][before]

    async def ask(self, job: Job, **changes: Any) -> Answer:
        """A whole answer: dispatched, accepted, ended."""
        answer = await self.listen(job)
        accept = await self.send(self.dispatch(job, **changes))
        assert accept.refused == ""
        await eventually(lambda: bool(answer.finals), f"the end of {job.request_id}", DEADLINE_S)
        return answer

    async def compute(self, bridge: Bridge, job: Job) -> None:
        """By the engine, past the bridge's admission."""
        ns_id = namespace.ns_id(self.namespace_key, job.namespace)
        salt = namespace.salt(secretfile.purpose_key(self.server.state, "salt"), ns_id)
        asked = Generation("direct", job.tokens, {"max_tokens": 1}, salt)
        async with bridge.streams.engine.generate(asked) as progress:
            async for _ in progress:
                pass

    async def outcome(self, job: Job, attempt: int = 1) -> Outcome:
        def there() -> bool:
            return any((o.request_id, o.attempt) == (job.request_id, attempt) for o in self.outcomes)

        await eventually(there, f"the outcome of {job.request_id}", DEADLINE_S)
        return next(o for o in self.outcomes if (o.request_id, o.attempt) == (job.request_id, attempt))

    async def control(self, verb: str, payload: bytes = b"") -> ControlReply:
        reply = await self.operator.request(subjects.control(WORKER, verb), payload, timeout_s=DEADLINE_S)
        return messages.CONTROL_REPLY.decode(reply.data)

    async def abort(self, job: Job, attempt: int = 1) -> ControlReply:
        return await self.control("abort", messages.ABORT.encode(Abort(VERSION, job.request_id, attempt)))

    async def status(self, job: Job, attempt: int = 1) -> ControlReply:
        return await self.control("status", messages.ABORT.encode(Abort(VERSION, job.request_id, attempt)))

    async def stored(self, stream: str, subject: str) -> list[dict[str, Any]]:
        """The JSON records of a stream."""
        found: list[dict[str, Any]] = []
        auditing = await self.server.bus("operator", instance=f"i{next(self._numbers)}")

        async def heard(message: Msg) -> None:
            found.append(json.loads(message.data))

        following = await auditing.follow(stream, subject, heard, start="all")
        info = await auditing.jetstream.stream_info(stream, subjects_filter=subject)
        wanted = sum((info.state.subjects or {}).values())
        await eventually(lambda: len(found) >= wanted, f"{wanted} records of {subject}", DEADLINE_S)
        await following.unsubscribe()
        return found

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    # --- invariants

    async def until_idle(self, bridge: Bridge) -> None:
        """Nothing is left: not at the bridge, not at the engine, and the last heartbeat says so."""
        admission = bridge.admission

        def idle() -> bool:
            last = self.loads[-1]
            return (
                (admission.running, admission.waiting, admission.prompt_tokens) == (0, 0, 0)
                and (bridge.streams.hits.silent, bridge.streams.hits.unverified) == (0, 0)
                and admission.queue_ms(self.clock.now()) == 0.0
                and (last.running, last.waiting, last.queue_ms, last.kv_usage) == (0, 0, 0.0, 0.0)
            )

        async def engine_idle() -> bool:
            stats = await self.engine.stats()
            return (stats["running"], stats["waiting"]) == (0, 0)

        await eventually(idle, f"an idle bridge: {bridge!r}, {self.loads[-1]}", DEADLINE_S)
        await eventually(engine_idle, "an idle engine", DEADLINE_S)
        assert (await self.engine.stats())["wrong_hits"] == 0


def prompt(seed: int, length: int) -> list[int]:
    """Token ids of the tiny vocabulary; prompts of different seeds share no block."""
    return [10 + (seed * 131 + number * 7) % 500 for number in range(length)]


@contextlib.asynccontextmanager
async def world(
    path: Path,
    *,
    engine: dict[str, str | None] | None = None,
    start: bool = True,
    ipc: bool = False,
    without_stream: str = "",
    bridge: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> AsyncIterator[World]:
    process = EngineProcess(path, ipc=ipc)
    async with NatsServer(path, workers=[WORKER]) as server:
        settings = msgspec.convert(
            {
                "nats": {"url": server.url},
                "bridge": bridge or {},
                "models": {
                    MODEL: {
                        "tokenizer": str(models.tiny()),
                        "model_revision": "sha256:x",
                        "max_model_len": 2000,
                        "block_size": BLOCK,
                        **(model or {}),
                    }
                },
            },
            config.Config,
        )
        made = World(server, process, settings)
        try:
            if start:
                await process.start(**engine or {})
            await made.open(without_stream=without_stream)
            yield made
        finally:
            await process.stop()
    # What nats-py leaves open is this test's to warn of, not the next one's.
    gc.collect()
