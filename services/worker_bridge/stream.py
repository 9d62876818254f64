# ruff: noqa: TID251 - a shell: it waits on the event loop
"""Running requests: each from its acceptance to its outcome.

How an attempt ends, and who says so:

    complete, or failed for good     the bridge sends the client's last frame, and the outcome
    failed before the first frame    given back: the router is told, and asks another worker; no outcome
    failed after it                  the bridge ends the client's stream with the error, and sends the outcome
    the client is gone               the outcome alone
    stopped by the router            nothing
    the lease lapsed, the bus was    nothing but a word to the router, which has ended it or asked another worker
    lost, the name was taken, its    already, or does so now
    task is cancelled

    another attempt answers  nothing to the client; the router is told, and asks nobody else

    before the first frame   the fact of a (possible) reuse is acknowledged by the record's stream (of a request that
                             can have reused nothing it is on its way), the request is claimed (claim.py), and the
                             router is told that the answer starts: from then on it asks nobody else
    an end without frames    is claimed, too
    every frame, the end     only under an unbroken lease and over an unbroken bus: else others may be answering
                             already, and what was published last may not have arrived
    silence                  keep-alives; they, and a frame now and then, carry a reply subject of ours, and the server
                             answers there when nobody listens at the client's inbox

Owns: attempts in work.   Must not know: who may run (admission, vetting), how the engine is spoken to.
Source: DESIGN 2, 6 (Failover), 7, 9 (Record)."""

import asyncio
import contextlib
import enum
import math
import secrets
from collections.abc import Callable

import anyio
import anyio.abc
import msgspec

from ..bus import blockkeys, frames, subjects
from ..bus.clock import Clock
from ..bus.config import asked_name
from ..bus.connection import Bus
from ..bus.errors import (
    BusUnavailable,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    PrefixbusError,
    Unavailable,
    WorkerLost,
)
from ..bus.messages import ACCEPT, FACT, OUTCOME, VERSION, Accept, Dispatch, Fact, Job, Outcome
from ..bus.outbox import Outbox
from .acks import Acks
from .adapters import Adapters
from .admission import ALREADY_STREAMING, WAITED, Admission, Left, Phase, Ticket
from .blocks import BlockIndex
from .chunks import ChunkWriter, Usage
from .claim import Claim, Superseded
from .cold import ColdRequests
from .engine import Engine, Generation, Progress
from .engine_chunks import first_difference
from .heartbeat import Heartbeat
from .hits import Answered, HitCheck
from .metrics import BridgeMetrics
from .resume import InStep, held_back_chars
from .vetting import Params

# A client that is gone is noticed within this and the server's answer: half of the second that it may cost.
PROBE_S = 0.5
_PULSE_S = 0.1
# After an outage of the bus the end of an attempt is told if the bus is back within this of its deadline.
_RECONNECT_S = 5.0

# Clients come back to the bus after an outage when we have been there for a while: nats-py's and Go's clients wait 2 s
# between attempts. Until then that nobody listens means nothing.
_CLIENTS_BACK_S = 3.0
# The server's word that nobody listens comes in the time of a round trip.
_PROBE_ANSWER_S = 0.1
# After an outage of the bus the router is asked to end what had begun when most clients are there to hear it: ours look
# for the server every 0.25 s.
_HAND_OVER_AFTER_S = 1.0

SERVICE = "worker_bridge"
_NO_RECORD = "The record of reuse cannot be written."
# `Accept.refused` of the notice that goes to the router just before the first frame.
STARTED = "started"


class Told(enum.Enum):
    """Who hears of an attempt's end."""

    ALL = "client and router"
    ROUTER = "the router: the client is gone"
    NOBODY = "nobody: the router asked for it"
    GIVEN_UP = "the router, to end it: others may be answering"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted dispatch, as its run needs it. `reply`: where the router hears of it; `params`: what vetting left of
    the job's; `keys`: all full blocks' keys; `generation`: the index's then."""

    reply: str

    dispatch: Dispatch
    job: Job
    params: Params
    ticket: Ticket
    keys: bytes
    generation: int


