# ruff: noqa: TID251 - a shell around processes: it says how long they take
"""Runs of the lab, several at a time: each in a process of its own, results in the order in which they were asked.

A run is one thread's work and shares nothing. Processes are spawned, not forked: each reads the trace itself, and what
it plays does not depend on who else plays what.

Owns: those processes.   Must not know: what is played, what becomes of results."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

import msgspec

from ..bus.errors import ConfigInvalid, Unavailable
from ..engine_sim.profile import PRESETS
from ..lab import traces
from ..lab.figures import Figures, figures
from ..lab.harness import NeverEnds, run
from ..lab.setup import Setup
from ..lab.workload import Workload

# A run that takes longer says so on stderr this often.
_SAYS_EVERY_S = 10.0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded trace and how it is played. `first` requests of it, 0: all; `block_size` 0: as the trace's."""

    file: str
    trace_block: int
    block_size: int = 0
    first: int = 0
    speed: float = 1.0
    jitter_s: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `label` says what is different in it."""

    label: str
    setup: Setup


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over, or (`figures` is null) why it never would be. `ttft_ms` of all requests that have one, in
    ascending order."""

    label: str
    seed: int
    figures: Figures | None = None
    ttft_ms: list[float] = []
    never_ends: str = ""


def load(traffic: Traffic) -> Workload:
    """As recorded, but for its speed. :raises ConfigInvalid: it cannot be read, or has no requests."""
    try:
        with Path(traffic.file).open("rb") as lines:
            workload = traces.load(lines, traffic.trace_block, traffic.block_size, traffic.first)
    except OSError as exc:
        raise ConfigInvalid(str(exc), field=traffic.file, remedy="Name a file that can be read.") from exc
    if not workload.arrivals:
        raise ConfigInvalid("holds no requests.", field=traffic.file, remedy="Name a trace: JSON Lines, one a request.")
    return workload.faster(traffic.speed) if traffic.speed != 1.0 else workload


def play(traffic: Traffic, jobs: Sequence[Job], processes: int, say: Callable[[str], None]) -> Iterator[Played]:
    """The results of `jobs`, in their order.

    :raises ConfigInvalid: as `load`, or a setup makes no sense.   :raises Unavailable: a process was killed."""
    if min(processes, len(jobs)) == 1:
        for number, job in enumerate(jobs, start=1):
            yield _told(_play(traffic, job), number, len(jobs), say)
        return
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        min(processes, len(jobs)), multiprocessing.get_context("spawn"), _begin
    )
    try:
        with _deaf_to_interrupts():
            futures = [pool.submit(_play, traffic, job) for job in jobs]
        for number, future in enumerate(futures, start=1):
            yield _told(future.result(), number, len(jobs), say)
    except concurrent.futures.process.BrokenProcessPool as exc:
        raise Unavailable(
            "a process that played a run was ended from outside.", remedy="If memory was short, play fewer at a time."
        ) from exc
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Nobody waits for what still runs.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile do not hear a terminal's Ctrl-C, not even before they have begun: who
    started them does, and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _told(played: Played, number: int, count: int, say: Callable[[str], None]) -> Played:
    say(f"{number}/{count}: {played.label} (seed {played.seed}) {'never ends' if played.figures is None else 'done'}")
    return played


def _begin() -> None:
    """This process ends with who started it, even if that one is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.lru_cache(1)
def _loaded(traffic: Traffic) -> Workload:
    return load(traffic)


def _play(traffic: Traffic, job: Job) -> Played:
    setup = job.setup
    workload = _loaded(traffic)
    if traffic.jitter_s:
        workload = workload.jittered(setup.seed, traffic.jitter_s)
    said_at = time.monotonic()

    def watch(share: float) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SAYS_EVERY_S:
            said_at = time.monotonic()
            sys.stderr.write(f"{job.label} (seed {setup.seed}): {share:.0%} of the requests have come\n")

    try:
        result = run(setup, workload, watch)
    except NeverEnds as exc:
        return Played(label=job.label, seed=setup.seed, never_ends=str(exc))
    return Played(
        label=job.label,
        seed=setup.seed,
        figures=figures(result, PRESETS[setup.profile], workload.block_size),
        ttft_ms=sorted(one.ttft_ms for one in result.served if one.ttft_ms is not None),
    )
