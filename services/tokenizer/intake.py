"""A client's message as a checked request, or the error that says what is wrong with it.

The body is an OpenAI chat-completions or completions object, read as vLLM reads it: unknown fields are ignored, known
ones must have their type and range. What the engine takes for sampling is passed on (`params`); what would change the
answer and cannot be passed is refused by name, never dropped silently. Tenant and scope come from the subject alone.

    token ids to /v1/completions    all requests, but for
    chat to /v1/chat/completions    those whose answer only the engine's own parsers can read: tools that may be called,
                                    and all chats of a model that thinks aloud (`Parsers`); and those with images, of
                                    which the engine makes tokens

An answer can be taken up by another worker (`resume`) if prompt + tokens so far say all that its engine knew: not if it
also kept several choices, a grammar, a parser's state, counts of what was said, or a seeded chain of chances.

Owns: field names, types, ranges, limits of headers, the length rule.   Must not know: tokenizers, NATS, clocks.
Units: seconds (deadlines: Unix seconds), bytes, tokens.
Source: vLLM `entrypoints/openai/*/protocol.py`, `sampling_params.py`, `renderers/params.py` (which prompt is too
long); facts/vllm.md (cache_salt); https://www.w3.org/TR/trace-context/."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from msgspec import Meta

from ..bus import subjects
from ..bus.config import LimitsSection
from ..bus.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    HeadersTooLarge,
    InvalidJson,
    ModelMismatch,
    NotResumable,
    TooLarge,
    Unsupported,
)
from . import media
from .media import Medium
from .render import Chat, Message

PREFIX_CLASSES = ("system", "document", "session", "rag")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# vLLM's default for completions (chat: whatever room is left).
COMPLETIONS_MAX_TOKENS = 16
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_SALT_CHARS = 128
# vLLM's `max_logprobs`.
MAX_LOGPROBS = 20
# A deadline further off than this is a mistake in units, most likely milliseconds.
MAX_DEADLINE_AHEAD_S = 7 * 24 * 3600.0

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_TOKEN_ID = re.compile(r"[0-9]{1,10}\Z")

# Set to anything but null, false, 0 or empty, these would change the answer, and the engine would not see them; of some
# 0 or empty means what is usual, not nothing.
_ON_THOUGH_EMPTY = {"prompt_logprobs", "web_search_options"}
_REFUSED = {
    "audio": "Ask for text.",
    "chat_template": "The model's own template is used.",
    "ec_transfer_params": "",
    "echo": "The prompt is not sent back.",
    "function_call": "Use tools and tool_choice.",
    "functions": "Use tools.",
    "guided_choice": "Use structured_outputs.",
    "guided_grammar": "Use structured_outputs.",
    "guided_json": "Use structured_outputs.",
    "guided_regex": "Use structured_outputs.",
    "kv_transfer_params": "KV is shared by prefixbus itself.",
    "logits_processors": "",
    "logprob_token_ids": "Use top_logprobs.",
    "media_io_kwargs": "Only text is served.",
    "mm_payload": "Send images as parts of a message.",
    "mm_processor_kwargs": "Only text is served.",
    "priority": "All requests of a tenant are equal.",
    "prompt_embeds": "Send prompt as text or token ids.",
    "prompt_logprobs": "",
    "request_id": "Send it as a header.",
    "return_mm_kwargs": "",
    "return_prompt_text": "",
    "return_token_ids": "Use resume.",
    "return_token_offsets": "",
    "return_tokens_as_token_ids": "",
    "routed_experts_prompt_start": "",
    "stream_interval": "",
    "suffix": "",
    "repetition_detection": "Use repetition_penalty.",
    "truncate_prompt_tokens": "Shorten the prompt yourself.",
    "truncation_side": "Shorten the prompt yourself.",
    "use_beam_search": "Use n.",
    "vllm_xargs": "",
    "watermarking": "",
    "web_search_options": "",
}
# Passed on to the engine under their own names, in this order.
_PASSED = (
    "n temperature top_p top_k min_p seed stop stop_token_ids presence_penalty frequency_penalty repetition_penalty "
    "min_tokens ignore_eos logit_bias bad_words allowed_token_ids include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens response_format structured_outputs"
).split()
# What else /v1/chat/completions is given, as the client sent it: its engine needs it to read the answer, or to render
# the prompt itself if it does not take ours.
_OF_CHAT = (
    "tools tool_choice parallel_tool_calls documents add_generation_prompt continue_final_message add_special_tokens "
    "chat_template_kwargs reasoning_effort include_reasoning thinking_token_budget"
).split()

_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Count = Annotated[int, Meta(ge=1)]
_Stop = Annotated[str, Meta(min_length=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Resume(msgspec.Struct):
    """The wish to be able to go on elsewhere (no ids), or to go on after these."""

    token_ids: list[_TokenId] = []


class _Body(msgspec.Struct, kw_only=True):
    """What both kinds of request have. Null means the default, as everywhere in this API."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    bad_words: list[_Stop] | None = None
    resume: _Resume | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[dict[str, Any]] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_ChatMessage]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None


