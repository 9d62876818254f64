"""The ledger against workers that tell the truth over a line that loses, repeats and swaps messages."""

import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixbus.bus.messages import GPU, HOST, Cleared, Removed, Stored
from prefixbus.directory.index import Index, Slots, depth_in
from prefixbus.directory.ledger import (
    LEASES,
    AskDump,
    Effect,
    Holder,
    Lease,
    Ledger,
    NewIncarnation,
    Op,
    Rules,
    Sign,
    WorkerBack,
    WorkerLost,
    WorkerSuspect,
    WorkerView,
)
from prefixbus.directory.predictions import Predictions

NS = bytes(16)
OTHER_NS = b"other-namespace!"


def u64s(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def run(first: int, count: int) -> bytes:
    return array("Q", range(first, first + count)).tobytes()


CHAINS = [list(range(1, 11)), [1, 2, 3, 21, 22, 23], list(range(41, 49))]
PARENTS = {key: ([0, *chain])[depth] for chain in CHAINS for depth, key in enumerate(chain)}
# Tier, namespace, key.
Fact = tuple[int, bytes, int]
Send = Callable[[Ledger, float], Sequence[Effect]]


class TruthfulWorker:
    """A bridge as the ledger sees it: a cache whose changes and dumps go into a stream, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.stream: list[Send] = []
        # What the worker held after each event of each life.
        self.truth: dict[tuple[int, int], frozenset[Fact]] = {}
        self.dump_parts: list[Send] = []
        self.dump_id = 0
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.seq = 0
        self.held: set[Fact] = set()
        self.truth[self.incarnation, 0] = frozenset()
        self.dump_parts = []

    def tell(self, ops: list[Op]) -> None:
        self.seq += 1
        self.truth[self.incarnation, self.seq] = frozenset(self.held)
        name, incarnation, seq = self.name, self.incarnation, self.seq
        self.stream.append(lambda ledger, now: ledger.events(name, incarnation, seq, ops, now))

    def store(self, ns_id: bytes, chain: list[int], upto: int, tier: int = GPU) -> list[Op]:
        """Compute (or copy to the host) blocks until the chain is held that far; the event names what is new."""
        new = [key for key in chain[:upto] if (tier, ns_id, key) not in self.held]
        self.held.update((tier, ns_id, key) for key in new)
        return [Stored(ns_id, PARENTS[new[0]], u64s(*new), tier)] if new else []

    def evict(self, ns_id: bytes, chain: list[int], downto: int, tier: int = GPU) -> list[Op]:
        """Evict from the tail; what grows on an evicted block went before it. The other tier keeps its copies."""
        gone = set(chain[downto:])
        for other in CHAINS:
            first = next((depth for depth, key in enumerate(other) if key in gone), len(other))
            gone.update(other[first:])
        mine = [key for key in sorted(gone, reverse=True) if (tier, ns_id, key) in self.held]
        self.held.difference_update((tier, ns_id, key) for key in mine)
        return [Removed(ns_id, u64s(*mine), tier)] if mine else []

    def clear(self, host: bool) -> list[Op]:
        """A reset engine cache, or an erase, which takes the host store along."""
        self.held = set() if host else {fact for fact in self.held if fact[0] == HOST}
        return [Cleared(host)]

    def dump(self, size: int) -> None:
        """Take stock now; the parts are written later, among other events."""
        self.dump_id += 1
        name, incarnation, dump_id, seq = self.name, self.incarnation, self.dump_id, self.seq
        facts = sorted(self.held)
        pieces = [facts[at : at + size] for at in range(0, len(facts), size)] or [[]]
        for number, piece in enumerate(pieces):
            runs = [Stored(ns_id, PARENTS[key], u64s(key), tier) for tier, ns_id, key in piece]
            self.dump_parts.append(self._part(name, incarnation, dump_id, number, len(pieces), seq, runs))

    @staticmethod
    def _part(name: str, incarnation: int, dump_id: int, part: int, parts: int, seq: int, runs: list[Stored]) -> Send:
        return lambda ledger, now: ledger.dump_chunk(name, incarnation, dump_id, part, parts, seq, runs, now)

    def write_dump_part(self) -> None:
        if self.dump_parts:
            self.stream.append(self.dump_parts.pop(0))


places = st.integers(0, 2)
positions = st.integers(0, 30)
namespaces = st.sampled_from([NS, OTHER_NS])
tiers = st.sampled_from([GPU, GPU, HOST])
chains = st.sampled_from(CHAINS)
depths = st.integers(0, 10)
# A step of a burst: the tier and chain, how far it is computed and then evicted, and what else happens.
Step = tuple[int, list[int], int, int, str]
fates = st.sampled_from(["fine", "fine", "fine", "lost", "late", "dumped", "cleared", "erased"])
steps = st.tuples(tiers, chains, depths, depths, fates)
scripts: st.SearchStrategy[list[Step]] = st.lists(steps, min_size=1, max_size=8)
# Bounds that a short history reaches.
TIGHT = Rules(missing_max=4, recent_blocks_max=24, orphan_blocks_max=6, removed_keys_max=12)


class LedgerConvergesToTheTruth(RuleBasedStateMachine):
    """Whatever is lost, repeated, swapped or late: what the ledger calls complete is exact, and once dumps are answered
    and everything is delivered, everything is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.index = Index(self.slots)
        self.predictions = Predictions(self.slots)
        self.ledger = Ledger(self.index, TIGHT)
        self.workers = [TruthfulWorker(name) for name in ("ann", "ben", "cyd")]
        self.now = 0.0
        self.cut = False
        self.newest = dict.fromkeys(("ann", "ben", "cyd"), 0)

    @initialize()
    def all_are_heard(self) -> None:
        for worker in self.workers:
            self.heartbeat(worker)

    # What workers do.

    @rule(place=places, ns_id=namespaces, chain=chains, upto=depths, tier=tiers)
    def worker_computes(self, place: int, ns_id: bytes, chain: list[int], upto: int, tier: int) -> None:
        worker = self.workers[place]
        worker.tell(worker.store(ns_id, chain, upto, tier))

    @rule(place=places, ns_id=namespaces, chain=chains, downto=depths, tier=tiers)
    def worker_evicts(self, place: int, ns_id: bytes, chain: list[int], downto: int, tier: int) -> None:
        worker = self.workers[place]
        worker.tell(worker.evict(ns_id, chain, downto, tier))

    @rule(place=places, ns_id=namespaces, chain=chains, upto=depths)
    def worker_copies_to_its_host_and_evicts_all(self, place: int, ns_id: bytes, chain: list[int], upto: int) -> None:
        worker = self.workers[place]
        worker.tell(worker.store(ns_id, chain, upto) + worker.store(ns_id, chain, upto, HOST))
        worker.tell(worker.evict(ns_id, chain, 0))

    @rule(place=places, ns_id=namespaces, chain=chains, downto=depths, other=chains, upto=depths, clears=st.booleans())
    def worker_does_many_things_in_one_event(
        self, place: int, ns_id: bytes, chain: list[int], downto: int, other: list[int], upto: int, clears: bool
    ) -> None:
        worker = self.workers[place]
        ops = worker.evict(ns_id, chain, downto) + worker.store(ns_id, other, upto)
        if clears:
            ops += worker.clear(host=upto > 5) + worker.store(NS, chain, downto)
        worker.tell(ops)

    @rule(place=places, host=st.booleans())
    def worker_clears_its_cache(self, place: int, host: bool) -> None:
        self.workers[place].tell(self.workers[place].clear(host))

    @rule(place=places)
    def worker_restarts(self, place: int) -> None:
        self.workers[place].restart()

    @rule(place=places, size=st.integers(1, 8))
    def worker_takes_a_dump(self, place: int, size: int) -> None:
        self.workers[place].dump(size)

    @rule(place=places)
    def worker_writes_a_dump_part(self, place: int) -> None:
        self.workers[place].write_dump_part()

    # What the line does.

    def effects(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case AskDump(name, incarnation, _):
                    worker = next(each for each in self.workers if each.name == name)
                    if worker.incarnation == incarnation:
                        worker.dump(3)
                case NewIncarnation(name, incarnation):
                    assert incarnation > self.newest[name]
                    self.newest[name] = incarnation

    def deliver(self, worker: TruthfulWorker) -> None:
        if worker.stream:
            self.effects(worker.stream.pop(0)(self.ledger, self.now))

    def heartbeat(self, worker: TruthfulWorker) -> None:
        self.effects(self.ledger.heartbeat(worker.name, worker.incarnation, worker.seq, self.now))

    @rule(place=places, count=st.integers(1, 6))
    def messages_arrive(self, place: int, count: int) -> None:
        for _ in range(count):
            self.deliver(self.workers[place])

    @rule(place=places, at=positions)
    def a_message_is_lost(self, place: int, at: int) -> None:
        stream = self.workers[place].stream
        if stream:
            del stream[at % len(stream)]

    @rule(place=places, at=positions, by=st.integers(1, 4))
    def a_message_is_overtaken(self, place: int, at: int, by: int) -> None:
        stream = self.workers[place].stream
        if stream:
            message = stream.pop(at % len(stream))
            stream.insert(at % (len(stream) + 1) + by, message)

    @rule(place=places, at=positions, to=positions)
    def a_message_comes_again(self, place: int, at: int, to: int) -> None:
        stream = self.workers[place].stream
        if stream:
            stream.insert(to, stream[at % len(stream)])

    @rule(place=places)
    def a_heartbeat_arrives(self, place: int) -> None:
        self.heartbeat(self.workers[place])

    @rule(place=places, order=st.permutations(range(5)), script=scripts)
    def a_burst_arrives_in_disorder(self, place: int, order: list[int], script: list[Step]) -> None:
        """Events that overtake each other, and perhaps dumps among them."""
        worker = self.workers[place]
        while worker.stream:
            self.deliver(worker)
        for step in script:
            self.play(worker, step)
        head, worker.stream[:] = worker.stream[:5], worker.stream[5:]
        worker.stream[:0] = [head[at] for at in order if at < len(head)]
        while worker.stream:
            self.deliver(worker)

    @rule(place=places, early=st.booleans(), size=st.integers(1, 6), script=scripts)
    def a_dump_races_with_events(self, place: int, early: bool, size: int, script: list[Step]) -> None:
        """An event is lost, a dump is taken before or after it, and its parts come among newer events."""
        worker = self.workers[place]
        while worker.stream:
            self.deliver(worker)
        if early:
            worker.dump(size)
        self.play(worker, (GPU, CHAINS[1], 5, 3, "lost"))
        if not early:
            worker.dump(size)
        for step in script:
            self.play(worker, step)
            while worker.stream:
                self.deliver(worker)
            worker.write_dump_part()

    def play(self, worker: TruthfulWorker, step: Step) -> None:
        tier, chain, upto, downto, fate = step
        if fate in ("cleared", "erased"):
            worker.tell(worker.clear(fate == "erased") + worker.store(NS, chain, downto, tier))
        else:
            worker.tell(worker.store(NS, chain, upto, tier))
            worker.tell(worker.evict(NS, chain, downto, tier))
        if fate == "lost":
            worker.stream.pop()
        elif fate == "late":
            # The event before comes when the next two have passed.
            worker.stream.insert(max(0, len(worker.stream) - 3), worker.stream.pop())
        elif fate == "dumped":
            worker.dump(4)

    @rule(place=places)
    def answers_fall_short(self, place: int) -> None:
        """Whether that is so or not, a dump is asked for and ends the doubt."""
        self.effects(self.ledger.doubt(self.workers[place].name, self.workers[place].incarnation, self.now))

    # What time does.

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.7, 4.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.2)
            self.effects(self.ledger.tick(self.now))

    @rule()
    def the_observer_is_stopped(self) -> None:
        self.now += 10.0

    @rule()
    def observer_is_cut_off_or_back(self) -> None:
        if self.cut:
            self.ledger.observer_back(self.now)
        else:
            self.ledger.observer_cut(self.now)
        self.cut = not self.cut

    @rule(budget=st.integers(1, 10))
    def a_slice_is_swept(self, budget: int) -> None:
        self.index.sweep(budget)
        self.predictions.expire(self.now, budget)

    # What must hold.

    def held_by(self, view: WorkerView) -> frozenset[Fact]:
        return frozenset(
            (tier, ns_id, key)
            for tier, slot in ((GPU, view.slot), (HOST, view.host_slot))
            for ns_id in (NS, OTHER_NS)
            for key in PARENTS
            if slot is not None and self.index.holds(ns_id, slot, key)
        )

    @invariant()
    def what_is_called_complete_is_exact(self) -> None:
        for worker in self.workers:
            view = self.ledger.view(worker.name)
            if view is not None and view.complete:
                assert view.slot is not None
                assert self.held_by(view) == worker.truth[view.incarnation, view.last_seq]

    @invariant()
    def the_incomplete_are_those_whose_view_says_so(self) -> None:
        assert sorted(self.ledger.incomplete()) == sorted(v.worker for v in self.ledger.views() if not v.complete)

    @invariant()
    def lookups_see_the_slots_of_workers_and_no_other(self) -> None:
        views = list(self.ledger.views())
        mine = {view.slot: Holder(view.worker, GPU) for view in views}
        mine |= {view.host_slot: Holder(view.worker, HOST) for view in views}
        assert self.slots.visible == sum(1 << slot for slot in mine if slot is not None)
        assert all(self.ledger.holder_at(slot) == mine.get(slot) for slot in range(self.slots.width))
        on_gpu, on_host = self.ledger.holders((1 << self.slots.width) - 1)
        assert sorted(on_gpu) == sorted(view.worker for view in views if view.slot is not None)
        assert sorted(on_host) == sorted(view.worker for view in views if view.host_slot is not None)

    @invariant()
    def no_chain_is_seen_beyond_a_quarantined_parent(self) -> None:
        """What the worker reported is held behind its parent only: lookups and exact walks agree."""
        for view in self.ledger.views():
            for slot in (view.slot, view.host_slot):
                if slot is None or not view.complete:
                    continue
                for chain in CHAINS:
                    levels = self.index.lookup(NS, u64s(*chain))
                    assert depth_in(levels, slot) == self.index.depth_of_slot(NS, slot, u64s(*chain))

    def teardown(self) -> None:
        if self.cut:
            self.ledger.observer_back(self.now)
        # The line mends: 60 s of heartbeats, ticks and answered dumps.
        for _ in range(300):
            self.now += 0.2
            for worker in self.workers:
                while worker.stream or worker.dump_parts:
                    worker.write_dump_part()
                    self.deliver(worker)
                self.heartbeat(worker)
            self.effects(self.ledger.tick(self.now))
        for worker in self.workers:
            view = self.ledger.view(worker.name)
            assert view is not None
            assert view.slot is not None
            assert (view.incarnation, view.lease, view.complete) == (worker.incarnation, Lease.ALIVE, True)
            assert self.held_by(view) == worker.held
        while self.index.sweep(1000) or self.predictions.expire(self.now):
            pass
        assert self.index.pairs == sum(len(worker.held) for worker in self.workers)
        views = list(self.ledger.views())
        assert self.slots.open_count == 3 + sum(view.host_slot is not None for view in views)


LedgerConvergesToTheTruth.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestLedgerConvergesToTheTruth = LedgerConvergesToTheTruth.TestCase


class Bench:
    """One ledger and worker `w`, with the questions that tests ask of them."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.index = Index(Slots())
        self.ledger = Ledger(self.index, rules)

    def alive(self, incarnation: int = 1) -> "Bench":
        self.ledger.heartbeat("w", incarnation, 0, 0.0)
        return self

    def stored(self, seq: int, first: int, count: int = 4, *, parent: int = 0, incarnation: int = 1) -> None:
        self.ledger.events("w", incarnation, seq, [Stored(NS, parent, run(first, count))], 0.0)

    def dump(self, dump_id: int, part: int, parts: int, seq: int, *runs: bytes, now: float = 0.0) -> Sequence[Effect]:
        return self.ledger.dump_chunk("w", 1, dump_id, part, parts, seq, [Stored(NS, 0, keys) for keys in runs], now)

    @property
    def complete(self) -> bool:
        view = self.ledger.view("w")
        assert view is not None
        return view.complete

    def depth(self, first: int = 1, count: int = 64) -> int:
        return sum(depth for depth, _ in self.index.lookup(NS, run(first, count)))

    def silence(self, until: float, since: float = 0.0) -> list[Effect]:
        """Ticks every 0.1 s, as the service does."""
        steps = range(1, round((until - since) * 10) + 1)
        return [effect for step in steps for effect in self.ledger.tick(since + step / 10)]

    def keep_alive(self, until: float, last_seq: int, since: float = 0.0) -> list[tuple[float, Effect]]:
        """Heartbeats and ticks every 0.1 s; the effects with their times."""
        effects: list[tuple[float, Effect]] = []
        for step in range(1, round((until - since) * 10) + 1):
            now = since + step / 10
            said = (*self.ledger.heartbeat("w", 1, last_seq, now), *self.ledger.tick(now))
            effects.extend((round(now, 1), effect) for effect in said)
        return effects


# Leases


def test_a_worker_first_heard_is_new_and_may_be_given_work() -> None:
    effects = Bench().ledger.heartbeat("w", 7, 0, 0.0)

    assert effects == [NewIncarnation("w", 7), WorkerBack("w", 7)]


def test_silence_makes_a_worker_suspect_then_lost_each_said_once() -> None:
    bench = Bench().alive()
    bench.stored(1, 1)

    said = [(now / 10, effect) for now in range(1, 60) for effect in bench.ledger.tick(now / 10)]

    assert said == [(0.6, WorkerSuspect("w", 1)), (3.0, WorkerLost("w", 1))]
    assert bench.depth() == 0


def test_a_suspect_worker_keeps_its_entries_and_comes_back_with_them() -> None:
    bench = Bench().alive()
    bench.stored(1, 1)

    bench.silence(1.0)
    while_suspect = bench.depth()
    effects = bench.ledger.heartbeat("w", 1, 1, 1.1)

    assert while_suspect == 4
    assert effects == [WorkerBack("w", 1)]
    assert bench.depth() == 4
    assert bench.complete


def test_events_are_no_sign_of_life() -> None:
    bench = Bench().alive()

    effects: list[Effect] = []
    for seq in range(1, 32):
        bench.ledger.events("w", 1, seq, [Stored(NS, 0, run(seq, 1))], seq / 10)
        effects += bench.ledger.tick(seq / 10)

    assert effects == [WorkerSuspect("w", 1), WorkerLost("w", 1)]


def test_a_worker_known_only_from_events_gets_no_work_before_its_first_heartbeat() -> None:
    bench = Bench()

    first = bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 4))], 0.0)
    view = bench.ledger.view("w")
    heard = bench.ledger.heartbeat("w", 1, 1, 0.1)

    assert first == [NewIncarnation("w", 1)]
    assert view is not None
    assert view.lease is Lease.SUSPECT
    assert heard == [WorkerBack("w", 1)]


def test_the_lease_clock_stands_still_while_the_observer_is_cut_off() -> None:
    bench = Bench().alive()

    bench.silence(0.5)
    bench.ledger.observer_cut(0.5)
    while_cut = bench.silence(50.0, since=0.5)
    bench.ledger.observer_back(100.0)
    at_once = bench.ledger.tick(100.0)
    later = bench.ledger.tick(100.2)

    assert (while_cut, at_once) == ([], ())
    assert later == [WorkerSuspect("w", 1)]


def test_a_directory_that_was_stopped_does_not_take_its_fleet_for_dead() -> None:
    """SIGSTOP for 5 s: on waking, the tick runs before the heartbeats that wait in the socket are read."""
    bench = Bench().alive()
    bench.stored(1, 1)
    bench.silence(0.2)

    on_waking = bench.ledger.tick(5.2)
    held = bench.depth()
    said = bench.silence(8.5, since=5.2)

    assert (on_waking, held) == ((), 4)
    assert said == [WorkerSuspect("w", 1), WorkerLost("w", 1)]


def test_a_worker_stopped_for_ten_seconds_is_taken_back_by_a_dump() -> None:
    """SIGSTOP, ten seconds, SIGCONT: the same incarnation, an intact cache, and all its entries voided meanwhile."""
    bench = Bench().alive()
    bench.stored(1, 1, 8)
    bench.silence(10.0)

    effects = bench.ledger.heartbeat("w", 1, 1, 10.1)
    before_dump = bench.depth(), bench.complete
    bench.dump(1, 0, 1, 1, run(1, 8), now=10.2)

    assert effects == [WorkerBack("w", 1), AskDump("w", 1, "returned")]
    assert before_dump == (0, False)
    assert (bench.depth(), bench.complete) == (8, True)


def test_events_after_a_return_do_not_stand_in_for_the_dump() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 8)
    bench.silence(5.0)
    bench.ledger.heartbeat("w", 1, 1, 6.0)

    bench.stored(2, 50)

    assert (bench.depth(50), bench.complete) == (4, False)


def test_a_lost_worker_that_never_held_anything_returns_without_a_dump() -> None:
    bench = Bench().alive()
    bench.silence(5.0)

    effects = bench.ledger.heartbeat("w", 1, 0, 6.0)

    assert effects == [WorkerBack("w", 1)]
    assert bench.complete


def test_every_pair_of_lease_state_and_sign_is_in_the_table_or_cannot_happen() -> None:
    impossible = {(Lease.LOST, Sign.QUIET), (Lease.LOST, Sign.EXPIRED)}

    assert set(LEASES) == {(lease, sign) for lease in Lease for sign in Sign} - impossible


# Incarnations


def test_a_newer_incarnation_voids_all_older_entries_at_once() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 30)

    effects = bench.ledger.events("w", 2, 1, [Stored(NS, 0, run(1, 3))], 0.1)

    assert effects == [NewIncarnation("w", 2)]
    assert bench.depth() == 3


@pytest.mark.parametrize("kind", ["heartbeat", "events", "dump"])
def test_messages_of_an_older_incarnation_change_nothing(kind: str) -> None:
    bench = Bench().alive(incarnation=2)
    bench.stored(1, 1, 3, incarnation=2)

    effects = {
        "heartbeat": lambda: bench.ledger.heartbeat("w", 1, 9, 5.0),
        "events": lambda: bench.ledger.events("w", 1, 2, [Cleared()], 0.1),
        "dump": lambda: bench.dump(1, 0, 1, 9, run(1, 60)),
    }[kind]()

    assert effects == ()
    assert (bench.depth(), bench.complete) == (3, True)
    assert bench.silence(5.0) == [WorkerSuspect("w", 2), WorkerLost("w", 2)]


def test_predictions_follow_a_cleared_cache_and_end_with_a_restart() -> None:
    bench = Bench()
    predictions = Predictions(bench.index.slots)
    bench.alive().stored(1, 1)
    view = bench.ledger.view("w")
    assert view is not None
    assert view.slot is not None
    predictions.announce("r", view.slot, NS, run(1, 9), expires_at=9.0)

    bench.ledger.events("w", 1, 2, [Cleared()], 0.1)
    while predictions.expire(0.1):
        pass
    after_clear = predictions.lookup(bench.index, NS, run(1, 9))
    stored_after_clear = bench.index.lookup(NS, run(1, 9))
    bench.ledger.heartbeat("w", 2, 0, 0.2)

    assert [depth for depth, _ in after_clear] == [9]
    assert stored_after_clear == []
    assert predictions.lookup(bench.index, NS, run(1, 9)) == []


# Tiers


def levels_by_holder(bench: Bench, first: int = 1) -> dict[Holder, int]:
    found: dict[Holder, int] = {}
    for depth, mask in bench.index.lookup(NS, run(first, 64)):
        for slot in range(mask.bit_length()):
            holder = bench.ledger.holder_at(slot)
            if mask >> slot & 1 and holder is not None:
                found[holder] = depth
    return found


def test_a_look_up_names_each_tiers_depth() -> None:
    bench = Bench().alive()

    bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 4)), Stored(NS, 0, run(1, 9), HOST)], 0.0)

    assert levels_by_holder(bench) == {Holder("w", GPU): 4, Holder("w", HOST): 9}


@pytest.mark.parametrize(
    ("op", "left"),
    [
        pytest.param(Removed(NS, run(1, 4)), {Holder("w", HOST): 4}, id="the GPU copy is removed"),
        pytest.param(Removed(NS, run(1, 4), HOST), {Holder("w", GPU): 4}, id="the host copy is removed"),
        pytest.param(Cleared(), {Holder("w", HOST): 4}, id="the engine's cache is reset"),
        pytest.param(Cleared(host=True), {}, id="all is erased"),
    ],
)
def test_what_happens_to_one_copy_says_nothing_about_the_other(op: Op, left: dict[Holder, int]) -> None:
    bench = Bench().alive()
    bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 4)), Stored(NS, 0, run(1, 4), HOST)], 0.0)

    bench.ledger.events("w", 1, 2, [op], 0.0)

    assert levels_by_holder(bench) == left


def test_a_cleared_gpu_cache_takes_what_waits_for_its_parent_along_and_leaves_the_hosts() -> None:
    bench = Bench().alive()
    for tier in (GPU, HOST):
        bench.ledger.events("w", 1, 2 + tier, [Stored(NS, 2, run(3, 4), tier)], 0.0)
    bench.ledger.events("w", 1, 4, [Cleared()], 0.0)

    bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 2), HOST)], 0.0)

    assert levels_by_holder(bench) == {Holder("w", HOST): 6}
    assert bench.index.pairs == 6
    assert bench.complete


def test_a_restart_voids_both_tiers_at_once() -> None:
    bench = Bench().alive()
    bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 4)), Stored(NS, 0, run(1, 4), HOST)], 0.0)

    bench.ledger.heartbeat("w", 2, 0, 0.1)

    assert levels_by_holder(bench) == {}
    assert bench.index.slots.open_count == 1


def test_one_workers_eviction_never_drops_anothers_entry() -> None:
    bench = Bench().alive()
    both = [Stored(NS, 0, run(1, 4)), Stored(NS, 0, run(1, 4), HOST)]
    for worker in ("w", "v"):
        bench.ledger.events(worker, 1, 1, both, 0.0)

    bench.ledger.events("v", 1, 2, [Removed(NS, run(1, 4)), Removed(NS, run(2, 3), HOST)], 0.0)

    assert levels_by_holder(bench) == {Holder("w", GPU): 4, Holder("w", HOST): 4, Holder("v", HOST): 1}


def test_a_dump_tells_of_both_tiers_and_replaces_both() -> None:
    bench = Bench().alive()
    bench.ledger.events("w", 1, 1, [Stored(NS, 0, run(1, 9)), Stored(NS, 0, run(1, 9), HOST)], 0.0)
    bench.stored(3, 60)

    bench.ledger.dump_chunk("w", 1, 1, 0, 1, 3, [Stored(NS, 0, run(1, 2)), Stored(NS, 0, run(1, 5), HOST)], 0.0)

    assert levels_by_holder(bench) == {Holder("w", GPU): 2, Holder("w", HOST): 5}
    assert bench.complete


def test_a_tier_we_do_not_know_is_left_alone() -> None:
    """A newer bridge, or a dump of one, may tell of more than this directory understands."""
    bench = Bench().alive()
    ops: list[Op] = [Stored(NS, 0, run(1, 4)), Stored(NS, 0, run(1, 9), 2), Removed(NS, run(1, 4), -1)]

    bench.ledger.events("w", 1, 1, ops, 0.0)
    bench.ledger.events("w", 1, 3, ops, 0.0)
    bench.ledger.dump_chunk("w", 1, 1, 0, 1, 3, [Stored(NS, 0, run(1, 3)), Stored(NS, 0, run(1, 9), 2)], 0.0)

    assert levels_by_holder(bench) == {Holder("w", GPU): 3}


# Order and loss


def test_a_gap_leaves_entries_usable_but_less_trusted_and_asks_for_a_dump() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 4)

    bench.stored(3, 50, 4)
    asked = bench.keep_alive(0.5, last_seq=3)

    assert (bench.depth(1), bench.depth(50), bench.complete) == (4, 4, False)
    assert asked == [(0.2, AskDump("w", 1, "gap"))]


def test_a_late_message_mends_the_gap_and_nothing_is_asked() -> None:
    """Removed at 2, stored again at 3: the late 2 must not undo 3."""
    bench = Bench().alive()
    bench.stored(1, 1, 4)

    bench.stored(3, 4, 1, parent=3)
    bench.ledger.events("w", 1, 2, [Removed(NS, run(3, 2)), Stored(NS, 2, run(3, 1))], 0.0)
    asked = bench.keep_alive(2.0, last_seq=3)

    assert (bench.depth(), bench.complete) == (4, True)
    assert asked == []


def test_a_tail_that_never_arrives_is_noticed_by_the_heartbeat() -> None:
    bench = Bench().alive()
    bench.stored(1, 1)

    asked = bench.keep_alive(1.0, last_seq=2)

    assert asked == [(0.6, AskDump("w", 1, "tail"))]
    assert not bench.complete


def test_a_heartbeat_that_overtakes_its_events_raises_no_suspicion() -> None:
    bench = Bench().alive()

    bench.ledger.heartbeat("w", 1, 2, 0.1)
    bench.stored(1, 1)
    bench.stored(2, 5, parent=4)

    assert bench.keep_alive(2.0, last_seq=2, since=0.1) == []
    assert bench.complete


def test_a_dump_is_asked_for_again_until_it_arrives_less_and_less_often() -> None:
    bench = Bench().alive()
    bench.stored(2, 1)

    asked = bench.keep_alive(20.0, last_seq=2)
    bench.dump(1, 0, 1, 2, run(1, 4), now=20.0)

    assert [at for at, _ in asked] == [0.2, 1.2, 3.2, 7.2, 15.2]
    assert bench.complete
    assert bench.keep_alive(60.0, last_seq=2, since=20.0) == []


def test_many_gaps_do_not_ask_for_many_dumps() -> None:
    bench = Bench().alive()
    asked: list[tuple[float, Effect]] = []

    for number in range(20):
        seq = 2 * number + 2
        bench.stored(seq, 1)
        asked += bench.keep_alive(number / 2 + 0.5, last_seq=seq, since=number / 2)
        bench.dump(number, 0, 1, seq, run(1, 4), now=number / 2 + 0.5)

    assert 5 <= len(asked) <= 10
    assert all(later - earlier > 0.99 for (earlier, _), (later, _) in pairwise(asked))


def test_a_dump_that_goes_on_arriving_is_not_asked_for_again() -> None:
    bench = Bench().alive()
    bench.stored(2, 1)

    asked = bench.keep_alive(0.5, last_seq=2)
    for second in range(1, 8):
        bench.dump(1, second, 100, 2, run(100 * second, 4), now=second - 0.5)
        asked += bench.keep_alive(second + 0.5, last_seq=2, since=second - 0.5)

    assert len(asked) == 1


def test_answers_that_keep_falling_short_are_reason_for_a_dump_once_in_a_while() -> None:
    """The engine dropped blocks 5 to 8 and never said so."""
    bench = Bench().alive()
    bench.stored(1, 1, 8)

    asked = bench.ledger.doubt("w", 1, 10.0)
    bench.stored(2, 60)
    doubted = bench.depth(), bench.complete
    bench.dump(1, 0, 1, 2, run(1, 4), now=10.2)
    mended = bench.depth(), bench.complete
    too_soon = bench.ledger.doubt("w", 1, 11.0)
    bench.keep_alive(50.0, last_seq=2, since=11.0)

    assert asked == [AskDump("w", 1, "misses")]
    assert (doubted, mended) == ((8, False), (4, True))
    assert too_soon == ()
    assert bench.ledger.doubt("w", 1, 50.1) == [AskDump("w", 1, "misses")]


@pytest.mark.parametrize(
    ("worker", "incarnation"), [("w", 0), ("w", 2), ("unknown", 1)], ids=["earlier life", "later life", "unknown"]
)
def test_doubts_about_another_life_change_nothing(worker: str, incarnation: int) -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 8)

    assert bench.ledger.doubt(worker, incarnation, 10.0) == ()
    assert bench.complete


def test_a_half_received_dump_is_never_visible() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 2)
    bench.stored(3, 70, 2)

    bench.dump(1, 0, 2, 3, run(1, 10))
    half = bench.depth(1), bench.depth(70)
    bench.dump(1, 1, 2, 3, run(70, 1))

    assert half == (2, 2)
    assert (bench.depth(1), bench.depth(70), bench.complete) == (10, 1, True)


def test_events_that_race_with_a_dump_win_where_they_are_newer() -> None:
    bench = Bench().alive()
    bench.stored(2, 1, 2)

    # True for 2; then 3 evicts what a later part still names, 4 stores what no part names, 5 evicts what one named.
    bench.ledger.events("w", 1, 3, [Removed(NS, run(109, 2))], 0.0)
    bench.dump(1, 0, 3, 2, run(1, 4), run(30, 2))
    bench.stored(4, 50, 3)
    bench.ledger.events("w", 1, 5, [Removed(NS, run(30, 2))], 0.0)
    bench.dump(1, 1, 3, 2, run(107, 4))
    bench.dump(1, 2, 3, 2, run(20, 2))

    assert [bench.depth(first) for first in (1, 30, 107, 109, 20, 50)] == [4, 0, 2, 0, 2, 3]
    assert bench.complete


def test_a_cache_cleared_in_both_tiers_ends_every_doubt_and_every_older_dump() -> None:
    bench = Bench().alive()
    bench.stored(5, 1, 4)
    bench.dump(1, 0, 2, 5, run(1, 4))

    bench.ledger.events("w", 1, 6, [Cleared(host=True), Stored(NS, 0, run(1, 2))], 0.0)
    bench.dump(1, 1, 2, 5, run(5, 4))

    assert (bench.depth(), bench.complete) == (2, True)


def test_a_cleared_gpu_cache_voids_what_a_dump_on_its_way_says_of_the_gpu_and_leaves_the_rest_in_doubt() -> None:
    """What was missed may have been about the host store, which a reset engine cache says nothing about."""
    bench = Bench().alive()
    bench.stored(5, 1, 4)
    bench.dump(1, 0, 2, 5, run(1, 4))

    bench.ledger.events("w", 1, 6, [Cleared(), Stored(NS, 0, run(1, 2))], 0.0)
    doubted = not bench.complete
    on_host = [Stored(NS, 0, run(40, 4), HOST), Stored(NS, 0, run(5, 4))]
    bench.ledger.dump_chunk("w", 1, 1, 1, 2, 5, on_host, 0.0)

    assert doubted
    assert [bench.depth(first) for first in (1, 5, 40)] == [2, 0, 4]
    assert bench.complete


def test_late_duplicates_of_events_and_dumps_are_harmless() -> None:
    bench = Bench().alive()
    bench.stored(2, 1, 4)
    bench.dump(1, 0, 1, 2, run(1, 8))
    bench.ledger.events("w", 1, 3, [Removed(NS, run(5, 4))], 0.0)

    bench.dump(1, 0, 1, 2, run(1, 8))
    bench.stored(2, 1, 8)
    bench.stored(1, 1, 8)

    assert (bench.depth(), bench.complete) == (4, True)


def test_a_dump_nobody_needs_is_not_taken() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 4)
    slot_before = bench.ledger.view("w")

    bench.dump(1, 0, 1, 1, run(1, 4))

    assert bench.ledger.view("w") == slot_before


def test_a_dump_older_than_the_gap_does_not_make_the_story_whole() -> None:
    bench = Bench(Rules(missing_max=0)).alive()
    bench.stored(1, 1, 4)
    bench.stored(5, 5, 4, parent=4)

    bench.dump(1, 0, 1, 2, run(1, 4))
    too_old = bench.complete
    bench.dump(2, 0, 1, 4, run(1, 4))

    assert not too_old
    assert (bench.depth(), bench.complete) == (8, True)


def test_a_dump_from_before_what_is_kept_of_the_story_is_not_taken() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 2)
    bench.stored(2, 3, 2, parent=2)
    bench.stored(4, 60, 2)

    # True for 1, and the ledger no longer has 2 to add to it.
    bench.dump(1, 0, 1, 1, run(1, 2))
    bench.stored(3, 5, 2, parent=4)

    assert (bench.depth(), bench.complete) == (6, True)


def test_an_event_that_comes_too_late_to_repeat_what_followed_does_not_mend_the_gap() -> None:
    """2 removes a block, 3 stores it again, and 3 is no longer kept when 2 arrives."""
    bench = Bench(Rules(recent_blocks_max=6)).alive()
    bench.stored(1, 1, 4)
    bench.stored(3, 4, 1, parent=3)
    bench.stored(4, 60, 5)

    bench.ledger.events("w", 1, 2, [Removed(NS, run(4, 1))], 0.0)

    assert (bench.depth(), bench.complete) == (4, False)


def test_an_event_that_the_dump_covers_says_nothing_about_it() -> None:
    """The dump, true for 3, overtakes 2, which removed a block that 3 stored again."""
    bench = Bench().alive()
    bench.stored(1, 1, 4)

    bench.dump(1, 0, 2, 3, run(1, 2))
    bench.ledger.events("w", 1, 2, [Removed(NS, run(4, 1))], 0.0)
    bench.dump(1, 1, 2, 3, run(3, 2))

    assert (bench.depth(), bench.complete) == (4, True)


def test_blocks_with_an_unknown_parent_are_unseen_until_it_arrives() -> None:
    bench = Bench().alive()
    bench.stored(1, 1, 8)

    # 2 (blocks 9 and 10) is missing: 11.. would look like the end of an unbroken chain.
    bench.stored(3, 11, 20, parent=10)
    quarantined = bench.depth()
    bench.stored(2, 9, 2, parent=8)

    assert quarantined == 8
    assert (bench.depth(), bench.complete) == (30, True)


def test_what_is_evicted_in_quarantine_does_not_come_back_with_the_parent() -> None:
    bench = Bench().alive()
    bench.stored(2, 3, 4, parent=2)
    bench.ledger.events("w", 1, 3, [Removed(NS, run(5, 2))], 0.0)

    bench.stored(4, 1, 2)

    assert bench.depth() == 4
    assert bench.index.pairs == 4


def test_children_that_outlived_their_parent_are_held_once_the_story_is_whole() -> None:
    """Engines evict from the tail. Should one not, what it reported is what it holds."""
    bench = Bench().alive()
    bench.stored(1, 1, 2)
    bench.stored(3, 3, 4, parent=99)

    bench.ledger.events("w", 1, 2, [], 0.0)

    assert bench.complete
    assert bench.depth(3) == 4


def test_a_dump_outrun_by_evictions_is_given_up_without_a_trace() -> None:
    bench = Bench(Rules(removed_keys_max=2)).alive()
    bench.stored(1, 1, 8)
    bench.ledger.events("w", 1, 3, [Removed(NS, run(6, 3)), Stored(NS, 5, run(6, 1))], 0.0)

    bench.dump(1, 0, 1, 2, run(1, 8))
    given_up = bench.complete
    while bench.index.sweep(100):
        pass
    pairs = bench.index.pairs
    bench.dump(2, 0, 1, 3, run(1, 6))

    assert not given_up
    assert pairs == 6
    assert (bench.depth(), bench.complete) == (6, True)


def test_a_dump_from_before_a_cleared_cache_is_void_even_if_more_is_missing() -> None:
    bench = Bench().alive()
    bench.stored(2, 1, 4)
    bench.dump(1, 0, 2, 2, run(1, 4))
    bench.stored(5, 60, 2)
    bench.ledger.events("w", 1, 3, [Cleared(host=True)], 0.0)

    bench.dump(1, 1, 2, 2, run(5, 4))
    bench.stored(4, 70, 2)

    assert [bench.depth(first) for first in (1, 60, 70)] == [0, 2, 2]
    assert bench.complete


def test_quarantine_is_bounded_and_then_only_a_dump_helps() -> None:
    bench = Bench(Rules(orphan_blocks_max=10)).alive()
    bench.stored(2, 3, 20, parent=2)

    bench.stored(1, 1, 2)
    without = bench.complete
    bench.dump(1, 0, 1, 2, run(1, 22))

    assert not without
    assert (bench.depth(), bench.complete) == (22, True)


def test_ten_thousand_dead_workers_leave_memory_flat() -> None:
    slots = Slots()
    index, predictions = Index(slots), Predictions(slots)
    # One tick is enough to lose a worker.
    ledger = Ledger(index, Rules(suspect_after_s=0.1, lost_after_s=0.2, lost_max=100))

    def live_and_die(first: int, last: int) -> None:
        for number in range(first, last):
            now, name = number * 10.0, f"w{number}"
            ledger.heartbeat(name, 1, 0, now)
            ledger.events(name, 1, 1, [Stored(NS, 0, run(1, 16)), Stored(NS, 16, run(number * 100, 16))], now)
            ledger.events(name, 1, 3, [Stored(OTHER_NS, 77, run(number * 100, 16))], now)
            ledger.tick(now + 5.0)
            index.sweep(20)
            predictions.expire(now)

    live_and_die(0, 500)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        live_and_die(500, 10_500)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    while index.sweep(1000):
        pass
    assert after - before < 400_000
    assert slots.width < 10
    assert index.pairs == 0
