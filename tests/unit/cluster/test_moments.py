"""Moments as people type them."""

from datetime import UTC, datetime

import pytest

from prefixbus.bus.errors import BadRequest
from prefixbus.cluster import moments

NOW = 1_700_000_000.0


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_a_number_and_a_unit_is_so_long_ago(text: str, seconds: float) -> None:
    assert moments.parse(text, NOW, "--since") == NOW - seconds


def test_a_moment_of_the_calendar_is_itself() -> None:
    assert moments.parse("2023-11-14T22:13:20+00:00", 0.0, "--since") == NOW
    assert moments.parse("2023-11-14", 0.0, "--since") == datetime(2023, 11, 14).timestamp()
    assert moments.parse(moments.show(NOW), 0.0, "--since") == NOW


def test_it_is_shown_in_utc() -> None:
    assert moments.show(NOW) == datetime.fromtimestamp(NOW, UTC).strftime("%Y-%m-%d %H:%M:%S.000Z")


@pytest.mark.parametrize("text", ["yesterday", "10", "m", "-5m", "5w", "9999999999d", "2023-13-01"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequest, match=r"--since: .* is no moment"):
        moments.parse(text, NOW, "--since")
