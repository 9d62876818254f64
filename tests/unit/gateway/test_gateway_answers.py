"""Chunks become whole answers and streams in OpenAI's form."""

from typing import Any

from prefixbus.gateway.answers import Whole, streamed

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [*choices], **more}


def part(index: int = 0, *, finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def whole(*chunks: dict[str, Any], is_chat: bool = True) -> dict[str, Any]:
    answer = Whole(is_chat=is_chat)
    for each in chunks:
        answer.add(each)
    return answer.body()


def test_a_whole_chat_is_its_texts_joined() -> None:
    body = whole(
        chunk(part(role="assistant", content="Hel")),
        chunk(part(content="lo")),
        chunk(part(finish="stop")),
        chunk(usage=USAGE),
    )

    assert body == {
        "id": "c1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": USAGE,
    }


def test_choices_that_come_mixed_are_kept_apart_and_in_order() -> None:
    body = whole(
        chunk(part(1, role="assistant", content="B")),
        chunk(part(0, role="assistant", content="A")),
        chunk(part(1, content="b", finish="stop")),
        chunk(part(0, content="a", finish="length")),
    )

    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "Aa", "length"),
        (1, "Bb", "stop"),
    ]


def test_tool_calls_are_joined_by_their_index() -> None:
    def call(index: int, arguments: str, **first: Any) -> dict[str, Any]:
        name = {"name": first.pop("name")} if "name" in first else {}
        return {"index": index, **first, "function": {**name, "arguments": arguments}}

    body = whole(
        chunk(part(role="assistant", content=None)),
        chunk(part(tool_calls=[call(0, "", id="x", type="function", name="add")])),
        chunk(part(tool_calls=[call(0, '{"a"')])),
        chunk(part(tool_calls=[call(1, "{}", id="y", type="function", name="now")])),
        chunk(part(tool_calls=[call(0, ": 1}")], finish="tool_calls")),
    )

    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "y", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_is_joined_beside_the_text() -> None:
    body = whole(
        chunk(part(role="assistant", reasoning="I ")), chunk(part(reasoning="think")), chunk(part(content="42"))
    )

    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think", "42")


def test_logprobs_of_a_chat_come_one_after_the_other() -> None:
    body = whole(
        chunk(part(content="a", logprobs={"content": [{"token": "a"}]})),
        chunk(part(content="b", logprobs={"content": [{"token": "b"}]})),
        chunk(part(finish="stop")),
    )

    assert body["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}


def test_a_whole_completion_has_text_and_lists_of_logprobs() -> None:
    def text(value: str, offset: int, finish: str | None = None) -> dict[str, Any]:
        lists = {"tokens": [value], "token_logprobs": [-1.0], "text_offset": [offset]}
        return {"index": 0, "text": value, "logprobs": lists, "finish_reason": finish}

    body = whole(chunk(text("a", 0)), chunk(text("b", 1, "length")), chunk(usage=USAGE), is_chat=False)

    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "finish_reason": "length",
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "text_offset": [0, 1]},
            "text": "ab",
        }
    ]
    assert body["usage"] == USAGE


def test_usage_in_a_stream_comes_if_it_was_asked_for_and_null_before_it() -> None:
    assert streamed(chunk(part(content="a")), include_usage=True) == chunk(part(content="a"), usage=None)
    assert streamed(chunk(usage=USAGE), include_usage=True) == chunk(usage=USAGE)


def test_usage_in_a_stream_does_not_come_unasked() -> None:
    assert streamed(chunk(part(content="a"), usage=USAGE), include_usage=False) == chunk(part(content="a"))
    assert streamed(chunk(usage=USAGE), include_usage=False) is None
