# ruff: noqa: TID251 - a shell: it waits on the event loop
"""What this worker computes while nobody wants anything of it: prefixes that the directory wants to be here.

An order comes as a dispatch whose decision is `warm` and whose job has no client. It has passed the same checks as a
request's (vetting.py) and runs under the same salt. One at most is in work, and it is no request: it is in no queue, no
slot and no load report, nothing of it is published, and whoever comes finds it given up.

It is given to the engine in steps, each the prefix up to there: what one leaves in the cache the next one finds. So a
request that comes waits for the engine's step at hand at most, and what was computed stays when the rest is given up.

Owns: the order in work.   Must not know: who chose it and why, how the engine is spoken to.
Source: DESIGN 5 (Placement)."""

import asyncio
from collections.abc import Callable

import anyio
import anyio.abc
import msgspec

from ..bus import subjects
from ..bus.clock import Clock
from ..bus.errors import Cancelled, DeadlineExceeded, PrefixbusError
from ..bus.messages import FACT, OUTCOME, VERSION, Dispatch, Fact, Job, Outcome
from ..bus.outbox import Outbox
from .adapters import Adapters
from .admission import DRAINING, TOO_LATE, WRONG_INCARNATION, Admission
from .blocks import BlockIndex
from .chunks import Usage
from .cold import ColdRequests
from .engine import Engine, Generation
from .hits import Answered, HitCheck
from .metrics import BridgeMetrics
from .stream import SERVICE

