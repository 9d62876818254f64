# ruff: noqa: TID251 - shell: one request's life on the event loop
"""One request from its arrival at the router to its end: sent to the worker of its choice, and answered for.

What to do next is attempts.py's to say; here its effects are carried out, and what is heard (answers of bridges, lost
leases, cancels, timers) is put in order in a mailbox and told to it, one by one.

Owns: the timers and the mailbox of each request in hand, and what those requests share.
Must not know: what a choice is made from (choice.py), how subscriptions are made."""

import asyncio
import contextlib
import functools
import math
import secrets
from collections import deque
from collections.abc import Callable

import anyio
import msgspec

from ..bus import frames, subjects
from ..bus.cancels import Cancels
from ..bus.config import asked_name
from ..bus.connection import WrongSequence
from ..bus.errors import (
    BusUnavailable,
    Overloaded,
    PrefixbusError,
    Unavailable,
)
from ..bus.messages import (
    ABORT,
    DECISION,
    DISPATCH,
    DISPATCHED,
    JOB,
    OUTCOME,
    VERSION,
    WARM,
    Abort,
    Accept,
    ControlReply,
    DecisionRecord,
    Dispatch,
    Dispatched,
    MessageInvalid,
    Outcome,
    Route,
)
from ..bus.outbox import Outbox
from ..bus.runtime import Runtime
from . import gains, journal
from .addresses import Addresses
from .attempts import QUEUE_TOO_LONG, RUNNING, STALE_HIT, WAITED, Attempts, Effect, Effects, State, pause_s
from .books import Books
from .choice import Choice, Choices
from .fleet import Fleet, Lost
from .metrics import Metrics, OfClass, WorkerGauges
from .policy import NO_LIMIT_MS, Decision
from .warming import Warming

# A stream takes a claim in 0.2 ms; an end waits no longer than this for it, nor does a router that is going away.
CLAIM_S = 0.5
# Kinds of addresses (addresses.py): where bridges answer dispatches, aborts and questions.
DISPATCHES = "d"
ABORTS = "a"
STATUSES = "s"
# And where the server says that nobody listens at a client's inbox.
CLIENTS = "c"
# `Accept.refused` of the notice a bridge sends just before the first frame.
STARTED = "started"
# `ControlReply.error` about an attempt whose outcome was sent.
ENDED = "ended"
# The first keep-alive is due within 1 s (DESIGN 2).
FIRST_KEEPALIVE_S = 0.8
# The next ones also ask whether the client is still there: half of the second that its going may cost.
KEEPALIVE_S = 0.5
# After an outage of the bus, clients may come back this much later than we do: nats-py's and Go's wait 2 s between
# attempts. Until then that nobody listens means nothing.
CLIENTS_BACK_S = 3.0
# Bridges end what passes its deadline; this much later the router does.
DEADLINE_GRACE_S = 2.0
# Nothing is left of a request this long after its deadline, whatever went wrong.
HARD_LIMIT_S = 30.0
# A dispatch that nobody heard is sent once more after this: bridges look for the server every 0.25 s.
SEND_AGAIN_S = 0.3
# An accepted request of which nothing was heard for this long is asked after; then after twice as long, and so on.
DOUBT_S = 5.0
# An outcome that its bridge has sent is here within this, or lost.
OUTCOME_LATE_S = 1.0
# How long an announcement is believed beyond the time the request should take to its first token.
ANNOUNCED_S = 10.0
# It is believed this long beyond the time to accept it, if its worker does not list it as accepted: its router may be
# gone, and would not take it back.
UNLISTED_S = 2.0
# Each holds its prompt until its first frame; beyond it new ones are refused.
MAX_IN_HAND = 20_000
ADDRESS_KEY_BYTES = 16
# Ended requests whose late attempts are told to stop.
REMEMBER_ANSWERED = 10_000


