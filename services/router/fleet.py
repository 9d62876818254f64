"""The router's view of the workers: leases, queues, and the dispatches that no report contains yet.

    queue_ms(worker, now) = its last reported queue, less the time since, + the prefill of bookings not in it yet

A *booking* is one dispatch, our own or one another router announced. Its prefill counts on top of the report until
  (a) a report lists its request as accepted (that report's queue contains it), or is so much younger that it must;
  (b) the dispatch was refused, taken back, or its outcome is known; or
  (c) it expires; one that another router announced does so early, unless a report lists its request.
Until (b) or (c) it also counts as in flight. Messages of different senders overtake each other: what a report or an
outcome said about a request that was not announced yet is remembered for a while.

*Leases* run on listening time (bus/listening.py).

Owns: worker states, bookings, prefill rates.   Must not know: NATS, prices, who chose what and why, tenants.
Units: `now` in seconds on a monotonic clock, queues in ms, bookings in whole microseconds (sums of floats drift, and a
load that never ends at 0 is a lie).   Source: DESIGN 5 (leases), facts/policy.md (herding)."""

import heapq
import math
from collections import deque
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

from ..bus.listening import ListeningClock
from ..bus.messages import Load

# A dispatch is accepted or refused well within this; a report that is this much younger knows of it, whatever got lost.
SURELY_REPORTED_S = 1.5
# How long what was said about unknown requests is remembered, and of how many.
REMEMBER_S = 60.0
REMEMBER_MAX = 65536
# A lost worker is forgotten, name and all, after this.
FORGET_AFTER_S = 300.0
RATE_WINDOW_S = 10.0
# Of so many dispatches to a worker it is remembered when they came.
RECENT_DISPATCHES = 32
# No announced prefill is believed beyond this: an hour of it.
PREFILL_MAX_MS = 3_600_000.0


class Lost(NamedTuple):
    """This life of the worker is over, and with it all that was dispatched to it."""

    worker: str
    incarnation: int


class WorkerClass(NamedTuple):
    """Workers that should compute alike. `label` is theirs by configuration."""

    model: str
    serves: str
    label: str


class Surroundings(NamedTuple):
    """What else a worker did while it computed a request: KV in use by others when it was dispatched, and their prefill
    that was dispatched there until its first token."""

    worker_class: WorkerClass
    pinned_tokens: int
    neighbours_ms: float


class Available(NamedTuple):
    """A worker that may be given work now. With `only_reserved`, the free slots are kept for requests that find nothing
    cached there."""

    name: str
    queue_ms: float
    running: int
    worker: "Worker"
    only_reserved: bool = False


class Survey(NamedTuple):
    """Who may be given a request, and why each other worker may not: model, pool, busy, draining, suspect, lost.

    `late`: (worker, incarnation) of the suspects, who may be back in a moment; `full_ms`: the queues of the busy."""

    available: list[Available]
    excluded: dict[str, str]
    late: list[tuple[str, int]]
    full_ms: list[float]


T = TypeVar("T")


class _Heard(Generic[T]):
    """What was said about a request, for REMEMBER_S and at most REMEMBER_MAX requests; the oldest goes first."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[T, float]] = {}

    def put(self, request_id: str, what: T, now: float) -> None:
        self._said.pop(request_id, None)
        self._said[request_id] = (what, now)
        if len(self._said) > REMEMBER_MAX:
            del self._said[next(iter(self._said))]

    def get(self, request_id: str) -> T | None:
        said = self._said.get(request_id)
        return said[0] if said else None

    def pop(self, request_id: str) -> T | None:
        said = self._said.pop(request_id, None)
        return said[0] if said else None

    def forget(self, now: float) -> None:
        while self._said:
            oldest = next(iter(self._said))
            if now - self._said[oldest][1] < REMEMBER_S:
                return
            del self._said[oldest]


class _Booking:
    __slots__ = (
        "attempt",
        "booked_at",
        "expires_at",
        "never_ran",
        "pinned_tokens",
        "prefill_us",
        "request_id",
        "until",
        "worker",
    )

    def __init__(
        self,
        request_id: str,
        attempt: int,
        worker: str,
        prefill_ms: float,
        booked_at: float,
        until: float,
        expires_at: float,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.worker = worker
        self.prefill_us = _microseconds(prefill_ms)
        self.booked_at = booked_at
        # `expires_at` becomes `until` once the worker is known to have it.
        self.until = until
        self.expires_at = expires_at
        self.never_ran = False
        # KV in use at its worker when it was booked.
        self.pinned_tokens = 0


class _Rate:
    """Prefill ms per ms over the last RATE_WINDOW_S: a sliding window of two halves' worth (no exponentials)."""

    __slots__ = ("current", "previous", "started_at")

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.current = 0.0
        self.previous = 0.0

    def add(self, ms: float, now: float) -> None:
        self._turn(now)
        self.current = max(0.0, self.current + ms)

    def value(self, now: float) -> float:
        passed = (now - self.started_at) / RATE_WINDOW_S
        if not 0.0 <= passed < 1.0:
            self._turn(now)
            passed = max(0.0, now - self.started_at) / RATE_WINDOW_S
        return (self.previous * (1.0 - passed) + self.current) / (RATE_WINDOW_S * 1000.0)

    def _turn(self, now: float) -> None:
        windows = int((now - self.started_at) / RATE_WINDOW_S)
        if windows > 0:
            self.previous = self.current if windows == 1 else 0.0
            self.current = 0.0
            self.started_at += windows * RATE_WINDOW_S