# Why an order was refused, besides admission's words.
BUSY = "busy"
HELD = "held"
# One token, the likeliest: what a client asked for is none of it.
_PARAMS: dict[str, object] = {"max_tokens": 1, "temperature": 0.0}


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was taken."""

    dispatch: Dispatch
    job: Job
    keys: bytes
    held_blocks: int
    began_at: float
    generation: int

    @property
    def name(self) -> str:
        return f"{self.dispatch.request_id}-{self.dispatch.attempt}"


class Warming:
    """`offer` it orders, and `give_up` whenever a request was let in. Make it within the task group."""

    def __init__(
        self,
        *,
        worker: str,
        model: str,
        clock: Clock,
        engine: Engine,
        index: BlockIndex,
        admission: Admission,
        cold: ColdRequests,
        hits: HitCheck,
        outbox: Outbox,
        tasks: anyio.abc.TaskGroup,
        metrics: BridgeMetrics,
        adapters: Adapters,
        idle_share: float,
        step_tokens: int,
        caught: Callable[[BaseException, str], None],
    ) -> None:
        self._worker = worker
        self._model = model
        self._clock = clock
        self._engine = engine
        self._index = index
        self._admission = admission
        self._cold = cold
        self._hits = hits
        self._outbox = outbox
        self._tasks = tasks
        self._adapters = adapters
        self._running_max = int(idle_share * admission.slots)
        self._step_blocks = max(1, step_tokens // index.block_size)
        self._caught = caught
        self._work: _Work | None = None
        self._scope = anyio.CancelScope()
        self._idle = asyncio.Event()
        self._idle.set()
        self._metrics = metrics

    def __repr__(self) -> str:
        return f"<Warming {self._work.name if self._work is not None else 'nothing'}>"

    @property
    def in_work(self) -> bool:
        return self._work is not None

    def offer(self, dispatch: Dispatch, job: Job, keys: bytes) -> tuple[str, int]:
        """Why it is not taken (empty: it is, and runs), and how many of its blocks are here."""
        held_blocks = self._index.held(dispatch.ns_id, keys)
        refused = self._why_not(dispatch, held_blocks, len(keys) // 8)
        if refused:
            self._metrics.warm_orders.labels(refused).inc()
            return refused, held_blocks
        self._work = work = _Work(
            dispatch=dispatch,
            job=job,
            keys=keys,
            held_blocks=held_blocks,
            began_at=self._clock.now(),
            generation=self._index.generation,
        )
        self._idle.clear()
        remaining_s = max(0.0, job.deadline_at - self._clock.wall())
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + remaining_s)
        # From now on its namespace may have blocks here that are not told of yet.
        self._cold.begins(dispatch.ns_id, work.name, work.began_at)
        self._tasks.start_soon(self._run, work, self._scope, name=work.name)
        return "", held_blocks

    def give_up(self) -> None:
        """The engine is wanted for something else."""
        if self._work is not None:
            self._scope.cancel()

    async def idle(self) -> None:
        await self._idle.wait()

    def _why_not(self, dispatch: Dispatch, held_blocks: int, blocks: int) -> str:
        admission = self._admission
        if not admission.incarnation or dispatch.incarnation != admission.incarnation:
            return WRONG_INCARNATION
        if admission.draining:
            return DRAINING
        if self._clock.wall() > dispatch.accept_by_at:
            return TOO_LATE
        if held_blocks >= blocks:
            return HELD
        if self._work is not None or not self._is_idle():
            return BUSY
        return ""

    def _is_idle(self) -> bool:
        return not self._admission.waiting and self._admission.running <= self._running_max

    async def _run(self, work: _Work, scope: anyio.CancelScope) -> None:
        error: PrefixbusError | None = None
        first: Usage | None = None
        try:
            self._record(work)
            with scope:
                first = await self._compute(work)
            if scope.cancelled_caught:
                late = self._clock.wall() >= work.job.deadline_at
                error = DeadlineExceeded() if late else Cancelled("A request came.")
        except PrefixbusError as exc:
            error = exc
        except Exception as exc:
            self._caught(exc, f"order {work.name}")
            error = PrefixbusError()
        finally:
            self._work = None
            self._cold.ends(work.dispatch.ns_id, work.name, self._clock.now())
            self._idle.set()
        self._report(work, first, error)

    async def _compute(self, work: _Work) -> Usage | None:
        """Usage of the first step: what was in the cache before."""
        job, block_size = work.job, self._index.block_size
        blocks = len(work.keys) // 8
        salt = self._adapters.salt(job.namespace, work.dispatch.ns_id)
        first: Usage | None = None
        for upto in (*range(work.held_blocks + self._step_blocks, blocks, self._step_blocks), blocks):
            request = Generation(
                engine_request_id=f"{work.name}-{upto}",
                tokens=job.tokens[: 4 * block_size * upto],
                params=_PARAMS,
                salt=salt,
                traceparent=job.traceparent,
                model=self._adapters.model(job.namespace),
            )
            async with self._engine.generate(request) as progress:
                async for step in progress:
                    if first is None:
                        first = step.usage
        return first

    def _record(self, work: _Work) -> None:
        """For the record: this namespace's cache was used, by nobody's request."""
        wanted = work.job.namespace
        fact = Fact(
            v=VERSION,
            kind="warm",
            at=self._clock.wall(),
            service=SERVICE,
            tenant=wanted.tenant,
            scope=wanted.scope,
            ns_id=work.dispatch.ns_id.hex(),
            request_id=work.dispatch.request_id,
            worker=self._worker,
            tokens=work.held_blocks * self._index.block_size,
            decision=work.dispatch.decision,
        )
        self._outbox.put(subjects.audit(SERVICE, self._worker), FACT.encode(fact), f"warm-{work.name}")

    def _report(self, work: _Work, first: Usage | None, error: PrefixbusError | None) -> None:
        cached = first.cached_tokens if first is not None else None
        tokens = len(work.keys) // 8 * self._index.block_size
        if isinstance(error, Cancelled):
            status, result = "cancelled", "given_up"
        else:
            status, result = ("ok", "done") if error is None else ("error", "failed")
        self._metrics.warm_orders.labels(result).inc()
        if cached is not None and error is None:
            self._metrics.warm_tokens.labels("cached").inc(cached)
            self._metrics.warm_tokens.labels("computed").inc(max(0, tokens - cached))
            answered = Answered(
                request_id=work.dispatch.request_id,
                tenant=work.job.namespace.tenant,
                scope=work.job.namespace.scope,
                ns_id=work.dispatch.ns_id,
                keys=work.keys,
                cached_tokens=cached,
                generation=work.generation,
            )
            self._hits.answered(answered, self._clock.now())
        outcome = Outcome(
            v=VERSION,
            request_id=work.dispatch.request_id,
            client_request_id="",
            attempt=work.dispatch.attempt,
            worker=self._worker,
            incarnation=work.dispatch.incarnation,
            tenant=work.job.namespace.tenant,
            model=self._model,
            ns_id=work.dispatch.ns_id.hex(),
            status=status,
            error="" if error is None else error.code,
            prefix_class="",
            decision=work.dispatch.decision,
            prompt_tokens=tokens,
            predicted_tokens=0,
            cached_tokens=cached,
            prefill_tokens=None if cached is None else max(0, tokens - cached),
            output_tokens=0,
            queue_wait_ms=None,
            ttft_ms=None,
            total_ms=(self._clock.now() - work.began_at) * 1000,
            ended_at=self._clock.wall(),
            adapter=work.job.namespace.adapter,
        )
        self._outbox.put(
            subjects.outcome(self._worker, outcome.request_id), OUTCOME.encode(outcome), f"outcome-{work.name}"
        )
