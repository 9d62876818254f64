# ruff: noqa: TID251 - the shell of all shells: it owns the event loop, signals and log output
"""One skeleton for every service: loop, config, bus, health over HTTP, `$SRV`, logs, and an orderly end.

A service is `async def run(rt: Runtime) -> None`: it subscribes, calls `rt.ready()`, waits for `rt.stopping`, ends
the work in hand and returns. SIGTERM and SIGINT set `stopping`; what is not done `drain_s` later is cancelled. An
exception ends the process with status 1: whoever started it starts it again.

Owns: process-wide things.   Must not know: what the service does."""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.abc
import uvloop
from aiohttp import web
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro import add_service
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from . import config as config_module
from . import secretfile, subjects
from . import tls as tls_module
from .clock import Clock, RealClock
from .config import Config
from .connection import Bus, Listener, Subscription
from .errors import PrefixbusError
from .messages import Wire

T = TypeVar("T")
Run = Callable[["Runtime"], Awaitable[None]]
DRAIN_S = 20.0
# Of each kind of bus event, one line in this time.
LOG_EVERY_S = 1.0


class JsonLines(logging.Formatter):
    """One JSON object a line: at, level, service, message, and whatever `extra={"fields": {...}}` holds (request_id
    ...)."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._base = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._base,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Runtime:
    """What a service is given. `instance` is unique among the copies of a service; a bridge's is its worker's name."""

    def __init__(self, service: str, instance: str, state: Path, config: Config, clock: Clock) -> None:
        self.service = service
        self.instance = instance
        self.state = state
        self.config = config
        self.clock = clock
        self.bus: Bus
        self.log = logging.getLogger(service)
        self.registry = CollectorRegistry()
        self.stopping = anyio.Event()
        self.task_group: anyio.abc.TaskGroup
        self._ready_check: Callable[[], str] = lambda: "starting"
        self._said_at: dict[str, float] = {}
        self._bus_events = Counter(
            "prefixbus_bus_events", "What happened to the connection to NATS.", ["kind"], registry=self.registry
        )
        self.failures = Counter(
            "prefixbus_failures", "Errors caught at the edge of the service, by code.", ["code"], registry=self.registry
        )

    def ready(self, check: Callable[[], str] = lambda: "") -> None:
        """From now on /readyz answers 200 while `check()` returns "" and the bus is connected, else 503 and the
        reason."""
        self._ready_check = check

    def not_ready_because(self) -> str:
        return self._ready_check() or ("" if self.bus.connected else "cut off from the bus")

    async def listen(
        self, subject: str, wire: Wire[T], handle: Callable[[T, Msg], None], *, queue: str = ""
    ) -> Subscription:
        """Calls `handle` with each message of this type, in the read loop (see `Bus.listen`).

        The edge of the service: what is not of this type, and whatever the handler raises, is counted, logged and
        dropped; the next message is served."""

        def heard(message: Msg) -> None:
            try:
                handle(wire.decode(message.data), message)
            except Exception as exc:
                self.caught(exc, "a message was dropped", subject=message.subject)

        return await self.bus.listen(subject, heard, queue=queue)

    async def listen_plain(self, subject: str, handle: Listener, *, queue: str = "") -> Subscription:
        """`listen`, for messages whose subject or headers say it all."""

        def heard(message: Msg) -> None:
            try:
                handle(message)
            except Exception as exc:
                self.caught(exc, "a message was dropped", subject=message.subject)

        return await self.bus.listen(subject, heard, queue=queue)

    def purpose_key(self, purpose: str) -> bytes:
        """The key of one purpose, from the state directory (see bus.secretfile)."""
        return secretfile.purpose_key(self.state, purpose)

    def bus_event(self, kind: str, detail: str) -> None:
        self._bus_events.labels(kind).inc()
        now = self.clock.now()
        # A flood of dropped messages should not become a flood of lines; all of them are counted.
        if now - self._said_at.get(kind, -math.inf) >= LOG_EVERY_S:
            self._said_at[kind] = now
            level = logging.INFO if kind in ("reconnected", "recreated") else logging.WARNING
            self.log.log(level, "bus: %s %s", kind, detail)

    def caught(self, error: BaseException, what: str, **fields: object) -> None:
        """Counts and logs an error at the edge of the service; the traceback only for those nobody foresaw."""
        foreseen = isinstance(error, PrefixbusError)
        self.failures.labels(error.code if isinstance(error, PrefixbusError) else "internal").inc()
        self.log.log(
            logging.WARNING if foreseen else logging.ERROR,
            "%s: %s",
            what,
            error,
            extra={"fields": fields},
            exc_info=None if foreseen else error,
        )


def main(
    service: str,
    run: Run,
    *,
    state: Path,
    worker: str = "",
    environ: dict[str, str] | None = None,
    drain_s: float = DRAIN_S,
) -> int:
    """Runs one service process to its end; the exit status. Work in hand has `drain_s` to end after SIGTERM."""
    instance = worker or f"{service}-{secrets.token_hex(4)}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service, instance))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    try:
        config = config_module.load(state / "config.toml", environ if environ is not None else dict(os.environ))
        seed = secretfile.role_seed(state, service, worker)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(service, instance, state, config, seed, run, drain_s))
    except PrefixbusError as exc:
        logging.getLogger(service).error("cannot start: %s", exc.sentence(), extra={"fields": {"code": exc.code}})
    except OSError as exc:
        logging.getLogger(service).error("cannot start: %s (is [http] port taken?)", exc)
    return 1


async def _serve(
    service: str, instance: str, state: Path, config: Config, seed: bytes, run: Run, drain_s: float
) -> int:
    rt = Runtime(service, instance, state, config, RealClock())
    rt.bus = bus = await Bus.connect(
        config.nats.url,
        name=instance,
        inbox_prefix=subjects.service_inbox(service, instance),
        nkey_seed=seed,
        max_header_bytes=config.limits.max_header_bytes,
        # A service has no need to be told what it said itself; a router would book all its dispatches twice.
        echo=False,
        tls=tls_module.client_context(config.tls, state),
        on_event=rt.bus_event,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, rt.stopping.set)
    http = await _serve_http(rt)
    # With the pid: a second bridge of one worker's name is refused, and must not take the first one's file along.
    run_file = state / "run" / f"{instance}.{os.getpid()}.json"
    try:
        await bus.check_streams(subjects.STREAMS_OF.get(service, ()))
        await _announce(bus.client, rt)
        bus.on_new_client.append(lambda client: _announce(client, rt))
        _write_run_file(run_file, rt, http.addresses[0][1])
        async with anyio.create_task_group() as task_group:
            rt.task_group = task_group
            task_group.start_soon(_bound_the_drain, rt, drain_s)
            await run(rt)
            task_group.cancel_scope.cancel()
        return 0
    except Exception as error:
        # The edge of the process: whatever it is, it is said, and whoever started the process starts it again.
        for each in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            rt.caught(each, "the service ends")
        return 1
    finally:
        run_file.unlink(missing_ok=True)
        await http.cleanup()
        await bus.close()


async def _bound_the_drain(rt: Runtime, drain_s: float) -> None:
    await rt.stopping.wait()
    rt.log.info("stopping")
    await anyio.sleep(drain_s)
    rt.log.warning("work in hand did not end within %g s and is cancelled", drain_s)
    rt.task_group.cancel_scope.cancel()


async def _announce(client: Client, rt: Runtime) -> None:
    """Answers `$SRV.PING`, `INFO` and `STATS` (NATS ADR-32)."""
    from .. import __version__

    await add_service(
        client,
        name=f"prefixbus-{rt.service.replace('_', '-')}",
        version=__version__,
        metadata={"instance": rt.instance},
    )


async def _serve_http(rt: Runtime) -> web.AppRunner:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(rt.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = rt.not_ready_because()
        return web.Response(status=503 if reason else 200, text=(reason or "ready") + "\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = tls_module.server_context(rt.config.tls, rt.state)
    await web.TCPSite(runner, rt.config.http.host, rt.config.http.port, ssl_context=context).start()
    return runner


def _write_run_file(path: Path, rt: Runtime, port: int) -> None:
    """Says where this process is: pid and HTTP port, for whoever started it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    http = f"{'https' if rt.config.tls.certificate else 'http'}://{rt.config.http.host}:{port}"
    content = {"service": rt.service, "instance": rt.instance, "pid": os.getpid(), "http": http}
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(content))
    with contextlib.suppress(OSError):
        scratch.chmod(0o600)
    scratch.replace(path)