class _CompletionsBody(_Body, kw_only=True):
    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class Envelope(msgspec.Struct, frozen=True):
    """What the headers say. `deadline_at` is by our clock: a client's may be `clock_skew_s` behind it. Empty strings:
    not given."""

    deadline_at: float
    prefix_class: str
    traceparent: str
    sending: int


class Parsers(msgspec.Struct, frozen=True):
    """Which of its outputs a model's engines take apart themselves: calls of tools, and what it thought."""

    tools: bool = False
    reasoning: bool = False


NO_PARSERS = Parsers()


class Request(msgspec.Struct, frozen=True):
    """A checked body. `chat` is None for completions, whose prompt is a text or a list of token ids.

    `max_tokens` is None where the engine fills what room is left; `params` are the engine's sampling parameters
    without it. `engine_chat` is what else its /v1/chat/completions is given, None for a request to /v1/completions.
    `said` are the tokens of the answer that the client has already, which `max_tokens` and `params` are without;
    `resumable` says that it wants, and may, go on elsewhere after any number of them."""

    kind: str
    params: dict[str, Any]
    max_tokens: int | None
    client_salt: str
    include_usage: bool
    chat: Chat | None = None
    prompt: str | list[int] = ""
    add_special_tokens: bool = True
    engine_chat: dict[str, Any] | None = None
    media: list[Medium] = []
    said: list[int] = []
    resumable: bool = False


B = TypeVar("B", bound=_Body)


def envelope(headers: Mapping[str, str] | None, limits: LimitsSection, wall: float) -> Envelope:
    """The headers of a request that came at `wall`.

    :raises BadRequest: a header is malformed.   :raises DeadlineExceeded: it was too late when it came."""
    headers = headers or {}
    request_id = headers.get(subjects.HEADER_REQUEST_ID, "")
    if request_id and not subjects.is_token(request_id):
        raise BadRequest(
            "is not 1 to 64 of A-Z a-z 0-9 _ and -.", field=subjects.HEADER_REQUEST_ID, remedy="Use a UUID or the like."
        )
    prefix_class = headers.get(subjects.HEADER_PREFIX_CLASS, "")
    if prefix_class and prefix_class not in PREFIX_CLASSES:
        raise BadRequest(
            f"{prefix_class[:40]!r} is no prefix class.",
            field=subjects.HEADER_PREFIX_CLASS,
            remedy=f"Use one of {', '.join(PREFIX_CLASSES)}, or leave it out.",
        )
    traceparent = headers.get(subjects.HEADER_TRACEPARENT, "")
    return Envelope(
        deadline_at=_deadline(headers.get(subjects.HEADER_DEADLINE, ""), limits, wall),
        prefix_class=prefix_class,
        traceparent=traceparent if _TRACEPARENT.match(traceparent) else "",
        sending=_sending(headers.get(subjects.HEADER_SENDING, "1")),
    )


def headers_too_large(size: int | str, limits: LimitsSection) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"{size} bytes of headers are over the limit of {limits.max_header_bytes}.",
        remedy="Send fewer or shorter ones.",
    )


def _sending(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 4 and int(text) >= 1):
        raise BadRequest(
            f"{text[:40]!r} is no count of sendings.",
            field=subjects.HEADER_SENDING,
            remedy="Number the sendings of a request from 1 to 9999, or leave it out.",
        )
    return int(text)