class Streams:
    """All attempts in work. `start` and `stop` them; `run` is the pulse: keep-alives, probes, late checks."""

    def __init__(
        self,
        *,
        worker: str,
        model: str,
        bus: Bus,
        clock: Clock,
        engine: Engine,
        index: BlockIndex,
        admission: Admission,
        heartbeat: Heartbeat,
        load_changed: Callable[[], None],
        metrics: BridgeMetrics,
        outbox: Outbox,
        tasks: anyio.abc.TaskGroup,
        adapters: Adapters,
        keepalive_s: float,
        caught: Callable[[BaseException, str], None],
        engine_doubted: Callable[[], None],
        isolation_doubted: Callable[[], None],
        tells_worker: bool,
    ) -> None:
        self.worker = worker
        self.model = model
        self.bus = bus
        self.clock = clock
        self.engine = engine
        self.index = index
        self.admission = admission
        self.heartbeat = heartbeat
        self.load_changed = load_changed
        self.metrics = metrics
        self.outbox = outbox
        self.adapters = adapters
        self.hits = HitCheck(index)
        self.cold = ColdRequests(index)
        self.acks = Acks(bus)
        self.caught = caught
        self.engine_doubted = engine_doubted
        self.isolation_doubted = isolation_doubted
        self.tells_worker = tells_worker
        self._tasks = tasks
        self._attempts: dict[str, Attempt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._nobody_prefix = f"{bus.inbox_prefix}.nobody"
        self.prompts_differ = False
        """Whether the engine ever made other tokens of a chat than we did."""
        self.words_unheard = 0
        """Words to routers that nobody was there to hear."""
        # Half, so that a pulse that comes late still keeps within what clients were promised.
        self._silence_s = min(keepalive_s / 2, PROBE_S)
        self.bus_back = asyncio.Event()
        self._back_at: float | None = None
        bus.on_connection_change.append(self._bus_changed)

    def __repr__(self) -> str:
        return f"<Streams {len(self._attempts)} in work>"

    @property
    def in_work(self) -> int:
        """Attempts that have not ended, their last words included."""
        return len(self._attempts)

    @property
    def nobody_subjects(self) -> str:
        """Where the server says that nobody listens: to subscribe with `nobody_there`."""
        return f"{self._nobody_prefix}.*.*"

    def no_client_subject(self, attempt: "Attempt") -> str:
        return f"{self._nobody_prefix}.client.{attempt.name}"

    def no_router_subject(self, attempt: "Attempt") -> str:
        return f"{self._nobody_prefix}.router.{attempt.name}"

    def start(self, started: Started) -> None:
        attempt = Attempt(self, started)
        if not self._attempts:
            self._idle.clear()
        self._attempts[attempt.name] = attempt
        self.cold.begins(started.dispatch.ns_id, attempt.name, self.clock.now())
        # With a name of its own anyio need not make one up, which costs as much as the task.
        self._tasks.start_soon(attempt.run, name=attempt.name)

    def stop(self, ticket: Ticket, error: PrefixbusError, told: Told = Told.ALL) -> bool:
        """Whether its first frame was on its way already."""
        attempt = self._attempts.get(_name(ticket.request_id, ticket.attempt))
        if attempt is None:
            return False
        attempt.stop(error, told)
        return attempt.has_started

    def stop_all(self, error: PrefixbusError) -> None:
        for attempt in self._attempts.values():
            attempt.stop(error)

    def give_up_all(self, error: PrefixbusError) -> None:
        """Others may be answering these requests."""
        for attempt in self._attempts.values():
            attempt.give_up(error)

    def nobody_there(self, subject: str) -> None:
        """The server found nobody at the inbox that a message of ours went to."""
        _, whose, name = subject.rsplit(".", 2)
        attempt = self._attempts.get(name)
        if attempt is None:
            return
        if whose == "router":
            self.words_unheard += 1
            attempt.router_missed = True
            return
        attempt.listener_missed = True
        if not self.clients_may_be_away():
            self.metrics.clients_gone.inc()
            attempt.stop(Cancelled("The client no longer listens."), Told.ROUTER)

    def back_for_s(self) -> float:
        """How long the bus has been there since it was lost; for ever if it never was."""
        return math.inf if self._back_at is None else self.clock.now() - self._back_at

    def clients_may_be_away(self) -> bool:
        """Whether the bus was lost so lately that clients may not be back."""
        return self.back_for_s() < _CLIENTS_BACK_S

    def expected_blocks(self, ns_id: bytes, keys: bytes, held_blocks: int) -> int:
        """How many leading blocks of this chain there are, of which `held_blocks` are held, with those that requests in
        hand are about to have: an engine keeps those of a request at least as long as it runs."""
        chains = [attempt.keys for attempt in self._attempts.values() if attempt.ns_id == ns_id]
        return blockkeys.deepest_common(keys, chains, held_blocks)

    def give_turns(self) -> None:
        """Lets those go to the engine for whom there is room; to be called when room may have been made."""
        while (ticket := self.admission.next_up()) is not None:
            attempt = self._attempts[_name(ticket.request_id, ticket.attempt)]
            if not self.admission.give_turn(attempt.uncached_tokens(), self.clock.now()):
                return
            attempt.turn.set()

    def left(self, attempt: "Attempt", how: Left) -> None:
        """The attempt is over: off the books."""
        if attempt.ticket.phase is not Phase.ENDED:
            self.admission.end(attempt.ticket, self.clock.now(), how)
        self.give_turns()
        self.load_changed()

    def concluded(self, attempt: "Attempt") -> None:
        self._attempts.pop(attempt.name, None)
        self.cold.ends(attempt.ns_id, attempt.name, self.clock.now())
        if not self._attempts:
            self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_PULSE_S)
            now = self.clock.now()
            self.acks.sweep(now)
            for attempt in list(self._attempts.values()):
                if now - attempt.last_sent_at >= self._silence_s:
                    await attempt.keep_alive(now)
            for wrong in self.hits.settle(now):
                self._alarm(wrong)

    def _alarm(self, wrong: Answered) -> None:
        """Counted, on the record, and reason to ask the engine at once whether it still isolates."""
        self.metrics.wrong_hits.inc()
        self.caught(WrongHit(f"{wrong.cached_tokens} tokens of request {wrong.request_id}"), "wrong hit")
        fact = Fact(
            v=VERSION,
            kind="wrong_hit",
            at=self.clock.wall(),
            service=SERVICE,
            tenant=wrong.tenant,
            scope=wrong.scope,
            ns_id=wrong.ns_id.hex(),
            request_id=wrong.request_id,
            worker=self.worker,
            tokens=wrong.cached_tokens,
        )
        subject = subjects.audit(SERVICE, self.worker)
        self.outbox.put(subject, FACT.encode(fact), f"wrong-{self.worker}-{wrong.request_id}")
        self.isolation_doubted()

    def _bus_changed(self, connected: bool) -> None:
        if connected:
            self.bus_back.set()
            self._back_at = self.clock.now()
        else:
            self.bus_back.clear()
            self.give_up_all(BusUnavailable("The bus was lost."))


