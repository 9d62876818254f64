# ruff: noqa: TID251 - it asks and prints
"""`prefixbus status`: the processes, the directory, the policy and the workers of a running deployment.

Owns: what is asked of whom, and tables of at most 80 columns.   Must not know: how processes are started."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from ..bus import config, messages
from . import control, deployment
from .terminal import Terminal

MIN_WIDTH = 80
_LISTEN_S = 0.5


class Process(msgspec.Struct, frozen=True):
    """One process, and why it is not ready (empty when it is)."""

    name: str
    pid: int
    address: str
    problem: str = ""


class Replica(msgspec.Struct, frozen=True):
    """A directory process, in its own words: how many blocks it knows, how many sequences of the event stream it is
    behind, and how old its shard's snapshot is (-1: there is none). None: it did not answer."""

    name: str
    shard: int | None = None
    entries: int = 0
    lag_events: int = 0
    snapshot_age_s: float = -1.0


async def show(directory: Path) -> None:
    """:raises Unavailable: nothing runs on this state directory."""
    cluster = deployment.read_cluster(directory)
    console = terminal()
    async with deployment.http_session(directory) as session:
        found = await processes(directory, cluster, session)
        known = await replicas([each for each in found if each.name.startswith("directory")], session)
    console.print(process_table(found), "")
    console.print(replica_table(known), "")
    operator = await deployment.connect(directory, "operator", cluster.nats_url)
    try:
        policy = await control.policy_in_force(operator, configured_policy(directory))
        beside = await control.beside_the_policy(operator)
        heard = await control.loads(operator, _LISTEN_S)
    finally:
        await operator.close()
    console.print("\n".join([f"policy: {policy.sentence()}", *beside, ""]))
    console.print(worker_table(sorted(set(cluster.engines) | set(heard)), heard))


def terminal() -> Terminal:
    """As wide as the terminal, but never narrower than the tables."""
    return Terminal(width=max(MIN_WIDTH, Terminal().width))


def configured_policy(directory: Path) -> str:
    """What routers take when no policy was set."""
    return config.load(directory / "config.toml", os.environ).policy.name


async def processes(directory: Path, cluster: deployment.ClusterFile, session: aiohttp.ClientSession) -> list[Process]:
    """All processes of the deployment, and the copies that were started beside it."""
    scheme = "http" if deployment.tls_of(directory) is None else "https"
    asked = {
        "nats-server": (cluster.nats_url, f"{scheme}://127.0.0.1:{cluster.monitor_port}/healthz"),
        **{f"engine-{worker}": (engine.url, f"{engine.url}/health") for worker, engine in cluster.engines.items()},
    }
    files = {file.pid: file for file in deployment.run_files(directory)}

    async def look(name: str, pid: int) -> Process:
        if name in asked:
            address, health = asked[name]
            return Process(name, pid, address, await _problem(session, health))
        if pid not in files:
            return Process(name, pid, "", "starting")
        return Process(name, pid, files[pid].http, await deployment.not_ready_because(session, files[pid]))

    known = dict(cluster.processes)
    for pid, file in files.items():
        if pid not in known.values():
            known[f"bridge-{file.instance}" if file.service == "worker_bridge" else file.instance] = pid
    return list(await asyncio.gather(*(look(name, pid) for name, pid in known.items())))


async def replicas(found: Sequence[Process], session: aiohttp.ClientSession) -> list[Replica]:
    """What these directory processes say of themselves."""

    async def look(process: Process) -> Replica:
        try:
            async with session.get(f"{process.address}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return Replica(process.name)
        said = {each.name: each.value for family in text_string_to_metric_families(text) for each in family.samples}
        shard, entries, lag, age = (
            said.get(f"prefixbus_directory_{name}")
            for name in ("shard", "entries", "lag_events", "snapshot_age_seconds")
        )
        if shard is None or entries is None or lag is None or age is None:
            # It serves HTTP before it has anything to say.
            return Replica(process.name)
        return Replica(process.name, int(shard), int(entries), int(lag), age)

    return list(await asyncio.gather(*(look(process) for process in found)))


def replica_table(found: Sequence[Replica]) -> Table:
    """One row a replica, by shard."""
    numbers = ("shard", "entries", "events behind", "snapshot")
    table = _table("directory", ("replica", *numbers), right=numbers, wraps="replica")
    for replica in sorted(found, key=lambda each: (each.shard is None, each.shard or 0, each.name)):
        if replica.shard is None:
            table.add_row(replica.name, "", "", "", "silent")
            continue
        age = f"{replica.snapshot_age_s:.0f} s old" if replica.snapshot_age_s >= 0 else "none"
        table.add_row(replica.name, str(replica.shard), str(replica.entries), str(replica.lag_events), age)
    return table


def process_table(found: Sequence[Process]) -> Table:
    table = _table("processes", ("process", "pid", "address", "state"), right=("pid",), wraps="state")
    for process in found:
        table.add_row(process.name, str(process.pid), process.address, process.problem or "ready")
    return table


def worker_table(names: Sequence[str], heard: Mapping[str, messages.Load]) -> Table:
    """One row a worker; those that were not heard are silent."""
    numbers = ("incarnation", "queue ms", "running", "waiting", "kv use")
    table = _table("workers", ("worker", "model", *numbers, "state"), right=numbers, wraps="model")
    for name in names:
        table.add_row(name, *_load_cells(heard.get(name)))
    return table


def _load_cells(load: messages.Load | None) -> Iterator[str]:
    if load is None:
        yield from ("", "", "", "", "", "", "silent")
        return
    yield load.model
    yield str(load.incarnation)
    yield f"{load.queue_ms:.0f}"
    yield str(load.running)
    yield str(load.waiting)
    yield f"{load.kv_usage:.0%}"
    yield "draining" if load.draining else "incomplete" if load.incomplete else "serving"


def _table(title: str, columns: Sequence[str], *, right: Sequence[str], wraps: str) -> Table:
    """`wraps` is the one column that gives way when the terminal is narrow."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", no_wrap=column != wraps, overflow="fold"
        )
    return table


async def _problem(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            return "" if response.status == 200 else f"status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as exc:
        return str(exc) or type(exc).__name__
