"""The client's chunks: what the engine generates, in the words of OpenAI's streaming API.

    chat          delta.content, and what the engine's parsers found: delta.reasoning, delta.tool_calls; the first delta
                  of a choice also says role: assistant
    completions   text
    both          logprobs, finish_reason; stop_reason with it, if the engine says one; token_ids of an answer that can
                  be resumed

The last chunk carries `usage`: in a chunk of its own (`choices: []`) if the client asked with
`stream_options.include_usage`, else on the chunk that ends the last choice.

Owns: the bodies.   Must not know: headers, NATS, where text comes from.   Source: DESIGN 2; OpenAI API reference."""

import msgspec
import orjson

from ..bus.frames import completion_id, object_name
from . import logprobs


class Usage(msgspec.Struct, frozen=True):
    """The engine's own counts; `cached_tokens` and `reasoning_tokens` are None when it gave none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def of_whole_answer(self, said_tokens: int) -> "Usage":
        """Of an answer whose first `said_tokens` another engine gave, and this one had in its prompt."""
        prompt_tokens = self.prompt_tokens - said_tokens
        cached = self.cached_tokens
        return msgspec.structs.replace(
            self,
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens + said_tokens,
            cached_tokens=None if cached is None else min(cached, prompt_tokens),
        )

    def as_json(self) -> bytes:
        content: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            content["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens is not None:
            content["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return orjson.dumps(content)


class Piece(msgspec.Struct, gc=False):
    """Some text of choice `index`; `finish_reason` ends the choice. `logprobs`, `tool_calls` (a list of deltas) and
    `stop_reason` are JSON, empty for none; `token_ids` are empty where the engine was not asked for them."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: bytes = b""
    reasoning: str = ""
    tool_calls: bytes = b""
    stop_reason: bytes = b""
    token_ids: list[int] = []

    @property
    def is_text_alone(self) -> bool:
        return not (self.logprobs or self.reasoning or self.tool_calls)


class ChunkWriter:
    """The chunks of one answer. A choice's last chunk is held back until `finish` if usage belongs on it."""

    def __init__(
        self,
        kind: str,
        model: str,
        request_id: str,
        created_at: int,
        *,
        include_usage: bool,
        alternatives: int | None = None,
        is_continued: bool = False,
        shows_tokens: bool = False,
    ) -> None:
        """`alternatives`: how many a chat asked for beside each token, where its log probabilities come as completions
        have them; None where they pass as they come. `is_continued`: its beginning was said elsewhere."""
        self._chat = kind == "chat"
        self._include_usage = include_usage
        self._alternatives = alternatives
        self._shows_tokens = shows_tokens
        base = {
            "id": completion_id(kind, request_id),
            "object": object_name(kind),
            "created": created_at,
            "model": model,
        }
        self._head = orjson.dumps(base)[:-1] + b',"choices":['
        self._spoken: set[int] = {0} if is_continued else set()
        self._held_back = b""

    def bodies(self, pieces: list[Piece]) -> list[bytes]:
        """Chunks for what was generated since. Texts of one choice that came together make one chunk.

        :raises EngineFailed: log probabilities that are none."""
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
        content = b'"delta":{%b}' % self._delta(piece) if self._chat else b'"text":' + orjson.dumps(piece.text)
        reason = orjson.dumps(piece.finish_reason)
        rest = b""
        if piece.stop_reason:
            rest += b',"stop_reason":' + piece.stop_reason
        if self._shows_tokens:
            rest += b',"token_ids":' + orjson.dumps(piece.token_ids)
        return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (
            piece.index,
            content,
            self._logprobs(piece.logprobs),
            reason,
            rest,
        )

    def _delta(self, piece: Piece) -> bytes:
        is_first = piece.index not in self._spoken
        self._spoken.add(piece.index)
        fields = [b'"role":"assistant"'] if is_first else []
        if piece.text or (is_first and not piece.reasoning and not piece.tool_calls):
            fields.append(b'"content":' + orjson.dumps(piece.text))
        if piece.reasoning:
            fields.append(b'"reasoning":' + orjson.dumps(piece.reasoning))
        if piece.tool_calls:
            fields.append(b'"tool_calls":' + piece.tool_calls)
        return b",".join(fields)

    def _logprobs(self, given: bytes) -> bytes:
        if not given:
            return b"null"
        return given if not self._chat or self._alternatives is None else logprobs.of_chat(given, self._alternatives)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one choice joined, where each is text alone."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is None
            or last.index != piece.index
            or last.finish_reason is not None
            or not (last.is_text_alone and piece.is_text_alone)
        ):
            merged.append(piece)
        else:
            merged[-1] = msgspec.structs.replace(
                piece, text=last.text + piece.text, token_ids=last.token_ids + piece.token_ids
            )
    return merged
