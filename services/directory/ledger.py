"""Who is alive, in which life, and whether we have heard all of it: leases, incarnations, order of events, dumps.

Owns: the record of each worker and its slot; it writes the index it is given and returns what else is to be done.
Must not know: NATS, clocks, load, what anyone does with an effect.
Units: times in seconds, `now` on the caller's monotonic clock, all else on listening time (bus/listening.py); `seq`
counts a worker's event messages from 1 within an incarnation; keys as index.py.   Source: DESIGN 5 (Leases, Order and
loss).

Two devices carry most of it:
- Whatever voids a worker's entries (restart, cleared cache, lease, dump) gives it a new slot and closes the old one, so
  it is right at once and swept later. A dump fills a slot that lookups cannot see, and is revealed when it is whole.
- Events say what *is* (held, not held), so doing a suffix of them over again is harmless. Of a worker whose story has
  holes the last events are kept: a late one is put in place and what follows it repeated, and a dump gets all that came
  after its seq.

A worker has a slot for each tier it holds blocks in: what happens to one copy of a block says nothing about the other.
"""

import bisect
import enum
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, assert_never

from ..bus.listening import ListeningClock
from ..bus.messages import GPU, HOST, TIERS, Cleared, Removed, Stored
from .index import Index

Op = Stored | Removed | Cleared
# Masks whose names are remembered: 2 KB each with 256 workers.
_NAMES_MAX = 2048

# --- what comes out ---


@dataclass(frozen=True, slots=True)
class AskDump:
    """Ask the bridge for all it holds. `reason`: `gap` (events are missing), `tail` (the last are), `returned` (its
    entries were voided while it was silent), `orphans` (too many blocks of unknown parents), `misses` (answers keep
    falling short of its entries)."""

    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """A worker began, or began again: all we knew of its earlier lives is void. No work before `WorkerBack`."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """Heard, for the first time or again: may be given work."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerSuspect:
    """Silent: no new work. Its entries stay."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Silent for too long: its entries are void."""

    worker: str
    incarnation: int


Effect = AskDump | NewIncarnation | WorkerBack | WorkerSuspect | WorkerLost
NO_EFFECTS: Sequence[Effect] = ()

# --- the lease ---


