"""Block keys: a chain from the namespace's seed over full blocks."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import blockkeys

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@given(token_lists, st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_the_chain_is_what_its_definition_says(tokens: list[int], block_size: int, seed: int) -> None:
    expected = []
    key = seed
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = xxhash.xxh3_64_intdigest(packed(tokens[start : start + block_size]), key)
        expected.append(key)

    keys = blockkeys.chain(packed(tokens), block_size, seed)

    assert struct.unpack(f"<{len(keys) // 8}Q", keys) == tuple(expected)


@given(st.lists(st.integers(0, 2), max_size=200), st.lists(st.integers(0, 2), max_size=200), st.integers(0, 100))
def test_what_two_chains_share_is_their_common_prefix(one: list[int], other: list[int], common: int) -> None:
    other = one[:common] + other
    first, second = (blockkeys.chain(packed(tokens), 1, 1) for tokens in (one, other))

    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    assert blockkeys.common_blocks(first, second) == blockkeys.common_blocks(second, first) == shared


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=9))
def test_the_deepest_of_several_chains_is_the_deepest_of_each(one: list[int], others: list[list[int]]) -> None:
    first, *chains = (blockkeys.chain(packed(tokens), 1, 1) for tokens in (one, *others))

    found = [blockkeys.deepest_common(first, chains, known) for known in range(len(one) + 1)]

    deepest = max((blockkeys.common_blocks(first, chain) for chain in chains), default=0)
    assert found == [max(known, deepest) for known in range(len(one) + 1)]


@given(token_lists, st.integers(0, 200))
def test_a_common_prefix_has_common_keys_and_no_more(tokens: list[int], cut: int) -> None:
    tokens = [*tokens, 7]
    cut = min(cut, len(tokens) - 1)
    changed = [*tokens[:cut], tokens[cut] ^ 1, *tokens[cut + 1 :]]

    one = blockkeys.chain(packed(tokens), 16, 1)
    other = blockkeys.chain(packed(changed), 16, 1)

    common = 8 * (cut // 16)
    assert one[:common] == other[:common]
    assert all(one[at : at + 8] != other[at : at + 8] for at in range(common, len(one), 8))


@pytest.mark.parametrize(
    ("case", "tokens", "blocks"),
    [("empty", 0, 0), ("short", 31, 0), ("one block", 32, 1), ("n blocks", 96, 3), ("one over", 97, 3)],
)
def test_only_full_blocks_have_keys(case: str, tokens: int, blocks: int) -> None:
    assert len(blockkeys.chain(bytes(4 * tokens), 32, 0)) == 8 * blocks


@pytest.mark.parametrize(("prompt", "blocks"), [(0, 0), (1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_engine_always_computes_at_least_one_token(prompt: int, blocks: int) -> None:
    assert blockkeys.reusable_blocks(prompt, 32) == blocks


def test_a_chain_can_be_extended_block_by_block() -> None:
    tokens = packed(list(range(64)))
    first = blockkeys.extend(tokens[:128], 5)

    assert struct.pack("<2Q", first, blockkeys.extend(tokens[128:], first)) == blockkeys.chain(tokens, 32, 5)


@pytest.mark.parametrize(
    ("prompt", "cached", "what"),
    [
        pytest.param(100, 0, "cold", id="nothing"),
        pytest.param(100, 15, "cold", id="less than a block"),
        pytest.param(100, 16, "partial", id="one block of six"),
        pytest.param(100, 79, "partial", id="four of six"),
        pytest.param(100, 80, "warm", id="all but the last of six"),
        pytest.param(100, 96, "warm", id="all six"),
        pytest.param(96, 64, "partial", id="four of six, all full"),
        pytest.param(96, 80, "warm", id="all that an engine can reuse of six"),
        pytest.param(20, 16, "warm", id="the only block"),
        pytest.param(10, 0, "cold", id="no full block"),
    ],
)
def test_warmth_counts_full_blocks(prompt: int, cached: int, what: str) -> None:
    assert blockkeys.warmth(prompt, cached, 16) == what


@given(prompt=st.integers(0, 10_000), block_size=st.integers(1, 64))
def test_who_reuses_all_that_can_be_reused_is_warm(prompt: int, block_size: int) -> None:
    reusable = blockkeys.reusable_blocks(prompt, block_size)

    assert blockkeys.warmth(prompt, reusable * block_size, block_size) == ("warm" if reusable else "cold")


MEDIA = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.binary(min_size=16, max_size=16)), max_size=4)


def in_order(gaps: list[tuple[int, int, bytes]]) -> list[blockkeys.Placed]:
    """Media one after the other, each so far behind the end of the last."""
    placed, at = [], 0
    for gap, count, name in gaps:
        placed.append((at + gap, count, name))
        at += gap + count
    return placed


@given(MEDIA)
def test_a_blocks_key_has_the_names_of_the_media_that_reach_into_it(gaps: list[tuple[int, int, bytes]]) -> None:
    media = in_order(gaps)
    tokens, seed, block = bytes(4 * 100), 5, 8

    keys = blockkeys.chain(tokens, block, seed, media)

    for number in range(100 // block):
        within = range(number * block, (number + 1) * block)
        names = [name for first, count, name in media if set(range(first, first + count)) & set(within)]
        seed = blockkeys.extend(tokens[: 4 * block], seed, b"".join(names))
        assert keys[8 * number : 8 * number + 8] == seed.to_bytes(8, "little")


def test_behind_a_medium_of_unknown_size_no_block_has_a_key() -> None:
    whole = blockkeys.chain(bytes(4 * 100), 8, 5)

    assert blockkeys.chain(bytes(4 * 100), 8, 5, [(20, 0, b"x" * 16), (50, 3, b"y" * 16)]) == whole[: 8 * 2]
