"""Records that must reach their stream: sent again under one id, and given up before the stream forgets that id."""

import asyncio

import pytest

from prefixbus.bus import outbox
from prefixbus.bus.connection import Settled
from prefixbus.bus.errors import BusPermissionDenied, BusUnavailable, PrefixbusError
from prefixbus.bus.outbox import Outbox


class Stream:
    """What of a bus an outbox uses: the first publications fail with `failures`, in order; the others are stored. What
    comes of each is said in a later turn of the loop, once the stream is `open`."""

    def __init__(self, *failures: PrefixbusError) -> None:
        self._failures = list(failures)
        self._unanswered: list[Settled] = []
        self._is_open = True
        self.tried: list[tuple[str, bytes, str]] = []

    def store(self, subject: str, payload: bytes, settled: Settled, *, timeout_s: float, msg_id: str = "") -> None:
        self.tried.append((subject, payload, msg_id))
        self._unanswered.append(settled)
        if self._is_open:
            asyncio.get_running_loop().call_soon(self.open)

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        unanswered, self._unanswered, self._is_open = self._unanswered, [], True
        for settled in unanswered:
            settled(self._failures.pop(0) if self._failures else None)


Failures = list[tuple[str, str]]


def made(stream: Stream, give_up_s: float = 100.0) -> tuple[Outbox, Failures]:
    failures: Failures = []
    box = Outbox(
        stream,  # type: ignore[arg-type]  # the part of a bus that it uses
        lambda error, subject: failures.append((error.code, subject)),
        give_up_s=give_up_s,
    )
    return box, failures


async def test_a_record_is_sent_again_under_its_id_until_it_is_acknowledged() -> None:
    stream = Stream(BusUnavailable())
    box, failures = made(stream)

    box.put("s", b"record", "id-1")
    await box.idle()

    assert stream.tried == [("s", b"record", "id-1")] * 2
    assert failures == []


async def test_past_the_time_that_the_stream_remembers_ids_it_is_given_up_and_said() -> None:
    """Sent once more after that, it would be stored twice."""
    stream = Stream(BusUnavailable(), BusUnavailable())
    box, failures = made(stream, give_up_s=0.0)

    box.put("s", b"record", "id-1")
    await box.idle()

    assert len(stream.tried) == 1
    assert failures == [("bus_unavailable", "s")]


async def test_what_cannot_work_is_not_tried_again() -> None:
    stream = Stream(BusPermissionDenied())
    box, failures = made(stream)

    box.put("s", b"record", "id-1")
    await box.idle()

    assert len(stream.tried) == 1
    assert failures == [("permission_denied", "s")]


async def test_over_the_limit_the_newest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_PENDING", 2)
    stream = Stream()
    stream.close()
    box, failures = made(stream)

    for number in range(3):
        box.put(f"s{number}", b"record", f"id-{number}")
    stream.open()
    await box.idle()

    assert sorted(subject for subject, _, _ in stream.tried) == ["s0", "s1"]
    assert failures == [("bus_unavailable", "s2")]
