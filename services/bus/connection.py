# ruff: noqa: TID251 - the one adapter between the project and nats-py
"""The bus: a NATS client that outlives what nats-py's does not.

What it deals with (facts/nats.md has the measurements):
- a fatal -ERR, or running out of attempts, closes nats-py's client for good: it is made anew, with its subscriptions;
- nothing is buffered across an outage (`pending_size=0`, and what was not yet written is dropped): late messages
would lie;
- a permission denial looks like silence: requests and acknowledged publishes to that subject fail with what was denied;
- ordered consumers and KV watches sleep 19 s after a server restart: `follow` uses a short idle heartbeat;
- an acknowledged publish may time out and yet be stored: it is retried under the same message id;
- header blocks are parsed before any callback sees them: over the limit they are replaced by one marker header;
- full client-side queues drop silently: counted, with all else that goes wrong, through `on_event`.

Owns: the client, subscriptions, pending requests.   Must not know: what messages mean."""

import asyncio
import contextlib
import functools
import secrets
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client, _validate_subject
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, NotFoundError
from nats.protocol.command import hpub_cmd, pub_cmd

from .errors import BusPermissionDenied, BusUnavailable, PrefixbusError, TooLarge, Unavailable

Callback = Callable[[Msg], Awaitable[None]]
Listener = Callable[[Msg], None]
Settled = Callable[[PrefixbusError | None], None]
"""Called once: with None when a message is stored, else with why it is not, or why nobody knows."""
Start = Literal["new", "all", "last"]

# Marks put in place of a header block that is not parsed; no block on the wire can hold such names.
OVERSIZED_HEADERS = "oversized\r\n"
MALFORMED_HEADERS = "malformed\r\n"
_RECONNECT_WAIT_S = 0.25
_IDLE_HEARTBEAT_S = 0.5
# The server is asked for a sign of life this often; after `_STALLED_AFTER` intervals without any it counts as gone, and
# after `_STALE_AFTER` the connection is given up. The first is shorter than any lease.
_PING_S = 0.25
_STALLED_AFTER = 3
_STALE_AFTER = 12
# Below the inbox: nats-py puts its own consumers' inboxes directly there, and would hand each of their messages twice.
_REPLIES = "r"
_TOKEN_BYTES = 8
_DELIVER: dict[str, DeliverPolicy] = {
    "new": DeliverPolicy.NEW,
    "all": DeliverPolicy.ALL,
    "last": DeliverPolicy.LAST_PER_SUBJECT,
}


class _Ack(msgspec.Struct):
    """A JetStream publish acknowledgement (NATS ADR-22), as far as it is used."""

    seq: int = 0
    error: dict[str, Any] | None = None


class StreamState(NamedTuple):
    """`made` names this life of the stream: one that is deleted and made anew begins at sequence 1 again."""

    made: str
    last_seq: int


class Stored(NamedTuple):
    """A message in a stream."""

    seq: int
    data: bytes


class WrongSequence(BusUnavailable):
    """Another writer was first: the subject's last sequence is not the expected one."""

    code = "wrong_sequence"
    status = 409
    retryable = False


class NoResponders(BusUnavailable):
    """The server says that nobody listens there: said at once, and nothing was waited for."""

    code = "no_responders"


class NotAdmitted(BusUnavailable):
    """The server does not take these credentials."""

    code = "not_admitted"
    status = 401
    retryable = False


_ack_decoder = msgspec.json.Decoder(_Ack)
_WRONG_LAST_SEQUENCE = 10071
# nats-server's -ERR to a CONNECT that it does not like, in lower case.
_REFUSAL = "authorization violation"


