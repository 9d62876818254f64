# ruff: noqa: TID251 - a shell: it connects, waits and closes
"""Connections to the bus, one for each API key in use, made with that key: what its owner may do is what the bus lets
this connection do, and the gateway itself may do nothing.

    a key seen before      its connection, at once
    a new key              connects, beside few others; who else shows it meanwhile waits for the same connection
    a wrong key            is known as wrong for a while, by a digest, and costs nothing until then
    a connection cut off   is left to those who use it (it comes back by itself); the next request makes another, since
                           the key may have been taken back
    idle                   closed after `idle_s`; sooner, oldest first, when there are too many

Owns: connections, and which keys were wrong.   Must not know: HTTP, what is asked."""

import asyncio
import contextlib
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.abc

from ..bus.clock import Clock
from ..bus.connection import NotAdmitted
from ..bus.errors import BusPermissionDenied, BusUnavailable, Overloaded, PrefixbusError
from ..client import Client
from .keys import ApiKey, InvalidKey

# How long a key that was wrong is taken for wrong: a credential that is made meanwhile works a little later.
DENIED_FOR_S = 5.0
DENIED_KEPT = 16_384
# New keys whose connections are made at once, and that may wait for that. A connection takes some milliseconds.
CONNECTING = 8
WAITING = 256
# Without an answer from the callout the server refuses after 2 s (cluster/natsconf.py), in the same words as a wrong
# key: what takes longer than this is no verdict.
VERDICT_WITHIN_S = 1.5
TEND_EVERY_S = 1.0
# Of each connection; there may be hundreds, most of them idle.
PING_S = 1.0


class TooManyRequests(PrefixbusError):
    """Too many requests of this key are in progress."""

    code = "rate_limit_exceeded"
    status = 429
    retryable = True
    retry_after_s = 1.0


class _Entry:
    """One key's connection, from the moment that somebody asks for it."""

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.client: Client | None = None
        self.error: PrefixbusError | None = None
        self.settled = asyncio.Event()
        self.users = 0
        self.idle_since = now
        self.retired = False

    def __repr__(self) -> str:
        return f"<_Entry {self.key!r} {'connected' if self.client else 'connecting'}, {self.users} users>"


