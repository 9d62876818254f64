# ruff: noqa: TID251 - the command line: it composes everything and waits for it
"""`prefixbus ...`: the one place where people meet the deployment."""

import asyncio
import functools
import importlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import typer

from .bus.errors import PrefixbusError, Unavailable
from .cluster.calibrating import commands as calibrating
from .cluster.inquiries import commands as inquiries
from .cluster.lab import commands as lab
from .cluster.options import (
    DEFAULT_STATE,
    DEFAULT_VLLM_PYTHON,
    TOKEN_VARIABLE,
    EngineKind,
    Label,
    State,
    TokenFile,
    VllmPython,
    only_with,
    read_token,
)

if TYPE_CHECKING:
    from .bus import runtime
    from .bus.connection import Bus
    from .cluster.control import PolicyInForce
    from .cluster.deployment import ClusterFile, Deployment
    from .cluster.state import NewTenant
    from .cluster.vllm import Vllm

# Heavy modules are imported by the commands that need them: every service process starts through this file.

EPILOG = """
Examples:

  prefixbus up --workers 3              a cluster in the foreground

  prefixbus send "What is a KV cache?"  stream an answer; wants PREFIXBUS_TOKEN

  prefixbus run router                  one more copy beside a running cluster

  prefixbus worker --engine-url http://127.0.0.1:8000 --kv-events tcp://127.0.0.1:5557

                                        a vLLM that runs already

  prefixbus policy round-robin          another policy, without a restart

  prefixbus tenant acme --scope hr      a token for one scope of a tenant

  prefixbus explain REQUEST_ID          why a request went where it went

  prefixbus replay --since 1h           recorded decisions, made again

  prefixbus mismatches --since 1h       why reuse was not what it could have been

  prefixbus top                         workers and decisions, live

  prefixbus demo                        what routing by prefix gains

  prefixbus calibrate --engine-url URL  how long an engine takes, for routers to begin with

  prefixbus lab repeats TRACE.jsonl     whether traffic is worth it; needs no cluster

  prefixbus lab replay TRACE.jsonl      recorded traffic under any policy, in virtual time
"""

HELP = "Routes LLM requests over NATS to the worker that already holds the KV cache of their prefix."
app = typer.Typer(
    name="prefixbus",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
DEFAULT_MODEL = "smollm2"
SERVICES = {
    "tokenizer": ".tokenizer.service",
    "directory": ".directory.service",
    "router": ".router.service",
    "auditor": ".auditor.service",
    "callout": ".auditor.callout_service",
    "gateway": ".gateway.service",
    "worker_bridge": ".worker_bridge.service",
}
INTERRUPTED = 130
WAITING = "waiting until every process is ready"
# What a new worker's bridge waits for the server to take over its key.
ADMISSION_S = 10.0

T = TypeVar("T")


def main() -> int:
    """The exit status: 0 done, 1 failed with a sentence on stderr, 2 wrong usage, 130 interrupted."""
    # Whatever is written (logs, run files, the server's store) is for its owner alone.
    os.umask(0o077)
    # asyncio warns of each end of a TLS connection that nats-py made; it would stand between an answer and its id.
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
    try:
        app()
    except PrefixbusError as exc:
        _say(f"prefixbus: {exc.sentence()}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print_version(wanted: bool) -> None:
    from . import __version__

    if wanted:
        typer.echo(f"prefixbus {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What precedes a command."""


@app.command()
def init(state: State = DEFAULT_STATE) -> None:
    """Make keys, the deployment secret, a config and a demo tenant. Changes nothing that exists."""
    from .cluster import deployment

    report = deployment.prepare(state, [])
    _say(f"{report.sentence()} in {state}" if report.created else report.sentence())
    if report.demo is not None:
        _introduce(report.demo, state, *_addresses(state), when="after `prefixbus up`")


@app.command()
def provision(state: State = DEFAULT_STATE, nats: Annotated[str, typer.Option(help="URL of the server.")] = "") -> None:
    """Create streams and buckets with the deploy key (services only check them)."""
    from .cluster import deployment, provision

    deployment.require(state)

    async def work() -> None:
        bus = await deployment.connect(state, "deploy", nats or deployment.read_cluster(state).nats_url)
        try:
            _say((await provision.provision(bus.jetstream, deployment.capture_of(state))).sentence())
        finally:
            await bus.close()

    asyncio.run(work())


@app.command()
def up(
    state: State = DEFAULT_STATE,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Engines, each with its bridge.")] = 3,
    engine: EngineKind = "sim",
    weights: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="--engine vllm: the model's weights; SmolLM2's are at hand."),
    ] = None,
    engine_flags: Annotated[str, typer.Option(help="--engine vllm: more of vLLM's own flags, for each engine.")] = "",
    vllm_python: VllmPython = DEFAULT_VLLM_PYTHON,
    model: Annotated[str, typer.Option(help="The model that the engines serve, from config.toml.")] = DEFAULT_MODEL,
    scale: Annotated[str, typer.Option(help="Copies: tokenizer=2,router=2,directory=2,auditor=2,gateway=2.")] = "",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of NATS, 0 for any; by default 4222, or any if that is taken."),
    ] = None,
    api_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the gateway, 0 for any; by default 8000, or any if it is taken."),
    ] = None,
) -> None:
    """Run a whole cluster on this machine, in the foreground, until Ctrl-C."""
    from .cluster import deployment
    from .cluster import state as state_module

    real = _vllm(engine, vllm_python, model, weights, engine_flags)
    copies = _parse_scale(scale, deployment.SCALABLE)
    deployment.check_config(state, model)
    with state_module.lock(state):
        options = deployment.Options(
            workers=workers,
            model=model,
            scale=copies,
            nats_port=deployment.choose_port(port),
            api_port=deployment.choose_api_port(state, api_port),
            vllm=real,
        )
        running = deployment.Deployment(state, options, _say)
        _say(f"starting {running.plan()}")
        if port is None and options.nats_port != deployment.DEFAULT_PORT:
            _say(f"port {deployment.DEFAULT_PORT} is taken: NATS takes {options.nats_port}")
        report = deployment.prepare(state, running.workers)
        if report.created:
            _say(f"{report.sentence()} in {state}")
        asyncio.run(_serve(running, report.demo, state, model, is_simulated=real is None))


