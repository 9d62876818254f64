# ruff: noqa: TID251 - a shell: it takes what the bus hands over, and waits
"""Messages on their way to a stream, each with one question: is it stored?

No task waits for an answer: acknowledgements come to one subscription, and what waits too long is found by `sweep`.

Owns: what is not acknowledged yet (a few for each of the bridge's slots).
Must not know: what a message says, what a missing acknowledgement means.
Units: seconds, monotonic.   Source: NATS ADR-22 (acknowledgements)."""

import asyncio
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from ..bus.connection import Bus
from ..bus.errors import BusUnavailable

# A stream answers in 0.2 ms; an attempt waits this long for it.
PATIENCE_S = 2.0
# nats-server's words for a stream with `discard_new_per_subject`. Its err_code (10077) says only that the message was
# not stored: a stream that is full has the same.
_MAX_PER_SUBJECT = "maximum messages per subject exceeded"

Settled = Callable[[BusUnavailable | None], None]
"""Called once: with None when the message is stored, else with why it is not, or why nobody knows."""


class AlreadyThere(BusUnavailable):
    """The stream has as many messages of the subject as it takes."""

    code = "already_there"
    status = 409
    retryable = False


class _Ack(msgspec.Struct):
    seq: int = 0
    error: dict[str, object] | None = None


_ack = msgspec.json.Decoder(_Ack)


class _Waiting(msgspec.Struct):
    settled: Settled
    since: float


class Acks:
    """`put` messages; `heard` is to listen on `inbox`, `sweep` to be called now and then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._prefix = f"{bus.inbox_prefix}.ack"
        self._waiting: dict[str, _Waiting] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Acks {len(self._waiting)} missing>"

    @property
    def inbox(self) -> str:
        return f"{self._prefix}.*"

    def put(self, subject: str, name: str, payload: bytes, now: float, settled: Settled, *, msg_id: str = "") -> None:
        """`name` is one subject token, unique among those that wait."""
        headers = {"Nats-Msg-Id": msg_id} if msg_id else None
        try:
            self._bus.send(subject, payload, reply=f"{self._prefix}.{name}", headers=headers)
        except BusUnavailable as exc:
            settled(exc)
            return
        self._waiting[name] = _Waiting(settled, now)
        self._idle.clear()

    async def idle(self) -> None:
        """When each is stored or given up."""
        await self._idle.wait()

    def heard(self, message: Msg) -> None:
        self._settle(message.subject.rpartition(".")[2], _failure(message))

    def sweep(self, now: float) -> None:
        """They are in the order in which they were put."""
        while self._waiting:
            name = next(iter(self._waiting))
            if now - self._waiting[name].since < PATIENCE_S:
                return
            self._settle(name, BusUnavailable("The stream did not acknowledge."))

    def _settle(self, name: str, failure: BusUnavailable | None) -> None:
        waiting = self._waiting.pop(name, None)
        if not self._waiting:
            self._idle.set()
        if waiting is not None:
            waiting.settled(failure)


def _failure(message: Msg) -> BusUnavailable | None:
    if message.headers and message.headers.get("Status") == "503":
        return BusUnavailable("No stream takes it.")
    try:
        ack = _ack.decode(message.data)
    except msgspec.MsgspecError as exc:
        return BusUnavailable(f"The acknowledgement cannot be read: {exc}")
    if ack.error is not None:
        kind = AlreadyThere if ack.error.get("description") == _MAX_PER_SUBJECT else BusUnavailable
        return kind(f"The stream refuses: {ack.error.get('description')}")
    return None if ack.seq else BusUnavailable("The acknowledgement is empty.")
