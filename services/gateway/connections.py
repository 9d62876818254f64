# ruff: noqa: TID251 - a shell: it is what the event loop calls with bytes
"""HTTP connections: how long they may be silent, and what bytes are told that are no request.

    nothing, or half a head   closed `keep_alive_s` after the connection was made or its last answer ended
    no HTTP/1.1               told so in OpenAI's form, and closed; nothing of it is kept or logged: a key may be in it
    does not acknowledge      given up by the kernel after `write_timeout_s`, also one that vanished without a word

Owns: the protocol on a socket.   Must not know: what is asked.
Source: tcp(7), TCP_USER_TIMEOUT; aiohttp `web_protocol.py`, whose parser puts what it cannot read into its message."""

import asyncio
import socket
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from ..bus.errors import BadRequest, HeadersTooLarge, PrefixbusError
from . import faults

SERVER_NAME = "prefixbus"


class Connection(web.RequestHandler):
    """aiohttp's, with these manners. `on_fault` is told the status of what was no request."""

    __slots__ = ("_on_fault", "_user_timeout_ms")

    def __init__(
        self,
        server: web.Server,
        *,
        keep_alive_s: float,
        write_timeout_s: float,
        on_fault: Callable[[int], None],
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), keepalive_timeout=keep_alive_s)
        self._on_fault = on_fault
        self._user_timeout_ms = max(1, int(1000 * write_timeout_s))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connected: socket.socket = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._user_timeout_ms)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """:raises ConnectionError: there is nobody to tell: an answer has begun, or the client is gone."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("there is nobody to tell") from exc
        error = _unreadable(exc, message or "")
        self._on_fault(error.status)
        answer = web.Response(
            status=error.status,
            body=faults.body(error),
            content_type="application/json",
            headers={**faults.headers(error), "Server": SERVER_NAME},
        )
        answer.force_close()
        return answer


def _unreadable(exc: BaseException | None, message: str) -> PrefixbusError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge()
    reason = (message.strip().splitlines() or [""])[0].partition(":")[0].rstrip(".")
    return BadRequest(f"This is no HTTP/1.1 request: {reason or 'it cannot be read'}.")
