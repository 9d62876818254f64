"""The answers vLLM gives to completions and chats: whole, or as stream chunks joined from prepared bytes.

    completions   text; prompt_token_ids in each choice
    chat          an opening chunk a choice with the role; content, or the reasoning before it, or calls of tools;
                  prompt_token_ids beside the choices

Owns: the exact shape of every answer.   Must not know: aiohttp, the engine's state.
Source: vLLM `entrypoints/openai/completion/serving.py`, `chat_completion/serving.py`. Nulls that vLLM writes into every
chunk are left out."""

from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from . import calls, logprobs
from .calls import Call
from .sequence import NO_TOKEN

DONE = b"data: [DONE]\n\n"
THOUGHTS = 4
"""Tokens of a chat that are its reasoning, where the engine has a parser for it: the simulated model thinks so long."""

Step = list[tuple[int, float]]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request its answer's form depends on. `prompt_ids`: the client asked for token ids; `alternatives`: for
    log probabilities, with so many beside each token, whose name is `text`; `calls`: it forces these, under `call_ids`
    in each choice."""

    response_id: str
    model: str
    created: int
    choices: int = 1
    prompt_ids: list[int] | None = None
    alternatives: int | None = None
    spoken: tuple[int, ...] = ()
    text: Callable[[int], str] = str
    calls: list[Call] = []
    call_ids: list[list[str]] = []
    is_call_named: bool = False
    thinks: bool = False
    shows_thoughts: bool = True


class Said(msgspec.Struct, gc=False):
    """One token of choice `index`, `token` NO_TOKEN when there is only text or an end to tell."""

    index: int
    token: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None


class Whole(msgspec.Struct):
    """A choice that is complete."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: str | None
    thought: str = ""


