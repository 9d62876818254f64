"""A replica that loads a snapshot and repeats the rest of the stream knows what one knows that heard all of it."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_ledger import CHAINS, NS, OTHER_NS, PARENTS, TIGHT, Fact, Send, TruthfulWorker, run, u64s

from prefixbus.bus.messages import GPU, HOST, Cleared, Removed, Stored
from prefixbus.directory import snapshot
from prefixbus.directory.index import Index, Slots
from prefixbus.directory.ledger import AskDump, Effect, Ledger, Op, WorkerView
from prefixbus.directory.snapshot import End, Header, SnapshotUnusable, Worker

NAMES = ("ann", "ben", "cyd")
places = st.integers(0, len(NAMES) - 1)
namespaces = st.sampled_from([NS, OTHER_NS])
tiers = st.sampled_from([GPU, GPU, HOST])
chains = st.sampled_from(CHAINS)
depths = st.integers(0, 10)
fates = st.sampled_from(["fine", "evicted", "cleared", "lost", "restarted", "silent", "dumped"])
# Of a worker: the chain and tier in which it computes, how far, and what else happens.
Step = tuple[list[int], int, int, str]


class Replica:
    """A directory's pure part, and how far in the stream it is."""

    def __init__(self) -> None:
        self.index = Index(Slots())
        self.ledger = Ledger(self.index, TIGHT)
        self.stream_seq = 0

    @classmethod
    def loaded(cls, data: bytes, now: float) -> "Replica":
        replica = cls()
        for _ in snapshot.verify(data):
            pass
        for _ in snapshot.restore(data, replica.ledger, now):
            pass
        replica.stream_seq = snapshot.header_of(data).stream_seq
        return replica

    def follow(self, stream: list[Send], now: float, count: int | None = None) -> list[Effect]:
        """The next messages of the stream, all of them if no number is given."""
        end = len(stream) if count is None else min(len(stream), self.stream_seq + count)
        effects = [effect for send in stream[self.stream_seq : end] for effect in send(self.ledger, now)]
        self.stream_seq = end
        return effects

    def take(self) -> Iterator[bytes]:
        return snapshot.take(self.ledger, self.index, Header(0, 1, "stream", self.stream_seq, 0.0))

    def held_by(self, view: WorkerView) -> frozenset[Fact]:
        return frozenset(
            (tier, ns_id, key)
            for tier, slot in ((GPU, view.slot), (HOST, view.host_slot))
            for ns_id in (NS, OTHER_NS)
            for key in PARENTS
            if slot is not None and self.index.holds(ns_id, slot, key)
        )


def told_in(data: bytes) -> set[str]:
    """The workers that a snapshot tells of in full."""
    told: set[str] = set()
    name = ""
    for payload in snapshot._payloads(data):
        frame = snapshot._decoded(payload)
        if isinstance(frame, Worker):
            name = frame.name
            told.add(name)
        elif isinstance(frame, snapshot.Voided):
            told.discard(name)
    return told