def _vllm(engine: str, python: Path, model: str, weights: Path | None, flags: str) -> "Vllm | None":
    """The real engine that was asked for; None for the simulated one.

    :raises ConfigInvalid: vLLM or the model's weights are not there."""
    from .cluster import vllm

    if engine not in ("sim", "vllm"):
        raise typer.BadParameter(f"{engine!r} is neither sim nor vllm.", param_hint="--engine")
    if engine == "sim":
        given = {"--weights": weights, "--engine-flags": flags}
        only_with("--engine vllm", [name for name, value in given.items() if value])
        return None
    vllm.check_python(python)
    if weights is None and model != DEFAULT_MODEL:
        raise typer.BadParameter(f"name the directory of {model}'s weights.", param_hint="--weights")
    return vllm.Vllm(python=python, weights=weights or vllm.smollm2_weights(python, _say), flags=shlex.split(flags))


async def _serve(
    running: "Deployment", new: "NewTenant | None", state: Path, model: str, *, is_simulated: bool
) -> None:
    """Runs a cluster until it is told to stop. :raises typer.Exit: it was told before it was up."""
    from .cluster import guidance

    stop = _stop_event()
    _say(WAITING)
    was_up = False

    async def work() -> None:
        nonlocal was_up
        async with running:
            was_up = True
            policy_now = await _policy_in_force(state, running.nats_url)
            processes = len(running.pids())
            _say(f"up: {running.nats_url}, {len(running.workers)} workers, {processes} processes")
            _say(f"OpenAI's API: {running.gateway_url}/v1")
            _say(f"policy: {policy_now.sentence()}")
            if new is not None:
                _introduce(new, state, running.nats_url, running.gateway_url, model=model, when="in a second terminal")
                if is_simulated:
                    _say("")
                    _say(guidance.RANDOM_WORDS)
            else:
                replace = f"{_program()} tenant demo --replace{_state_option(state)}"
                _say(f"tokens were shown when they were made; a new one for tenant demo: {replace}")
                _export_url(running.nats_url)
            _say("Ctrl-C stops everything.")
            # Whoever waited for `stop` here would be cancelled again while it stops the processes in order.
            await asyncio.get_running_loop().create_future()

    try:
        await _unless(stop, work())
    except _Stopped:
        # Told to end while it was up, it did all that it was asked to do.
        if not was_up:
            raise typer.Exit(INTERRUPTED) from None


@app.command()
def down(state: State = DEFAULT_STATE) -> None:
    """Stop the cluster that runs on this state directory."""
    from .cluster import deployment
    from .cluster import state as state_module

    deployment.require(state)
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
    """Show the processes, the policy and the workers of the running cluster."""
    from .cluster import status as status_module

    asyncio.run(status_module.show(state))


