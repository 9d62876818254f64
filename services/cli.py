# ruff: noqa: TID251 - the command line: it composes everything and waits for it
"""`prefixbus ...`: the one place where people meet the deployment."""

import asyncio
import contextlib
import importlib
import os
import signal
import ssl
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from .bus.errors import PrefixbusError, Unavailable

# Heavy modules are imported by the commands that need them: every service process starts through this file.

EPILOG = """
Examples:

  prefixbus up --workers 3                     a cluster in the foreground; prints how to send it a request

  prefixbus send "What is a KV cache?"         stream an answer to the terminal (token in PREFIXBUS_TOKEN)

  prefixbus run router                         one more copy of a service, beside a running cluster

  prefixbus policy round-robin                 switch the routing policy without a restart

  prefixbus demo                               what routing by prefix gains over round-robin, in half a minute
"""

app = typer.Typer(
    name="prefixbus",
    help="Routes LLM requests over NATS to the worker that already holds the KV cache of their prefix.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
State = Annotated[Path, typer.Option("--state", help="The state directory.", envvar="PREFIXBUS_STATE")]
DEFAULT_STATE = Path(".prefixbus")
SERVICES = {
    "tokenizer": ".tokenizer.service",
    "directory": ".directory.service",
    "router": ".router.service",
    "auditor": ".auditor.service",
    "callout": ".auditor.callout_service",
    "worker_bridge": ".worker_bridge.service",
}
TOKEN_VARIABLE = "PREFIXBUS_TOKEN"


def main() -> int:
    """The exit status: 0 done, 1 failed with a sentence on stderr, 2 wrong usage."""
    # Whatever is written (logs, run files, the server's store) is for its owner alone.
    os.umask(0o077)
    try:
        app()
    except PrefixbusError as exc:
        _say(f"prefixbus: {exc.sentence()}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@app.command()
def init(state: State = DEFAULT_STATE) -> None:
    """Make keys, the deployment secret, a config and a demo tenant. Changes nothing that exists."""
    from .cluster import deployment

    _introduce(deployment.prepare(state, []))


@app.command()
def provision(state: State = DEFAULT_STATE, nats: Annotated[str, typer.Option(help="URL of the server.")] = "") -> None:
    """Create streams and buckets with the deploy key (services only check them)."""
    from .cluster import deployment, provision

    async def work() -> None:
        bus = await deployment.connect(state, "deploy", nats or deployment.read_cluster(state).nats_url)
        try:
            _say((await provision.provision(bus.jetstream)).sentence())
        finally:
            await bus.close()

    asyncio.run(work())


@app.command()
def up(
    state: State = DEFAULT_STATE,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Engines, each with its bridge.")] = 3,
    engine: Annotated[str, typer.Option(help="What stands behind the bridges; only 'sim' so far.")] = "sim",
    model: Annotated[str, typer.Option(help="The model that the engines serve, from config.toml.")] = "smollm2",
    scale: Annotated[str, typer.Option(help="Copies: tokenizer=2,router=2,directory=2,auditor=2.")] = "",
    port: Annotated[int, typer.Option(help="Port of the NATS server; a free one is taken when it is not.")] = 4222,
) -> None:
    """Run a whole cluster on this machine, in the foreground, until Ctrl-C."""
    from .cluster import deployment
    from .cluster import state as state_module

    if engine != "sim":
        raise typer.BadParameter(f"{engine!r} is not served yet; use sim.", param_hint="--engine")
    if not deployment.port_is_free(port):
        _say(f"port {port} is taken; a free one is used")
        port = 0
    options = deployment.Options(
        workers=workers, model=model, scale=_parse_scale(scale, deployment.SCALABLE), nats_port=port
    )

    async def work() -> None:
        stop = _stop_event()
        running = deployment.Deployment(state, options, _say)
        with state_module.lock(state):
            _introduce(deployment.prepare(state, running.workers))
            starting = asyncio.create_task(running.__aenter__())
            await asyncio.wait([starting, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return
            await starting
            try:
                _say(f"up: {running.nats_url}, {workers} workers, {len(running.pids())} processes. Ctrl-C stops them.")
                await stop.wait()
                _say("stopping")
            finally:
                await running.__aexit__()

    asyncio.run(work())


@app.command()
def down(state: State = DEFAULT_STATE) -> None:
    """Stop the cluster that runs on this state directory."""
    from .cluster import state as state_module

    pid = state_module.lock_holder(state)
    if pid is None:
        _say("nothing is running")
        return
    os.kill(pid, signal.SIGTERM)

    give_up_at = time.monotonic() + 60
    while state_module.lock_holder(state) is not None:
        if time.monotonic() > give_up_at:
            raise Unavailable(f"process {pid} does not stop.", remedy=f"See {state / 'logs'}; kill it if you must.")
        time.sleep(0.1)
    _say("stopped")


@app.command()
def status(state: State = DEFAULT_STATE) -> None:
    """Show the processes and workers of the running cluster."""
    from .cluster import status as status_module

    asyncio.run(status_module.show(state))


@app.command()
def run(
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICES)}.")],
    state: State = DEFAULT_STATE,
    nats: Annotated[str, typer.Option(help="URL of the server; default: the running cluster's, or the config's.")] = "",
    worker: Annotated[str, typer.Option(help="worker_bridge: the worker's name.")] = "",
    model: Annotated[str, typer.Option(help="worker_bridge: the model it serves.")] = "smollm2",
    engine_url: Annotated[str, typer.Option(help="worker_bridge: the engine's HTTP address.")] = "",
    kv_events: Annotated[str, typer.Option(help="worker_bridge: the engine's KV event endpoint.")] = "",
    kv_replay: Annotated[str, typer.Option(help="worker_bridge: the engine's replay endpoint.")] = "",
) -> None:
    """Run one more copy of a service beside a running cluster, in the foreground."""
    from .bus import runtime

    if service not in SERVICES:
        raise typer.BadParameter(f"{service!r} is not one of {', '.join(SERVICES)}.", param_hint="SERVICE")
    environ = dict(os.environ)
    if not nats:
        nats = _join_cluster(state, service, worker)
    if nats:
        environ["PREFIXBUS_NATS__URL"] = nats
    module = importlib.import_module(SERVICES[service], __package__)
    if service == "worker_bridge":
        if not worker or not engine_url:
            raise typer.BadParameter("worker_bridge needs --worker and --engine-url.")
        options = module.BridgeOptions(
            worker=worker, model=model, engine_url=engine_url, kv_events=kv_events, kv_replay=kv_replay
        )
        raise typer.Exit(
            runtime.main(service, lambda rt: module.run(rt, options), state=state, worker=worker, environ=environ)
        )
    raise typer.Exit(runtime.main(service, module.run, state=state, environ=environ))


@app.command()
def send(
    text: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    state: State = DEFAULT_STATE,
    model: Annotated[str, typer.Option(help="The model to ask.")] = "smollm2",
    tenant: Annotated[str, typer.Option(help="Who asks.")] = "demo",
    scope: Annotated[str, typer.Option(help="The permission scope; empty is tenant-wide.")] = "",
    label: Annotated[str, typer.Option(help="Which of the tenant's credentials the token is.")] = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the tenant's token; else ${TOKEN_VARIABLE}.")
    ] = None,
    nats: Annotated[str, typer.Option(help="URL of the server; default: the running cluster's.")] = "",
    ca: Annotated[Path | None, typer.Option(help="PEM file of the CA to trust; default: the config's.")] = None,
) -> None:
    """Ask a question through the public subject and stream the answer to the terminal."""
    from .client import Client
    from .cluster import deployment

    token = token_file.read_text().strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise typer.BadParameter(f"set {TOKEN_VARIABLE} or give --token-file.", param_hint="token")
    question = sys.stdin.read() if text == "-" else text
    url = nats or deployment.read_cluster(state).nats_url
    if ca is not None:
        tls = ssl.create_default_context(cafile=str(ca))
    else:
        tls = deployment.tls_of(state) if (state / "config.toml").exists() else None

    async def work() -> None:
        async with await Client.connect(url, tenant=tenant, token=token, scope=scope, label=label, tls=tls) as client:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
            usage: dict[str, object] = {}
            async for frame in client.stream(model, body):
                for choice in frame.chunk["choices"]:
                    typer.echo(choice["delta"].get("content") or "", nl=False)
                usage = frame.chunk.get("usage") or usage
            typer.echo("")
            _say(f"usage: {usage}")

    asyncio.run(work())


@app.command()
def policy(
    name: Annotated[str, typer.Argument(help="round-robin or prefix-aware.")], state: State = DEFAULT_STATE
) -> None:
    """Switch the routing policy of the running cluster, without a restart."""
    from .cluster import control, deployment
    from .router.policy import SCHEMES

    if name not in SCHEMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SCHEMES)}.", param_hint="NAME")

    async def work() -> None:
        operator = await deployment.connect(state, "operator", deployment.read_cluster(state).nats_url)
        try:
            _say(f"{name} is policy revision {await control.set_policy(operator, name)}")
        finally:
            await operator.close()

    asyncio.run(work())


