"""Which workers should compute which popular prefixes before a request has to.

    rewarm   a worker that joined, restarted or was reset gets back what it served lately, and what it is the home of
    copy     one more worker gets what many requests want, while it is idle

    benefit = expected reuses / (copies held or under way + 1) x prefill saved by one reuse / tokens of KV it takes

The next mean lifetime of a count is expected to bring as many reuses as the last did, shared among all who hold the
prefix. Bytes are counted as tokens: workers of one model pay the same for each. What is ordered is little and late on
purpose: one order a worker at a time, to idle workers alone, each (worker, prefix) a few times at most; whoever carries
it out gives way to every request.

A prefix is what a dispatch found held somewhere: the question behind it never is. Of what is short, or used by `rag`
requests alone and not often, no copies are made.

Owns: how popular prefixes are and who served them (bounded), what is ordered and not there yet.
Must not know: NATS, clocks, how the index is made, tokens, who carries orders out.
Units: times in seconds on the caller's monotonic clock; key u64; depth in blocks; KV in tokens.   Source: DESIGN 5
(Placement); facts/policy.md (what prefill costs)."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..bus.home import home
from ..bus.messages import VERSION, Dispatched, Load, Outcome, WarmOrder

REWARM = "rewarm"
COPY = "copy"

# Workers that a prefix is remembered to have been served by.
_SERVED_BY_MAX = 4
# Prefixes looked at in one call, about 0.1 ms each in a fleet of 256 where homes are computed.
_LOOKS = 16
# The hottest prefixes that a worker which lost its cache is considered for.
_REWARM_CONSIDERED = 256
# Orders to one worker that are remembered.
_ORDERED_MAX = 256
# A router takes an order up within this, or has not got its tokens.
_TAKEN_UP_S = 1.0
# An answered order's events come through the stream a little later (as EVENTS_FOLLOW_S of shard.py).
_EVENTS_FOLLOW_S = 1.0
# A worker that has carried an order out is left alone for so long; one that had to give it up for twice as long each
# time, since it is less idle than it looks.
_PAUSE_S = 0.5
_PAUSE_MAX_S = 30.0
# An order that was given up counts as so many: where it happens often, the whole fleet has other things to do.
_GIVEN_UP_COSTS = 20.0
# Silent for this long: the worker is suspect, and gets no orders; for that long: it is forgotten.
_SUSPECT_S = 0.6
_FORGET_S = 300.0

# What one reuse saves, as an H100 computes an 8B model (facts/policy.md). Only ratios matter.
_STEP_MS = 16.0
_TOKEN_MS = 0.0172
_TOKEN_PAIR_MS = 2e-8

Holders = Callable[[bytes, int], Collection[str]]
"""The workers that hold the block of this namespace and key, or have had it announced by a request."""

_Id = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How much is ordered. With `copies_max` below 2 no copies are, with `rewarm_share` 0 no re-warming is."""

    # A prefix that so many workers hold is not copied further.
    copies_max: int = 5
    # The most of a worker's KV that copies ordered for it may take.
    copies_share: float = 0.1
    # The most of a worker's KV that may be ordered after it lost its cache, and how long after.
    rewarm_share: float = 0.5
    rewarm_within_s: float = 60.0
    # Expected reuses of one more copy, below which it is not worth the trouble.
    copy_reuses: float = 8.0
    rewarm_reuses: float = 2.0
    # The same for what only `rag` requests use.
    rag_reuses: float = 32.0
    # Shorter prefixes are computed in the step that the question needs anyway.
    tokens_min: int = 512
    # A worker with at most this share of its slots running, and nothing waiting, is idle.
    idle_share: float = 0.05
    orders_per_s: float = 20.0
    orders_burst: int = 20
    # Orders of one prefix to one life of a worker.
    rounds: int = 3
    half_life_s: float = 60.0
    # Prefixes that are counted, about 700 bytes each.
    prefixes_max: int = 4096


class _Prefix:
    """`heat` is log2 of the decayed count, as of time 0: it orders prefixes whenever they are compared."""

    __slots__ = ("blocks", "heat", "home_key", "is_rag", "looked_at", "served_by", "serves", "tokens")

    def __init__(self, blocks: int, tokens: int, home_key: int, serves: str) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.home_key = home_key
        self.serves = serves
        self.heat = -math.inf
        self.is_rag = True
        self.served_by: dict[str, None] = {}
        self.looked_at = -math.inf


