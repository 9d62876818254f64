"""vLLM's stream chunks, decoded.

    completions   choices[].text, and token_ids if they were asked for
    chat          choices[].delta: content, reasoning, tool_calls; prompt_token_ids beside choices in the first chunks
    both          finish_reason, stop_reason, logprobs; usage in the last chunk; an error instead of all that

An end that the engine did not reach by itself (`abort`, `error`) is a failure, not an answer.

Owns: those shapes.   Must not know: HTTP, what becomes of an answer.   Units: prompts are u32 LE, 4 bytes a token.
Source: vLLM `entrypoints/openai/*/protocol.py` and `serving.py`."""

from array import array

import msgspec

from ..bus.errors import EngineFailed
from .chunks import Piece, Usage

_NULL = msgspec.Raw(b"null")
# vLLM's own words for an end that nobody asked for.
_GIVEN_UP = ("abort", "error")


class Chunk(msgspec.Struct):
    """What one chunk says. `prompt` is what the engine made of the prompt, if it says so; `status` is of `error`."""

    pieces: list[Piece]
    model: str = ""
    usage: Usage | None = None
    prompt: bytes | None = None
    error: str = ""
    status: int = 500


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = _NULL
    logprobs: msgspec.Raw = _NULL
    token_ids: list[int] | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NULL


class _ChatChoice(msgspec.Struct):
    index: int = 0
    delta: _Delta = _Delta()
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = _NULL
    logprobs: msgspec.Raw = _NULL


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Base(msgspec.Struct, kw_only=True):
    usage: _Usage | None = None
    model: str = ""
    error: _Error | None = None
    message: str | None = None


class _Completion(_Base, kw_only=True):
    choices: list[_Choice] = []


class _Chat(_Base, kw_only=True):
    choices: list[_ChatChoice] = []
    prompt_token_ids: list[int] | None = None


_completion = msgspec.json.Decoder(_Completion).decode
_chat = msgspec.json.Decoder(_Chat).decode


def of_completions(line: bytes) -> Chunk:
    """:raises EngineFailed: it is none, or ends a choice that the engine gave up."""
    try:
        chunk = _completion(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise EngineFailed(f"The engine's chunk cannot be read: {exc}") from exc
    pieces = [
        Piece(
            choice.index,
            choice.text,
            _reason(choice.finish_reason),
            _raw(choice.logprobs),
            stop_reason=_raw(choice.stop_reason),
            token_ids=choice.token_ids or [],
        )
        for choice in chunk.choices
    ]
    return _made(chunk, pieces)


def of_chat(line: bytes) -> Chunk:
    """:raises EngineFailed: see `of_completions`."""
    try:
        chunk = _chat(line)
        # Each choice's first chunk has them; they are the same.
        prompt = None if chunk.prompt_token_ids is None else array("I", chunk.prompt_token_ids).tobytes()
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as exc:
        raise EngineFailed(f"The engine's chunk cannot be read: {exc}") from exc
    pieces = []
    for choice in chunk.choices:
        delta = choice.delta
        piece = Piece(
            choice.index,
            delta.content or "",
            _reason(choice.finish_reason),
            _raw(choice.logprobs),
            reasoning=delta.reasoning or "",
            tool_calls=_raw(delta.tool_calls),
            stop_reason=_raw(choice.stop_reason),
        )
        # The role alone, and what the engine's parsers made nothing of yet, is nothing to be passed on.
        if piece.text or piece.finish_reason is not None or not piece.is_text_alone:
            pieces.append(piece)
    made = _made(chunk, pieces)
    made.prompt = prompt
    return made


def _made(chunk: _Base, pieces: list[Piece]) -> Chunk:
    error = chunk.error or (None if chunk.message is None else _Error(chunk.message))
    if error is not None:
        return Chunk(
            [], error=error.message or "no reason given", status=error.code if type(error.code) is int else 500
        )
    return Chunk(pieces, chunk.model, None if chunk.usage is None else _usage(chunk.usage))


def _usage(usage: _Usage) -> Usage:
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens or 0,
        None if prompt is None else prompt.cached_tokens,
        None if completion is None else completion.reasoning_tokens,
    )


def _reason(finish_reason: str | None) -> str | None:
    if finish_reason in _GIVEN_UP:
        raise EngineFailed("The engine gave the request up.")
    return finish_reason


def _raw(value: msgspec.Raw) -> bytes:
    raw = bytes(value)
    return b"" if raw == b"null" else raw


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """The first token in which two prompts differ, or the shorter one's end; None: they are one."""
    if ours == theirs:
        return None
    one, two = memoryview(ours).cast("I"), memoryview(theirs).cast("I")
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
