"""Segments of a prompt and their keyed digests."""

import random
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.namespace import EPOCH_ZERO, Namespace
from prefixbus.tokenizer import digests

KEY = bytes(range(32))
FAMILY = bytes(16)
SPACE = Namespace("acme", "hr", "m", "w1", "t1", "c1", "", "", "", "p1", "bf16", 32, EPOCH_ZERO)

ids = st.builds(lambda length, seed: tokens(length, seed), st.integers(0, 20_000), st.integers(0, 1000))


def tokens(length: int, seed: int) -> bytes:
    rng = random.Random(seed)
    return array("I", (rng.randrange(50_000) for _ in range(length))).tobytes()


def parsed(packed: bytes) -> list[tuple[int, bytes]]:
    return [
        (int.from_bytes(packed[at : at + 4], "little"), packed[at + 4 : at + 12]) for at in range(0, len(packed), 12)
    ]


@given(ids)
def test_segments_follow_each_other_to_the_end_of_the_prompt_and_are_few(prompt: bytes) -> None:
    ends = digests.ends(prompt)

    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(prompt) // 4
    assert len(ends) <= digests.MOST_SEGMENTS


@given(ids, ids, ids)
def test_prompts_with_a_common_beginning_have_common_segments(common: bytes, one: bytes, two: bytes) -> None:
    first, second = (parsed(digests.segments(FAMILY, common + rest)) for rest in (one, two))

    whole = [segment for segment in parsed(digests.segments(FAMILY, common))[:-1]]
    assert first[: len(whole)] == second[: len(whole)] == whole


@given(st.integers(1, 200), st.integers(0, 100))
def test_what_stands_behind_an_insertion_has_the_digests_it_had(inserted: int, seed: int) -> None:
    document = tokens(2_000, seed)
    before = parsed(digests.segments(FAMILY, document))

    after = parsed(digests.segments(FAMILY, document[:400] + tokens(inserted, seed + 1) + document[400:]))

    same = {digest for _, digest in before} & {digest for _, digest in after}
    assert len(same) >= len(before) // 2
    moved = {end + inserted for end, digest in before if digest in same} & {end for end, _ in after}
    assert moved


def test_a_prompt_of_one_token_over_and_over_is_cut_all_the_same() -> None:
    ends = digests.ends(array("I", [7] * 200_000).tobytes())

    assert len(ends) == digests.MOST_SEGMENTS
    assert ends[:2] == [256, 512]


@pytest.mark.parametrize(
    "changed",
    [{"tenant": "other"}, {"scope": "it"}, {"acl_epoch": b"1" * 16}, {"client_salt": "s"}, {"model": "n"}],
    ids=lambda changed: next(iter(changed)),
)
def test_nothing_can_be_compared_across_a_permission_boundary(changed: dict[str, Any]) -> None:
    other = msgspec.structs.replace(SPACE, **changed)
    prompt = tokens(500, 1)

    one, two = (digests.segments(digests.family(KEY, space), prompt) for space in (SPACE, other))

    assert not {digest for _, digest in parsed(one)} & {digest for _, digest in parsed(two)}


@pytest.mark.parametrize("field", ["model_revision", "tokenizer_revision", "template_version"])
def test_a_prompt_can_be_followed_over_a_change_of_revision(field: str) -> None:
    other = msgspec.structs.replace(SPACE, **{field: "another"})

    assert digests.family(KEY, SPACE) == digests.family(KEY, other)


def test_without_the_deployments_key_nobody_makes_the_same_digests() -> None:
    assert digests.family(KEY, SPACE) != digests.family(bytes(32), SPACE)
