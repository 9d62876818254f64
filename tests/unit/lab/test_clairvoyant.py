"""The cache that knows the future finds as much as any choice of what to keep, and no more."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefixbus.lab import clairvoyant


def most(asked: Sequence[Sequence[int]], capacity: int) -> int:
    """Of all ways to keep up to so many blocks after each prompt, the one that finds most."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in asked:
        after: dict[frozenset[int], int] = {}
        for kept, found in best.items():
            there = kept.union(prompt)
            count = found + len(kept.intersection(prompt))
            for choice in itertools.combinations(sorted(there), min(capacity, len(there))):
                after[frozenset(choice)] = max(count, after.get(frozenset(choice), 0))
        best = after
    return max(best.values())


def test_what_is_asked_for_again_last_goes_first_also_if_it_came_last() -> None:
    assert clairvoyant.found([[1], [2], [1], [2]], capacity=1) == [0, 0, 1, 0]
    assert clairvoyant.found([[1], [2], [1], [2]], capacity=2) == [0, 0, 1, 1]


def test_a_prompt_is_found_as_far_as_there_is_room_for_it() -> None:
    assert clairvoyant.found([[1, 2, 3], [1, 2, 3], [1, 2, 3]], capacity=2) == [0, 2, 2]


def test_without_room_nothing_is_found() -> None:
    assert clairvoyant.found([[1], [1]], capacity=0) == [0, 0]


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_no_choice_finds_more_and_one_finds_as_much(asked: list[list[int]], capacity: int) -> None:
    assert sum(clairvoyant.found(asked, capacity)) == most(asked, capacity)
