"""One request's way through its dispatch attempts, as one table.

    choosing --decided--> offered --accepted--> accepted --started--> streaming --outcome--> ended
                             |  silent             |  freed (given back, or lost before its first frame) -> choosing
                             v                     v
                        withdrawing --freed--> choosing,  --spent, broken--> ended (the router answers)

    before the router answers, if an attempt was given up without its bridge's word, and so may be running:

    any --unsure--> claiming --claimed--> ended (the router answers)
    any --taken-->  asking   --broken---> ended (the router answers),  --outcome, answered--> ended
                    claiming --taken----> asking

Two rules hold whatever messages do:
- *At most one attempt's frames are ever published*: another worker is asked only once the last one is known not to
  answer: it refused or gave back, nobody listens there, it confirmed a withdrawal before its first frame, or its lease
  ran out before that (a bridge that was stopped or cut off gives up what it has not started). Where the router is wrong
  about a lease, the bridges' claims keep a second answer back (worker_bridge/claim.py).
- *Every request ends exactly once*: with the outcome of a bridge, which then has sent the last frame, or with one from
  the router, never both. Where a living bridge may have been given up, the router takes the claim itself: whoever
  claims after it says nothing to the client. If a bridge was first, it has begun; it is told to stop, and asked how far
  it was, until it says so, or the server that nobody is there, or MAX_ASKED questions were not answered: then it counts
  as dead. One that ended its answer and died before it said so, or that lives, and of which nothing is heard in all
  that time, makes it two ends; to wait longer would leave the clients of those that died without one. When nobody knows
  who has the claim, because JetStream does not answer, the router ends the request, too: who waits in vain is worse off
  than who hears of two ends.

The methods translate what was heard into the table's events: `freed` becomes `spent` when no attempt may follow. A pair
that is not in the table is a bug and raises. What is heard of an attempt that was already given up is stale: the answer
to it is an abort, in case its worker came back.

Owns: the state of one request, its attempt number, who was tried, the error it will end with.
Must not know: NATS, timers, prices, messages."""

import enum

import xxhash

from ..bus.errors import Cancelled, DeadlineExceeded, Overloaded, PrefixbusError, Unavailable, WorkerLost, by_code

_hash = xxhash.xxh3_64_intdigest


class State(enum.Enum):
    CHOOSING = "choosing"
    OFFERED = "offered"
    WITHDRAWING = "withdrawing"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    CLAIMING = "claiming"  # the router is about to end it, and asks whether a bridge has begun
    ASKING = "asking"  # one has: it is asked whether it will end it
    ENDED = "ended"


class Event(enum.Enum):
    DECIDED = "decided"
    NOBODY = "nobody"  # no worker can take it
    WAIT = "wait"  # no worker can take it now, but one may be back in a moment
    LOOK = "look"  # that moment may be over
    ACCEPTED = "accepted"
    STARTED = "started"  # the bridge is about to publish its first frame
    UNHEARD = "unheard"  # nobody listened; a bridge that lost its connection may be back in a moment
    SILENT = "silent"  # no answer in time
    CROWDED = "crowded"  # its queue is too long: others have chosen it in this very moment
    FREED = "freed"  # nothing was published and nothing will be: another may be asked
    SPENT = "spent"  # the same, but nobody else will be asked
    BROKEN = "broken"  # frames were published and the end never will be
    UNSURE = "unsure"  # `spent`, but an attempt that was given up may be running
    CLAIMED = "claimed"  # no bridge will begin any more, as far as anybody knows
    TAKEN = "taken"  # an attempt that was given up has begun, and may be running
    OUTCOME = "outcome"  # the bridge ended the answer
    ANSWERED = "answered"  # an attempt that was given up has ended the answer
    CANCEL = "cancel"  # bridges hear cancels, too: whoever has accepted ends its answer itself
    DEADLINE = "deadline"  # nobody waits for it any more: that, it was sent again, or its client has gone


