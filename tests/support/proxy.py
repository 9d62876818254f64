"""A proxy in front of a nats-server that loses messages, or lets them come late, by subject."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Self

Fate = Callable[[str], float | None]
"""What becomes of a message of that subject, in either direction: None loses it, else it comes so many seconds later
than it would; 0 leaves it in its place."""

_WITH_PAYLOAD = frozenset((b"PUB", b"HPUB", b"MSG", b"HMSG"))


class Proxy:
    """`async with Proxy(port) as proxy:` listens on `proxy.url` and passes all on, but for what `fate` says.

    `lost` and `late` count messages by their subject's first four tokens."""

    def __init__(self, server_port: int) -> None:
        self.fate: Fate = lambda subject: 0.0
        self.lost: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self._server_port = server_port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._pass_on(reader, to_server))
                both_ways.create_task(self._pass_on(from_server, writer))
        finally:
            for end in (writer, to_server):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                subject, frame = await _next_frame(reader)
                later_s = self.fate(subject) if subject else 0.0
                kind = ".".join(subject.split(".")[:4])
                if later_s is None:
                    self.lost[kind] += 1
                elif later_s:
                    self.late[kind] += 1
                    asyncio.get_running_loop().call_later(later_s, _write, writer, frame)
                else:
                    writer.write(frame)
                    await writer.drain()
        writer.close()


async def _next_frame(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Subject and bytes of the next message of NATS's protocol; the subject is empty but for those with a payload.

    :raises asyncio.IncompleteReadError: there is none any more."""
    line = await reader.readuntil(b"\r\n")
    verb, *words = line.split()
    if verb.upper() in _WITH_PAYLOAD:
        return words[0].decode(), line + await reader.readexactly(int(words[-1]) + 2)
    return "", line


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.is_closing():
        writer.write(frame)
