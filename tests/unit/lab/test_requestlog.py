"""A line of a log of requests, and the trace that is made of them."""

import json
import struct
from typing import Any

import msgspec
import pytest

from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import BadRequest, InvalidJson, PrefixbusError
from prefixbus.lab import requestlog, traces
from prefixbus.lab.requestlog import Entry, Trace
from prefixbus.tokenizer.classify import PRIOR_TOKENS

CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello, whoever you are."}]}


def entry(tenant_field: str = "tenant", **fields: Any) -> Entry:
    return requestlog.entry(json.dumps({**CHAT, **fields}).encode(), LimitsSection(), tenant_field)


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


# --- a line


def test_a_line_is_a_body_or_has_one() -> None:
    bare = entry()
    beside = requestlog.entry(
        json.dumps({"request": CHAT, "response": {"usage": {"completion_tokens": 7}}}).encode(),
        LimitsSection(),
        "tenant",
    )

    assert bare.request == beside.request
    assert (bare.output_tokens, beside.output_tokens) == (None, 7)
    assert entry(usage={"completion_tokens": 9}).output_tokens == 9


@pytest.mark.parametrize(
    ("given", "at_ms"),
    [
        (None, None),
        (1_700_000_000, 1.7e12),
        (1_700_000_000_123, 1_700_000_000_123.0),
        (12.5, 12_500.0),
        ("2023-11-14T22:13:20Z", 1.7e12),
        ("2023-11-14T22:13:20", 1.7e12),
        ("2023-11-14T23:13:20+01:00", 1.7e12),
    ],
)
def test_times_are_seconds_milliseconds_or_iso(given: Any, at_ms: float | None) -> None:
    assert entry(timestamp=given).at_ms == at_ms


def test_who_may_share_is_the_field_that_is_named() -> None:
    assert entry(user="ann", tenant="acme").tenant == "acme"
    assert entry("user", user="ann", tenant="acme").tenant == "ann"
    assert entry().tenant == ""


def test_a_class_is_as_given_or_as_the_tokenizer_finds_it() -> None:
    answered = [*CHAT["messages"], {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}]

    assert entry(**{"class": "rag"}).prefix_class == "rag"
    assert entry().prefix_class == "system"
    assert entry(messages=answered).prefix_class == "session"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"{", "line"),
        (b"[1]", "line"),
        (b"{}", "messages"),
        (b'{"messages": 5}', "messages"),
        (b'{"prompt": "x", "echo": true}', "echo"),
        (b'{"prompt": "x", "timestamp": "yesterday"}', "timestamp"),
        (b'{"prompt": "x", "timestamp": true}', "timestamp"),
        (b'{"prompt": "x", "timestamp": -1}', "timestamp"),
        (b'{"prompt": "x", "tenant": ["a"]}', "tenant"),
        (b'{"prompt": "x", "class": "none"}', "class"),
        (b'{"prompt": "x", "usage": {"completion_tokens": "7"}}', "usage.completion_tokens"),
    ],
)
def test_what_is_no_request_is_named_by_its_field(line: bytes, field: str) -> None:
    with pytest.raises(PrefixbusError) as raised:
        requestlog.entry(line, LimitsSection(), "tenant")

    assert isinstance(raised.value, BadRequest | InvalidJson)
    assert raised.value.field == field


# --- the trace


def test_equal_beginnings_have_equal_ids_in_one_tenant_only() -> None:
    trace = Trace(2)
    trace.add(entry(tenant="acme", timestamp=5), tokens(1, 2, 3, 4, 5))
    trace.add(entry(tenant="acme", timestamp=6), tokens(1, 2, 9, 9))
    trace.add(entry(tenant="globex", timestamp=7), tokens(1, 2))

    made = trace.lines()

    assert [line.hash_ids for line in made] == [[0, 1], [0, 2], [3]]
    assert [line.input_length for line in made] == [5, 4, 2]
    assert [line.tenant for line in made] == ["tenant-0", "tenant-0", "tenant-1"]
    assert [line.timestamp for line in made] == [0.0, 1000.0, 2000.0]


def test_a_trace_is_in_the_order_of_time_from_0_on() -> None:
    trace = Trace(2)
    for at in (30, 10, None, 20):
        trace.add(entry(timestamp=at), tokens(1))

    assert [line.timestamp for line in trace.lines()] == [0.0, 0.0, 10_000.0, 20_000.0]
    assert trace.untimed_count == 1


def test_requests_without_times_come_one_a_second() -> None:
    trace = Trace(2)
    for _ in range(3):
        trace.add(entry(), tokens(1))

    assert [line.timestamp for line in trace.lines()] == [0.0, 1000.0, 2000.0]


def test_an_answer_of_unknown_length_is_as_long_as_others_within_its_limit() -> None:
    trace = Trace(2)
    trace.add(entry(), tokens(1))
    trace.add(entry(max_tokens=5), tokens(1))
    trace.add(entry(usage={"completion_tokens": 3}), tokens(1))

    assert [line.output_length for line in trace.lines()] == [PRIOR_TOKENS, 5, 3]
    assert trace.estimated_count == 2


def test_what_is_made_can_be_read_as_a_trace() -> None:
    trace = Trace(2)
    trace.add(entry(tenant="acme", **{"class": "rag"}), tokens(1, 2, 3))

    (line,) = traces.read([msgspec.json.encode(one) for one in trace.lines()], 2)

    assert line == trace.lines()[0]
    assert line.prefix_class == "rag"