class Effect(enum.Enum):
    CHOOSE = "choose"  # decide (again)
    WAIT = "wait"  # until the fleet is another, `waits_until` at most
    PAUSE = "pause"  # for `pause_s`, then `resume`
    SEND = "send"  # book, dispatch and announce the attempt
    SEND_AGAIN = "send again"  # the same attempt, in a moment
    WITHDRAW = "withdraw"  # ask the worker to abort the attempt, and hear how far it was
    TAKE_BACK = "take back"  # unbook, and tell the other routers
    RELEASE = "release"  # unbook; the outcome told the others
    CLAIM = "claim"  # the request, for the router
    ASK = "ask"  # the workers of the `doubtful` attempts to abort them, and to say how far they were
    ANSWER = "answer"  # send the client the final frame with `error`
    ABORT = "abort"  # tell a lost worker to stop the attempt, should it come back
    ABORT_STALE = "abort stale"  # tell the worker that was heard from to stop


S, E, F = State, Event, Effect

TABLE: dict[tuple[State, Event], tuple[State, tuple[Effect, ...]]] = {
    (S.CHOOSING, E.DECIDED): (S.OFFERED, (F.SEND,)),
    (S.CHOOSING, E.WAIT): (S.CHOOSING, (F.WAIT,)),
    (S.CHOOSING, E.LOOK): (S.CHOOSING, (F.CHOOSE,)),
    (S.CHOOSING, E.NOBODY): (S.ENDED, (F.ANSWER,)),
    (S.CHOOSING, E.CANCEL): (S.ENDED, (F.ANSWER,)),
    (S.CHOOSING, E.DEADLINE): (S.ENDED, (F.ANSWER,)),
    (S.CHOOSING, E.ANSWERED): (S.ENDED, ()),
    (S.CHOOSING, E.UNSURE): (S.CLAIMING, (F.CLAIM,)),
    #
    (S.OFFERED, E.ACCEPTED): (S.ACCEPTED, ()),
    (S.OFFERED, E.STARTED): (S.STREAMING, ()),
    (S.OFFERED, E.UNHEARD): (S.OFFERED, (F.SEND_AGAIN,)),
    (S.OFFERED, E.SILENT): (S.WITHDRAWING, (F.WITHDRAW,)),
    (S.OFFERED, E.CROWDED): (S.CHOOSING, (F.TAKE_BACK, F.PAUSE)),
    (S.OFFERED, E.FREED): (S.CHOOSING, (F.TAKE_BACK, F.CHOOSE)),
    (S.OFFERED, E.SPENT): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.OFFERED, E.UNSURE): (S.CLAIMING, (F.TAKE_BACK, F.CLAIM)),
    (S.OFFERED, E.TAKEN): (S.ASKING, (F.TAKE_BACK, F.ASK)),
    (S.OFFERED, E.OUTCOME): (S.ENDED, (F.RELEASE,)),
    (S.OFFERED, E.ANSWERED): (S.ENDED, (F.ABORT, F.TAKE_BACK)),
    (S.OFFERED, E.CANCEL): (S.OFFERED, ()),
    (S.OFFERED, E.DEADLINE): (S.WITHDRAWING, (F.WITHDRAW,)),
    #
    (S.WITHDRAWING, E.ACCEPTED): (S.WITHDRAWING, ()),
    (S.WITHDRAWING, E.STARTED): (S.WITHDRAWING, ()),
    (S.WITHDRAWING, E.SILENT): (S.WITHDRAWING, (F.WITHDRAW,)),
    (S.WITHDRAWING, E.FREED): (S.CHOOSING, (F.TAKE_BACK, F.CHOOSE)),
    (S.WITHDRAWING, E.SPENT): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.WITHDRAWING, E.UNSURE): (S.CLAIMING, (F.TAKE_BACK, F.CLAIM)),
    (S.WITHDRAWING, E.TAKEN): (S.ASKING, (F.TAKE_BACK, F.ASK)),
    (S.WITHDRAWING, E.BROKEN): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.WITHDRAWING, E.OUTCOME): (S.ENDED, (F.RELEASE,)),
    (S.WITHDRAWING, E.ANSWERED): (S.ENDED, (F.ABORT, F.TAKE_BACK)),
    (S.WITHDRAWING, E.CANCEL): (S.WITHDRAWING, ()),
    (S.WITHDRAWING, E.DEADLINE): (S.WITHDRAWING, ()),
    #
    (S.ACCEPTED, E.ACCEPTED): (S.ACCEPTED, ()),
    (S.ACCEPTED, E.STARTED): (S.STREAMING, ()),
    (S.ACCEPTED, E.FREED): (S.CHOOSING, (F.TAKE_BACK, F.CHOOSE)),
    (S.ACCEPTED, E.SPENT): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.ACCEPTED, E.UNSURE): (S.CLAIMING, (F.TAKE_BACK, F.CLAIM)),
    (S.ACCEPTED, E.TAKEN): (S.ASKING, (F.TAKE_BACK, F.ASK)),
    (S.ACCEPTED, E.BROKEN): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.ACCEPTED, E.OUTCOME): (S.ENDED, (F.RELEASE,)),
    (S.ACCEPTED, E.ANSWERED): (S.ENDED, (F.ABORT, F.TAKE_BACK)),
    (S.ACCEPTED, E.CANCEL): (S.ACCEPTED, ()),
    (S.ACCEPTED, E.DEADLINE): (S.WITHDRAWING, (F.WITHDRAW,)),
    #
    (S.STREAMING, E.ACCEPTED): (S.STREAMING, ()),
    (S.STREAMING, E.STARTED): (S.STREAMING, ()),
    (S.STREAMING, E.BROKEN): (S.ENDED, (F.TAKE_BACK, F.ANSWER)),
    (S.STREAMING, E.TAKEN): (S.ASKING, (F.TAKE_BACK, F.ASK)),
    (S.STREAMING, E.OUTCOME): (S.ENDED, (F.RELEASE,)),
    (S.STREAMING, E.ANSWERED): (S.STREAMING, ()),
    (S.STREAMING, E.CANCEL): (S.STREAMING, ()),
    (S.STREAMING, E.DEADLINE): (S.WITHDRAWING, (F.WITHDRAW,)),
    #
    (S.CLAIMING, E.CLAIMED): (S.ENDED, (F.ANSWER,)),
    (S.CLAIMING, E.TAKEN): (S.ASKING, (F.ASK,)),
    (S.CLAIMING, E.ACCEPTED): (S.CLAIMING, ()),
    (S.CLAIMING, E.STARTED): (S.CLAIMING, ()),
    (S.CLAIMING, E.OUTCOME): (S.ENDED, ()),
    (S.CLAIMING, E.ANSWERED): (S.ENDED, ()),
    (S.CLAIMING, E.CANCEL): (S.CLAIMING, ()),
    (S.CLAIMING, E.DEADLINE): (S.CLAIMING, ()),
    #
    (S.ASKING, E.BROKEN): (S.ENDED, (F.ANSWER,)),
    (S.ASKING, E.SILENT): (S.ASKING, (F.ASK,)),
    (S.ASKING, E.ACCEPTED): (S.ASKING, ()),
    (S.ASKING, E.STARTED): (S.ASKING, ()),
    (S.ASKING, E.OUTCOME): (S.ENDED, ()),
    (S.ASKING, E.ANSWERED): (S.ENDED, ()),
    (S.ASKING, E.CANCEL): (S.ASKING, ()),
    (S.ASKING, E.DEADLINE): (S.ASKING, ()),
    #
    (S.ENDED, E.ACCEPTED): (S.ENDED, ()),
    (S.ENDED, E.STARTED): (S.ENDED, ()),
    (S.ENDED, E.OUTCOME): (S.ENDED, ()),
    (S.ENDED, E.ANSWERED): (S.ENDED, ()),
    (S.ENDED, E.CANCEL): (S.ENDED, ()),
    (S.ENDED, E.DEADLINE): (S.ENDED, ()),
}


