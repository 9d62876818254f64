"""Whatever a client sends, it becomes a checked request or an error that names what is wrong."""

import json
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import models

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import ContextTooLong, DeadlineExceeded, PrefixbusError, TooLarge
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.intake import NO_PARSERS, Parsers, Request
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.work import Workshop

LIMITS = LimitsSection()
WALL = 1_700_000_000.0
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLS = {**HELLO, "tools": [WEATHER]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALL_PARSERS = Parsers(tools=True, reasoning=True)


def parse(body: Any, limits: LimitsSection = LIMITS, parsers: Parsers = NO_PARSERS) -> Request:
    return intake.parse(body if isinstance(body, bytes) else orjson.dumps(body), "m", limits, parsers)


BAD: dict[str, tuple[Any, str, str]] = {
    "nothing": (b"", "invalid_json", "body"),
    "not JSON": (b"{", "invalid_json", "body"),
    "an array": (b"[]", "invalid_json", "body"),
    "10,000 nested arrays": (b"[" * 10_000 + b"]" * 10_000, "invalid_json", "body"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "invalid_json", "body"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', "invalid_json", "body"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "body"),
    "another model": ({**HELLO, "model": "other"}, "model_mismatch", "model"),
    "a model of another type": ({**HELLO, "model": {"a": 1}}, "model_mismatch", "model"),
    "neither messages nor prompt": ({"model": "m"}, "bad_request", "messages"),
    "both": ({**HELLO, **PROMPT}, "bad_request", "prompt"),
    "empty messages": ({"messages": []}, "bad_request", "messages"),
    "messages of another type": ({"messages": {"role": "user"}}, "bad_request", "messages"),
    "no role": ({"messages": [{"content": "x"}]}, "bad_request", "messages[0]"),
    "an unknown role": ({"messages": [{"role": "endoftext", "content": "x"}]}, "bad_request", "messages[0].role"),
    "content of another type": ({"messages": [{"role": "user", "content": 5}]}, "bad_request", "messages[0].content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported",
        "messages[0].content[0].type",
    ),
    "a part of another type": (
        {"messages": [{"role": "user", "content": [7]}]},
        "bad_request",
        "messages[0].content[0]",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "bad_request",
        "messages[0].content[0].text",
    ),
    "a call without a function": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "bad_request",
        "messages[0].tool_calls[0].function",
    ),
    "no tools in tools": ({**HELLO, "tools": []}, "bad_request", "tools"),
    "a nameless tool": (
        {**HELLO, "tools": [{"type": "function", "function": {}}]},
        "bad_request",
        "tools[0].function",
    ),
    "a forced tool of none": ({**HELLO, "tool_choice": "required"}, "bad_request", "tool_choice"),
    "a forced tool that no parser finds": ({**TOOLS, "tool_choice": "required"}, "unsupported", "tool_choice"),
    "a named tool that no parser finds": ({**TOOLS, "tool_choice": NAMED}, "unsupported", "tool_choice"),
    "an unknown choice": ({**TOOLS, "tool_choice": "perhaps"}, "bad_request", "tool_choice"),
    "a choice among some tools": (
        {**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "unsupported",
        "tool_choice.type",
    ),
    "a choice of nothing": (
        {**TOOLS, "tool_choice": {"type": "function"}},
        "bad_request",
        "tool_choice.function.name",
    ),
    "a choice that is no tool": (
        {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
        "bad_request",
        "tool_choice.function.name",
    ),
    "a custom tool": (
        {**HELLO, "tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "unsupported",
        "tools[0].type",
    ),
    "a budget for thoughts": ({**HELLO, "thinking_token_budget": 5}, "unsupported", "thinking_token_budget"),
    "few words": ({**HELLO, "verbosity": "low"}, "unsupported", "verbosity"),
    "usage in every chunk": (
        {**HELLO, "stream_options": {"continuous_usage_stats": True}},
        "unsupported",
        "stream_options.continuous_usage_stats",
    ),
    "the ids of the answer": ({**HELLO, "return_token_ids": True}, "unsupported", "return_token_ids"),
    "a budget for thoughts of a completion": (
        {**PROMPT, "thinking_token_budget": 5},
        "unsupported",
        "thinking_token_budget",
    ),
    "an id in the body": ({**PROMPT, "request_id": "mine"}, "unsupported", "request_id"),
    "offsets of tokens": ({**HELLO, "return_token_offsets": True}, "unsupported", "return_token_offsets"),
    "a watermark": ({**PROMPT, "watermarking": True}, "unsupported", "watermarking"),
    "a resumption of another type": ({**PROMPT, "resume": [1]}, "bad_request", "resume"),
    "more said than may be": (
        {**PROMPT, "max_tokens": 2, "resume": {"token_ids": [1, 2]}},
        "bad_request",
        "resume.token_ids",
    ),
    "two ends": (
        {**HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "bad_request",
        "continue_final_message",
    ),
    "a template of its own": ({**HELLO, "chat_template": "x"}, "unsupported", "chat_template"),
    "a template by the back door": (
        {**HELLO, "chat_template_kwargs": {"chat_template": "x"}},
        "unsupported",
        "chat_template_kwargs.chat_template",
    ),
    "top_logprobs alone": ({**HELLO, "top_logprobs": 2}, "bad_request", "top_logprobs"),
    "an empty prompt": ({"prompt": ""}, "bad_request", "prompt"),
    "no ids": ({"prompt": []}, "bad_request", "prompt"),
    "several prompts": ({"prompt": ["a", "b"]}, "unsupported", "prompt"),
    "several lists of ids": ({"prompt": [[1], [2]]}, "unsupported", "prompt"),
    "ids and others": ({"prompt": [1, "a"]}, "bad_request", "prompt"),
    "ids and booleans": ({"prompt": [1, True]}, "bad_request", "prompt"),
    "max_tokens 0": ({**PROMPT, "max_tokens": 0}, "bad_request", "max_tokens"),
    "max_tokens as text": ({**PROMPT, "max_tokens": "5"}, "bad_request", "max_tokens"),
    "min over max": ({**PROMPT, "max_tokens": 5, "min_tokens": 6}, "bad_request", "min_tokens"),
    "a negative temperature": ({**PROMPT, "temperature": -0.1}, "bad_request", "temperature"),
    "top_p 0": ({**PROMPT, "top_p": 0}, "bad_request", "top_p"),
    "n 0": ({**PROMPT, "n": 0}, "bad_request", "n"),
    "many greedy answers": ({**PROMPT, "n": 2, "temperature": 0}, "bad_request", "n"),
    "an empty stop": ({**PROMPT, "stop": ["a", ""]}, "bad_request", "stop[1]"),
    "a bias for a word": ({**PROMPT, "logit_bias": {"yes": 1}}, "bad_request", "logit_bias"),
    "too strong a bias": ({**PROMPT, "logit_bias": {"1": 101}}, "bad_request", "logit_bias"),
    "an unknown format": ({**PROMPT, "response_format": {"type": "xml"}}, "unsupported", "response_format.type"),
    "no schema": (
        {**PROMPT, "response_format": {"type": "json_schema"}},
        "bad_request",
        "response_format.json_schema",
    ),
    "echo": ({**PROMPT, "echo": True}, "unsupported", "echo"),
    "KV of its own": ({**PROMPT, "kv_transfer_params": {"a": 1}}, "unsupported", "kv_transfer_params"),
    "best_of": ({**PROMPT, "best_of": 3}, "unsupported", "best_of"),
    "sound": ({**HELLO, "modalities": ["text", "audio"]}, "unsupported", "modalities"),
    "an empty salt": ({**PROMPT, "cache_salt": ""}, "bad_request", "cache_salt"),
    "a long salt": ({**PROMPT, "cache_salt": "x" * 129}, "bad_request", "cache_salt"),
    "a salt with a slash": ({**PROMPT, "cache_salt": "a/b"}, "bad_request", "cache_salt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_gets_an_error_that_names_the_field(name: str) -> None:
    body, code, field = BAD[name]

    with pytest.raises(PrefixbusError) as caught:
        parse(body)

    assert (caught.value.code, caught.value.field) == (code, field)
    assert caught.value.remedy


def test_a_body_over_the_limit_is_not_parsed() -> None:
    with pytest.raises(TooLarge, match="101 bytes are over the limit of 100"):
        parse(b"[" * 101, LimitsSection(max_body_bytes=100))


def test_what_openai_clients_send_beside_is_ignored() -> None:
    extra = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "nonsense": [1],
        "echo": False,
    }

    assert parse({**HELLO, **extra}) == parse(HELLO)


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(["temperature", "stop", "tools", "logit_bias", "n", "stream", "stream_options", "cache_salt"])

    assert parse({**HELLO, **nulls, "model": None}) == parse(HELLO)


def test_sampling_goes_to_the_engine_under_its_names() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a"],
        "stop_token_ids": [5],
        "n": 2,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "logit_bias": {"5": -100},
        "bad_words": ["no"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }

    request = parse(
        {**HELLO, **sampling, "max_completion_tokens": 9, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    )

    wanted = {**sampling, "max_tokens": 9, "logprobs": 3}
    assert orjson.loads(intake.engine_params(request, request.max_tokens or 0)) == wanted


CALLS: dict[str, tuple[dict[str, Any], Parsers, bool]] = {
    "no tools": (HELLO, ALL_PARSERS, True),
    "no tools, no thoughts": (HELLO, Parsers(tools=True), False),
    "tools": (TOOLS, Parsers(tools=True), True),
    "tools that nobody finds in the answer": (TOOLS, NO_PARSERS, False),
    "tools by choice": ({**TOOLS, "tool_choice": "auto"}, Parsers(tools=True), True),
    "a tool for certain": ({**TOOLS, "tool_choice": "required"}, Parsers(tools=True), True),
    "this tool": ({**TOOLS, "tool_choice": NAMED}, Parsers(tools=True), True),
    "tools to be seen alone": ({**TOOLS, "tool_choice": "none"}, Parsers(tools=True), False),
    "thoughts": (HELLO, Parsers(reasoning=True), True),
    "a completion": (PROMPT, ALL_PARSERS, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_only_the_engines_parsers_can_read_goes_to_its_chat_endpoint(name: str) -> None:
    body, parsers, is_read_by_engine = CALLS[name]

    request = parse(body, parsers=parsers)

    assert (request.engine_chat is not None) == is_read_by_engine
    assert bool(intake.engine_chat(request)) == is_read_by_engine


def test_the_chat_endpoint_is_given_what_it_needs_and_nothing_else() -> None:
    chat: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "hi", "nonsense": 1},
            {"role": "user", "content": ["a", {"type": "text", "text": "b", "image_url": {"url": "c"}, "uuid": "d"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "weather"}}]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
        ],
        "tools": [WEATHER],
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "include_reasoning": False,
    }
    sampling = {"temperature": 0.5, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}

    request = parse({**chat, **sampling, "user": "u", "cache_salt": "s", "stream": True}, parsers=ALL_PARSERS)

    wanted = {**chat, "add_generation_prompt": True}
    wanted["messages"][0] = {"role": "user", "content": "hi"}
    # With what it had besides, vLLM would take the text for an image that its client has named.
    wanted["messages"][1] = {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}
    assert orjson.loads(intake.engine_chat(request)) == wanted
    assert orjson.loads(intake.engine_params(request, 9)) == sampling


def test_a_tool_as_deep_as_no_engine_would_take_it_is_refused() -> None:
    body = orjson.dumps({**HELLO, "tools": [{"type": "function", "function": {"name": "x", "parameters": "DEEP"}}]})

    with pytest.raises(PrefixbusError) as caught:
        parse(body.replace(b'"DEEP"', b'{"x":' * 400 + b"1" + b"}" * 400), parsers=ALL_PARSERS)

    assert caught.value.code == "bad_request"


def test_a_resumed_answer_has_what_is_left_to_be_said() -> None:
    asked = {**PROMPT, "max_tokens": 9, "min_tokens": 5, "stop": ["x"], "seed": 3, "temperature": 0}

    first, later, late = (parse({**asked, "resume": {"token_ids": ids}}) for ids in ([], [7, 8, 9], [7] * 6))

    assert first == msgspec.structs.replace(parse(asked), resumable=True)
    assert (first.max_tokens, later.max_tokens, late.max_tokens) == (9, 6, 3)
    assert [request.params.get("min_tokens") for request in (first, later, late)] == [5, 2, 0]
    assert (later.said, later.resumable) == ([7, 8, 9], True)


def test_without_a_limit_a_resumed_answer_has_none() -> None:
    assert parse({**HELLO, "resume": {"token_ids": [1]}}).max_tokens is None


NOT_RESUMABLE: dict[str, dict[str, Any]] = {
    "several choices": {**HELLO, "n": 2},
    "logprobs": {**HELLO, "logprobs": True},
    "logprobs of a completion": {**PROMPT, "logprobs": 0},
    "calls": TOOLS,
    "a format": {**HELLO, "response_format": {"type": "json_object"}},
    "a grammar": {**PROMPT, "structured_outputs": {"regex": "a"}},
    "what was said costs": {**PROMPT, "frequency_penalty": 0.5},
    "what is there costs": {**PROMPT, "presence_penalty": 0.5},
    "words not to be said": {**PROMPT, "bad_words": ["a b"]},
    "a chain of chances": {**PROMPT, "seed": 3},
    "a stop that is shown": {**PROMPT, "stop": "x", "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("name", NOT_RESUMABLE)
def test_an_answer_whose_state_is_not_in_its_tokens_is_not_resumed(name: str) -> None:
    body, parsers = NOT_RESUMABLE[name], Parsers(tools=True)

    assert not parse({**body, "resume": {}}, parsers=parsers).resumable
    with pytest.raises(PrefixbusError) as caught:
        parse({**body, "resume": {"token_ids": [1]}}, parsers=parsers)

    assert (caught.value.code, caught.value.field) == ("not_resumable", "resume")


def test_nobody_who_does_not_ask_pays_for_resumption() -> None:
    assert not parse(HELLO).resumable
    assert not parse({**HELLO, "resume": None}).resumable


def test_text_as_the_format_is_no_constraint() -> None:
    assert "response_format" not in parse({**HELLO, "response_format": {"type": "text"}}).params


def test_usage_is_sent_unless_declined() -> None:
    assert parse(HELLO).include_usage
    assert not parse({**HELLO, "stream": True, "stream_options": {"include_usage": False}}).include_usage


def test_one_prompt_in_a_list_is_that_prompt() -> None:
    assert parse({"prompt": ["hi"]}) == parse({"prompt": "hi"})
    assert parse({"prompt": [[1, 2]]}).prompt == [1, 2]


FITS: dict[str, tuple[Any, int, int | None]] = {
    "chat fills the room": (HELLO, 60, 40),
    "chat, one token left": (HELLO, 99, 1),
    "chat, none left": (HELLO, 100, None),
    "chat asks for what fits": ({**HELLO, "max_tokens": 40}, 60, 40),
    "chat asks for more": ({**HELLO, "max_tokens": 41}, 60, None),
    "completions take 16": (PROMPT, 60, 16),
    "completions' 16 do not fit": (PROMPT, 85, None),
    "completions with null fill the room": ({**PROMPT, "max_tokens": None}, 85, 15),
}


@pytest.mark.parametrize("name", FITS)
def test_prompt_and_answer_fit_as_in_vllm(name: str) -> None:
    body, prompt_tokens, max_tokens = FITS[name]

    if max_tokens is None:
        with pytest.raises(ContextTooLong, match="100"):
            intake.fit(parse(body), prompt_tokens, 100)
    else:
        assert intake.fit(parse(body), prompt_tokens, 100) == max_tokens


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PrefixbusError, match="empty"):
        intake.fit(parse(HELLO), 0, 100)


def test_a_hopeless_text_is_refused_before_it_is_tokenised() -> None:
    intake.refuse_if_hopeless(parse(PROMPT), 990, 10, 100)
    with pytest.raises(ContextTooLong, match="at least 100 tokens"):
        intake.refuse_if_hopeless(parse(PROMPT), 991, 10, 100)
    with pytest.raises(ContextTooLong, match="100 messages are at least 100 tokens"):
        intake.refuse_if_hopeless(parse({"messages": HELLO["messages"] * 100}), 100, 10, 100)


def test_headers_are_read() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"Pb-Request-Id": "r-1", "Pb-Deadline": str(WALL + 5), "Pb-Prefix-Class": "rag", "traceparent": trace}
    headers["Pb-Sending"] = "2"

    envelope = intake.envelope(headers, LIMITS, WALL)

    assert envelope == intake.Envelope(WALL + 5 + LIMITS.clock_skew_s, "rag", trace, 2)


def test_without_headers_the_default_deadline_holds() -> None:
    assert intake.envelope(None, LIMITS, WALL) == intake.Envelope(WALL + LIMITS.default_deadline_s, "", "", 1)


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "00",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    ],
)
def test_a_malformed_trace_is_ignored(trace: str) -> None:
    assert intake.envelope({"traceparent": trace}, LIMITS, WALL).traceparent == ""


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Pb-Request-Id": "a.b"}, "Pb-Request-Id"),
        ({"Pb-Request-Id": "x" * 65}, "Pb-Request-Id"),
        ({"Pb-Prefix-Class": "other"}, "Pb-Prefix-Class"),
        ({"Pb-Sending": ""}, "Pb-Sending"),
        ({"Pb-Sending": "0"}, "Pb-Sending"),
        ({"Pb-Sending": "٢"}, "Pb-Sending"),
        ({"Pb-Sending": "10000"}, "Pb-Sending"),
        ({"Pb-Deadline": "soon"}, "Pb-Deadline"),
        ({"Pb-Deadline": "nan"}, "Pb-Deadline"),
        ({"Pb-Deadline": "-1"}, "Pb-Deadline"),
        ({"Pb-Deadline": str(WALL * 1000)}, "Pb-Deadline"),
    ],
)
def test_a_malformed_header_is_named(headers: dict[str, str], field: str) -> None:
    with pytest.raises(PrefixbusError) as caught:
        intake.envelope(headers, LIMITS, WALL)

    assert (caught.value.code, caught.value.field) == ("bad_request", field)


def test_a_deadline_has_passed_when_it_has_for_a_clock_within_the_skew() -> None:
    late = {"Pb-Deadline": str(WALL - LIMITS.clock_skew_s)}
    just_in_time = {"Pb-Deadline": str(WALL - LIMITS.clock_skew_s + 0.5)}

    assert intake.envelope(just_in_time, LIMITS, WALL).deadline_at > WALL
    with pytest.raises(DeadlineExceeded):
        intake.envelope(late, LIMITS, WALL)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known = st.sampled_from(
    [*intake._ChatBody.__struct_fields__, *intake._CompletionsBody.__struct_fields__, *intake._REFUSED]
)
message = st.dictionaries(st.sampled_from(intake._ChatMessage.__struct_fields__), json_values | st.just("user"))
bodies = st.dictionaries(known | st.text(max_size=8), json_values).flatmap(
    lambda body: st.sampled_from([body, {**HELLO, **body}, {**PROMPT, **body}])
) | st.builds(lambda messages: {"messages": messages}, st.lists(message))


@given(st.binary(max_size=200) | bodies.map(lambda body: json.dumps(body).encode()))
async def test_any_body_is_tokens_or_one_of_our_errors(body: bytes) -> None:
    at = Workshop(Memo(tenant_bytes=1 << 20, total_bytes=1 << 20), b"k" * 32, VirtualClock())

    try:
        request = parse(body)
        made = await at.tokens(models.load(models.tiny()), "t", "", request, 4096, len(body))
        max_tokens = intake.fit(request, len(made.ids) // 4, 4096)
        params = intake.engine_params(request, max_tokens)
    except PrefixbusError as exc:
        assert exc.code != "internal"
        assert exc.status < 500
        return

    assert orjson.loads(params)["max_tokens"] >= 1


@given(
    st.dictionaries(
        st.sampled_from(["Pb-Request-Id", "Pb-Deadline", "Pb-Prefix-Class", "Pb-Sending", "traceparent", "X"]),
        st.text(max_size=30) | st.floats().map(str) | st.integers().map(str),
    )
)
def test_any_headers_are_an_envelope_or_one_of_our_errors(headers: dict[str, str]) -> None:
    try:
        envelope = intake.envelope(headers, LIMITS, WALL)
    except PrefixbusError as exc:
        assert exc.code in ("bad_request", "deadline_exceeded")
        return

    assert WALL < envelope.deadline_at <= WALL + intake.MAX_DEADLINE_AHEAD_S + LIMITS.clock_skew_s
