"""The client's chunks: what the engine generates, in the words of OpenAI's streaming API.

    chat          delta.content; the first delta of a choice also says role: assistant
    completions   text

The last chunk carries `usage`: in a chunk of its own (`choices: []`) if the client asked with
`stream_options.include_usage`, else on the chunk that ends the last choice.

Owns: the bodies.   Must not know: headers, NATS, where text comes from.   Source: DESIGN 2; OpenAI API reference."""

import msgspec
import orjson

from ..bus.frames import completion_id, object_name


class Usage(msgspec.Struct, frozen=True):
    """The engine's own counts; `cached_tokens` is None when it gave none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def as_json(self) -> bytes:
        content: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            content["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return orjson.dumps(content)


class Piece(msgspec.Struct, gc=False):
    """Some text of choice `index`; `finish_reason` ends the choice. `logprobs` is JSON, empty for none."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: bytes = b""


class ChunkWriter:
    """The chunks of one answer. A choice's last chunk is held back until `finish` if usage belongs on it."""

    def __init__(self, kind: str, model: str, request_id: str, created_at: int, *, include_usage: bool) -> None:
        self._chat = kind == "chat"
        self._include_usage = include_usage
        base = {
            "id": completion_id(kind, request_id),
            "object": object_name(kind),
            "created": created_at,
            "model": model,
        }
        self._head = orjson.dumps(base)[:-1] + b',"choices":['
        self._spoken: set[int] = set()
        self._held_back = b""

    def bodies(self, pieces: list[Piece]) -> list[bytes]:
        """Chunks for what was generated since. Texts of one choice that came together make one chunk."""
        bodies: list[bytes] = []
        for piece in _merged(pieces):
            choice = self._choice(piece)
            if piece.finish_reason is None or self._include_usage:
                bodies.append(self._head + choice + b"]}")
                continue
            if self._held_back:
                bodies.append(self._head + self._held_back + b"]}")
            self._held_back = choice
        return bodies

    def finish(self, usage: Usage) -> list[bytes]:
        """The last chunk, with usage."""
        body = self._head + self._held_back + b'],"usage":' + usage.as_json() + b"}"
        self._held_back = b""
        return [body]

    def _choice(self, piece: Piece) -> bytes:
        text = orjson.dumps(piece.text)
        if not self._chat:
            content = b'"text":' + text
        elif piece.index in self._spoken:
            content = b'"delta":{"content":' + text + b"}" if piece.text else b'"delta":{}'
        else:
            self._spoken.add(piece.index)
            content = b'"delta":{"role":"assistant","content":' + text + b"}"
        # Completions' logprobs pass through; chat's have another shape, which is not made here.
        logprobs = piece.logprobs if piece.logprobs and not self._chat else b"null"
        reason = orjson.dumps(piece.finish_reason)
        return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (piece.index, content, logprobs, reason)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one choice joined, unless there are logprobs to keep apart."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is None
            or last.index != piece.index
            or last.finish_reason is not None
            or last.logprobs
            or piece.logprobs
        ):
            merged.append(piece)
        else:
            merged[-1] = Piece(piece.index, last.text + piece.text, piece.finish_reason)
    return merged
