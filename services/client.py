# ruff: noqa: TID251 - a client of the bus: it waits for frames and keeps their time
"""A request on the bus as a stream of frames, with gaps, second attempts and silence noticed.

    async with await Client.connect(url, tenant="acme", token=token) as client:
        async for frame in client.stream("smollm2", {"messages": [...]}):
            ...

Core NATS is at most once: a hop that dies before acceptance takes the request with it. The sign is that not even a
keep-alive comes; then, and only then, the request is sent again (`resend_after_s`). A cancel can be lost as well: it is
sent again when frames of its request still come.

An answer whose worker is lost ends with `WorkerLost`. With `resume=True` it goes on instead: the request is sent again
with the tokens that came so far, another worker takes them as part of the prompt, and the caller notices a pause. That
needs answers of which every token is known (see `_SoFar`).

Owns: one inbox.   Must not know: what answers.   Source: DESIGN sections 2 and 6."""

import asyncio
import contextlib
import secrets
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any

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
# Silence is not believed before sockets were read once more.
LATE_S = 0.05
# The server is asked for a sign of life this often.
PING_S = 0.25
# Cancelled requests whose end has not been heard yet; the oldest are given up.
CANCELS_KEPT = 1024
# A reader that is so far behind the answer is given up; the longest answers have about 2 MB of frames.
BUFFER_BYTES = 8 * 1024 * 1024
# What a waiting frame takes besides its body, about.
FRAME_OVERHEAD_BYTES = 1024
# Of one answer, without a token between them: the deadline bounds all others.
MAX_RESUMES = 3
# A field of bodies, ours: the caller may want to resume the answer, or does, after `{"token_ids": [...]}`.
RESUME_FIELD = "resume"
# A message for a stream, or why none will come.
Heard = Msg | errors.PrefixbusError


class Frame(msgspec.Struct, frozen=True):
    """One response message. `seq` is None for a keep-alive; `chunk` is the OpenAI chunk object. `headers` are the
    message's."""

    seq: int | None
    attempt: int
    chunk: dict[str, Any]
    headers: Mapping[str, str] = {}


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


class SlowReader(errors.PrefixbusError):
    """The answer came much faster than it was read."""

    code = "slow_reader"
    status = 408


