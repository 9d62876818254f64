"""Internal request ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import ids, subjects

walls = st.integers(0, 2**47).map(lambda ms: ms / 1000)
entropy = st.binary(min_size=10, max_size=10)


@given(walls, entropy, walls, entropy)
def test_ids_sort_by_time(one: float, random_one: bytes, other: float, random_other: bytes) -> None:
    if int(one * 1000) < int(other * 1000):
        assert ids.request_id(one, random_one) < ids.request_id(other, random_other)


@given(walls, entropy)
def test_an_id_may_stand_in_a_subject(wall: float, random: bytes) -> None:
    made = ids.request_id(wall, random)

    assert len(made) == 26
    assert subjects.is_token(made)


def test_too_little_chance_is_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        ids.request_id(1.0, b"short")


@given(walls, entropy)
def test_an_id_says_when_its_request_came(wall: float, random: bytes) -> None:
    assert ids.made_at(ids.request_id(wall, random)) == int(wall * 1000) / 1000


@pytest.mark.parametrize("text", ["", "asked-1", "0" * 25, "8" + "0" * 25, "0" * 25 + "I", "0" * 27])
def test_what_is_no_id_of_ours_says_nothing(text: str) -> None:
    assert ids.made_at(text) is None
