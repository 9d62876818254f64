"""The second listener of all storms notices what it is there for."""

import pytest
from support.watch import Rules

from prefixbus.bus import frames
from prefixbus.bus.errors import WorkerLost


def chunk(seq: int, attempt: int = 1) -> dict[str, str]:
    return frames.chunk_headers("r", seq=seq, attempt=attempt)


KEEPALIVE = frames.keepalive_headers("r")
END = frames.final_headers("r", seq=2, attempt=1)
FAILED = frames.error_headers(WorkerLost(), "r", attempt=1)

WHOLE = {
    "an answer": [KEEPALIVE, chunk(0), KEEPALIVE, chunk(1), END],
    "an error": [KEEPALIVE, FAILED],
    "a later attempt": [KEEPALIVE, chunk(0, 2), chunk(1, 2), END],
    "frames missed": [chunk(0), chunk(3)],
}
BROKEN = {
    "a second end": [chunk(0), END, FAILED],
    "a chunk after the end": [FAILED, chunk(0)],
    "a keep-alive after the end": [chunk(0), END, KEEPALIVE],
    "two attempts": [chunk(0, 1), chunk(1, 2)],
    "two attempts from their beginnings": [chunk(0, 1), chunk(0, 2)],
    "a chunk twice": [chunk(0), chunk(1), chunk(1)],
}


@pytest.mark.parametrize("heard", WHOLE.values(), ids=WHOLE.keys())
def test_what_may_come_into_an_inbox(heard: list[dict[str, str]]) -> None:
    rules = Rules()

    for headers in heard:
        rules.heard("_INBOX.t.c.s.1", headers)

    assert rules.broken == []


@pytest.mark.parametrize("heard", BROKEN.values(), ids=BROKEN.keys())
def test_what_breaks_a_rule(heard: list[dict[str, str]]) -> None:
    rules = Rules()

    for headers in heard:
        rules.heard("_INBOX.t.c.s.1", headers)

    assert len(rules.broken) == 1


@pytest.mark.parametrize(
    "heard", [KEEPALIVE, chunk(1), END, FAILED], ids=["a keep-alive", "a chunk", "end", "an error"]
)
def test_where_messages_are_lost_a_keep_alive_may_come_after_the_end_and_nothing_else(heard: dict[str, str]) -> None:
    rules = Rules()
    rules.keepalives_may_be_late = True

    for headers in (chunk(0), END, heard):
        rules.heard("_INBOX.t.c.s.1", headers)

    assert bool(rules.broken) == (heard is not KEEPALIVE)


def test_inboxes_are_judged_each_by_itself() -> None:
    """A request that was sent again has a second one."""
    rules = Rules()

    rules.heard("_INBOX.t.c.s.1", chunk(0, 1))
    rules.heard("_INBOX.t.c.s.2", chunk(0, 2))

    assert rules.broken == []
    assert rules.attempts_of("r") == {1, 2}
