"""A worker in virtual time: the engine's core behind the bridge's own admission.

The engine is stepped only when something is due. A run of decode-only steps is left alone until it ends by itself, or
until somebody brings something: then it is taken up to the first step that ends after that instant.

Owns: the engine's clock, the order of its events, when load is reported.   Must not know: who chose it and why.
Units: seconds on the timeline, milliseconds in the engine."""

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial

from ..bus.blockkeys import deepest_common, reusable_blocks
from ..bus.messages import (
    HOST,
    VERSION,
    Accept,
    Cleared,
    Dispatch,
    KvDump,
    KvEvents,
    Load,
    Outcome,
    Removed,
    Stored,
    WarmOrder,
)
from ..engine_sim.core import DoesNotFit, EngineCore, StepResult
from ..engine_sim.pool import BlockPool
from ..engine_sim.profile import PRESETS
from ..engine_sim.request import Request
from ..engine_sim.sequence import EngineNamespace, VirtualSequence
from ..router.policy import Policy
from ..worker_bridge.admission import WAITED, Admission, Left, Offer, Phase, Ticket, charged_ms
from .fetching import Fetch, Fetching, Reply
from .rules import Cache, cache_of
from .setup import MODEL, Setup, serves
from .timeline import Life, Timeline
from .warming import Warming
from .wires import Prefix, Wires, Withdrawn
from .workload import Arrival, ns_of

# `Accept.refused` of the notice that an answer begins, as live (worker_bridge/stream.py).
STARTED = "started"

# More requests and tokens than there are.
NO_LIMIT = 1 << 40


class _Running:
    """An accepted request."""

    __slots__ = ("arrival", "dispatch", "fetch", "reply", "request", "ticket")

    def __init__(
        self,
        arrival: Arrival,
        dispatch: Dispatch,
        ticket: Ticket,
        request: Request,
        reply: Callable[[Accept], None],
    ) -> None:
        self.arrival = arrival
        self.dispatch = dispatch
        self.ticket = ticket
        self.request = request
        self.reply = reply
        self.fetch: Fetch | None = None

    @property
    def is_fetching(self) -> bool:
        return self.fetch is not None and self.fetch.ended_at is None


