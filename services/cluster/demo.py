# ruff: noqa: TID251 - it plays users: it sends requests and times the answers
"""The demo: one workload, twice, under `round-robin` and under `prefix-aware`, and what the difference is.

Owns: the run and its table.   Must not know: how routing works; all numbers come from the client's own clock and from
the journal, which anybody can read."""

import asyncio
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path

import msgspec
from nats.aio.msg import Msg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bus import messages, subjects
from ..bus.connection import Bus
from ..bus.errors import PrefixbusError, Unavailable
from ..client import Client
from ..router.cost import PROFILES, prefill_ms
from . import control, workload
from .deployment import DEFAULT_MODEL, Deployment

SPAN_S = 3.0
MAX_TOKENS = 24
SEED = 20
POLICIES = ("round-robin", "prefix-aware")
# Long documents: what fits into 8192 tokens beside a question, at the 2.6 characters a token that source code has.
_DOCUMENT_CHARS = 18_000
_INSTRUCTION_CHARS = 3_000
_DOCUMENTS = (
    "bus/connection.py",
    "bus/messages.py",
    "cluster/state.py",
    "engine_sim/core.py",
    "directory/ledger.py",
    "router/fleet.py",
    "tokenizer/intake.py",
    "worker_bridge/blocks.py",
)
# Each engine holds about half of the documents: the workload fits into the fleet's cache, but not three times over.
KV_TOKENS = 24_576


class Sample(msgspec.Struct, frozen=True):
    """One answered request, as its client saw it."""

    request_class: str
    request_id: str
    ttft_ms: float


class Run(msgspec.Struct, frozen=True):
    """One pass of the workload: what clients saw, and the journal's records by client request id."""

    samples: list[Sample]
    decisions: dict[str, messages.DecisionRecord]
    outcomes: dict[str, messages.Outcome]
    failures: list[str]

    def percentile(self, share: float) -> float:
        return _percentile([sample.ttft_ms for sample in self.samples], share)

    def cached_ratio(self) -> float:
        """Token reuse: cached over all prompt tokens."""
        asked = sum(outcome.prompt_tokens for outcome in self.outcomes.values())
        return sum(outcome.cached_tokens or 0 for outcome in self.outcomes.values()) / max(asked, 1)


def documents() -> list[str]:
    """The project's own texts."""
    package = resources.files(__package__.rsplit(".", 1)[0])
    return [package.joinpath(name).read_text(encoding="utf-8")[:_DOCUMENT_CHARS] for name in _DOCUMENTS]


async def run(deployment: Deployment, operator: Bus, directory: Path, token: str, console: Console) -> bool:
    """Plays the workload under both policies and prints the table; whether prefix-aware won (see the last line)."""
    runs: dict[str, Run] = {}
    for policy in POLICIES:
        await control.set_policy(operator, policy)
        for worker in deployment.workers:
            await control.reset_cache(operator, worker)
        runs[policy] = await _play(deployment.nats_url, operator, token, policy, console)
    wrong_hits = await control.wrong_hits(deployment.engine_urls())
    base, ours = (runs[policy] for policy in POLICIES)
    for policy in POLICIES:
        console.print(_table(policy, runs[policy]))
    console.print(
        f"net prefill saved by prefix-aware routing over round-robin: {_net_saved_ms(base, ours):.0f} ms "
        "(prefill avoided by cache hits, less the time that requests waited in queues)"
    )
    failures = [*base.failures, *ours.failures]
    for failure in failures:
        console.print(f"failed: {failure}")
    ok = (
        not failures
        and ours.percentile(0.5) < base.percentile(0.5)
        and ours.percentile(0.95) <= base.percentile(0.95)
        and ours.cached_ratio() > 0.3
        and wrong_hits == 0
    )
    console.print(
        f"demo: {'ok' if ok else 'failed'} round_robin_ttft_p50_ms={base.percentile(0.5):.1f} "
        f"prefix_aware_ttft_p50_ms={ours.percentile(0.5):.1f} cached_token_ratio={ours.cached_ratio():.3f} "
        f"wrong_hits={wrong_hits}",
        soft_wrap=True,
        highlight=False,
    )
    return ok