class Client:
    """A tenant's connection. One inbox serves all its requests."""

    def __init__(self, tenant: str, scope: str) -> None:
        self._bus: Bus
        self._tenant = tenant
        self._scope = scope
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[str, _Call] = {}
        self._cancelled_at: dict[str, float] = {}
        self.resumed = 0
        """Answers that went on at another worker, or waited for one."""

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
        ping_s: float = PING_S,
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
                ping_s=ping_s,
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
            await client._bus.listen(f"{inbox}.s.*", client._hear)
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

    @property
    def connected(self) -> bool:
        """Whether the server is there and answers; what is sent meanwhile waits for it."""
        return self._bus.connected

    async def stream(
        self,
        model: str,
        body: dict[str, Any],
        *,
        request_id: str = "",
        scope: str | None = None,
        deadline_s: float = 120.0,
        prefix_class: str = "",
        traceparent: str = "",
        resend_after_s: float = RESEND_AFTER_S,
        resume: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> AsyncGenerator[Frame, None]:
        """The answer's frames in order, keep-alives included; ends after the last one.

        A stream left early is cancelled at the worker. With `resume` a lost worker is replaced where that is possible
        (`_SoFar`); frames are numbered on, under the first one's id. `scope` stands for the client's own.

        :raises PrefixbusError: the error that the stream ended with; StreamGap or Silence for one that never ended
        right; SlowReader for one of which more than `buffer_bytes` waited here.   :raises BusPermissionDenied: the
        token does not allow this tenant or scope."""
        request_id = request_id or secrets.token_hex(12)
        headers = {subjects.HEADER_DEADLINE: f"{time.time() + deadline_s:.3f}"}
        if prefix_class:
            headers[subjects.HEADER_PREFIX_CLASS] = prefix_class
        if traceparent:
            headers[subjects.HEADER_TRACEPARENT] = traceparent
        # An earlier request of that id is not meant any more.
        self._cancelled_at.pop(request_id, None)
        scope = self._scope if scope is None else scope
        call = _Call(
            subject=subjects.infer(self._tenant, model, scope),
            scope=scope,
            request_id=request_id,
            headers=headers,
            deadline=time.monotonic() + deadline_s,
            silence_s=min(resend_after_s, deadline_s),
            buffer_bytes=buffer_bytes,
        )
        so_far = _SoFar(body) if resume else None
        self._calls[request_id] = call
        ended = False
        try:
            while True:
                payload = orjson.dumps(body if so_far is None else so_far.body())
                try:
                    async with contextlib.aclosing(self._answer(call, payload)) as frames:
                        async for frame in frames:
                            yield frame if so_far is None else so_far.taken(frame)
                    ended = True
                    return
                except errors.PrefixbusError as exc:
                    ended = not isinstance(exc, StreamGap | Silence | SlowReader)
                    pause_s = None if so_far is None else so_far.goes_on_after(exc, time.monotonic())
                    if so_far is None or pause_s is None:
                        raise
                    if so_far.finished:
                        if (last := so_far.last_frame()) is not None:
                            yield last
                        return
                    if not ended:
                        self._give_up(call)
                    # A request of its own: a cancel of the one before, which may still be somewhere, does not mean it.
                    call.go_on()
                    self.resumed += 1
                    ended = False
                    await asyncio.sleep(pause_s)
        finally:
            if self._calls.get(request_id) is call:
                del self._calls[request_id]
            if not ended:
                self._give_up(call)

    async def cancel(self, request_id: str) -> None:
        """Stops a request of this tenant, wherever it is. Says nothing about whether there was one.

        :raises BusUnavailable: it could not be sent."""
        call = self._calls.get(request_id)
        self._cancel(request_id if call is None else call.label)

    def _give_up(self, call: "_Call") -> None:
        # Over a bus that is cut, the worker notices by itself that nobody listens.
        with contextlib.suppress(errors.BusUnavailable):
            self._cancel(call.label)

    def _cancel(self, request_id: str) -> None:
        self._bus.send(subjects.cancel(self._tenant, request_id))
        self._cancelled_at.pop(request_id, None)
        self._cancelled_at[request_id] = time.monotonic()
        if len(self._cancelled_at) > CANCELS_KEPT:
            del self._cancelled_at[next(iter(self._cancelled_at))]

    async def _answer(self, call: "_Call", payload: bytes) -> AsyncGenerator[Frame, None]:
        """Sends until it is heard of, and reads to the end."""
        sends = 0
        give_up_at = min(call.deadline, time.monotonic() + UNREACHABLE_FOR_S)
        while sends < MAX_SENDS:
            # A token of its own for each sending: late frames of the one before are not heard.
            token = secrets.token_hex(8)
            stream = self._streams[token] = _Stream(call)
            reader = _Reader(stream, call.silence_s, call.deadline)
            reply = f"{self._bus.inbox_prefix}.s.{token}"
            try:
                self._bus.send(call.subject, payload, reply=reply, headers=call.headers())
                async for frame in reader:
                    yield frame
                return
            except Silence:
                sends += 1
                if reader.heard_anything or time.monotonic() >= call.deadline:
                    raise
            except (errors.BusUnavailable, NobodyListens):
                # Nobody has it: it is sent again as soon as somebody could.
                if time.monotonic() >= give_up_at:
                    raise
                await asyncio.sleep(RETRY_EVERY_S)
            finally:
                self._streams.pop(token, None)
        raise Silence(
            f"No answer: sent {MAX_SENDS} times, and nothing came back within {call.silence_s:g} s.",
            remedy="See which process does not run: prefixbus status.",
        )

    def _hear(self, message: Msg) -> None:
        if self._cancelled_at:
            self._cancel_again(message.headers or {})
        stream = self._streams.get(message.subject.rsplit(".", 1)[1])
        if stream is not None and not stream.put(message):
            # Nobody knows when its reader will look again.
            self._give_up(stream.call)

    def _cancel_again(self, headers: dict[str, str]) -> None:
        request_id = headers.get(subjects.HEADER_REQUEST_ID, "")
        cancelled_at = self._cancelled_at.get(request_id)
        if cancelled_at is None:
            return
        if subjects.HEADER_FINAL in headers:
            del self._cancelled_at[request_id]
        elif time.monotonic() - cancelled_at >= CANCEL_AGAIN_S:
            with contextlib.suppress(errors.BusUnavailable):
                self._cancel(request_id)

    def _bus_event(self, kind: str, detail: str) -> None:
        """A request that the server denied would wait for frames that cannot come: tells those who wait for them.

        nats-py reports the subject in lower case: a neighbour that differs in case alone, and was not denied, is told
        too, which is the smaller evil."""
        if kind != "denied" or "publish to" not in detail:
            return
        for stream in self._streams.values():
            if f'"{stream.call.subject.lower()}"' in detail.lower():
                stream.fail(self._denial(stream.call.scope))

    def _denial(self, scope: str) -> errors.BusPermissionDenied:
        if scope:
            return errors.BusPermissionDenied(
                f"this token may not use scope {scope} of tenant {self._tenant}.",
                remedy="Name a scope that the credential lists.",
            )
        return errors.BusPermissionDenied(
            f"this token may not ask for tenant {self._tenant} as a whole.",
            remedy="Name a scope that the credential lists: --scope.",
        )


class _SoFar:
    """What has come of an answer that may be resumed, and how to ask for the rest.

    Frames carry the ids of the tokens that their text was made of, or the answer cannot be resumed: of several choices,
    with a grammar or a parser behind it, there is more to an answer than its tokens."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        options = body.get("stream_options")
        self._wants_usage = not isinstance(options, dict) or options.get("include_usage") is not False
        self._ids: list[int] = []
        self._is_known = True
        self._is_heard = False
        self._is_resumed = False
        self._in_vain = 0
        self._give_up_at = 0.0
        self._head: dict[str, Any] = {}
        self._prompt_tokens: int | None = None
        self._frames = 0
        self._has_usage = False
        self.finished = False

    def body(self) -> dict[str, Any]:
        return {**self._body, RESUME_FIELD: {"token_ids": self._ids} if self._ids else {}}

    def taken(self, frame: Frame) -> Frame:
        """The frame as the caller sees it."""
        chunk = frame.chunk
        self._is_heard = True
        if not self._head and frame.seq is not None:
            self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
            prompt_tokens = frame.headers.get(subjects.HEADER_PROMPT_TOKENS, "")
            self._prompt_tokens = int(prompt_tokens) if prompt_tokens.isdecimal() else None
        chunk.update(self._head)
        for choice in chunk["choices"]:
            self._follow(choice)
        self._has_usage = self._has_usage or bool(chunk.get("usage"))
        if frame.seq is None:
            return frame
        self._frames += 1
        return Frame(self._frames - 1, frame.attempt, chunk, frame.headers)

    def goes_on_after(self, error: errors.PrefixbusError, now: float) -> float | None:
        """In how many seconds the rest is to be asked for; None if the answer ends here."""
        is_broken = isinstance(error, errors.WorkerLost | StreamGap)
        if isinstance(error, Silence):
            is_broken = self._is_heard
        elif isinstance(error, errors.EngineFailed):
            is_broken = self._frames > 0
        if is_broken and (self.finished or (self._is_known and self._in_vain < MAX_RESUMES)):
            self._in_vain += 1
            self._is_resumed = True
            self._is_heard = False
            self._give_up_at = now + UNREACHABLE_FOR_S
            return 0.0
        # Those who would take the rest may be full, or not yet be there.
        if isinstance(error, errors.Unavailable) and error.retryable and self._is_resumed and now < self._give_up_at:
            return max(RETRY_EVERY_S, min(error.retry_after_s or 0.0, UNREACHABLE_FOR_S / 4))
        return None

    def last_frame(self) -> Frame | None:
        """Of a finished answer whose usage was lost; what of it came from a cache is not known."""
        if self._has_usage or not self._wants_usage or self._prompt_tokens is None:
            return None
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._ids),
            "total_tokens": self._prompt_tokens + len(self._ids),
        }
        return Frame(self._frames, 1, {**self._head, "choices": [], "usage": usage})

    def _follow(self, choice: dict[str, Any]) -> None:
        ids = choice.pop("token_ids", None)
        delta = choice.get("delta")
        says = choice.get("text") if delta is None else any(delta[name] for name in delta.keys() - {"role"})
        if says and ids is None:
            self._is_known = False
        if ids:
            self._ids += ids
            self._in_vain = 0
        self.finished = self.finished or bool(choice.get("finish_reason"))


class _Call:
    """One request of the caller's. On the bus it is one for each time that it is resumed, and is sent until it is
    heard of."""

    def __init__(
        self,
        *,
        subject: str,
        scope: str,
        request_id: str,
        headers: dict[str, str],
        deadline: float,
        silence_s: float,
        buffer_bytes: int,
    ) -> None:
        self.subject = subject
        self.scope = scope
        self.label = self._request_id = request_id
        self._headers = headers
        self._sendings = 0
        self._resumes = 0
        self.deadline = deadline
        self.silence_s = silence_s
        self.buffer_bytes = buffer_bytes

    def go_on(self) -> None:
        self._resumes += 1
        self._sendings = 0
        # Such a name may have 64 characters.
        self.label = f"{self._request_id[:60]}-r{self._resumes}"

    def headers(self) -> dict[str, str]:
        """Of the next sending."""
        self._sendings += 1
        return {
            **self._headers,
            subjects.HEADER_REQUEST_ID: self.label,
            subjects.HEADER_SENDING: str(self._sendings),
        }


class _Stream:
    """One sending that waits for its frames, and those that wait for its reader."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._room_bytes = call.buffer_bytes
        self._waiting: deque[Heard] = deque()
        self._news = asyncio.Event()
        self._is_over = False

    def put(self, message: Msg) -> bool:
        """Whether there was room; False is said once, and all that waited is dropped."""
        if self._is_over:
            return True
        self._room_bytes -= len(message.data) + FRAME_OVERHEAD_BYTES
        if self._room_bytes < 0:
            self._waiting.clear()
            self.fail(SlowReader())
            return False
        self._waiting.append(message)
        self._news.set()
        return True

    def fail(self, error: errors.PrefixbusError) -> None:
        self._is_over = True
        self._waiting.append(error)
        self._news.set()

    async def get(self, wait_s: float) -> Heard:
        """:raises TimeoutError: nothing came in this time."""
        if not self._waiting:
            self._news.clear()
            try:
                async with asyncio.timeout(max(wait_s, 0)):
                    await self._news.wait()
            except TimeoutError:
                # A process that was not run for that long is told the time before it reads what came meanwhile.
                await asyncio.sleep(LATE_S)
                if not self._waiting:
                    raise
        heard = self._waiting.popleft()
        if isinstance(heard, Msg):
            self._room_bytes += len(heard.data) + FRAME_OVERHEAD_BYTES
        return heard


class _Reader:
    """Frames of one sending, checked as they come."""

    def __init__(self, stream: _Stream, silence_s: float, deadline: float) -> None:
        self._stream = stream
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
            yield Frame(int(seq) if seq is not None else None, attempt, orjson.loads(message.data), headers)

    async def _next(self) -> Msg:
        wait = min(self._silence_s, self._deadline - time.monotonic())
        try:
            heard = await self._stream.get(wait)
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
            error = errors.by_code(code)(headers.get(subjects.HEADER_SERVICE_ERROR, code))
            if (retry_after := headers.get("Retry-After", "")).isdecimal():
                error.retry_after_s = float(retry_after)
            raise error
        frames = int(headers.get(subjects.HEADER_SEQ, self._next_seq))
        if frames != self._next_seq:
            raise StreamGap(f"The answer has {frames} frames; {self._next_seq} came.")
