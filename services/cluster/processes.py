# ruff: noqa: TID251 - it starts processes and waits for them
"""Child processes that are kept running: started, watched, started again with back-off, stopped in order.

Children die with their parent (PR_SET_PDEATHSIG), so a killed supervisor leaves nothing behind.

Owns: the processes.   Must not know: what they do."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG = 1
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 10.0
# A process that ran this long was well: its next crash starts the back-off anew.
WELL_AFTER_S = 30.0


class Spec(msgspec.Struct, frozen=True):
    """A process to keep running. `stage` orders the stop: higher stages are stopped first. `environ` is set for it
    beside ours."""

    name: str
    argv: list[str]
    stage: int = 1
    environ: dict[str, str] = {}


class Backoff:
    """How long to wait before a process that ended is started again: twice as long each time, up to a limit."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def after(self, ran_s: float) -> float:
        """Seconds to wait, after a life of `ran_s` seconds."""
        delay = BACKOFF_FIRST_S if ran_s > WELL_AFTER_S else self._next_s
        self._next_s = min(2 * delay, BACKOFF_MAX_S)
        return delay


class Child:
    """One kept process and its restarts."""

    def __init__(self, spec: Spec, logs: Path, say: Callable[[str], None], on_restart: Callable[[], None]) -> None:
        self.spec = spec
        self.restarts = 0
        self._log = logs / f"{spec.name}.log"
        self._say = say
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Returns when the process exists; from then on it is kept running.

        :raises OSError: it cannot be started at all."""
        await self._spawn()
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")

    async def stop(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL for what is still there `patience_s` later."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
            except TimeoutError:
                self._say(f"{self.spec.name} did not stop within {patience_s:g} s and is killed")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _spawn(self) -> None:
        with open(self._log, "ab") as log:  # noqa: ASYNC230 - a local file, at a start
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.environ},
                preexec_fn=_die_with_parent,
            )

    async def _keep(self) -> None:
        backoff = Backoff()
        while True:
            assert self._process is not None
            started = time.monotonic()
            status = await self._process.wait()
            if self._stopping:
                return
            delay = backoff.after(time.monotonic() - started)
            self._say(f"{self.spec.name} ended ({_describe(status)}); started again in {delay:g} s, see {self._log}")
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                await self._spawn()
                self._on_restart()
            except OSError as exc:
                self._say(f"{self.spec.name} cannot be started: {exc}")


async def stop_all(children: Sequence[Child], patience_s: float) -> None:
    """Stops stage after stage, highest first; within a stage all at once."""
    for stage in sorted({child.spec.stage for child in children}, reverse=True):
        await asyncio.gather(*(child.stop(patience_s) for child in children if child.spec.stage == stage))


def _describe(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)
    # Ctrl-C in the terminal reaches the whole foreground group; the supervisor alone decides who stops when.
    os.setpgid(0, 0)
