"""Every answer ends once, and says in its headers how."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import errors, frames


def test_an_end_counts_the_chunks_before_it() -> None:
    assert frames.final_headers("r", seq=3, attempt=2) == {
        "Pb-Request-Id": "r",
        "Pb-Final": "1",
        "Pb-Seq": "3",
        "Pb-Attempt": "2",
    }


def test_an_error_ends_the_answer_with_its_code_and_a_sentence() -> None:
    error = errors.TooLarge("9 bytes.", field="body", remedy="Send less.")

    assert frames.error_headers(error, "r") == {
        "Pb-Request-Id": "r",
        "Pb-Final": "1",
        "Pb-Seq": "0",
        "Pb-Error": "too_large",
        "Nats-Service-Error-Code": "413",
        "Nats-Service-Error": "body: 9 bytes. Send less.",
    }


def test_a_chunk_is_numbered() -> None:
    assert frames.chunk_headers("r", seq=0, attempt=1) == {"Pb-Request-Id": "r", "Pb-Seq": "0", "Pb-Attempt": "1"}


def test_a_keep_alive_is_a_chunk_without_choices_and_without_a_number() -> None:
    body = orjson.loads(frames.keepalive("chat", "m", "r", 5))

    assert body == {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": []}
    assert frames.keepalive_headers("label") == {"Pb-Request-Id": "label"}


def test_completions_have_their_own_names() -> None:
    body = orjson.loads(frames.keepalive("completions", "m", "r", 5))

    assert (body["id"], body["object"]) == ("cmpl-r", "text_completion")


@given(st.text())
def test_any_text_is_one_bounded_line_of_ascii(text: str) -> None:
    line = frames.one_line(text)

    assert len(line) <= frames.MAX_SENTENCE
    assert line.isascii()
    assert line.isprintable()
    assert line == line.strip()


@pytest.mark.parametrize(("worker", "told"), [("", {}), ("w1", {"Pb-Worker": "w1"})])
def test_the_first_chunk_names_its_worker_only_where_that_is_allowed(worker: str, told: dict[str, str]) -> None:
    headers = frames.first_headers(decision="blind", prompt_tokens=5, predicted_tokens=3, worker=worker)

    assert headers == {"Pb-Decision": "blind", "Pb-Prompt-Tokens": "5", "Pb-Predicted-Tokens": "3", **told}