class Worker:
    """One worker, in one incarnation at a time."""

    __slots__ = (
        "_base_queue_ms",
        "_rate",
        "_reported_at",
        "bookings",
        "free_tokens",
        "heard_at",
        "is_lost",
        "is_suspect",
        "load",
        "pinned_tokens",
        "queued",
        "queued_us",
        "recent",
        "worker_class",
    )

    def __init__(self, load: Load, now: float, heard_at: float) -> None:
        self.take(load)
        self.heard_at = heard_at
        self.is_suspect = self.is_lost = False
        self.bookings: dict[str, _Booking] = {}
        # Those of them that no report contains yet.
        self.queued: dict[str, _Booking] = {}
        self.queued_us = 0
        self.recent: deque[_Booking] = deque(maxlen=RECENT_DISPATCHES)
        self._base_queue_ms = load.queue_ms
        self._reported_at = now
        self._rate = _Rate(now)

    def take(self, load: Load) -> None:
        """Its last report, and what every decision asks of it. KV in use by requests is pinned; blocks that are merely
        cached are free to take."""
        self.load = load
        self.worker_class = WorkerClass(load.model, load.serves, load.worker_class)
        self.pinned_tokens = int(load.kv_usage * load.kv_tokens)
        self.free_tokens = load.kv_tokens - self.pinned_tokens

    def queue_ms(self, now: float) -> float:
        """Prefill work ahead of a request that is dispatched now."""
        ahead_ms = self._base_queue_ms - (now - self._reported_at) * 1000.0
        return (ahead_ms if ahead_ms > 0.0 else 0.0) + self.queued_us / 1000.0

    def rho(self, now: float) -> float:
        """The share of its time that its prefills took lately; above 1 when more was dispatched than it can do."""
        return self._rate.value(now)

    @property
    def incarnation(self) -> int:
        return self.load.incarnation

    @property
    def block_size(self) -> int:
        return self.load.block_size

    @property
    def kv_tokens(self) -> int:
        return self.load.kv_tokens

    def set_queue(self, queue_ms: float, now: float) -> None:
        self._base_queue_ms = queue_ms
        self._reported_at = now

    def add(self, booking: _Booking, *, queued: bool, now: float) -> None:
        self.bookings[booking.request_id] = booking
        booking.pinned_tokens = self.pinned_tokens
        self.recent.append(booking)
        self._rate.add(booking.prefill_us / 1000.0, now)
        if queued:
            self.queued[booking.request_id] = booking
            self.queued_us += booking.prefill_us

    def absorb(self, request_id: str) -> None:
        """The reported queue contains it from here on."""
        booking = self.queued.pop(request_id, None)
        if booking is not None:
            self.queued_us -= booking.prefill_us

    def absorb_all(self) -> None:
        self.queued = {}
        self.queued_us = 0

    def remove(self, booking: _Booking, *, never_ran: bool, now: float) -> None:
        del self.bookings[booking.request_id]
        self.absorb(booking.request_id)
        if never_ran:
            booking.never_ran = True
            self._rate.add(-booking.prefill_us / 1000.0, now)

    def __repr__(self) -> str:
        return f"<Worker {self.load.worker} in flight={len(self.bookings)} queued_ms={self.queued_us / 1000:.0f}>"


