"""The bridge's table of requests: who is let in, how much prefill work that is, and who is in what part of its life.

A dispatch is started only if the queue is what the router thinks it is; a repeated one gets the answer that the first
one got; a cancel may come before what it cancels. Who is let in may have to wait for his turn with the engine
(waiting.py).

The queue that is told is all prefill work ahead, the engine's and that of everybody who waits. A newcomer of a tenant
that has little here will wait for less of it, since turns are fair between tenants. That is not told: how much less
would depend on who comes after him, and a router that believed it would send more to a busy worker than it should.

Owns: the life table, the queue's estimate, memory of answers and cancels (bounded in number and time).
Must not know: NATS, the engine, what a request says.
Units: `now` monotonic seconds, `wall` Unix seconds, queue and prefill in ms (kept as whole microseconds: sums stay
exact).   Source: DESIGN 6 (bounded start) and 7."""

import enum
import math
from typing import TypeVar

import msgspec

from ..bus.cancels import Cancels
from .waiting import Ahead, Waiting

K = TypeVar("K")
V = TypeVar("V")


class Phase(enum.Enum):
    ACCEPTED = "accepted"
    """The engine does not have it yet."""
    PREFILLING = "prefilling"
    """The engine has it and has not answered yet."""
    STREAMING = "streaming"
    ENDED = "ended"


class Event(enum.Enum):
    SUBMIT = "submit"
    FIRST_TOKEN = "first_token"
    END = "end"


# (phase, event) -> next phase; a pair that is not here is a defect and raises.
LIFE = {
    (Phase.ACCEPTED, Event.SUBMIT): Phase.PREFILLING,
    (Phase.ACCEPTED, Event.END): Phase.ENDED,
    (Phase.PREFILLING, Event.FIRST_TOKEN): Phase.STREAMING,
    (Phase.PREFILLING, Event.END): Phase.ENDED,
    (Phase.STREAMING, Event.END): Phase.ENDED,
}


class Left(enum.Enum):
    """How far an attempt's answer was when it left; the values are what the router hears."""

    ENDED = "ended"
    """Its client was told the end, or is gone."""
    GIVEN_BACK = ""
    """Nothing of it was published, and nothing will be."""
    BROKEN = "started"
    """Some of it was published, and nothing more will be: the router ends it."""


# Why a dispatch was refused, besides the codes in bus.errors (cancelled, deadline_exceeded).
WAITED = "waited"
"""Not a refusal but a giving back: its turn has not come within the time that its hit is worth."""
WRONG_INCARNATION = "wrong_incarnation"
TOO_LATE = "too_late"
QUEUE_TOO_LONG = "queue_too_long"
STALE_HIT = "stale_hit"
NO_SLOT = "no_slot"
DRAINING = "draining"
SUPERSEDED = "superseded"
ALREADY_STREAMING = "already_streaming"
GIVEN_BACK = "given_back"
CANCELLED = "cancelled"
RUNNING = "running"
DEADLINE_EXCEEDED = "deadline_exceeded"

# Two of the largest steps that engines take by default.
PREFILL_WINDOW_TOKENS = 16384

# Longer than a router goes on trying.
ANSWERS_KEPT_S = 60.0
ANSWERS_KEPT = 8192
# No estimate is believed beyond this: an hour of prefill.
_PREFILL_MAX_MS = 3_600_000.0


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatch asks for, in the terms of this table. `uncached_tokens` of the prompt have no KV here.

    `held_blocks` of it are in the cache, `expected_blocks` with what requests in hand are about to add; it is meant for
    a worker that has `min_held_blocks`."""

    request_id: str
    attempt: int
    tenant: str
    client_request_id: str
    incarnation: int
    prefill_ms: float
    prompt_tokens: int
    held_blocks: int
    max_queue_ms: float
    accept_by_at: float
    deadline_at: float
    uncached_tokens: int = 1
    is_warm: bool = False
    max_wait_ms: float = 0.0
    min_held_blocks: int = 0
    expected_blocks: int = 0


def charged_ms(foreseen_ms: float, prompt_tokens: int, foreseen_tokens: int, expected_tokens: int) -> float:
    """The prefill work that a request adds here, if its router foresaw `foreseen_ms` and that `foreseen_tokens` of the
    prompt would be found, and `expected_tokens` are: they are held, or requests in hand are about to add them.

    Routers that send siblings in one moment know nothing of each other's, and foresee the whole prompt for each. It is
    computed once, and a queue that counted it for each would send the rest of the burst to compute it elsewhere. Work
    is all but proportional to tokens; where less is found than foreseen the router's word stands."""
    left = max(1, prompt_tokens - expected_tokens)
    return foreseen_ms * min(1.0, left / max(1, prompt_tokens - foreseen_tokens))


