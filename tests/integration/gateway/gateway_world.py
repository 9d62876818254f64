"""A gateway in the test's own process, a real server and callout, and in place of all that is behind them a script:
what answers a request is what a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
from nats.aio.msg import Msg
from support.nats import NatsServer, RunningCallout, eventually
from support.ports import free_port

from prefixbus.bus import config, frames, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import GatewaySection, LimitsSection, ModelSection, NatsSection
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import PrefixbusError
from prefixbus.bus.runtime import Runtime
from prefixbus.gateway import service

MODEL = "tiny"
# Less than what a socket's buffers take: who sends more has sent it when it is refused.
MAX_BODY_BYTES = 256 * 1024


class Asked:
    """A request as it came over the bus, and what it is answered."""

    def __init__(self, bus: Bus, message: Msg) -> None:
        self._bus = bus
        self._seq = 0
        self.subject = message.subject
        self.reply = message.reply
        self.headers: dict[str, str] = dict(message.headers or {})
        self.body: dict[str, Any] = orjson.loads(message.data)

    @property
    def request_id(self) -> str:
        return self.headers[subjects.HEADER_REQUEST_ID]

    def chunk(self, *choices: dict[str, Any], told: dict[str, str] | None = None, **more: Any) -> None:
        """The next frame: these choices, and whatever else its chunk has; `told` are further headers."""
        kind = "chat" if "messages" in self.body else "completions"
        head = {"id": frames.completion_id(kind, self.request_id), "object": frames.object_name(kind), "created": 7}
        headers = frames.chunk_headers(self.request_id, seq=self._seq, attempt=1)
        body = orjson.dumps({**head, "model": MODEL, "choices": choices, **more})
        self._bus.send(self.reply, body, headers={**headers, **(told or {})})
        self._seq += 1

    def say(self, text: str, *, index: int = 0, finish: str | None = None, **more: Any) -> None:
        """A frame with this text."""
        role = {} if self._seq else {"role": "assistant"}
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish, **more}
        choice |= {"delta": {**role, "content": text}} if "messages" in self.body else {"text": text}
        self.chunk(choice)

    def skip(self) -> None:
        """A frame is lost."""
        self._seq += 1

    def usage(self, prompt: int = 5, completion: int = 2, cached: int = 3) -> None:
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        self.chunk(usage={**counts, "prompt_tokens_details": {"cached_tokens": cached}})

    def keep_alive(self) -> None:
        kind = "chat" if "messages" in self.body else "completions"
        body = frames.keepalive(kind, MODEL, self.request_id, 7)
        self._bus.send(self.reply, body, headers=frames.keepalive_headers(self.request_id))

    def end(self) -> None:
        self._bus.send(self.reply, b"", headers=frames.final_headers(self.request_id, seq=self._seq, attempt=1))

    def fail(self, error: PrefixbusError, **headers: str) -> None:
        made = frames.error_headers(error, self.request_id, seq=self._seq)
        self._bus.send(self.reply, b"", headers={**made, **{name.replace("_", "-"): v for name, v in headers.items()}})

    def whole(self, text: str = "hello") -> None:
        self.say(text, finish="stop")
        self.usage()
        self.end()


Script = Callable[[Asked], Awaitable[None]]


class World:
    """`script` answers each request; `asked` and `cancelled` (request ids) are what came."""

    def __init__(self, server: NatsServer, callout: RunningCallout, rt: Runtime) -> None:
        self.server = server
        self.callout = callout
        self.rt = rt
        self.api = f"http://127.0.0.1:{rt.config.gateway.port}/v1"
        self.key = f"demo.{server.demo.token}"
        self.asked: list[Asked] = []
        self.cancelled: list[str] = []
        self._answering: set[asyncio.Task[None]] = set()

        async def script(asked: Asked) -> None:
            asked.whole()

        self.script: Script = script

    async def serve(self) -> None:
        bus = await self.server.bus("tokenizer")

        async def asked(message: Msg) -> None:
            self.asked.append(request := Asked(bus, message))
            task = asyncio.ensure_future(self.script(request))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        async def cancelled(message: Msg) -> None:
            self.cancelled.append(subjects.parse_cancel(message.subject)[1])

        await bus.subscribe(subjects.ALL_INFER, asked, queue="tokenizer")
        await bus.subscribe(subjects.ALL_CANCEL, cancelled, queue="tokenizer")
        await bus.flush()

    async def stop_answering(self) -> None:
        for task in self._answering:
            task.cancel()
        for ended in await asyncio.gather(*self._answering, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def metric(self, name: str, **labels: str) -> float:
        return self.rt.registry.get_sample_value(f"prefixbus_gateway_{name}", labels) or 0.0

    @contextlib.asynccontextmanager
    async def session(self, key: str = "") -> AsyncIterator[aiohttp.ClientSession]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield session

    async def idle(self, deadline_s: float = 5.0) -> None:
        await eventually(lambda: self.metric("in_hand") == 0, "nothing is in hand", deadline_s)


def whole_after(go_on: asyncio.Event) -> Callable[[Asked], Awaitable[None]]:
    """A script that shows signs of life until it is told to go on, and answers then."""

    async def waits(asked: Asked) -> None:
        while not go_on.is_set():
            asked.keep_alive()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(go_on.wait(), 0.05)
        asked.whole()

    return waits


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more}


@contextlib.asynccontextmanager
async def running(directory: Path, **settings: Any) -> AsyncIterator[World]:
    """A world; `settings` are the config's of the gateway."""
    async with NatsServer(directory, workers=[]) as server:
        await server.provision()
        callout = await server.callout()
        made = msgspec.structs.replace(
            config.Config(),
            nats=NatsSection(url=server.url),
            limits=LimitsSection(max_body_bytes=MAX_BODY_BYTES),
            models={MODEL: ModelSection(tokenizer="unused", model_revision="sha256:w")},
            gateway=GatewaySection(port=free_port(), **settings),
        )
        rt = Runtime("gateway", "g1", server.state, made, RealClock())
        rt.bus = await server.bus("gateway")
        world = World(server, callout, rt)
        await world.serve()
        task = asyncio.create_task(service.run(rt))
        try:
            await eventually(lambda: not rt.not_ready_because(), "the gateway is ready")
            yield world
            await world.stop_answering()
        finally:
            rt.stopping.set()
            await task
