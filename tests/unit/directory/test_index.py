"""The index against plain sets, and what it promises about memory."""

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
            for name, value in {"_SPLIT_AT": 12, "_SEGMENT": 4, "_STALE_MIN": 3, "_MASKS_MAX": 6}.items()
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


def test_churn_of_distinct_suffixes_under_a_hot_prefix_leaves_memory_flat() -> None:
    index = index_with(0, 1)
    index.store(NS, 0, run(1, 2000))
    index.store(NS, 1, run(1, 100))
    scatter = 0x9E3779B97F4A7C15 % 2**40

    def churn(rounds: int) -> int:
        for number in range(rounds):
            suffix = run((number + 1) * scatter, 32, 7919)
            index.store(NS, 1, suffix)
            index.remove(NS, 1, suffix)
        return index.estimated_bytes

    first = churn(500)
    later = churn(4000)

    assert index.pairs == 2100
    assert index.entries == 2000
    assert later <= first * 1.1


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
