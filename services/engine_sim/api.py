"""The OpenAI-style bodies vLLM takes and gives: requests decoded and checked, errors, answers, stream chunks.

Owns: field names, limits, the exact shape of every JSON that leaves.   Must not know: aiohttp, the engine's state.
Unknown request fields are ignored, as vLLM does; known ones this engine cannot honour are refused by name."""

from typing import Any

import msgspec
import orjson

from .sequence import NO_TOKEN

MAX_SALT_CHARS = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")


class ApiError(Exception):
    """An answer in vLLM's error shape. Subclasses carry the HTTP status and vLLM's type name."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


class BadRequest(ApiError):
    """The body is wrong, over a limit, or asks for what is not simulated."""


class NotFound(ApiError):
    """No such model or path."""

    status = 404
    kind = "NotFoundError"


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int | None = 1
    best_of: int | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """:raises BadRequest: a value is out of its range or asks for what is not simulated."""
        check_salt(self.cache_salt)
        if any(not stop for stop in self.stops):
            raise BadRequest("stop cannot contain an empty string.", "stop")
        if self.min_tokens < 0:
            raise BadRequest(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.", "min_tokens")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.prompt_logprobs is not None and self.prompt_logprobs < -1:
            raise BadRequest("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if self.n is not None and self.n < 1:
            raise BadRequest(f"n must be at least 1, got {self.n}.", "n")
        refused = {
            "n": (self.n or 1) > 1,
            "best_of": (self.best_of or 1) > 1,
            "echo": bool(self.echo),
            "logprobs": self.logprobs is not None and self.logprobs is not False,
        }
        for field, asked in refused.items():
            if asked:
                raise BadRequest(f"{field} is not supported by this engine simulator.", field)


class CompletionRequest(_Sampling, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    max_tokens: int | None = 16
    suffix: str | None = None
    add_special_tokens: bool = True

    def single_prompt(self) -> str | list[int]:
        """:raises BadRequest: there are several prompts or none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if not prompt:
            raise BadRequest("prompt must not be empty.", "prompt")
        first = prompt[0]
        if isinstance(first, int):
            return prompt  # type: ignore[return-value] # a mixed list fails when it becomes an array of u32
        if len(prompt) > 1:
            raise BadRequest("several prompts in one request are not supported by this engine simulator.", "prompt")
        return first

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise BadRequest("suffix is not currently supported", "suffix")
        _check_max_tokens(self.max_tokens)


class ChatRequest(_Sampling, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        check_chat(self.messages, self.chat_template)
        _check_max_tokens(self.token_limit)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("exactly one of `prompt` and `messages` is required.")
        if self.messages is not None:
            check_chat(self.messages, self.chat_template)


decode_completion = msgspec.json.Decoder(CompletionRequest).decode
decode_chat = msgspec.json.Decoder(ChatRequest).decode
decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode


def check_salt(salt: str | None) -> None:
    """vLLM's limits on `cache_salt`."""
    if salt is None:
        return
    if not salt:
        raise BadRequest("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise BadRequest(f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARS} characters long.", "cache_salt")
    if not _SALT_FORBIDDEN.isdisjoint(salt):
        raise BadRequest("Parameter 'cache_salt' must not contain '@', '/', '\\' or NUL.", "cache_salt")


def check_chat(messages: list[dict[str, Any]], chat_template: str | None) -> None:
    if not messages:
        raise BadRequest("messages must not be empty.", "messages")
    if chat_template is not None:
        raise BadRequest("Chat template is passed with request, but this engine does not trust it.", "chat_template")


def _check_max_tokens(value: int | None) -> None:
    if value is not None and value < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {value}.", "max_tokens")


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """`cached_tokens` None: the server does not report them (no --enable-prompt-tokens-details)."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


class Dialect:
    """One answer's shapes: text completion or chat. Stream chunks are joined from prepared bytes."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, response_id: str, model: str, created: int, prompt_ids: list[int] | None) -> None:
        """`prompt_ids` given: the client asked for token ids."""
        self._base = {"id": response_id, "object": self.object_name, "created": created, "model": model}
        self._chunk_base = self._base | {"object": self.chunk_name}
        self._head = b"data: " + orjson.dumps(self._chunk_base)[:-1] + b',"choices":[{"index":0,'
        self._prompt_ids = prompt_ids
        self._is_first = True

    def opening(self) -> bytes:
        """What precedes the first token."""
        return b""

    def chunk(self, text: str, token: int, finish_reason: str | None = None, stop_reason: str | None = None) -> bytes:
        """One token's event; `token` NO_TOKEN when there is only text or an end to tell."""
        if finish_reason is None and self._prompt_ids is None:
            return self._head + self._delta(text) + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        ends: dict[str, Any] = {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
        if self._prompt_ids is not None:
            ends |= {"token_ids": [] if token == NO_TOKEN else [token]}
            if self._is_first:
                ends |= {"prompt_token_ids": self._prompt_ids}
                self._is_first = False
        return self._head + self._delta(text) + b"," + orjson.dumps(ends)[1:] + b"]}\n\n"

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(self._chunk_base | {"choices": [], "usage": usage}) + b"\n\n"

    def whole(self, text: str, tokens: list[int], finish: str, stop: str | None, usage: dict[str, Any]) -> bytes:
        choice = {"index": 0} | self._message(text) | {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
        if self._prompt_ids is not None:
            choice |= {"token_ids": tokens, "prompt_token_ids": self._prompt_ids}
        return orjson.dumps(self._base | {"choices": [choice], "usage": usage})

    def _delta(self, text: str) -> bytes:
        return b'"text":' + orjson.dumps(text)

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatDialect(Dialect):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self) -> bytes:
        rest = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        if self._prompt_ids is None:
            return self._head + rest + b"}]}\n\n"
        self._is_first = False
        return self._head + rest + b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids) + b"}]}\n\n"

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":' + orjson.dumps(text) + b"}"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "tool_calls": []}}


DONE = b"data: [DONE]\n\n"