class Ticket:
    """A request that was let in. `has_turn`: it may go to the engine; `begin_by`: if it may not by then, it is given
    back; `head_at`: when all prefill work that went there before it was done; `ahead`: what was given to the engine
    while it waited for its turn."""

    __slots__ = (
        "accepted_at",
        "ahead",
        "attempt",
        "begin_by",
        "client_request_id",
        "first_token_at",
        "has_turn",
        "head_at",
        "held_blocks",
        "phase",
        "prefill_us",
        "prompt_tokens",
        "request_id",
        "tenant",
    )

    def __init__(self, offer: Offer, now: float) -> None:
        self.request_id = offer.request_id
        self.attempt = offer.attempt
        self.tenant = offer.tenant
        self.client_request_id = offer.client_request_id
        self.prompt_tokens = offer.prompt_tokens
        self.held_blocks = offer.held_blocks
        self.prefill_us = _microseconds(offer.prefill_ms)
        self.accepted_at = now
        self.begin_by = now + offer.max_wait_ms / 1000 if offer.max_wait_ms > 0 else math.inf
        self.phase = Phase.ACCEPTED
        self.has_turn = False
        self.ahead = Ahead(0, 0)
        self.head_at: float | None = None
        self.first_token_at: float | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.request_id}/{self.attempt} {self.phase.value}>"

    def patience_s(self, now: float) -> float:
        """How much longer it may wait for its turn, for ever if without a bound; 0 or less: it is to be given back."""
        return math.inf if self.has_turn else self.begin_by - now

    def queue_wait_ms(self) -> float | None:
        """How long others' prefills came first; None if it has no first token yet."""
        if self.first_token_at is None:
            return None
        began = self.head_at if self.head_at is not None else self.first_token_at
        return (began - self.accepted_at) * 1000


class Verdict(msgspec.Struct, frozen=True):
    """The answer to an offer. `start` is the new ticket, None if there is nothing to start (refused, or a repeat);
    `stop` an earlier attempt of the same request, which must not go on."""

    refused: str
    queue_ms: float
    held_blocks: int
    start: Ticket | None = None
    stop: Ticket | None = None


class _Answer(msgspec.Struct, frozen=True):
    attempt: int
    refused: str
    held_blocks: int
    at: float
    left: Left | None = None


# What a repeat of an attempt that has left is answered.
_REFUSED_SINCE = {Left.ENDED: "", Left.GIVEN_BACK: GIVEN_BACK, Left.BROKEN: ALREADY_STREAMING}


