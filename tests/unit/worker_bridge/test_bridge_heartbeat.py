"""Which changes of the load are told at once."""

import pytest

from prefixbus.worker_bridge.heartbeat import is_urgent


@pytest.mark.parametrize(
    ("told", "now", "urgent"),
    [
        ((False, 0.0), (True, 0.0), True),
        ((True, 0.0), (False, 0.0), False),
        ((True, 0.0), (True, 5.0), False),
        ((True, 0.0), (True, 21.0), True),
        ((True, 100.0), (True, 79.0), False),
        ((True, 100.0), (True, 70.0), True),
        ((True, 100.0), (False, 0.0), True),
        ((True, 1000.0), (True, 1200.0), False),
    ],
    ids=[
        "began to work",
        "came to rest",
        "a little",
        "much",
        "less by a little",
        "less by much",
        "all gone",
        "relative",
    ],
)
def test_a_report_waits_unless_it_would_mislead(
    told: tuple[bool, float], now: tuple[bool, float], urgent: bool
) -> None:
    assert is_urgent(*told, *now) is urgent