class _Client(Client):
    """nats-py's client with two limits it does not have, and two short cuts: what the read loop hands over at once, and
    what is sent without waiting. Uses and overrides private members; nats-py is pinned exactly."""

    max_header_bytes = 16 * 1024
    # The server has not answered for a while: what is sent now would arrive late, if at all.
    stalled = False

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._at_once: dict[int, Listener] = {}
        # Set by whatever the server sends; cleared by who watches for silence.
        self.heard = True

    def hand_over_at_once(self, sid: int, listener: "Listener") -> None:
        """Messages of this subscription skip nats-py's queue and task: `listener` is called by the read loop."""
        self._at_once[sid] = listener

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.heard = True
        listener = self._at_once.get(sid)
        try:
            if listener is None:
                await super()._process_msg(sid, subject, reply, data, headers)
                return
            parsed = await self._process_headers(headers) if headers else None
            listener(self._build_message(sid, subject, reply, data, parsed))
        except Exception as exc:
            # The read loop serves every subscription: one message or listener must not end it. nats-py would leave the
            # connection open and deaf.
            self._on_failure(exc)

    async def _process_pong(self) -> None:
        self.heard = True
        await super()._process_pong()

    def send(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        """`Client.publish` without its awaits, none of which can block: the flusher writes at the next turn of the
        loop."""
        _validate_subject(subject)
        if reply:
            _validate_subject(reply)
        if not self.is_connected or self.stalled:
            raise nats.errors.OutboundBufferLimitError
        if len(payload) > self._max_payload:
            raise nats.errors.MaxPayloadError
        if headers is None:
            command = pub_cmd(subject, reply, payload)
        else:
            lines = "".join(f"{name}: {_one_line(value)}\r\n" for name, value in headers.items())
            command = hpub_cmd(subject, reply, f"NATS/1.0\r\n{lines}\r\n".encode(), payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        if headers and len(headers) > self.max_header_bytes:
            return {OVERSIZED_HEADERS: str(len(headers))}
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError, ValueError) as exc:
            return {MALFORMED_HEADERS: str(exc)}
        return parsed

    def discard_unsent(self) -> None:
        """Drops what was handed over before the connection was lost and not written yet."""
        self._pending = []
        self._pending_data_size = 0


def _one_line(value: str) -> str:
    """A header value cannot smuggle in another header."""
    return value.replace("\r", " ").replace("\n", " ") if "\n" in value or "\r" in value else value


class _Pending(NamedTuple):
    """A request that waits for its reply, and who hears that, or why there is none."""

    subject: str
    heard: Callable[[Msg | PrefixbusError], None]
    timer: asyncio.TimerHandle


def _resolve(future: "asyncio.Future[Msg]", reply: Msg | PrefixbusError) -> None:
    if future.done():
        return  # who waited was cancelled, and has not run since
    if isinstance(reply, PrefixbusError):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _stored_at(subject: str, reply: Msg) -> int:
    """The sequence of an acknowledgement. :raises WrongSequence, BusUnavailable: it says that nothing is stored."""
    try:
        ack = _ack_decoder.decode(reply.data)
    except msgspec.MsgspecError as exc:
        raise BusUnavailable(f"{subject}: the acknowledgement cannot be read: {exc}") from exc
    if ack.error is not None:
        kind = WrongSequence if ack.error.get("err_code") == _WRONG_LAST_SEQUENCE else BusUnavailable
        raise kind(f"{subject}: {ack.error.get('description')}")
    if not ack.seq:
        raise BusUnavailable(f"{subject}: the acknowledgement is empty.")
    return ack.seq


class Subscription:
    """A subscription that survives its client."""

    def __init__(self, open_: Callable[[], Awaitable[NatsSubscription]]) -> None:
        self._open = open_
        self._current: NatsSubscription | None = None
        self.ended = False

    async def start(self) -> None:
        """:raises BusUnavailable: the client cannot subscribe now."""
        try:
            self._current = await self._open()
        except (nats.errors.Error, APIError, OSError, TimeoutError) as exc:
            raise BusUnavailable(f"a subscription cannot be made: {exc or type(exc).__name__}") from exc

    async def drain(self) -> None:
        """Takes no new messages; returns when those already here have been handed to the callback."""
        self.ended = True
        if self._current is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._current.drain()

    async def unsubscribe(self) -> None:
        self.ended = True
        if self._current is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._current.unsubscribe()


async def _never_called(message: Msg) -> None:
    """nats-py makes a subscription asynchronous by its callback; the read loop hands its messages over before that."""


class Bus:
    """One connection to NATS. Make it with `Bus.connect`."""

    def __init__(
        self,
        options: dict[str, Any],
        inbox_prefix: str,
        max_header_bytes: int,
        on_event: Callable[[str, str], None],
    ) -> None:
        self._options = options
        self._inbox = inbox_prefix
        self._max_header_bytes = max_header_bytes
        self._on_event = on_event
        self._nc = self._new_client()
        self._subscriptions: list[Subscription] = []
        self._pending: dict[str, _Pending] = {}
        # The latest denials, in lower case as nats-py reports them.
        self._denied: deque[str] = deque(maxlen=16)
        self._closing = False
        self._reviving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.on_connection_change: list[Callable[[bool], None]] = []
        self.on_new_client: list[Callable[[Client], Awaitable[None]]] = []

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str,
        nkey_seed: bytes | None = None,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        connect_timeout_s: float = 5.0,
        max_header_bytes: int = 16 * 1024,
        echo: bool = True,
        ping_s: float = _PING_S,
        on_event: Callable[[str, str], None] = lambda kind, detail: None,
    ) -> "Bus":
        """A connected bus. Without `echo` its own messages do not come back to it. The server is asked for a sign of
        life each `ping_s` and counts as gone after three of them without one. `on_event(kind, detail)` hears: denied,
        slow_consumer, stalled, disconnected, reconnected, recreated, error.

        :raises NotAdmitted: the server does not take these credentials; said at once, without another try.
        :raises BusUnavailable: no server within the time."""
        options: dict[str, Any] = {
            "servers": [url],
            "name": name,
            "inbox_prefix": inbox_prefix,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": _RECONNECT_WAIT_S,
            "connect_timeout": connect_timeout_s,
            "ping_interval": ping_s,
            "max_outstanding_pings": _STALE_AFTER,
            "pending_size": 0,
            "no_echo": not echo,
        }
        if nkey_seed is not None:
            options["nkeys_seed_str"] = nkey_seed.decode("ascii")
        if user:
            options["user"] = user
            options["password"] = password
        if tls is not None:
            options["tls"] = tls
        bus = cls(options, inbox_prefix, max_header_bytes, on_event)
        await bus._open_client()
        bus._watching = asyncio.create_task(bus._watch_for_silence())
        return bus

    @property
    def connected(self) -> bool:
        """Whether the server is there and answers."""
        return self._nc.is_connected and not self._nc.stalled

    @property
    def inbox_prefix(self) -> str:
        return self._inbox

    @property
    def client(self) -> Client:
        """nats-py's own client, for what the bus does not wrap (nats.micro, provisioning)."""
        return self._nc

    @property
    def jetstream(self) -> JetStreamContext:
        return self._nc.jetstream()

    async def publish(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """`send`, for where a coroutine is wanted."""
        self.send(subject, payload, reply=reply, headers=headers)

    def send(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """At most once, to whoever listens now; written at the next turn of the loop.

        :raises BusUnavailable: not connected; nothing was sent.   :raises TooLarge: over the server's max_payload."""
        try:
            self._nc.send(subject, payload, reply, headers)
        except nats.errors.MaxPayloadError as exc:
            raise TooLarge(f"{len(payload)} bytes are over the bus's limit of {self._nc.max_payload}.") from exc
        except nats.errors.Error as exc:
            raise BusUnavailable(f"publish to {subject}: {exc or type(exc).__name__}") from exc

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns when the server has seen everything published before. :raises BusUnavailable: it did not answer."""
        try:
            # nats-py writes the PING ahead of what still waits to be written: only the second one comes after it.
            await self._nc.flush(timeout=timeout_s)  # type: ignore[arg-type]  # nats-py says int, takes float
            await self._nc.flush(timeout=timeout_s)  # type: ignore[arg-type]
        except (nats.errors.Error, ConnectionError) as exc:
            raise BusUnavailable(f"flush: {exc or type(exc).__name__}") from exc

    async def request(
        self, subject: str, payload: bytes = b"", *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """The first reply.

        :raises NoResponders: just that.   :raises BusUnavailable: no reply in time, or not connected.
        :raises BusPermissionDenied: this connection may not publish there."""
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        token = self._ask(subject, payload, functools.partial(_resolve, future), timeout_s, headers)
        try:
            return await future
        except asyncio.CancelledError:
            self._settle(token, BusUnavailable("nobody waits for it any more"))
            raise

    async def publish_acked(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str = "",
        expect_last_seq: int | None = None,
        timeout_s: float = 5.0,
        attempts: int = 3,
        headers: dict[str, str] | None = None,
    ) -> int:
        """The stream sequence under which the message is stored, once it is.

        With `msg_id`, silence and a missing stream leader are retried under that id, so it is stored once.
        `expect_last_seq` is the subject's last sequence (0: it must have none).

        :raises WrongSequence: another writer was first.   :raises BusUnavailable: not acknowledged; it may yet be
        stored."""
        sent = dict(headers or {})
        if msg_id:
            sent["Nats-Msg-Id"] = msg_id
        if expect_last_seq is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expect_last_seq)
        for attempt in range(attempts if msg_id else 1):
            if attempt:
                await asyncio.sleep(min(0.1 * 2**attempt, 1.0))
            try:
                reply = await self.request(subject, payload, timeout_s=timeout_s, headers=sent)
                break
            except BusUnavailable as exc:
                failure = exc
        else:
            raise failure
        return _stored_at(subject, reply)

    def store(self, subject: str, payload: bytes, settled: Settled, *, timeout_s: float, msg_id: str = "") -> None:
        """`publish_acked`, tried once, for where no task waits: `settled` is called when it is over, in the read loop
        or, if nothing was sent, before this returns."""

        def heard(reply: Msg | PrefixbusError) -> None:
            failure: PrefixbusError | None = None
            if isinstance(reply, PrefixbusError):
                failure = reply
            else:
                try:
                    _stored_at(subject, reply)
                except PrefixbusError as exc:
                    failure = exc
            settled(failure)

        try:
            self._ask(subject, payload, heard, timeout_s, {"Nats-Msg-Id": msg_id} if msg_id else None)
        except PrefixbusError as exc:
            settled(exc)

    async def check_streams(self, names: Sequence[str]) -> None:
        """Returns when all these streams are there.

        :raises Unavailable: one is not; the error names it.   :raises BusUnavailable: JetStream did not answer."""
        for name in names:
            try:
                await self.jetstream.stream_info(name)
            except NotFoundError as exc:
                raise Unavailable("is missing.", field=f"stream {name}", remedy="Run `prefixbus provision`.") from exc
            except (APIError, nats.errors.Error, TimeoutError) as exc:
                raise BusUnavailable(f"stream {name}: {exc or type(exc).__name__}") from exc

    async def stream_state(self, name: str) -> StreamState:
        """:raises BusUnavailable: there is no such stream, or JetStream did not answer."""
        try:
            info = await self.jetstream.stream_info(name)
        except (APIError, nats.errors.Error, TimeoutError) as exc:
            raise BusUnavailable(f"stream {name}: {exc or type(exc).__name__}") from exc
        return StreamState(str(info.created), info.state.last_seq)

    async def stored(
        self, stream: str, subject: str, *, from_seq: int | None = None, timeout_s: float = 5.0
    ) -> Stored | None:
        """The last message of `subject` (wildcards may stand in it) in a stream that allows direct gets, or the first
        from a sequence on; None if there is none.

        :raises BusUnavailable: JetStream did not answer.   :raises BusPermissionDenied: reading it is not allowed."""
        asked = {"last_by_subj": subject} if from_seq is None else {"next_by_subj": subject, "seq": from_seq}
        reply = await self.request(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(asked), timeout_s=timeout_s)
        headers = reply.headers or {}
        if headers.get("Status") == "404":
            return None
        if "Nats-Sequence" not in headers:
            raise BusUnavailable(f"stream {stream}: {headers.get('Description') or 'the answer cannot be read'}")
        return Stored(int(headers["Nats-Sequence"]), reply.data)

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> Subscription:
        """Calls `callback` for each message, one after another; a callback that waits holds up the next."""

        async def open_() -> NatsSubscription:
            return await self._nc.subscribe(
                subject, queue=queue, cb=callback, pending_msgs_limit=65536, pending_bytes_limit=256 * 1024 * 1024
            )

        return await self._add(subject, Subscription(open_))

    async def listen(self, subject: str, listener: Listener, *, queue: str = "") -> Subscription:
        """Calls `listener` in the read loop itself, in order: for work of microseconds; other messages wait
        meanwhile."""

        async def late(message: Msg) -> None:
            listener(message)

        async def open_() -> NatsSubscription:
            client = self._nc
            subscription = await client.subscribe(subject, queue=queue, cb=late)
            client.hand_over_at_once(subscription._id, listener)
            return subscription

        return await self._add(subject, Subscription(open_))

    async def follow(
        self, stream: str, subject: str, callback: Callback, *, start: Start, after_seq: int = 0
    ) -> Subscription:
        """Every message of `subject` in `stream`, in order and without gaps, from `start` or after a stream sequence.

        When the client has to be made anew, it goes on after the last message handed over."""
        last_seen = after_seq

        async def deliver(message: Msg) -> None:
            nonlocal last_seen
            last_seen = message.metadata.sequence.stream
            await callback(message)

        async def open_() -> NatsSubscription:
            config = ConsumerConfig()
            if last_seen:
                config.opt_start_seq = last_seen + 1
                policy = DeliverPolicy.BY_START_SEQUENCE
            else:
                policy = _DELIVER[start]
            return await self.jetstream.subscribe(
                subject,
                stream=stream,
                cb=deliver,
                config=config,
                deliver_policy=policy,
                ordered_consumer=True,
                idle_heartbeat=_IDLE_HEARTBEAT_S,
            )

        return await self._add(subject, Subscription(open_))

    async def close(self) -> None:
        self._closing = True
        for task in (self._reviving, self._watching):
            if task is not None:
                task.cancel()
        with contextlib.suppress(nats.errors.Error, ConnectionError, TimeoutError):
            await self._nc.flush(timeout=1)
        # Of a connection that the server has dropped in this instant nats-py lets the loss through; it is closed then.
        with contextlib.suppress(ConnectionError):
            await self._nc.close()

    def __repr__(self) -> str:
        state = "connected" if self.connected else "cut off"
        return f"<Bus {self._options['name']} {state}, {len(self._subscriptions)} subscriptions>"

    def _new_client(self) -> _Client:
        client = _Client(lambda exc: self._on_event("error", f"a listener failed: {exc!r}"))
        client.max_header_bytes = self._max_header_bytes
        return client

    async def _add(self, subject: str, subscription: Subscription) -> Subscription:
        """:raises BusPermissionDenied: this connection may not listen there; nats-py would leave it silent for ever."""
        self._denied.clear()
        try:
            await subscription.start()
            await self.flush()
        except BusUnavailable:
            # It may be there all the same; whoever tries again would hear everything twice.
            await subscription.unsubscribe()
            self._raise_if_denied(subject)
            raise
        self._raise_if_denied(subject)
        self._subscriptions = [*(each for each in self._subscriptions if not each.ended), subscription]
        return subscription

    def _raise_if_denied(self, subject: str) -> None:
        """What was denied since `_denied` was cleared: the subscription itself, or the making of its consumer."""
        for text in self._denied:
            if ("subscription" in text and f'"{subject.lower()}"' in text) or '"$js.api.consumer.' in text:
                raise BusPermissionDenied(f"listening on {subject} is not allowed ({text}).")

    async def _open_client(self) -> None:
        client = self._new_client()

        async def disconnected() -> None:
            client.discard_unsent()
            client.stalled = False
            if not self._closing:
                self._on_event("disconnected", "")
                self._tell(False)

        async def reconnected() -> None:
            self._on_event("reconnected", "")
            self._tell(True)

        async def closed() -> None:
            if not self._closing and client is self._nc and self._reviving is None:
                self._tell(False)
                self._reviving = asyncio.create_task(self._revive())

        last_error = ""
        is_connecting = True

        async def failed(error: Exception) -> None:
            nonlocal last_error
            if is_connecting and _REFUSAL in str(error).lower():
                # Raised through nats-py's connect, which would show the same credentials again until the time is over.
                raise NotAdmitted(f"{self._options['servers'][0]} does not take these credentials ({error}).")
            # A server that refuses us also drops the connection: the refusal says more.
            if not last_error or isinstance(error, nats.errors.Error):
                last_error = str(error) or type(error).__name__
            self._heard_error(error)

        connecting = client.connect(
            **self._options, error_cb=failed, disconnected_cb=disconnected, reconnected_cb=reconnected, closed_cb=closed
        )
        try:
            # nats-py would try for ever; a first connection that cannot be made should say so.
            await asyncio.wait_for(connecting, self._options["connect_timeout"])
        except NotAdmitted:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()
            raise
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()
            reason = last_error or str(exc) or type(exc).__name__
            raise BusUnavailable(
                f"cannot connect to {self._options['servers'][0]}: {reason}.",
                remedy="Look whether NATS runs there (`prefixbus up` starts it), or name its URL with --nats.",
            ) from exc
        is_connecting = False
        self._nc = client
        replies = await client.subscribe(f"{self._inbox}.{_REPLIES}.*", cb=_never_called)
        client.hand_over_at_once(replies._id, self._reply)
        for hook in self.on_new_client:
            await hook(client)

    async def _watch_for_silence(self) -> None:
        """A server that is stopped keeps its sockets open, and takes what is written into them until they are full.

        Counted in our own turns, so that a pause of our own is not taken for one of the server's."""
        silent = 0
        while True:
            await asyncio.sleep(self._options["ping_interval"])
            client = self._nc
            silent = 0 if client.heard or not client.is_connected else silent + 1
            client.heard = False
            if silent >= _STALLED_AFTER and not client.stalled:
                client.stalled = True
                self._on_event("stalled", "the server does not answer")
                self._tell(False)
            elif silent == 0 and client.stalled:
                client.stalled = False
                if client.is_connected:
                    self._on_event("reconnected", "the server answers again")
                    self._tell(True)

    async def _revive(self) -> None:
        """Makes a new client, with all subscriptions, after nats-py has given up on the old one.

        A client that is not whole is closed again: what it has would be heard twice after the next try."""
        delay = _RECONNECT_WAIT_S
        while not self._closing:
            try:
                await self._open_client()
                self._subscriptions = [each for each in self._subscriptions if not each.ended]
                for subscription in self._subscriptions:
                    await subscription.start()
                if not self._nc.is_closed:
                    break
            except (BusUnavailable, nats.errors.Error, OSError, TimeoutError) as exc:
                self._on_event("error", f"making the connection anew: {exc or type(exc).__name__}")
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._nc.close()
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)
        self._reviving = None
        self._on_event("recreated", "")
        self._tell(True)

    def _tell(self, connected: bool) -> None:
        for listener in self.on_connection_change:
            listener(connected)

    def _ask(
        self,
        subject: str,
        payload: bytes,
        heard: Callable[[Msg | PrefixbusError], None],
        timeout_s: float,
        headers: dict[str, str] | None,
    ) -> str:
        """Sends it; `heard` is called once, later. The token by which its reply is known.

        :raises BusUnavailable, TooLarge: it was not sent."""
        # Who may answer somebody here may write into all of the inbox: an answer is known by its address alone.
        token = secrets.token_hex(_TOKEN_BYTES)
        self.send(subject, payload, reply=f"{self._inbox}.{_REPLIES}.{token}", headers=headers)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, token, timeout_s)
        self._pending[token] = _Pending(subject, heard, timer)
        return token

    def _reply(self, message: Msg) -> None:
        token = message.subject.rsplit(".", 1)[1]
        pending = self._pending.get(token)
        if pending is not None:
            is_nobody = message.headers and message.headers.get("Status") == "503"
            self._settle(token, NoResponders(f"nobody listens on {pending.subject}") if is_nobody else message)

    def _time_out(self, token: str, timeout_s: float) -> None:
        self._settle(token, BusUnavailable(f"no reply on {self._pending[token].subject} within {timeout_s} s"))

    def _settle(self, token: str, reply: Msg | PrefixbusError) -> None:
        """An answer that comes twice, or late, is nobody's."""
        pending = self._pending.pop(token, None)
        if pending is not None:
            pending.timer.cancel()
            pending.heard(reply)

    def _heard_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if isinstance(error, nats.errors.SlowConsumerError):
            self._on_event("slow_consumer", str(error.subject))
            return
        lowered = text.lower()
        if "permissions violation" not in lowered:
            self._on_event("error", text)
            return
        self._on_event("denied", text)
        self._denied.append(lowered)
        # nats: permissions violation for publish to "the.subject"
        denied = text.split('"')[1] if text.count('"') >= 2 else ""
        if "publish" in lowered:
            for token, pending in list(self._pending.items()):
                # nats-py lower-cases the server's text
                if pending.subject.lower() == denied.lower():
                    self._settle(token, BusPermissionDenied(f"publish to {pending.subject} is not allowed."))
