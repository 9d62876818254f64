"""What goes when the index is full, in which order, and that it is then within its bounds."""

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from prefixbus.directory.index import Index, Slots
from prefixbus.directory.shedding import Bounds, Shedding

SLICE = 1024


def ns(number: int) -> bytes:
    return number.to_bytes(16, "little")


def run(first: int, count: int) -> bytes:
    return array("Q", range(first, first + count)).tobytes()


def index_with(namespaces: int, blocks: int = 32) -> Index:
    """One worker that holds a chain of each namespace."""
    index = Index(Slots())
    index.slots.open()
    for number in range(namespaces):
        index.store(ns(number), 0, run(1, blocks))
    return index


def held(index: Index, namespaces: int) -> list[int]:
    return [number for number in range(namespaces) if index.holds(ns(number), 0, 1)]


def relieve(shedding: Shedding, now: float = 0.0) -> int:
    """How many slices it took."""
    slices = 0
    while shedding.relieve(now, SLICE):
        slices += 1
    return slices


def test_within_its_bounds_nothing_is_shed() -> None:
    index = index_with(10)
    shedding = Shedding(index, Bounds(memory_bytes=2 * index.estimated_bytes))

    relieve(shedding)

    assert held(index, 10) == list(range(10))
    assert shedding.shed_pairs == 0


def test_the_namespaces_of_least_use_go_first() -> None:
    index = index_with(100)
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes // 4))
    for number in range(80, 100):
        shedding.looked_up(ns(number), 32, 0.0)

    relieve(shedding)

    left = held(index, 100)
    assert left[-20:] == list(range(80, 100))
    assert len(left) < 25
    assert not shedding.is_beyond


def test_use_counts_by_the_byte() -> None:
    """Two namespaces are used alike; one takes a hundred times the memory for it."""
    index = index_with(1, blocks=3200)
    index.store(ns(1), 0, run(1, 32))
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes // 2))
    for number in (0, 1):
        shedding.looked_up(ns(number), 32, 0.0)

    relieve(shedding)

    assert index.depth_of_slot(ns(1), 0, run(1, 32)) == 32


def test_yesterdays_use_is_worth_less_than_todays() -> None:
    index = index_with(2)
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes * 3 // 4, half_life_s=10.0))
    for _ in range(20):
        shedding.looked_up(ns(0), 32, 0.0)
    shedding.looked_up(ns(1), 32, 100.0)

    relieve(shedding, 100.0)

    assert held(index, 2) == [1]


def test_a_namespace_that_was_asked_for_before_its_first_block_came_is_not_the_first_to_go() -> None:
    index = index_with(3)
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes))
    shedding.looked_up(ns(9), 0, 0.0)
    index.store(ns(9), 0, run(1, 32))

    relieve(shedding)

    assert index.holds(ns(9), 0, 1)


def test_entries_of_closed_slots_go_before_any_that_could_be_found() -> None:
    index = index_with(10)
    dead = index.slots.open()
    for number in range(10):
        index.store(ns(number), dead, run(1000, 320))
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes // 2))

    index.slots.close(dead)
    relieve(shedding)

    assert held(index, 10) == list(range(10))
    assert shedding.shed_pairs == 0


def test_one_namespace_that_is_too_large_by_itself_keeps_the_beginnings_of_its_chains() -> None:
    index = Index(Slots())
    index.slots.open()
    for chain in range(50):
        index.store(ns(0), 0, run(chain * 10_000 + 1, 1000))
    shedding = Shedding(index, Bounds(memory_bytes=index.estimated_bytes // 2))

    relieve(shedding)

    depths = [index.depth_of_slot(ns(0), 0, run(chain * 10_000 + 1, 1000)) for chain in range(50)]
    assert not shedding.is_beyond
    assert depths[0] == 1000
    assert 20 < sum(depth > 0 for depth in depths) < 30


def test_too_many_namespaces_are_too_many_however_small() -> None:
    index = index_with(400, blocks=1)
    shedding = Shedding(index, Bounds(namespaces_max=100))
    for number in range(50):
        shedding.looked_up(ns(number), 1, 0.0)

    relieve(shedding)

    assert index.namespaces == 95
    assert held(index, 50) == list(range(50))


def test_a_slice_is_a_slice_however_much_there_is_to_shed() -> None:
    index = index_with(0)
    for first in range(1, 100_000, 100):
        index.store(ns(0), 0, run(first, 100))
    shedding = Shedding(index, Bounds(memory_bytes=1_000_000))

    before = index.pairs
    sizes = []
    while shedding.relieve(0.0, SLICE):
        sizes.append(before - index.pairs)
        before = index.pairs

    assert len(sizes) > 30
    # A segment of the log more, and the run that filled it up.
    assert max(sizes) <= SLICE + 2048 + 100


def test_a_flood_of_namespaces_never_takes_more_than_the_bound_and_a_message() -> None:
    index = index_with(0)
    bounds = Bounds(memory_bytes=3_000_000)
    shedding = Shedding(index, bounds)
    rng = random.Random(4)
    index.store(ns(0), 0, run(1, 500))
    most = 0

    for number in range(1, 4000):
        shedding.looked_up(ns(0), 500, float(number))
        index.store(ns(number), 0, rng.randbytes(8 * 64))
        if shedding.is_beyond:
            shedding.relieve(float(number), SLICE)
        most = max(most, index.estimated_bytes)

    assert bounds.memory_bytes * 0.9 < most < bounds.memory_bytes + 64 * 120 + 2000, most
    assert index.depth_of_slot(ns(0), 0, run(1, 500)) == 500
    assert shedding.shed_pairs > 100_000


def test_uses_are_remembered_of_a_bounded_number() -> None:
    shedding = Shedding(index_with(0), Bounds())

    for number in range(40_000):
        shedding.looked_up(ns(number), 1, 0.0)

    assert shedding.use(ns(39_999), 0.0) == 2
    assert shedding.use(ns(0), 0.0) == 0
    assert len(shedding._uses) == 32768


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    uses=st.lists(st.integers(0, 50), min_size=12, max_size=12),
    share=st.floats(0.01, 0.9),
)
def test_whatever_is_held_and_used_shedding_ends_within_its_bounds(
    sizes: list[int], uses: list[int], share: float
) -> None:
    index = index_with(0)
    for number, blocks in enumerate(sizes):
        index.store(ns(number), 0, run(1, blocks))
    shedding = Shedding(index, Bounds(memory_bytes=int(index.estimated_bytes * share)))
    for number, use in enumerate(uses):
        if use:
            shedding.looked_up(ns(number), use, 0.0)

    slices = relieve(shedding)

    assert slices <= len(sizes)
    assert not shedding.is_beyond
