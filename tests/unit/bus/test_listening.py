"""The clock that leases run on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.listening import MAX_STEP_S, ListeningClock


def read(clock: ListeningClock, start: float, seconds: float) -> float:
    """Reads it ten times a second, as services do."""
    for step in range(1, round(seconds * 10) + 1):
        clock.seconds(start + step / 10)
    return clock.seconds(start + seconds)


def test_it_starts_at_nothing_whatever_the_time_is() -> None:
    clock = ListeningClock()

    assert clock.seconds(1e9) == 0.0


def test_it_runs_with_time_while_it_is_read() -> None:
    clock = ListeningClock()
    clock.seconds(7.0)

    assert read(clock, 7.0, 5.0) == pytest.approx(5.0)


def test_a_pause_of_the_reader_counts_as_one_step() -> None:
    clock = ListeningClock()
    clock.seconds(0.0)

    assert clock.seconds(10.0) == MAX_STEP_S


def test_it_stands_still_while_cut_off() -> None:
    clock = ListeningClock()
    clock.seconds(0.0)
    clock.cut(0.1)

    while_cut = read(clock, 0.1, 60.0)
    clock.back(60.1)
    at_once = clock.seconds(60.1)

    assert [while_cut, at_once] == pytest.approx([0.1, 0.1])
    assert clock.seconds(60.2) == pytest.approx(0.2)


def test_a_late_reading_changes_nothing() -> None:
    clock = ListeningClock()
    clock.seconds(0.0)
    clock.seconds(0.2)

    assert clock.seconds(0.1) == 0.2
    assert clock.seconds(0.2) == 0.2


def test_being_cut_off_or_back_twice_changes_nothing() -> None:
    clock = ListeningClock()
    clock.seconds(0.0)

    clock.cut(0.1)
    clock.cut(0.2)
    clock.back(0.3)
    clock.back(0.4)

    assert clock.seconds(0.5) == pytest.approx(0.3)
    assert not clock.is_cut


@given(
    st.lists(st.tuples(st.sampled_from(["seconds", "cut", "back"]), st.floats(-1, 5)), max_size=30),
)
def test_it_never_runs_back_nor_faster_than_time(steps: list[tuple[str, float]]) -> None:
    clock = ListeningClock()
    now, last, latest = 0.0, clock.seconds(0.0), 0.0
    for event, seconds in steps:
        now += seconds
        latest = max(latest, now)
        if event == "cut":
            clock.cut(now)
        elif event == "back":
            clock.back(now)
        read_ = clock.seconds(now)
        assert last <= read_ <= latest + 1e-9
        last = read_
