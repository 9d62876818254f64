# ruff: noqa: TID251 - a client of the bus: it waits for frames and keeps their time
"""A request on the bus as a stream of frames, with gaps, second attempts and silence noticed.

    async with await Client.connect(url, tenant="acme", token=token) as client:
        async for frame in client.stream("smollm2", {"messages": [...]}):
            ...

Core NATS is at most once: a hop that dies before acceptance takes the request with it. The sign is that not even a
keep-alive comes; then, and only then, the request is sent again (`resend_after_s`). A cancel can be lost as well: it is
sent again when frames of its request still come.

Owns: one inbox.   Must not know: what answers.   Source: DESIGN section 2."""

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import orjson
from nats.aio.msg import Msg

from .bus import errors, subjects
from .bus.connection import Bus, NotAdmitted

RESEND_AFTER_S = 3.0
MAX_SENDS = 3
# How long a request is tried while there is no bus, or nobody takes it: longer than any restart.
UNREACHABLE_FOR_S = 15.0
RETRY_EVERY_S = 0.25
# Frames that come this long after their request's cancel are a sign that it was lost.
CANCEL_AGAIN_S = 1.0
# Cancelled requests whose end has not been heard yet; the oldest are given up.
CANCELS_KEPT = 1024
# A message for a stream, or why none will come.
Heard = Msg | errors.PrefixbusError


class Frame(msgspec.Struct, frozen=True):
    """One response message. `seq` is None for a keep-alive; `chunk` is the OpenAI chunk object."""

    seq: int | None
    attempt: int
    chunk: dict[str, Any]


class StreamGap(errors.PrefixbusError):
    """Frames of the answer were lost on the way."""

    code = "stream_gap"
    status = 502


class NobodyListens(errors.Unavailable):
    """No tokenizer listens."""

    code = "nobody_listens"


class Silence(errors.Unavailable):
    """The answer stopped coming, without an end."""

    code = "silence"
    retryable = False


class Client:
    """A tenant's connection. One inbox serves all its requests."""

    def __init__(self, tenant: str, scope: str) -> None:
        self._bus: Bus
        self._tenant = tenant
        self._scope = scope
        self._streams: dict[str, _Stream] = {}
        self._cancelled_at: dict[str, float] = {}

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        tenant: str,
        token: str,
        scope: str = "",
        label: str = "default",
        tls: ssl.SSLContext | None = None,
    ) -> "Client":
        """`label` names the credential among the tenant's: one whose scopes are listed may only listen below it.

        :raises BusUnavailable: no server.   :raises NotAdmitted: it does not know this tenant with this token.
        :raises BusPermissionDenied: the token is another credential's than `label`."""
        inbox = f"{subjects.tenant_inbox(tenant)}.{label}.{secrets.token_hex(8)}"
        client = cls(tenant, scope)
        try:
            client._bus = await Bus.connect(
                url,
                name=f"client of {tenant}",
                inbox_prefix=inbox,
                user=tenant,
                password=token,
                tls=tls,
                on_event=client._bus_event,
            )
        except NotAdmitted as exc:
            raise NotAdmitted(
                f"token not accepted for tenant {tenant}.",
                # To the server both are silence of the callout's "yes".
                remedy=(
                    "Tokens are one tenant's each: name the token's own with --tenant, or make a new one: "
                    f"prefixbus tenant {tenant} --replace. If it is the right one, look whether the callout runs: "
                    "prefixbus status."
                ),
            ) from exc
        try:
            await client._bus.subscribe(f"{inbox}.s.*", client._hear)
        except errors.BusPermissionDenied as exc:
            await client.close()
            raise errors.BusPermissionDenied(
                f"this token may not listen on {inbox}.>.",
                field="label",
                remedy="Name the label of the token's credential.",
            ) from exc
        return client

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._bus.close()

    async def stream(
        self,
        model: str,
        body: dict[str, Any],
        *,
        request_id: str = "",
        deadline_s: float = 120.0,
        prefix_class: str = "",
        resend_after_s: float = RESEND_AFTER_S,
    ) -> AsyncIterator[Frame]:
        """The answer's frames in order, keep-alives included; ends after the last one.

        A stream left early is cancelled at the worker.

        :raises PrefixbusError: the error that the stream ended with; StreamGap or Silence for one that never ended
        right.   :raises BusPermissionDenied: the token does not allow this tenant or scope."""
        request_id = request_id or secrets.token_hex(12)
        deadline = time.monotonic() + deadline_s
        headers = {
            subjects.HEADER_REQUEST_ID: request_id,
            subjects.HEADER_DEADLINE: f"{time.time() + deadline_s:.3f}",
        }
        if prefix_class:
            headers[subjects.HEADER_PREFIX_CLASS] = prefix_class
        payload = orjson.dumps(body)
        # An earlier request of that id is not meant any more.
        self._cancelled_at.pop(request_id, None)
        subject = subjects.infer(self._tenant, model, self._scope)
        ended = False
        token = ""
        sends = sending = 0
        give_up_at = min(deadline, time.monotonic() + UNREACHABLE_FOR_S)
        try:
            while sends < MAX_SENDS:
                # A token of its own for each sending: late frames of the one before are not heard.
                self._streams.pop(token, None)
                token = secrets.token_hex(8)
                inbox: asyncio.Queue[Heard] = asyncio.Queue()
                self._streams[token] = _Stream(subject, inbox)
                reader = _Reader(inbox, min(resend_after_s, deadline_s), deadline)
                sending += 1
                headers[subjects.HEADER_SENDING] = str(sending)
                try:
                    self._bus.send(subject, payload, reply=f"{self._bus.inbox_prefix}.s.{token}", headers=headers)
                    async for frame in reader:
                        yield frame
                    ended = True
                    return
                except Silence:
                    sends += 1
                    if reader.heard_anything or time.monotonic() >= deadline:
                        raise
                except (errors.BusUnavailable, NobodyListens):
                    # Nobody has it: it is sent again as soon as somebody could.
                    if time.monotonic() >= give_up_at:
                        ended = True
                        raise
                    await asyncio.sleep(RETRY_EVERY_S)
                except errors.PrefixbusError as exc:
                    ended = not isinstance(exc, StreamGap)
                    raise
            raise Silence(
                f"No answer: sent {MAX_SENDS} times, and nothing came back within {resend_after_s:g} s.",
                remedy="See which process does not run: prefixbus status.",
            )
        finally:
            self._streams.pop(token, None)
            if not ended:
                # Over a bus that is cut, the worker notices by itself that nobody listens.
                with contextlib.suppress(errors.BusUnavailable):
                    await self.cancel(request_id)

    async def cancel(self, request_id: str) -> None:
        """Stops a request of this tenant, wherever it is. Says nothing about whether there was one."""
        await self._bus.publish(subjects.cancel(self._tenant, request_id))
        self._cancelled_at.pop(request_id, None)
        self._cancelled_at[request_id] = time.monotonic()
        if len(self._cancelled_at) > CANCELS_KEPT:
            del self._cancelled_at[next(iter(self._cancelled_at))]

    async def _cancel_again(self, headers: dict[str, str]) -> None:
        request_id = headers.get(subjects.HEADER_REQUEST_ID, "")
        cancelled_at = self._cancelled_at.get(request_id)
        if cancelled_at is None:
            return
        if subjects.HEADER_FINAL in headers:
            del self._cancelled_at[request_id]
        elif time.monotonic() - cancelled_at >= CANCEL_AGAIN_S:
            with contextlib.suppress(errors.BusUnavailable):
                await self.cancel(request_id)

    async def _hear(self, message: Msg) -> None:
        if self._cancelled_at:
            await self._cancel_again(message.headers or {})
        stream = self._streams.get(message.subject.rsplit(".", 1)[1])
        if stream is not None:
            stream.inbox.put_nowait(message)

    def _bus_event(self, kind: str, detail: str) -> None:
        """A request that the server denied would wait for frames that cannot come: tells those who wait for them.

        nats-py reports the subject in lower case: a neighbour that differs in case alone, and was not denied, is told
        too, which is the smaller evil."""
        if kind != "denied" or "publish to" not in detail:
            return
        for stream in self._streams.values():
            if f'"{stream.subject.lower()}"' in detail.lower():
                stream.inbox.put_nowait(self._denial())

    def _denial(self) -> errors.BusPermissionDenied:
        if self._scope:
            return errors.BusPermissionDenied(
                f"this token may not use scope {self._scope} of tenant {self._tenant}.",
                remedy="Name a scope that the credential lists.",
            )
        return errors.BusPermissionDenied(
            f"this token may not ask for tenant {self._tenant} as a whole.",
            remedy="Name a scope that the credential lists: --scope.",
        )