class Desk:
    """What the requests of this router share."""

    def __init__(self, rt: Runtime, *, journal_key: bytes) -> None:
        self.rt = rt
        self.bus = rt.bus
        self.clock = rt.clock
        self.settings = rt.config.router
        self.fleet = Fleet(rt.config.router.suspect_after_s, rt.config.router.lost_after_s)
        self.books = Books(self.fleet)
        self.cancels = Cancels()
        self.addresses = Addresses(rt.bus.inbox_prefix, secrets.token_bytes(ADDRESS_KEY_BYTES))
        self.metrics = Metrics(rt.registry, rt.config.models)
        self.warming = Warming(rt, self.fleet, self.metrics)
        rt.registry.register(WorkerGauges(self.fleet, self.clock.now))
        self.records = Outbox(rt.bus, self.not_recorded)
        self.choices = Choices(rt, self.fleet, self.books, self.metrics, self._record, journal_key)
        self.in_hand: dict[str, Request] = {}
        self.by_label: dict[tuple[str, str], dict[str, Request]] = {}
        self.answered: dict[str, None] = {}
        # Who waits for a late worker, by what the worker has to be: (model, serves).
        self.waiting: dict[tuple[str, str], dict[str, Request]] = {}
        self.clients_are_back_at = -math.inf
        self.empty = asyncio.Event()
        self.empty.set()

    async def serve(self, route: Route) -> None:
        """A request from arrival to end. Never raises: what goes wrong with one is no other's business."""
        if route.request_id in self.in_hand:
            self.rt.log.warning("a request came twice", extra={"fields": {"request_id": route.request_id}})
            return
        request = Request(self, route)
        label = (route.tenant, route.client_request_id)
        if label in self.by_label:
            # The latest alone: whoever gives all requests one id must not make each be compared with all.
            other = self.by_label[label][next(reversed(self.by_label[label]))]
            if request.is_same_as(other):
                older = request if request.sent_at < other.sent_at else other
                older.post(older.attempts.sent_again)
        self.in_hand[route.request_id] = request
        self.by_label.setdefault(label, {})[route.request_id] = request
        self.empty.clear()
        try:
            await request.run()
        finally:
            del self.in_hand[route.request_id]
            labelled = self.by_label[label]
            del labelled[route.request_id]
            if not labelled:
                del self.by_label[label]
            self.waiting.get((route.model, route.serves), {}).pop(route.request_id, None)
            if not self.in_hand:
                self.empty.set()

    def lost(self, lost: Lost) -> None:
        """A life of a worker is over: whoever waits for it should know."""
        for request in self.in_hand.values():
            if request.attempts.worker == lost.worker:
                request.post(functools.partial(request.attempts.lost, lost.worker, lost.incarnation))

    def suspect(self, worker: str) -> None:
        """A worker went silent: the clients of what it has in hand hear of us until it is back or lost."""
        for request in self.in_hand.values():
            if request.attempts.worker == worker:
                request.keep_alive()

    def look_around(self) -> None:
        """Wakes those who wait for late workers of a model once one is there, or none is to be waited for."""
        now = self.clock.now()
        for (model, serves), requests in list(self.waiting.items()):
            survey = self.fleet.survey(model, serves, now)
            if survey.available or not survey.late:
                del self.waiting[model, serves]
                for request in requests.values():
                    request.post(request.attempts.look)

    def cancelled(self, tenant: str, client_request_id: str) -> None:
        self.cancels.heard(tenant, client_request_id, self.clock.now())
        for request in self.by_label.get((tenant, client_request_id), {}).values():
            request.post(request.attempts.cancel)

    def reconnected(self) -> None:
        """The bus is back."""
        now = self.clock.now()
        self.fleet.back(now)
        self.clients_are_back_at = now + CLIENTS_BACK_S

    def client_gone(self, request: "Request") -> None:
        """The server found nobody at its inbox."""
        if self.clock.now() >= self.clients_are_back_at:
            request.post(request.hear_nobody)

    def outcome(self, outcome: Outcome) -> None:
        """An attempt of some router's ended."""
        if outcome.decision == WARM:
            self.warming.outcome(outcome)
            return
        request = self.in_hand.get(outcome.request_id)
        if request is not None and not request.attempts.was_sent(outcome.attempt, outcome.worker):
            # A bridge that had an earlier attempt knows the request's id, and may say what it likes of later ones.
            self.metrics.foreign_answers.inc()
            return
        now = self.clock.now()
        around = self.fleet.surroundings(outcome.request_id, outcome.attempt, outcome.worker, outcome.ttft_ms)
        if around is not None:
            self.metrics.prefill_samples.labels(self.choices.learner.hear(outcome, around, now)).inc()
        self.fleet.settle(outcome.request_id, outcome.attempt, now)
        if request is not None:
            request.post(functools.partial(request.hear_outcome, outcome))

    def dispatched(self, announced: Dispatched) -> None:
        """Another router sent, or took back, a dispatch."""
        if announced.renews:
            # The directory's business: reports of its worker's load contain it.
            return
        self.warming.announced(announced)
        if announced.is_warming:
            return
        now = self.clock.now()
        until = now + max(0.0, announced.expires_at - self.clock.wall())
        self.books.announced(announced, now, until, now + self.settings.accept_timeout_ms / 1000 + UNLISTED_S)

    def remember_answered(self, request_id: str) -> None:
        self.answered[request_id] = None
        if len(self.answered) > REMEMBER_ANSWERED:
            del self.answered[next(iter(self.answered))]

    def abort(self, worker: str, request_id: str, attempt: int, *, reply: str = "") -> None:
        """Tells a worker to stop an attempt; its answer, if wanted, goes to `reply`."""
        payload = ABORT.encode(Abort(VERSION, request_id, attempt))
        with contextlib.suppress(BusUnavailable):
            self.bus.send(subjects.control(worker, "abort"), payload, reply=reply)

    def _record(self, record: DecisionRecord) -> None:
        msg_id = f"decision-{record.request_id}-{self.addresses.name(record.request_id, record.attempt)}"
        self.records.put(subjects.journal(record.request_id), DECISION.encode(record), msg_id)

    def not_recorded(self, error: PrefixbusError, subject: str) -> None:
        self.metrics.journal_lost.inc()
        self.rt.caught(error, "a decision or an end is not recorded", subject=subject)

    def idle(self) -> list[str]:
        """What is left when all requests have ended: nothing, or the books do not balance."""
        return [*self.in_hand, *self.fleet.idle()]


