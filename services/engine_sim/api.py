"""The OpenAI-style bodies vLLM takes: requests decoded and checked, and the errors they get.

Owns: field names, limits, the shape of errors.   Must not know: aiohttp, the engine's state, answers.
Unknown request fields are ignored, as vLLM does; known ones this engine cannot honour are refused by name."""

from typing import Any

import msgspec
import orjson

from . import logprobs

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


class Invalid(BadRequest):
    """A parameter's value is: vLLM's `VLLMValidationError`, which names both in its sentence."""

    def __init__(self, message: str, param: str, value: object = None) -> None:
        named = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
        super().__init__(f"{message} ({named})", param)


class EngineRefuses(BadRequest):
    """What the engine behind vLLM's front end finds: an answer in a stream has begun by then."""


class Malformed(ApiError):
    """The body is no JSON, or none of the right form. `param` says where, from `body` on."""

    kind = "Bad Request"


class NotFound(ApiError):
    """No such model or path."""

    status = 404
    kind = "NotFoundError"


class CoreFailed(ApiError):
    """What vLLM says when its core has failed."""

    status = 500
    kind = "InternalServerError"


class Full(ApiError):
    """What vLLM says when its queue is at its bound."""

    status = 503
    kind = "ServiceUnavailableError"


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
    prompt_logprobs: int | None = None
    echo: bool | None = False
    cache_salt: Any = None
    """A string, or what `check` refuses in vLLM's words."""
    temperature: float | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        return self.n or 1

    def check(self) -> None:
        """:raises BadRequest: a value is out of its range or asks for what is not simulated."""
        check_salt(self.cache_salt)
        if any(not stop for stop in self.stops):
            raise BadRequest("stop cannot contain an empty string.")
        if self.min_tokens < 0:
            raise BadRequest(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.temperature is not None and self.temperature < 0:
            raise Invalid(f"temperature must be non-negative, got {self.temperature}.", "temperature", self.temperature)
        if self.stream_options is not None and not self.stream:
            raise Invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.prompt_logprobs is not None and self.prompt_logprobs < -1:
            raise Invalid("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise Invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if self.n is not None and self.n < 1:
            raise BadRequest(f"n must be at least 1, got {self.n}.")
        refused = {"best_of": (self.best_of or 1) > 1, "echo": bool(self.echo)}
        for field, asked in refused.items():
            if asked:
                raise BadRequest(f"{field} is not supported by this engine simulator.", field)


class CompletionRequest(_Sampling, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]] | None = None
    max_tokens: int | None = None
    """16 if it is not said."""
    n: int = 1
    suffix: str | None = None
    add_special_tokens: bool = True
    logprobs: int | None = None

    @property
    def alternatives(self) -> int | None:
        """How many log probabilities are wanted beside each token; None: none at all."""
        return self.logprobs

    @property
    def token_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def single_prompt(self) -> str | list[int]:
        """:raises BadRequest: there are several prompts or none."""
        prompt = self.prompt
        if prompt is None or prompt == "":
            raise Invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if isinstance(prompt, str):
            return prompt
        if not prompt:
            raise BadRequest("You must pass at least one prompt")
        first = prompt[0]
        if isinstance(first, int):
            return prompt  # type: ignore[return-value] # a mixed list fails when it becomes an array of u32
        if len(prompt) > 1:
            raise BadRequest("several prompts in one request are not supported by this engine simulator.", "prompt")
        return first

    def check(self) -> None:
        super().check()
        if self.suffix and isinstance(self.prompt, str):
            raise BadRequest("suffix is only supported for models with FIM completion rendering", "suffix")
        if self.suffix:
            raise BadRequest("suffix requires text prompt input for FIM completion rendering", "suffix")
        if self.logprobs is not None and self.logprobs < -1:
            raise Invalid("`logprobs` must be a positive value or -1.", "logprobs", self.logprobs)


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
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int | None:
        """As for completions."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice_of_tool(self) -> Any:
        """`tool_choice` with vLLM's defaults."""
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs

    @property
    def given_prompt(self) -> list[int] | None:
        """Token ids that stand for the messages, as vLLM takes them of a prompt that another engine prefilled.

        :raises BadRequest: they are none."""
        given = (self.kv_transfer_params or {}).get("prompt_token_ids")
        if given is None:
            return None
        if not isinstance(given, list) or not given or any(type(token) is not int or token < 0 for token in given):
            field = "kv_transfer_params.prompt_token_ids"
            raise Invalid(
                "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.", field
            )
        return given

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and self.top_logprobs < -1:
            raise Invalid("`top_logprobs` must be a positive value or -1.", "top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise Invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        self._check_tools()
        check_chat(self.messages, self.chat_template)

    def _check_tools(self) -> None:
        if self.tools == []:
            raise Invalid(
                "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
                "tools",
            )
        choice = self.choice_of_tool
        if choice == "none":
            return
        if not self.tools:
            raise Invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if not isinstance(choice, dict):
            if choice not in ("auto", "required"):
                raise Invalid(
                    f"Invalid value for `tool_choice`: {choice}! "
                    'Only named tools, "none", "auto" or "required" are supported.',
                    "tool_choice",
                )
            return
        name = (choice.get("function") or {}).get("name")
        if not any(tool.get("function", {}).get("name") == name for tool in self.tools):
            raise Invalid(
                "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
            )

    def check_parser(self, there_is_one: bool) -> None:
        """:raises BadRequest: the engine was not started for this choice of a tool."""
        choice = self.choice_of_tool
        if choice == "none" or there_is_one:
            return
        if choice == "auto":
            raise BadRequest('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        name = f'function "{choice["function"]["name"]}"' if isinstance(choice, dict) else f'"{choice}"'
        raise BadRequest(f"tool_choice={name} requires --tool-call-parser to be set")


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

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("exactly one of `prompt` and `messages` is required.")
        if self.messages is not None:
            check_chat(self.messages, self.chat_template)


decode_completion = msgspec.json.Decoder(CompletionRequest).decode
decode_chat = msgspec.json.Decoder(ChatRequest).decode
decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode


def check_salt(salt: object) -> None:
    """vLLM's limits on `cache_salt`."""
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise Invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARS or not _SALT_FORBIDDEN.isdisjoint(salt):
        raise Invalid(
            f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARS} characters and must not contain "
            r"'@', '/', '\\', or NUL.",
            "cache_salt",
        )


def check_chat(messages: list[dict[str, Any]], chat_template: str | None) -> None:
    if chat_template is not None:
        raise BadRequest(
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with "
            "untrusted chat template."
        )
    if not messages:
        raise BadRequest("Cannot apply chat template to an empty conversation. Provide at least one message.")


def check_length(prompt_tokens: int, max_model_len: int, is_text: bool) -> None:
    """:raises Invalid: the prompt alone is longer than the model's limit. Of one that was given as text (`is_text`)
    vLLM tokenises no more than it takes to know."""
    if prompt_tokens <= max_model_len:
        return
    told = max_model_len + 1 if is_text else prompt_tokens
    raise Invalid(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{'at least ' if told == max_model_len + 1 else ''}{told} input tokens, which exceeds this limit even without "
        "any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        told,
    )


def check_asked(limit: int | None, max_model_len: int, param: str) -> None:
    """:raises Invalid: more tokens are asked for than the model could ever reach."""
    if limit is not None and limit > max_model_len:
        raise Invalid(
            f"{param}={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param,
            limit,
        )


def output_limit(asked: int | None, room: int, min_tokens: int) -> int:
    """How many tokens an answer may have: what was asked for, as far as there is room behind the prompt.

    :raises BadRequest: none, or fewer than it must have."""
    limit = room if asked is None else min(asked, room)
    if limit < 1:
        raise Invalid(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if min_tokens > limit:
        raise BadRequest(f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.")
    return limit


def check_logprobs(alternatives: int | None, vocabulary: int) -> None:
    """:raises EngineRefuses: they are more than an engine gives; -1 asks for the whole vocabulary."""
    asked = vocabulary if alternatives == -1 else alternatives or 0
    if asked > logprobs.MOST:
        raise EngineRefuses(
            f"Requested sample logprobs of {asked}, which is greater than max allowed: {logprobs.MOST} "
            f"(parameter=logprobs, value={asked})",
            "logprobs",
        )


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """`cached_tokens` None: the server does not report them (no --enable-prompt-tokens-details); `reasoning_tokens`
    None: it has no parser for them."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts
