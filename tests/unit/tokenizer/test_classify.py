"""The class of a prefix comes from the request's shape, the length of its answer from the class's history."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.config import LimitsSection
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.classify import LONG_TEXT_CHARS, PRIOR_TOKENS, AnswerLengths, prefix_class

USER = {"role": "user", "content": "hi"}
LONG = "x" * (LONG_TEXT_CHARS + 1)
SHAPES: dict[str, tuple[Any, str]] = {
    "one short turn": ({"messages": [{"role": "system", "content": "s"}, USER]}, "system"),
    "a long text": ({"messages": [USER, {"role": "user", "content": LONG}]}, "document"),
    "a long text with a history": (
        {"messages": [{"role": "system", "content": LONG}, USER, {"role": "assistant", "content": "a"}, USER]},
        "session",
    ),
    "documents": ({"messages": [USER], "documents": [{"text": "t"}]}, "rag"),
    "a short prompt": ({"prompt": "hi"}, "system"),
    "a long prompt": ({"prompt": LONG}, "document"),
    "many ids": ({"prompt": [1] * (LONG_TEXT_CHARS + 1)}, "document"),
}


def request_of(body: Any) -> intake.Request:
    return intake.parse(orjson.dumps(body), "m", LimitsSection())


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_decides(name: str) -> None:
    body, wanted = SHAPES[name]

    assert prefix_class(request_of(body)) == wanted


def test_a_hint_wins() -> None:
    assert prefix_class(request_of({"prompt": "hi"}), "rag") == "rag"


def test_an_estimate_starts_from_the_prior_and_never_passes_max_tokens() -> None:
    lengths = AnswerLengths()

    assert lengths.estimate("rag", 10_000) == PRIOR_TOKENS
    assert lengths.estimate("rag", 16) == 16


def test_an_estimate_follows_its_own_class() -> None:
    lengths = AnswerLengths()

    for _ in range(500):
        lengths.observe("rag", 20)

    assert 20 <= lengths.estimate("rag", 10_000) <= 30
    assert lengths.estimate("session", 10_000) == PRIOR_TOKENS


@given(st.lists(st.integers(0, 100_000)), st.integers(1, 1_000_000))
def test_the_same_history_gives_the_same_estimate(history: list[int], max_tokens: int) -> None:
    one, other = AnswerLengths(), AnswerLengths()

    for tokens in history:
        one.observe("system", tokens)
        other.observe("system", tokens)

    assert 1 <= one.estimate("system", max_tokens) == other.estimate("system", max_tokens) <= max_tokens
