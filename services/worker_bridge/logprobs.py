"""Log probabilities as chats have them, out of those that /v1/completions gives.

    completions   {"tokens": [..], "token_logprobs": [..], "top_logprobs": [{token: logprob, ..}, ..], "text_offset"}
    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}, ..]}, ..]}

A map of alternatives begins with the token that was chosen and has one more than was asked for; a chat's list has as
many as were asked for, in the same order. Two tokens that look the same (bytes that are no characters) are one key of
that map: one of them is lost.

Owns: that conversion.   Must not know: requests.   Source: vLLM `entrypoints/openai/*/serving.py`
(_create_completion_logprobs, _create_chat_logprobs); OpenAI API reference."""

import msgspec

from ..bus.errors import EngineFailed

_LEAST = -9999.0
"""What vLLM says where there is none."""


class _OfCompletions(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


_decode = msgspec.json.Decoder(_OfCompletions).decode
_encode = msgspec.json.Encoder().encode


def of_chat(raw: bytes, alternatives: int) -> bytes:
    """JSON out of JSON. :raises EngineFailed: these are no log probabilities."""
    try:
        given = _decode(raw)
    except msgspec.MsgspecError as exc:
        raise EngineFailed(f"The engine's log probabilities cannot be read: {exc}") from exc
    tops = given.top_logprobs or []
    content = []
    for number, token in enumerate(given.tokens):
        logprob = given.token_logprobs[number] if number < len(given.token_logprobs) else None
        top = (tops[number] if number < len(tops) else None) or {}
        shown = [_entry(name, value) for name, value in list(top.items())[:alternatives]]
        content.append(_entry(token, logprob) | {"top_logprobs": shown})
    return _encode({"content": content})


def _entry(token: str, logprob: float | None) -> dict[str, object]:
    return {
        "token": token,
        "logprob": _LEAST if logprob is None else logprob,
        "bytes": list(token.encode("utf-8", errors="replace")),
    }
