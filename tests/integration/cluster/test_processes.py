"""Kept processes, without what a deployment makes of them."""

import sys
from pathlib import Path

import pytest
from support.nats import eventually

from prefixbus.cluster.processes import Child, Spec, stop_all

pytestmark = pytest.mark.timeout(60)
WAITS = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"


class Kept:
    """Children whose words and restarts are remembered."""

    def __init__(self, logs: Path) -> None:
        self.said: list[str] = []
        self.restarted: list[int | None] = []
        self._logs = logs

    def child(self, name: str, program: str, stage: int = 1) -> Child:
        child = Child(
            Spec(name, [sys.executable, "-c", program], stage),
            self._logs,
            self.said.append,
            lambda: self.restarted.append(child.pid),
        )
        return child

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()

    async def is_here(self, name: str) -> None:
        await eventually(lambda: "here" in self.log(name), f"{name} runs", 30)


async def test_what_ends_by_itself_is_started_again_and_said_so(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    child = kept.child("short", "print('here', flush=True); raise SystemExit(3)")

    await child.start()
    try:
        await eventually(lambda: kept.log("short").count("here") >= 2, "a second life", 30)
    finally:
        await child.stop(10)

    assert kept.said[0] == f"short ended (status 3); started again in 0.5 s, see {tmp_path / 'short.log'}"
    assert child.restarts >= 1
    assert len(kept.restarted) == child.restarts


async def test_what_is_stopped_stays_stopped(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    child = kept.child("plain", WAITS)
    await child.start()
    await kept.is_here("plain")

    await child.stop(30)

    assert child.pid is None
    assert (child.restarts, kept.said) == (0, [])


async def test_what_does_not_stop_is_killed_and_said_so(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    child = kept.child("stubborn", STUBBORN)
    await child.start()
    await kept.is_here("stubborn")

    await child.stop(0.1)

    assert child.pid is None
    assert kept.said == ["stubborn did not stop within 0.1 s and is killed"]


async def test_higher_stages_are_gone_before_lower_ones_are_asked(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    low, high = kept.child("low", WAITS, stage=0), kept.child("high", STUBBORN, stage=2)
    for child in (low, high):
        await child.start()
        await kept.is_here(child.spec.name)
    low_pid = low.pid
    seen: list[int | None] = []
    # Said at the end of its patience: whoever was asked beside it would be gone by then.
    high._say = lambda line: seen.append(low.pid)

    await stop_all([low, high], 1.0)

    assert seen == [low_pid]
    assert low.pid is None and high.pid is None


async def test_what_cannot_be_started_at_all_is_an_error(tmp_path: Path) -> None:
    child = Child(Spec("none", [str(tmp_path / "missing")]), tmp_path, print, lambda: None)

    with pytest.raises(OSError):
        await child.start()
