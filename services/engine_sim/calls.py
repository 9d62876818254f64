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
    """Says calls instead of words, a piece a token, and ends there: a scanner (stops.py) that finds what it brought."""

    def __init__(self, calls: list[Call]) -> None:
        text = "".join(call.arguments for call in calls)
        self._pieces: Iterator[str] = iter([text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)])
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
    """OpenAI's deltas out of what a script says, in the order of its calls."""

    def __init__(self, calls: list[Call], ids: list[str]) -> None:
        self._calls = calls
        self._ids = ids
        self._at = 0
        self._said = 0

    def read(self, text: str) -> list[dict[str, Any]]:
        deltas = []
        while text:
            call = self._calls[self._at]
            piece, text = text[: len(call.arguments) - self._said], text[len(call.arguments) - self._said :]
            function: dict[str, Any] = {"arguments": piece}
            delta: dict[str, Any] = {"index": self._at, "function": function}
            if not self._said:
                delta = {"id": self._ids[self._at], "type": "function", "index": self._at, "function": function}
                function["name"] = call.name
            deltas.append(delta)
            self._said += len(piece)
            if self._said == len(call.arguments):
                self._at, self._said = self._at + 1, 0
        return deltas


def whole(calls: list[Call], ids: list[str], text: str) -> list[dict[str, Any]]:
    """The calls of an answer that is not streamed; the last may be cut short."""
    made: list[dict[str, Any]] = []
    for delta in CallReader(calls, ids).read(text):
        function = {"name": calls[delta["index"]].name, "arguments": delta["function"]["arguments"]}
        made.append({"id": ids[delta["index"]], "type": "function", "function": function})
    return made
