# ruff: noqa: TID251 - it plays a tenant: it sends requests and keeps their time
"""`prefixbus replay --resend`: captured requests sent again as their tenant, beside what became of them the first time.

Requests keep their bodies, scopes and prefix classes; each gets an id of its own, so that both outcomes are in the
journal. They go at their original distances in time, or as fast as SENT_AT_ONCE allows.

Owns: the sending and the table.   Must not know: what is in a body."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg
from rich.table import Table

from ..bus import ids, messages, subjects
from ..bus.connection import Bus
from ..bus.errors import PrefixbusError
from ..bus.messages import Captured, MessageInvalid, Outcome
from ..client import Client
from . import records, streams

SENT_AT_ONCE = 256
AGAIN = "again-"
# Outcomes are written a moment after an answer's last frame.
_OUTCOMES_WITHIN_S = 10.0


class Credential(msgspec.Struct, frozen=True):
    """What a tenant connects with, as in `prefixbus send`."""

    tenant: str
    token: str
    label: str
    url: str


class Again(msgspec.Struct):
    """A request that was sent again: our id of its first sending, its outcomes then and now, and with which error it
    ended now (empty: with none)."""

    request_id: str
    then: Outcome | None
    now: Outcome | None = None
    error: str = ""


class Captures(NamedTuple):
    """Captured requests in the order in which they came. `unreadable` are the subjects of those that cannot be read."""

    requests: list[Captured]
    unreadable: list[str]


async def captured(bus: Bus, tenant: str, since: float | None, until: float | None) -> Captures:
    """What a tenant sent, but for what was itself sent again."""
    found = Captures([], [])
    subject = subjects.capture(tenant, "*")
    async for kept in streams.read(bus, subjects.STREAM_CAPTURE, subject, since=since, until=until):
        try:
            request = messages.CAPTURED.decode(kept.data)
            _came_at(request)
        except MessageInvalid:
            found.unreadable.append(kept.subject)
            continue
        if not request.client_request_id.startswith(AGAIN):
            found.requests.append(request)
    found.requests.sort(key=_came_at)
    return found


async def resend(
    operator: Bus, credential: Credential, requests: Sequence[Captured], tls: ssl.SSLContext | None, *, in_time: bool
) -> tuple[list[Again], list[str]]:
    """Sends all of them; returns when all have ended, with the subjects of outcomes that could not be read. `in_time`:
    at their original distances.

    :raises NotAdmitted, BusPermissionDenied: the credential is not of this tenant, or not of one of the scopes."""
    sent = [Again(request.request_id, await _outcome_of(operator, request.request_id)) for request in requests]
    labels = {_label(request): again for request, again in zip(requests, sent, strict=True)}
    all_known = asyncio.Event()
    found = records.Records([], [])

    async def heard(message: Msg) -> None:
        records.add(found, message.subject, message.data)
        while found.outcomes:
            outcome = found.outcomes.pop()
            if outcome.client_request_id in labels:
                labels[outcome.client_request_id].now = outcome
        if all(again.now is not None or again.error for again in sent):
            all_known.set()

    following = await operator.follow(subjects.STREAM_JOURNAL, subjects.ALL_OUTCOME, heard, start="new")
    async with contextlib.AsyncExitStack() as open_:
        clients = {
            scope: await open_.enter_async_context(
                await Client.connect(
                    credential.url,
                    tenant=credential.tenant,
                    token=credential.token,
                    label=credential.label,
                    scope=scope,
                    tls=tls,
                )
            )
            for scope in sorted({request.scope for request in requests})
        }
        await _send_all(clients, requests, sent, in_time=in_time)
    if any(again.now is None and not again.error for again in sent):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTCOMES_WITHIN_S):
                await all_known.wait()
    await following.unsubscribe()
    return sent, found.unreadable


async def _send_all(
    clients: dict[str, Client], requests: Sequence[Captured], sent: Sequence[Again], *, in_time: bool
) -> None:
    room = asyncio.Semaphore(len(requests) if in_time else SENT_AT_ONCE)
    first, started = _came_at(requests[0]), time.monotonic()

    async def send(request: Captured, again: Again) -> None:
        if in_time:
            await asyncio.sleep(max(0.0, started + _came_at(request) - first - time.monotonic()))
        async with room:
            try:
                await _send(clients[request.scope], request)
            except PrefixbusError as exc:
                again.error = exc.code

    async with asyncio.TaskGroup() as group:
        for request, again in zip(requests, sent, strict=True):
            group.create_task(send(request, again))


async def _send(client: Client, request: Captured) -> None:
    body = msgspec.json.decode(request.body)
    answer = client.stream(request.model, body, request_id=_label(request), prefix_class=request.prefix_class)
    async for _ in answer:
        pass


async def _outcome_of(operator: Bus, request_id: str) -> Outcome | None:
    """The outcome of its last attempt; None if it aged out or there never was one."""
    found = records.Records([], [])
    for subject in (subjects.outcome("*", request_id), subjects.ended(request_id)):
        async for kept in streams.read(operator, subjects.STREAM_JOURNAL, subject):
            records.add(found, kept.subject, kept.data)
    return max(found.outcomes, key=_by_attempt, default=None)


def table(sent: Sequence[Again]) -> Table:
    """One row a request: what became of it then, and now."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("request", "worker", "now"):
        made.add_column(column, no_wrap=True)
    for column in ("cached", "now", "ttft ms", "now"):
        made.add_column(column, justify="right", no_wrap=True)
    for column in ("status", "now"):
        made.add_column(column, no_wrap=True)
    for again in sent:
        then, now = again.then, again.now
        made.add_row(
            again.request_id,
            then.worker if then else "",
            now.worker if now else "",
            _figure(then.cached_tokens if then else None),
            _figure(now.cached_tokens if now else None),
            _figure(then.ttft_ms if then else None),
            _figure(now.ttft_ms if now else None),
            (then.error or then.status) if then else "aged out",
            again.error or ((now.error or now.status) if now else "no outcome"),
        )
    return made


def sums(sent: Sequence[Again]) -> str:
    """Over the requests that ended well both times."""
    both = [
        (again.then, again.now)
        for again in sent
        if again.then and again.now and again.then.status == again.now.status == "ok"
    ]
    cached = [sum(outcome.cached_tokens or 0 for outcome in side) for side in zip(*both, strict=True)] or [0, 0]
    ttft = [sum(outcome.ttft_ms or 0.0 for outcome in side) / len(both) for side in zip(*both, strict=True)] or [
        0.0
    ] * 2
    return (
        f"{len(sent)} sent again, {len(both)} ended well both times: cached tokens {cached[0]} -> {cached[1]}, "
        f"mean TTFT {ttft[0]:.1f} -> {ttft[1]:.1f} ms"
    )


def _came_at(request: Captured) -> float:
    at = ids.made_at(request.request_id)
    if at is None:
        raise MessageInvalid(f"{request.request_id[:40]!r} is no id of ours.")
    return at


def _label(request: Captured) -> str:
    """The id under which its client would find it now."""
    return f"{AGAIN}{request.request_id}"


def _by_attempt(outcome: Outcome) -> int:
    return outcome.attempt


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
