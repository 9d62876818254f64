"""An address says what it is about, and cannot be made by who was not told it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.router.addresses import Addresses

OURS = Addresses("_SVC.router.r1", b"k" * 16)
ids = st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=1, max_size=26)


@given(ids, st.integers(1, 16), st.sampled_from("dasc"))
def test_an_address_is_read_as_it_was_made(request_id: str, attempt: int, kind: str) -> None:
    assert OURS.read(OURS.of(kind, request_id, attempt)) == (request_id, attempt)


def test_of_a_request_that_was_never_dispatched_there_is_one_too() -> None:
    assert OURS.read(OURS.of("d", "R1", 0)) == ("R1", 0)


@given(ids, st.integers(1, 16), st.integers(1, 16))
def test_who_was_told_one_address_does_not_know_another(request_id: str, told: int, other: int) -> None:
    mark = OURS.name(request_id, told).partition("-")[2]

    read = OURS.read(f"_SVC.router.r1.d.{request_id}.{other}-{mark}")

    assert read == ((request_id, told) if told == other else None)


@pytest.mark.parametrize("name", ["1", "", "-", "1-", "x-0", "\u0661-0", "-1-0", "9" * 5000, f"{'9' * 5000}-0"])
def test_what_nobody_was_told_is_no_address(name: str) -> None:
    assert OURS.read(f"_SVC.router.r1.d.R1.{name}") is None


def test_another_process_has_other_addresses() -> None:
    other = Addresses("_SVC.router.r1", b"l" * 16)

    assert other.read(OURS.of("d", "R1", 1)) is None