class _Stream(NamedTuple):
    """One sending that waits for its frames."""

    subject: str
    inbox: "asyncio.Queue[Heard]"


class _Reader:
    """Frames of one sending, checked as they come."""

    def __init__(self, inbox: "asyncio.Queue[Heard]", silence_s: float, deadline: float) -> None:
        self._inbox = inbox
        self._silence_s = silence_s
        self._deadline = deadline
        self._next_seq = 0
        self._attempt = 0
        self.heard_anything = False

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while True:
            message = await self._next()
            self.heard_anything = True
            headers = message.headers or {}
            if headers.get("Status") == "503":
                raise NobodyListens()
            if subjects.HEADER_FINAL in headers:
                self._check_end(headers)
                return
            seq = headers.get(subjects.HEADER_SEQ)
            attempt = int(headers.get(subjects.HEADER_ATTEMPT, "1"))
            if seq is not None:
                self._check_order(int(seq), attempt)
            yield Frame(int(seq) if seq is not None else None, attempt, orjson.loads(message.data))

    async def _next(self) -> Msg:
        wait = min(self._silence_s, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(max(wait, 0)):
                heard = await self._inbox.get()
        except TimeoutError:
            if time.monotonic() >= self._deadline:
                raise errors.DeadlineExceeded() from None
            raise Silence(
                f"The answer stopped: no frame for {self._silence_s:g} s.",
                remedy="See which process does not run: prefixbus status.",
            ) from None
        if isinstance(heard, errors.PrefixbusError):
            raise heard
        return heard

    def _check_order(self, seq: int, attempt: int) -> None:
        if self._next_seq and attempt != self._attempt:
            raise StreamGap(f"Attempt {attempt} came into the answer of attempt {self._attempt}.")
        if seq != self._next_seq:
            raise StreamGap(f"Frame {self._next_seq} is missing; {seq} came.")
        self._attempt = attempt
        self._next_seq = seq + 1

    def _check_end(self, headers: dict[str, str]) -> None:
        code = headers.get(subjects.HEADER_ERROR)
        if code is not None:
            raise errors.by_code(code)(headers.get(subjects.HEADER_SERVICE_ERROR, code))
        frames = int(headers.get(subjects.HEADER_SEQ, self._next_seq))
        if frames != self._next_seq:
            raise StreamGap(f"The answer has {frames} frames; {self._next_seq} came.")