class Unexpected(PrefixbusError):
    """A request's state machine met an event that cannot happen there."""

    code = "unexpected_event"
    status = 500


Effects = tuple[Effect, ...]

# After so many refusals since the worker was not as expected, whoever is chosen takes the request as it is.
MAX_RECHOICES = 3

# Requests that are refused for the queue are those that several routers sent to one worker in the same moment. If all
# of them chose anew at once, from what they know, they would meet again. So each pauses for some part of this, and the
# later ones know what the earlier ones chose. Twice what a load report or an announcement takes: in the lab, with 8
# routers at conv x3, a mean TTFT of 248 ms against 269 without a pause.
CROWD_S = 0.012

# So often a bridge is asked how far an attempt was that it has begun. With the patience for an answer (0.5 s) it is
# longer than a lease lasts: a bridge that was stopped meanwhile gives up what it had.
MAX_ASKED = 5

# Refusals by name; all other reasons are codes of bus.errors, or mean the worker: wrong_incarnation, draining,
# superseded, given_back.
QUEUE_TOO_LONG = "queue_too_long"
WAITED = "waited"  # for as long as its hit was worth (`Dispatch.max_wait_ms`)
STALE_HIT = "stale_hit"
NO_SLOT = "no_slot"
TOO_LATE = "too_late"
ALREADY_STREAMING = "already_streaming"
# What a bridge says of an attempt that nothing was heard of for long; all else is as for `withdrawn`.
RUNNING = "running"
GIVEN_BACK = "given_back"
UNKNOWN = ""
# By refusal: what metrics call it, and those that are bounded.
_NOT_AS_EXPECTED = {QUEUE_TOO_LONG: "queue", STALE_HIT: "stale", WAITED: WAITED}
_RECHOICES = ("queue", "stale")
# Refusals that say something about the request and not about the worker are error codes; any other reason means: ask
# somebody else. These are both, and mean the worker.
_OF_THE_WORKER = ("overloaded", "unavailable", "engine_failed", "worker_lost")


