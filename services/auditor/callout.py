"""The process that NATS asks who may connect (auth callout), the only holder of the issuer seed.

A request is sealed for our curve key and signed by the server; the answer is signed by the issuer and sealed for the
server. Copies share the work through a queue group. Whatever goes wrong, the answer is no: a request that cannot even
be read gets none, and the server refuses the client after its own timeout. The tenants file is read again when it
changes; one that cannot be read denies everybody until it can.

Owns: counting, the file's freshness.   Must not know: services, requests for tokens, what tenants do later."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from ..bus import secretfile
from ..bus.clock import Clock
from ..bus.errors import PrefixbusError
from . import jwt, xkey
from .jwt import AuthRequest, Issuer
from .tenants import Grant, Tenants
from .tenants import parse as parse_tenants

SUBJECT = "$SYS.REQ.USER.AUTH"
QUEUE = "callout"
ACCOUNT = "APP"
_SERVER_XKEY_HEADER = "Nats-Server-Xkey"
# One sentence for every reason: it tells nobody whether a tenant exists.
_REFUSAL = "unknown tenant or wrong token"


class Message(Protocol):
    """What is read of a NATS message."""

    data: bytes
    reply: str

    @property
    def headers(self) -> dict[str, str] | None: ...


class Transport(Protocol):
    """What is used of the bus."""

    async def publish(self, subject: str, payload: bytes = b"") -> None: ...

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]], *, queue: str = "") -> Any: ...


class TenantsOnDisk:
    """The tenants file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int, int] | None = None
        self._tenants: Tenants | None = None

    def current(self) -> Tenants:
        """The tenants as the file has them now.

        :raises ConfigInvalid: the file cannot be read or is not valid; it is tried again at the next call.
        :raises OSError: the file is gone."""
        status = self._path.stat()
        version = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
        if self._tenants is None or version != self._seen:
            self._tenants = None
            self._tenants = Tenants(parse_tenants(secretfile.read(self._path), self._path.name))
            self._seen = version
        return self._tenants


class Callout:
    """Answers authorization requests.

    `on_result` hears `allowed`, `denied` (a wrong credential) or `failed` (we could not tell, and denied) for each
    request. `entropy(n)` gives n random bytes."""

    def __init__(
        self,
        *,
        issuer: Issuer,
        xkey_seed: str,
        tenants: TenantsOnDisk,
        clock: Clock,
        entropy: Callable[[int], bytes],
        user_ttl_s: float = jwt.USER_TTL_S,
        on_result: Callable[[str], None] = lambda result: None,
    ) -> None:
        self._issuer = issuer
        self._xkey_seed = xkey_seed
        self._tenants = tenants
        self._clock = clock
        self._entropy = entropy
        self._user_ttl_s = user_ttl_s
        self._on_result = on_result
        self._log = logging.getLogger("callout")
        self.counts = {"allowed": 0, "denied": 0, "failed": 0}

    def answer(self, data: bytes, server_xkey: str) -> bytes | None:
        """The sealed response to a sealed request; None when the request cannot be read, which refuses it too."""
        now = self._clock.wall()
        try:
            # Without the header the request came in the clear: not from a server that has our configuration.
            request = jwt.parse_request(xkey.unseal(self._xkey_seed, server_xkey, data), now)
            if request.server.xkey != server_xkey:
                raise jwt.BadToken("the server's curve key is not the one that it names.")
        except PrefixbusError as exc:
            self._count("failed", f"an authorization request was not readable: {exc.code}: {exc.message}")
            return None
        response = self._decide(request, now)
        return xkey.seal(self._xkey_seed, server_xkey, response.encode(), self._entropy(xkey.NONCE_BYTES))

    def not_ready_because(self) -> str:
        """Why every tenant is refused now; empty when it is not so."""
        try:
            self._tenants.current()
        except (PrefixbusError, OSError) as exc:
            return f"tenants file: {exc}"
        return ""

    def failed_unforeseen(self, kind: str) -> None:
        """Counts a request that ended in an error of this kind."""
        self._count("failed", f"an authorization request failed: {kind}")

    def _decide(self, request: AuthRequest, now: float) -> str:
        options = request.options
        try:
            grant: Grant | None = self._tenants.current().verify(options.user, options.password, now)
        except (PrefixbusError, OSError) as exc:
            self._count("failed", f"everybody is refused: {exc}")
            return jwt.deny(self._issuer, request, "the tenants file cannot be read", now)
        if grant is None:
            self._count("denied", f"refused a client from {request.client.host}")
            return jwt.deny(self._issuer, request, _REFUSAL, now)
        self._count("allowed", "")
        return jwt.allow(self._issuer, request, grant, ACCOUNT, self._user_ttl_s, now)

    def _count(self, result: str, line: str) -> None:
        self.counts[result] += 1
        self._on_result(result)
        if line:
            # Neither the name nor the token that was shown: people put tokens into the name's field by mistake.
            self._log.log(logging.ERROR if result == "failed" else logging.INFO, "%s", line)

    def __repr__(self) -> str:
        return f"<Callout {self.counts}>"


async def serve(bus: Transport, callout: Callout) -> Any:
    """Answers every authorization request that this copy gets; the subscription, to drain at the end."""

    async def handle(message: Message) -> None:
        try:
            sealed = callout.answer(message.data, (message.headers or {}).get(_SERVER_XKEY_HEADER, ""))
            if sealed is not None:
                await bus.publish(message.reply, sealed)
        except Exception as exc:
            # The edge: one request that nobody foresaw must not end the service. Its client is refused by the server's
            # timeout. Only the kind of error is logged: its text may hold parts of the request.
            callout.failed_unforeseen(type(exc).__name__)

    return await bus.subscribe(SUBJECT, handle, queue=QUEUE)