class Worker:
    def __init__(
        self,
        name: str,
        timeline: Timeline,
        wires: Wires,
        setup: Setup,
        block_size: int,
        on_end: Callable[[Outcome, Request, Fetch | None], None],
        incarnation: int = 1,
        revision: int = 0,
        pool: BlockPool | None = None,
    ) -> None:
        """One life of a worker, under one revision of the model. `on_end` sees each outcome at its instant, with the
        engine's request. `pool`: memory that all engines have together."""
        blocks = setup.kv_tokens_of.get(name, setup.kv_tokens) // block_size
        self.name = name
        self.incarnation = incarnation
        self.revision = revision
        self.core = EngineCore(
            PRESETS[setup.profile],
            block_size=block_size,
            num_blocks=blocks,
            max_model_len=blocks * block_size,
            pool=pool,
        )
        if isinstance(setup.policy, Policy) or cache_of(setup.policy) is not Cache.OWN:
            reserved_slots = int(setup.slots * setup.cold_reserve)
            self.admission = Admission(setup.slots, setup.prefill_window_tokens, reserved_slots)
        else:
            # Routers of other rules have no bridges: an engine gets all that is sent, and serves it as it comes.
            self.admission = Admission(NO_LIMIT, NO_LIMIT, 0)
        self.admission.incarnation = incarnation
        self.refused_count = 0
        self.given_back_count = 0
        self._timeline = Life(timeline)
        self._wires = wires
        self._setup = setup
        self._block_size = block_size
        self._kv_tokens = blocks * block_size
        self._on_end = on_end
        self._running: dict[str, _Running] = {}
        # The decode run under way since then, and the number of the wake-up at its end; a later number voids it.
        self._run_since: float | None = None
        self._wake = 0
        # A step, or a run that was cut short, whose end is on the timeline.
        self._in_step = False
        self._event_seq = 0
        self._dump_id = 0
        self._ns_ids: dict[int, bytes] = {}
        self._report = 0
        self._accepted: list[str] = []
        self._reported_at = -setup.report_gap_s
        self._report_is_due = False
        self.warming = Warming(self, setup)
        self.fetching = Fetching(self._timeline, wires.pull, setup, block_size)

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.core!r}>"

    # --- its life ---

    def drain(self) -> None:
        """Nothing new from here on; what is in hand may end."""
        self.admission.draining = True
        self._load_changed()

    def die(self) -> None:
        """Silence, from this instant."""
        self._timeline.end()

    @property
    def is_silent(self) -> bool:
        return self._timeline.is_over

    def answering(self) -> list[Request]:
        """Those in hand whose answers have begun."""
        return [one.request for one in self._running.values() if one.ticket.phase is Phase.STREAMING]

    # --- as it is in this instant, which nobody can know ---

    def true_queue_ms(self) -> float:
        """All prefill that was sent here and is not computed yet; a step under way counts as computed, and what
        several of them share is computed once."""
        core = self.core
        total_ms, left_tokens = 0.0, 0
        ahead: list[bytes] = []
        for arrival, request in self._unanswered():
            length = arrival.prompt_tokens
            if request is not None and request in core.running:
                done = request.computed
            else:
                done = self._found_by_then(arrival, ahead)
            ahead.append(arrival.keys)
            tokens = max(0, length - done)
            left_tokens += tokens
            total_ms += core.profile.chunk_ms(tokens, length)
        steps = -(-left_tokens // core.profile.step_tokens)
        return total_ms + steps * (core.profile.step_ms + core.profile.prefill_step_ms)

    def true_cached_tokens(self, arrival: Arrival) -> int:
        """What it will find here when all that is ahead of it has been computed."""
        return self._found_by_then(arrival, [one.keys for one, _ in self._unanswered()])

    def _unanswered(self) -> list[tuple[Arrival, Request | None]]:
        """All that has no first token yet, with what the engine or the bridge has of it."""
        here: list[tuple[Arrival, Request | None]] = [
            (one.arrival, one.request) for one in self._running.values() if one.request.first_token_ms is None
        ]
        return here + [(arrival, None) for worker, arrival in self._wires.on_the_way.values() if worker == self.name]

    def _found_by_then(self, arrival: Arrival, ahead: list[bytes]) -> int:
        keys = memoryview(arrival.keys).cast("Q").tolist()
        held = self._held_blocks(keys, arrival.prompt_tokens)
        reusable = arrival.keys[: 8 * reusable_blocks(arrival.prompt_tokens, self._block_size)]
        return self._block_size * deepest_common(reusable, ahead, held)

    # --- what is heard ---

    def hear_dispatch(
        self, dispatch: Dispatch, arrival: Arrival, reply: Callable[[Accept], None], source: str = ""
    ) -> None:
        now = self._timeline.now
        keys = memoryview(arrival.keys).cast("Q").tolist()
        held_blocks = self._held_blocks(keys, arrival.prompt_tokens)
        upto = self.fetching.host.depth(keys, held_blocks, reusable_blocks(arrival.prompt_tokens, self._block_size))
        expected_blocks = self._expected_blocks(arrival, upto)
        predicted_blocks = dispatch.predicted_tokens // self._block_size
        if source:
            upto = max(upto, predicted_blocks)
        offer = Offer(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            tenant=arrival.tenant,
            client_request_id=dispatch.request_id,
            incarnation=dispatch.incarnation,
            prefill_ms=charged_ms(
                dispatch.prefill_ms,
                arrival.prompt_tokens,
                dispatch.predicted_tokens,
                expected_blocks * self._block_size,
            ),
            prompt_tokens=arrival.prompt_tokens,
            held_blocks=held_blocks,
            max_queue_ms=dispatch.max_queue_ms,
            accept_by_at=dispatch.accept_by_at,
            deadline_at=math.inf,
            uncached_tokens=arrival.prompt_tokens - max(held_blocks, upto) * self._block_size,
            is_warm=dispatch.is_warm,
            max_wait_ms=dispatch.max_wait_ms,
            min_held_blocks=dispatch.min_held_blocks,
            expected_blocks=expected_blocks,
        )
        verdict = self.admission.offer(offer, now, now)
        if not verdict.refused and dispatch.ns_id != ns_of(arrival.tenant, self.revision):
            raise AssertionError(f"{self!r} of revision {self.revision} was sent {dispatch.request_id} of another")
        self._answer(dispatch, reply, verdict.refused, verdict.queue_ms, verdict.held_blocks)
        ticket = verdict.start
        if ticket is None:
            self.refused_count += 1
            return
        self.warming.give_up()
        self._accepted.append(dispatch.request_id)
        nonce = int.from_bytes(dispatch.request_id.encode()[-8:], "little")
        request = Request(
            dispatch.request_id,
            VirtualSequence(arrival.prompt_tokens, keys, nonce),
            arrival.output_tokens,
            ignore_eos=True,
            namespace=EngineNamespace(salt=arrival.tenant),
            now_ms=now * 1000,
        )
        running = self._running[dispatch.request_id] = _Running(arrival, dispatch, ticket, request, reply)
        patience_s = ticket.patience_s(now)
        if patience_s < math.inf:
            self._timeline.after(patience_s, self._patience_ends, running)
        limit = reusable_blocks(arrival.prompt_tokens, self._block_size)
        on_fetched = partial(self._fetched, running)
        running.fetch = self.fetching.begin(keys, held_blocks, limit, source, predicted_blocks, on_fetched)
        if ticket.has_turn and running.fetch is None:
            self._interrupt()
            self._submit(running)
            self.go_on()
        self._load_changed()

    def hear_cancel(self, tenant: str, request_id: str) -> None:
        now = self._timeline.now
        self.admission.cancel(tenant, request_id, now)
        running = self._running.get(request_id)
        if running is None:
            return
        if running.ticket.has_turn and not running.is_fetching:
            self._interrupt()
            if not self.core.abort(running.request, now * 1000):
                # Its last token is in the step under way.
                return
        self._end(running, "cancelled", "cancelled")
        self.go_on()

    def _answer(
        self, dispatch: Dispatch, reply: Callable[[Accept], None], refused: str, queue_ms: float, held_blocks: int
    ) -> None:
        request_id, attempt = dispatch.request_id, dispatch.attempt
        accept = Accept(VERSION, request_id, attempt, self.name, self.incarnation, refused, queue_ms, held_blocks)
        self._wires.accept(accept, reply)

    def _begin_answer(self, running: _Running) -> None:
        dispatch = running.dispatch
        self._wires.begin(dispatch.request_id)
        self._answer(dispatch, running.reply, STARTED, 0.0, running.ticket.held_blocks)
        self._wires.first_token(dispatch.request_id)

    def _patience_ends(self, running: _Running) -> None:
        """If its turn with the engine has not come by now, it is given back."""
        now, ticket = self._timeline.now, running.ticket
        if ticket.has_turn or self._running.get(ticket.request_id) is not running:
            return
        self.given_back_count += 1
        self.admission.end(ticket, now, Left.GIVEN_BACK)
        del self._running[ticket.request_id]
        self._answer(running.dispatch, running.reply, WAITED, self.admission.queue_ms(now), ticket.held_blocks)
        self._load_changed()
        self._give_turns()
        self.go_on()

    def _held_blocks(self, keys: list[int], prompt_tokens: int) -> int:
        reusable = reusable_blocks(prompt_tokens, self._block_size)
        return len(self.core.pool.lookup(keys, min(reusable, len(keys))))

    def _expected_blocks(self, arrival: Arrival, held_blocks: int) -> int:
        """How many blocks of it there are, with those that requests in hand are about to add."""
        reusable = arrival.keys[: 8 * reusable_blocks(arrival.prompt_tokens, self._block_size)]
        return deepest_common(reusable, [one.arrival.keys for one in self._running.values()], held_blocks)

    def _submit(self, running: _Running) -> None:
        """The engine is between two steps, or in one that this one comes too late for."""
        try:
            self.core.add_request(running.request)
        except DoesNotFit:
            self._end(running, "error", "too_large")
        else:
            self.admission.submitted(running.ticket)

    def _give_turns(self) -> None:
        while (ticket := self.admission.next_up()) is not None:
            running = self._running[ticket.request_id]
            prompt_tokens = running.arrival.prompt_tokens
            held_blocks = self._held_blocks(memoryview(running.arrival.keys).cast("Q").tolist(), prompt_tokens)
            if running.fetch is not None:
                held_blocks = max(held_blocks, running.fetch.upto)
            if not self.admission.give_turn(prompt_tokens - held_blocks * self._block_size, self._timeline.now):
                return
            if not running.is_fetching:
                self._interrupt()
                self._submit(running)

    def _fetched(self, running: _Running) -> None:
        """All that the request waits for is here."""
        fetch = running.fetch
        if fetch is None or self._running.get(running.dispatch.request_id) is not running:
            return
        running.request.delivered = range(fetch.first, fetch.upto)
        if running.ticket.has_turn:
            self._interrupt()
            self._submit(running)
            self.go_on()

    def hear_pull(self, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None:
        self.fetching.give(len(self.core.pool.lookup(keys, upto)), keys, first, upto, reply)

    def hear_abort(self, request_id: str, attempt: int, reply: Callable[[Withdrawn], None] | None) -> None:
        """Nothing that a living worker says gets lost, so nobody has a reason to stop what one has in hand."""
        if self.admission.stop_attempt(request_id, attempt, self._timeline.now) is not None:
            raise AssertionError(f"{self!r} is to stop {request_id}/{attempt}")
        left = self.admission.how_left(request_id, attempt)
        if reply is not None:
            withdrawn = Withdrawn(self.name, self.incarnation, attempt, left.value if left is not None else "")
            self._wires.withdrawn(withdrawn, reply)

    def hear_order(self, order: WarmOrder, prefix: Prefix) -> None:
        self.warming.offer(order, prefix)

    def reset(self) -> None:
        """All of the cache goes; what runs is computed again."""
        self.warming.give_up()
        self._interrupt()
        if not self.core.reset_prefix_cache(reset_running_requests=True):
            raise AssertionError(f"{self!r} holds blocks")
        self._ns_ids.clear()
        self.fetching.host.clear()
        for running in self._running.values():
            running.request.delivered = range(0)
        self._event_seq += 1
        self._wires.events(KvEvents(VERSION, self.name, self.incarnation, self._event_seq, [Cleared(host=True)]))
        self.go_on()

    # --- orders: what the engine does for nobody ---

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def wires(self) -> Wires:
        return self._wires

    @property
    def block_size(self) -> int:
        return self._block_size

    def start(self, request: Request) -> None:
        """The engine is between two steps, or in one that this one comes too late for; `go_on` afterwards."""
        self._interrupt()
        self.core.add_request(request)

    def go_on(self) -> None:
        if not self._in_step and self._run_since is None:
            self._go()

    def abort(self, request: Request) -> None:
        self._interrupt()
        self.core.abort(request, self.now * 1000)

    def hear_dump_request(self) -> None:
        runs: dict[bytes, list[int]] = {}
        for key, ns_id in self._ns_ids.items():
            runs.setdefault(ns_id, []).append(key)
        stored = [Stored(ns_id, 0, _packed(keys)) for ns_id, keys in runs.items()]
        runs = {}
        for key, ns_id in self.fetching.host.items():
            runs.setdefault(ns_id, []).append(key)
        stored += [Stored(ns_id, 0, _packed(keys), HOST) for ns_id, keys in runs.items()]
        self._dump_id += 1
        dump = KvDump(VERSION, self.name, self.incarnation, self._event_seq, self._dump_id, 0, 1, stored)
        self._wires.events(dump)

    # --- load ---

    def report(self) -> None:
        """Send a report now; the next regular one follows by itself."""
        now = self._timeline.now
        self._report_is_due = False
        self._reported_at = now
        self._report += 1
        admission = self.admission
        load = Load(
            v=VERSION,
            worker=self.name,
            incarnation=self.incarnation,
            report=self._report,
            event_seq=self._event_seq,
            model=MODEL,
            serves=serves(self.revision),
            queue_ms=admission.queue_ms(now),
            running=admission.running,
            waiting=admission.waiting,
            slots=admission.slots,
            kv_usage=min(1.0, admission.prompt_tokens / self._kv_tokens),
            kv_tokens=self._kv_tokens,
            block_size=self._block_size,
            draining=admission.draining,
            accepted=self._accepted,
            reserved_slots=admission.reserved_slots,
        )
        self._accepted = []
        self._wires.load(load)
        self._timeline.after(self._setup.report_every_s, self._regular_report, self._report)

    def _regular_report(self, last_report: int) -> None:
        if self._report == last_report:
            self.report()

    def _load_changed(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            due_at = max(self._timeline.now, self._reported_at + self._setup.report_gap_s)
            self._timeline.at(due_at, self._report_change)

    def _report_change(self) -> None:
        if self._report_is_due:
            self.report()

    # --- the engine's clock ---

    def _go(self) -> None:
        """The engine is between two steps, now."""
        core, now = self.core, self._timeline.now
        if not core.has_work:
            return
        run_ms = core.undisturbed_ms()
        if run_ms:
            self._run_since = now
            self._wake += 1
            self._timeline.after(run_ms / 1000, self._run_ends, self._wake)
        else:
            self._step_under_way(now, core.step(now * 1000))

    def _run_ends(self, wake: int) -> None:
        if wake == self._wake and self._run_since is not None:
            result = self.core.advance(self._run_since * 1000, math.inf)
            self._run_since = None
            self._stepped(result)

    def _interrupt(self) -> None:
        """Something comes in: take a decode run that is under way to the first step that ends after now."""
        began = self._run_since
        if began is not None:
            self._run_since = None
            self._step_under_way(began, self.core.advance(began * 1000, self._timeline.now * 1000))

    def _step_under_way(self, began: float, result: StepResult) -> None:
        self._in_step = True
        ends_at = max(began + result.duration_ms / 1000, self._timeline.now)
        self._timeline.at(ends_at, self._step_ends, result)

    def _step_ends(self, result: StepResult) -> None:
        self._in_step = False
        self._stepped(result)

    def _stepped(self, result: StepResult) -> None:
        now = self._timeline.now
        self._tell_blocks(result)
        for request in result.first_tokens:
            running = self._running.get(request.request_id)
            if running is not None:
                self.admission.first_token(running.ticket, now)
                self._begin_answer(running)
        for request in result.finished:
            running = self._running.get(request.request_id)
            if running is not None:
                self._end(running, "ok", "")
            elif request is self.warming.request:
                self.warming.step_ended()
        if result.first_tokens:
            self._load_changed()
            self._give_turns()
        self._go()

    def _tell_blocks(self, result: StepResult) -> None:
        """What is held and what no longer is, once the step is over."""
        ops: list[Stored | Removed | Cleared] = []
        copies, ns_ids = self.core.pool.copies, self._ns_ids
        gone: dict[bytes, list[int]] = {}
        for key in result.removed:
            if not copies(key):
                ns_id = ns_ids.pop(key, None)
                if ns_id is not None:
                    gone.setdefault(ns_id, []).append(key)
        ops += [Removed(ns_id, _packed(keys)) for ns_id, keys in gone.items()]
        for stored in result.stored:
            ns_id = ns_of(stored.request.namespace.salt or "", self.revision)
            for key in stored.keys:
                ns_ids[key] = ns_id
            ops.append(Stored(ns_id, stored.parent or 0, _packed(stored.keys)))
        if self.fetching.host.capacity:
            ops += self._written_through(result)
        if ops:
            self._event_seq += 1
            self._wires.events(KvEvents(VERSION, self.name, self.incarnation, self._event_seq, ops))

    def _written_through(self, result: StepResult) -> list[Stored | Removed]:
        """What the step changes in the host store. Chains are used when they are found, and when they are left."""
        host = self.fetching.host
        ops: list[Stored | Removed] = []
        used = [(request, request.sequence.keys[: request.registered]) for request in result.admitted]
        used += [
            (request, request.sequence.keys[: request.computed // self._block_size]) for request in result.finished
        ]
        for request, keys in used:
            ns_id = ns_of(request.namespace.salt or "", self.revision)
            if host.store(ns_id, keys):
                ops.append(Stored(ns_id, 0, _packed(keys), HOST))
        for stored in result.stored:
            ns_id = ns_of(stored.request.namespace.salt or "", self.revision)
            if host.store(ns_id, stored.keys):
                ops.append(Stored(ns_id, stored.parent or 0, _packed(stored.keys), HOST))
        gone: dict[bytes, list[int]] = {}
        for ns_id, key in host.removed:
            gone.setdefault(ns_id, []).append(key)
        host.removed.clear()
        return ops + [Removed(ns_id, _packed(keys), HOST) for ns_id, keys in gone.items()]

    # --- ends ---

    def _end(self, running: _Running, status: str, error: str) -> None:
        self.admission.end(running.ticket, self._timeline.now)
        del self._running[running.dispatch.request_id]
        self._load_changed()
        self._send_outcome(running, status, error)
        self._give_turns()

    def _send_outcome(self, running: _Running, status: str, error: str) -> None:
        now = self._timeline.now
        arrival, dispatch, request = running.arrival, running.dispatch, running.request
        cached = request.cached_tokens
        first_ms = request.first_token_ms
        accepted_at = running.ticket.accepted_at
        outcome = Outcome(
            v=VERSION,
            request_id=dispatch.request_id,
            client_request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            worker=self.name,
            incarnation=self.incarnation,
            tenant=arrival.tenant,
            model=MODEL,
            ns_id=dispatch.ns_id.hex(),
            status=status,
            error=error,
            prefix_class=arrival.prefix_class,
            decision=dispatch.decision,
            prompt_tokens=arrival.prompt_tokens,
            predicted_tokens=dispatch.predicted_tokens,
            cached_tokens=cached,
            prefill_tokens=None if cached is None else arrival.prompt_tokens - cached,
            output_tokens=request.outputs,
            queue_wait_ms=self._waited_ms(running),
            ttft_ms=None if first_ms is None else first_ms - accepted_at * 1000,
            total_ms=(now - accepted_at) * 1000,
            ended_at=now,
        )
        self._on_end(outcome, request, running.fetch)
        self._wires.outcome(outcome)

    @staticmethod
    def _waited_ms(running: _Running) -> float | None:
        """For others' prefills, or for what was fetched: neither is the engine's own time."""
        waited_ms, fetch = running.ticket.queue_wait_ms(), running.fetch
        if waited_ms is None or fetch is None or fetch.ended_at is None:
            return waited_ms
        return max(waited_ms, (fetch.ended_at - fetch.began_at) * 1000)


def _packed(keys: list[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)
