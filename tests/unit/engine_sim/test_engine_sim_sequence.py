"""Keys, origins and tokens of one sequence."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.engine_sim.sequence import EngineNamespace, TokenSequence, VirtualSequence, Vocabulary

WORDS = Vocabulary(spoken=tuple(range(100, 140)), eos=7, eos_one_in=4)
BLOCK = 4
ids_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)
parts = st.one_of(st.none(), st.text(alphabet="ab\0", max_size=3))
namespaces = st.builds(EngineNamespace, parts, parts, st.text(alphabet="ab", max_size=2))


def sequence(ids: list[int], namespace: EngineNamespace | None = None) -> TokenSequence:
    return TokenSequence(ids, WORDS, BLOCK, namespace or EngineNamespace())


@given(ids_lists, namespaces, namespaces)
def test_no_two_namespaces_share_a_key_or_an_origin(ids: list[int], one: EngineNamespace, two: EngineNamespace) -> None:
    blocks = len(ids) // BLOCK
    a, b = sequence(ids, one), sequence(ids, two)
    a.ensure_keys(blocks)
    b.ensure_keys(blocks)

    same = one == two
    assert all((x == y) is same for x, y in zip(a.keys, b.keys, strict=True))
    assert all((x == y) is same for x, y in zip(a.origins, b.origins, strict=True))


@given(ids_lists, st.data())
def test_keys_do_not_depend_on_when_they_are_computed(ids: list[int], data: st.DataObject) -> None:
    blocks = len(ids) // BLOCK
    at_once, piecewise = sequence(ids), sequence(ids)
    at_once.ensure_keys(blocks)

    for stop in sorted(data.draw(st.lists(st.integers(0, blocks)))):
        piecewise.ensure_keys(stop)
    piecewise.ensure_keys(blocks)

    assert (piecewise.keys, piecewise.origins) == (at_once.keys, at_once.origins)


def test_a_key_is_the_digest_of_its_block_seeded_with_its_parent() -> None:
    one = sequence(list(range(8)))

    one.ensure_keys(2)

    assert one.keys[1] == xxhash.xxh3_64_intdigest(struct.pack("<4I", 4, 5, 6, 7), one.keys[0])


@given(ids_lists, st.integers(1, 20), st.data())
def test_continuing_from_any_point_gives_the_same_tokens(ids: list[int], count: int, data: st.DataObject) -> None:
    whole = sequence(ids)
    tokens = [whole.append_next(True) for _ in range(count)]
    cut = data.draw(st.integers(0, count - 1))

    resumed = sequence(ids + tokens[:cut], EngineNamespace("any salt"))

    assert [resumed.append_next(True) for _ in range(count - cut)] == tokens[cut:]


@given(ids_lists)
def test_end_of_sequence_is_said_only_when_it_may_be(ids: list[int]) -> None:
    one = sequence(ids)

    tokens = {one.append_next(False) for _ in range(40)}

    assert tokens <= set(WORDS.spoken)


def test_end_of_sequence_comes_about_as_often_as_asked() -> None:
    one = sequence([1])

    tokens = [one.append_next(True) for _ in range(400)]

    assert 60 < tokens.count(7) < 140


@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"], [1.5]])
def test_ids_that_are_no_u32_are_refused(ids: list[int]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        sequence(ids)


def test_a_virtual_sequence_names_the_blocks_it_was_not_told() -> None:
    a, b = VirtualSequence(8, [5, 6], nonce=1), VirtualSequence(8, [5, 6], nonce=2)
    for one in (a, b):
        one.grow(8)
        one.ensure_keys(4)

    assert a.keys[:2] == b.keys[:2] == [5, 6]
    assert len({*a.keys, *b.keys}) == 6