class SnapshotAndReplayEqualEventsAlone(RuleBasedStateMachine):
    """Whatever happens while a snapshot is taken and after it: events, evictions, cleared caches, restarts, lost
    events, dumps, leases that run out."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = [TruthfulWorker(name) for name in NAMES]
        self.stream: list[Send] = []
        self.live = Replica()
        self.now = 0.0
        self.taking: Iterator[bytes] | None = None
        self.taken = bytearray()
        self.snapshots: list[bytes] = []

    @initialize()
    def all_are_heard(self) -> None:
        for worker in self.workers:
            self.heartbeat(worker)

    # What workers do; what they say is in the stream at once, if it gets there.

    def publish(self, worker: TruthfulWorker, *, is_lost: bool = False) -> None:
        if not is_lost:
            self.stream.extend(worker.stream)
        worker.stream.clear()

    @rule(place=places, ns_id=namespaces, chain=chains, upto=depths, tier=tiers)
    def worker_computes(self, place: int, ns_id: bytes, chain: list[int], upto: int, tier: int) -> None:
        worker = self.workers[place]
        worker.tell(worker.store(ns_id, chain, upto, tier))
        self.publish(worker)

    @rule(place=places, ns_id=namespaces, chain=chains, downto=depths, tier=tiers, is_lost=st.booleans())
    def worker_evicts(self, place: int, ns_id: bytes, chain: list[int], downto: int, tier: int, is_lost: bool) -> None:
        worker = self.workers[place]
        worker.tell(worker.evict(ns_id, chain, downto, tier))
        self.publish(worker, is_lost=is_lost and downto > 7)

    @rule(place=places, host=st.booleans(), chain=chains, upto=depths)
    def worker_clears_and_begins_anew(self, place: int, host: bool, chain: list[int], upto: int) -> None:
        worker = self.workers[place]
        worker.tell(worker.clear(host) + worker.store(NS, chain, upto))
        self.publish(worker)

    @rule(place=places)
    def worker_restarts(self, place: int) -> None:
        self.workers[place].restart()

    @rule(place=places, size=st.integers(1, 8))
    def worker_dumps(self, place: int, size: int) -> None:
        self.workers[place].dump(size)

    @rule(place=places, count=st.integers(1, 4))
    def worker_writes_dump_parts(self, place: int, count: int) -> None:
        worker = self.workers[place]
        for _ in range(count):
            worker.write_dump_part()
        self.publish(worker)

    # What the replica that lives does.

    def heartbeat(self, worker: TruthfulWorker) -> None:
        self.answer(self.live.ledger.heartbeat(worker.name, worker.incarnation, worker.seq, self.now))

    def answer(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AskDump):
                worker = self.workers[NAMES.index(effect.worker)]
                if worker.incarnation == effect.incarnation:
                    worker.dump(3)

    @rule(count=st.integers(1, 6))
    def it_follows(self, count: int) -> None:
        self.answer(self.live.follow(self.stream, self.now, count))

    @rule(silent=st.sets(places), seconds=st.sampled_from([0.3, 0.7, 4.0]))
    def time_passes(self, silent: set[int], seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.2)
            for place, worker in enumerate(self.workers):
                if place not in silent:
                    self.heartbeat(worker)
            self.answer(self.live.ledger.tick(self.now))
        self.live.index.sweep(10)

    @rule()
    def a_snapshot_begins(self) -> None:
        self.taking, self.taken = self.live.take(), bytearray()
        self.taken += next(self.taking)

    @rule(count=st.integers(1, 4))
    def a_snapshot_goes_on(self, count: int) -> None:
        for _ in range(count):
            if self.taking is None:
                return
            piece = next(self.taking, None)
            if piece is None:
                self.taking = None
                self.snapshots.append(bytes(self.taken))
            else:
                self.taken += piece

    @rule(
        place=places,
        before=st.lists(st.tuples(chains, tiers, depths, fates), max_size=3),
        first=st.integers(1, 3),
        script=st.lists(st.tuples(chains, tiers, depths, fates), min_size=1, max_size=4),
        between=st.integers(1, 2),
    )
    def a_snapshot_races_with_events(
        self, place: int, before: list[Step], first: int, script: list[Step], between: int
    ) -> None:
        """It begins when all is heard, and goes on by a few pieces after each step of a worker."""
        worker = self.workers[place]
        for step in before:
            self.play(worker, step)
        self.a_snapshot_begins()
        self.a_snapshot_goes_on(first)
        for step in script:
            self.play(worker, step)
            self.a_snapshot_goes_on(between)
        self.a_snapshot_goes_on(100)

    def play(self, worker: TruthfulWorker, step: Step) -> None:
        """One step of a worker, heard by the replica that lives."""
        chain, tier, upto, fate = step
        worker.tell(worker.store(NS, chain, upto, tier))
        self.publish(worker)
        if fate == "evicted":
            worker.tell(worker.evict(NS, chain, 0, tier))
        elif fate == "cleared":
            worker.tell(worker.clear(host=upto > 5))
        elif fate == "lost":
            worker.tell(worker.evict(NS, chain, 1, tier))
            self.publish(worker, is_lost=True)
            worker.tell([])
        elif fate == "restarted":
            worker.restart()
            self.heartbeat(worker)
        elif fate == "silent":
            self.time_passes({self.workers.index(worker)}, 4.0)
            self.heartbeat(worker)
        elif fate == "dumped":
            worker.dump(3)
        self.publish(worker)
        self.it_follows(len(self.stream))
        while worker.dump_parts:
            worker.write_dump_part()
            self.publish(worker)
        self.it_follows(len(self.stream))

    # What must hold.

    @invariant()
    def a_replica_that_starts_now_knows_the_same(self) -> None:
        for data in self.snapshots[-2:]:
            self.check(data)

    def check(self, data: bytes) -> None:
        other, told = Replica.loaded(data, self.now), told_in(data)
        other.follow(self.stream[: self.live.stream_seq], self.now)
        for worker in self.workers:
            mine, theirs = other.ledger.view(worker.name), self.live.ledger.view(worker.name)
            if mine is not None and mine.complete:
                assert other.held_by(mine) == worker.truth[mine.incarnation, mine.last_seq]
            if worker.name in told:
                assert mine is not None
                assert theirs is not None
                if theirs.complete and mine.incarnation == theirs.incarnation:
                    assert (mine.complete, mine.last_seq) == (True, theirs.last_seq)
                    assert other.held_by(mine) == self.live.held_by(theirs)

    def teardown(self) -> None:
        """The rest of the stream, heartbeats and answered dumps: in the end it knows all."""
        replicas = [Replica.loaded(data, self.now) for data in self.snapshots[-2:]]
        for _ in range(100):
            self.now += 0.2
            for worker in self.workers:
                while worker.dump_parts:
                    worker.write_dump_part()
                self.publish(worker)
            for replica in replicas:
                self.answer(replica.follow(self.stream, self.now))
                for worker in self.workers:
                    said = replica.ledger.heartbeat(worker.name, worker.incarnation, worker.seq, self.now)
                    self.answer(said)
                self.answer(replica.ledger.tick(self.now))
        for replica in replicas:
            for worker in self.workers:
                view = replica.ledger.view(worker.name)
                assert view is not None
                assert view.complete
                assert replica.held_by(view) == worker.held


SnapshotAndReplayEqualEventsAlone.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestSnapshotAndReplayEqualEventsAlone = SnapshotAndReplayEqualEventsAlone.TestCase


def busy_replica(keys: int = 40) -> Replica:
    """Two workers with blocks in both tiers, and one with a hole in its story."""
    replica = Replica()
    # As bridges do: no message has more than 4096 keys.
    runs: list[Op] = [Stored(NS, 0, run(first, min(4096, keys + 1 - first))) for first in range(1, keys + 1, 4096)]
    for name in ("ann", "ben"):
        replica.ledger.heartbeat(name, 5, 0, 0.0)
        replica.ledger.events(name, 5, 1, [*runs, Stored(OTHER_NS, 0, run(7, 3), HOST)], 0.0)
    replica.ledger.heartbeat("cyd", 6, 0, 0.0)
    replica.ledger.events("cyd", 6, 3, [Stored(NS, 0, run(1, 4))], 0.0)
    replica.stream_seq = 12
    return replica


def taken(replica: Replica) -> bytes:
    return b"".join(replica.take())


def test_a_snapshot_tells_workers_lives_and_seqs_and_leaves_out_whose_story_has_holes() -> None:
    replica = Replica.loaded(taken(busy_replica()), 0.0)

    assert [(view.worker, view.incarnation, view.last_seq, view.complete) for view in replica.ledger.views()] == [
        ("ann", 5, 1, True),
        ("ben", 5, 1, True),
    ]
    assert replica.index.lookup(NS, run(1, 64)) == [(40, sum(1 << (view.slot or 0) for view in replica.ledger.views()))]
    assert replica.index.lookup(OTHER_NS, run(7, 3))[0][0] == 3
    assert replica.stream_seq == 12


def test_what_was_loaded_needs_no_dump() -> None:
    """Not even when the heartbeat names the last event, and time passes."""
    replica = Replica.loaded(taken(busy_replica()), 0.0)

    effects: list[Effect] = []
    for step in range(1, 40):
        for name in ("ann", "ben"):
            effects += replica.ledger.heartbeat(name, 5, 1, step / 10)
        effects += replica.ledger.tick(step / 10)

    assert not [effect for effect in effects if isinstance(effect, AskDump)]


def test_events_that_aged_out_before_a_replica_came_are_missed_and_asked_for() -> None:
    """What the snapshot says stays in use, but is not called complete."""
    replica = Replica.loaded(taken(busy_replica()), 0.0)

    replica.ledger.heartbeat("ann", 5, 3, 0.1)
    replica.ledger.events("ann", 5, 3, [Stored(NS, 40, run(41, 2))], 0.2)
    effects = replica.ledger.tick(0.5)

    assert effects == [AskDump("ann", 5, "gap")]
    view = replica.ledger.view("ann")
    assert view is not None
    assert not view.complete
    assert replica.index.depth_of_slot(NS, view.slot or 0, run(1, 42)) == 42


def test_a_worker_whose_cache_is_cleared_while_it_is_told_is_left_out() -> None:
    replica = busy_replica()
    pieces = replica.take()
    data = b"".join(next(pieces) for _ in range(2))  # the header, and the worker ann

    replica.ledger.events("ann", 5, 2, [Cleared()], 0.0)
    data += b"".join(pieces)

    assert told_in(data) == {"ben"}


def test_a_worker_that_restarts_while_it_is_told_is_left_out() -> None:
    replica = busy_replica()
    pieces = replica.take()
    data = b"".join(next(pieces) for _ in range(3))

    replica.ledger.heartbeat("ann", 9, 0, 0.0)
    data += b"".join(pieces)

    assert told_in(data) == {"ben"}


def test_blocks_that_move_within_the_log_while_it_is_told_are_told() -> None:
    """Evictions compact the log: what is kept moves to segments that may have been told already."""
    count = 20_000
    replica = busy_replica(count)
    pieces = replica.take()
    data = b"".join(next(pieces) for _ in range(3))

    keys = [key for key in range(1, count) if key % 5]
    for at in range(0, len(keys), 500):
        replica.ledger.events("ann", 5, 2 + at // 500, [Removed(NS, u64s(*keys[at : at + 500]))], 0.0)
    data += b"".join(pieces)

    restored = Replica.loaded(data, 0.0)
    view = restored.ledger.view("ann")
    assert view is not None
    assert view.slot is not None
    assert all(restored.index.holds(NS, view.slot, key) for key in range(5, count, 5))


@given(st.data())
def test_any_damage_is_found(data: st.DataObject) -> None:
    whole = taken(busy_replica())
    place = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["changed", "cut", "doubled", "dropped"]))
    damaged = {
        "changed": whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :],
        "cut": whole[:place],
        "doubled": whole[:place] + whole,
        "dropped": whole[:place] + whole[place + 1 + data.draw(st.integers(0, 40)) :],
    }[how]
    if damaged == whole:
        return

    with pytest.raises(SnapshotUnusable):
        for _ in snapshot.verify(damaged):
            pass


def test_a_snapshot_that_stops_at_a_frames_end_is_found_too() -> None:
    pieces = list(busy_replica().take())

    with pytest.raises(SnapshotUnusable, match="end is missing"):
        for _ in snapshot.verify(b"".join(pieces[:-1])):
            pass


def test_another_version_is_named() -> None:
    data = bytearray(taken(busy_replica()))
    data[7] += 1

    with pytest.raises(SnapshotUnusable, match="version 2, not 1"):
        snapshot.header_of(data)


def test_slices_are_small_however_much_a_worker_holds() -> None:
    """What a message of a bridge has is the most that is looked at, or given to the ledger, without a pause."""
    replica = busy_replica(50_000)

    pieces = list(replica.take())
    loading = Replica()
    parts = [loading.index.pairs for _ in snapshot.restore(b"".join(pieces), loading.ledger, 0.0)]

    assert max(len(piece) for piece in pieces) <= 8 * (2048 + 4096)
    assert max(after - before for before, after in zip([0, *parts], parts, strict=False)) <= 2048 + 4096
    assert loading.index.pairs == 2 * 50_003


def test_the_end_says_how_many_were_left_out() -> None:
    *_, last = snapshot._payloads(taken(busy_replica()))

    assert snapshot._decoded(last) == End(workers=2, left_out=1)


def test_frames_with_good_checks_that_make_no_sense_are_refused_as_such() -> None:
    """Whoever loads one says so and goes on without; anything else would end it, and the next one after it."""
    good = snapshot._encode(snapshot.Keys(0, NS, bytes(8)))
    payload = good.replace(b"\xc4\x08" + bytes(8), b"\xc4\x07" + bytes(7))
    assert payload != good
    check = snapshot._check(payload, 0)
    data = snapshot._first_bytes + len(payload).to_bytes(4, "little") + check.to_bytes(4, "little") + payload

    with pytest.raises(SnapshotUnusable, match="whole u64s"):
        for _ in snapshot.restore(data, Replica().ledger, 0.0):
            pass
