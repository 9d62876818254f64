# ruff: noqa: TID251 - a shell: it takes what the bus hands over, and waits
"""Facts of reuse on their way to the record's stream, each with one question: is it stored?

No task waits for an answer: acknowledgements come to one subscription, and what waits too long is found by `sweep`.

Owns: what is not acknowledged yet (bounded by the bridge's slots).   Must not know: what a fact says, what a missing
acknowledgement means.   Units: seconds, monotonic.   Source: NATS ADR-22 (acknowledgements)."""

import asyncio
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from ..bus.connection import Bus
from ..bus.errors import BusUnavailable

# The stream answers in 0.2 ms; an attempt waits this long for it.
PATIENCE_S = 2.0

Settled = Callable[[BusUnavailable | None], None]
"""Called once: with None when the fact is stored, else with why nobody knows."""


class _Ack(msgspec.Struct):
    seq: int = 0
    error: dict[str, object] | None = None


_ack = msgspec.json.Decoder(_Ack)


class _Waiting(msgspec.Struct):
    settled: Settled
    since: float


class Facts:
    """`put` facts; `heard` is to listen on `acks`, `sweep` to be called now and then."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._prefix = f"{bus.inbox_prefix}.fact"
        self._waiting: dict[str, _Waiting] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Facts {len(self._waiting)} not acknowledged>"

    @property
    def acks(self) -> str:
        return f"{self._prefix}.*"

    def put(self, name: str, msg_id: str, payload: bytes, now: float, settled: Settled) -> None:
        """`name` is one subject token, unique among those that wait."""
        try:
            self._bus.send(self._subject, payload, reply=f"{self._prefix}.{name}", headers={"Nats-Msg-Id": msg_id})
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
            self._settle(name, BusUnavailable("The record's stream did not acknowledge."))

    def _settle(self, name: str, failure: BusUnavailable | None) -> None:
        waiting = self._waiting.pop(name, None)
        if not self._waiting:
            self._idle.set()
        if waiting is not None:
            waiting.settled(failure)


def _failure(message: Msg) -> BusUnavailable | None:
    if message.headers and message.headers.get("Status") == "503":
        return BusUnavailable("No stream keeps the record.")
    try:
        ack = _ack.decode(message.data)
    except msgspec.MsgspecError as exc:
        return BusUnavailable(f"The record's acknowledgement cannot be read: {exc}")
    if ack.error is not None:
        return BusUnavailable(f"The record's stream refuses: {ack.error.get('description')}")
    return None if ack.seq else BusUnavailable("The record's acknowledgement is empty.")
