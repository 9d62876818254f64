# ruff: noqa: TID251 - it plays users: it sends requests and times the answers
"""The demo: one workload, twice, under `round-robin` and under `prefix-aware`, and what the difference is.

Each pass begins cold: engine caches are emptied, and each is a permission scope of its own, so nothing that any cache
(engines, directory, the tokenizer's memo) learned in one pass is of use in the other. Processes are warmed up before.

Owns: the run.   Must not know: how routing works; all numbers come from the client's own clock and from the journal,
which anybody can read."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from importlib import resources

import msgspec
from nats.aio.msg import Msg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bus import subjects
from ..bus.connection import Bus
from ..bus.errors import PrefixbusError, Unavailable
from ..client import Client
from . import control, records, verdict, workload
from .deployment import DEFAULT_MODEL, Deployment
from .records import Records
from .verdict import Run, Sample

SEED = 20
POLICIES = ("round-robin", "prefix-aware")
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


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How big the demo is. Each engine's `kv_tokens` hold about half of the documents: the workload fits into the
    fleet's cache, but not into every engine's. Source code has 2.6 characters a token."""

    documents: int
    document_chars: int
    instruction_chars: int
    kv_tokens: int
    max_tokens: int
    deadline_s: float
    traffic: workload.Size


# A document is what fits into 8192 tokens beside a question.
SIMULATED = Scale(
    documents=8,
    document_chars=18_000,
    instruction_chars=3_000,
    kv_tokens=24_576,
    max_tokens=24,
    deadline_s=120.0,
    traffic=workload.Size(span_s=3.0),
)
# SmolLM2 on one core computes a document in some seconds.
REAL = Scale(
    documents=6,
    document_chars=3_900,
    instruction_chars=1_000,
    kv_tokens=6_144,
    max_tokens=8,
    # A machine that does much else is slow, and not wrong.
    deadline_s=600.0,
    traffic=workload.Size(span_s=45.0, questions=4, templates=6, systems=6, sessions=2, uniques=3, unique_words=150),
)
# What vLLM must be told with it: no prompt may be longer than the KV.
REAL_FLAGS = ["--max-model-len", "3072"]
# Records are written a moment after an answer's last frame; they are 100 ms late at most unless something is wrong.
_JOURNAL_WAIT_S = 10.0


def documents(scale: Scale) -> list[str]:
    """The project's own texts."""
    package = resources.files(__package__.rsplit(".", 1)[0])
    files = _DOCUMENTS[: scale.documents]
    return [package.joinpath(name).read_text(encoding="utf-8")[: scale.document_chars] for name in files]


async def run(deployment: Deployment, operator: Bus, token: str, console: Console) -> bool:
    """Plays the workload under both policies and prints the table; whether prefix-aware won (see the last line)."""
    scale = SIMULATED if deployment.is_simulated else REAL
    texts = documents(scale)
    tasks = workload.make(texts, texts[0][: scale.instruction_chars], random.Random(SEED), scale.traffic)
    await control.set_policy(operator, POLICIES[0])
    await _warm_up(deployment, token)
    runs: list[Run] = []
    for policy in POLICIES:
        await control.set_policy(operator, policy)
        for worker in deployment.workers:
            await control.reset_cache(operator, worker)
        runs.append(await _play(deployment.nats_url, operator, token, policy, tasks, scale))
    base, ours = runs
    if deployment.is_simulated:
        wrong_hits = await control.wrong_hits(deployment.engine_urls())
    else:
        wrong_hits = await control.wrong_hits_seen(deployment.directory)
    _show(base, ours, console, is_simulated=deployment.is_simulated)
    judged = verdict.judge(base, ours, wrong_hits)
    for reason in judged.reasons:
        console.print(f"failed: {reason}", soft_wrap=True, highlight=False)
    console.print(verdict.last_line(base, ours, wrong_hits), soft_wrap=True, highlight=False)
    return judged.ok


