"""What an attempt may do, for everything that may come of its claim."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from prefixbus.bus import subjects
from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.errors import BusUnavailable, PrefixbusError, Unavailable
from prefixbus.bus.messages import VERSION, Job
from prefixbus.bus.namespace import Namespace
from prefixbus.worker_bridge.acks import PATIENCE_S, Acks
from prefixbus.worker_bridge.claim import Claim, Superseded

REQUEST = "R1"
# Before and after the time from which claim.py takes claims for forgotten, a minute before they are.
NOT_YET_S = subjects.CLAIMS_KEPT_S - 90.0
TOO_LATE_S = subjects.CLAIMS_KEPT_S - 30.0


class Wire:
    """What of a bus a claim uses: what is put on it stays there until the test answers for the stream."""

    inbox_prefix = "_SVC.worker_bridge.w1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str]] = []
        self.is_cut = False

    def send(self, subject: str, payload: bytes, *, reply: str, headers: dict[str, str] | None) -> None:
        if self.is_cut:
            raise BusUnavailable
        self.sent.append((subject, payload, reply))


class Scene:
    """An attempt of a request that came at the clock's beginning."""

    def __init__(self, attempt: int) -> None:
        self.wire = Wire()
        self.clock = VirtualClock()
        self.acks = Acks(self.wire)  # type: ignore[arg-type]  # the part of a bus that it uses
        self.claim = Claim(self.acks, self.clock, job(int(self.clock.wall())), attempt, "w1")

    @asynccontextmanager
    async def holding(self) -> AsyncIterator["asyncio.Task[bool]"]:
        """While it is being held; it has come as far as it can."""
        task = asyncio.create_task(self.claim.hold())
        await asyncio.sleep(0)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def answers(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        (_, _, reply) = self.wire.sent[0]
        self.acks.heard(Msg(None, subject=reply, data=data, headers=headers))  # type: ignore[arg-type]

    async def outcome(self, happens: Callable[["Scene"], None]) -> bool | type[PrefixbusError]:
        async with self.holding() as task:
            happens(self)
            try:
                return await asyncio.wait_for(task, 5.0)
            except PrefixbusError as exc:
                return type(exc)


def job(created_at: int) -> Job:
    namespace = Namespace("acme", "", "m", "r", "t", "v", "", "", "", "", "bf16", 32, b"e")
    return Job(VERSION, REQUEST, "c", "_INBOX.acme.x", namespace, b"", "chat", b"", False, created_at, 2e9)


def refusal(sentence: str) -> bytes:
    """As nats-server writes it, whose number is the same for every reason not to store."""
    return (
        b'{"error":{"code":400,"err_code":10077,"description":"' + sentence.encode() + b'"},"stream":"CLAIMS","seq":0}'
    )


def time_passes(here: Scene) -> None:
    here.clock.advance(PATIENCE_S)
    here.acks.sweep(here.clock.now())


ANSWERS: dict[str, tuple[Callable[[Scene], None], object, object]] = {
    # name: what happens, what it means for attempt 1, and for a later one
    "it is stored": (lambda here: here.answers(b'{"stream":"CLAIMS","seq":7}'), True, True),
    "there is another": (
        lambda here: here.answers(refusal("maximum messages per subject exceeded")),
        Superseded,
        Superseded,
    ),
    "the stream is full": (lambda here: here.answers(refusal("maximum bytes exceeded")), False, Unavailable),
    "there is no stream": (lambda here: here.answers(b"", {"Status": "503"}), False, Unavailable),
    "the answer cannot be read": (lambda here: here.answers(b"+ACK"), False, Unavailable),
    "the answer says nothing": (lambda here: here.answers(b"{}"), False, Unavailable),
    "nobody answers": (time_passes, False, Unavailable),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_first_attempt_answers_unless_there_is_another_claim(name: str) -> None:
    happens, expected, _ = ANSWERS[name]
    here = Scene(attempt=1)

    assert await here.outcome(happens) is expected


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("attempt", [2, 3])
async def test_a_later_attempt_answers_if_its_claim_is_stored_alone(name: str, attempt: int) -> None:
    happens, _, expected = ANSWERS[name]
    here = Scene(attempt=attempt)

    assert await here.outcome(happens) is expected


@pytest.mark.parametrize(("attempt", "expected"), [(1, False), (2, Unavailable)])
async def test_without_the_bus_it_is_as_without_an_answer(attempt: int, expected: object) -> None:
    here = Scene(attempt)
    here.wire.is_cut = True

    assert await here.outcome(lambda here: None) is expected


async def test_until_the_stream_has_answered_nothing_is_decided() -> None:
    here = Scene(attempt=1)

    async with here.holding() as task:
        here.clock.advance(PATIENCE_S - 0.1)
        here.acks.sweep(here.clock.now())
        await asyncio.sleep(0)

        assert not task.done()
        assert here.wire.sent == [(subjects.claim(REQUEST), b"w1 1", f"{Wire.inbox_prefix}.ack.claim-{REQUEST}-1")]


async def test_whoever_asks_again_hears_the_same_and_claims_once() -> None:
    here = Scene(attempt=2)
    assert await here.outcome(lambda here: here.answers(refusal("maximum messages per subject exceeded"))) is Superseded

    assert await here.outcome(lambda here: None) is Superseded
    assert len(here.wire.sent) == 1


async def test_two_that_ask_at_once_claim_once() -> None:
    """The claim of a first frame, and the claim of an end that comes between."""
    here = Scene(attempt=1)

    async with here.holding() as first, here.holding() as second:
        assert len(here.wire.sent) == 1
        here.answers(b'{"seq":7}')

        assert await first is await second is True


@pytest.mark.parametrize(("attempt", "expected"), [(1, True), (2, Unavailable)])
async def test_what_may_have_been_claimed_and_forgotten_is_begun_by_no_later_attempt(
    attempt: int, expected: object
) -> None:
    here = Scene(attempt)
    here.clock.advance(TOO_LATE_S)

    outcome = await here.outcome(lambda here: here.answers(b'{"seq":7}') if here.wire.sent else None)

    assert outcome is expected
    assert len(here.wire.sent) == (1 if expected is True else 0)


async def test_what_can_not_have_been_forgotten_yet_is_begun() -> None:
    here = Scene(attempt=2)
    here.clock.advance(NOT_YET_S)

    assert await here.outcome(lambda here: here.answers(b'{"seq":7}')) is True
