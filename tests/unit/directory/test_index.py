"""The index against plain sets, and what it promises about memory."""

import random
import sys
import tracemalloc
from array import array
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixbus.directory import index as index_module
from prefixbus.directory.index import Index, Levels, Slots, depth_in

NS = bytes(16)
OTHER_NS = b"other-namespace!"


def u64s(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def run(first: int, count: int, step: int = 1) -> bytes:
    return array("Q", range(first, first + count * step, step)).tobytes()


def index_with(*slots: int) -> Index:
    index = Index(Slots())
    for slot in slots:
        assert index.slots.open() == slot
    return index


# Three chains; the second parts from the first after 5 blocks. Their keys fall in few shards and in many.
CHAINS = {
    "stem": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    "fork": [1, 2, 3, 4, 5, 262, 263, 264, 2**64 - 1],
    "own": [256 * each for each in range(1, 20)],
}
chains = st.sampled_from(sorted(CHAINS))
namespaces = st.sampled_from([NS, OTHER_NS])
places = st.integers(0, 5)


def levels_by_plain_sets(held: dict[int, set[int]], chain: list[int]) -> Levels:
    at: dict[int, int] = {}
    for slot, keys in held.items():
        depth = next((depth for depth, key in enumerate(chain) if key not in keys), len(chain))
        if depth:
            at[depth] = at.get(depth, 0) | 1 << slot
    return sorted(at.items(), reverse=True)


class IndexAgreesWithPlainSets(RuleBasedStateMachine):
    """However blocks are stored, removed or voided by a restart, lookup answers what plain sets would."""

    def __init__(self) -> None:
        super().__init__()
        # Small enough that a short history splits namespaces, fills segments and compacts them.
        self.patches = [
            mock.patch.object(index_module, name, value)
            for name, value in {"_SPLIT_AT": 12, "_JOIN_AT": 5, "_SEGMENT": 4, "_STALE_MIN": 3, "_MASKS_MAX": 6}.items()
        ]
        for patch in self.patches:
            patch.start()
        self.index = Index(Slots())
        self.held: dict[bytes, dict[int, set[int]]] = {NS: {}, OTHER_NS: {}}
        self.open: list[int] = []
        self.hidden: set[int] = set()
        self.holes = False

    @initialize(count=st.integers(1, 4))
    def fleet_starts(self, count: int) -> None:
        for _ in range(count):
            self.worker_joins(True)

    @rule(visible=st.booleans())
    def worker_joins(self, visible: bool) -> None:
        if len(self.open) == 6:
            return
        slot = self.index.slots.open(visible=visible)
        assert slot not in self.open
        self.open.append(slot)
        if not visible:
            self.hidden.add(slot)
        for by_slot in self.held.values():
            by_slot[slot] = set()

    @rule(place=places)
    def worker_is_revealed(self, place: int) -> None:
        if self.open:
            slot = self.open[place % len(self.open)]
            self.index.slots.reveal(slot)
            self.hidden.discard(slot)

    @rule(place=places)
    def worker_is_voided(self, place: int) -> None:
        if self.open:
            slot = self.open.pop(place % len(self.open))
            self.index.slots.close(slot)
            self.hidden.discard(slot)
            for by_slot in self.held.values():
                del by_slot[slot]

    @rule(place=places, ns_id=namespaces, name=chains, depth=st.integers(0, 20))
    def worker_stores_a_prefix(self, place: int, ns_id: bytes, name: str, depth: int) -> None:
        if self.open:
            slot = self.open[place % len(self.open)]
            keys = CHAINS[name][:depth]
            self.index.store(ns_id, slot, u64s(*keys))
            self.held[ns_id][slot].update(keys)

    @rule(place=places, ns_id=namespaces, name=chains, depth=st.integers(0, 20))
    def worker_evicts_a_tail(self, place: int, ns_id: bytes, name: str, depth: int) -> None:
        if self.open:
            slot = self.open[place % len(self.open)]
            keys = CHAINS[name][depth:]
            # What grows on these blocks in another chain goes with them.
            if name != "own" and depth < 5:
                keys = keys + CHAINS["stem"][depth:] + CHAINS["fork"][depth:]
            self.index.remove(ns_id, slot, memoryview(u64s(*keys)))
            self.held[ns_id][slot].difference_update(keys)

    @rule(place=places, ns_id=namespaces, keys=st.lists(st.sampled_from(CHAINS["stem"] + CHAINS["own"])))
    def worker_stores_at_random(self, place: int, ns_id: bytes, keys: list[int]) -> None:
        if self.open:
            slot = self.open[place % len(self.open)]
            self.index.store(ns_id, slot, u64s(*keys))
            self.held[ns_id][slot].update(keys)
            self.holes = True

    @rule(ns_id=namespaces, budget=st.integers(1, 12))
    def a_slice_is_shed(self, ns_id: bytes, budget: int) -> None:
        """Whatever goes is what the index says is gone; it goes from this namespace, and as much as was asked."""
        before = {slot: set(keys) for slot, keys in self.held[ns_id].items()}
        more = self.index.shed(ns_id, budget)
        gone = 0
        for slot, keys in self.held[ns_id].items():
            keys.intersection_update({key for key in keys if self.index.holds(ns_id, slot, key)})
            gone += len(before[slot]) - len(keys)
        assert gone or not any(before.values())
        assert more or not any(self.held[ns_id].values())
        # Logs are cut in segments: a chain may have lost blocks from its middle.
        self.holes = self.holes or gone > 0

    @rule(budget=st.integers(1, 12))
    def a_slice_is_swept(self, budget: int) -> None:
        self.index.sweep(budget)

    @invariant()
    def levels_agree(self) -> None:
        for ns_id, by_slot in self.held.items():
            visible = {slot: keys for slot, keys in by_slot.items() if slot not in self.hidden}
            for chain in CHAINS.values():
                levels = self.index.lookup(ns_id, u64s(*chain))
                plain = levels_by_plain_sets(visible, chain)
                if self.holes:
                    assert [depth for depth, _ in levels] == sorted({depth for depth, _ in levels}, reverse=True)
                    assert all(depth_in(levels, slot) >= depth_in(plain, slot) for slot in visible)
                    assert all(not mask & ~self.index.slots.visible for _, mask in levels)
                    assert sum(mask.bit_count() for _, mask in levels) == sum(depth_in(levels, s) > 0 for s in visible)
                else:
                    assert levels == plain

    @invariant()
    def single_slots_and_counts_agree(self) -> None:
        for ns_id, by_slot in self.held.items():
            for slot, keys in by_slot.items():
                for chain in CHAINS.values():
                    exact = next((depth for depth, key in enumerate(chain) if key not in keys), len(chain))
                    assert self.index.depth_of_slot(ns_id, slot, u64s(*chain)) == exact
        for slot in self.open:
            assert self.index.held_by(slot) == sum(len(by_slot[slot]) for by_slot in self.held.values())
        assert self.index.slots.width <= 64

    @rule()
    def all_is_swept(self) -> None:
        while self.index.sweep(100):
            pass
        assert self.index.pairs == sum(len(keys) for by_slot in self.held.values() for keys in by_slot.values())
        assert self.index.entries == sum(len(set().union(*by_slot.values())) for by_slot in self.held.values())
        assert self.index.namespaces == sum(any(by_slot.values()) for by_slot in self.held.values())

    def teardown(self) -> None:
        self.all_is_swept()
        for slot in list(self.open):
            self.index.slots.close(slot)
        while self.index.sweep(100):
            pass
        assert (self.index.entries, self.index.pairs, self.index.namespaces) == (0, 0, 0)
        assert self.index.estimated_bytes == 0
        for patch in self.patches:
            patch.stop()


IndexAgreesWithPlainSets.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexAgreesWithPlainSets = IndexAgreesWithPlainSets.TestCase


def test_levels_come_deepest_first_and_name_each_worker_once() -> None:
    index = index_with(0, 1, 2, 3)
    for slot, depth in ((0, 2048), (1, 700), (2, 700), (3, 1)):
        index.store(NS, slot, run(1, depth))

    levels = index.lookup(NS, run(1, 2048))

    assert levels == [(2048, 0b0001), (700, 0b0110), (1, 0b1000)]


def test_every_worker_at_its_own_depth_is_found() -> None:
    index = index_with(*range(256))
    for slot in range(256):
        index.store(NS, slot, run(1, slot + 1))

    levels = index.lookup(NS, run(1, 300))

    assert levels == [(slot + 1, 1 << slot) for slot in reversed(range(256))]


@pytest.mark.parametrize(
    ("ns_id", "keys"),
    [
        pytest.param(NS, run(500, 8), id="a chain nobody holds"),
        pytest.param(OTHER_NS, run(1, 8), id="a chain that another namespace holds"),
        pytest.param(b"never heard of..", run(1, 8), id="a namespace nobody heard of"),
        pytest.param(NS, b"", id="no full block"),
    ],
)
def test_unknown_and_foreign_are_the_same_empty_answer(ns_id: bytes, keys: bytes) -> None:
    index = index_with(0)
    index.store(NS, 0, run(1, 8))

    assert index.lookup(ns_id, keys) == []


def test_a_dead_worker_is_gone_before_any_sweep_and_its_slot_is_not_reused_before_the_last() -> None:
    index = index_with(0, 1)
    index.store(NS, 0, run(1, 10_000))
    index.store(NS, 1, run(1, 10))

    index.slots.close(0)
    while_swept = [index.lookup(NS, run(1, 20)), index.sweep(100), index.slots.open()]
    while index.sweep(1000):
        pass
    afterwards = index.slots.open()

    assert while_swept == [[(10, 0b10)], True, 2]
    assert afterwards == 0
    assert index.entries == 10


def test_a_closed_slot_cannot_be_closed_or_revealed_again() -> None:
    index = index_with(0)
    index.slots.close(0)

    with pytest.raises(ValueError, match="slot 0 is not open"):
        index.slots.close(0)
    with pytest.raises(ValueError, match="slot 0 is not open"):
        index.slots.reveal(0)


def test_an_overlay_adds_holders_and_continues_chains() -> None:
    index = index_with(0, 1)
    index.store(NS, 0, run(1, 10))

    levels = index.lookup(NS, run(1, 40), {**dict.fromkeys(range(11, 31), 0b01), **dict.fromkeys(range(1, 6), 0b10)})

    assert levels == [(30, 0b01), (5, 0b10)]


def test_an_overlay_over_an_unknown_namespace_is_all_there_is() -> None:
    index = index_with(0)

    assert index.lookup(NS, run(1, 9), dict.fromkeys(range(1, 5), 1)) == [(4, 1)]


def table_bytes(index: Index) -> int:
    """What the index's dicts and arrays take in truth, but for the keys in them."""
    tables: list[object] = [index._namespaces, index._logs, index._masks, index._shed]
    for namespace in index._namespaces.values():
        tables += [namespace.shards, *namespace.shards]
    for logs in index._logs.values():
        tables.append(logs)
        for log in logs.values():
            tables += [log.stale, log.segments, *log.segments]
    return sum(sys.getsizeof(table) for table in tables)


def suffixes(first: int, count: int) -> bytes:
    return array("Q", (number * 0x9E3779B97F4A7C15 % 2**64 for number in range(first, first + count))).tobytes()


def churn_suffixes(index: Index, first: int, last: int, kept: int) -> None:
    """Distinct one-block suffixes come to slot 1, each to be evicted when `kept` others have come."""
    for number in range(first, last, 20):
        index.store(NS, 1, suffixes(number, 20))
        index.remove(NS, 1, suffixes(number - kept, 20))


def test_a_million_distinct_suffixes_under_a_hot_prefix_leave_memory_flat() -> None:
    index = index_with(0, 1)
    index.store(NS, 0, run(1, 2000))
    index.store(NS, 1, run(1, 100))

    churn_suffixes(index, 10_000, 30_000, kept=5000)
    first = index.estimated_bytes, table_bytes(index)
    churn_suffixes(index, 30_000, 1_010_000, kept=5000)
    later = index.estimated_bytes, table_bytes(index)

    assert (index.pairs, index.entries) == (7100, 7000)
    # A table is half full at the worst moment, and just large enough at the best.
    assert later[0] <= first[0] * 1.2
    assert later[1] <= first[1] * 2


def test_memory_is_given_back_when_most_of_a_namespace_goes() -> None:
    """A dict never shrinks by deletion alone."""
    index = index_with(0, 1)
    rng = random.Random(5)
    runs = [rng.randbytes(8 * 32) for _ in range(3000)]
    for slot in (0, 1):
        for keys in runs:
            index.store(NS, slot, keys)
    full = table_bytes(index)

    for slot in (0, 1):
        for keys in runs[100:]:
            index.remove(NS, slot, keys)
    a_thirtieth = index.pairs, table_bytes(index)
    for slot in (0, 1):
        for keys in runs[10:100]:
            index.remove(NS, slot, keys)

    assert a_thirtieth[0] == 2 * 100 * 32
    assert a_thirtieth[1] < full / 10
    assert table_bytes(index) < full / 60
    assert all(index.lookup(NS, keys) == [(32, 0b11)] for keys in runs[:10])


def test_a_block_that_was_lost_then_shed_then_stored_again_goes_with_its_worker() -> None:
    """A log keeps the keys that a slot lost for a while. Those that are shed from it must not be taken for logged."""
    index = index_with(0)
    for first in range(1, 3001, 100):
        index.store(NS, 0, run(first, 100))
    index.remove(NS, 0, run(2901, 100))

    index.shed(NS, 1)
    index.store(NS, 0, run(2901, 100))
    index.slots.close(0)
    while index.sweep(1000):
        pass

    assert (index.entries, index.pairs) == (0, 0)


def test_shedding_takes_the_ends_of_chains_first_and_leaves_other_namespaces_alone() -> None:
    index = index_with(0, 1)
    for slot in (0, 1):
        for first in range(1, 8001, 100):
            index.store(NS, slot, run(first, 100))
    index.store(OTHER_NS, 0, run(1, 50))

    more = index.shed(NS, 4096)
    levels = index.lookup(NS, run(1, 8000))

    assert more
    assert [mask for _, mask in levels] == [0b11] or len(levels) == 2
    assert 4000 <= min(depth for depth, _ in levels) < 8000
    assert all(index.depth_of_slot(NS, slot, run(1, 8000)) == depth_in(levels, slot) for slot in (0, 1))
    assert index.lookup(OTHER_NS, run(1, 50)) == [(50, 1)]


def test_a_namespace_that_is_shed_to_the_end_is_gone_with_its_memory() -> None:
    index = index_with(0, 1)
    index.store(OTHER_NS, 0, run(1, 50))
    before = index.estimated_bytes
    for slot in (0, 1):
        for first in range(1, 9001, 100):
            index.store(NS, slot, run(first, 100))
        index.remove(NS, slot, run(8000, 500))

    slices = 1
    while index.shed(NS, 1000):
        slices += 1

    # Whole segments of 2048 at a time.
    assert slices >= 8
    assert (index.namespaces, index.pairs) == (1, 50)
    assert index.estimated_bytes - before < 1000


def test_after_a_shed_a_run_is_taken_with_its_parent_only() -> None:
    """Its worker holds the parent. The index does not know that any more, so the run could never be found."""
    index = index_with(0)
    index.store(NS, 0, run(1, 10))
    index.store(OTHER_NS, 0, run(1, 10))
    while index.shed(NS, 100):
        pass

    index.store(NS, 0, run(11, 5), parent=10)
    orphan = index.entries
    index.store(NS, 0, run(1, 10), parent=0)
    index.store(NS, 0, run(11, 5), parent=10)

    assert orphan == 10
    assert index.lookup(NS, run(1, 15)) == [(15, 1)]


def test_what_nothing_touches_is_known_by_its_time() -> None:
    index = index_with(0)
    for now, ns_id in ((1.0, NS), (5.0, OTHER_NS)):
        index.now = now
        index.store(ns_id, 0, run(1, 4))

    index.now = 9.0
    untouched = index.untouched_since(0, 5.0)
    index.touch(NS, 0)

    assert untouched == [NS]
    assert [index.touched_at(ns_id, 0) for ns_id in (NS, OTHER_NS, b"unknown")] == [9.0, 5.0, None]


def test_keys_that_come_and_go_are_logged_once() -> None:
    index = index_with(0)
    index.store(NS, 0, run(1, 100))
    index.remove(NS, 0, run(50, 51))
    index.store(NS, 0, run(50, 51))
    before = index.estimated_bytes

    for _ in range(1000):
        index.remove(NS, 0, run(50, 51))
        index.store(NS, 0, run(50, 51))

    assert index.estimated_bytes == before
    assert index.held_by(0) == 100


@pytest.mark.parametrize(
    ("namespaces", "blocks", "holders"),
    [
        pytest.param(1, 30_000, 1, id="one large namespace, one worker"),
        pytest.param(1, 20_000, 8, id="one large namespace, shared"),
        pytest.param(400, 64, 1, id="many small namespaces"),
    ],
)
def test_the_byte_estimate_is_within_a_third_of_the_truth(namespaces: int, blocks: int, holders: int) -> None:
    index = index_with(*range(holders))
    runs = [(number.to_bytes(16, "little"), slot) for number in range(namespaces) for slot in range(holders)]

    tracemalloc.start()
    try:
        for ns_id, slot in runs:
            for first in range(0, blocks, 64):
                index.store(ns_id, slot, run(2**40 + first * 7919, 64, 7919))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held * 2 / 3 < index.estimated_bytes < held * 4 / 3, (held, index.estimated_bytes)