@app.command()
def tenant(
    name: Annotated[str, typer.Argument(help="The tenant's name.")],
    scope: Annotated[list[str] | None, typer.Option(help="A scope it may name; repeat for more. None: all.")] = None,
    label: Annotated[str, typer.Option(help="Names this credential among the tenant's.")] = "default",
    state: State = DEFAULT_STATE,
) -> None:
    """Make a credential for a tenant and print its token, once."""
    from .cluster import state as state_module

    _introduce_tenant(state_module.add_tenant(state, name, scope, label=label))


@app.command()
def demo(workers: Annotated[int, typer.Option(min=2, max=8, help="Simulated engines.")] = 3) -> None:
    """Start a cluster, send it a real workload under two policies, and show the difference."""
    from rich.console import Console

    from .cluster import demo as demo_module
    from .cluster import deployment
    from .cluster import state as state_module

    async def work() -> bool:
        stop = _stop_event()
        with tempfile.TemporaryDirectory(prefix="prefixbus-demo-") as folder:
            directory = Path(folder) / "state"
            options = deployment.Options(workers=workers, kv_tokens=demo_module.KV_TOKENS)
            running = deployment.Deployment(directory, options, _say)
            report = deployment.prepare(directory, running.workers)
            assert report.demo is not None
            with state_module.lock(directory):
                async with running:
                    operator = await deployment.connect(directory, "operator", running.nats_url)
                    token = report.demo.token
                    playing = asyncio.create_task(
                        demo_module.run(running, operator, directory, token, Console(width=150))
                    )
                    stopped = asyncio.create_task(stop.wait())
                    await asyncio.wait([playing, stopped], return_when=asyncio.FIRST_COMPLETED)
                    if not playing.done():
                        playing.cancel()
                        return False
                    ok = await playing
                    await operator.close()
                    return ok

    raise typer.Exit(0 if asyncio.run(work()) else 1)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _introduce(report: "object") -> None:
    """Says what `init` made; a new tenant's token is shown here and never again."""
    from .cluster.state import InitReport

    assert isinstance(report, InitReport)
    _say(report.sentence())
    if report.demo is not None:
        _introduce_tenant(report.demo)


