# ruff: noqa: TID251 - it asks and prints
"""`prefixbus status`: the processes and workers of a running deployment, as two tables."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import control, deployment

_LISTEN_S = 0.5


async def show(directory: Path) -> None:
    """:raises Unavailable: nothing runs on this state directory."""
    cluster = deployment.read_cluster(directory)
    console = Console()
    files = deployment.run_files(directory)
    async with deployment.http_session(directory) as session:
        reasons = await asyncio.gather(*(deployment.not_ready_because(session, file) for file in files))
    table = Table(title=f"processes ({cluster.nats_url})", title_justify="left")
    for column in ("service", "instance", "pid", "http", "state"):
        table.add_column(column)
    for file, reason in zip(files, reasons, strict=True):
        table.add_row(file.service, file.instance, str(file.pid), file.http, reason or "ready")
    console.print(table)
    operator = await deployment.connect(directory, "operator", cluster.nats_url)
    try:
        heard = await control.loads(operator, _LISTEN_S)
    finally:
        await operator.close()
    workers = Table(title="workers", title_justify="left")
    for column in ("worker", "model", "incarnation", "queue ms", "running", "waiting", "kv in use", "state"):
        workers.add_column(column, justify="left" if column in ("worker", "model", "state") else "right")
    for name in sorted(set(cluster.engines) | set(heard)):
        load = heard.get(name)
        if load is None:
            workers.add_row(name, "", "", "", "", "", "", "silent")
        else:
            workers.add_row(
                name,
                load.model,
                str(load.incarnation),
                f"{load.queue_ms:.0f}",
                str(load.running),
                str(load.waiting),
                f"{load.kv_usage:.0%}",
                "draining" if load.draining else "serving",
            )
    console.print(workers)
