"""What vLLM's chunks say, whatever is missing from them or null in them."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.errors import EngineFailed
from prefixbus.worker_bridge import engine_chunks
from prefixbus.worker_bridge.chunks import Piece, Usage
from prefixbus.worker_bridge.engine_chunks import Chunk


def chat(*choices: dict[str, Any], **rest: Any) -> Chunk:
    return engine_chunks.of_chat(json.dumps({"model": "m", "choices": choices, **rest}).encode())


def completion(*choices: dict[str, Any], **rest: Any) -> Chunk:
    return engine_chunks.of_completions(json.dumps({"model": "m", "choices": choices, **rest}).encode())


def test_a_completion_with_all_that_can_be_in_it() -> None:
    chunk = completion(
        {
            "index": 1,
            "text": "a",
            "logprobs": {"tokens": ["a"]},
            "finish_reason": "stop",
            "stop_reason": 7,
            "prompt_token_ids": [1, 2],
            "token_ids": [5],
        }
    )

    assert chunk == Chunk([Piece(1, "a", "stop", b'{"tokens": ["a"]}', stop_reason=b"7", token_ids=[5])], "m")


def test_nulls_are_nothing() -> None:
    nulls = dict.fromkeys(["logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"])

    assert completion({"index": 0, "text": "a", **nulls}, usage=None).pieces == [Piece(0, "a")]
    assert chat({"index": 0, "delta": {"content": "a"}, **nulls}, prompt_token_ids=None) == Chunk([Piece(0, "a")], "m")
    assert chat({"index": 0, "delta": {"content": None, "reasoning": "b", "tool_calls": None}}).pieces == [
        Piece(0, "", reasoning="b")
    ]


def test_a_chats_opening_says_the_prompt_and_no_more() -> None:
    chunk = chat({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[3, 2**32 - 1])

    assert (chunk.pieces, chunk.prompt) == ([], array("I", [3, 2**32 - 1]).tobytes())


def test_what_parsers_made_nothing_of_is_not_passed_on_but_an_end_is() -> None:
    assert chat({"index": 0, "delta": {}, "token_ids": [4]}).pieces == []
    assert chat({"index": 0, "delta": {}, "finish_reason": "tool_calls"}).pieces == [Piece(0, "", "tool_calls")]


def test_calls_pass_as_they_come() -> None:
    call = '[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":""}}]'

    chunk = engine_chunks.of_chat(f'{{"choices":[{{"index":0,"delta":{{"tool_calls":{call}}}}}]}}'.encode())

    assert chunk.pieces == [Piece(0, "", tool_calls=call.encode())]


def test_usage_has_the_details_that_the_engine_gives() -> None:
    counts = {"prompt_tokens": 10, "total_tokens": 15, "completion_tokens": 5}

    assert completion(usage=counts).usage == Usage(10, 5)
    assert chat(
        usage={
            **counts,
            "prompt_tokens_details": {"cached_tokens": 8, "multimodal_tokens": None},
            "completion_tokens_details": {"reasoning_tokens": 3},
        }
    ).usage == Usage(10, 5, 8, 3)
    assert completion(usage={**counts, "prompt_tokens_details": {"cached_tokens": None}}).usage == Usage(10, 5)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_end_that_nobody_asked_for_is_a_failure(reason: str) -> None:
    with pytest.raises(EngineFailed):
        completion({"index": 0, "text": "", "finish_reason": reason})
    with pytest.raises(EngineFailed):
        chat({"index": 0, "delta": {}, "finish_reason": reason})


def test_an_error_in_the_stream_is_told_with_its_status() -> None:
    told = {"error": {"message": "no", "type": "x", "param": None, "code": 400}}

    assert (completion(**told).error, completion(**told).status) == ("no", 400)
    assert chat(**{"error": {"message": "", "code": "odd"}}).status == 500
    assert chat(message="old form").error == "old form"


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b'{"choices":5}', b'{"choices":[{"delta":{"content":"\xff"}}]}', b'{"prompt_token_ids":[-1]}', b"{"],
)
def test_what_is_no_chunk_is_the_engines_failure(line: bytes) -> None:
    with pytest.raises(EngineFailed):
        engine_chunks.of_chat(line)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_prompts_differ_where_the_first_token_does(ours: list[int], theirs: list[int]) -> None:
    at = engine_chunks.first_difference(array("I", ours).tobytes(), array("I", theirs).tobytes())

    if at is None:
        assert ours == theirs
    else:
        assert ours != theirs and ours[:at] == theirs[:at] and ours[at : at + 1] != theirs[at : at + 1]