class Lease(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


class Sign(enum.Enum):
    HEARD = "heard"
    """A heartbeat of the current incarnation."""
    QUIET = "quiet"
    EXPIRED = "expired"
    REPLACED = "replaced"
    """A message of a newer incarnation."""


_Turn = tuple[Lease, type[NewIncarnation | WorkerBack | WorkerSuspect | WorkerLost] | None]

# (state, sign) -> (next state, effect). A worker enters as a lost one REPLACED. A lost one is not watched, so its
# silence is no sign.
LEASES: dict[tuple[Lease, Sign], _Turn] = {
    (Lease.ALIVE, Sign.HEARD): (Lease.ALIVE, None),
    (Lease.ALIVE, Sign.QUIET): (Lease.SUSPECT, WorkerSuspect),
    (Lease.ALIVE, Sign.EXPIRED): (Lease.LOST, WorkerLost),
    (Lease.ALIVE, Sign.REPLACED): (Lease.SUSPECT, NewIncarnation),
    (Lease.SUSPECT, Sign.HEARD): (Lease.ALIVE, WorkerBack),
    (Lease.SUSPECT, Sign.QUIET): (Lease.SUSPECT, None),
    (Lease.SUSPECT, Sign.EXPIRED): (Lease.LOST, WorkerLost),
    (Lease.SUSPECT, Sign.REPLACED): (Lease.SUSPECT, NewIncarnation),
    (Lease.LOST, Sign.HEARD): (Lease.ALIVE, WorkerBack),
    (Lease.LOST, Sign.REPLACED): (Lease.SUSPECT, NewIncarnation),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of the ledger. Times in seconds."""

    suspect_after_s: float = 0.6
    lost_after_s: float = 3.0
    # A late message mends a gap for nothing: what a publisher's retry takes.
    gap_grace_s: float = 0.2
    # Heartbeats overtake events, which go through a stream: by this much, or twice what they did last.
    tail_grace_s: float = 0.5
    # No more than this is believed of how late events are.
    lag_max_s: float = 30.0
    # Between two dumps asked of one worker; doubles while none comes, since a dump waits behind the same backlog.
    ask_every_s: float = 1.0
    ask_at_least_every_s: float = 30.0
    # Between two dumps asked of one worker only because its answers fall short: if one did not help, the next may not.
    doubt_every_s: float = 30.0
    # A dump that goes on arriving is not asked for again.
    dump_stall_s: float = 2.0
    # A larger hole is not awaited: only a dump mends it.
    missing_max: int = 256
    # Events kept of a worker with holes: what a late one may have to repeat (about 2 ms), and what may come between
    # the moment a dump is true for and its first part.
    recent_blocks_max: int = 4096
    orphan_blocks_max: int = 4096
    # Keys removed while a dump arrives.
    removed_keys_max: int = 65536
    # How long, and of how many, the last incarnation is remembered after the lease ran out.
    forget_lost_after_s: float = 600.0
    lost_max: int = 4096


# --- what is kept ---


class WorkerView(NamedTuple):
    """A worker as lookups should judge it. `slot` is its GPU tier's, None if it is lost; `host_slot` is None also while
    it has no host store; `complete` is false while its entries may be wrong: usable, but less trusted."""

    worker: str
    incarnation: int
    lease: Lease
    slot: int | None
    complete: bool
    last_seq: int
    host_slot: int | None = None


class Holder(NamedTuple):
    """Whose slot it is."""

    worker: str
    tier: int


class _Kept(NamedTuple):
    seq: int
    ops: Sequence[Op]
    blocks: int


class _Dump:
    """A dump on its way in: invisible slots that also get every event after `true_for_seq`.

    `removed` are the keys that those events removed from a tier and namespace, be they stored again or not: later parts
    have no say in them. They have none in a tier that was `cleared`."""

    __slots__ = ("cleared", "dump_id", "parts", "removed", "removed_count", "seen", "slots", "true_for_seq")

    def __init__(self, dump_id: int, parts: int, true_for_seq: int, slots: "_TierSlots") -> None:
        self.dump_id = dump_id
        self.parts = parts
        self.true_for_seq = true_for_seq
        self.slots = slots
        self.seen: set[int] = set()
        self.cleared: set[int] = set()
        self.removed: dict[tuple[int, bytes], set[int]] = {}
        self.removed_count = 0


class _TierSlots:
    """The slots of one worker: its GPU tier's, and its host store's from the first block there on."""

    __slots__ = ("gpu", "host")

    def __init__(self, gpu: int, host: int | None = None) -> None:
        self.gpu = gpu
        self.host = host


class _Orphans:
    """Runs whose parent the worker is not known to hold, by tier, namespace and that parent. A lookup must not see
    them: behind a hole they would look like the end of an unbroken chain."""

    __slots__ = ("blocks", "runs")

    def __init__(self) -> None:
        self.runs: dict[tuple[int, bytes, int], set[bytes]] = {}
        self.blocks = 0

    def add(self, tier: int, ns_id: bytes, parent: int, keys: bytes) -> None:
        runs = self.runs.setdefault((tier, ns_id, parent), set())
        if keys not in runs:
            runs.add(keys)
            self.blocks += len(keys) // 8

    def take(self, tier: int, ns_id: bytes, parent: int) -> set[bytes]:
        runs = self.runs.pop((tier, ns_id, parent), set())
        self.blocks -= sum(len(keys) for keys in runs) // 8
        return runs

    def remove(self, tier: int, ns_id: bytes, keys: bytes) -> None:
        """Cut these keys out of the runs; what followed one waits for it."""
        gone = set(_u64s(keys))
        for of_tier, of_ns_id, parent in list(self.runs):
            if (of_tier, of_ns_id) != (tier, ns_id):
                continue
            for run in self.take(tier, ns_id, parent):
                before, piece = parent, array("Q")
                for key in _u64s(run):
                    if key not in gone:
                        piece.append(key)
                        continue
                    if piece:
                        self.add(tier, ns_id, before, piece.tobytes())
                    before, piece = key, array("Q")
                if piece:
                    self.add(tier, ns_id, before, piece.tobytes())

    def clear_gpu(self) -> None:
        for tier, ns_id, parent in list(self.runs):
            if tier == GPU:
                self.take(tier, ns_id, parent)

    def clear(self) -> None:
        self.runs.clear()
        self.blocks = 0


class _Worker:
    """One worker's current incarnation. `last_seq` is the highest seq seen.

    The story is `complete` unless seqs below `last_seq` are `missing`, or are given up (all through `lost_through`), or
    are overdue above it (a heartbeat named them: through `overdue_through`). While it is not, `recent` holds every
    event received with seq >= `floor`. Events come `lag_s` after heartbeats that name them; `lag_seq`, named at
    `lag_named_at`, is to tell how late they are now (0: none is awaited)."""

    __slots__ = (
        "ask_at",
        "ask_wait_s",
        "asked_at",
        "claim_due_at",
        "claimed_seq",
        "complete",
        "done_dump_id",
        "doubt_at",
        "dump",
        "floor",
        "heard_at",
        "incarnation",
        "lag_named_at",
        "lag_s",
        "lag_seq",
        "last_seq",
        "lease",
        "lost_through",
        "missing",
        "name",
        "orphans",
        "overdue_through",
        "reason",
        "recent",
        "recent_blocks",
        "slots",
    )

    def __init__(
        self, name: str, incarnation: int, lease: Lease, slots: _TierSlots, heard_at: float, ask_wait_s: float
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.lease = lease
        self.heard_at = heard_at
        self.slots = slots
        self.last_seq = 0
        self.complete = True
        self.missing: set[int] = set()
        self.lost_through = 0
        self.overdue_through = 0
        self.claimed_seq = 0
        self.claim_due_at = math.inf
        self.lag_s = 0.0
        self.lag_seq = 0
        self.lag_named_at = 0.0
        self.recent: list[_Kept] = []
        self.recent_blocks = 0
        self.floor = 1
        self.orphans = _Orphans()
        self.dump: _Dump | None = None
        self.done_dump_id = -1
        self.reason = ""
        self.ask_at = math.inf
        self.asked_at = -math.inf
        self.ask_wait_s = ask_wait_s
        self.doubt_at = -math.inf

    def view(self) -> WorkerView:
        gpu, host = (None, None) if self.lease is Lease.LOST else (self.slots.gpu, self.slots.host)
        return WorkerView(self.name, self.incarnation, self.lease, gpu, self.complete, self.last_seq, host)


class Ledger:
    """Takes what workers say, keeps the index true to it, and returns what else is to be done about it.

    An event message in order costs about 0.3 us here beside the index's own work. A message of an older incarnation, a
    repeated or an uncalled-for one changes nothing and has no effects."""

    def __init__(self, index: Index, rules: Rules | None = None) -> None:
        self._index = index
        self._slots = index.slots
        self._rules = rules or Rules()
        self._leased: dict[str, _Worker] = {}
        # Longest silent first.
        self._lost: dict[str, _Worker] = {}
        self._holders: dict[int, Holder] = {}
        # Names by mask, of masks that were asked for since holders changed last.
        self._names: dict[int, list[list[str]]] = {}
        # Names of the leased whose story is not complete.
        self._incomplete: dict[str, None] = {}
        self._listening = ListeningClock()

    def __repr__(self) -> str:
        return f"<Ledger leased={len(self._leased)} lost={len(self._lost)} cut={self._listening.is_cut}>"

    # --- questions ---

    def view(self, worker: str) -> WorkerView | None:
        record = self._leased.get(worker) or self._lost.get(worker)
        return record.view() if record is not None else None

    def views(self) -> Iterator[WorkerView]:
        """All workers with a lease, the suspect among them."""
        return (record.view() for record in self._leased.values())

    def lag_s(self, worker: str) -> float:
        """How much later than heartbeats its events come, in a stream that may have a backlog; to about the time
        between two heartbeats."""
        record = self._leased.get(worker)
        return record.lag_s if record is not None else 0.0

    def incomplete(self) -> list[str]:
        """Workers with a lease whose story has holes."""
        return list(self._incomplete)

    def holder_at(self, slot: int) -> Holder | None:
        """Whose slot it is; None if it is closed or holds a dump that is not whole."""
        return self._holders.get(slot)

    def holders(self, mask: int) -> list[list[str]]:
        """The workers whose slots the mask names, by tier. The lists are shared: do not change them.

        About 0.2 us a worker, and less than 1 us for a mask that was asked for before: the holders of a prefix are the
        same for many look-ups."""
        names = self._names.get(mask)
        if names is not None:
            return names
        names = [[] for _ in TIERS]
        left = mask
        while left:
            low = left & -left
            holder = self._holders.get(low.bit_length() - 1)
            if holder is not None:
                names[holder.tier].append(holder.worker)
            left ^= low
        if len(self._names) >= _NAMES_MAX:
            self._names.clear()
        self._names[mask] = names
        return names

    # --- what happens ---

    def heartbeat(self, worker: str, incarnation: int, last_seq: int, now: float) -> Sequence[Effect]:
        """A sign of life that names the last event the worker has published, 0 if none."""
        effects: list[Effect] = []
        record = self._record(worker, incarnation, now, effects)
        if record is None:
            return NO_EFFECTS
        record.heard_at = at = self._lease_time(now)
        if record.lease is not Lease.ALIVE:
            if record.lease is Lease.LOST:
                self._take_back(record, at)
            self._turn(record, Sign.HEARD, effects)
        self._measure_lag(record, last_seq, at)
        self._weigh_claim(record, at)
        if last_seq > record.last_seq and record.claim_due_at == math.inf:
            record.claimed_seq = last_seq
            record.claim_due_at = at + max(self._rules.tail_grace_s, 2 * record.lag_s)
        self._ask_if_due(record, at, effects)
        return effects or NO_EFFECTS

    def events(self, worker: str, incarnation: int, seq: int, ops: Sequence[Op], now: float) -> Sequence[Effect]:
        """One event message. Not a sign of life: it may come out of a stream long after its worker died."""
        record = self._leased.get(worker)
        if record is not None and record.incarnation == incarnation and record.last_seq + 1 == seq and record.complete:
            record.last_seq = seq
            index = self._index
            index.now = now
            for op in ops:
                if isinstance(op, Stored):
                    slot = record.slots.gpu if op.tier == GPU else self._slot_of(record, op.tier)
                    if slot is not None:
                        index.store(op.ns_id, slot, op.keys, op.parent)
                elif isinstance(op, Removed):
                    slot = record.slots.gpu if op.tier == GPU else self._slot_of(record, op.tier)
                    if slot is not None:
                        index.remove(op.ns_id, slot, op.keys)
                elif isinstance(op, Cleared):
                    self._clear(record, op)
                else:
                    assert_never(op)
            return NO_EFFECTS
        self._index.now = now
        effects: list[Effect] = []
        record = self._record(worker, incarnation, now, effects)
        if record is None:
            return NO_EFFECTS
        if record.lease is Lease.LOST:
            record.last_seq = max(record.last_seq, seq)
        elif seq > record.last_seq:
            self._advance(record, seq, ops, self._lease_time(now))
        elif seq in record.missing:
            self._put_in_place(record, seq, ops)
        return effects or NO_EFFECTS

    def dump_chunk(
        self,
        worker: str,
        incarnation: int,
        dump_id: int,
        part: int,
        parts: int,
        true_for_seq: int,
        runs: Iterable[Stored],
        now: float,
    ) -> Sequence[Effect]:
        """A part of all that the worker held after event `true_for_seq`, in any order; ids of one incarnation ascend.

        A dump is used only where the story has holes, and replaces the worker's entries when its last part is in."""
        self._index.now = now
        effects: list[Effect] = []
        record = self._record(worker, incarnation, now, effects)
        if record is None or record.lease is Lease.LOST or dump_id <= record.done_dump_id:
            return effects or NO_EFFECTS
        at = self._lease_time(now)
        if true_for_seq > max(record.last_seq, record.overdue_through):
            # The stream has passed events that never came.
            record.overdue_through = true_for_seq
            self._falter(record, "tail", at)
        if record.complete:
            return effects or NO_EFFECTS
        dump = record.dump
        if dump is None or dump_id > dump.dump_id:
            if true_for_seq + 1 < record.floor:
                return effects or NO_EFFECTS
            dump = self._begin_dump(record, dump_id, parts, true_for_seq)
        if dump is None or dump_id < dump.dump_id or part in dump.seen:
            return effects or NO_EFFECTS
        dump.seen.add(part)
        for run in runs:
            slot = self._dump_slot_of(dump, run.tier)
            if slot is None or run.tier in dump.cleared:
                continue
            keys, removed = run.keys, dump.removed.get((run.tier, run.ns_id))
            if removed:
                keys = array("Q", (key for key in _u64s(keys) if key not in removed)).tobytes()
            self._index.store(run.ns_id, slot, keys)
        record.ask_at = max(record.ask_at, at + self._rules.dump_stall_s)
        if len(dump.seen) == dump.parts:
            self._finish_dump(record, dump, at)
        return effects or NO_EFFECTS

    def doubt(self, worker: str, incarnation: int, now: float) -> Sequence[Effect]:
        """Answers show that the worker does not hold what its events say: an engine that forgets blocks without a word,
        or a mistake of ours. Whatever it was, a dump mends it."""
        record = self._leased.get(worker)
        if record is None or record.incarnation != incarnation or not record.complete or not record.last_seq:
            return NO_EFFECTS
        at = self._lease_time(now)
        if at < record.doubt_at:
            return NO_EFFECTS
        record.doubt_at = at + self._rules.doubt_every_s
        effects: list[Effect] = []
        record.lost_through = record.last_seq
        self._falter(record, "misses", at)
        self._ask_if_due(record, at, effects)
        return effects or NO_EFFECTS

    def tick(self, now: float) -> Sequence[Effect]:
        """What silence means by now. Call it a few times within `suspect_after_s`."""
        at = self._lease_time(now)
        if self._listening.is_cut:
            return NO_EFFECTS
        rules = self._rules
        effects: list[Effect] = []
        expired: list[_Worker] = []
        for record in self._leased.values():
            silent_s = at - record.heard_at
            if silent_s >= rules.lost_after_s:
                expired.append(record)
                continue
            if silent_s >= rules.suspect_after_s:
                self._turn(record, Sign.QUIET, effects)
            self._weigh_claim(record, at)
            self._ask_if_due(record, at, effects)
        for record in expired:
            self._turn(record, Sign.EXPIRED, effects)
            self._void(record)
            del self._leased[record.name]
            self._lost[record.name] = record
        while self._lost:
            longest = next(iter(self._lost.values()))
            if len(self._lost) <= rules.lost_max and at - longest.heard_at < rules.forget_lost_after_s:
                break
            del self._lost[longest.name]
        return effects or NO_EFFECTS

    def observer_cut(self, now: float) -> None:
        """We are cut off: others' silence says nothing, and all clocks here stand still."""
        self._listening.cut(now)

    def observer_back(self, now: float) -> None:
        self._listening.back(now)

    # --- leases ---

    def _lease_time(self, now: float) -> float:
        return self._listening.seconds(now)

    def _record(self, worker: str, incarnation: int, now: float, effects: list[Effect]) -> _Worker | None:
        """The worker's record, made or replaced if the incarnation is news; None if it is of the past."""
        record = self._leased.get(worker) or self._lost.get(worker)
        if record is not None:
            if record.incarnation == incarnation:
                return record
            if record.incarnation > incarnation:
                return None
            if record.lease is not Lease.LOST:
                self._void(record)
            self._lost.pop(worker, None)
        before = record.lease if record is not None else Lease.LOST
        slots = _TierSlots(self._slots.open())
        record = _Worker(worker, incarnation, before, slots, self._lease_time(now), self._rules.ask_every_s)
        self._leased[worker] = record
        self._hold(slots.gpu, Holder(worker, GPU))
        self._turn(record, Sign.REPLACED, effects)
        return record

    def _turn(self, record: _Worker, sign: Sign, effects: list[Effect]) -> None:
        record.lease, effect = LEASES[record.lease, sign]
        if effect is not None:
            effects.append(effect(record.name, record.incarnation))

    def _void(self, record: _Worker) -> None:
        """Drop all that is known of the worker but its incarnation and how far its events went."""
        self._abandon_dump(record)
        self._slots.close(record.slots.gpu)
        self._hold(record.slots.gpu, None)
        self._renew_host_slot(record, None)
        record.orphans.clear()
        record.missing.clear()
        record.recent = []
        record.recent_blocks = 0
        record.lost_through = record.overdue_through = 0
        record.claim_due_at = record.ask_at = math.inf
        record.lag_seq = 0
        record.complete = False
        self._incomplete.pop(record.name, None)

    def _take_back(self, record: _Worker, at: float) -> None:
        """A lost worker of the same incarnation: it holds what it held, only we do not know what."""
        del self._lost[record.name]
        self._leased[record.name] = record
        record.slots.gpu = self._slots.open()
        self._hold(record.slots.gpu, Holder(record.name, GPU))
        record.complete = True
        if record.last_seq:
            record.lost_through = record.last_seq
            self._falter(record, "returned", at)
            record.ask_at = max(at, record.asked_at + self._rules.ask_every_s)

    def _hold(self, slot: int, holder: Holder | None) -> None:
        if holder is None:
            del self._holders[slot]
        else:
            self._holders[slot] = holder
        self._names.clear()

    def _renew_slot(self, record: _Worker, slot: int) -> None:
        """Another slot is the worker's GPU tier; what is announced for the worker moves along."""
        old, record.slots.gpu = record.slots.gpu, slot
        self._hold(old, None)
        self._hold(slot, Holder(record.name, GPU))
        self._slots.close(old, slot)

    def _renew_host_slot(self, record: _Worker, slot: int | None) -> None:
        old, record.slots.host = record.slots.host, slot
        if old is not None:
            self._hold(old, None)
            self._slots.close(old)
        if slot is not None:
            self._hold(slot, Holder(record.name, HOST))

    def _slot_of(self, record: _Worker, tier: int) -> int | None:
        """None for a tier we do not know: its blocks are no business of ours."""
        if tier == GPU:
            return record.slots.gpu
        if tier == HOST and record.slots.host is None:
            self._renew_host_slot(record, self._slots.open())
        return record.slots.host if tier == HOST else None

    def _dump_slot_of(self, dump: _Dump, tier: int) -> int | None:
        if tier == GPU:
            return dump.slots.gpu
        if tier == HOST and dump.slots.host is None:
            dump.slots.host = self._slots.open(visible=False)
        return dump.slots.host if tier == HOST else None

    def _clear(self, record: _Worker, op: Cleared) -> None:
        if self._index.held_by(record.slots.gpu):
            self._renew_slot(record, self._slots.open())
        if op.host:
            self._renew_host_slot(record, None)

    # --- order ---

    def _weigh_claim(self, record: _Worker, at: float) -> None:
        """Has what a heartbeat named arrived, or is it overdue?"""
        if record.claim_due_at == math.inf:
            return
        if record.last_seq >= record.claimed_seq:
            record.claim_due_at = math.inf
        elif at >= record.claim_due_at:
            record.claim_due_at = math.inf
            record.overdue_through = max(record.overdue_through, record.claimed_seq)
            self._falter(record, "tail", at)

    def _measure_lag(self, record: _Worker, named_seq: int, at: float) -> None:
        """Events that are late are no hole: who takes them for one asks for a dump, which is as late, again and again,
        and believes half of what is known meanwhile."""
        if record.lag_seq and record.last_seq >= record.lag_seq:
            record.lag_s = min(at - record.lag_named_at, self._rules.lag_max_s)
            record.lag_seq = 0
        if not record.lag_seq and named_seq > record.last_seq:
            record.lag_seq, record.lag_named_at = named_seq, at

    def _falter(self, record: _Worker, reason: str, at: float) -> None:
        """The story has a hole from here on."""
        if record.complete:
            record.complete = False
            self._incomplete[record.name] = None
            record.reason = reason
            record.floor = record.last_seq + 1
            grace_s = self._rules.gap_grace_s if reason == "gap" else 0.0
            record.ask_at = max(at + grace_s, record.asked_at + self._rules.ask_every_s)

    def _settle(self, record: _Worker) -> None:
        """If no hole is left, forget that there was one."""
        if record.complete or record.missing or record.lost_through or record.last_seq < record.overdue_through:
            return
        # Whole again, so a parent that is still unknown is gone, and its children are held as reported.
        for (tier, ns_id, _), runs in record.orphans.runs.items():
            slot = self._slot_of(record, tier)
            if slot is not None:
                for keys in runs:
                    self._index.store(ns_id, slot, keys)
        record.orphans.clear()
        self._abandon_dump(record)
        record.complete = True
        self._incomplete.pop(record.name, None)
        record.overdue_through = 0
        record.recent = []
        record.recent_blocks = 0
        record.ask_at = math.inf
        record.ask_wait_s = self._rules.ask_every_s

    def _ask_if_due(self, record: _Worker, at: float, effects: list[Effect]) -> None:
        if record.ask_at <= at and record.lease is Lease.ALIVE:
            effects.append(AskDump(record.name, record.incarnation, record.reason))
            record.asked_at = at
            record.ask_at = at + record.ask_wait_s
            record.ask_wait_s = min(2 * record.ask_wait_s, self._rules.ask_at_least_every_s)

    def _advance(self, record: _Worker, seq: int, ops: Sequence[Op], at: float) -> None:
        """An event beyond the last: with a hole before it, or with holes already behind."""
        if seq > record.last_seq + 1:
            self._falter(record, "gap", at)
            if len(record.missing) + seq - record.last_seq - 1 <= self._rules.missing_max:
                record.missing.update(range(record.last_seq + 1, seq))
            else:
                self._give_up(record, seq - 1)
        record.last_seq = seq
        kept = self._keep(record, seq, ops)
        self._apply(record, kept)
        self._settle(record)

    def _put_in_place(self, record: _Worker, seq: int, ops: Sequence[Op]) -> None:
        """A missing event came: do it, then all kept after it over again."""
        record.missing.remove(seq)
        # Keeping it may push out what came before it, never what came after.
        for kept in [self._keep(record, seq, ops), *(kept for kept in record.recent if kept.seq > seq)]:
            self._apply(record, kept)
        self._settle(record)

    def _keep(self, record: _Worker, seq: int, ops: Sequence[Op]) -> _Kept:
        kept = _Kept(seq, ops, 1 + sum(len(op.keys) // 8 for op in ops if not isinstance(op, Cleared)))
        bisect.insort(record.recent, kept, key=attrgetter("seq"))
        record.recent_blocks += kept.blocks
        while record.recent_blocks > self._rules.recent_blocks_max:
            oldest = record.recent.pop(0)
            record.recent_blocks -= oldest.blocks
            record.floor = oldest.seq + 1
        # What follows a missing event can no longer be repeated in full.
        unmendable = [each for each in record.missing if each < record.floor]
        if unmendable:
            self._give_up(record, max(unmendable))
        return kept

    def _give_up(self, record: _Worker, seq: int) -> None:
        """Nothing but a dump true for `seq` or later makes the story whole."""
        record.lost_through = max(record.lost_through, seq)
        record.floor = max(record.floor, seq + 1)
        record.missing = {each for each in record.missing if each > seq}

    def _apply(self, record: _Worker, kept: _Kept) -> None:
        """Do an event of a worker whose story has holes, also to a dump on its way in that does not cover it."""
        for op in kept.ops:
            match op:
                case Stored():
                    self._store_with_parent(record, op)
                case Removed():
                    if record.orphans.runs:
                        record.orphans.remove(op.tier, op.ns_id, op.keys)
                    slot = self._slot_of(record, op.tier)
                    if slot is not None:
                        self._index.remove(op.ns_id, slot, op.keys)
                case Cleared():
                    self._clear_with_holes(record, op, kept.seq)
                case _:
                    assert_never(op)
            dump = record.dump
            if dump is not None and kept.seq > dump.true_for_seq:
                self._apply_to_dump(record, dump, op)

    def _clear_with_holes(self, record: _Worker, op: Cleared, seq: int) -> None:
        """If both tiers were cleared, whatever was missed up to here is void with the rest."""
        self._clear(record, op)
        if not op.host:
            record.orphans.clear_gpu()
            return
        record.orphans.clear()
        record.missing = {each for each in record.missing if each > seq}
        if record.lost_through <= seq:
            record.lost_through = 0
        record.floor = max(record.floor, seq + 1)
        record.recent = [kept for kept in record.recent if kept.seq > seq]
        record.recent_blocks = sum(kept.blocks for kept in record.recent)
        if record.dump is not None and record.dump.true_for_seq < seq:
            self._abandon_dump(record)

    def _store_with_parent(self, record: _Worker, op: Stored) -> None:
        """Store a run if its parent is held, and the quarantined runs that this makes reachable; else quarantine it."""
        slot = self._slot_of(record, op.tier)
        if slot is None:
            return
        orphans = record.orphans
        if op.parent and not self._index.holds(op.ns_id, slot, op.parent):
            orphans.add(op.tier, op.ns_id, op.parent, op.keys)
            if orphans.blocks > self._rules.orphan_blocks_max:
                orphans.clear()
                record.reason = "orphans"
                self._give_up(record, record.last_seq)
            return
        reachable = [op.keys]
        while reachable:
            keys = reachable.pop()
            self._index.store(op.ns_id, slot, keys)
            if orphans.runs:
                for key in _u64s(keys):
                    reachable.extend(orphans.take(op.tier, op.ns_id, key))

    # --- dumps ---

    def _begin_dump(self, record: _Worker, dump_id: int, parts: int, true_for_seq: int) -> _Dump | None:
        self._abandon_dump(record)
        slots = _TierSlots(self._slots.open(visible=False))
        dump = record.dump = _Dump(dump_id, parts, true_for_seq, slots)
        for op in [op for kept in record.recent if kept.seq > true_for_seq for op in kept.ops]:
            if record.dump is not None:
                self._apply_to_dump(record, dump, op)
        return record.dump

    def _apply_to_dump(self, record: _Worker, dump: _Dump, op: Op) -> None:
        """Do an event to the invisible slots. A `Cleared` of both tiers never comes here: it makes older dumps
        pointless."""
        match op:
            case Stored():
                slot = self._dump_slot_of(dump, op.tier)
                if slot is not None:
                    self._index.store(op.ns_id, slot, op.keys)
            case Removed():
                slot = self._dump_slot_of(dump, op.tier)
                if slot is None:
                    return
                dump.removed.setdefault((op.tier, op.ns_id), set()).update(_u64s(op.keys))
                dump.removed_count += len(op.keys) // 8
                self._index.remove(op.ns_id, slot, op.keys)
                if dump.removed_count > self._rules.removed_keys_max:
                    self._abandon_dump(record)
            case Cleared():
                self._slots.close(dump.slots.gpu)
                dump.slots.gpu = self._slots.open(visible=False)
                dump.cleared.add(GPU)

    def _abandon_dump(self, record: _Worker) -> None:
        if record.dump is not None:
            for slot in (record.dump.slots.gpu, record.dump.slots.host):
                if slot is not None:
                    self._slots.close(slot)
            record.done_dump_id = record.dump.dump_id
            record.dump = None

    def _finish_dump(self, record: _Worker, dump: _Dump, at: float) -> None:
        """The dump is whole: what it covers is no longer missing, and its slot is the worker's."""
        record.dump = None
        record.done_dump_id = dump.dump_id
        # How long it took to mend a hole is not how late events are.
        record.lag_seq = 0
        self._slots.reveal(dump.slots.gpu)
        self._renew_slot(record, dump.slots.gpu)
        if dump.slots.host is not None:
            self._slots.reveal(dump.slots.host)
        self._renew_host_slot(record, dump.slots.host)
        record.orphans.clear()
        record.last_seq = max(record.last_seq, dump.true_for_seq)
        record.missing = {each for each in record.missing if each > dump.true_for_seq}
        if record.lost_through <= dump.true_for_seq:
            record.lost_through = 0
        record.ask_wait_s = self._rules.ask_every_s
        record.ask_at = max(at, record.asked_at + record.ask_wait_s)
        self._settle(record)


def _u64s(keys: bytes) -> memoryview:
    return memoryview(keys).cast("Q")
