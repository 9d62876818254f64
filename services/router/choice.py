"""Where one request goes: what is known of who holds its prompt, and what is decided from that, each time it must be.

Owns: the directory's answer and what bridges said against it, the last decision, what all choices of a router share.
Must not know: how a policy weighs (policy.py), how an attempt goes on (attempts.py, dispatching.py)."""

import itertools
from collections.abc import Callable

from .. import __version__
from ..bus import namespace, subjects
from ..bus.config import ModelSection
from ..bus.connection import NoResponders
from ..bus.errors import NoWorkers, Overloaded, PrefixbusError, Unavailable, UnknownModel
from ..bus.messages import (
    HOLDINGS,
    LOOKUP,
    VERSION,
    DecisionRecord,
    Holdings,
    Lookup,
    MessageInvalid,
    Route,
    ShadowRecord,
)
from ..bus.runtime import Runtime
from . import cost, gains, journal, overload, policy
from .attempts import Attempts, Effects
from .books import Books
from .credit import Credit, said_blocks
from .fleet import Available, Fleet, Survey
from .holdings import check, corrected
from .learning import Learner
from .metrics import Metrics
from .patience import Patience
from .policy import SCHEMES, Decision, Policy
from .rollout import Rollout
from .shortlist import Shortlist, shortlist

# For what is wrong, load apart.
RETRY_AFTER_S = 1


class Choices:
    """What the choices of this router share. `record` takes the record of each decision."""

    def __init__(
        self,
        rt: Runtime,
        fleet: Fleet,
        books: Books,
        metrics: Metrics,
        record: Callable[[DecisionRecord], None],
        journal_key: bytes,
    ) -> None:
        self.rt = rt
        self.clock = rt.clock
        self.settings = rt.config.router
        self.fleet = fleet
        self.books = books
        self.metrics = metrics
        self.record = record
        self.journal_key = journal_key
        # By shard of the directory: one that hangs says nothing about another.
        self.patience = [Patience() for _ in range(rt.config.directory.shards)]
        # The same of one that is wrong all the time.
        self.credit = [Credit() for _ in range(rt.config.directory.shards)]
        self.configured: Policy = policy.known(Policy(name=rt.config.policy.name))
        self.rollout = Rollout(self.configured)
        self.ordinals = itertools.count()
        self.models = {name: prior_of(name, section) for name, section in rt.config.models.items()}
        self.learner = Learner(self.models)


def prior_of(name: str, section: ModelSection) -> cost.PrefillModel:
    """What prices a model's prefills until its workers are measured. :raises ConfigInvalid: no such profile."""
    measured = section.measured
    if measured is None:
        return cost.profile_of(name, section.profile)
    return cost.PrefillModel(
        measured.fixed_ms, measured.token_ms, measured.attention_ms, measured.decode_context_token_ms
    )