@app.command()
def run(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=f"One of {', '.join(SERVICES)}.")],
    state: State = DEFAULT_STATE,
    nats: Annotated[str, typer.Option(help="URL of the server; default: the running cluster's, or the config's.")] = "",
    worker: Annotated[str, typer.Option(help="worker_bridge: the worker's name.")] = "",
    model: Annotated[str, typer.Option(help="worker_bridge: the model it serves.")] = DEFAULT_MODEL,
    engine_url: Annotated[str, typer.Option(help="worker_bridge: the engine's HTTP address.")] = "",
    kv_events: Annotated[
        str, typer.Option(help="worker_bridge: where the engine publishes its KV events, as it was told it.")
    ] = "",
    kv_replay: Annotated[
        str, typer.Option(help="worker_bridge: where the engine replays them, as it was told it.")
    ] = "",
    shard: Annotated[
        int | None, typer.Option(min=0, help="directory: the shard of which it is a replica; default: 0.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="gateway: the port it serves; default: the running cluster's.")
    ] = None,
) -> None:
    """Run one more copy of a service beside a running cluster, in the foreground."""
    if service not in SERVICES:
        raise typer.BadParameter(f"{service!r} is not one of {', '.join(SERVICES)}.", param_hint="SERVICE")
    of_bridges = {
        "--worker": worker,
        "--engine-url": engine_url,
        "--kv-events": kv_events,
        "--kv-replay": kv_replay,
    }
    if service == "worker_bridge":
        needed = [name for name in ("--worker", "--engine-url") if not of_bridges[name]]
        if needed:
            raise typer.BadParameter(f"worker_bridge needs {' and '.join(needed)}.", param_hint=needed[0])
    else:
        only_with("worker_bridge", [name for name, given in of_bridges.items() if given])
    if service != "directory" and shard is not None:
        only_with("directory", ["--shard"])
    if service != "gateway" and port is not None:
        only_with("gateway", ["--port"])
    if service == "worker_bridge":
        _run_bridge(state, nats, worker, model, engine_url, kv_events, kv_replay)
    module = importlib.import_module(SERVICES[service], __package__)
    start = functools.partial(module.run, shard=shard or 0) if service == "directory" else module.run
    _run_service(service, start, state, nats, port=port)


