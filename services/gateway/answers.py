"""Answers in OpenAI's form: chunks as they are streamed over HTTP, and a whole answer made of them.

The bus always streams and always says usage; over HTTP a stream says it only if it was asked to
(`stream_options.include_usage`), in a last chunk of its own, with `usage: null` in those before it.

A whole answer is its chunks added up, whatever they hold: texts are joined, calls of tools by their index, lists of
logprobs one after the other. So what an engine's parser makes (tool calls, reasoning) needs no list of names here.

Owns: these shapes.   Must not know: HTTP, the bus.   Source: OpenAI API reference; frames in `bus/frames.py`."""

from typing import Any

# Of a delta: said once, in the first; a later one replaces it instead of being joined.
_SAID_ONCE = frozenset(("role", "id", "type", "index"))


def streamed(chunk: dict[str, Any], *, include_usage: bool) -> dict[str, Any] | None:
    """The chunk as the caller asked for it; None for one that only says usage, which was not asked for."""
    if include_usage:
        chunk.setdefault("usage", None)
        return chunk
    chunk.pop("usage", None)
    return chunk if chunk["choices"] else None


class Whole:
    """A whole answer, from its chunks in order. `is_chat` says which of the two kinds it is."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage", "object")}
        self.usage = chunk.get("usage") or self.usage
        for part in chunk["choices"]:
            choice = self._choices.setdefault(
                part.get("index", 0), {"finish_reason": None, "logprobs": None, "text": ""}
            )
            _join(choice, {name: value for name, value in part.items() if name != "index"})

    def body(self) -> dict[str, Any]:
        """The answer."""
        made = self._message if self._is_chat else self._text
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [made(index, choice) for index, choice in sorted(self._choices.items())],
            "usage": self.usage,
        }

    def _message(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in choice.items() if name not in ("delta", "text")}
        delta = dict(choice.get("delta") or {})
        calls = delta.pop("tool_calls", None)
        message = {
            "role": delta.pop("role", "assistant"),
            "content": delta.pop("content", None),
            "refusal": None,
            **delta,
        }
        if calls:
            # Nothing was said beside the calls: null, as OpenAI says it.
            message["content"] = message["content"] or None
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return {"index": index, "message": message, **rest}

    def _text(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, **choice}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a part's fields to those that came before."""
    for name, value in part.items():
        before = whole.get(name)
        if value is None:
            whole.setdefault(name, None)
        elif name == "tool_calls":
            whole[name] = _joined_calls(before or [], value)
        elif before is None or name in _SAID_ONCE or type(before) is not type(value):
            whole[name] = value
        elif isinstance(value, str | list):
            whole[name] = before + value
        elif isinstance(value, dict):
            _join(before, value)
        else:
            whole[name] = value


def _joined_calls(before: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = {call.get("index", place): call for place, call in enumerate(before)}
    for part in parts:
        index = part.get("index", len(calls))
        if index in calls:
            _join(calls[index], part)
        else:
            calls[index] = part
    return [calls[index] for index in sorted(calls)]