class Waited(PrefixbusError):
    """The request waited for its turn with the engine for longer than it is worth."""

    code = "waited_for_long"
    status = 503
    retryable = True


class WrongHit(PrefixbusError):
    """The engine reused blocks that its index does not have for the namespace."""

    code = "wrong_hit"
    status = 500


class PromptDiffers(PrefixbusError):
    """The engine made other tokens of a chat than we did."""

    code = "prompt_differs"
    status = 500


class Attempt:
    """One attempt's run. `seq` counts the chunks published."""

    def __init__(self, streams: Streams, started: Started) -> None:
        self.ticket = started.ticket
        self.name = _name(self.ticket.request_id, self.ticket.attempt)
        self._streams = streams
        self._started = started
        self.ns_id = started.dispatch.ns_id
        self._job = job = started.job
        self._model = asked_name(job.namespace.model, job.namespace.adapter)
        params = started.params
        self._is_chat = "messages" in params
        top = params.get("logprobs")
        self._writer = ChunkWriter(
            job.kind,
            self._model,
            job.request_id,
            job.created_at,
            include_usage=job.include_usage,
            alternatives=None if self._is_chat or not isinstance(top, int) else top,
            is_continued=job.said_tokens > 0,
            shows_tokens=job.resumable,
        )
        self._in_step = InStep(held_back_chars(params)) if job.resumable else None
        self._engine_prompt: bytes | None = None
        self._differs_at: int | None = None
        self._label = job.client_request_id
        self._began_at = streams.clock.now()
        self.last_sent_at = self._began_at
        self._probed_at = self._began_at
        self._seq = 0
        self._output_pieces = 0
        self._first_frame_at: float | None = None
        self._usage: Usage | None = None
        remaining_s = job.deadline_at - streams.clock.wall()
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + remaining_s)
        self._stopped: PrefixbusError | None = None
        self._told = Told.ALL
        self._over = False
        self.turn = asyncio.Event()
        self._recorded = asyncio.Event()
        self._not_recorded = False
        self._claim = Claim(streams.acks, streams.clock, job, self.ticket.attempt, streams.worker)
        self._is_unclaimed = False
        self.has_started = False
        self.listener_missed = False
        self.router_missed = False

    def __repr__(self) -> str:
        return f"<Attempt {self.name} {self.ticket.phase.value}, {self._seq} chunks>"

    def stop(self, error: PrefixbusError, told: Told = Told.ALL) -> None:
        """Aborts it at the engine: no further frame is published. The first reason counts; without effect once it is
        over, but that the router may still ask for silence."""
        if told is Told.NOBODY:
            self._told = told
        if self._stopped is None and not self._over:
            self._stopped = error
            self._told = told
            self._scope.cancel()

    def give_up(self, error: PrefixbusError) -> None:
        """`stop`, and nothing more is published but a word to the router, even if only the end was missing."""
        self.stop(error)
        if self._told is not Told.NOBODY:
            self._told = Told.GIVEN_UP

    async def run(self) -> None:
        error: PrefixbusError | None = None
        try:
            try:
                error = await self._claimed_end(await self._go())
            except asyncio.CancelledError:
                self.give_up(WorkerLost())
                raise
            finally:
                self._over = True
                self._streams.left(self, self._how_left(error))
            if isinstance(error, WorkerLost):
                self._streams.engine_doubted()
            await self._conclude(error)
        except asyncio.CancelledError:
            self._go_away()
            raise
        finally:
            self._streams.concluded(self)

    def uncached_tokens(self) -> int:
        """Of its prompt, by now: others may have computed what it shares with them."""
        index, prompt_tokens = self._streams.index, self.ticket.prompt_tokens
        held_blocks = held_of_prompt(index, self.ns_id, self._started.keys, prompt_tokens)
        return prompt_tokens - held_blocks * index.block_size

    @property
    def keys(self) -> bytes:
        """Of all full blocks of its prompt; none once it is over."""
        return b"" if self._over else self._started.keys

    @property
    def _address(self) -> str:
        """Where its router hears of it, which no other bridge knows: ids that streams keep but once are made of it."""
        return self._started.reply or self.name

    async def keep_alive(self, now: float) -> None:
        """Breaks a silence, and asks the server whether anybody listens."""
        if not (self._over or self._stopped is not None or self._streams.heartbeat.lapsed()):
            await self._probe(now)

    async def _probe(self, now: float) -> None:
        self.last_sent_at = self._probed_at = now
        job = self._job
        body = frames.keepalive(job.kind, self._model, job.request_id, job.created_at)
        try:
            self._streams.bus.send(
                job.reply,
                body,
                headers=frames.keepalive_headers(self._label),
                reply=self._streams.no_client_subject(self),
            )
        except BusUnavailable:
            return
        self._streams.metrics.keepalives.inc()

    # --- the run ---

    async def _go(self) -> PrefixbusError | None:
        """All up to its last frame; what went wrong, if anything did."""
        try:
            with self._scope:
                self._record()
                await self._generate()
            return self._stopped or DeadlineExceeded() if self._scope.cancelled_caught else None
        except PrefixbusError as exc:
            error = self._stopped or exc
            if isinstance(exc, BusUnavailable):
                self.give_up(exc)
            return error
        except Exception as exc:
            self._streams.caught(exc, f"attempt {self.name}")
            return PrefixbusError()

    async def _generate(self) -> None:
        streams, job = self._streams, self._job
        request = Generation(
            engine_request_id=self.name,
            tokens=job.tokens,
            params=self._started.params,
            # What nobody can name is nobody's: under no salt of ours its blocks are never advertised.
            salt=secrets.token_hex(16) if job.uncacheable else streams.adapters.salt(job.namespace, self.ns_id),
            traceparent=job.traceparent,
            model=streams.adapters.model(job.namespace),
            wants_tokens=job.resumable,
            engine_renders=job.uncacheable or bool(job.media),
        )
        await self._until_turn()
        streams.admission.submitted(self.ticket)
        async with streams.engine.generate(request) as progress:
            async for step in progress:
                await self._pass_on(step)
        if self._is_chat:
            self._compare_prompts()
        usage = self._usage or Usage(self.ticket.prompt_tokens, self._output_pieces)
        if not self.has_started:
            await self._first_token()
        for body in self._writer.finish(usage.of_whole_answer(job.said_tokens) if job.said_tokens else usage):
            await self._send(body)

    async def _until_turn(self) -> None:
        """:raises Waited: it does not come in time."""
        ticket, clock = self.ticket, self._streams.clock
        while not ticket.has_turn:
            patience_s = ticket.patience_s(clock.now())
            if patience_s <= 0:
                raise Waited
            with anyio.move_on_after(patience_s):
                await self.turn.wait()

    async def _pass_on(self, step: Progress) -> None:
        if step.usage is not None:
            self._usage = step.usage
        if step.prompt is not None:
            # With its first token, of which its parsers may have made nothing yet.
            self._engine_prompt = step.prompt
            self._prefilled()
        if not step.pieces:
            return
        if not self.has_started:
            await self._first_token()
        self._output_pieces += len(step.pieces)
        pieces = step.pieces
        if self._in_step is not None:
            pieces = [in_step for piece in pieces if (in_step := self._in_step.feed(piece)) is not None]
        for body in self._writer.bodies(pieces):
            await self._send(body)

    def _compare_prompts(self) -> None:
        """What the engine took from its cache for a prompt of its own making says nothing of ours."""
        streams, theirs = self._streams, self._engine_prompt
        if self._job.uncacheable:
            return
        if any(not tokens for _, tokens, _ in self._job.media):
            # Ours is its beginning at most, by design: nothing to be compared.
            theirs = None
        if theirs is not None:
            self._differs_at = first_difference(self._job.tokens, theirs)
        verdict = "untold" if theirs is None else "same" if self._differs_at is None else "differs"
        streams.metrics.engine_prompts.labels(streams.model, verdict).inc()
        if verdict == "same":
            return
        if self._usage is not None:
            self._usage = msgspec.structs.replace(self._usage, cached_tokens=None)
        if verdict == "differs" and not streams.prompts_differ:
            # Once: it is the model's files or the engine's flags, and would be said of each request.
            streams.prompts_differ = True
            streams.caught(PromptDiffers(f"request {self.name}, from token {self._differs_at} on"), "parity")

    def _prefilled(self) -> None:
        streams = self._streams
        if self.ticket.phase is not Phase.PREFILLING:
            return
        streams.admission.first_token(self.ticket, streams.clock.now())
        streams.give_turns()
        streams.load_changed()

    async def _first_token(self) -> None:
        """All that comes before the first frame."""
        streams = self._streams
        self._prefilled()
        if not streams.cold.is_cold(self.ns_id, self.name):
            await self._recorded.wait()
            if self._not_recorded:
                raise Unavailable(_NO_RECORD)
        await self._until_client_is_back()
        self._check_may_speak()
        await self._hold_claim()
        self._check_may_speak()
        self._tell_router(STARTED)
        self.has_started = True

    async def _hold_claim(self) -> None:
        """:raises Superseded, Unavailable: see `Claim.hold`."""
        if not await self._claim.hold():
            self._streams.metrics.unclaimed.inc()

    async def _until_client_is_back(self) -> None:
        """After an outage of the bus the first and the last frame wait for someone to hear them, within bounds."""
        streams = self._streams
        while streams.clients_may_be_away() and not self._is_given_up():
            self.listener_missed = False
            await self._probe(streams.clock.now())
            await asyncio.sleep(_PROBE_ANSWER_S)
            if not self.listener_missed:
                return

    def _check_may_speak(self) -> None:
        if self._stopped is not None:
            # What it waited for came in the same moment: it is cancelled only where it waits next.
            raise self._stopped
        if self._streams.heartbeat.lapsed():
            error = WorkerLost("The worker was out of reach for longer than its lease.")
            self.give_up(error)
            raise error

    def _is_given_up(self) -> bool:
        return self._told is Told.GIVEN_UP or self._streams.heartbeat.lapsed()

    def _tell_router(self, word: str, reply: str = "", least_queue_ms: float = 0.0) -> None:
        """:raises BusUnavailable: not told."""
        streams, ticket = self._streams, self.ticket
        accept = Accept(
            VERSION,
            ticket.request_id,
            ticket.attempt,
            streams.worker,
            self._started.dispatch.incarnation,
            word,
            max(streams.admission.queue_ms(streams.clock.now()), least_queue_ms),
            ticket.held_blocks,
        )
        if self._started.reply:
            streams.bus.send(self._started.reply, ACCEPT.encode(accept), reply=reply)

    async def _send(self, body: bytes) -> None:
        streams = self._streams
        self._check_may_speak()
        now = streams.clock.now()
        reply = ""
        if not self._seq or now - self._probed_at >= PROBE_S:
            reply = streams.no_client_subject(self)
            self._probed_at = now
        headers = frames.chunk_headers(self._label, seq=self._seq, attempt=self.ticket.attempt)
        if not self._seq:
            headers |= frames.first_headers(
                decision=self._started.dispatch.decision,
                prompt_tokens=self.ticket.prompt_tokens - self._job.said_tokens,
                predicted_tokens=self._started.dispatch.predicted_tokens,
                worker=streams.worker if streams.tells_worker else "",
            )
        try:
            streams.bus.send(self._job.reply, body, headers=headers, reply=reply)
        except BusUnavailable:
            streams.metrics.frames_dropped.inc()
            raise
        if self._first_frame_at is None:
            self._first_frame_at = now
        self._seq += 1
        self.last_sent_at = now
        streams.metrics.frames.inc()

    def _record(self) -> None:
        """The fact of a reuse, to be acknowledged before anything of the answer is published."""
        streams, ticket, job = self._streams, self.ticket, self._job
        fact = Fact(
            v=VERSION,
            kind="reuse",
            at=streams.clock.wall(),
            service=SERVICE,
            tenant=job.namespace.tenant,
            scope=job.namespace.scope,
            ns_id=self.ns_id.hex(),
            request_id=ticket.request_id,
            worker=streams.worker,
            tokens=ticket.held_blocks * streams.index.block_size,
            decision=self._started.dispatch.decision,
        )
        payload, msg_id = FACT.encode(fact), f"reuse-{self._address}"

        def settled(failure: BusUnavailable | None) -> None:
            if failure is not None:
                streams.caught(failure, f"attempt {self.name}: the record did not acknowledge")
                # It is recorded all the same, only later.
                streams.outbox.put(subjects.audit(SERVICE, streams.worker), payload, msg_id)
                self._not_recorded = True
                if not (self._over or streams.cold.is_cold(self.ns_id, self.name)):
                    self.stop(Unavailable(_NO_RECORD))
            self._recorded.set()

        subject = subjects.audit(SERVICE, streams.worker)
        streams.acks.put(subject, f"fact-{self.name}", payload, streams.clock.now(), settled, msg_id=msg_id)

    # --- its end ---

    async def _claimed_end(self, error: PrefixbusError | None) -> PrefixbusError | None:
        """What it ends with: an error that the client is told without having heard a frame must be claimed, too."""
        if error is None or self.has_started or self._is_given_up() or isinstance(error, Superseded):
            return error
        if self._told is not Told.ALL or self._is_given_back(error):
            return error
        try:
            await self._hold_claim()
        except Superseded as exc:
            return exc
        except Unavailable:
            self._is_unclaimed = True
        return error

    def _how_left(self, error: PrefixbusError | None) -> Left:
        if isinstance(error, Superseded):
            return Left.BROKEN
        if self._told is Told.NOBODY or self._is_given_up():
            return Left.BROKEN if self.has_started else Left.GIVEN_BACK
        return Left.GIVEN_BACK if self._is_given_back(error) else Left.ENDED

    def _is_given_back(self, error: PrefixbusError | None) -> bool:
        """Nothing of it was published, and another worker may do better."""
        if error is None or self.has_started or self._told is Told.ROUTER:
            return False
        return error.retryable or self._is_unclaimed or isinstance(error, EngineFailed)

    async def _conclude(self, error: PrefixbusError | None) -> None:
        try:
            await self._until_connected()
            if self._told is Told.ALL and not (error is not None and self._is_left_to_router(error)):
                await self._until_client_is_back()
            if self._told is Told.NOBODY:
                return
            if not self._is_given_up():
                if error is not None and self._is_left_to_router(error):
                    self._leave_to_router(error)
                    return
                if self._told is Told.ALL:
                    self._end_stream(error)
                self._report(error)
                return
        except BusUnavailable:
            self._streams.metrics.frames_dropped.inc()
        await self._hand_over(error)

    def _is_left_to_router(self, error: PrefixbusError) -> bool:
        return isinstance(error, Superseded) or self._is_given_back(error)

    def _leave_to_router(self, error: PrefixbusError) -> None:
        """:raises BusUnavailable: not told."""
        # Who has waited has found out that the queue was longer than anybody knew: an engine that is stuck finishes its
        # prefills on paper.
        waited_ms = 1000 * (self._streams.clock.now() - self._began_at) if isinstance(error, Waited) else 0.0
        self._tell_router(_word(error), least_queue_ms=waited_ms)
        self._count_left(error)

    def _count_left(self, error: PrefixbusError) -> None:
        metrics = self._streams.metrics
        if isinstance(error, Superseded):
            metrics.superseded.inc()
        elif self.has_started:
            metrics.broken(error.code)
        else:
            metrics.given_back(error.code)

    def _end_stream(self, error: PrefixbusError | None) -> None:
        attempt = self.ticket.attempt
        if error is None:
            headers = frames.final_headers(self._label, seq=self._seq, attempt=attempt)
        else:
            headers = frames.error_headers(error, self._label, seq=self._seq, attempt=attempt)
            if self.has_started:
                headers |= frames.resume_headers(error, resumable=self._job.resumable)
        self._streams.bus.send(self._job.reply, b"", headers=headers)

    def _go_away(self) -> None:
        """The task is being cancelled: one word to the router, which need not wait for the lease to run out."""
        if self._told is Told.NOBODY:
            return
        error = WorkerLost()
        self.give_up(error)
        self._count_left(error)
        self._streams.admission.amend(self.ticket, self._how_left(error), self._streams.clock.now())
        with contextlib.suppress(BusUnavailable):
            self._tell_of_loss(error)

    def _tell_of_loss(self, error: PrefixbusError) -> None:
        """:raises BusUnavailable: not told."""
        if self.has_started:
            # This notice may have been lost with the bus; without it the router would ask somebody else.
            self._tell_router(STARTED, self._streams.no_router_subject(self))
        self._tell_router(_word(error), self._streams.no_router_subject(self))

    async def _hand_over(self, error: PrefixbusError | None) -> None:
        """The router ends what has begun, and asks somebody else for what has not, if it has not done so already.

        It is told until it listens: when the bus was lost, it may be back later than we are."""
        streams = self._streams
        # What kept us from the bus says nothing about the request.
        if error is None or isinstance(error, BusUnavailable):
            error = WorkerLost()
        self._count_left(error)
        streams.admission.amend(self.ticket, self._how_left(error), streams.clock.now())
        with anyio.move_on_after(self._patience_s()):
            while True:
                await self._until_connected()
                if self.has_started:
                    await asyncio.sleep(_HAND_OVER_AFTER_S - streams.back_for_s())
                self.router_missed = False
                with contextlib.suppress(BusUnavailable):
                    self._tell_of_loss(error)
                    if not streams.clients_may_be_away():
                        return
                await asyncio.sleep(_PROBE_ANSWER_S)
                if streams.bus.connected and not self.router_missed:
                    return

    def _patience_s(self) -> float:
        """Nobody waits for this request any longer."""
        return self._job.deadline_at - self._streams.clock.wall() + _RECONNECT_S

    async def _until_connected(self) -> None:
        """Until the bus is there, or nobody waits for this request any more."""
        streams = self._streams
        if not streams.bus.connected:
            with anyio.move_on_after(self._patience_s()):
                await streams.bus_back.wait()

    def _report(self, error: PrefixbusError | None) -> None:
        outcome = self._outcome(error)
        streams = self._streams
        streams.metrics.ended(outcome)
        msg_id = subjects.outcome_id(self._address)
        streams.outbox.put(subjects.outcome(streams.worker, outcome.request_id), OUTCOME.encode(outcome), msg_id)
        if error is None and outcome.cached_tokens is not None:
            answered = Answered(
                request_id=outcome.request_id,
                tenant=self._job.namespace.tenant,
                scope=self._job.namespace.scope,
                ns_id=self.ns_id,
                keys=self._started.keys,
                cached_tokens=outcome.cached_tokens,
                generation=self._started.generation,
            )
            streams.hits.answered(answered, streams.clock.now())

    def _outcome(self, error: PrefixbusError | None) -> Outcome:
        streams, ticket, dispatch, usage = self._streams, self.ticket, self._started.dispatch, self._usage
        cached = usage.cached_tokens if usage is not None else None
        first = self._first_frame_at
        if error is None:
            status = "ok"
        else:
            status = "cancelled" if isinstance(error, Cancelled) else "error"
        return Outcome(
            v=VERSION,
            request_id=ticket.request_id,
            client_request_id=self._label,
            attempt=ticket.attempt,
            worker=streams.worker,
            incarnation=dispatch.incarnation,
            tenant=ticket.tenant,
            model=streams.model,
            ns_id=dispatch.ns_id.hex(),
            status=status,
            error="" if error is None else error.code,
            prefix_class=self._job.prefix_class,
            decision=dispatch.decision,
            prompt_tokens=ticket.prompt_tokens,
            predicted_tokens=dispatch.predicted_tokens,
            cached_tokens=cached,
            prefill_tokens=None if cached is None else max(0, ticket.prompt_tokens - cached),
            output_tokens=usage.completion_tokens if usage is not None else self._output_pieces,
            queue_wait_ms=ticket.queue_wait_ms(),
            ttft_ms=None if first is None else (first - self._began_at) * 1000,
            total_ms=(streams.clock.now() - self._began_at) * 1000,
            ended_at=streams.clock.wall(),
            traceparent=self._job.traceparent,
            adapter=self._job.namespace.adapter,
            engine_differs_at=self._differs_at,
            ahead_own_tokens=ticket.ahead.own_tokens if ticket.has_turn else None,
            ahead_others_tokens=ticket.ahead.others_tokens if ticket.has_turn else None,
        )


def _word(error: PrefixbusError) -> str:
    """What a router is told of an attempt that ended so."""
    if isinstance(error, Superseded):
        return ALREADY_STREAMING
    return WAITED if isinstance(error, Waited) else error.code


def held_of_prompt(index: BlockIndex, ns_id: bytes, keys: bytes, prompt_tokens: int) -> int:
    """How many blocks of a prompt the engine could take from its cache now; `keys` are those of all its full blocks."""
    return index.held(ns_id, keys[: 8 * blockkeys.reusable_blocks(prompt_tokens, index.block_size)])


def _name(request_id: str, attempt: int) -> str:
    """Unique per attempt, and one subject token."""
    return f"{request_id}-{attempt}"