class Request:
    """A request in hand."""

    def __init__(self, desk: Desk, route: Route) -> None:
        self.attempts = Attempts(desk.settings.max_attempts, patience_s=desk.settings.lost_after_s)
        self._desk = desk
        self._route = route
        self._came_at = desk.clock.now()
        self._mailbox: deque[Callable[[], Effects]] = deque()
        self._mail = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._choice = Choice(desk.choices, route, self.attempts)
        self._stale: Accept | None = None
        self._code = ""
        self._announced = 0
        # The attempt whose bridge said that it had ended.
        self._said_ended = 0
        # How long after its last question its worker is asked again whether it has the attempt.
        self._doubt_s = 0.0

    @property
    def sent_at(self) -> tuple[int, int]:
        """Orders the sendings of one request. Clients that number them are believed: a tokenizer that was stopped dates
        what it finds in its backlog later than what was sent since."""
        return self._route.sending, self._route.created_at

    def is_same_as(self, other: "Request") -> bool:
        """Whether they are two sendings of one request. An id alone does not say so: some clients have but one. One
        that is streaming is heard by its client, and stays as it is."""
        ours, theirs = self._route, other._route
        if ours.reply == theirs.reply or not theirs.job:
            return False
        if (ours.model, ours.ns_id, ours.prompt_tokens) != (theirs.model, theirs.ns_id, theirs.prompt_tokens):
            return False
        try:
            one, two = JOB.decode(ours.job), JOB.decode(theirs.job)
        except PrefixbusError:
            return False
        return (one.kind, one.params, one.chat, one.tokens) == (two.kind, two.params, two.chat, two.tokens)

    def post(self, event: Callable[[], Effects]) -> None:
        """`event` tells the attempts what was heard; it is called in its turn."""
        self._mailbox.append(event)
        self._mail.set()

    def hear_accept(self, accept: Accept) -> Effects:
        """A bridge's word on an attempt: taken, refused, given back, or about to publish its first frame."""
        foreign = self._of_another_life(accept.attempt, accept)
        if foreign is not None:
            return foreign
        self._stale = accept
        if accept.refused == STARTED:
            effects = self.attempts.started(accept.attempt)
            if self.attempts.state is State.STREAMING:
                # Nobody else will be asked: a long answer should not hold its prompt here.
                self._route = self._choice.route = msgspec.structs.replace(self._route, keys=b"", job=b"")
        elif accept.refused:
            self._desk.warming.refused(self._route.ns_id, accept.refused)
            if accept.refused in (QUEUE_TOO_LONG, WAITED):
                now = self._desk.clock.now()
                self._desk.fleet.correct(accept.worker, accept.incarnation, accept.queue_ms, now)
            elif accept.refused == STALE_HIT:
                self._choice.correct(accept.worker, accept.held_blocks)
                if accept.attempt == self.attempts.attempt:
                    self._choice.found(accept.held_blocks)
            return self.attempts.refused(accept.attempt, accept.refused)
        else:
            effects = self.attempts.accepted(accept.attempt)
        if self.attempts.state in (State.ACCEPTED, State.STREAMING):
            self._stop("silent")
            if not self._is_ours_to_keep_alive():
                self._stop("keepalive")
            self._doubt(DOUBT_S)
        return effects

    def _of_another_life(self, attempt: int, said: Accept | ControlReply) -> Effects | None:
        foreign = self.attempts.of_another_life(attempt, said.worker, said.incarnation)
        if foreign is not None:
            self._desk.metrics.foreign_answers.inc()
        return foreign

    def hear_withdrawn(self, attempt: int, reply: ControlReply) -> Effects:
        """A bridge that knows how far the attempt was is the one that had it; that it was not begun is believed of the
        addressed life alone."""
        foreign = None if reply.error else self._of_another_life(attempt, reply)
        if foreign is not None:
            return foreign
        return self.attempts.withdrawn(attempt, reply.error)

    def hear_status(self, attempt: int, reply: ControlReply) -> Effects:
        """What the bridge says of an attempt of which nothing was heard for long."""
        foreign = None if reply.error else self._of_another_life(attempt, reply)
        if foreign is not None:
            return foreign
        if reply.error == ENDED and self._said_ended != attempt:
            # Its outcome may be on its way.
            self._said_ended = attempt
            self._doubt(OUTCOME_LATE_S)
            return ()
        if reply.error == RUNNING:
            self._renew(attempt)
        effects = self.attempts.found(attempt, reply.error)
        if effects:
            self._desk.metrics.ends_unheard.inc()
        return effects

    def hear_nobody(self) -> Effects:
        """Nobody waits for the answer any more."""
        was_wanted = self.attempts.error is None
        effects = self.attempts.client_gone()
        if was_wanted and self.attempts.error is not None:
            self._desk.metrics.clients_gone.inc()
        return effects

    def hear_outcome(self, outcome: Outcome) -> Effects:
        if not self.attempts.ended:
            self._code = outcome.error if outcome.status != "ok" else ""
        choice = self._choice
        decision = choice.decision
        if outcome.attempt == self.attempts.attempt and outcome.cached_tokens is not None and decision is not None:
            saved_ms = gains.saved_prefill_ms(decision, outcome.prompt_tokens, outcome.cached_tokens)
            self._desk.metrics.gained(self._of_class(), saved_ms, gains.extra_queue_ms(decision))
            choice.found(outcome.cached_tokens // choice.block_size)
        return self.attempts.outcome(outcome.attempt)

    async def run(self) -> None:
        remaining_s = self._route.deadline_at - self._desk.clock.wall()
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + max(0.0, remaining_s) + HARD_LIMIT_S):
                self._start("deadline", max(0.0, remaining_s), self._deadline_is_due)
                self._start("keepalive", FIRST_KEEPALIVE_S, self._keepalive_is_due)
                await self._live(remaining_s)
        except Exception as exc:  # the edge: one request's failure ends that request
            self._desk.rt.caught(exc, "a request failed", request_id=self._route.request_id)
            self.attempts.error = self.attempts.error or PrefixbusError()
        finally:
            self._stop(*list(self._timers))
            if not self.attempts.ended:
                await self._let_go()
            for reason in self.attempts.failovers:
                self._desk.metrics.failovers.labels(reason).inc()
            choice = self._choice
            name = choice.decision.name if choice.decision else ""
            self._desk.metrics.ended(self._of_class(), name, self._code, choice.left_because)

    async def _live(self, remaining_s: float) -> None:
        route, desk = self._route, self._desk
        if remaining_s <= 0:
            self.post(self.attempts.deadline)
        elif len(desk.in_hand) > MAX_IN_HAND:
            self.post(functools.partial(self.attempts.nobody, Overloaded()))
        elif desk.cancels.covers(route.tenant, route.client_request_id, desk.clock.now()):
            self.post(self.attempts.cancel)
        else:
            await self._choice.look_up()
        await self._read_mail()
        if not self.attempts.ended:
            await self._perform((Effect.CHOOSE,))
        while not self.attempts.ended:
            self._mail.clear()
            await self._read_mail()
            if not self.attempts.ended:
                await self._mail.wait()

    async def _read_mail(self) -> None:
        while self._mailbox:
            await self._perform(self._mailbox.popleft()())

    async def _perform(self, effects: Effects) -> None:
        to_do = deque(effects)
        while to_do:
            match to_do.popleft():
                case Effect.CHOOSE:
                    to_do.extend(self._choice.make())
                case Effect.WAIT:
                    self._wait()
                case Effect.PAUSE:
                    seconds = pause_s(self._route.request_id, self.attempts.attempt)
                    self._start("pause", seconds, lambda: self.post(self.attempts.resume))
                case Effect.SEND:
                    to_do.extend(self._send())
                case Effect.SEND_AGAIN:
                    self._send_again()
                case Effect.WITHDRAW:
                    # That nobody listens there is an answer, too: a bridge that was cut off gives up what it has not
                    # started.
                    self._stop_and_ask({self.attempts.attempt: self.attempts.worker})
                case Effect.TAKE_BACK:
                    self._take_back()
                case Effect.RELEASE:
                    self._desk.fleet.settle(self._route.request_id, self.attempts.attempt, self._desk.clock.now())
                case Effect.CLAIM:
                    to_do.extend(self.attempts.claimed(await self._claim()))
                case Effect.ASK:
                    self._stop_and_ask(self.attempts.doubtful)
                case Effect.ANSWER:
                    error = self._answer()
                    self._desk.records.put(*self._record_of_end(error))
                case Effect.ABORT_STALE:
                    if self._stale is not None:
                        self._desk.abort(self._stale.worker, self._stale.request_id, self._stale.attempt)
                case Effect.ABORT:
                    self._desk.abort(self.attempts.worker, self._route.request_id, self.attempts.attempt)

    def _wait(self) -> None:
        """The desk looks around; past the bound the request does so itself."""
        route, desk, waits_until = self._route, self._desk, self.attempts.waits_until
        assert waits_until is not None
        desk.metrics.waits.inc()
        desk.waiting.setdefault((route.model, route.serves), {})[route.request_id] = self
        # Not a hair too early: it would wait once more.
        self._start("look", waits_until - desk.clock.now() + 0.01, lambda: self.post(self.attempts.look))
        self.keep_alive()

    def _send(self) -> Effects:
        """Books, dispatches, and announces what was decided, in this order: no message can overtake its booking."""
        route, desk, attempts, decision = self._route, self._desk, self.attempts, self._choice.decision
        assert decision is not None
        now, wall = desk.clock.now(), desk.clock.wall()
        left_s = route.deadline_at - wall
        desk.books.sent(
            route.request_id,
            attempts.attempt,
            attempts.worker,
            attempts.incarnation,
            decision.work_ms,
            route.ns_id,
            route.keys,
            now,
            now + left_s + HARD_LIMIT_S,
        )
        return self._dispatch(decision)

    def _dispatch(self, decision: Decision) -> Effects:
        """Sends it, and announces it once; what else there is to do, if it could not be sent."""
        route, desk, attempts = self._route, self._desk, self.attempts
        wall = desk.clock.wall()
        accept_s = desk.settings.accept_timeout_ms / 1000
        dispatch = Dispatch(
            v=VERSION,
            request_id=route.request_id,
            attempt=attempts.attempt,
            incarnation=attempts.incarnation,
            max_queue_ms=decision.max_queue_ms if attempts.may_rechoose else NO_LIMIT_MS,
            accept_by_at=min(wall + accept_s, route.deadline_at),
            prefill_ms=decision.work_ms,
            predicted_tokens=decision.predicted_tokens,
            decision=decision.name,
            ns_id=route.ns_id,
            job=route.job,
            is_warm=decision.is_warm,
            # There is nobody to choose anew after the last one.
            max_wait_ms=0.0 if attempts.is_last else decision.max_wait_ms,
            min_held_blocks=decision.min_held_blocks if attempts.may_rechoose else 0,
        )
        self._start("silent", accept_s, functools.partial(self._silence_is_due, attempts.attempt))
        self._stop("look")
        self.keep_alive()
        reply = desk.addresses.of(DISPATCHES, route.request_id, attempts.attempt)
        try:
            desk.bus.send(subjects.work(attempts.worker), DISPATCH.encode(dispatch), reply=reply)
        except BusUnavailable:
            return attempts.unreachable(attempts.attempt)
        except PrefixbusError as exc:
            attempts.error = exc
            return attempts.unreachable(attempts.attempt)
        if self._announced < attempts.attempt:
            self._announced = attempts.attempt
            to_first_token_s = decision.ranking[0].ttft_ms / 1000
            believed_s = min(route.deadline_at - wall, 2 * to_first_token_s + ANNOUNCED_S)
            self._announce(attempts.worker, wall + believed_s, route.keys)
            if attempts.attempt == 1:
                desk.warming.sent(route, self._choice.held_blocks)
        return ()

    def _send_again(self) -> None:
        attempt = self.attempts.attempt
        self._desk.metrics.unheard.inc()
        self._stop("silent")
        self._start("again", SEND_AGAIN_S, lambda: self.post(functools.partial(self._again, attempt)))

    def _again(self, attempt: int) -> Effects:
        """The dispatch that nobody heard, once more, unless its time is over."""
        attempts, decision = self.attempts, self._choice.decision
        if decision is None or attempts.state is not State.OFFERED or attempts.attempt != attempt:
            return ()
        return self._dispatch(decision)

    def _stop_and_ask(self, workers: dict[int, str]) -> None:
        """Asks each attempt's worker to abort it and say how far it was."""
        desk, request_id = self._desk, self._route.request_id
        timeout_s = desk.settings.accept_timeout_ms / 1000
        self._start("silent", timeout_s, functools.partial(self._silence_is_due, self.attempts.attempt))
        for attempt, worker in workers.items():
            desk.abort(worker, request_id, attempt, reply=desk.addresses.of(ABORTS, request_id, attempt))

    async def _claim(self) -> bool:
        """Whether the router may end the request: it has the claim now, or nobody knows who has. Asked only where an
        attempt that was given up may be running; all other ends need no claim."""
        subject = subjects.claim(self._route.request_id)
        payload = f"{self._desk.rt.instance} {self.attempts.attempt}".encode()
        try:
            await self._desk.bus.publish_acked(subject, payload, expect_last_seq=0, timeout_s=CLAIM_S)
        except WrongSequence:
            return False
        except BusUnavailable as exc:
            self._desk.rt.caught(exc, "an end could not be claimed", request_id=self._route.request_id)
        return True

    def _take_back(self) -> None:
        self._stop("silent", "again", "doubt")
        now = self._desk.clock.now()
        self._desk.books.taken_back(self._route.request_id, self.attempts.attempt, now)
        self._announce("", 0.0, b"")

    def _renew(self, attempt: int) -> None:
        """Its worker has it still: what it will leave behind is announced until the next question is answered.

        How long it waits for its turn, or for KV memory, was not known when it was dispatched."""
        attempts, wall = self.attempts, self._desk.clock.wall()
        if attempts.attempt == attempt and attempts.state is State.ACCEPTED:
            believed_s = min(self._route.deadline_at - wall, self._doubt_s + ANNOUNCED_S)
            self._announce(attempts.worker, wall + believed_s, self._route.keys, renews=True)

    def _announce(self, worker: str, expires_at: float, keys: bytes, *, renews: bool = False) -> None:
        choice = self._choice
        announced = Dispatched(
            v=VERSION,
            request_id=self._route.request_id,
            attempt=self.attempts.attempt,
            router=self._desk.rt.instance,
            worker=worker,
            incarnation=self.attempts.incarnation,
            prefill_ms=choice.decision.work_ms if choice.decision else 0.0,
            ns_id=self._route.ns_id,
            keys=keys,
            expires_at=expires_at,
            prefix_class=self._route.prefix_class,
            held_blocks=choice.held_blocks,
            shared_blocks=choice.shared_blocks,
            renews=renews,
        )
        with contextlib.suppress(BusUnavailable):
            self._desk.bus.send(subjects.DISPATCHED, DISPATCHED.encode(announced))

    def _answer(self) -> PrefixbusError:
        """The final frame; returns the error the request ends with."""
        error = self.attempts.error or PrefixbusError()
        self._code = error.code
        self._desk.remember_answered(self._route.request_id)
        attempt = self.attempts.attempt or None
        headers = frames.error_headers(error, self._route.client_request_id, attempt=attempt)
        if self.attempts.published:
            # Chunks went out before; only the bridge knew how many.
            del headers[subjects.HEADER_SEQ]
            headers |= frames.resume_headers(error, resumable=self._route.resumable)
        if isinstance(error, Unavailable):
            headers["Retry-After"] = str(self._choice.retry_after_s(error))
        try:
            self._desk.bus.send(self._route.reply, b"", headers=headers)
        except BusUnavailable as exc:
            self._desk.rt.caught(exc, "an answer could not be sent", request_id=self._route.request_id)
        return error

    def _record_of_end(self, error: PrefixbusError) -> tuple[str, bytes, str]:
        """Subject, outcome and message id. A bridge that was taken for lost and ended this very attempt, too, has used
        the same id: the journal keeps the first."""
        route, desk = self._route, self._desk
        # The job of an answer that had begun is gone.
        traceparent = ""
        if route.job:
            with contextlib.suppress(MessageInvalid):
                traceparent = JOB.decode(route.job).traceparent
        outcome = journal.ending(
            route,
            self.attempts,
            self._choice.decision,
            error,
            total_ms=1000 * (desk.clock.now() - self._came_at),
            ended_at=desk.clock.wall(),
            traceparent=traceparent,
        )
        msg_id = subjects.outcome_id(desk.addresses.of(DISPATCHES, route.request_id, outcome.attempt))
        return subjects.ended(route.request_id), OUTCOME.encode(outcome), msg_id

    async def _let_go(self) -> None:
        """The request's task is being cancelled, or failed: nobody waits in vain, and nobody counts on what will not
        be."""
        attempts = self.attempts
        self._code = self._code or Unavailable.code
        if attempts.state in (State.ACCEPTED, State.STREAMING):
            return  # its bridge ends it, and the outcome settles it
        attempts.error = attempts.error or Unavailable("The router is going away.")
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1.0):
            if attempts.state in (State.OFFERED, State.WITHDRAWING):
                self._desk.abort(attempts.worker, self._route.request_id, attempts.attempt)
                self._take_back()
                # Who does not hear that should not begin; who has begun is believed to hear it.
                await self._claim()
            elif attempts.doubtful:
                await self._claim()
            subject, payload, msg_id = self._record_of_end(self._answer())
            # Those who deliver what is put in the outbox may be ending, too.
            try:
                await self._desk.bus.publish_acked(subject, payload, msg_id=msg_id)
            except BusUnavailable as exc:
                self._desk.not_recorded(exc, subject)

    def _start(self, timer: str, seconds: float, due: Callable[[], None]) -> None:
        self._stop(timer)
        self._timers[timer] = asyncio.get_running_loop().call_later(seconds, due)

    def _stop(self, *timers: str) -> None:
        for timer in timers:
            handle = self._timers.pop(timer, None)
            if handle is not None:
                handle.cancel()

    def _doubt(self, seconds: float) -> None:
        self._doubt_s = seconds
        self._start("doubt", seconds, functools.partial(self._doubt_is_due, self.attempts.attempt, seconds))

    def _doubt_is_due(self, attempt: int, seconds: float) -> None:
        """Ends are heard at most once: asks the bridge whether this one was missed."""
        attempts, desk = self.attempts, self._desk
        if attempts.attempt != attempt or attempts.state not in (State.ACCEPTED, State.STREAMING):
            return
        self._doubt(2 * seconds)
        request_id = self._route.request_id
        with contextlib.suppress(BusUnavailable):
            desk.bus.send(
                subjects.control(attempts.worker, "status"),
                ABORT.encode(Abort(VERSION, request_id, attempt)),
                reply=desk.addresses.of(STATUSES, request_id, attempt),
            )

    def _silence_is_due(self, attempt: int) -> None:
        self.post(functools.partial(self.attempts.silent, attempt))

    def _deadline_is_due(self) -> None:
        if self.attempts.state in (State.ACCEPTED, State.STREAMING) and self.attempts.error is None:
            # The bridge keeps the same deadline, and ends its answers itself.
            self._start("deadline", DEADLINE_GRACE_S, functools.partial(self.post, self.attempts.deadline))
        else:
            self.post(self.attempts.deadline)

    def keep_alive(self) -> None:
        """As long as it is ours to do so."""
        if "keepalive" not in self._timers and self._is_ours_to_keep_alive():
            self._start("keepalive", FIRST_KEEPALIVE_S, self._keepalive_is_due)

    def _is_ours_to_keep_alive(self) -> bool:
        """The bridge does, once it has accepted; while it is silent we do: its lease is as long as clients wait for a
        frame, and they should not give up just before another worker is asked or the answer is ended."""
        attempts = self.attempts
        if not attempts.published and attempts.state in (State.CHOOSING, State.OFFERED, State.WITHDRAWING):
            return True
        if attempts.state in (State.CLAIMING, State.ASKING):
            return True
        return not attempts.ended and self._desk.fleet.is_silent(
            attempts.worker, attempts.incarnation, self._desk.clock.now()
        )

    def _keepalive_is_due(self) -> None:
        if not self._is_ours_to_keep_alive():
            self._stop("keepalive")
            return
        self._start("keepalive", KEEPALIVE_S, self._keepalive_is_due)
        route = self._route
        body = frames.keepalive(route.kind, asked_name(route.model, route.adapter), route.request_id, route.created_at)
        headers = frames.keepalive_headers(route.client_request_id)
        nobody = self._desk.addresses.of(CLIENTS, route.request_id, self.attempts.attempt)
        try:
            self._desk.bus.send(route.reply, body, headers=headers, reply=nobody)
        except PrefixbusError as exc:
            self._desk.rt.caught(exc, "a keep-alive could not be sent", request_id=route.request_id)
            return
        self._desk.metrics.keepalives.inc()

    def _of_class(self) -> OfClass:
        route = self._route
        return self._desk.metrics.of_class(route.model, self._choice.pool, route.template_version, route.prefix_class)

    def __repr__(self) -> str:
        return f"<Request {self._route.request_id} {self.attempts!r}>"
