# ruff: noqa: TID251 - an adapter: JetStream's batched direct gets, which nats-py does not know
"""A range of a stream, read from its beginning to what was its end when reading began.

By batches of direct gets (NATS ADR-31): there is no consumer to make, to pay for or to leave behind, a range ends by
itself, and the right to read is the right to one subject.

Owns: that protocol.   Must not know: what messages mean.   Units: Unix seconds, stream sequences."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import StreamState
from nats.js.errors import APIError

from ..bus.connection import Bus
from ..bus.errors import BusUnavailable

BATCH = 500
_WAIT_S = 10.0
_END_OF_BATCH = "204"
_NOT_FOUND = "404"


class Kept(NamedTuple):
    """A message of a stream."""

    seq: int
    at: float
    subject: str
    data: bytes


async def state(bus: Bus, stream: str) -> StreamState:
    """:raises BusUnavailable: JetStream did not answer."""
    try:
        return (await bus.jetstream.stream_info(stream)).state
    except (APIError, nats.errors.Error, TimeoutError) as exc:
        raise BusUnavailable(f"stream {stream}: {exc or type(exc).__name__}") from exc


async def first_at(bus: Bus, stream: str) -> float | None:
    """When the oldest message that is kept was stored (Unix seconds); None if there is none."""
    held = await state(bus, stream)
    kept = [one.at async for one in read(bus, stream, ">", last_seq=held.first_seq)] if held.messages else []
    return kept[0] if kept else None


async def read(
    bus: Bus, stream: str, subject: str, *, since: float | None = None, until: float | None = None, last_seq: int = 0
) -> AsyncIterator[Kept]:
    """The messages of `subject` stored from `since` to `until`, and up to `last_seq` (0: the stream's present end).

    :raises BusUnavailable: JetStream did not answer, or an answer was lost."""
    last_seq = last_seq or (await state(bus, stream)).last_seq
    replies: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = f"{bus.inbox_prefix}.read.{secrets.token_hex(8)}"
    subscription = await bus.subscribe(inbox, replies.put)
    query: dict[str, Any] = {"seq": 1} if since is None else {"start_time": _rfc3339(since)}
    try:
        while query.get("seq", 1) <= last_seq:
            payload = json.dumps({**query, "batch": BATCH, "next_by_subj": subject}).encode()
            bus.send(f"$JS.API.DIRECT.GET.{stream}", payload, reply=inbox)
            previous = 0
            while (message := await _next(replies, stream)).headers.get("Status") is None:
                kept = _kept(message)
                _check_order(message, previous, stream)
                previous = kept.seq
                if kept.seq > last_seq or (until is not None and kept.at > until):
                    return
                yield kept
            if message.headers["Status"] == _NOT_FOUND:
                return
            _check_order(message, previous, stream)
            if not int(message.headers["Nats-Num-Pending"]):
                return
            query = {"seq": previous + 1}
    finally:
        await subscription.unsubscribe()


class _Reply(NamedTuple):
    headers: dict[str, str]
    data: bytes


async def _next(replies: "asyncio.Queue[Msg]", stream: str) -> _Reply:
    try:
        async with asyncio.timeout(_WAIT_S):
            message = await replies.get()
    except TimeoutError as exc:
        raise BusUnavailable(f"stream {stream} was not read: no reply within {_WAIT_S:g} s.") from exc
    reply = _Reply(message.headers or {}, message.data)
    if reply.headers.get("Status") not in (None, _END_OF_BATCH, _NOT_FOUND):
        raise BusUnavailable(f"stream {stream} was not read: status {reply.headers['Status']}.")
    return reply


def _kept(reply: _Reply) -> Kept:
    headers = reply.headers
    at = datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
    return Kept(int(headers["Nats-Sequence"]), at, headers["Nats-Subject"], reply.data)


def _check_order(reply: _Reply, previous: int, stream: str) -> None:
    """Each reply names the one before it: core NATS may lose one."""
    if int(reply.headers["Nats-Last-Sequence"]) != previous:
        raise BusUnavailable(f"stream {stream}: a reply was lost on the way.", remedy="Ask again.")


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
