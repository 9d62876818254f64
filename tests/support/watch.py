"""A second listener at a client's inboxes, which sees all that a client that reads one answer would pass over.

Rules of an inbox (one sending of one request each): nothing comes after its end, so there is no second end; chunks are
of one attempt, and none comes twice. A frame that this listener missed while the bus was away breaks no rule.

While it watches, the server sees a listener at these inboxes: that this client vanished, nobody would notice."""

import secrets
from collections.abc import Mapping
from typing import Self

import msgspec
from nats.aio.msg import Msg

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus
from prefixbus.client import Client


class Inbox(msgspec.Struct):
    """What was seen of one sending: the attempt whose chunks came (0: none yet), the last chunk, its end."""

    request_id: str = ""
    attempt: int = 0
    seq: int = -1
    has_ended: bool = False


class Rules:
    """`heard` takes every frame in order; `broken` says which rules were broken, and by what.

    `keepalives_may_be_late`: whoever believes that a request waits keeps its client company. Where messages get lost
    that may be somebody who has not heard of its end, and a client that is not this one is gone by then."""

    def __init__(self) -> None:
        self.keepalives_may_be_late = False
        self.inboxes: dict[str, Inbox] = {}
        self.broken: list[str] = []

    def heard(self, subject: str, headers: Mapping[str, str]) -> None:
        if "Status" in headers:
            return  # the server's word that nobody took the request
        inbox = self.inboxes.setdefault(subject, Inbox())
        inbox.request_id = headers.get(subjects.HEADER_REQUEST_ID, "")
        is_keepalive = subjects.HEADER_FINAL not in headers and subjects.HEADER_SEQ not in headers
        if inbox.has_ended and not (is_keepalive and self.keepalives_may_be_late):
            what = "a second end" if subjects.HEADER_FINAL in headers else "a frame after the end"
            self._break(inbox, f"{what}: {dict(headers)}")
        if subjects.HEADER_FINAL in headers:
            inbox.has_ended = True
        elif subjects.HEADER_SEQ in headers:
            self._chunk(inbox, int(headers[subjects.HEADER_SEQ]), int(headers[subjects.HEADER_ATTEMPT]))

    def attempts_of(self, request_id: str) -> set[int]:
        """The attempts whose chunks came into any inbox of this request."""
        return {inbox.attempt for inbox in self.inboxes.values() if inbox.request_id == request_id and inbox.attempt}

    def heard_of(self) -> set[str]:
        """Requests of which any frame came, be it a keep-alive."""
        return {inbox.request_id for inbox in self.inboxes.values()}

    def _chunk(self, inbox: Inbox, seq: int, attempt: int) -> None:
        if inbox.attempt not in (0, attempt):
            self._break(inbox, f"a chunk of attempt {attempt} after one of attempt {inbox.attempt}")
        elif seq <= inbox.seq:
            self._break(inbox, f"chunk {seq} after chunk {inbox.seq}")
        inbox.attempt, inbox.seq = attempt, seq

    def _break(self, inbox: Inbox, what: str) -> None:
        self.broken.append(f"{inbox.request_id}: {what}")


class Watch:
    """`async with await Watch.beside(client) as watch:`; leaving it fails if a rule was broken."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._bus: Bus

    @classmethod
    async def beside(cls, client: Client) -> "Watch":
        """Of all inboxes of this client, with its own credentials on a connection of its own."""
        watch = cls()
        options = client._bus._options
        inboxes = client._bus.inbox_prefix
        watch._bus = await Bus.connect(
            options["servers"][0],
            name="watch",
            inbox_prefix=f"{inboxes.rsplit('.', 1)[0]}.{secrets.token_hex(8)}",
            user=options["user"],
            password=options["password"],
            tls=options.get("tls"),
        )
        await watch._bus.listen(f"{inboxes}.s.*", watch._hear)
        return watch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # What was sent before is here once the server has answered.
            await self._bus.flush()
        finally:
            await self._bus.close()
        # What has failed before says more.
        assert kind or not self.rules.broken, self.rules.broken[:5]

    def _hear(self, message: Msg) -> None:
        self.rules.heard(message.subject, message.headers or {})