class Choice:
    """One request's. Of the last decision: `decision`, the `pool` and `block_size` of its worker, and why that is not
    one that holds more (`left_because`). `route` has no prompt any more once nobody else will be asked."""

    def __init__(self, shared: Choices, route: Route, attempts: Attempts) -> None:
        self.route = route
        self.decision: Decision | None = None
        self.block_size = 1
        self.pool = ""
        self.left_because = ""
        self.shared_blocks = 0
        """Of the prompt, what most traffic begins with."""
        self._shared = shared
        self._attempts = attempts
        self._holdings: Holdings | None = None
        self._asked_at = 0.0
        # How many blocks workers hold by their bridges' own word.
        self._told: dict[str, int] = {}
        # The directory's answer, with what was dispatched since, corrected by that word.
        self._known: Holdings | None = None

    def __repr__(self) -> str:
        return f"<Choice {self.decision.worker if self.decision else 'none yet'}>"

    @property
    def held_blocks(self) -> int:
        """The deepest that any worker held when we asked."""
        return self._holdings.levels[0].depth if self._holdings is not None and self._holdings.levels else 0

    async def look_up(self) -> None:
        """Asks the directory who holds the prompt."""
        route = self.route
        self._holdings = await self._ask()
        self.shared_blocks = self._shared.books.traffic.shared_blocks(route.ns_id, route.keys)

    def correct(self, worker: str, held_blocks: int) -> None:
        """Its bridge says how much of the prompt is there."""
        self._told[worker] = held_blocks

    def found(self, blocks: int) -> None:
        """So much of the prompt there was where it was sent."""
        if self.decision is not None:
            said = said_blocks(self.decision.ranking[0].candidate, self.route.prompt_tokens, self.block_size)
            self._credit.heard(said, blocks, self.shared_blocks)

    def make(self) -> Effects:
        """Decides who is to have the next attempt, and records why."""
        route, shared, attempts = self.route, self._shared, self._attempts
        now, wall = shared.clock.now(), shared.clock.wall()
        if wall >= route.deadline_at:
            return attempts.deadline()
        if route.model not in shared.models:
            return attempts.nobody(UnknownModel(f"{route.model[:80]!r} is not in the router's configuration."))
        survey = self._survey(now)
        available = survey.available
        if attempts.avoid:
            available = [one for one in available if (one.name, one.worker.incarnation) not in attempts.avoid]
        if not available:
            why = _why_nobody(survey, route.model)
            is_one_late = any(life not in attempts.avoid for life in survey.late)
            return attempts.nobody_now(why, now) if is_one_late else attempts.nobody(why)
        # Later attempts are of a request that somebody had taken, or that was sent where there was room.
        if not attempts.attempt and overload.is_overloaded([one.queue_ms for one in available], self._longest_ms()):
            return attempts.nobody(Overloaded("No worker could begin the request soon enough."))
        excluded = survey.excluded | {worker: gains.TRIED for worker, _ in attempts.avoid}
        return self._make_from(available, excluded, now, wall)

    def retry_after_s(self, error: Unavailable) -> int:
        """When the client should come again."""
        shared = self._shared
        if not isinstance(error, Overloaded) or self.route.model not in shared.models:
            return RETRY_AFTER_S
        survey = self._survey(shared.clock.now())
        return overload.retry_after_s([one.queue_ms for one in survey.available], survey.full_ms, self._longest_ms())

    @property
    def _credit(self) -> Credit:
        credit = self._shared.credit
        return credit[namespace.shard_of(self.route.ns_id, len(credit))]

    async def _ask(self) -> Holdings | None:
        """None when the directory did not answer: the request is decided blind."""
        route, shared = self.route, self._shared
        started_at = self._asked_at = shared.clock.now()
        shard = namespace.shard_of(route.ns_id, len(shared.patience))
        patience = shared.patience[shard]
        if not patience.may_ask(started_at) or not self._credit.may_ask():
            shared.metrics.lookups_skipped.inc()
            return None
        try:
            reply = await shared.rt.bus.request(
                subjects.lookup(shard),
                LOOKUP.encode(Lookup(VERSION, route.ns_id, route.keys)),
                timeout_s=shared.settings.lookup_timeout_ms / 1000,
            )
            holdings = HOLDINGS.decode(reply.data)
            check(holdings, len(route.keys) // 8)
        except PrefixbusError as exc:
            shared.metrics.lookup_failures.inc()
            if isinstance(exc, MessageInvalid):
                shared.rt.caught(exc, "deciding blind")
                return None
            # That nobody listens was said at once: there is no time to be saved by not asking.
            if not isinstance(exc, NoResponders):
                patience.missed(shared.clock.now())
            shared.rt.log.debug("deciding blind: %s", exc)
            return None
        patience.answered()
        shared.metrics.lookup_ms.observe((shared.clock.now() - started_at) * 1000)
        return holdings

    def _survey(self, now: float) -> Survey:
        route, shared = self.route, self._shared
        pools = shared.settings.pools.get(route.tenant)
        block_size = shared.rt.config.models[route.model].block_size
        return shared.fleet.survey(route.model, route.serves, now, pools, block_size=block_size)

    def _longest_ms(self) -> float:
        left_ms = 1000 * (self.route.deadline_at - self._shared.clock.wall())
        return overload.longest_ms(self._shared.settings.overload_queue_ms, left_ms)

    def _make_from(self, available: list[Available], excluded: dict[str, str], now: float, wall: float) -> Effects:
        route, shared, attempts = self.route, self._shared, self._attempts
        acting, role = shared.rollout.acting(route.request_id, route.prefix_class)
        ordinal = next(shared.ordinals)
        self._known = self._holdings
        if self._known is not None:
            self._known = shared.books.recent.complete(self._known, route.ns_id, route.keys, self._asked_at, now)
            for worker, depth in self._told.items():
                self._known = corrected(self._known, worker, depth)
        shortlisted, decision = self._decide(acting, available, ordinal, now, wall)
        self.decision = decision
        chosen = next(one.worker for one in available if one.name == decision.worker)
        self.block_size = chosen.block_size
        self.pool = chosen.load.pool
        self.left_because = gains.left_because(
            decision,
            self._known,
            excluded,
            prompt_tokens=route.prompt_tokens,
            block_size=shortlisted.shape.block_size,
            min_reuse_tokens=acting.min_reuse_tokens,
        )
        effects = attempts.decided(decision.worker, chosen.incarnation)
        shared.metrics.decide_us.observe((shared.clock.now() - now) * 1e6)
        shared.record(
            journal.build(
                route,
                decision,
                shortlisted,
                acting,
                attempt=attempts.attempt,
                router=shared.rt.instance,
                excluded=excluded,
                key=shared.journal_key,
                code_version=__version__,
                rollout=role,
                shadow=self._look_on(decision, available, ordinal, now, wall),
            )
        )
        return effects

    def _decide(
        self, by: Policy, available: list[Available], ordinal: int, now: float, wall: float
    ) -> tuple[Shortlist, Decision]:
        shortlisted = shortlist(
            self.route,
            available,
            self._known,
            self.shared_blocks,
            self._shared.learner,
            by,
            now,
            whole_fleet=SCHEMES[by.name].whole_fleet,
            ordinal=ordinal,
            has_waited=self._attempts.has_waited,
        )
        return shortlisted, policy.decide(shortlisted.shape, shortlisted.candidates, by, wall)

    def _look_on(
        self, decision: Decision, available: list[Available], ordinal: int, now: float, wall: float
    ) -> ShadowRecord | None:
        """What the shadow policy, if there is one, would have decided with the same knowledge."""
        shadow = self._shared.rollout.shadow
        if shadow is None:
            return None
        _, other = self._decide(shadow.policy, available, ordinal, now, wall)
        self._shared.metrics.shadow_decisions.labels("agrees" if other.worker == decision.worker else "differs").inc()
        return journal.shadow(shadow.policy, other)


def _why_nobody(survey: Survey, model: str) -> PrefixbusError:
    """Which error says best why there is no candidate."""
    reasons = [reason for reason in survey.excluded.values() if reason not in ("model", "pool")]
    if survey.available or "busy" in reasons:
        return Overloaded()
    if reasons:
        return NoWorkers(f"All workers of {model} are {' or '.join(sorted(dict.fromkeys(reasons)))}.")
    return NoWorkers()