class Fleet:
    """All workers this router has heard of."""

    def __init__(self, suspect_after_s: float, lost_after_s: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._lost_after_s = lost_after_s
        self._workers: dict[str, Worker] = {}
        self._bookings: dict[str, _Booking] = {}
        self._due: list[tuple[float, str]] = []
        # The last attempt known to be over.
        self._settled: _Heard[int] = _Heard()
        # The worker that reported a request as accepted before it was announced.
        self._accepted: _Heard[str] = _Heard()
        self._listening = ListeningClock()

    # --- leases

    def cut_off(self, now: float) -> None:
        """The bus is gone: silence says nothing about workers until it is back."""
        self._listening.cut(now)

    def back(self, now: float) -> None:
        self._listening.back(now)

    def heard(self, load: Load, now: float) -> Lost | None:
        """A heartbeat. Returns the life that this one ends: a greater incarnation voids all before it.

        Late reports, of this incarnation or an older one, are ignored."""
        heard_at = self._listening.seconds(now)
        worker = self._workers.get(load.worker)
        if worker is None or load.incarnation > worker.load.incarnation:
            ended = None
            if worker is not None:
                self._drop_all(worker, now)
                ended = Lost(load.worker, worker.load.incarnation)
            worker = self._workers[load.worker] = Worker(load, now, heard_at)
        elif load.incarnation < worker.load.incarnation or load.report <= worker.load.report:
            return None
        else:
            ended = None
            worker.take(load)
            worker.heard_at = heard_at
            worker.is_suspect = worker.is_lost = False
            worker.set_queue(load.queue_ms, now)
        for request_id in load.accepted:
            if request_id in worker.bookings:
                worker.absorb(request_id)
                self._believe(worker.bookings[request_id])
            else:
                # Not announced yet, or an earlier attempt was.
                self._accepted.put(request_id, load.worker, now)
        if worker.queued:
            overdue = [key for key, one in worker.queued.items() if now - one.booked_at > SURELY_REPORTED_S]
            for request_id in overdue:
                worker.absorb(request_id)
        return ended

    def sweep(self, now: float) -> list[Lost]:
        """Whose lease ran out since the last call; also drops what has expired. Call it several times a second."""
        listened_s = self._listening.seconds(now)
        lost = []
        for name, worker in list(self._workers.items()):
            silent_s = listened_s - worker.heard_at
            if silent_s > self._lost_after_s and not worker.is_lost:
                worker.is_lost = True
                self._drop_all(worker, now)
                lost.append(Lost(name, worker.load.incarnation))
            elif silent_s > FORGET_AFTER_S:
                del self._workers[name]
        while self._due and self._due[0][0] <= now:
            _, request_id = heapq.heappop(self._due)
            booking = self._bookings.get(request_id)
            if booking is not None and booking.expires_at <= now:
                self._drop(booking, never_ran=False, now=now)
        self._settled.forget(now)
        self._accepted.forget(now)
        return lost

    def newly_suspect(self, now: float) -> list[str]:
        """Who has gone silent since the last call; to be told of, since `survey` looks by itself."""
        suspect_before = self._listening.seconds(now) - self._suspect_after_s
        found = []
        for name, worker in self._workers.items():
            if worker.heard_at < suspect_before and not worker.is_suspect:
                worker.is_suspect = True
                found.append(name)
        return found

    def is_silent(self, worker: str, incarnation: int, now: float) -> bool:
        """Whether this life of the worker is late with its heartbeat, or over."""
        state = self._workers.get(worker)
        if state is None or state.load.incarnation != incarnation:
            return True
        return state.heard_at < self._listening.seconds(now) - self._suspect_after_s

    # --- what to choose from

    def survey(
        self,
        model: str,
        serves: str,
        now: float,
        pools: Collection[str] | None = None,
        *,
        block_size: int | None = None,
    ) -> Survey:
        """Who may be given a request for this model, in the order they were first heard. `pools` are those the request
        may go to, `block_size` what the model's blocks have: who tells another is believed in nothing. None: any."""
        listened_s = self._listening.seconds(now)
        suspect_before = listened_s - self._suspect_after_s
        available = []
        excluded = {}
        late = []
        full_ms = []
        for name, worker in self._workers.items():
            load = worker.load
            if load.serves != serves or load.model != model or (block_size and load.block_size != block_size):
                excluded[name] = "model"
            elif pools is not None and load.pool not in pools:
                excluded[name] = "pool"
            elif worker.is_lost:
                excluded[name] = "lost"
            elif worker.heard_at < suspect_before:
                excluded[name] = "suspect"
                late.append((name, load.incarnation))
            elif load.draining:
                excluded[name] = "draining"
            else:
                free_slots = load.slots - load.running - load.waiting - len(worker.queued)
                if free_slots <= 0:
                    excluded[name] = "busy"
                    full_ms.append(worker.queue_ms(now))
                    continue
                only_reserved = free_slots <= load.reserved_slots
                available.append(Available(name, worker.queue_ms(now), load.running, worker, only_reserved))
        return Survey(available, excluded, late, full_ms)

    # --- dispatches

    def book(
        self,
        request_id: str,
        attempt: int,
        worker: str,
        incarnation: int,
        prefill_ms: float,
        now: float,
        until: float,
        *,
        unlisted_until: float = math.inf,
    ) -> bool:
        """This attempt (from 1) was dispatched there; it is believed until `until`, or, as long as no report lists it
        as accepted, until `unlisted_until`.

        False, and nothing is booked, if a later attempt is booked, this one is known to be over, or the worker is not
        known in this incarnation."""
        if (self._settled.get(request_id) or 0) >= attempt:
            return False
        earlier = self._bookings.get(request_id)
        if earlier is not None:
            if earlier.attempt >= attempt:
                return False
            self._drop(earlier, never_ran=True, now=now)
        state = self._workers.get(worker)
        if state is None or state.is_lost or state.load.incarnation != incarnation:
            return False
        is_listed = self._accepted.get(request_id) == worker
        if is_listed:
            self._accepted.pop(request_id)
        expires_at = until if is_listed else min(until, unlisted_until)
        booking = _Booking(request_id, attempt, worker, prefill_ms, now, until, expires_at)
        self._bookings[request_id] = booking
        state.add(booking, queued=not is_listed, now=now)
        heapq.heappush(self._due, (expires_at, request_id))
        return True

    def settle(self, request_id: str, attempt: int, now: float, *, never_ran: bool = False) -> None:
        """This attempt is over: its outcome is known, or it was refused or taken back (`never_ran`)."""
        if not never_ran:
            # Who took a later attempt may have said so before this one's end was heard.
            self._accepted.pop(request_id)
        self._settled.put(request_id, max(attempt, self._settled.get(request_id) or 0), now)
        booking = self._bookings.get(request_id)
        if booking is not None and booking.attempt <= attempt:
            self._drop(booking, never_ran=never_ran, now=now)

    def correct(self, worker: str, incarnation: int, queue_ms: float, now: float) -> None:
        """The bridge itself said what its queue is: all we had booked there so far is in it, or refused."""
        state = self._workers.get(worker)
        if state is not None and state.load.incarnation == incarnation:
            state.set_queue(queue_ms, now)
            state.absorb_all()

    def living(self) -> dict[str, Worker]:
        """The workers that are not lost, by name."""
        return {name: worker for name, worker in self._workers.items() if not worker.is_lost}

    def surroundings(self, request_id: str, attempt: int, worker: str, ttft_ms: float | None) -> Surroundings | None:
        """What its worker did besides, for an attempt whose end was heard and not settled yet; None if nothing is known
        of it."""
        booking = self._bookings.get(request_id)
        if booking is None or booking.attempt != attempt or booking.worker != worker:
            return None
        state = self._workers[worker]
        until = booking.booked_at + (ttft_ms or 0.0) / 1000.0
        neighbours_us = 0
        for other in state.recent:
            if other is not booking and not other.never_ran and booking.booked_at <= other.booked_at <= until:
                neighbours_us += other.prefill_us
        return Surroundings(state.worker_class, booking.pinned_tokens, neighbours_us / 1000.0)

    def in_flight(self) -> dict[str, int]:
        """Booked dispatches by worker."""
        return {name: len(worker.bookings) for name, worker in self._workers.items()}

    def idle(self) -> list[str]:
        """What is left when every request has ended: nothing, or the books do not balance."""
        leftovers = [f"{one.request_id}/{one.attempt} on {one.worker}" for one in self._bookings.values()]
        for name, worker in self._workers.items():
            if len(worker.bookings) or len(worker.queued) or worker.queued_us:
                leftovers.append(f"{name}: {worker!r}")
        return leftovers

    def __len__(self) -> int:
        return len(self._workers)

    def __repr__(self) -> str:
        return f"<Fleet workers={len(self._workers)} in flight={len(self._bookings)}>"

    def _believe(self, booking: _Booking) -> None:
        """Its worker has it."""
        if booking.expires_at < booking.until:
            booking.expires_at = booking.until
            heapq.heappush(self._due, (booking.until, booking.request_id))

    def _drop(self, booking: _Booking, *, never_ran: bool, now: float) -> None:
        del self._bookings[booking.request_id]
        self._workers[booking.worker].remove(booking, never_ran=never_ran, now=now)
        if not self._bookings:
            self._due = []

    def _drop_all(self, worker: Worker, now: float) -> None:
        for booking in list(worker.bookings.values()):
            self._drop(booking, never_ran=False, now=now)


def _microseconds(ms: float) -> int:
    """Whole microseconds of an announced estimate; an absurd one counts as none, or as an hour."""
    return 0 if math.isnan(ms) else int(1000 * min(max(ms, 0.0), PREFILL_MAX_MS))
