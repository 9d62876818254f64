"""One run of the acceptance study: its circumstances, and what is kept of it.

Owns: what a cell is, how it is run, its name on disk.   Must not know: which cells there are, what they mean."""

import functools
import hashlib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefixbus.engine_sim.profile import PRESETS
from prefixbus.lab import synthetic, traces
from prefixbus.lab.figures import Figures, figures
from prefixbus.lab.harness import NeverEnds, run
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup, misjudged
from prefixbus.lab.workload import Workload
from prefixbus.router.policy import Policy

OURS = "prefix-aware"
SERVICES = Path(__file__).resolve().parents[2] / "services"

# Recorded traffic: its file, and the tokens of a block.
TRACES = {
    "conv": ("mooncake_conversation.jsonl", 512),
    "syn": ("mooncake_synthetic.jsonl", 512),
    "tau": ("tau_airline.jsonl", 16),
}


SCENARIOS: dict[str, Callable[[int], Workload]] = {
    "one hot prefix, near saturation": lambda seed: synthetic.zipf_prefixes(rate=95, count=2000, seed=seed),
    "never repeats": lambda seed: synthetic.never_repeating(rate=25, count=1500, seed=seed),
    "sessions, one system prompt": lambda seed: synthetic.sessions(sessions=160, turns=8, seconds=60, seed=seed),
    "200 siblings at once": lambda _seed: synthetic.burst(count=200, prompt_tokens=8000),
    "one long document, then several": lambda seed: synthetic.long_documents(rate=12, seed=seed),
    "hot worker": lambda seed: synthetic.hot_worker(rate=30, seconds=30, seed=seed),
    "local hit": lambda seed: synthetic.asked_again(documents=60, seed=seed),
    "remote hit": lambda seed: synthetic.asked_again(documents=60, busy_tokens=20_000, seed=seed),
    "hot documents and rare cold requests": lambda seed: synthetic.hot_and_cold(
        hot_rate=60, cold_rate=2, seconds=30, seed=seed
    ),
}


_FIELDS = typing.get_type_hints(Setup, include_extras=True)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`setup` holds fields of `Setup` as JSON has them, `weights` those of the policy. `estimate`: routers take prefill
    for so many times as long as it takes; they learn better only if `setup` says so."""

    traffic: str
    speed: float = 1.0
    policy: str = OURS
    weights: dict[str, Any] = {}
    setup: dict[str, Any] = {}
    estimate: float = 1.0
    seed: int = 0

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:24]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`figures` is null where the run never ended. `ttft_ms`: its quantiles at 0, 0.5 .. 100 %."""

    cell: Cell
    figures: Figures | None
    ttft_ms: list[float]


def digest(data: Path) -> str:
    """Of all that a figure can depend on, code and traces: what was measured with others is measured again."""
    files = [Path(__file__)]
    for room in ("bus", "directory", "engine_sim", "lab", "router"):
        files += (SERVICES / room).glob("*.py")
    files += (SERVICES / "worker_bridge" / name for name in ("admission.py", "waiting.py"))
    files += (data / file for file, _ in TRACES.values())
    together = hashlib.sha256()
    for path in sorted(files):
        together.update(path.read_bytes())
    return together.hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def recorded(data: Path, name: str) -> Workload:
    file, block = TRACES[name]
    with (data / file).open("rb") as lines:
        return traces.load(lines, block)


def setup_of(cell: Cell) -> Setup:
    fields = {name: msgspec.convert(value, _FIELDS[name]) for name, value in cell.setup.items()}
    setup = Setup(**fields, seed=cell.seed)
    policy = Policy(**cell.weights) if cell.policy == OURS else ruled(cell.policy)
    changes: dict[str, Any] = {"policy": policy}
    if cell.estimate != 1.0:
        changes |= {"model": misjudged(setup.profile, cell.estimate), "learns": setup.learns and "learns" in cell.setup}
    return msgspec.structs.replace(setup, **changes)


def measure(cell: Cell, data: Path) -> Measured:
    setup = setup_of(cell)
    if cell.traffic in TRACES:
        asked = recorded(data, cell.traffic).faster(cell.speed)
    else:
        asked = SCENARIOS[cell.traffic](cell.seed).faster(cell.speed)
    try:
        result = run(setup, asked.jittered(cell.seed))
    except NeverEnds:
        return Measured(cell=cell, figures=None, ttft_ms=[])
    if result.leftovers:
        raise AssertionError(f"{cell}: {result.leftovers}")
    ordered = sorted(one.ttft_ms for one in result.served if one.ttft_ms is not None)
    quantiles = [ordered[min(len(ordered) - 1, len(ordered) * step // 200)] for step in range(201)]
    return Measured(cell=cell, figures=figures(result, PRESETS[setup.profile], asked.block_size), ttft_ms=quantiles)
