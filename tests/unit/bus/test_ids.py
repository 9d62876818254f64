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
