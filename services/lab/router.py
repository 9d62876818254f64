"""A router in virtual time: the production decision, attempts and books, between messages that take a while.

Owns: one router's view and its requests in hand; what router/dispatching.py does live. In the lab workers fail, but
what is said by one that lives is never lost, and requests have no deadline: what only those need is not here.
Must not know: engines, other routers.
Units: seconds; wall time and monotonic time are one here."""

import itertools
import math
from collections import deque
from collections.abc import Callable

import msgspec

from ..bus.errors import NoWorkers, Overloaded, PrefixbusError
from ..bus.messages import VERSION, Accept, Dispatch, Dispatched, Holdings, Load, Lookup, Outcome, Route
from ..engine_sim.profile import PRESETS
from ..router import policy
from ..router.attempts import QUEUE_TOO_LONG, STALE_HIT, WAITED, Attempts, Effect, Effects, pause_s
from ..router.books import Books
from ..router.cost import PROFILES
from ..router.credit import Credit, said_blocks
from ..router.fleet import Available, Fleet, Lost
from ..router.holdings import corrected
from ..router.learning import Learner
from ..router.policy import NO_LIMIT_MS, SCHEMES, Candidate, Decision, Policy
from ..router.shortlist import Shortlist, shortlist
from ..router.transfer import Links
from . import rules
from .inflight import InFlight
from .rules import Rule, Sight, Truth
from .setup import MODEL, Setup, serves
from .timeline import Timeline
from .wires import Wires, Withdrawn
from .worker import STARTED
from .workload import Arrival, keys_under, ns_of

# As in router/dispatching.py and the config's defaults.
ANNOUNCED_S = 10.0
UNLISTED_S = 2.0
ACCEPT_S = 0.5
SUSPECT_AFTER_S = 0.6
LOST_AFTER_S = 3.0

OnAnswer = Callable[[str, PrefixbusError], None]
"""The router itself ended a request."""


