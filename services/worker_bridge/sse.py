"""Server-sent events out of a byte stream: the payload of each `data:` line.

Owns: the unfinished line.   Must not know: HTTP, JSON.
Source: WHATWG "Server-sent events"; only what OpenAI-style streams use (one `data:` line an event, no ids)."""

from ..bus.errors import EngineFailed

# A line holds one chunk; prompt ids echoed for a 131k-token prompt would be about 0.9 MB.
MAX_LINE_BYTES = 4 * 1024 * 1024
DONE = b"[DONE]"


class EventLines:
    """Feed it what was read, get the payloads that are complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """:raises EngineFailed: a line that does not end."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise EngineFailed(f"The engine sent a line of over {MAX_LINE_BYTES} bytes.")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
