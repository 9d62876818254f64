"""One shard of the directory in full, without a bus or a clock: messages in, answers and effects out.

Owns: what ties index, ledger, predictions, trust, shedding, quota and placement together, and what a look-up says.
Must not know: NATS, subjects, which shard it is, how an effect is carried out.
Units: `now` in seconds on the caller's monotonic clock, `wall` in Unix seconds."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..bus.messages import (
    GPU,
    TIERS,
    VERSION,
    Cleared,
    Dispatched,
    Holdings,
    KvDump,
    KvEvents,
    Level,
    Load,
    Lookup,
    Outcome,
    Stored,
    WarmOrder,
)
from .index import Index, Levels, Slots, depth_in
from .ledger import NO_EFFECTS, Effect, Ledger, Rules, WorkerView
from .placement import Placement, PlacementRules
from .predictions import Predictions
from .quota import Quota
from .shedding import Bounds, Shedding
from .trust import Ages, Trust, TrustRules

# Blocks changed without giving the loop to others: about 1.5 ms (bench index_apply).
SLICE_BLOCKS = 2048
# The same for shedding, which takes up to a segment of a log more than it was asked for.
SHED_BLOCKS = 1024
# How long an answered request's announcement outlives it if its blocks are not stored by then: its events come through
# the stream a little later, or, where that has a backlog, as late as others did before, twice over.
EVENTS_FOLLOW_S = 1.0
# No announcement is believed for longer without a new one, whatever its router says.
ANNOUNCED_AT_MOST_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The bounds of all parts."""

    leases: Rules = field(default_factory=Rules)
    bounds: Bounds = field(default_factory=Bounds)
    trust: TrustRules = field(default_factory=TrustRules)
    placement: PlacementRules = field(default_factory=PlacementRules)