class Router:
    def __init__(
        self, name: str, timeline: Timeline, wires: Wires, setup: Setup, truth: Truth, on_answer: OnAnswer
    ) -> None:
        self.name = name
        self.timeline = timeline
        self.wires = wires
        self.setup = setup
        self.on_answer = on_answer
        self.fleet = Fleet(SUSPECT_AFTER_S, LOST_AFTER_S)
        self.books = Books(self.fleet)
        self.credit = Credit()
        self.learner = Learner({MODEL: setup.model or PROFILES[setup.profile]})
        self.ordinals = itertools.count()
        self.in_hand: dict[str, _Request] = {}
        self.rule = None if isinstance(setup.policy, Policy) else setup.policy(setup.seed)
        self.in_flight = InFlight(rules.HISTORY_S)
        self.links = _links(setup)
        self._truth = truth

    def __repr__(self) -> str:
        return f"<Router {self.name} in hand={len(self.in_hand)} {self.fleet!r}>"

    def serve(self, request_id: str, arrival: Arrival, revision: int = 0) -> None:
        """`arrival` is keyed for revision 0."""
        if revision:
            arrival = msgspec.structs.replace(arrival, keys=keys_under(revision, arrival.keys))
        self.in_hand[request_id] = request = _Request(self, request_id, arrival, revision)
        if self.rule is not None or self.credit.may_ask():
            self.wires.look_up(Lookup(VERSION, request.route.ns_id, arrival.keys), request.looked_up)
        else:
            request.looked_up(None)

    def decide(
        self,
        route: Route,
        arrival: Arrival,
        available: list[Available],
        holdings: Holdings | None,
        shared_blocks: int,
        *,
        has_waited: bool = False,
    ) -> Decision:
        now = self.timeline.now
        wanted = self.setup.policy
        weights = wanted if isinstance(wanted, Policy) else Policy()
        short = shortlist(
            route,
            available,
            holdings,
            shared_blocks,
            self.learner,
            weights,
            now,
            # With links the cheapest may be a worker that holds nothing.
            whole_fleet=self.rule is not None or self.links is not None or SCHEMES[weights.name].whole_fleet,
            ordinal=next(self.ordinals),
            has_waited=has_waited,
            links=self.links,
        )
        if self.rule is None:
            return policy.decide(short.shape, short.candidates, weights, now)
        return self._by_rule(self.rule, route, arrival, short, now)

    def _by_rule(self, rule: Rule, route: Route, arrival: Arrival, short: Shortlist, now: float) -> Decision:
        """A decision that stands whatever the worker's true queue is."""
        shape = short.shape
        candidates = [_with_host(one, shape.block_size) for one in sorted(short.candidates, key=lambda one: one.worker)]
        keys = memoryview(route.keys).cast("Q").tolist()
        if rules.cache_of(self.setup.policy) is not rules.Cache.OWN:
            # The directory says who computed what, and all have it.
            cached_tokens = self._truth.cached_tokens(candidates[0].worker, arrival)
            candidates = [msgspec.structs.replace(one, cached_tokens=cached_tokens) for one in candidates]
        chosen = rule.choose(Sight(shape, arrival, keys, candidates, self.in_flight, now, self._truth))
        ranking = [policy.price(shape, one, Policy()) for one in candidates]
        ranking.sort(key=lambda terms: terms.candidate.worker != chosen)
        first = ranking[0]
        uncached_tokens = max(1, shape.prompt_tokens - first.candidate.cached_tokens)
        self.in_flight.ended(route.request_id)
        self.in_flight.sent(
            route.request_id,
            chosen,
            keys,
            shape.prompt_tokens,
            uncached_tokens,
            shape.block_size,
            rules.compute_ms(shape, first.candidate),
            now,
        )
        return Decision(
            worker=chosen,
            name="rule",
            predicted_tokens=first.candidate.cached_tokens,
            work_ms=first.work_ms,
            queue_ms=first.candidate.queue_ms,
            max_queue_ms=NO_LIMIT_MS,
            ranking=ranking,
            decided_at=now,
        )

    # --- what is heard ---

    def hear_load(self, load: Load) -> None:
        lost = self.fleet.heard(load, self.timeline.now)
        if lost is not None:
            self._lost(lost)

    def hear_accept(self, accept: Accept) -> None:
        request = self.in_hand.get(accept.request_id)
        if accept.refused in (QUEUE_TOO_LONG, WAITED):
            self.fleet.correct(accept.worker, accept.incarnation, accept.queue_ms, self.timeline.now)
        if request is not None:
            request.hear_accept(accept)

    def hear_dispatched(self, announced: Dispatched) -> None:
        now = self.timeline.now
        self.books.announced(announced, now, max(now, announced.expires_at), now + ACCEPT_S + UNLISTED_S)

    def hear_outcome(self, outcome: Outcome) -> None:
        now = self.timeline.now
        around = self.fleet.surroundings(outcome.request_id, outcome.attempt, outcome.worker, outcome.ttft_ms)
        if around is not None and self.setup.learns:
            self.learner.hear(outcome, around, now)
        self.fleet.settle(outcome.request_id, outcome.attempt, now)
        self.in_flight.ended(outcome.request_id)
        request = self.in_hand.get(outcome.request_id)
        if request is not None:
            if outcome.cached_tokens is not None:
                request.found(outcome.attempt, outcome.cached_tokens // request.block_size)
            request.perform(request.attempts.outcome(outcome.attempt))

    def hear_first_token(self, request_id: str) -> None:
        """Of a request that it sees the answer of: nothing of ours is told by it."""
        self.in_flight.first_token(request_id)

    def hear_cancel(self, tenant: str, request_id: str) -> None:
        request = self.in_hand.get(request_id)
        if request is not None:
            request.perform(request.attempts.cancel())

    def tick(self) -> None:
        """Call it several times a second."""
        for lost in self.fleet.sweep(self.timeline.now):
            self._lost(lost)
        for request in list(self.in_hand.values()):
            if request.attempts.waits_until is not None:
                request.look_around()

    def _lost(self, lost: Lost) -> None:
        for request in list(self.in_hand.values()):
            if request.attempts.worker == lost.worker:
                request.perform(request.attempts.lost(lost.worker, lost.incarnation))


class _Request:
    """A request in hand."""

    def __init__(self, router: Router, request_id: str, arrival: Arrival, revision: int) -> None:
        self.attempts = Attempts(router.setup.max_attempts, patience_s=LOST_AFTER_S)
        self.route = Route(
            v=VERSION,
            request_id=request_id,
            client_request_id=request_id,
            tenant=arrival.tenant,
            model=MODEL,
            serves=serves(revision),
            ns_id=ns_of(arrival.tenant, revision),
            keys=arrival.keys,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            prefix_class=arrival.prefix_class,
            reply="",
            deadline_at=math.inf,
            job=b"",
        )
        self._router = router
        self._arrival = arrival
        self._holdings: Holdings | None = None
        self._shared_blocks = 0
        self._asked_at = router.timeline.now
        self._told: dict[str, int] = {}
        # Of the worker it was sent to.
        self.block_size = 1
        self._decision: Decision | None = None
        self._stale: Accept | None = None
        # The wait for an answer that is under way; an earlier one's end says nothing.
        self._silence = 0

    def looked_up(self, holdings: Holdings | None) -> None:
        if self.attempts.ended:
            return
        self._holdings = holdings
        self._shared_blocks = self._router.books.traffic.shared_blocks(self.route.ns_id, self.route.keys)
        self.perform((Effect.CHOOSE,))

    def hear_accept(self, accept: Accept) -> None:
        foreign = self.attempts.of_another_life(accept.attempt, accept.worker, accept.incarnation)
        if foreign is not None:
            self.perform(foreign)
            return
        self._stale = accept
        if accept.refused == STARTED:
            self.perform(self.attempts.started(accept.attempt))
        elif accept.refused:
            if accept.refused == STALE_HIT:
                self._told[accept.worker] = accept.held_blocks
                self.found(accept.attempt, accept.held_blocks)
            self.perform(self.attempts.refused(accept.attempt, accept.refused))
        else:
            self.perform(self.attempts.accepted(accept.attempt))

    def found(self, attempt: int, blocks: int) -> None:
        """What there was of it, where it was sent."""
        if attempt == self.attempts.attempt and self._decision is not None:
            said = said_blocks(self._decision.ranking[0].candidate, self.route.prompt_tokens, self.block_size)
            self._router.credit.heard(said, blocks, self._shared_blocks)

    def hear_withdrawn(self, withdrawn: Withdrawn) -> None:
        attempt = withdrawn.attempt
        if not withdrawn.stage:
            foreign = self.attempts.of_another_life(attempt, withdrawn.worker, withdrawn.incarnation)
            if foreign is not None:
                self.perform(foreign)
                return
        self.perform(self.attempts.withdrawn(attempt, withdrawn.stage))

    def perform(self, effects: Effects) -> None:
        router = self._router
        to_do = deque(effects)
        while to_do:
            match to_do.popleft():
                case Effect.CHOOSE:
                    to_do.extend(self._choose())
                case Effect.PAUSE:
                    seconds = pause_s(self.route.request_id, self.attempts.attempt)
                    router.timeline.after(seconds, self._resume)
                case Effect.WAIT:
                    self._wait()
                case Effect.SEND:
                    self._send()
                case Effect.WITHDRAW:
                    self._stop_and_ask({self.attempts.attempt: self.attempts.worker})
                case Effect.ASK:
                    self._stop_and_ask(self.attempts.doubtful)
                case Effect.CLAIM:
                    router.wires.claim(self.route.request_id, self._claimed)
                case Effect.TAKE_BACK:
                    router.books.taken_back(self.route.request_id, self.attempts.attempt, router.timeline.now)
                    self._announce("", 0.0, b"")
                case Effect.RELEASE:
                    router.fleet.settle(self.route.request_id, self.attempts.attempt, router.timeline.now)
                case Effect.ANSWER:
                    router.in_flight.ended(self.route.request_id)
                    router.on_answer(self.route.request_id, self.attempts.error or PrefixbusError())
                case Effect.ABORT_STALE:
                    if self._stale is not None:
                        router.wires.abort(self._stale.worker, self.route.request_id, self._stale.attempt)
                case Effect.ABORT:
                    router.wires.abort(self.attempts.worker, self.route.request_id, self.attempts.attempt)
                case Effect.SEND_AGAIN as effect:
                    raise AssertionError(f"unreachable in the lab, where nobody is told that nobody listens: {effect}")
        if self.attempts.ended:
            router.in_hand.pop(self.route.request_id, None)

    def _resume(self) -> None:
        self.perform(self.attempts.resume())

    def _wait(self) -> None:
        """The router looks around; past the bound the request does so itself."""
        timeline, waits_until = self._router.timeline, self.attempts.waits_until
        assert waits_until is not None
        timeline.at(max(timeline.now, waits_until) + 0.01, self._look)

    def _look(self) -> None:
        self.perform(self.attempts.look())

    def look_around(self) -> None:
        """Once a late worker is back, or none is to be waited for, it chooses anew."""
        survey = self._router.fleet.survey(MODEL, self.route.serves, self._router.timeline.now)
        if survey.available or not survey.late:
            self._look()

    def _stop_and_ask(self, workers: dict[int, str]) -> None:
        """By attempt."""
        self._wait_for_answer()
        for attempt, worker in workers.items():
            self._router.wires.abort(worker, self.route.request_id, attempt, self.hear_withdrawn)

    def _claimed(self, is_ours: bool) -> None:
        self.perform(self.attempts.claimed(is_ours))

    def _wait_for_answer(self) -> None:
        self._silence += 1
        self._router.timeline.after(ACCEPT_S, self._is_silent, self._silence, self.attempts.attempt)

    def _is_silent(self, silence: int, attempt: int) -> None:
        if silence == self._silence and not self.attempts.ended:
            self.perform(self.attempts.silent(attempt))

    def _choose(self) -> Effects:
        router, attempts = self._router, self.attempts
        survey = router.fleet.survey(MODEL, self.route.serves, router.timeline.now)
        available = [one for one in survey.available if (one.name, one.worker.incarnation) not in attempts.avoid]
        if not available:
            why = Overloaded() if survey.available or "busy" in survey.excluded.values() else NoWorkers()
            is_one_late = any(life not in attempts.avoid for life in survey.late)
            return attempts.nobody_now(why, router.timeline.now) if is_one_late else attempts.nobody(why)
        holdings = self._holdings
        if holdings is not None and router.setup.predict_delay_s is not None:
            now = router.timeline.now
            holdings = router.books.recent.complete(holdings, self.route.ns_id, self.route.keys, self._asked_at, now)
        for worker, depth in self._told.items():
            holdings = None if holdings is None else corrected(holdings, worker, depth)
        self._decision = decision = router.decide(
            self.route, self._arrival, available, holdings, self._shared_blocks, has_waited=attempts.has_waited
        )
        chosen = next(one.worker for one in available if one.name == decision.worker)
        self.block_size = chosen.block_size
        return attempts.decided(decision.worker, chosen.incarnation)

    def _send(self) -> None:
        router, route, attempts, decision = self._router, self.route, self.attempts, self._decision
        assert decision is not None
        now = router.timeline.now
        router.books.sent(
            route.request_id,
            attempts.attempt,
            attempts.worker,
            attempts.incarnation,
            decision.work_ms,
            route.ns_id,
            route.keys,
            now,
            math.inf,
        )
        is_bounded = router.setup.bounded_start and attempts.may_rechoose
        dispatch = Dispatch(
            v=VERSION,
            request_id=route.request_id,
            attempt=attempts.attempt,
            incarnation=attempts.incarnation,
            max_queue_ms=decision.max_queue_ms if is_bounded else NO_LIMIT_MS,
            accept_by_at=now + ACCEPT_S,
            prefill_ms=decision.work_ms,
            predicted_tokens=decision.predicted_tokens,
            decision=decision.name,
            ns_id=route.ns_id,
            job=b"",
            is_warm=decision.is_warm,
            max_wait_ms=decision.max_wait_ms if router.setup.bounded_start and not attempts.is_last else 0.0,
            min_held_blocks=decision.min_held_blocks if is_bounded else 0,
        )
        self._wait_for_answer()
        source = ""
        if router.links is not None and decision.pull is not None:
            source = decision.pull.source
            router.links.begun(source, attempts.worker, decision.pull.tokens, now)
        router.wires.dispatch(attempts.worker, dispatch, self._arrival, router.hear_accept, source)
        believed_s = 2 * decision.ranking[0].ttft_ms / 1000 + ANNOUNCED_S
        self._announce(attempts.worker, now + believed_s, route.keys)
        router.wires.remember(route.tenant, route.ns_id, route.keys, self._held_blocks)

    @property
    def _held_blocks(self) -> int:
        return self._holdings.levels[0].depth if self._holdings is not None and self._holdings.levels else 0

    def _announce(self, worker: str, expires_at: float, keys: bytes) -> None:
        announced = Dispatched(
            v=VERSION,
            request_id=self.route.request_id,
            attempt=self.attempts.attempt,
            router=self._router.name,
            worker=worker,
            incarnation=self.attempts.incarnation,
            prefill_ms=self._decision.work_ms if self._decision else 0.0,
            ns_id=self.route.ns_id,
            keys=keys,
            expires_at=expires_at,
            prefix_class=self.route.prefix_class,
            held_blocks=self._held_blocks,
            shared_blocks=self._shared_blocks,
        )
        self._router.wires.announce(announced, self._router)


def _links(setup: Setup) -> Links | None:
    """What routers take transfers for. Those of other rules know of no pulls."""
    pulls = setup.transfer_bandwidth if isinstance(setup.policy, Policy) else None
    if not pulls and not setup.host_tokens:
        return None
    return Links(
        PRESETS[setup.profile].kv_token_bytes,
        bytes_per_ms=(pulls or 0.0) / 1000,
        host_bytes_per_ms=setup.host_bandwidth / 1000 if setup.host_tokens else 0.0,
    )


def _with_host(candidate: Candidate, block_size: int) -> Candidate:
    """To rules a block in the host store is a hit like others: it is there, and reported."""
    if candidate.pull is None:
        return candidate
    cached_tokens = candidate.cached_tokens + candidate.pull.tokens
    return msgspec.structs.replace(
        candidate,
        cached_tokens=cached_tokens,
        held_blocks=cached_tokens // block_size,
        announced_blocks=0,
        pull=None,
    )
