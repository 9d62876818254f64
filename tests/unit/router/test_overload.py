"""Refusals for load: when, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.router.overload import is_overloaded, longest_ms, retry_after_s

QUEUES = st.lists(st.floats(0.0, 3_600_000.0), min_size=1)


def test_a_request_waits_as_long_as_is_configured_and_no_longer_than_its_deadline() -> None:
    assert longest_ms(30_000.0, 60_000.0) == 30_000.0
    assert longest_ms(30_000.0, 2_000.0) == 2_000.0
    assert longest_ms(30_000.0, -1.0) == 0.0


def test_one_short_queue_is_enough() -> None:
    assert is_overloaded([40_000.0, 30_001.0], 30_000.0)
    assert not is_overloaded([40_000.0, 30_000.0], 30_000.0)


@pytest.mark.parametrize(
    ("open_ms", "full_ms", "expected"),
    [
        pytest.param([90_000.0, 42_500.0], [], 13, id="until the shortest is under the limit, in whole seconds"),
        pytest.param([42_000.0], [], 12, id="exactly"),
        pytest.param([30_100.0], [], 1, id="never 0"),
        pytest.param([5.0], [], 1, id="short already"),
        pytest.param([42_000.0], [0.0], 12, id="a full worker is no candidate"),
        pytest.param([], [9_100.0, 4_200.0], 5, id="no free slot: until the first has begun all it has"),
        pytest.param([], [0.0], 1, id="no free slot, and nothing waits"),
        pytest.param([], [], 1, id="nothing known"),
    ],
)
def test_when_to_come_again(open_ms: list[float], full_ms: list[float], expected: int) -> None:
    assert retry_after_s(open_ms, full_ms, 30_000.0) == expected


@given(QUEUES, st.floats(0.0, 60_000.0))
def test_who_comes_again_when_told_is_not_refused_if_nobody_else_came(queues: list[float], longest: float) -> None:
    wait_ms = 1000.0 * retry_after_s(queues, [], longest)

    drained = [max(0.0, queue - wait_ms) for queue in queues]

    # A microsecond for the rounding of sums.
    assert not is_overloaded(drained, longest + 0.001)
