"""Whatever a client sends, it becomes a checked request or an error that names what is wrong."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import models

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import ContextTooLong, DeadlineExceeded, PrefixbusError, TooLarge
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.intake import Request
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.work import Workshop

LIMITS = LimitsSection()
WALL = 1_700_000_000.0
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}


def parse(body: Any, limits: LimitsSection = LIMITS) -> Request:
    return intake.parse(body if isinstance(body, bytes) else orjson.dumps(body), "m", limits)


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
    "a forced tool": ({**HELLO, "tool_choice": "required"}, "unsupported", "tool_choice"),
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
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }

    request = parse(
        {**HELLO, **sampling, "max_completion_tokens": 9, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    )

    wanted = {**sampling, "max_tokens": 9, "logprobs": 3}
    assert orjson.loads(intake.engine_params(request, request.max_tokens or 0)) == wanted


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