class _Pending:
    """An order that is not carried out yet; `request_id` is known once a router has taken it up."""

    __slots__ = ("expires_at", "id", "kind", "request_id", "tokens")

    def __init__(self, of: _Id, kind: str, tokens: int, expires_at: float) -> None:
        self.id = of
        self.kind = kind
        self.tokens = tokens
        self.expires_at = expires_at
        self.request_id = ""


class _Worker:
    """One life of a worker. `due` are prefixes that it may be re-warmed with until `due_until`, hottest first."""

    __slots__ = (
        "copied",
        "due",
        "due_until",
        "heard_at",
        "load",
        "ordered",
        "pause_s",
        "pending",
        "rest_until",
        "rewarm_tokens",
    )

    def __init__(self, load: Load, now: float) -> None:
        self.load = load
        self.heard_at = now
        self.pending: _Pending | None = None
        self.rest_until = now
        self.pause_s = _PAUSE_S
        self.due: deque[_Id] = deque()
        self.due_until = now
        # What may still be ordered for re-warming.
        self.rewarm_tokens = 0
        # Copies that were ordered and may be there, in tokens.
        self.copied: dict[_Id, int] = {}
        # How often each was ordered, the latest last.
        self.ordered: dict[_Id, int] = {}


class Placement:
    """Tell it of heartbeats, resets, dispatches and outcomes; ask for `orders` several times a second."""

    def __init__(self, rules: PlacementRules | None = None) -> None:
        self.rules = rules or PlacementRules()
        self._prefixes: dict[_Id, _Prefix] = {}
        # One entry a prefix, not hotter than it is: the coldest is found by taking out and putting back.
        self._coldest: list[tuple[float, _Id]] = []
        self._workers: dict[str, _Worker] = {}
        # Prefixes that have become hot enough for a copy, since they were last looked at.
        self._hot: dict[_Id, None] = {}
        self._allowance = float(self.rules.orders_burst)
        self._allowed_at = -math.inf

    def __len__(self) -> int:
        return len(self._prefixes)

    def __repr__(self) -> str:
        return f"<Placement prefixes={len(self._prefixes)} pending={self.pending}>"

    @property
    def pending(self) -> int:
        """Orders that are not carried out yet."""
        return sum(worker.pending is not None for worker in self._workers.values())

    # --- what happens ---

    def heartbeat(self, load: Load, now: float) -> None:
        """A worker lives, and says how busy it is. A life that is new here is one without a cache."""
        worker = self._workers.get(load.worker)
        if worker is None or load.incarnation > worker.load.incarnation:
            worker = self._workers[load.worker] = _Worker(load, now)
            self._begin_rewarming(worker, now)
        elif load.incarnation == worker.load.incarnation and load.report > worker.load.report:
            worker.load = load
            worker.heard_at = now

    def reset(self, name: str, incarnation: int, now: float) -> None:
        """All of the worker's cache went."""
        worker = self._workers.get(name)
        if worker is not None and worker.load.incarnation == incarnation:
            worker.copied.clear()
            worker.ordered.clear()
            self._begin_rewarming(worker, now)

    def dispatched(self, sent: Dispatched, lifetime_s: float, now: float) -> None:
        """A router announces a dispatch of a request, or of an order; it is believed for `lifetime_s`."""
        worker = self._workers.get(sent.worker)
        if worker is None or worker.load.incarnation != sent.incarnation:
            return
        if sent.is_warming:
            self._taken_up(worker, sent, now + lifetime_s)
            return
        block_size = worker.load.block_size
        blocks = min(sent.held_blocks, len(sent.keys) // 8)
        if blocks * block_size < self.rules.tokens_min:
            return
        of = sent.ns_id, _key(sent.keys, blocks - 1)
        prefix = self._prefixes.get(of)
        if prefix is None:
            home_key = _key(sent.keys, min(sent.shared_blocks, blocks - 1))
            prefix = self._prefixes[of] = _Prefix(blocks, blocks * block_size, home_key, worker.load.serves)
            self._count(prefix, now)
            heapq.heappush(self._coldest, (prefix.heat, of))
            if len(self._prefixes) > self.rules.prefixes_max:
                self._forget_coldest()
        elif sent.attempt == 1:
            self._count(prefix, now)
        prefix.is_rag = prefix.is_rag and sent.prefix_class == "rag"
        prefix.served_by.pop(sent.worker, None)
        prefix.served_by[sent.worker] = None
        if len(prefix.served_by) > _SERVED_BY_MAX:
            del prefix.served_by[next(iter(prefix.served_by))]
        # There is one copy at least, and a second would have half of the reuses.
        if now - prefix.looked_at >= _TAKEN_UP_S and self._reuses(prefix, now) >= 2 * self.rules.copy_reuses:
            self._hot[of] = None

    def outcome(self, outcome: Outcome, now: float) -> None:
        """An attempt ended; an order's makes room for the next one."""
        worker = self._workers.get(outcome.worker)
        if worker is None or worker.pending is None or worker.pending.request_id != outcome.request_id:
            return
        if outcome.status == "ok":
            worker.pending.expires_at = now + _EVENTS_FOLLOW_S
        else:
            worker.pause_s = min(_PAUSE_MAX_S, 2 * worker.pause_s)
            self._allowance = max(-5 * _GIVEN_UP_COSTS, self._allowance - _GIVEN_UP_COSTS)
            self._close(worker, now, carried_out=False)

    # --- what is to be done ---

    def orders(self, holders: Holders, now: float) -> list[WarmOrder]:
        """What should be computed where, from now on."""
        self._follow_workers(holders, now)
        self._refill(now)
        made: list[WarmOrder] = []
        looks = _LOOKS
        for worker in self._workers.values():
            while worker.due and looks and self._allowance >= 1 and self._may_be_ordered(worker, now):
                looks -= 1
                order = self._rewarm(worker, worker.due.popleft(), holders, now)
                made += self._given(worker, order, now)
        while self._hot and looks and self._allowance >= 1:
            looks -= 1
            of = next(iter(self._hot))
            del self._hot[of]
            made += self._copied(of, holders, now)
        return made

    # --- popularity ---

    def _count(self, prefix: _Prefix, now: float) -> None:
        prefix.heat = now / self.rules.half_life_s + math.log2(self._reuses(prefix, now) + 1)

    def _reuses(self, prefix: _Prefix, now: float) -> float:
        return math.exp2(min(64.0, prefix.heat - now / self.rules.half_life_s))

    def _forget_coldest(self) -> None:
        while True:
            heat, of = self._coldest[0]
            prefix = self._prefixes[of]
            if prefix.heat <= heat:
                heapq.heappop(self._coldest)
                del self._prefixes[of]
                self._hot.pop(of, None)
                return
            heapq.heapreplace(self._coldest, (prefix.heat, of))

    # --- workers ---

    def _begin_rewarming(self, worker: _Worker, now: float) -> None:
        rules = self.rules
        worker.rewarm_tokens = int(rules.rewarm_share * worker.load.kv_tokens)
        worker.due_until = now + rules.rewarm_within_s
        if worker.rewarm_tokens:
            hottest = heapq.nlargest(_REWARM_CONSIDERED, self._prefixes.items(), key=lambda item: item[1].heat)
            worker.due = deque(of for of, _ in hottest)

    def _follow_workers(self, holders: Holders, now: float) -> None:
        for name, worker in list(self._workers.items()):
            if now - worker.heard_at > _FORGET_S:
                del self._workers[name]
                continue
            pending = worker.pending
            if pending is not None:
                is_held = name in holders(*pending.id)
                if is_held or pending.expires_at <= now:
                    self._close(worker, now, carried_out=is_held)
            if worker.due and now > worker.due_until:
                worker.due.clear()

    def _close(self, worker: _Worker, now: float, *, carried_out: bool) -> None:
        pending = worker.pending
        worker.pending = None
        if carried_out:
            worker.pause_s = _PAUSE_S
        worker.rest_until = now + worker.pause_s
        if pending is not None and not carried_out and pending.kind == REWARM:
            worker.rewarm_tokens += pending.tokens
            worker.due.appendleft(pending.id)

    def _taken_up(self, worker: _Worker, sent: Dispatched, expires_at: float) -> None:
        """By our own order, or by that of another replica of this shard."""
        if not sent.keys:
            return
        of = sent.ns_id, _key(sent.keys, len(sent.keys) // 8 - 1)
        if worker.pending is None:
            self._note_order(worker, of)
            worker.pending = _Pending(of, COPY, 0, expires_at)
        if worker.pending.id == of:
            worker.pending.request_id = sent.request_id
            worker.pending.expires_at = expires_at

    def _may_be_ordered(self, worker: _Worker, now: float) -> bool:
        load = worker.load
        return (
            worker.pending is None
            and now >= worker.rest_until
            and now - worker.heard_at < _SUSPECT_S
            and not load.draining
            and not load.waiting
            and load.queue_ms <= 0
            and load.running <= self.rules.idle_share * load.slots
        )

    def _note_order(self, worker: _Worker, of: _Id) -> int:
        """How often it was ordered there before."""
        before = worker.ordered.pop(of, 0)
        worker.ordered[of] = before + 1
        if len(worker.ordered) > _ORDERED_MAX:
            del worker.ordered[next(iter(worker.ordered))]
        return before

    # --- orders ---

    def _refill(self, now: float) -> None:
        passed_s = min(60.0, max(0.0, now - self._allowed_at))
        self._allowed_at = now
        self._allowance = min(float(self.rules.orders_burst), self._allowance + passed_s * self.rules.orders_per_s)

    def _rewarm(self, worker: _Worker, of: _Id, holders: Holders, now: float) -> WarmOrder | None:
        prefix = self._prefixes.get(of)
        if prefix is None or prefix.serves != worker.load.serves or prefix.tokens > worker.rewarm_tokens:
            return None
        if worker.ordered.get(of, 0) >= self.rules.rounds or not self._belongs_to(prefix, worker):
            return None
        having = self._having(of, holders)
        if worker.load.worker in having:
            return None
        order = self._order(REWARM, of, prefix, worker, len(having), self.rules.rewarm_reuses, now)
        if order is not None:
            worker.rewarm_tokens -= prefix.tokens
        return order

    def _belongs_to(self, prefix: _Prefix, worker: _Worker) -> bool:
        name, serves = worker.load.worker, worker.load.serves
        if name in prefix.served_by:
            return True
        fleet = [
            (other.load.worker, other.load.kv_tokens) for other in self._workers.values() if other.load.serves == serves
        ]
        return home(prefix.home_key, fleet) == name

    def _copied(self, of: _Id, holders: Holders, now: float) -> list[WarmOrder]:
        prefix = self._prefixes[of]
        prefix.looked_at = now
        having = self._having(of, holders)
        if not 1 <= len(having) < self.rules.copies_max:
            return []
        idle = {
            name: worker
            for name, worker in self._workers.items()
            if name not in having
            and worker.load.serves == prefix.serves
            and worker.ordered.get(of, 0) < self.rules.rounds
            and self._may_be_ordered(worker, now)
            and self._has_room(worker, prefix, holders)
        }
        if not idle:
            return []
        # All replicas of this shard choose alike.
        worker = idle[home(prefix.home_key, [(name, one.load.kv_tokens) for name, one in idle.items()])]
        order = self._order(COPY, of, prefix, worker, len(having), self.rules.copy_reuses, now)
        if order is not None:
            worker.copied[of] = prefix.tokens
        return self._given(worker, order, now)

    def _has_room(self, worker: _Worker, prefix: _Prefix, holders: Holders) -> bool:
        room = self.rules.copies_share * worker.load.kv_tokens - prefix.tokens
        if room < 0:
            return False
        if sum(worker.copied.values()) > room:
            name = worker.load.worker
            gone = [of for of in worker.copied if name not in holders(*of)]
            for of in gone:
                del worker.copied[of]
        return sum(worker.copied.values()) <= room

    def _having(self, of: _Id, holders: Holders) -> set[str]:
        """Who holds it, has had it announced, or is to compute it."""
        having = set(holders(*of))
        for name, worker in self._workers.items():
            if worker.pending is not None and worker.pending.id == of:
                having.add(name)
        return having

    def _order(
        self, kind: str, of: _Id, prefix: _Prefix, worker: _Worker, copies: int, reuses_min: float, now: float
    ) -> WarmOrder | None:
        """Nothing, if a copy more than there are is not worth it."""
        reuses = self._reuses(prefix, now) / (copies + 1)
        if reuses < (max(reuses_min, self.rules.rag_reuses) if prefix.is_rag else reuses_min):
            return None
        load = worker.load
        benefit = reuses * _saved_ms(prefix.tokens) / prefix.tokens
        before = worker.ordered.get(of, 0)
        return WarmOrder(VERSION, *of, prefix.blocks, load.worker, load.incarnation, kind, benefit, before)

    def _given(self, worker: _Worker, order: WarmOrder | None, now: float) -> list[WarmOrder]:
        if order is None:
            return []
        of = order.ns_id, order.key
        self._note_order(worker, of)
        tokens = order.blocks * worker.load.block_size
        worker.pending = _Pending(of, order.kind, tokens, now + _TAKEN_UP_S)
        self._allowance -= 1
        return [order]


def _saved_ms(tokens: int) -> float:
    return _STEP_MS + tokens * (_TOKEN_MS + tokens * _TOKEN_PAIR_MS)


def _key(keys: bytes, block: int) -> int:
    return int.from_bytes(keys[8 * block : 8 * block + 8], "little")
