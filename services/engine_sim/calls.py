"""Made-up calls of tools: what a model under a grammar would say when it has to call one.

    named        that tool, once
    required     the first tool; the first two if there are more and parallel calls are not forbidden
    auto, none   no call: the model never wants one

Arguments are the plainest that the tool's schema allows, the same for the same schema.

Owns: which calls, their arguments, their text piece by piece.   Must not know: HTTP, tokens."""

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

PIECE_CHARS = 6
"""What one token says of a call."""
_DEEPEST = 8


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: str


def made_up(tools: list[dict[str, Any]] | None, tool_choice: Any, parallel: bool) -> list[Call]:
    """The calls that this request forces; none if it forces none. The choice has been checked."""
    functions = [tool["function"] for tool in tools or []]
    if isinstance(tool_choice, dict):
        name = tool_choice["function"]["name"]
        wanted = [function for function in functions if function["name"] == name][:1]
    elif tool_choice == "required":
        wanted = functions[: 2 if parallel else 1]
    else:
        wanted = []
    return [Call(function["name"], _arguments(function.get("parameters"))) for function in wanted]


def _arguments(schema: Any) -> str:
    made = _value(schema, _DEEPEST)
    return orjson.dumps(made if isinstance(made, dict) else {}).decode()


def _value(schema: Any, deep: int) -> Any:
    if not isinstance(schema, dict) or not deep:
        return {}
    for plain in ("const", "default"):
        if plain in schema:
            return schema[plain]
    if schema.get("enum"):
        return schema["enum"][0]
    properties = schema.get("properties") or {}
    match schema.get("type"):
        case "string":
            return "made up"
        case "integer":
            return int(schema.get("minimum", 1))
        case "number":
            return float(schema.get("minimum", 1.5))
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [_value(schema.get("items"), deep - 1)] if schema.get("minItems") else []
        case _:
            names = schema.get("required") or list(properties)
            return {name: _value(properties.get(name), deep - 1) for name in names}


class CallScript:
    """Says calls instead of words, a piece a token, and ends there: a scanner (stops.py) that finds what it brought.
    The first token of a call says its name, of which there is no text."""

    def __init__(self, calls: list[Call]) -> None:
        self._pieces: Iterator[str] = iter([piece for call in calls for piece in ("", *_cut(call.arguments))])
        self._next = next(self._pieces, None)
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        said, self._next = self._next or "", next(self._pieces, None)
        if self._next is None:
            self.hit = ""
        return said

    def flush(self) -> str:
        return ""


class CallReader:
    """vLLM's deltas out of what a script says, in the order of its calls: a call's first one has its name alone."""

    def __init__(self, calls: list[Call], ids: list[str]) -> None:
        self._calls = calls
        self._ids = ids
        self._at = 0
        self._is_named = False
        self._said = 0

    def read(self, text: str) -> list[dict[str, Any]]:
        if self._at == len(self._calls):
            return []
        call, index = self._calls[self._at], self._at
        if not self._is_named:
            self._is_named = True
            return [{"id": self._ids[index], "type": "function", "index": index, "function": {"name": call.name}}]
        self._said += len(text)
        if self._said == len(call.arguments):
            self._at, self._is_named, self._said = index + 1, False, 0
        return [{"index": index, "function": {"arguments": text}}]


def whole(calls: list[Call], ids: list[str], text: str) -> list[dict[str, Any]]:
    """The calls of an answer that is not streamed; the last may be cut short, and the first has been named at least."""
    made: list[dict[str, Any]] = []
    for call, call_id in zip(calls, ids, strict=True):
        if made and not text:
            break
        function = {"name": call.name, "arguments": text[: len(call.arguments)]}
        made.append({"id": call_id, "type": "function", "function": function})
        text = text[len(call.arguments) :]
    return made


def _cut(text: str) -> list[str]:
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