def _deadline(text: str, limits: LimitsSection, wall: float) -> float:
    if not text:
        return wall + limits.default_deadline_s
    remedy = "Give Unix seconds."
    try:
        deadline = float(text)
    except ValueError:
        deadline = math.nan
    if not math.isfinite(deadline) or deadline < 0:
        raise BadRequest(f"{text[:40]!r} is no time.", field=subjects.HEADER_DEADLINE, remedy=remedy)
    if deadline > wall + MAX_DEADLINE_AHEAD_S:
        raise BadRequest("is more than 7 days ahead.", field=subjects.HEADER_DEADLINE, remedy=remedy)
    if deadline + limits.clock_skew_s <= wall:
        raise DeadlineExceeded(f"The deadline passed {wall - deadline:.3f} s before the request came.")
    return deadline + limits.clock_skew_s


def parse(
    body: bytes, model: str, limits: LimitsSection, parsers: Parsers = NO_PARSERS, takes_images: bool = False
) -> Request:
    """The request that a body makes for the subject's `model`, whose engines have these `parsers`.

    :raises TooLarge, InvalidJson, ModelMismatch, Unsupported, NotResumable, BadRequest: it makes none; the error names
    the field."""
    if len(body) > limits.max_body_bytes:
        raise TooLarge(
            f"{len(body)} bytes are over the limit of {limits.max_body_bytes}.", field="body", remedy="Send less."
        )
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidJson(f"is not JSON: {exc}.", field="body", remedy="Send one JSON object in UTF-8.") from exc
    if not isinstance(tree, dict):
        raise InvalidJson(f"is {_kind(tree)}, not an object.", field="body", remedy="Send one JSON object.")
    if tree.get("model") is not None and tree["model"] != model:
        raise ModelMismatch(
            f"{_shown(tree['model'], 80)} is not the subject's {model!r}.",
            field="model",
            remedy="Leave it out, or publish to that model's subject.",
        )
    _refuse(tree)
    has_chat, has_prompt = tree.get("messages") is not None, tree.get("prompt") is not None
    if has_chat and has_prompt:
        raise BadRequest("Both messages and prompt are given.", field="prompt", remedy="Send one of them.")
    if has_chat:
        return _chat(tree, parsers, takes_images)
    if has_prompt:
        if tree.get("thinking_token_budget") is not None:
            raise Unsupported("is for chats.", field="thinking_token_budget", remedy="Send messages.")
        return _completions(tree)
    raise BadRequest("is missing.", field="messages", remedy="Send messages (chat) or prompt (completions).")


def check_ids(ids: list[int], vocab_size: int, field: str = "prompt") -> None:
    """:raises BadRequest: an id is not in the model's vocabulary."""
    if max(ids) >= vocab_size or min(ids) < 0:
        raise BadRequest(
            f"holds a token id outside 0 to {vocab_size - 1}.", field=field, remedy="Use this model's tokenizer."
        )