async def _play(url: str, operator: Bus, token: str, policy: str, console: Console) -> Run:
    texts = documents()
    tasks = workload.make(texts, texts[0][:_INSTRUCTION_CHARS], random.Random(SEED), span_s=SPAN_S)
    result = Run([], {}, {}, [])
    expected = sum(len(task.turns) for task in tasks)
    journal_complete = asyncio.Event()

    async def heard(message: Msg) -> None:
        if message.subject.startswith(f"{subjects.PREFIX}.journal."):
            decision = messages.DECISION.decode(message.data)
            result.decisions[decision.client_request_id] = decision
        else:
            outcome = messages.OUTCOME.decode(message.data)
            result.outcomes[outcome.client_request_id] = outcome
        if min(len(result.decisions), len(result.outcomes)) >= expected:
            journal_complete.set()

    subscription = await operator.follow(subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.>", heard, start="new")
    columns = (TextColumn(f"{policy:>13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with await Client.connect(url, tenant="demo", token=token) as client:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(policy, total=expected)

            async def tick() -> None:
                progress.advance(bar)

            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, task in enumerate(tasks):
                    group.create_task(_user(client, f"{policy}-{number}", task, started, result, tick))
    if not result.failures:
        async with asyncio.timeout(10):
            await journal_complete.wait()
    await subscription.unsubscribe()
    return result


async def _user(
    client: Client, name: str, task: workload.Task, started: float, result: Run, tick: Callable[[], Awaitable[None]]
) -> None:
    await asyncio.sleep(max(0.0, started + task.starts_at - time.monotonic()))
    dialog = [{"role": "system", "content": task.system}] if task.system else []
    for turn, text in enumerate(task.turns):
        dialog.append({"role": "user", "content": text})
        request_id = f"{name}-{turn}"
        body = {"messages": dialog, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        asked = time.monotonic()
        first: float | None = None
        answer = ""
        try:
            async for frame in client.stream(DEFAULT_MODEL, body, request_id=request_id):
                for choice in frame.chunk["choices"]:
                    delta = choice["delta"].get("content") or ""
                    if delta and first is None:
                        first = time.monotonic()
                    answer += delta
            if first is None:
                raise Unavailable("the answer was empty")
        except PrefixbusError as exc:
            result.failures.append(f"{request_id}: {exc.code}: {exc}")
            return
        finally:
            await tick()
        result.samples.append(Sample(task.request_class, request_id, 1000 * (first - asked)))
        dialog.append({"role": "assistant", "content": answer})


def _table(policy: str, run: Run) -> Table:
    table = Table(title=policy, title_justify="left")
    for column in ("class", "requests", "predicted", "cached", "warm p50/p95", "partial p50/p95", "cold p50/p95"):
        table.add_column(column, justify="left" if column == "class" else "right")
    table.add_column("decisions")
    by_class: dict[str, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        by_class[sample.request_class].append(sample)
    for request_class in workload.CLASSES:
        samples = by_class[request_class]
        outcomes = [run.outcomes[sample.request_id] for sample in samples]
        times: dict[str, list[float]] = defaultdict(list)
        for sample, outcome in zip(samples, outcomes, strict=True):
            times[_temperature(outcome)].append(sample.ttft_ms)
        chosen = Counter(run.decisions[sample.request_id].decision for sample in samples)
        table.add_row(
            request_class,
            str(len(samples)),
            str(sum(outcome.predicted_tokens for outcome in outcomes)),
            str(sum(outcome.cached_tokens or 0 for outcome in outcomes)),
            *(_spread(times[kind]) for kind in ("warm", "partial", "cold")),
            ", ".join(f"{name} {count}" for name, count in chosen.most_common()),
        )
    return table


def _temperature(outcome: messages.Outcome, block_size: int = 32) -> str:
    """DESIGN 11: warm = all full blocks but at most the last, partial = at least one block, cold = none."""
    cached = (outcome.cached_tokens or 0) // block_size
    full = outcome.prompt_tokens // block_size
    if cached == 0:
        return "cold"
    return "warm" if cached >= full - 1 else "partial"


def _net_saved_ms(base: Run, ours: Run) -> float:
    def spent(run: Run) -> float:
        model = PROFILES["h100-8b"]
        prefill = sum(
            prefill_ms(model, outcome.prompt_tokens - (outcome.cached_tokens or 0), outcome.prompt_tokens)
            for outcome in run.outcomes.values()
        )
        return prefill + sum(outcome.queue_wait_ms or 0.0 for outcome in run.outcomes.values())

    return spent(base) - spent(ours)


def _spread(values: list[float]) -> str:
    return f"{_percentile(values, 0.5):.0f}/{_percentile(values, 0.95):.0f}" if values else "-"


def _percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile; 0 for no values."""
    if not values:
        return 0.0
    if share == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
