"""A real nats-server with the project's own configuration, on a free port, over a state directory of its own.

Connections made through a `NatsServer` belong to it: `close_connections` (or leaving `async with`) closes them, so
tests need not."""

import asyncio
import json
import os
import signal
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.js.client import JetStreamContext

from prefixbus.auditor import callout, jwt
from prefixbus.bus import secretfile, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.connection import Bus
from prefixbus.cluster import natsconf, provision, state

_DEADLINE_S = 10.0


class NatsServer:
    """`async with NatsServer(path, workers=["w1"]) as server:` makes the state directory and starts the server.

    For a server that outlives an event loop: `start`, `close_connections` at the end of each loop, `stop`. `demo` is
    the demo tenant with its token, as `prefixbus init` prints it."""

    def __init__(self, directory: Path, workers: list[str]) -> None:
        self.state = directory / "state"
        report = state.init(self.state, workers=workers, models={})
        assert report.demo is not None
        self.demo = report.demo
        self.url = ""
        self.monitor_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Bus | Probe] = []
        self._tokens: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> "NatsServer":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close_connections()
        self.stop()

    async def close_connections(self) -> None:
        while self._connections:
            await self._connections.pop().close()

    def start(self) -> None:
        self._launch(natsconf.RANDOM_PORT, natsconf.RANDOM_PORT)

    def _launch(self, port: int, monitor_port: int) -> None:
        config = self._write_config(port, monitor_port)
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        with open(self.state / "logs" / "nats-server.log", "ab") as log:
            self._process = subprocess.Popen([binary, "-c", config], stdout=log, stderr=log)
        ports_file = self.state / "run" / f"nats-server_{self._process.pid}.ports"
        ports = self._wait(lambda: _ports_in(ports_file), "its ports")
        self.url = ports["nats"][0]
        self.monitor_url = ports["monitoring"][0]
        self._wait(lambda: self._varz() is not None, "an answer of its monitor")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=_DEADLINE_S)
            self._process = None

    def kill(self) -> None:
        """kill -9; what clients hold stays theirs."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=_DEADLINE_S)

    def pause(self) -> None:
        """SIGSTOP: sockets stay open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        """On the same ports and the same store."""
        port, monitor_port = (int(url.rsplit(":", 1)[1]) for url in (self.url, self.monitor_url))
        self._launch(port, monitor_port)

    def log(self) -> str:
        return (self.state / "logs" / "nats-server.log").read_text("utf-8", "replace")

    async def reload(self) -> None:
        """Writes the configuration for the keys that exist now and returns when the server has taken it over."""
        assert self._process is not None
        before = (self._varz() or {})["config_load_time"]
        self._write_config(natsconf.RANDOM_PORT, natsconf.RANDOM_PORT)
        self._process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + _DEADLINE_S
        while (await asyncio.to_thread(self._varz) or {}).get("config_load_time") == before:
            assert time.monotonic() < deadline, f"the server did not reload: {self.log()[-2000:]}"
            await asyncio.sleep(0.01)

    def varz(self) -> dict[str, Any]:
        """What the server's monitor says of the server."""
        found = self._varz()
        assert found is not None, "the monitor does not answer"
        return found

    def seed(self, role: str, worker: str = "") -> bytes:
        return secretfile.role_seed(self.state, role, worker)

    def token(self, tenant: str, scopes: list[str] | None = None, label: str = state.DEFAULT_LABEL) -> str:
        """The token of a credential that is made when it is first asked for."""
        if (tenant, label) not in self._tokens:
            self._tokens[tenant, label] = state.add_tenant(self.state, tenant, scopes, label=label).token
        return self._tokens[tenant, label]

    async def bus(self, role: str, worker: str = "", instance: str = "", *, echo: bool = True) -> Bus:
        """The project's own connection, as that role; services have theirs without echo."""
        instance = instance or worker or "i1"
        bus = await Bus.connect(
            self.url,
            name=instance,
            inbox_prefix=subjects.service_inbox(role, instance),
            nkey_seed=self.seed(role, worker),
            echo=echo,
        )
        self._connections.append(bus)
        return bus

    async def tenant_bus(self, tenant: str, token: str, inbox: str = "") -> Bus:
        """The project's own connection, as a tenant; needs a callout."""
        bus = await Bus.connect(
            self.url,
            name=tenant,
            inbox_prefix=f"{inbox or subjects.tenant_inbox(tenant)}.c1",
            user=tenant,
            password=token,
        )
        self._connections.append(bus)
        return bus

    async def probe(self, role: str, worker: str = "") -> "Probe":
        """A raw client of that role that remembers what it was denied."""
        return await self.connect(
            nkeys_seed_str=self.seed(role, worker).decode(),
            inbox_prefix=subjects.service_inbox(role, worker or "i1"),
        )

    async def tenant_probe(self, tenant: str, token: str, inbox: str = "") -> "Probe":
        return await self.connect(user=tenant, password=token, inbox_prefix=inbox or subjects.tenant_inbox(tenant))

    async def connect(self, **options: Any) -> "Probe":
        """A raw client with these options of nats-py.

        :raises nats.errors.Error: the server does not take the credentials."""
        probe = Probe()
        self._connections.append(probe)
        await probe.client.connect(
            self.url, error_cb=probe.heard_error, allow_reconnect=False, connect_timeout=5, **options
        )
        return probe

    async def provision(self) -> provision.Report:
        return await provision.provision((await self.bus("deploy")).jetstream)

    async def callout(self, user_ttl_s: float = jwt.USER_TTL_S) -> "RunningCallout":
        """A callout of this server in the test's own process."""
        bus = await self.bus("callout")
        service = callout.Callout(
            issuer=jwt.Issuer(self.seed("issuer")),
            xkey_seed=self.seed("xkey").decode(),
            tenants=callout.TenantsOnDisk(state.tenants_path(self.state)),
            clock=RealClock(),
            entropy=os.urandom,
            user_ttl_s=user_ttl_s,
        )
        await callout.serve(bus, service)
        await bus.flush()
        return RunningCallout(bus, service)

    def _write_config(self, port: int, monitor_port: int) -> Path:
        return state.write_nats_config(
            self.state, port=port, monitor_port=monitor_port, ports_dir=str(self.state / "run")
        )

    def _varz(self) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{self.monitor_url}/varz", timeout=2) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except OSError:
            return None

    def _wait(self, ready: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _DEADLINE_S
        while not (found := ready()):
            assert self._process is not None and self._process.poll() is None, f"the server ended: {self.log()}"
            assert time.monotonic() < deadline, f"the server did not give {what}: {self.log()}"
            time.sleep(0.005)
        return found


def _ports_in(path: Path) -> Any:
    """What the server wrote about its ports; None while it has not, or is still writing."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


class RunningCallout:
    """A callout and the bus that it answers on."""

    def __init__(self, bus: Bus, service: callout.Callout) -> None:
        self.bus = bus
        self.service = service

    async def stop(self) -> None:
        await self.bus.close()


class Probe:
    """A plain nats-py client that says what the server denied it."""

    def __init__(self) -> None:
        self.client = Client()
        self._denials: list[str] = []

    async def heard_error(self, error: Exception) -> None:
        self._denials.append(str(error))

    @property
    def jetstream(self) -> JetStreamContext:
        return self.client.jetstream(timeout=2)

    async def denials(self) -> list[str]:
        """What was denied so far: after a round trip, everything sent before has been judged. Lower case, as nats-py
        reports it."""
        # nats-py's flush writes its PING ahead of what still waits to be written: the second one comes after it.
        await self.client.flush(timeout=5)
        await self.client.flush(timeout=5)
        found, self._denials[:] = list(self._denials), []
        return found

    async def may_publish(self, subject: str) -> bool:
        await self.client.publish(subject, b"")
        return not await self.denials()

    async def may_subscribe(self, subject: str, queue: str = "") -> bool:
        subscription = await self.client.subscribe(subject, queue=queue, cb=_ignore)
        denied = await self.denials()
        await subscription.unsubscribe()
        return not denied

    async def close(self) -> None:
        await self.client.close()


async def _ignore(message: object) -> None:
    pass


async def eventually(condition: Callable[[], bool | Awaitable[bool]], what: str, deadline_s: float = 5.0) -> None:
    """Returns when the condition holds; fails with `what` when it does not in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert loop.time() < end, f"not in {deadline_s} s: {what}"
        await asyncio.sleep(0.01)