@app.command()
def worker(
    engine_url: Annotated[str, typer.Option(help="The engine's HTTP address.")],
    kv_events: Annotated[str, typer.Option(help="Where it publishes its KV events, word for word as it was told.")],
    replay: Annotated[str, typer.Option(help="Where it replays them, as it was told.")] = "",
    model: Annotated[str, typer.Option(help="The model it serves, from config.toml.")] = DEFAULT_MODEL,
    name: Annotated[str, typer.Option(help="The worker's name; default: from the engine's address.")] = "",
    engine_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the key that the engine asks for.")
    ] = None,
    state: State = DEFAULT_STATE,
    nats: Annotated[str, typer.Option(help="URL of the server; default: the running cluster's, or the config's.")] = "",
) -> None:
    """Put a bridge in front of a vLLM that runs already: docs/vllm.md says how it must have been started."""
    address = urlsplit(engine_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise typer.BadParameter("It begins with http:// or https://.", param_hint="--engine-url")
    name = name or re.sub("[^A-Za-z0-9]+", "-", f"{address.hostname}-{address.port or address.scheme}").strip("-")
    _run_bridge(state, nats, name, model, engine_url, kv_events, replay, str(engine_key_file or ""))


def _run_bridge(
    state: Path, nats: str, worker: str, model: str, engine_url: str, kv_events: str, kv_replay: str, key_file: str = ""
) -> NoReturn:
    module = importlib.import_module(SERVICES["worker_bridge"], __package__)
    options = module.BridgeOptions(
        worker=worker,
        model=model,
        engine_url=engine_url,
        kv_events=kv_events,
        kv_replay=kv_replay,
        engine_key_file=key_file,
    )
    _run_service("worker_bridge", functools.partial(module.run, options=options), state, nats, worker=worker)


def _run_service(
    service: str, start: "runtime.Run", state: Path, nats: str, *, worker: str = "", port: int | None = None
) -> NoReturn:
    """Until it is told to stop. :raises typer.Exit: with its exit status."""
    from .bus import runtime
    from .cluster import deployment

    deployment.require(state)
    environ = dict(os.environ)
    if not nats and (cluster := _join_cluster(state, service, worker)) is not None:
        nats = cluster.nats_url
        if service == "gateway":
            port = port or urlsplit(cluster.gateway_url).port
    if nats:
        environ["PREFIXBUS_NATS__URL"] = nats
    if port is not None:
        environ["PREFIXBUS_GATEWAY__PORT"] = str(port)

    async def joined(rt: runtime.Runtime) -> None:
        if sys.stderr.isatty():
            _say(f"{rt.service} {rt.instance} has joined {rt.config.nats.url}; its log follows, Ctrl-C ends it")
        await start(rt)

    raise typer.Exit(runtime.main(service, joined, state=state, worker=worker, environ=environ))


@app.command()
def send(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The question; - reads standard input.")],
    state: State = DEFAULT_STATE,
    model: Annotated[str, typer.Option(help="The model to ask.")] = DEFAULT_MODEL,
    tenant: Annotated[str, typer.Option(help="Who asks.")] = "demo",
    scope: Annotated[str, typer.Option(help="The permission scope; empty is tenant-wide.")] = "",
    label: Label = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    token_file: TokenFile = None,
    nats: Annotated[str, typer.Option(help="URL of the server; default: the running cluster's.")] = "",
    ca: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="PEM file of the CA to trust; default: the config's."
        ),
    ] = None,
) -> None:
    """Ask a question through the public subject and stream the answer to the terminal."""
    from .bus import config, tls
    from .client import Client
    from .cluster import deployment, guidance

    token = read_token(token_file)
    question = sys.stdin.read() if text == "-" else text
    is_simulated = False
    if not nats:
        cluster = deployment.read_cluster(state)
        nats, is_simulated = cluster.nats_url, cluster.simulated and bool(cluster.engines)
    if ca is not None:
        context = tls.client_context(config.TlsSection(ca=str(ca.absolute())), state)
    else:
        context = deployment.tls_of(state) if (state / "config.toml").exists() else None

    async def work() -> None:
        async with await Client.connect(
            nats, tenant=tenant, token=token, scope=scope, label=label, tls=context
        ) as client:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
            usage: dict[str, object] = {}
            request_id = secrets.token_hex(4)
            try:
                async for frame in client.stream(model, body, request_id=request_id):
                    for choice in frame.chunk["choices"]:
                        typer.echo(choice["delta"].get("content") or "", nl=False)
                    usage = frame.chunk.get("usage") or usage
            except PrefixbusError as exc:
                # What is refused as the client's mistake never came to a decision that could be explained.
                if exc.status >= 500:
                    _say(f"request {request_id} failed.")
                raise
            typer.echo("")
            _say(f"request {request_id}: {guidance.usage_sentence(usage)}")
            if is_simulated:
                _say(guidance.RANDOM_WORDS)

    asyncio.run(work())


@app.command()
def policy(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="round-robin, prefix-aware, or a JSON file with weights; without it, shows what is in force.",
        ),
    ] = "",
    state: State = DEFAULT_STATE,
    canary: Annotated[
        float | None, typer.Option(min=0, max=1, help="Let it decide this share of the requests (0 to 1).")
    ] = None,
    prefix_class: Annotated[
        str, typer.Option("--class", help="With --canary: of one class only (system, document, session, rag).")
    ] = "",
    shadow: Annotated[bool, typer.Option("--shadow", help="Only record what it would decide.")] = False,
    clear: Annotated[str, typer.Option(help="Take the canary or the shadow away; active: back to the config's.")] = "",
) -> None:
    """Show the routing policy of the running cluster, switch it, or try another beside it, without a restart."""
    from .bus import labels
    from .cluster import control, deployment
    from .router.rollout import ROLES

    if (bool(name) and bool(clear)) or (not name and (shadow or canary is not None)):
        raise typer.BadParameter("Give a policy's name or file, or else --clear.", param_hint="NAME|FILE")
    if shadow and canary is not None:
        raise typer.BadParameter("--shadow and --canary exclude each other.", param_hint="--shadow")
    if prefix_class and canary is None:
        only_with("--canary", ["--class"])
    if prefix_class and prefix_class not in labels.PREFIX_CLASSES:
        one_of = ", ".join(labels.PREFIX_CLASSES)
        raise typer.BadParameter(f"{prefix_class!r} is not one of {one_of}.", param_hint="--class")
    if clear and clear not in ROLES:
        raise typer.BadParameter(f"{clear!r} is not one of {', '.join(ROLES)}.", param_hint="--clear")
    wanted = clear or ("shadow" if shadow else "active" if canary is None else "canary")
    role = next(one for one in ROLES if one == wanted)
    record = control.policy_record(name, role, share=canary or 0.0, prefix_class=prefix_class) if name else b""
    url = deployment.read_cluster(state).nats_url

    async def change(operator: "Bus") -> str:
        if clear:
            return f"{clear} is cleared: policy revision {await control.clear_policy(operator, role)}"
        revision = await control.put_policy(operator, role, record)
        return f"{name} is {'' if role == 'active' else f'{role} '}policy revision {revision}"

    if name or clear:
        _say(asyncio.run(_as_operator(state, url, change)))
        return
    typer.echo(asyncio.run(_policy_in_force(state, url)).sentence())
    for line in asyncio.run(_as_operator(state, url, control.beside_the_policy)):
        typer.echo(line)