class Shard:
    """Messages of workers and routers in, in the order in which they came.

    Effects are for the caller: dumps to ask for, turns of leases to log. Call `tick` and `orders` several times a
    second, and `do_slice` after them until it says that there is no more, with room for others in between."""

    def __init__(self, settings: Settings | None = None, make_index: Callable[[Slots], Index] = Index) -> None:
        """`make_index`: for the lab, which has one that is wrong."""
        settings = settings or Settings()
        slots = Slots()
        self.index = make_index(slots)
        self.predictions = Predictions(slots)
        self.ledger = Ledger(self.index, settings.leases)
        self.shedding = Shedding(self.index, settings.bounds)
        self.quota = Quota(settings.bounds.namespaces_per_tenant, settings.bounds.namespaces_max)
        self.trust = Trust(settings.trust)
        self.ages = Ages(settings.trust)
        self.placement = Placement(settings.placement)
        # Slots whose namespaces are still to be looked at for age, in this round.
        self._to_age: list[int] = []

    def __repr__(self) -> str:
        return f"<Shard {self.index!r} {self.ledger!r} {self.predictions!r}>"

    # --- questions ---

    def lookup(self, asked: Lookup, now: float) -> Holdings:
        """Unknown and foreign namespaces get the same empty answer."""
        levels = self.predictions.lookup(self.index, asked.ns_id, asked.keys)
        self.shedding.looked_up(asked.ns_id, levels[0][0] if levels else 0, now)
        named = [
            Level(depth, workers, TIERS[tier])
            for depth, mask in levels
            for tier, workers in enumerate(self.ledger.holders(mask))
            if workers
        ]
        return Holdings(
            VERSION,
            named,
            self.ledger.incomplete(),
            self._trust(asked.ns_id, levels, now),
            announced=self._announced(asked, levels),
        )

    def orders(self, now: float) -> list[WarmOrder]:
        """What should be computed before it is asked for."""
        return self.placement.orders(self._holders, now)

    def _holders(self, ns_id: bytes, key: int) -> list[str]:
        """Who holds this block in its GPU tier, or will by a request that was announced."""
        levels = self.predictions.lookup(self.index, ns_id, key.to_bytes(8, "little"))
        return self.ledger.holders(levels[0][1])[GPU] if levels else []

    # --- what happens ---

    def heartbeat(self, load: Load, last_seq: int, now: float) -> Sequence[Effect]:
        """A sign of life; `last_seq` is the last event that the worker has published for this shard."""
        effects = self.ledger.heartbeat(load.worker, load.incarnation, last_seq, now)
        self.placement.heartbeat(load, now)
        return effects

    def events(self, message: KvEvents | KvDump, now: float) -> Sequence[Effect]:
        """A worker's block changes, or a part of its dump."""
        if isinstance(message, KvEvents):
            effects = self.ledger.events(message.worker, message.incarnation, message.seq, message.ops, now)
            if any(isinstance(op, Cleared) for op in message.ops):
                self.placement.reset(message.worker, message.incarnation, now)
            if len(self.predictions):
                self._came_true(message)
        else:
            effects = self.ledger.dump_chunk(
                message.worker,
                message.incarnation,
                message.dump_id,
                message.part,
                message.parts,
                message.seq,
                message.runs,
                now,
            )
        if self.shedding.is_beyond:
            self.shedding.relieve(now, SHED_BLOCKS)
        return effects

    def _came_true(self, message: KvEvents) -> None:
        """Ends the announcements of what has been stored. While a worker's story has a hole, what comes after it waits,
        and the announcements with it."""
        view = self.ledger.view(message.worker)
        if view is None or view.slot is None or view.incarnation != message.incarnation or not view.complete:
            return
        for op in message.ops:
            if isinstance(op, Stored) and op.tier == GPU:
                self.predictions.stored(view.slot, op.ns_id, op.keys)

    def dispatched(self, sent: Dispatched, now: float, wall: float) -> None:
        """A router announces a dispatch, of a request or of an order, renews it, or takes it back."""
        if not sent.worker:
            self.predictions.ended(sent.request_id, sent.attempt)
            return
        lifetime_s = min(sent.expires_at - wall, ANNOUNCED_AT_MOST_S)
        if not sent.renews:
            self.placement.dispatched(sent, lifetime_s, now)
        if sent.is_warming:
            return
        view = self.ledger.view(sent.worker)
        if view is None or view.slot is None or view.incarnation != sent.incarnation:
            return
        if lifetime_s > 0:
            # What the worker holds already needs no announcement; the rest is usually the question alone.
            held = self.index.depth_of_slot(sent.ns_id, view.slot, sent.keys)
            lacking = sent.keys[8 * held :]
            self.predictions.announce(sent.request_id, view.slot, sent.ns_id, lacking, now + lifetime_s, sent.attempt)

    def outcome(self, outcome: Outcome, now: float) -> Sequence[Effect]:
        """An attempt ended: its events are here or will be soon, or nothing will come. And was the prediction right?"""
        self.placement.outcome(outcome, now)
        answered = outcome.status == "ok"
        follow_s = max(EVENTS_FOLLOW_S, 2 * self.ledger.lag_s(outcome.worker))
        self.predictions.ended(outcome.request_id, outcome.attempt, now + follow_s if answered else None)
        ns_id = bytes.fromhex(outcome.ns_id)
        self.quota.named(ns_id, outcome.tenant)
        if not answered or outcome.cached_tokens is None or outcome.predicted_tokens <= 0:
            return NO_EFFECTS
        view = self.ledger.view(outcome.worker)
        if view is None or view.slot is None or view.incarnation != outcome.incarnation:
            return NO_EFFECTS
        if self.index.touched_at(ns_id, view.slot) is None:
            # No entry of ours was behind it.
            return NO_EFFECTS
        missed = self.trust.outcome(
            outcome.worker, outcome.incarnation, ns_id, outcome.predicted_tokens, outcome.cached_tokens, now
        )
        if outcome.cached_tokens >= outcome.predicted_tokens:
            self.index.now = now
            self.index.touch(ns_id, view.slot)
        return self.ledger.doubt(outcome.worker, outcome.incarnation, now) if missed else NO_EFFECTS

    def tick(self, now: float) -> Sequence[Effect]:
        """What time alone does."""
        self._mark_old(now)
        return self.ledger.tick(now)

    def do_slice(self, now: float) -> bool:
        """Drop some of what is over: announcements, entries of closed slots, and what is too much. True if there is
        more."""
        more = self.predictions.expire(now, SLICE_BLOCKS) | self.index.sweep(SLICE_BLOCKS)
        if more or self.shedding.relieve(now, SHED_BLOCKS):
            return True
        theirs = self.quota.beyond(self.index.namespace_ids)
        return self.shedding.reduce(theirs, self.quota.each_max, now, SHED_BLOCKS)

    # --- what a look-up says ---

    def _trust(self, ns_id: bytes, levels: Levels, now: float) -> dict[str, float]:
        """Of the workers in these levels, those that should be believed less."""
        rules = self.trust.rules
        seen = functools.reduce(operator.or_, (mask for _, mask in levels), 0)
        trust: dict[str, float] = {}
        for worker in self.ledger.incomplete():
            if self._is_in(seen, self.ledger.view(worker)):
                trust[worker] = rules.incomplete
        for doubt in self.trust.doubts(ns_id, now):
            view = self.ledger.view(doubt.worker)
            if view is None or view.slot is None or view.incarnation != doubt.incarnation:
                self.trust.forget(ns_id, doubt.worker)
            elif self._is_in(seen, view):
                trust[doubt.worker] = trust.get(doubt.worker, 1.0) * doubt.trust
        for slot in self.ages.marked(ns_id):
            touched_at, holder = self.index.touched_at(ns_id, slot), self.ledger.holder_at(slot)
            if touched_at is None or now - touched_at < rules.fresh_s:
                self.ages.clear(ns_id, slot)
            elif holder is not None and seen >> slot & 1:
                trust[holder.worker] = trust.get(holder.worker, 1.0) * self.ages.trust(now - touched_at)
        return {worker: max(rules.floor, share) for worker, share in trust.items()}

    @staticmethod
    def _is_in(mask: int, view: WorkerView | None) -> bool:
        """Whether one of the worker's slots is."""
        slots = (view.slot, view.host_slot) if view is not None else ()
        return any(slot is not None and mask >> slot & 1 for slot in slots)

    def _announced(self, asked: Lookup, levels: Levels) -> dict[str, int]:
        """Of each worker, how many blocks of its GPU depth are not there yet."""
        slots = self.predictions.slots_of(asked.ns_id)
        if not slots or not levels:
            return {}
        held = self.index.lookup(asked.ns_id, asked.keys)
        announced = {}
        for depth, mask in levels:
            mask &= slots
            while mask:
                low = mask & -mask
                slot = low.bit_length() - 1
                holder, missing = self.ledger.holder_at(slot), depth - depth_in(held, slot)
                if holder is not None and missing:
                    announced[holder.worker] = missing
                mask ^= low
        return announced

    def _mark_old(self, now: float) -> None:
        """Look at the namespaces of one worker, the next in turn."""
        if not self._to_age:
            self._to_age = [view.slot for view in self.ledger.views() if view.slot is not None]
        if self._to_age:
            slot = self._to_age.pop()
            for ns_id in self.index.untouched_since(slot, now - self.trust.rules.fresh_s):
                self.ages.mark(ns_id, slot)