_UNDER_WAY = (State.OFFERED, State.WITHDRAWING, State.ACCEPTED, State.STREAMING)


class Attempts:
    """The attempts of one request. Methods return the effects to carry out, in order.

    `error` is what the request ends with if the router has to answer; `avoid` the lives of workers not to ask again;
    `failovers` why attempts were given up, in order; `published` whether frames of an attempt went out; `waits_until`
    how long, at most, it waits for a worker that is late (monotonic seconds); `doubtful` the attempts that were given
    up without their bridge's word, and the workers they went to."""

    def __init__(self, max_attempts: int, *, patience_s: float = 0.0) -> None:
        self.state = State.CHOOSING
        self.attempt = 0
        self.worker = ""
        self.incarnation = 0
        self.error: PrefixbusError | None = None
        # (worker, incarnation) in order of trial; a dict because sets have no order.
        self.avoid: dict[tuple[str, int], None] = {}
        self.failovers: list[str] = []
        self.doubtful: dict[int, str] = {}
        self._asked = 0
        self.published = False
        self._max_attempts = max_attempts
        self.waits_until: float | None = None
        self._patience_s = patience_s
        self._is_unheard = False
        self._is_paused = False
        self._last_failure: PrefixbusError = WorkerLost()

    @property
    def is_last(self) -> bool:
        """Whether no attempt may follow the one under way."""
        return self.attempt >= self._max_attempts

    @property
    def may_rechoose(self) -> bool:
        """Whether a worker that is not as expected should refuse the attempt under way."""
        return not self.is_last and sum(why in _RECHOICES for why in self.failovers) < MAX_RECHOICES

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    def decided(self, worker: str, incarnation: int) -> Effects:
        self.attempt += 1
        self.worker = worker
        self.incarnation = incarnation
        self._is_unheard = self._is_paused = False
        self.waits_until = None
        return self._step(Event.DECIDED)

    def nobody(self, error: PrefixbusError) -> Effects:
        """No candidate; after failed attempts what they failed of says more than that nobody is left."""
        self.error = self._last_failure if self.attempt else error
        return self._end(Event.NOBODY)

    def nobody_now(self, error: PrefixbusError, now: float) -> Effects:
        """No candidate, but a worker that is only late with its heartbeat: waited for, `patience_s` at most."""
        if self.waits_until is None:
            self.waits_until = now + self._patience_s
        return self._step(Event.WAIT) if now < self.waits_until else self.nobody(error)

    def look(self) -> Effects:
        """Those it waits for may be back, or lost."""
        return self._step(Event.LOOK) if self.state is State.CHOOSING and self.waits_until is not None else ()

    @property
    def has_waited(self) -> bool:
        """Whether a worker gave it back because it had waited there for long."""
        return WAITED in self.failovers

    def accepted(self, attempt: int) -> Effects:
        return self._step(Event.ACCEPTED) if self._is_live(attempt) else self._stale(attempt)

    def started(self, attempt: int) -> Effects:
        if not self._is_live(attempt):
            return self._stale(attempt)
        self.published = True
        return self._step(Event.STARTED)

    def resume(self) -> Effects:
        """The pause is over."""
        is_due, self._is_paused = self.state is State.CHOOSING and self._is_paused, False
        return self._step(Event.LOOK) if is_due else ()

    def refused(self, attempt: int, reason: str) -> Effects:
        """The bridge will not run this attempt, or gives it back before its first frame."""
        if self.state is State.ASKING:
            return self._will_not_end(attempt)
        if not self._is_current(attempt):
            return ()
        if self.published:
            # A give-back after the first frame breaks the protocol; the answer has no end.
            return self._broken("broken")
        kind = by_code(reason)
        if kind is not PrefixbusError and reason not in _OF_THE_WORKER:
            self.error = self.error or kind()
        if reason in (QUEUE_TOO_LONG, STALE_HIT, WAITED):
            # Its true queue, or what it truly holds, is known now; it may still be the best.
            return self._freed(_NOT_AS_EXPECTED[reason], _failure(reason))
        if reason == ALREADY_STREAMING:
            # An attempt we took for dead is not: a second answer must not begin.
            self.error = self.error or WorkerLost()
            if self.doubtful:
                return self._taken()
        self._avoid()
        return self._freed("refused", _failure(reason))

    def unreachable(self, attempt: int) -> Effects:
        """Nobody listens on the worker's subject, or the dispatch could not be sent. Of a dispatch it is believed the
        second time; nobody has the first."""
        if self.state is State.ASKING:
            return self._will_not_end(attempt)
        if not self._is_current(attempt):
            return ()
        if self.state is State.OFFERED and self.error is None and not self._is_unheard:
            self._is_unheard = True
            return self._step(Event.UNHEARD)
        self._avoid()
        if self.state is State.WITHDRAWING:
            self._doubt()
        return self._gone("unreachable")

    def silent(self, attempt: int) -> Effects:
        """No answer to a dispatch, a withdrawal, or a question in time."""
        if self.state is State.ASKING:
            self._asked += 1
            return self._step(Event.SILENT if self._asked < MAX_ASKED else Event.BROKEN)
        if not self._is_current(attempt) or self.state not in (State.OFFERED, State.WITHDRAWING):
            return ()
        self._avoid()
        if self.state is State.WITHDRAWING and self.error is not None:
            # Nobody waits for what this worker might still say.
            self._doubt()
            return self._gone("silent")
        return self._step(Event.SILENT)

    def withdrawn(self, attempt: int, stage: str) -> Effects:
        """The worker stopped the attempt: before its first frame (""), after it ("started"), or it had "ended"."""
        if self.state is State.ASKING:
            is_end = stage == "ended" and attempt in self.doubtful
            return self._step(Event.OUTCOME) if is_end else self._will_not_end(attempt)
        if not self._is_current(attempt):
            return ()
        if stage == "ended":
            return self._step(Event.OUTCOME)
        self.published = self.published or stage == "started"
        self._avoid()
        return self._gone("silent")

    def found(self, attempt: int, where: str) -> Effects:
        """The worker was asked about an attempt of which nothing was heard for long: it is running, given back, as
        `withdrawn` says, or unknown; then it may have been answered, and nobody else is asked."""
        if not self._is_current(attempt) or self.state not in (State.ACCEPTED, State.STREAMING) or where == RUNNING:
            return ()
        if where == UNKNOWN:
            self.error = self.error or WorkerLost()
        return self.withdrawn(attempt, "" if where == GIVEN_BACK else where)

    def lost(self, worker: str, incarnation: int) -> Effects:
        """The lease of this life of the worker ran out, or a newer life began."""
        if worker != self.worker or incarnation < self.incarnation or not self._is_current(self.attempt):
            return ()
        self._avoid()
        self._doubt()
        return (Effect.ABORT, *self._gone("lost"))

    def claimed(self, is_ours: bool) -> Effects:
        """The router may end the request: it has the claim, or nobody knows who has. Else a bridge has begun."""
        if self.state is not State.CLAIMING:
            return ()
        return self._step(Event.CLAIMED) if is_ours else self._taken()

    def of_another_life(self, attempt: int, worker: str, incarnation: int) -> Effects | None:
        """None if this is a word on the attempt under way by the very life it was sent to (or on an earlier attempt).

        Else two bridges may be listening there: the word of an older life, or of none, says nothing; that of a later
        one, that the addressed life is over."""
        if attempt != self.attempt or (worker, incarnation) == (self.worker, self.incarnation):
            return None
        if worker == self.worker and incarnation > self.incarnation:
            if self.state is State.ASKING:
                return self._will_not_end(attempt)
            return self.lost(worker, self.incarnation)
        return ()

    def was_sent(self, attempt: int, worker: str) -> bool:
        """Whether this worker may speak of the end of this attempt; which one an earlier attempt went to is not known
        any more."""
        return attempt < self.attempt or (attempt == self.attempt and worker == self.worker)

    def outcome(self, attempt: int) -> Effects:
        """It has told the client the end. An attempt that was given up cannot have done so unless it was the one that
        claimed the request (worker_bridge/claim.py): whoever was asked since is stopped."""
        if attempt > self.attempt:
            return ()
        return self._step(Event.OUTCOME if self._is_live(attempt) else Event.ANSWERED)

    def cancel(self) -> Effects:
        self.error = self.error or Cancelled()
        return self._end(Event.CANCEL)

    def sent_again(self) -> Effects:
        """The client has sent the request once more, and listens to that sending."""
        self.error = self.error or Cancelled("The request was sent again; the later sending is answered.")
        return self._end(Event.DEADLINE)

    def client_gone(self) -> Effects:
        """Nobody listens at the client's inbox. Who has accepted finds that out, and ends its answer, itself."""
        if self.state not in (State.CHOOSING, State.OFFERED, State.WITHDRAWING):
            return ()
        self.error = self.error or Cancelled("The client no longer listens.")
        return self._end(Event.DEADLINE)

    def deadline(self) -> Effects:
        self.error = self.error or DeadlineExceeded()
        return self._end(Event.DEADLINE)

    def _is_current(self, attempt: int) -> bool:
        return attempt == self.attempt and self.state in _UNDER_WAY

    def _is_live(self, attempt: int) -> bool:
        """Current, or the last one of a request that has ended: the table has something to say about it."""
        return attempt == self.attempt and self.state is not State.CHOOSING

    def _stale(self, attempt: int) -> Effects:
        return (Effect.ABORT_STALE,) if attempt <= self.attempt else ()

    def _avoid(self) -> None:
        self.avoid[self.worker, self.incarnation] = None

    def _gone(self, why: str) -> Effects:
        """The worker will say nothing more of this attempt: too late, or just in time for another."""
        return self._broken(why) if self.published else self._freed(why, WorkerLost())

    def _freed(self, why: str, failure: PrefixbusError) -> Effects:
        self._last_failure = failure
        if self.error is None:
            self.failovers.append(why)
        if self.error is None and self.attempt < self._max_attempts:
            self._is_paused = why == "queue" and self.state is State.OFFERED
            return self._step(Event.CROWDED if self._is_paused else Event.FREED)
        self.error = self.error or failure
        return self._step(Event.UNSURE if self.doubtful else Event.SPENT)

    def _broken(self, why: str) -> Effects:
        if self.error is None:
            self.failovers.append(why)
        self.error = self.error or WorkerLost()
        if self.attempt not in self.doubtful:
            return self._step(Event.BROKEN)
        # It has begun, so no other has.
        self.doubtful = {self.attempt: self.worker}
        return self._taken()

    def _taken(self) -> Effects:
        self.published = True
        return self._step(Event.TAKEN)

    def _doubt(self) -> None:
        """The attempt is given up, and may be running."""
        self.doubtful[self.attempt] = self.worker

    def _end(self, event: Event) -> Effects:
        """`event`, which ends a request for which no attempt is under way."""
        return self._step(Event.UNSURE if self.state is State.CHOOSING and self.doubtful else event)

    def _will_not_end(self, attempt: int) -> Effects:
        """By its bridge's word, or because that is not there any more."""
        if self.doubtful.pop(attempt, None) is None or self.doubtful:
            return ()
        return self._step(Event.BROKEN)

    def _step(self, event: Event) -> Effects:
        try:
            self.state, effects = TABLE[self.state, event]
        except KeyError:
            raise Unexpected(f"{event.value} while {self.state.value}") from None
        return effects

    def __repr__(self) -> str:
        return f"<Attempts {self.state.value} attempt={self.attempt} worker={self.worker or '-'}>"


def pause_s(request_id: str, attempt: int) -> float:
    """How long to pause after this attempt: any part of CROWD_S, another one for each request."""
    return CROWD_S * (_hash(request_id.encode(), attempt) >> 32) / (1 << 32)


def _failure(reason: str) -> PrefixbusError:
    """What a request ends with whose last attempt was refused for this."""
    if reason in (QUEUE_TOO_LONG, STALE_HIT, WAITED, NO_SLOT, TOO_LATE):
        return Overloaded()
    kind = by_code(reason)
    return Unavailable(f"No worker took the request: {reason[:80]}.") if kind is PrefixbusError else kind()
