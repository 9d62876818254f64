"""When a process that ended is started again."""

import pytest

from prefixbus.cluster import processes
from prefixbus.cluster.processes import BACKOFF_FIRST_S, BACKOFF_MAX_S, WELL_AFTER_S, Backoff

AT_ONCE = 0.1


def test_the_wait_doubles_with_each_crash_up_to_its_limit() -> None:
    backoff = Backoff()

    waits = [backoff.after(AT_ONCE) for _ in range(8)]

    assert waits == [0.5, 1, 2, 4, 8, 10, 10, 10]
    assert waits[0] == BACKOFF_FIRST_S and waits[-1] == BACKOFF_MAX_S


def test_a_life_that_was_long_enough_starts_it_anew() -> None:
    backoff = Backoff()
    for _ in range(6):
        backoff.after(AT_ONCE)

    waits = [backoff.after(WELL_AFTER_S + 1), backoff.after(AT_ONCE), backoff.after(AT_ONCE)]

    assert waits == [0.5, 1, 2]


@pytest.mark.parametrize("ran_s", [0.0, 29.9, WELL_AFTER_S])
def test_a_shorter_life_does_not(ran_s: float) -> None:
    backoff = Backoff()
    backoff.after(AT_ONCE)

    assert backoff.after(ran_s) == 1


@pytest.mark.parametrize(
    ("status", "says"), [(0, "status 0"), (3, "status 3"), (-9, "SIGKILL"), (-15, "SIGTERM"), (-200, "signal 200")]
)
def test_an_end_is_told_in_words(status: int, says: str) -> None:
    assert processes._describe(status) == says
