"""Records that must reach their stream: sent again under one id, and given up before the stream forgets that id."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from prefixbus.bus import outbox
from prefixbus.bus.errors import BusPermissionDenied, BusUnavailable, PrefixbusError
from prefixbus.bus.outbox import Outbox


class Stream:
    """What of a bus an outbox uses: the first publications fail with `failures`, in order; the others are stored."""

    def __init__(self, *failures: PrefixbusError) -> None:
        self._failures = list(failures)
        self.tried: list[tuple[str, bytes, str]] = []
        self.open = anyio.Event()
        self.open.set()

    async def publish_acked(self, subject: str, payload: bytes, *, msg_id: str, attempts: int) -> int:
        self.tried.append((subject, payload, msg_id))
        await self.open.wait()
        if self._failures:
            raise self._failures.pop(0)
        return 1


Failures = list[tuple[str, str]]


@asynccontextmanager
async def running(stream: Stream, give_up_s: float = 100.0) -> AsyncIterator[tuple[Outbox, Failures]]:
    failures: Failures = []
    async with anyio.create_task_group() as tasks:
        made = Outbox(
            stream,  # type: ignore[arg-type]  # the part of a bus that it uses
            tasks,
            lambda error, subject: failures.append((error.code, subject)),
            give_up_s=give_up_s,
        )
        yield made, failures
        stream.open.set()


async def test_a_record_is_sent_again_under_its_id_until_it_is_acknowledged() -> None:
    stream = Stream(BusUnavailable())
    async with running(stream) as (box, failures):
        box.put("s", b"record", "id-1")
        await box.idle()

    assert stream.tried == [("s", b"record", "id-1")] * 2
    assert failures == []


async def test_past_the_time_that_the_stream_remembers_ids_it_is_given_up_and_said() -> None:
    """Sent once more after that, it would be stored twice."""
    stream = Stream(BusUnavailable(), BusUnavailable())
    async with running(stream, give_up_s=0.0) as (box, failures):
        box.put("s", b"record", "id-1")
        await box.idle()

    assert len(stream.tried) == 1
    assert failures == [("bus_unavailable", "s")]


async def test_what_cannot_work_is_not_tried_again() -> None:
    stream = Stream(BusPermissionDenied())
    async with running(stream) as (box, failures):
        box.put("s", b"record", "id-1")
        await box.idle()

    assert len(stream.tried) == 1
    assert failures == [("permission_denied", "s")]


async def test_over_the_limit_the_newest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_PENDING", 2)
    stream = Stream()
    stream.open = anyio.Event()
    async with running(stream) as (box, failures):
        for number in range(3):
            box.put(f"s{number}", b"record", f"id-{number}")
        stream.open.set()
        await box.idle()

    assert sorted(subject for subject, _, _ in stream.tried) == ["s0", "s1"]
    assert failures == [("bus_unavailable", "s2")]