def _show(base: Run, ours: Run, console: Console, *, is_simulated: bool) -> None:
    """The figures, with what they mean, at the console's width."""
    for each in (base, ours):
        console.print(verdict.table(each, workload.CLASSES))
        console.print("decisions:", *verdict.decisions(each, workload.CLASSES), "", sep="\n", highlight=False)
    legend = [*verdict.LEGEND.splitlines(), "decisions:", *verdict.decision_legend(base, ours)]
    console.print(*legend, "", sep="\n", highlight=False)
    console.print("Both passes began cold: engine caches emptied, and a permission scope each, which shares nothing.\n")
    console.print(verdict.comparison(base, ours), "")
    if is_simulated:
        console.print(
            f"net prefill saved by prefix-aware routing over round-robin: {verdict.net_saved_ms(base, ours):.0f} ms "
            "(prefill avoided by cache hits, less the time that requests waited in queues)"
        )
    else:
        console.print(verdict.warm_and_cold(base, ours), highlight=False)
        for sample in (each for each in ours.samples if each.request_class == "session"):
            console.print(f"an answer: {sample.answer.strip()!r}", soft_wrap=True, highlight=False)
            break
    console.print(verdict.sentence(base, ours), highlight=False)


async def _warm_up(deployment: Deployment, token: str) -> None:
    """What processes do only once, they do before the first pass: a few requests to each worker."""
    async with await Client.connect(deployment.nats_url, tenant="demo", token=token, scope="warm-up") as client:

        async def ask(number: int) -> None:
            body = {"messages": [{"role": "user", "content": f"Warm-up {number}"}], "max_tokens": 1}
            async for _ in client.stream(DEFAULT_MODEL, body):
                pass

        async with asyncio.TaskGroup() as group:
            for number in range(2 * len(deployment.workers)):
                group.create_task(ask(number))


async def _play(url: str, operator: Bus, token: str, policy: str, tasks: list[workload.Task], scale: Scale) -> Run:
    result = Run(policy)
    news = asyncio.Event()

    async def heard(message: Msg) -> None:
        take(result, message.subject, message.data)
        news.set()

    subscription = await operator.follow(subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.>", heard, start="new")
    columns = (TextColumn(f"{policy:>13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with await Client.connect(url, tenant="demo", token=token, scope=policy) as client:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(policy, total=sum(len(task.turns) for task in tasks))

            async def tick() -> None:
                progress.advance(bar)

            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, task in enumerate(tasks):
                    group.create_task(_user(client, f"{policy}-{number}", task, scale, started, result, tick))
    # What is still missing after this is for the verdict to say.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_JOURNAL_WAIT_S):
            while result.unrecorded():
                news.clear()
                await news.wait()
    await subscription.unsubscribe()
    return result


def take(run: Run, subject: str, data: bytes) -> None:
    """Adds what was stored in JOURNAL, if it is this run's: its clients' request ids begin with the policy's name."""
    written = Records([], [])
    records.add(written, subject, data)
    for decision in written.decisions:
        if decision.client_request_id.startswith(run.policy):
            run.decisions[decision.client_request_id] = decision
    for outcome in written.outcomes:
        if outcome.client_request_id.startswith(run.policy):
            run.outcomes[outcome.client_request_id] = outcome
    run.unreadable.extend(written.unreadable)


async def _user(
    client: Client,
    name: str,
    task: workload.Task,
    scale: Scale,
    started: float,
    result: Run,
    tick: Callable[[], Awaitable[None]],
) -> None:
    await asyncio.sleep(max(0.0, started + task.starts_at - time.monotonic()))
    dialog = [{"role": "system", "content": task.system}] if task.system else []
    for turn, text in enumerate(task.turns):
        dialog.append({"role": "user", "content": text})
        request_id = f"{name}-{turn}"
        body = {"messages": dialog, "max_tokens": scale.max_tokens, "temperature": 0, "ignore_eos": True}
        asked = time.monotonic()
        first: float | None = None
        answer = ""
        try:
            async for frame in client.stream(DEFAULT_MODEL, body, request_id=request_id, deadline_s=scale.deadline_s):
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
        result.samples.append(Sample(task.request_class, request_id, 1000 * (first - asked), answer))
        dialog.append({"role": "assistant", "content": answer})
