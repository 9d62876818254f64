"""Several prompts in one request: which are, whose choices are whose, and what the whole says of them."""

from typing import Any

import pytest

from prefixbus.bus.errors import BadRequest, Overloaded, PrefixbusError
from prefixbus.gateway.prompts import MAX_PROMPTS, Several, bodies, id_of, of_prompt


def chunk(index: int, text: str, **more: Any) -> dict[str, Any]:
    head = {"id": "cmpl-p", "object": "text_completion", "created": 7, "model": "m"}
    return {**head, "choices": [{"index": index, "text": text}], **more}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts if cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def of(count: int, **more: Any) -> Several:
    return Several(bodies({"prompt": ["x"] * count, **more}), "cmpl-whole")


@pytest.mark.parametrize("prompt", ["text", ["text"], [1, 2, 3], [[1, 2, 3]], [], None, {"a": 1}, [1.5, None]])
def test_one_prompt_goes_on_as_it_came(prompt: Any) -> None:
    body = {"model": "m", "prompt": prompt}

    assert bodies(body) == [body]


@pytest.mark.parametrize("several", [["a", "b"], [[1, 2], [3]], ["a", 5], [[1], "b"]])
def test_several_prompts_are_a_body_each(several: list[Any]) -> None:
    assert bodies({"model": "m", "prompt": several, "n": 2}) == [
        {"model": "m", "prompt": prompt, "n": 2} for prompt in several
    ]


def test_more_prompts_than_one_request_takes_are_refused_by_name() -> None:
    assert len(bodies({"prompt": ["x"] * MAX_PROMPTS})) == MAX_PROMPTS

    with pytest.raises(BadRequest, match=f"prompt: holds {MAX_PROMPTS + 1} prompts"):
        bodies({"prompt": ["x"] * (MAX_PROMPTS + 1)})


def test_ids_differ_where_an_answer_that_goes_on_keeps_them() -> None:
    longest = "a" * 40 + "-" + "0" * 16

    kept = {id_of(longest, number)[:60] for number in range(MAX_PROMPTS)}

    assert len(kept) == MAX_PROMPTS
    assert id_of(longest, 0) == longest


@pytest.mark.parametrize(("n", "expected"), [(None, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2, 3, 4, 5])])
def test_choices_are_numbered_prompt_by_prompt(n: int | None, expected: list[int]) -> None:
    whole = of(3, n=n)

    found = [whole.taken(number, chunk(j, "t")) for number in range(3) for j in range(n or 1)]

    assert [each["choices"][0]["index"] for each in found if each] == expected


def test_every_chunk_is_of_one_answer() -> None:
    whole = of(2)

    first = whole.taken(1, chunk(0, "b"))
    second = whole.taken(0, {**chunk(0, "a"), "id": "cmpl-other", "created": 9})

    assert first and second
    assert {(each["id"], each["created"]) for each in (first, second)} == {("cmpl-whole", 7)}


def test_usage_is_the_sum_in_a_last_chunk() -> None:
    whole = of(2)
    whole.taken(0, chunk(0, "a", usage=None))
    for number in range(2):
        assert whole.taken(number, {**chunk(0, ""), "choices": [], "usage": usage(5 + number, 2, cached=3)}) is None

    last = whole.last()

    assert last["choices"] == []
    assert last["usage"] == usage(11, 4, cached=6)


def test_what_one_answer_does_not_say_is_not_said_of_the_whole() -> None:
    whole = of(2)
    whole.taken(0, {**chunk(0, ""), "choices": [], "usage": usage(5, 2, cached=3)})
    assert whole.last()["usage"] is None
    whole.taken(1, {**chunk(0, ""), "choices": [], "usage": usage(6, 2)})

    assert whole.last()["usage"] == usage(11, 4)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (BadRequest("is empty.", field="prompt"), "prompt[2]: is empty."),
        (BadRequest("prompt: is empty. Send more."), "prompt[2]: is empty. Send more."),
        (BadRequest("is no number.", field="top_p"), "top_p: is no number."),
    ],
)
def test_an_error_of_a_prompt_names_it(error: PrefixbusError, sentence: str) -> None:
    assert of_prompt(error, 2).sentence() == sentence


def test_an_error_says_when_to_come_again_of_several_prompts_too() -> None:
    error = Overloaded()
    error.retry_after_s = 7.0

    same = of_prompt(error, 1)

    assert (type(same), same.retry_after_s) == (Overloaded, 7.0)
