"""Announced blocks: what a lookup sees of them, and that nothing stays behind."""

import gc
import tracemalloc
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixbus.directory.index import Index, Levels, Slots, depth_in
from prefixbus.directory.predictions import Predictions

NS = bytes(16)
OTHER_NS = b"other-namespace!"
CHAIN = list(range(1, 25))


def run(first: int, count: int) -> bytes:
    return array("Q", range(first, first + count)).tobytes()


def planes(workers: int) -> tuple[Index, Predictions]:
    slots = Slots()
    index, predictions = Index(slots), Predictions(slots)
    for _ in range(workers):
        slots.open()
    return index, predictions


ids = st.sampled_from([f"r{number}" for number in range(8)])
places = st.integers(0, 3)
namespaces = st.sampled_from([NS, OTHER_NS])
depths = st.integers(0, len(CHAIN))
delays = st.floats(0, 5)


class PredictionsAgreeWithAPlainList(RuleBasedStateMachine):
    """However requests are announced, renewed, ended and their workers replaced, the merged levels are those of the
    blocks reported and the blocks of the announcements that stand."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.index, self.predictions = Index(self.slots), Predictions(self.slots)
        self.now = 0.0
        self.fleet = [self.slots.open() for _ in range(4)]
        self.reported = {(ns_id, slot): 0 for ns_id in (NS, OTHER_NS) for slot in self.fleet}
        # Worker's place in the fleet, namespace, depth, expiry.
        self.announced: dict[str, tuple[int, bytes, int, float]] = {}

    @rule(place=places, ns_id=namespaces, depth=depths)
    def worker_reports(self, place: int, ns_id: bytes, depth: int) -> None:
        slot = self.fleet[place]
        self.index.store(ns_id, slot, run(1, depth))
        self.reported[ns_id, slot] = max(depth, self.reported[ns_id, slot])

    @rule(request_id=ids, place=places, ns_id=namespaces, depth=depths, ttl_s=delays)
    def request_is_announced(self, request_id: str, place: int, ns_id: bytes, depth: int, ttl_s: float) -> None:
        expires_at = self.now + ttl_s
        taken = self.predictions.announce(request_id, self.fleet[place], ns_id, run(1, depth), expires_at)
        assert taken == (depth > 0)
        self.announced.pop(request_id, None)
        if taken:
            self.announced[request_id] = place, ns_id, depth, expires_at

    @rule(request_id=ids, ttl_s=delays)
    def request_is_renewed(self, request_id: str, ttl_s: float) -> None:
        known = self.announced.get(request_id)
        assert self.predictions.renew(request_id, self.now + ttl_s) == (known is not None)
        if known is not None:
            self.announced[request_id] = *known[:3], self.now + ttl_s

    @rule(request_id=ids)
    def request_ends(self, request_id: str) -> None:
        self.predictions.drop(request_id)
        self.announced.pop(request_id, None)

    @rule(place=places, keeps=st.booleans())
    def worker_gets_a_new_slot(self, place: int, keeps: bool) -> None:
        old = self.fleet[place]
        new = self.fleet[place] = self.slots.open()
        self.slots.close(old, new if keeps else None)
        for ns_id in (NS, OTHER_NS):
            del self.reported[ns_id, old]
            self.reported[ns_id, new] = 0
        if not keeps:
            self.announced = {request_id: each for request_id, each in self.announced.items() if each[0] != place}

    @rule(budget=st.integers(1, 30))
    def a_slice_is_done(self, budget: int) -> None:
        self.index.sweep(budget)
        # Before anything is due, this only follows closed slots.
        self.predictions.expire(-1.0, budget)

    @rule(seconds=delays)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        while self.predictions.expire(self.now, 10):
            pass
        self.announced = {request_id: each for request_id, each in self.announced.items() if each[3] > self.now}

    def levels(self, ns_id: bytes, *, merged: bool) -> Levels:
        at: dict[int, int] = {}
        for place, slot in enumerate(self.fleet):
            depth = self.reported[ns_id, slot]
            if merged:
                mine = [each[2] for each in self.announced.values() if each[:2] == (place, ns_id)]
                depth = max([depth, *mine])
            if depth:
                at[depth] = at.get(depth, 0) | 1 << slot
        return sorted(at.items(), reverse=True)

    @invariant()
    def nothing_shows_that_is_not_announced(self) -> None:
        """In between slices an announcement may still be on its way to the new slot, never on a wrong one."""
        for ns_id in (NS, OTHER_NS):
            merged = self.predictions.lookup(self.index, ns_id, run(1, len(CHAIN)))
            real = self.index.lookup(ns_id, run(1, len(CHAIN)))
            expected = self.levels(ns_id, merged=True)
            assert real == self.levels(ns_id, merged=False)
            for slot in range(self.slots.width):
                assert depth_in(real, slot) <= depth_in(merged, slot) <= depth_in(expected, slot)

    @rule()
    def all_slices_are_done(self) -> None:
        while self.predictions.expire(-1.0):
            pass
        for ns_id in (NS, OTHER_NS):
            answer = self.predictions.lookup(self.index, ns_id, run(1, len(CHAIN)))
            assert answer == self.levels(ns_id, merged=True)
        assert len(self.predictions) == len(self.announced)

    def teardown(self) -> None:
        self.all_slices_are_done()
        for request_id in list(self.announced):
            self.predictions.drop(request_id)
        while self.index.sweep(1000):
            pass
        assert self.predictions.blocks == 0
        # No slot is held back: all that were ever given out are open or free.
        closed = self.slots.width - self.slots.open_count
        assert sorted(self.slots.open() for _ in range(closed)) == sorted(
            set(range(self.slots.width)) - set(self.fleet)
        )


PredictionsAgreeWithAPlainList.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPredictionsAgreeWithAPlainList = PredictionsAgreeWithAPlainList.TestCase


def test_without_announcements_the_answer_is_the_indexs() -> None:
    index, predictions = planes(1)
    index.store(NS, 0, run(1, 4))

    answer = predictions.lookup(index, NS, run(1, 8))

    assert answer == [(4, 1)]


def test_siblings_see_the_first_ones_blocks_before_the_engine_reports_any() -> None:
    index, predictions = planes(4)

    predictions.announce("first", 2, NS, run(1, 40), expires_at=5.0)
    answer = predictions.lookup(index, NS, run(1, 40))

    assert index.lookup(NS, run(1, 40)) == []
    assert answer == [(40, 0b100)]


def test_announcing_only_what_the_worker_lacks_looks_the_same() -> None:
    index, predictions = planes(1)
    index.store(NS, 0, run(1, 30))

    predictions.announce("r", 0, NS, run(31, 10), expires_at=5.0)
    answer = predictions.lookup(index, NS, run(1, 60))

    assert index.lookup(NS, run(1, 60)) == [(30, 1)]
    assert answer == [(40, 1)]


def test_a_block_that_two_requests_announced_stays_until_both_have_ended() -> None:
    index, predictions = planes(1)
    predictions.announce("a", 0, NS, run(1, 8), expires_at=5.0)
    predictions.announce("b", 0, NS, run(1, 4), expires_at=5.0)

    predictions.drop("a")
    one_left = predictions.lookup(index, NS, run(1, 8))
    predictions.drop("b")

    assert one_left == [(4, 1)]
    assert predictions.lookup(index, NS, run(1, 8)) == []


def test_a_renewed_announcement_outlives_its_first_expiry_and_no_longer() -> None:
    _, predictions = planes(1)
    predictions.announce("r", 0, NS, run(1, 8), expires_at=1.0)

    predictions.renew("r", 3.0)
    counts = []
    for now in (1.5, 2.9, 3.0):
        predictions.expire(now)
        counts.append(len(predictions))

    assert counts == [1, 1, 0]


def test_a_dispatch_to_a_worker_that_is_gone_announces_nothing() -> None:
    index, predictions = planes(1)
    index.slots.close(0)

    taken = predictions.announce("r", 0, NS, run(1, 8), expires_at=1.0)

    assert not taken
    assert len(predictions) == 0


def test_more_than_may_be_announced_is_not_taken_and_counts_again_when_others_have_ended() -> None:
    slots = Slots()
    predictions = Predictions(slots, blocks_max=100)
    slots.open()

    taken = [predictions.announce(f"r{number}", 0, NS, run(1, 40), expires_at=5.0) for number in range(3)]
    again = predictions.announce("r1", 0, NS, run(1, 60), expires_at=5.0)
    predictions.drop("r0")
    afterwards = predictions.announce("r3", 0, NS, run(1, 40), expires_at=5.0)

    assert (taken, again, afterwards) == ([True, True, False], True, True)


def test_ends_are_remembered_of_a_bounded_number() -> None:
    _, predictions = planes(1)

    for number in range(5000):
        predictions.ended(f"r{number}", 1)

    assert not predictions.announce("r4999", 0, NS, run(1, 8), expires_at=5.0)
    assert predictions.announce("r0", 0, NS, run(1, 8), expires_at=5.0)


def test_a_closed_slot_is_not_reused_while_announcements_still_stand_on_it() -> None:
    index, predictions = planes(1)
    for number in range(3):
        predictions.announce(f"r{number}", 0, NS, run(100 * number, 8), expires_at=9.0)

    index.slots.close(0)
    at_once = predictions.lookup(index, NS, run(100, 8))
    meanwhile = index.slots.open()
    while predictions.expire(0.0, budget=8):
        pass
    afterwards = index.slots.open()

    assert at_once == []
    assert (meanwhile, afterwards) == (1, 0)


def test_announcements_follow_a_worker_through_several_new_slots() -> None:
    index, predictions = planes(1)
    predictions.announce("r", 0, NS, run(1, 8), expires_at=9.0)

    index.slots.close(0, index.slots.open())
    index.slots.close(1, index.slots.open())
    while predictions.expire(0.0):
        pass

    assert predictions.lookup(index, NS, run(1, 8)) == [(8, 0b100)]
    assert index.slots.open() == 0


def test_after_everything_is_dropped_the_memory_is_back() -> None:
    _, predictions = planes(8)

    def burst() -> None:
        for number in range(200):
            ns_id = (number % 5).to_bytes(16, "little")
            predictions.announce(f"r{number}", number % 8, ns_id, run(number * 50, 100), expires_at=10.0 + number)
            predictions.renew(f"r{number}", 20.0 + number)
        for number in range(100):
            predictions.drop(f"r{number}")
        while predictions.expire(1000.0):
            pass

    burst()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        burst()
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(predictions) == 0
    assert peak - before > 500_000
    assert after - before < 4_000
