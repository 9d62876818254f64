"""What is a difference between policies, and what is chance."""

import pytest

from prefixbus.lab.spread import spread


def test_a_difference_within_the_spread_is_none() -> None:
    ours, theirs = spread([100.0, 110.0]), spread([108.0, 112.0])

    assert theirs.against(ours) is None
    assert spread([130.0, 131.0]).against(ours) == pytest.approx(130.5 / 105 - 1)
    assert spread([80.0]).against(spread([100.0])) == pytest.approx(-0.2)


def test_equal_runs_are_no_difference() -> None:
    assert spread([5.0]).against(spread([5.0])) is None


def test_of_no_runs_there_is_no_spread() -> None:
    with pytest.raises(ValueError, match="no runs"):
        spread([])
