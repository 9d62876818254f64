"""A router in virtual time: the production decision, attempts and books, between messages that take a while.

Owns: one router's view and its requests in hand; what router/dispatching.py does live, without timers: in the lab no
dispatch and no answer is lost.   Must not know: engines, other routers.
Units: seconds; wall time and monotonic time are one here."""

import itertools
import math
from collections import deque
from collections.abc import Callable

import msgspec

from ..bus.errors import Overloaded, PrefixbusError
from ..bus.messages import VERSION, Accept, Dispatch, Dispatched, Holdings, Load, Lookup, Outcome, Route
from ..router import policy
from ..router.attempts import QUEUE_TOO_LONG, STALE_HIT, WAITED, Attempts, Effect, Effects, pause_s
from ..router.books import Books
from ..router.cost import PROFILES
from ..router.fleet import Available, Fleet
from ..router.holdings import corrected
from ..router.learning import Learner
from ..router.policy import NO_LIMIT_MS, SCHEMES, Decision, Policy
from ..router.shortlist import Shortlist, shortlist
from . import rules
from .inflight import InFlight
from .rules import Rule, Sight, Truth
from .setup import INCARNATION, MODEL, SERVES, Setup
from .timeline import Timeline
from .wires import Wires
from .workload import Arrival, ns_of

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
        self.learner = Learner({MODEL: setup.model or PROFILES[setup.profile]})
        self.ordinals = itertools.count()
        self.in_hand: dict[str, _Request] = {}
        self.rule = None if isinstance(setup.policy, Policy) else setup.policy(setup.seed)
        self.in_flight = InFlight(rules.HISTORY_S)
        self._truth = truth

    def __repr__(self) -> str:
        return f"<Router {self.name} in hand={len(self.in_hand)} {self.fleet!r}>"

    def serve(self, request_id: str, arrival: Arrival) -> None:
        self.in_hand[request_id] = request = _Request(self, request_id, arrival)
        self.wires.look_up(Lookup(VERSION, request.route.ns_id, arrival.keys), request.looked_up)

    def decide(
        self,
        route: Route,
        available: list[Available],
        holdings: Holdings,
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
            whole_fleet=self.rule is not None or SCHEMES[weights.name].whole_fleet,
            ordinal=next(self.ordinals),
            has_waited=has_waited,
        )
        if self.rule is None:
            return policy.decide(short.shape, short.candidates, weights, now)
        return self._by_rule(self.rule, route, short, now)

    def _by_rule(self, rule: Rule, route: Route, short: Shortlist, now: float) -> Decision:
        """A decision that stands whatever the worker's true queue is."""
        shape = short.shape
        candidates = sorted(short.candidates, key=lambda one: one.worker)
        keys = memoryview(route.keys).cast("Q").tolist()
        if rules.cache_of(self.setup.policy) is not rules.Cache.OWN:
            # The directory says who computed what, and all have it.
            cached_tokens = self._truth.cached_tokens(candidates[0].worker, keys, shape.prompt_tokens)
            candidates = [msgspec.structs.replace(one, cached_tokens=cached_tokens) for one in candidates]
        chosen = rule.choose(Sight(shape, keys, candidates, self.in_flight, now, self._truth))
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
        self.fleet.heard(load, self.timeline.now)

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
        self.fleet.sweep(self.timeline.now)


class _Request:
    """A request in hand."""

    def __init__(self, router: Router, request_id: str, arrival: Arrival) -> None:
        self.attempts = Attempts(router.setup.max_attempts)
        self.route = Route(
            v=VERSION,
            request_id=request_id,
            client_request_id=request_id,
            tenant=arrival.tenant,
            model=MODEL,
            serves=SERVES,
            ns_id=ns_of(arrival.tenant),
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
        self._holdings = Holdings(VERSION, [])
        self._shared_blocks = 0
        self._asked_at = router.timeline.now
        self._told: dict[str, int] = {}
        self._decision: Decision | None = None

    def looked_up(self, holdings: Holdings) -> None:
        if self.attempts.ended:
            return
        self._holdings = holdings
        self._shared_blocks = self._router.books.traffic.shared_blocks(self.route.ns_id, self.route.keys)
        self.perform((Effect.CHOOSE,))

    def hear_accept(self, accept: Accept) -> None:
        if accept.refused:
            if accept.refused == STALE_HIT:
                self._told[accept.worker] = accept.held_blocks
            self.perform(self.attempts.refused(accept.attempt, accept.refused))
        else:
            self.perform(self.attempts.accepted(accept.attempt))

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
                case Effect.SEND:
                    self._send()
                case Effect.TAKE_BACK:
                    router.books.taken_back(self.route.request_id, self.attempts.attempt, router.timeline.now)
                    self._announce("", 0.0, b"")
                case Effect.RELEASE:
                    router.fleet.settle(self.route.request_id, self.attempts.attempt, router.timeline.now)
                case Effect.ANSWER:
                    router.on_answer(self.route.request_id, self.attempts.error or PrefixbusError())
                case Effect.ABORT_STALE:
                    pass
                case effect:
                    raise AssertionError(f"unreachable in the lab: {effect}")
        if self.attempts.ended:
            router.in_hand.pop(self.route.request_id, None)

    def _resume(self) -> None:
        self.perform(self.attempts.resume())

    def _choose(self) -> Effects:
        router, attempts = self._router, self.attempts
        survey = router.fleet.survey(MODEL, SERVES, router.timeline.now)
        available = [one for one in survey.available if (one.name, one.worker.incarnation) not in attempts.avoid]
        if not available:
            return attempts.nobody(Overloaded())
        holdings = self._holdings
        if router.setup.predict_delay_s is not None:
            now = router.timeline.now
            holdings = router.books.recent.complete(holdings, self.route.ns_id, self.route.keys, self._asked_at, now)
        for worker, depth in self._told.items():
            holdings = corrected(holdings, worker, depth)
        self._decision = decision = router.decide(
            self.route, available, holdings, self._shared_blocks, has_waited=attempts.has_waited
        )
        return attempts.decided(decision.worker, INCARNATION)

    def _send(self) -> None:
        router, route, attempts, decision = self._router, self.route, self.attempts, self._decision
        assert decision is not None
        now = router.timeline.now
        router.books.sent(
            route.request_id,
            attempts.attempt,
            attempts.worker,
            INCARNATION,
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
            incarnation=INCARNATION,
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
        router.wires.dispatch(attempts.worker, dispatch, self._arrival, router.hear_accept)
        believed_s = 2 * decision.ranking[0].ttft_ms / 1000 + ANNOUNCED_S
        self._announce(attempts.worker, now + believed_s, route.keys)
        router.wires.remember(route.tenant, route.ns_id, route.keys, self._held_blocks)

    @property
    def _held_blocks(self) -> int:
        return self._holdings.levels[0].depth if self._holdings.levels else 0

    def _announce(self, worker: str, expires_at: float, keys: bytes) -> None:
        announced = Dispatched(
            v=VERSION,
            request_id=self.route.request_id,
            attempt=self.attempts.attempt,
            router=self._router.name,
            worker=worker,
            incarnation=INCARNATION,
            prefill_ms=self._decision.work_ms if self._decision else 0.0,
            ns_id=self.route.ns_id,
            keys=keys,
            expires_at=expires_at,
            prefix_class=self.route.prefix_class,
            held_blocks=self._held_blocks,
            shared_blocks=self._shared_blocks,
        )
        self._router.wires.announce(announced, self._router)