@app.command()
def tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")],
    scope: Annotated[list[str] | None, typer.Option(help="A scope it may name; repeat for more. None: all.")] = None,
    label: Annotated[str, typer.Option(help="Names this credential among the tenant's.")] = "default",
    replace: Annotated[bool, typer.Option("--replace", help="A new token for this label; the old one ends.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the credential of this label away.")] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Make a credential for a tenant and print its token, once; or replace or remove one."""
    from .cluster import deployment
    from .cluster import state as state_module

    if replace and remove:
        raise typer.BadParameter("--replace and --remove exclude each other.", param_hint="--remove")
    deployment.require(state)
    if remove:
        state_module.remove_tenant(state, name, label=label)
        _say(f"tenant {name} ({label}): its token connects no more; open connections end within some minutes")
        return
    make = state_module.replace_token if replace else state_module.add_tenant
    _introduce(make(state, name, scope, label=label), state, *_addresses(state))


@app.command()
def demo(
    engine: EngineKind = "sim",
    workers: Annotated[
        int, typer.Option(min=0, max=8, help="Engines, at least two; by default 3 simulated ones or 2 real ones.")
    ] = 0,
    vllm_python: VllmPython = DEFAULT_VLLM_PYTHON,
) -> None:
    """Start a cluster, send it a real workload under two policies, and show the difference."""
    from .cluster import demo as demo_module
    from .cluster import deployment, guidance
    from .cluster import state as state_module
    from .cluster.status import terminal

    async def work(running: deployment.Deployment, directory: Path, token: str) -> bool:
        async with running:
            return await _as_operator(
                directory,
                running.nats_url,
                lambda operator: demo_module.run(running, operator, token, terminal()),
            )

    async def unless_stopped(running: deployment.Deployment, directory: Path, token: str) -> bool:
        stop = _stop_event()
        _say(WAITING)
        return await _unless(stop, work(running, directory, token))

    if workers == 1:
        raise typer.BadParameter("Routing needs at least two.", param_hint="--workers")
    real = _vllm(
        engine, vllm_python, DEFAULT_MODEL, None, shlex.join(demo_module.REAL_FLAGS if engine != "sim" else ())
    )
    scale = demo_module.SIMULATED if real is None else demo_module.REAL
    with tempfile.TemporaryDirectory(prefix="prefixbus-demo-") as folder:
        directory = Path(folder) / "state"
        workers = workers or (3 if real is None else 2)
        options = deployment.Options(workers=workers, kv_tokens=scale.kv_tokens, vllm=real)
        with state_module.lock(directory):
            running = deployment.Deployment(directory, options, _say)
            _say(f"starting {running.plan()}")
            report = deployment.prepare(directory, running.workers)
            assert report.demo is not None
            try:
                ok = asyncio.run(unless_stopped(running, directory, report.demo.token))
            except _Stopped:
                raise typer.Exit(INTERRUPTED) from None
    _say("")
    _say("Now `prefixbus up`; then, in a second terminal, after its `export` lines:")
    _say("")
    _say(guidance.curl_command(DEFAULT_MODEL, "http://127.0.0.1:8000", f"demo.${TOKEN_VARIABLE}"))
    raise typer.Exit(0 if ok else 1)


app.add_typer(calibrating)
app.add_typer(inquiries)
app.add_typer(lab)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _introduce(
    new: "NewTenant", state: Path, url: str, api: str, *, model: str = DEFAULT_MODEL, when: str = ""
) -> None:
    """Shows a new token, now and never again, and what to type with it."""
    from .cluster import guidance
    from .gateway import keys

    elsewhere = None if state == DEFAULT_STATE else state.absolute()
    ca = _ca_of(state)
    _say(f"tenant {new.tenant} ({new.label}): this token is shown once and stored hashed{'; ' + when if when else ''}:")
    _say("")
    typer.echo(f"export {TOKEN_VARIABLE}={new.token}")
    _export_url(url)
    scope = guidance.scope_of(new)
    typer.echo(f"export OPENAI_BASE_URL={api}{f'/scopes/{scope}' if scope else ''}/v1")
    key = keys.text_of(new.tenant, f"${TOKEN_VARIABLE}", new.label)
    typer.echo(f"export OPENAI_API_KEY={key}")
    _say(guidance.send_command(new, _program(), elsewhere, model))
    _say("")
    _say("or, as any client of OpenAI's API:")
    _say("")
    _say(guidance.curl_command(model, api, key, scope, ca))
    _say("")
    _say("or, with nothing of ours, by natscli 0.4 or newer:")
    _say("")
    _say(guidance.nats_command(new, url, model, ca))


def _export_url(url: str) -> None:
    """Programs that expect NATS at its usual port need this line when it is elsewhere."""
    from .cluster import deployment

    if url != f"nats://127.0.0.1:{deployment.DEFAULT_PORT}":
        typer.echo(f"export NATS_URL={url}")


def _program() -> str:
    """How this program is called from a shell here."""
    return "prefixbus" if shutil.which("prefixbus") or Path(sys.argv[0]).name != "prefixbus" else sys.argv[0]


def _state_option(state: Path) -> str:
    return "" if state == DEFAULT_STATE else f" --state {shlex.quote(str(state.absolute()))}"


def _ca_of(state: Path) -> str:
    """The CA file that the deployment's own clients trust; "" when there is none."""
    from .bus import config

    ca = config.load(state / "config.toml", os.environ).tls.ca
    return str((state / ca).absolute()) if ca else ""