def fit(request: Request, prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens the engine may generate, at least 1, by vLLM's rule.

    :raises BadRequest: there is no prompt.   :raises ContextTooLong: prompt and answer do not fit together."""
    if prompt_tokens == 0:
        raise BadRequest("is empty.", field=_prompt_field(request), remedy="Send at least one token.")
    wanted = request.max_tokens or 0
    if prompt_tokens + max(1, wanted) > max_model_len:
        asked = f" and max_tokens {wanted}" if wanted else ", and at least one for the answer,"
        raise ContextTooLong(
            f"{prompt_tokens} tokens{asked} are over the model's {max_model_len}.",
            field=_prompt_field(request),
            remedy="Shorten the prompt." if prompt_tokens >= max_model_len else "Shorten the prompt or ask for less.",
        )
    return request.max_tokens if request.max_tokens is not None else max_model_len - prompt_tokens


def refuse_if_hopeless(request: Request, chars: int, longest_token_chars: int, max_model_len: int) -> None:
    """Before a text is tokenised at all: no token stands for more characters than the longest, and no message for less
    than one token.

    :raises ContextTooLong: even if every token were the longest, the prompt would not fit."""
    messages = len(request.chat.messages) if request.chat is not None else 0
    at_least = max(-(-chars // longest_token_chars), messages)
    if at_least >= max_model_len:
        raise ContextTooLong(
            f"{chars} characters{f' in {messages} messages' if messages else ''} are at least {at_least} tokens, over"
            f" the model's {max_model_len}.",
            field=_prompt_field(request),
            remedy="Shorten the prompt.",
        )


def engine_params(request: Request, max_tokens: int) -> bytes:
    """The JSON object of sampling parameters for the engine."""
    return orjson.dumps({"max_tokens": max_tokens, **request.params})


def engine_chat(request: Request, namespace_id: bytes = b"") -> bytes:
    """The JSON object of what else /v1/chat/completions is given; empty for a request to /v1/completions. Its media
    have the names that they have in the namespace; without one, none."""
    if request.engine_chat is None:
        return b""
    if not request.media:
        return orjson.dumps(request.engine_chat)
    names = (media.name(namespace_id, one.digest) if namespace_id and one.digest else None for one in request.media)
    return orjson.dumps({**request.engine_chat, "messages": media.for_engine(request.engine_chat["messages"], names)})


def _prompt_field(request: Request) -> str:
    return "messages" if request.chat is not None else "prompt"


def _shown(value: object, most: int) -> str:
    """What a client sent where a name belongs, for its error; anything deep is only named by its kind."""
    return repr(value[:most]) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    return {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


def _refuse(tree: dict[str, Any]) -> None:
    for name in _REFUSED.keys() & tree.keys():
        if tree[name] or (name in _ON_THOUGH_EMPTY and tree[name] is not None and tree[name] is not False):
            raise Unsupported("is not supported.", field=name, remedy=_REFUSED[name] or "Leave it out.")
    if tree.get("best_of") not in (None, 1, tree.get("n")):
        raise Unsupported("is not supported.", field="best_of", remedy="Use n.")
    if tree.get("modalities") not in (None, ["text"]):
        raise Unsupported("asks for more than text.", field="modalities", remedy='Use ["text"].')
    if tree.get("verbosity") not in (None, "medium"):
        raise Unsupported("cannot be chosen.", field="verbosity", remedy="Ask for it in the prompt.")


def _converted(tree: dict[str, Any], kind: type[B]) -> B:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as exc:
        what, _, where = str(exc).partition(" - at ")
        field = where.strip("`").removeprefix("$.").removeprefix("$")
        raise BadRequest(f"{what}.", field=field or "body", remedy="See the OpenAI API reference.") from exc
    except RecursionError as exc:
        raise BadRequest("Values are nested too deeply.", field="body") from exc


def _chat(tree: dict[str, Any], parsers: Parsers, takes_images: bool) -> Request:
    body = _converted(tree, _ChatBody)
    if not body.messages:
        raise BadRequest("is empty.", field="messages", remedy="Send at least one message.")
    if body.tools == []:
        raise BadRequest("is empty.", field="tools", remedy="Leave it out, or give at least one tool.")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("needs logprobs: true.", field="top_logprobs", remedy="Set it, or leave this out.")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "cannot be set together with add_generation_prompt.", field="continue_final_message", remedy="Set one."
        )
    if body.thinking_token_budget is not None and not parsers.reasoning:
        raise Unsupported(
            "needs a model with a reasoning parser.", field="thinking_token_budget", remedy="Use max_tokens."
        )
    _check_tools(body.tools, "tools")
    messages = [_message(message, f"messages[{i}]", takes_images) for i, message in enumerate(body.messages)]
    shown = [part for message in messages for part in message.parts if isinstance(part, Medium)]
    is_read_by_engine = _may_call(body, parsers) or parsers.reasoning or bool(shown)
    params = _params(body)
    if body.logprobs:
        params |= (
            {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
            if is_read_by_engine
            else {"logprobs": body.top_logprobs or 0}
        )
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs.keys() & {"chat_template", "tokenize"}:
        raise Unsupported("cannot be set.", field=f"chat_template_kwargs.{name}", remedy="Leave it out.")
    if body.reasoning_effort is not None:
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        kwargs["reasoning_effort"] = body.reasoning_effort
    chat = Chat(
        messages=messages,
        tools=body.tools,
        documents=body.documents,
        # vLLM's default asks for the next turn; a message to be continued has none.
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=kwargs,
    )
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    engine_chat = _engine_chat(tree, chat) if is_read_by_engine else None
    return _request("chat", body, params, max_tokens, chat=chat, engine_chat=engine_chat, media=shown)


def _may_call(body: _ChatBody, parsers: Parsers) -> bool:
    """Whether the answer may hold calls of tools that the engine has to find.

    Where it cannot, `auto` is answered in the model's own words, as the template taught it."""
    choice = body.tool_choice
    if choice == "none" or (choice in (None, "auto") and not body.tools):
        return False
    if choice in (None, "auto"):
        return parsers.tools
    remedy = 'Use "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.'
    name = ""
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type", "function") != "function":
            raise Unsupported(f"{_shown(choice['type'], 40)} is not served.", field="tool_choice.type", remedy=remedy)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("names no function.", field="tool_choice.function.name", remedy=remedy)
        name = function["name"]
    elif choice != "required":
        raise BadRequest(f"{_shown(choice, 40)} is not known.", field="tool_choice", remedy=remedy)
    if not body.tools:
        raise BadRequest("needs tools.", field="tool_choice", remedy="Give tools, or leave this out.")
    if name and all(tool["function"]["name"] != name for tool in body.tools):
        raise BadRequest(f"{name[:80]!r} is none of the tools.", field="tool_choice.function.name", remedy=remedy)
    if not parsers.tools:
        raise Unsupported(
            "can be auto or none: the model's engines have no tool parser.",
            field="tool_choice",
            remedy="Let the model choose.",
        )
    return True


def _engine_chat(tree: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """:raises BadRequest: it cannot be passed on."""
    given = {name: tree[name] for name in _OF_CHAT if tree.get(name) is not None}
    # Null and missing would be two things to vLLM.
    given["add_generation_prompt"] = chat.add_generation_prompt
    given["messages"] = [
        {name: _engine_value(name, value) for name, value in message.items() if name in _ChatMessage.__struct_fields__}
        for message in tree["messages"]
    ]
    return _plain(given, "messages")


def _engine_value(name: str, value: Any) -> Any:
    """Of a text part its text alone: to vLLM one that has an `image_url` and a `uuid` besides is an image of that
    name, whatever its type says."""
    if name != "content" or not isinstance(value, list):
        return value
    return [part if isinstance(part, str) or media.is_medium(part) else _text_part(part) for part in value]


def _text_part(part: dict[str, Any]) -> dict[str, Any]:
    key = media.TEXT_PARTS[part["type"]]
    return {"type": part["type"], key: part.get(key)}


def _completions(tree: dict[str, Any]) -> Request:
    body = _converted(tree, _CompletionsBody)
    params = _params(body)
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
    # A null max_tokens is not a missing one: it takes what room is left.
    max_tokens = body.max_tokens if "max_tokens" in tree else COMPLETIONS_MAX_TOKENS
    add = body.add_special_tokens is not False
    return _request("completions", body, params, max_tokens, prompt=_prompt(body.prompt), add_special_tokens=add)


def _request(kind: str, body: _Body, params: dict[str, Any], max_tokens: int | None, **rest: Any) -> Request:
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        raise Unsupported(
            "is not supported.", field="stream_options.continuous_usage_stats", remedy="Usage comes with the end."
        )
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise BadRequest(f"is over max_tokens {max_tokens}.", field="min_tokens", remedy="Lower it.")
    said = [] if body.resume is None else body.resume.token_ids
    hindrance = _hindrance(body, params, rest.get("engine_chat") is not None)
    if said:
        if hindrance:
            raise NotResumable(f"An answer with {hindrance} cannot be resumed.", field="resume", remedy="Begin anew.")
        max_tokens = _less(params, max_tokens, len(said))
    return Request(
        said=said,
        resumable=body.resume is not None and not hindrance,
        kind=kind,
        params=params,
        max_tokens=max_tokens,
        client_salt=_salt(body.cache_salt),
        include_usage=options is None or options.include_usage is not False,
        **rest,
    )


def _hindrance(body: _Body, params: dict[str, Any], is_read_by_engine: bool) -> str:
    """What of an answer's state is not in its tokens, so that no other engine could go on with it; empty: nothing."""
    hindrances = {
        "n over 1": (body.n or 1) > 1,
        "logprobs": "logprobs" in params,
        "tools, reasoning or images": is_read_by_engine,
        "a format": "response_format" in params or "structured_outputs" in params,
        "presence_penalty": bool(body.presence_penalty),
        "frequency_penalty": bool(body.frequency_penalty),
        "bad_words": bool(body.bad_words),
        "a seed": body.seed is not None and body.temperature != 0,
        # Without it a stop's beginning is never shown before the stop is ruled out.
        "include_stop_str_in_output": bool(body.stop) and bool(body.include_stop_str_in_output),
    }
    return next((name for name, is_there in hindrances.items() if is_there), "")


def _less(params: dict[str, Any], max_tokens: int | None, said: int) -> int | None:
    """`max_tokens`, and `params`' min_tokens, without the `said`.

    :raises BadRequest: nothing is left to be said."""
    if params.get("min_tokens"):
        params["min_tokens"] = max(0, params["min_tokens"] - said)
    if max_tokens is None:
        return None
    if said >= max_tokens:
        raise BadRequest(
            f"holds {said} tokens, and max_tokens is {max_tokens}.",
            field="resume.token_ids",
            remedy="The answer is complete.",
        )
    return max_tokens - said


def _params(body: _Body) -> dict[str, Any]:
    if (body.n or 1) > 1 and body.temperature == 0:
        raise BadRequest("must be 1 with temperature 0: all answers would be one.", field="n", remedy="Set it to 1.")
    for token_id, bias in (body.logit_bias or {}).items():
        if not _TOKEN_ID.match(token_id) or not -100 <= bias <= 100:
            raise BadRequest(
                f"{token_id[:20]!r}: {bias}", field="logit_bias", remedy="Map token ids to numbers from -100 to 100."
            )
    params = {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    if body.response_format is not None:
        kind = body.response_format.get("type")
        if kind not in ("text", "json_object", "json_schema", "structural_tag"):
            raise Unsupported(
                f"{_shown(kind, 40)} is not known.", field="response_format.type", remedy="Use json_schema."
            )
        if kind == "json_schema" and not isinstance(body.response_format.get("json_schema"), dict):
            raise BadRequest("is missing.", field="response_format.json_schema", remedy="Give the schema.")
        if kind == "text":
            del params["response_format"]
    return _plain(params, "structured_outputs")


def _plain(tree: dict[str, Any], field: str) -> dict[str, Any]:
    """What the engine gets must be JSON as deep as it goes; made plain here, so that nothing fails later.

    :raises BadRequest: it is too deep."""
    try:
        plain: dict[str, Any] = orjson.loads(orjson.dumps(tree))
    except (TypeError, ValueError, RecursionError) as exc:
        raise BadRequest(f"cannot be passed on ({exc}).", field=field, remedy="Simplify it.") from exc
    return plain


def _salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > MAX_SALT_CHARS or set(salt) & set("@/\\\0"):
        raise BadRequest(
            f"must be 1 to {MAX_SALT_CHARS} characters without @, /, \\ and NUL.",
            field="cache_salt",
            remedy="Use random base64url.",
        )
    return salt


def _message(message: _ChatMessage, field: str, takes_images: bool) -> Message:
    if message.role not in ROLES:
        # Some templates build special tokens out of the role.
        raise BadRequest(f"{message.role[:40]!r} is no role.", field=f"{field}.role", remedy=f"Use {', '.join(ROLES)}.")
    for i, call in enumerate(message.tool_calls or []):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("has no name.", field=f"{field}.tool_calls[{i}].function", remedy="Name the function.")
    _check_tools(message.tools, f"{field}.tools")
    return Message(
        role=message.role,
        parts=_parts(message.content, f"{field}.content", takes_images),
        name=message.name,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning if message.reasoning is not None else message.reasoning_content,
        tools=message.tools,
    )


def _parts(content: Any, field: str, takes_images: bool) -> list[str | Medium]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadRequest("is no string, array or null.", field=field, remedy="Send text.")
    parts: list[str | Medium] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            parts.append(part)
            continue
        if not isinstance(part, dict):
            raise BadRequest("is no content part.", field=f"{field}[{i}]", remedy='Use {"type": "text", "text": ...}.')
        if takes_images and media.is_medium(part):
            parts.append(media.of_part(part))
            continue
        kind = part.get("type")
        key = media.TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise Unsupported(
                f"{_shown(kind, 40)} parts are not taken by this model.",
                field=f"{field}[{i}].type",
                remedy="Send text parts.",
            )
        text = part.get(key)
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise BadRequest("is no string.", field=f"{field}[{i}].{key}", remedy="Send text.")
        parts.append(text)
    return parts


def _check_tools(tools: list[dict[str, Any]] | None, field: str) -> None:
    for i, tool in enumerate(tools or []):
        if tool.get("type", "function") != "function":
            raise Unsupported("can only be function.", field=f"{field}[{i}].type", remedy="Describe it as a function.")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("has no name.", field=f"{field}[{i}].function", remedy="Name the function.")


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise Unsupported("holds several prompts.", field="prompt", remedy="Send one request a prompt.")
    if isinstance(prompt, str | list) and not prompt:
        raise BadRequest("is empty.", field="prompt", remedy="Send at least one token.")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
        raise BadRequest("is no string and no array of token ids.", field="prompt", remedy="Send one of these.")
    return prompt