class Pool:
    """`most` connections at most, `most_of_tenant` of them one tenant's, each for `most_users` requests at once."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext | None,
        *,
        clock: Clock,
        tasks: anyio.abc.TaskGroup,
        secret: bytes,
        most: int,
        most_users: int,
        idle_s: float,
        on_result: Callable[[str], None] = lambda result: None,
    ) -> None:
        self._url = url
        self._tls = tls
        self._clock = clock
        self._tasks = tasks
        self._secret = secret
        self._most = most
        self._most_of_tenant = max(1, most // 4)
        self._most_users = most_users
        self._idle_s = idle_s
        self._on_result = on_result
        self._entries: dict[bytes, _Entry] = {}
        self._retired: set[_Entry] = set()
        self._denied: OrderedDict[bytes, float] = OrderedDict()
        self._turns = asyncio.Semaphore(CONNECTING)
        self._waiting = 0
        self._resumed_before = 0
        self._tending = anyio.CancelScope()

    def __repr__(self) -> str:
        return f"<Pool {len(self._entries)} keys, {len(self._retired)} on their way out, {len(self._denied)} denied>"

    @property
    def connections(self) -> int:
        return sum(entry.client is not None for entry in (*self._entries.values(), *self._retired))

    @property
    def resumed(self) -> int:
        """Answers that went on at another worker, ever."""
        live = (entry.client for entry in (*self._entries.values(), *self._retired))
        return self._resumed_before + sum(client.resumed for client in live if client is not None)

    @contextlib.asynccontextmanager
    async def client(self, key: ApiKey) -> AsyncIterator[Client]:
        """The connection of this key, for one request.

        :raises InvalidKey: the bus does not take it.   :raises TooManyRequests: of this key, or of its tenant's.
        :raises Overloaded: too many connections, or too many in the making.   :raises BusUnavailable: no bus."""
        entry = self._entry(key)
        if entry.users >= self._most_users:
            raise TooManyRequests
        entry.users += 1
        try:
            await entry.settled.wait()
            if entry.error is not None:
                # One exception each: a traceback is the raiser's own.
                raise type(entry.error)(entry.error.message, remedy=entry.error.remedy)
            assert entry.client is not None
            yield entry.client
        finally:
            entry.users -= 1
            entry.idle_since = self._clock.now()
            if entry.retired and not entry.users:
                self._close(entry)

    async def tend(self) -> None:
        """Closes what is idle or cut off, until `close`."""
        with self._tending:
            while True:
                await asyncio.sleep(TEND_EVERY_S)
                now = self._clock.now()
                for digest, entry in list(self._entries.items()):
                    is_idle = not entry.users and now - entry.idle_since >= self._idle_s
                    if entry.client is not None and (is_idle or not entry.client.connected):
                        self._retire(digest)

    def close(self) -> None:
        """Nobody asks any more: everything is closed, by tasks."""
        self._tending.cancel()
        for digest in list(self._entries):
            self._retire(digest)

    def _entry(self, key: ApiKey) -> _Entry:
        digest, now = key.digest(self._secret), self._clock.now()
        if self._denied.get(digest, 0.0) > now:
            self._on_result("denied_again")
            raise InvalidKey
        entry = self._entries.get(digest)
        if entry is not None and entry.client is not None and not entry.client.connected:
            self._retire(digest)
            entry = None
        if entry is None:
            if self._waiting >= WAITING:
                self._on_result("refused")
                raise _full("Too many new keys at once.")
            entry = self._entries[digest] = _Entry(key, now)
            self._tasks.start_soon(self._connect, digest, entry)
        return entry

    async def _connect(self, digest: bytes, entry: _Entry) -> None:
        """Makes the connection, or says why there is none; whoever asked for it may be gone by then."""
        self._waiting += 1
        try:
            async with self._turns:
                entry.client = await self._connected(digest, entry.key)
            if entry.retired:
                raise _going_away()
            self._make_room(digest)
            self._on_result("connected")
        except PrefixbusError as exc:
            entry.error = exc
            self._on_result("denied" if isinstance(exc, InvalidKey) else "failed")
        finally:
            self._waiting -= 1
            if entry.client is None:
                entry.error = entry.error or _going_away()
            if entry.error is not None:
                if self._entries.get(digest) is entry:
                    self._retire(digest)
                else:
                    self._close(entry)
            entry.settled.set()

    async def _connected(self, digest: bytes, key: ApiKey) -> Client:
        began = self._clock.now()
        try:
            return await Client.connect(
                self._url, tenant=key.tenant, token=key.token, label=key.label, tls=self._tls, ping_s=PING_S
            )
        except (NotAdmitted, BusPermissionDenied) as exc:
            if self._clock.now() - began > VERDICT_WITHIN_S:
                raise BusUnavailable("API keys cannot be checked now.") from exc
            self._deny(digest)
            raise InvalidKey from exc

    def _deny(self, digest: bytes) -> None:
        self._denied[digest] = self._clock.now() + DENIED_FOR_S
        self._denied.move_to_end(digest)
        if len(self._denied) > DENIED_KEPT:
            self._denied.popitem(last=False)

    def _make_room(self, newest: bytes) -> None:
        """Only keys that were right count: with wrong ones nobody can push others out.

        :raises TooManyRequests, Overloaded: everything is in use; the newest goes."""
        tenant = self._entries[newest].key.tenant
        right = {digest: entry for digest, entry in self._entries.items() if entry.client is not None}
        of_tenant = {digest: entry for digest, entry in right.items() if entry.key.tenant == tenant}
        for among, most in ((of_tenant, self._most_of_tenant), (right, self._most)):
            if len(among) <= most:
                continue
            idle = [digest for digest, entry in among.items() if not entry.users and digest != newest]
            if idle:
                self._retire(min(idle, key=lambda digest: among[digest].idle_since))
            elif among is of_tenant:
                raise TooManyRequests("Too many keys of this tenant are in use.")
            else:
                raise _full("Too many keys are in use.")

    def _retire(self, digest: bytes) -> None:
        """No new request gets it; it is closed when the last one that has it is over."""
        entry = self._entries.pop(digest)
        entry.retired = True
        if entry.client is not None:
            self._retired.add(entry)
        if not entry.users:
            self._close(entry)

    def _close(self, entry: _Entry) -> None:
        self._retired.discard(entry)
        if entry.client is not None:
            self._resumed_before += entry.client.resumed
            self._tasks.start_soon(entry.client.close)


def _going_away() -> BusUnavailable:
    return BusUnavailable("The gateway is going away.")


def _full(what: str) -> Overloaded:
    error = Overloaded(what)
    error.retry_after_s = 1.0
    return error