def _addresses(state: Path) -> tuple[str, str]:
    """NATS and gateway of what runs; of what would, when nothing does."""
    from .bus import config
    from .cluster import deployment

    try:
        cluster = deployment.read_cluster(state)
        return cluster.nats_url, cluster.gateway_url
    except Unavailable:
        found = config.load(state / "config.toml", os.environ)
        return f"nats://127.0.0.1:{deployment.DEFAULT_PORT}", deployment.gateway_url(found, found.gateway.port)


async def _as_operator(state: Path, url: str, work: "Callable[[Bus], Awaitable[T]]") -> T:
    from .cluster import deployment

    operator = await deployment.connect(state, "operator", url)
    try:
        return await work(operator)
    finally:
        await operator.close()


async def _policy_in_force(state: Path, url: str) -> "PolicyInForce":
    from .cluster import control
    from .cluster.status import configured_policy

    return await _as_operator(state, url, lambda operator: control.policy_in_force(operator, configured_policy(state)))


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


def _join_cluster(state: Path, service: str, worker: str) -> "ClusterFile | None":
    """The running cluster, if one runs; a worker that is new to it gets its key and the server is told."""
    from .cluster import deployment
    from .cluster import state as state_module

    if state_module.lock_holder(state) is None:
        return None
    cluster = deployment.read_cluster(state)
    if service == "worker_bridge" and worker and state_module.add_worker(state, worker):
        port = int(cluster.nats_url.rsplit(":", 1)[1])
        state_module.write_nats_config(state, port=port, monitor_port=cluster.monitor_port)
        os.kill(cluster.nats_pid, signal.SIGHUP)
        asyncio.run(_until_admitted(state, worker, cluster.nats_url))
    return cluster


async def _until_admitted(state: Path, worker: str, url: str) -> None:
    """Returns when the server, told to read its config again, has. :raises NotAdmitted: not in `ADMISSION_S`."""
    from .bus import secretfile, subjects
    from .bus.connection import Bus, NotAdmitted
    from .cluster import deployment

    give_up_at = time.monotonic() + ADMISSION_S
    while True:
        try:
            bus = await Bus.connect(
                url,
                name=worker,
                inbox_prefix=subjects.service_inbox("worker_bridge", worker),
                nkey_seed=secretfile.role_seed(state, "worker_bridge", worker),
                tls=deployment.tls_of(state),
            )
        except NotAdmitted:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.1)
        else:
            await bus.close()
            return


class _Stopped(Exception):
    """A signal ended what was being done."""


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When `stop` is set first, that is said, and `work` is cancelled and waited for.

    :raises _Stopped: `stop` was set."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            _say("stopping")
            raise _Stopped
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


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