class Answer:
    """A text completion's."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._base = {
            "id": asked.response_id,
            "object": self.object_name,
            "created": asked.created,
            "model": asked.model,
        }
        self._chunk_base = self._base | {"object": self.chunk_name}
        self._head = b"data: " + orjson.dumps(self._chunk_base)[:-1] + b',"choices":[{"index":'
        self._is_plain = asked.prompt_ids is None and asked.alternatives is None
        self._begun: set[int] = set()
        self._offsets = [0] * asked.choices

    @property
    def response_id(self) -> str:
        return self._asked.response_id

    @property
    def thoughts(self) -> int:
        """How many tokens of each choice are its reasoning, if it has so many."""
        return THOUGHTS if self._asked.thinks else 0

    def opening(self) -> bytes:
        """What precedes the first token."""
        return b""

    def chunk(self, said: Said) -> bytes:
        """One token's event; empty if there is nothing to tell of it."""
        if said.finish_reason is None and self._is_plain:
            rest = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
            return self._head + b"%d," % said.index + b'"text":' + orjson.dumps(said.text) + rest
        ends: dict[str, Any] = {
            "text": said.text,
            "logprobs": self._logprobs(said),
            "finish_reason": said.finish_reason,
            "stop_reason": said.stop_reason,
        }
        if self._asked.prompt_ids is not None:
            ends["token_ids"] = _ids(said)
            if said.index not in self._begun:
                ends["prompt_token_ids"] = self._asked.prompt_ids
                self._begun.add(said.index)
        return self._event(said.index, ends)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        # In streams nulls are left out.
        told = {name: value for name, value in usage.items() if value is not None}
        return b"data: " + orjson.dumps(self._chunk_base | {"choices": [], "usage": told}) + b"\n\n"

    def whole(self, choices: list[Whole], usage: dict[str, Any]) -> bytes:
        content = self._base | {"choices": [self._choice(*choice) for choice in enumerate(choices)], "usage": usage}
        return orjson.dumps(content)

    def _event(self, index: int, content: dict[str, Any]) -> bytes:
        return self._head + b"%d," % index + orjson.dumps(content)[1:] + b"]}\n\n"

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        made = {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs_of(choice.tokens, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._asked.prompt_ids is not None:
            made |= {"token_ids": choice.tokens, "prompt_token_ids": self._asked.prompt_ids}
        return made

    def _logprobs(self, said: Said) -> dict[str, Any] | None:
        tokens = _ids(said)
        made = self._logprobs_of(tokens, self._offsets[said.index])
        self._offsets[said.index] += sum(len(self._asked.text(token)) for token in tokens)
        return made

    def _logprobs_of(self, tokens: list[int], offset: int) -> dict[str, Any] | None:
        if self._asked.alternatives is None:
            return None
        return logprobs.of_completions(tokens, self._steps(tokens), self._asked.text, offset)

    def _steps(self, tokens: list[int]) -> list[Step]:
        return [logprobs.step(token, self._asked.spoken, self._asked.alternatives or 0) for token in tokens]


class ChatAnswer(Answer):
    """A chat's."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._is_plain = self._is_plain and not asked.calls and not asked.thinks
        self._thoughts = [self.thoughts] * asked.choices
        self._readers = [calls.CallReader(asked.calls, ids) for ids in asked.call_ids]

    def opening(self) -> bytes:
        ready = b""
        for index in range(self._asked.choices):
            rest = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            ids = self._asked.prompt_ids
            told = b"" if ids is None else b',"prompt_token_ids":' + orjson.dumps(ids)
            ready += self._head + b"%d," % index + rest + told + b"}\n\n"
        return ready

    def chunk(self, said: Said) -> bytes:
        if said.finish_reason is None and self._is_plain:
            rest = b'},"logprobs":null,"finish_reason":null}]}\n\n'
            return self._head + b"%d," % said.index + b'"delta":{"content":' + orjson.dumps(said.text) + rest
        delta = self._delta(said)
        hides = self._asked.thinks and not self._asked.shows_thoughts
        if delta is None and said.finish_reason is None and (self._asked.prompt_ids is None or hides):
            return b""
        ends: dict[str, Any] = {
            "delta": delta or {},
            "logprobs": None if hides else self._logprobs(said),
            "finish_reason": self._finish_reason(said.finish_reason),
        }
        if said.finish_reason is not None:
            ends["stop_reason"] = said.stop_reason
        if self._asked.prompt_ids is not None and not hides:
            ends["token_ids"] = _ids(said)
        return self._event(said.index, ends)

    def whole(self, choices: list[Whole], usage: dict[str, Any]) -> bytes:
        body = orjson.loads(super().whole(choices, usage))
        if self._asked.prompt_ids is not None:
            body["prompt_token_ids"] = self._asked.prompt_ids
        return orjson.dumps(body)

    def _delta(self, said: Said) -> dict[str, Any] | None:
        if self._thoughts[said.index] and said.token != NO_TOKEN:
            self._thoughts[said.index] -= 1
            return {"reasoning": said.text} if self._asked.shows_thoughts else None
        if not self._asked.calls:
            return {"content": said.text}
        deltas = self._readers[said.index].read(said.text)
        return {"tool_calls": deltas} if deltas else None

    def _finish_reason(self, reason: str | None) -> str | None:
        """Calls end with `stop` where the one to be made was named."""
        return "tool_calls" if reason == "stop" and self._asked.calls and not self._asked.is_call_named else reason

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": choice.thought if choice.thought and self._asked.shows_thoughts else None,
        }
        if self._asked.calls:
            message |= {
                "content": "",
                "tool_calls": calls.whole(self._asked.calls, self._asked.call_ids[index], choice.text),
            }
        hides = self._asked.thinks and not self._asked.shows_thoughts
        made = {
            "index": index,
            "message": message,
            "logprobs": None if hides else self._logprobs_of(choice.tokens, 0),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if self._asked.prompt_ids is not None and not hides:
            made["token_ids"] = choice.tokens
        return made

    def _logprobs_of(self, tokens: list[int], offset: int) -> dict[str, Any] | None:
        alternatives = self._asked.alternatives
        if alternatives is None:
            return None
        return logprobs.of_chat(tokens, self._steps(tokens), self._asked.text, alternatives)


def error_event(message: str, kind: str, code: int) -> bytes:
    """What ends a stream that fails."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


def _ids(said: Said) -> list[int]:
    return [] if said.token == NO_TOKEN else [said.token]