class Admission:
    """All of one worker's requests. `incarnation` 0 takes nothing."""

    def __init__(self, slots: int, window_tokens: int = PREFILL_WINDOW_TOKENS, reserved_slots: int = 0) -> None:
        self.slots = slots
        self.reserved_slots = reserved_slots
        """Of them, for requests that are not there for their hit."""
        self.incarnation = 0
        self.draining = False
        self._active: dict[str, Ticket] = {}
        # Those whose turn has come and that have no first token, in that order.
        self._begun: dict[str, Ticket] = {}
        self._begun_us = 0
        self._line = Waiting(window_tokens)
        self._queued_us = 0
        self._streaming = 0
        self._prompt_tokens = 0
        self._answers: dict[str, _Answer] = {}
        self.cancels = Cancels()

    def __repr__(self) -> str:
        return f"<Admission {self.running} running, {self.waiting} waiting of {self.slots}>"

    # --- questions ---

    @property
    def running(self) -> int:
        """Requests that have their first token."""
        return self._streaming

    @property
    def waiting(self) -> int:
        """Requests that do not."""
        return len(self._begun) + len(self._line)

    @property
    def held_back(self) -> int:
        """Those of them whose turn has not come."""
        return len(self._line)

    @property
    def busy(self) -> bool:
        return bool(self._active)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests here: the least KV they pin."""
        return self._prompt_tokens

    def tickets(self) -> list[Ticket]:
        return list(self._active.values())

    def queue_ms(self, now: float) -> float:
        """Prefill work ahead of a newcomer: all estimates, less the time that those with the engine have had.

        An engine computes several of them in one step, so they count together: while the first one's step goes on, the
        second one's work is being done as well. Counted one by one, the queue stood still for the rest of each step,
        and routers that thought it shorter were refused for nothing."""
        for head in self._begun.values():
            began = head.head_at if head.head_at is not None else now
            had_us = min(self._begun_us, max(0, int((now - began) * 1e6)))
            return (self._queued_us - had_us) / 1000
        return self._queued_us / 1000

    # --- what happens ---

    def offer(self, offer: Offer, now: float, wall: float) -> Verdict:
        """Whether to take it. What was answered before is answered again, and nothing is started twice."""
        repeated = self._answered_before(offer, now)
        if repeated is not None:
            return repeated
        refused = self._why_not(offer, now, wall)
        earlier = self._active.get(offer.request_id)
        if not refused and earlier is not None:
            if earlier.phase is Phase.STREAMING:
                refused = ALREADY_STREAMING
            else:
                self.end(earlier, now)
        self._note(offer.request_id, offer.attempt, refused, offer.held_blocks, now)
        queue_ms = self.queue_ms(now)
        if refused:
            return Verdict(refused, queue_ms, offer.expected_blocks if refused == STALE_HIT else offer.held_blocks)
        ticket = Ticket(offer, now)
        self._active[ticket.request_id] = ticket
        self._queued_us += ticket.prefill_us
        self._prompt_tokens += ticket.prompt_tokens
        if self._line.come(ticket.request_id, offer.tenant, offer.is_warm, offer.uncached_tokens):
            self._give_turn(ticket, now)
        return Verdict("", queue_ms, offer.held_blocks, ticket, earlier)

    def next_up(self) -> Ticket | None:
        """Whose turn it is once there is room, if somebody waits."""
        request_id = self._line.next_up()
        return None if request_id is None else self._active[request_id]

    def give_turn(self, uncached_tokens: int, now: float) -> bool:
        """`next_up` may go to the engine, with the tokens that have no KV by now; False if there is no room yet."""
        ticket = self.next_up()
        if ticket is None or (ahead := self._line.begin_next(uncached_tokens)) is None:
            return False
        ticket.ahead = ahead
        self._give_turn(ticket, now)
        return True

    def submitted(self, ticket: Ticket) -> None:
        self._move(ticket, Event.SUBMIT)

    def first_token(self, ticket: Ticket, now: float) -> None:
        self._move(ticket, Event.FIRST_TOKEN)
        ticket.first_token_at = now
        self._streaming += 1
        self._leave_queue(ticket, now)

    def end(self, ticket: Ticket, now: float, left: Left = Left.ENDED) -> None:
        """Off the books. :raises KeyError: it has ended already."""
        before = ticket.phase
        self._move(ticket, Event.END)
        del self._active[ticket.request_id]
        self.amend(ticket, left, now)
        self._prompt_tokens -= ticket.prompt_tokens
        if before is Phase.STREAMING:
            self._streaming -= 1
        else:
            self._leave_queue(ticket, now)

    def cancel(self, tenant: str, client_request_id: str, now: float) -> list[Ticket]:
        """The running requests that this cancels; one that comes later will be refused, as long as the cancel is
        remembered."""
        self.cancels.heard(tenant, client_request_id, now)
        return [
            ticket
            for ticket in self._active.values()
            if ticket.tenant == tenant and ticket.client_request_id == client_request_id
        ]

    def stop_attempt(self, request_id: str, attempt: int, now: float) -> Ticket | None:
        """The running attempt to stop, if it is here; if not, it will be refused when it comes."""
        ticket = self._active.get(request_id)
        if ticket is not None:
            return ticket if ticket.attempt <= attempt else None
        known = self._answers.get(request_id)
        if known is None or known.attempt < attempt:
            self._note(request_id, attempt, SUPERSEDED, 0, now)
        return None

    def amend(self, ticket: Ticket, left: Left, now: float) -> None:
        """How it left, once more: its end could not be told. A newer attempt's answer stays."""
        known = self._answers.get(ticket.request_id)
        if known is None or known.attempt == ticket.attempt:
            self._note(ticket.request_id, ticket.attempt, _REFUSED_SINCE[left], ticket.held_blocks, now, left)

    def how_left(self, request_id: str, attempt: int) -> Left | None:
        """None for an attempt that is here, never was, or is forgotten."""
        known = self._answers.get(request_id)
        return known.left if known is not None and known.attempt == attempt and request_id not in self._active else None

    def whereabouts(self, request_id: str, attempt: int) -> str:
        """What a router that has heard nothing for long should know: the attempt is `running`, has `ended`, was
        `given_back`, or broke off after it had `started`; empty if it is unknown here, or forgotten."""
        ticket = self._active.get(request_id)
        if ticket is not None and ticket.attempt == attempt:
            return RUNNING
        left = self.how_left(request_id, attempt)
        return "" if left is None else left.value or GIVEN_BACK

    # --- inside ---

    def _answered_before(self, offer: Offer, now: float) -> Verdict | None:
        known = self._answers.get(offer.request_id)
        running = self._active.get(offer.request_id)
        if running is not None and (known is None or known.attempt <= running.attempt):
            # The one that runs is never forgotten, however long it does.
            known = _Answer(running.attempt, "", running.held_blocks, now)
        if known is None or known.at < now - ANSWERS_KEPT_S or known.attempt < offer.attempt:
            return None
        refused = known.refused if known.attempt == offer.attempt else SUPERSEDED
        return Verdict(refused, self.queue_ms(now), known.held_blocks)

    def _why_not(self, offer: Offer, now: float, wall: float) -> str:
        if not self.incarnation or offer.incarnation != self.incarnation:
            return WRONG_INCARNATION
        if self.draining:
            return DRAINING
        if wall > offer.deadline_at:
            return DEADLINE_EXCEEDED
        if wall > offer.accept_by_at:
            return TOO_LATE
        if self.cancels.covers(offer.tenant, offer.client_request_id, now):
            return CANCELLED
        if len(self._active) >= self.slots - (self.reserved_slots if offer.is_warm else 0):
            return NO_SLOT
        if self.queue_ms(now) > offer.max_queue_ms:
            return QUEUE_TOO_LONG
        if offer.expected_blocks < offer.min_held_blocks:
            return STALE_HIT
        return ""

    def _note(
        self, request_id: str, attempt: int, refused: str, held_blocks: int, now: float, left: Left | None = None
    ) -> None:
        self._answers.pop(request_id, None)
        self._answers[request_id] = _Answer(attempt, refused, held_blocks, now, left)
        _trim(self._answers, ANSWERS_KEPT)

    def _move(self, ticket: Ticket, event: Event) -> None:
        ticket.phase = LIFE[ticket.phase, event]

    def _give_turn(self, ticket: Ticket, now: float) -> None:
        ticket.has_turn = True
        if not self._begun:
            ticket.head_at = now
        self._begun[ticket.request_id] = ticket
        self._begun_us += ticket.prefill_us

    def _leave_queue(self, ticket: Ticket, now: float) -> None:
        self._line.left(ticket.request_id)
        if self._begun.pop(ticket.request_id, None) is not None:
            self._begun_us -= ticket.prefill_us
        self._queued_us -= ticket.prefill_us
        for head in self._begun.values():
            if head.head_at is None:
                head.head_at = now
            break


def _microseconds(ms: float) -> int:
    """Whole microseconds of an estimate; an absurd one counts as none, or as an hour."""
    return int(1000 * min(max(ms, 0.0), _PREFILL_MAX_MS)) if not math.isnan(ms) else 0


def _trim(memory: dict[K, V], most: int) -> None:
    """Forgets the oldest. Entries are put at the end when renewed, so the first one is the oldest."""
    while len(memory) > most:
        del memory[next(iter(memory))]
