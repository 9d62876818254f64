"""What clients read: OpenAI chunks out of what the engine generates, and the engine's stream cut into events."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.errors import EngineFailed
from prefixbus.worker_bridge import sse
from prefixbus.worker_bridge.chunks import ChunkWriter, Piece, Usage


def writer(kind: str = "chat", *, include_usage: bool = False) -> ChunkWriter:
    return ChunkWriter(kind, "org/model", "R1", 1_700_000_000, include_usage=include_usage)


def read(bodies: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(body) for body in bodies]


def test_a_chat_answer_begins_with_its_role_and_ends_with_its_usage() -> None:
    chunks = writer()

    bodies = read([*chunks.bodies([Piece(0, "Hel")]), *chunks.bodies([Piece(0, "lo", "stop")])])
    last = read(chunks.finish(Usage(10, 2, 8)))

    base = {
        "id": "chatcmpl-R1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "org/model",
    }
    first_choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": "Hel"},
        "logprobs": None,
        "finish_reason": None,
    }
    last_choice = {"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert bodies == [base | {"choices": [first_choice]}]
    assert last == [base | {"choices": [last_choice], "usage": usage}]


def test_usage_asked_for_comes_in_a_chunk_of_its_own() -> None:
    chunks = writer(include_usage=True)

    bodies = read([*chunks.bodies([Piece(0, "a", "length")]), *chunks.finish(Usage(3, 1))])

    assert [body["choices"] for body in bodies] == [
        [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": "length"}],
        [],
    ]
    assert bodies[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def test_a_completion_has_text_and_its_logprobs() -> None:
    chunks = writer("completions")

    (body,) = read(chunks.bodies([Piece(0, "x", None, b'{"tokens":["x"]}')]))

    assert (body["id"], body["object"]) == ("cmpl-R1", "text_completion")
    assert body["choices"] == [{"index": 0, "text": "x", "logprobs": {"tokens": ["x"]}, "finish_reason": None}]


def test_a_chats_logprobs_are_made_of_those_of_completions() -> None:
    """As vLLM's two endpoints say the same step: the chosen token first, and one more than was asked for."""
    chunks = ChunkWriter("chat", "m", "R1", 1, include_usage=False, alternatives=2)
    given_logprobs = {
        "tokens": [" a", "\ufffd"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{" a": -0.5, " b": -1.5, " c": -2.5}, None],
        "text_offset": [0, 2],
    }

    (body,) = read(chunks.bodies([Piece(0, " a", None, json.dumps(given_logprobs).encode())]))

    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": " a",
                "logprob": -0.5,
                "bytes": [32, 97],
                "top_logprobs": [
                    {"token": " a", "logprob": -0.5, "bytes": [32, 97]},
                    {"token": " b", "logprob": -1.5, "bytes": [32, 98]},
                ],
            },
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [239, 191, 189], "top_logprobs": []},
        ]
    }


def test_a_chats_own_logprobs_pass_as_they_come() -> None:
    (body,) = read(writer().bodies([Piece(0, "a", None, b'{"content":[{"token":"a"}]}')]))

    assert body["choices"][0]["logprobs"] == {"content": [{"token": "a"}]}


def test_what_the_engines_parsers_found_is_in_the_delta() -> None:
    call = b'[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{"}}]'
    chunks = writer()

    bodies = read(
        chunks.bodies([Piece(0, "", reasoning="Hm"), Piece(0, "", reasoning="m."), Piece(0, "", tool_calls=call)])
    )
    bodies += read([*chunks.bodies([Piece(0, "", "tool_calls")]), *chunks.finish(Usage(10, 4, None, 3))])

    assert [body["choices"][0]["delta"] for body in bodies] == [
        {"role": "assistant", "reasoning": "Hm"},
        {"reasoning": "m."},
        {"tool_calls": json.loads(call)},
        {},
    ]
    assert bodies[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert bodies[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_resumable_answer_shows_its_tokens_and_one_that_is_continued_has_no_role() -> None:
    chunks = ChunkWriter("chat", "m", "R1", 1, include_usage=True, is_continued=True, shows_tokens=True)

    bodies = read(chunks.bodies([Piece(0, "a", token_ids=[1]), Piece(0, "b", token_ids=[2, 3]), Piece(0, "", "stop")]))

    assert [body["choices"] for body in bodies] == [
        [
            {
                "index": 0,
                "delta": {"content": "ab"},
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": [1, 2, 3],
            }
        ]
    ]


def test_what_met_a_stop_is_said_with_the_end() -> None:
    (body,) = read(writer(include_usage=True).bodies([Piece(0, "a", "stop", stop_reason=b'"END"')]))

    assert body["choices"][0]["stop_reason"] == "END"


def test_pieces_that_came_together_are_one_chunk_a_choice() -> None:
    chunks = writer()

    bodies = read(chunks.bodies([Piece(0, "a"), Piece(0, "b"), Piece(1, "c"), Piece(0, "d"), Piece(0, "", "stop")]))

    assert [(body["choices"][0]["index"], body["choices"][0]["delta"]["content"]) for body in bodies] == [
        (0, "ab"),
        (1, "c"),
    ]
    (last,) = read(chunks.finish(Usage(1, 4)))
    assert last["choices"] == [{"index": 0, "delta": {"content": "d"}, "logprobs": None, "finish_reason": "stop"}]


texts = st.text(max_size=20)


@given(
    st.lists(st.tuples(st.integers(0, 2), texts), max_size=20),
    st.integers(1, 5),
    st.sampled_from(["chat", "completions"]),
    st.booleans(),
)
def test_no_text_is_lost_or_reordered(
    pieces: list[tuple[int, str]], at_once: int, kind: str, include_usage: bool
) -> None:
    chunks = writer(kind, include_usage=include_usage)
    ends = [Piece(index, "", "stop") for index in range(3)]
    given_pieces = [Piece(index, text) for index, text in pieces] + ends
    bodies: list[bytes] = []
    for start in range(0, len(given_pieces), at_once):
        bodies += chunks.bodies(given_pieces[start : start + at_once])
    bodies += chunks.finish(Usage(1, 1))

    said: dict[int, str] = {0: "", 1: "", 2: ""}
    ended: dict[int, int] = {0: 0, 1: 0, 2: 0}
    for body in read(bodies):
        for choice in body["choices"]:
            text = choice["text"] if kind == "completions" else choice["delta"].get("content", "")
            said[choice["index"]] += text
            ended[choice["index"]] += choice["finish_reason"] == "stop"
    assert said == {index: "".join(text for at, text in pieces if at == index) for index in range(3)}
    assert ended == {0: 1, 1: 1, 2: 1}
    assert "usage" in json.loads(bodies[-1])


@given(st.lists(st.binary(max_size=12).map(lambda raw: raw.hex().encode()), max_size=6), st.data())
def test_events_are_whole_however_the_stream_is_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(
        b": comment\ndata: " + payload + data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for payload in payloads
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    lines = sse.EventLines()

    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.feed(stream[start:end])

    assert found == payloads


def test_a_line_that_does_not_end_is_an_error() -> None:
    lines = sse.EventLines()

    with pytest.raises(EngineFailed):
        lines.feed(b"data: " + b"x" * sse.MAX_LINE_BYTES)
