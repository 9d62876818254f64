"""A tenant that does not read its frames harms itself alone."""

import asyncio
import contextlib
import json
import re
import socket
from urllib.parse import urlsplit

import pytest
from support.nats import NatsServer, RunningCallout, eventually

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus
from prefixbus.cluster import natsconf

pytestmark = pytest.mark.timeout(90)
FRAME = b"x" * 65536
# More than the server keeps for one connection, and what the kernel's buffers on both sides may hold.
FRAMES = (natsconf.MAX_PENDING + 24 * 1024 * 1024) // len(FRAME)
_MESSAGE = re.compile(rb"HMSG \S+ \S+ (\d+) (\d+)\r\n")


class RawTenant:
    """A TCP connection that speaks just enough NATS to be sent frames, and reads only when told."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)

    async def subscribe(self, url: str, tenant: str, token: str, subject: str) -> None:
        loop = asyncio.get_running_loop()
        place = urlsplit(url)
        await loop.sock_connect(self._socket, (place.hostname, place.port))
        options = {"verbose": False, "pedantic": False, "headers": True, "user": tenant, "pass": token}
        lines = f"CONNECT {json.dumps(options)}\r\nSUB {subject} 1\r\nPING\r\n"
        await loop.sock_sendall(self._socket, lines.encode())
        heard = b""
        while b"PONG\r\n" not in heard:
            heard += await self._receive()
            assert b"-ERR" not in heard, heard

    async def read_on(self, last: int) -> list[int]:
        """The `Pb-Seq` of every whole frame that comes, up to frame `last` or the end of the connection."""
        heard = bytearray()
        found: list[int] = []
        with contextlib.suppress(ConnectionResetError):
            while last not in found and (part := await self._receive()):
                heard += part
                position = 0
                while (
                    last not in found
                    and (head := _MESSAGE.match(heard, position))
                    and head.end() + int(head[2]) + 2 <= len(heard)
                ):
                    headers = bytes(heard[head.end() : head.end() + int(head[1])]).decode()
                    found.append(int(headers.split("Pb-Seq: ")[1].split("\r\n")[0]))
                    position = head.end() + int(head[2]) + 2
                del heard[:position]
        return found

    async def _receive(self) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, 65536), 30)

    def close(self) -> None:
        self._socket.close()


async def test_a_tenant_that_does_not_read_sees_its_gap_and_no_other_waits_for_it(
    server: NatsServer, callout: RunningCallout
) -> None:
    bridge = await server.bus("worker_bridge", "w1")
    reader = await server.tenant_bus("reader", server.token("reader"))
    seqs: list[int] = []
    await reader.listen("_INBOX.reader.c1.x", lambda message: seqs.append(int((message.headers or {})["Pb-Seq"])))
    await reader.flush()
    stalled = server.varz().get("stalled_clients", 0)
    sleeper = RawTenant()
    with contextlib.closing(sleeper):
        await sleeper.subscribe(server.url, "sleeper", server.token("sleeper"), "_INBOX.sleeper.x")

        for seq in range(FRAMES):
            frame(bridge, "_INBOX.sleeper.x", seq, FRAME)
            frame(bridge, "_INBOX.reader.c1.x", seq, b"short")
            await bridge.flush(30)

        await eventually(lambda: len(seqs) == FRAMES, "all frames at the one who reads", 30)
        reading = asyncio.create_task(sleeper.read_on(last=FRAMES))

        def caught_up_or_cut() -> bool:
            # What it does not take while it is behind is dropped, so the last frame may need several tries.
            frame(bridge, "_INBOX.sleeper.x", FRAMES, b"last")
            return reading.done()

        await eventually(caught_up_or_cut, "the sleeper has read what there is", 60)
        had = await reading
    assert seqs == list(range(FRAMES))
    assert server.varz().get("stalled_clients", 0) == stalled, "the bridge was made to wait"
    assert had[0] == 0
    assert had == sorted(set(had)), "in order, each once"
    assert set(range(FRAMES + 1)) - set(had), "a gap, or an end without the last frame"


def frame(bridge: Bus, inbox: str, seq: int, payload: bytes) -> None:
    bridge.send(inbox, payload, headers={subjects.HEADER_SEQ: str(seq), subjects.HEADER_ATTEMPT: "1"})
