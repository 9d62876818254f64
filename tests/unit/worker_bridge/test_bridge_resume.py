"""Whoever has some frames of an answer can have it finished elsewhere, and nobody could tell."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.worker_bridge.chunks import Piece, Usage
from prefixbus.worker_bridge.resume import InStep, held_back_chars


def vllm(texts: list[str], said: int, stops: list[str], at_once: int = 1) -> Iterator[Piece]:
    """What vLLM streams of an answer whose token `n` has the text `texts[n]`, from token `said` on: it looks for stops
    in what it says itself, shows nothing that may begin one, and looks and shows once every `at_once` tokens."""
    held_back = max((len(stop) for stop in stops), default=1) - 1
    text, shown, tokens = "", 0, []
    for number in range(said, len(texts)):
        text += texts[number]
        tokens.append(number)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        is_last = number == len(texts) - 1
        if found or is_last:
            end = min(found) if found else len(text)
            yield Piece(0, text[shown:end], "stop" if found else "length", token_ids=tokens)
            return
        if len(tokens) < at_once:
            continue
        upto = max(shown, len(text) - held_back)
        yield Piece(0, text[shown:upto], token_ids=tokens)
        shown, tokens = upto, []


def passed_on(pieces: Iterator[Piece], stops: list[str]) -> list[Piece]:
    in_step = InStep(held_back_chars({"stop": stops}))
    return [piece for given_piece in pieces if (piece := in_step.feed(given_piece)) is not None]


def whole(pieces: list[Piece]) -> tuple[str, str | None]:
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


# Few letters, so that stops are met; no text for the first bytes of a character.
texts_of_tokens = st.lists(st.text("ab", max_size=3), min_size=1, max_size=12)
stops_asked = st.lists(st.text("ab", min_size=1, max_size=4), max_size=2)


@given(texts_of_tokens, stops_asked, st.integers(1, 3))
@example(["a", "b"], ["ab"], 1)
@example(["", "a", "", "b"], [], 1)
def test_frames_carry_exactly_the_tokens_of_their_text(texts: list[str], stops: list[str], at_once: int) -> None:
    pieces = passed_on(vllm(texts, 0, stops, at_once), stops)

    said: list[int] = []
    shown = ""
    for piece in pieces[:-1]:
        said += piece.token_ids
        shown += piece.text
        assert said == list(range(len(said)))
        assert shown == "".join(texts[: len(said)])
    assert said + pieces[-1].token_ids == list(range(len(said) + len(pieces[-1].token_ids)))


@given(texts_of_tokens, stops_asked, st.integers(1, 3), st.data())
def test_an_answer_that_goes_on_elsewhere_is_the_same_answer(
    texts: list[str], stops: list[str], at_once: int, data: st.DataObject
) -> None:
    undisturbed = passed_on(vllm(texts, 0, stops, at_once), stops)
    before = undisturbed[: data.draw(st.integers(0, len(undisturbed) - 1), label="frames until it broke off")]
    said = sum(len(piece.token_ids) for piece in before)

    after = passed_on(vllm(texts, said, stops, at_once), stops)

    assert whole(before + after) == whole(undisturbed)


@pytest.mark.parametrize(
    ("stop", "chars"), [(None, 0), ("END", 2), (["a", "four"], 3), ([], 0)], ids=["none", "one", "several", "no list"]
)
def test_an_engine_is_ahead_of_its_text_by_the_longest_stop_less_one(stop: object, chars: int) -> None:
    assert held_back_chars({"stop": stop} if stop is not None else {}) == chars


def test_without_stops_text_does_not_wait() -> None:
    in_step = InStep(0)

    assert in_step.feed(Piece(0, "a", token_ids=[1])) == Piece(0, "a", token_ids=[1])
    assert in_step.feed(Piece(0, "", token_ids=[2])) is None
    assert in_step.feed(Piece(0, "é", token_ids=[3])) == Piece(0, "é", token_ids=[2, 3])
    end = in_step.feed(Piece(0, "", "stop", stop_reason=b"5", token_ids=[5]))
    assert end == Piece(0, "", "stop", stop_reason=b"5", token_ids=[5])


def test_usage_is_of_the_whole_answer() -> None:
    assert Usage(110, 5, 104).of_whole_answer(10) == Usage(100, 15, 100)
    assert Usage(110, 5, 96, 3).of_whole_answer(10) == Usage(100, 15, 96, 3)
    assert Usage(110, 5).of_whole_answer(10) == Usage(100, 15)
    assert Usage(110, 5, 0).of_whole_answer(0) == Usage(110, 5, 0)