def _introduce_tenant(new: "object") -> None:
    from .cluster.state import NewTenant

    assert isinstance(new, NewTenant)
    _say(f"tenant {new.tenant} ({new.label}): this token is shown once and stored hashed.")
    typer.echo(f"export {TOKEN_VARIABLE}={new.token}")


def _parse_scale(text: str, known: tuple[str, ...]) -> dict[str, int]:
    scale = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in known or not count.isdigit() or not 1 <= int(count) <= 64:
            raise typer.BadParameter(
                f"{part!r} is not NAME=COUNT with NAME one of {', '.join(known)}, COUNT 1 to 64.", param_hint="--scale"
            )
        scale[name] = int(count)
    return scale


def _join_cluster(state: Path, service: str, worker: str) -> str:
    """The running cluster's URL, "" when none runs; a worker that is new to it gets its key and the server is told."""
    from .cluster import deployment
    from .cluster import state as state_module

    if state_module.lock_holder(state) is None:
        return ""
    cluster = deployment.read_cluster(state)
    if service == "worker_bridge" and worker and state_module.add_worker(state, worker):
        port = int(cluster.nats_url.rsplit(":", 1)[1])
        state_module.write_nats_config(state, port=port, monitor_port=cluster.monitor_port)
        os.kill(cluster.nats_pid, signal.SIGHUP)
    return cluster.nats_url


def _stop_event() -> asyncio.Event:
    """Set by SIGINT and SIGTERM; a second signal ends the process the ordinary way."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard(signum: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, heard, signum)
    return stop
