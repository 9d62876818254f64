"""Media are named by what they show, and stand where the engine will have them."""

import base64
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.tokenizer import media

IMAGE = 7
ONE, OTHER = b"a" * 16, b"b" * 16


def part(content: bytes, kind: str = "png", **more: Any) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def packed(*ids: int) -> bytes:
    return array("I", ids).tobytes()


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_images_have_one_digest_if_their_bytes_are_the_same(one: bytes, other: bytes) -> None:
    assert (media.of_part(part(one)).digest == media.of_part(part(other)).digest) == (one == other)


def test_how_closely_it_is_to_be_looked_at_is_part_of_what_it_is() -> None:
    found = {media.of_part(part(b"cat", **more)).digest for more in ({}, {"detail": "low"}, {"detail": "high"})}

    assert len(found) == 3


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.dictionaries(st.text(), st.text())))
def test_whatever_a_part_holds_it_is_some_medium(content: dict[str, Any]) -> None:
    assert media.of_part({**content, "type": "image_url"}).is_image


def test_an_image_is_so_many_tokens_at_its_place() -> None:
    ids, places = media.placed(packed(1, IMAGE, 2, IMAGE), IMAGE, 3, [ONE, OTHER]) or (b"", [])

    assert ids == packed(1, *[IMAGE] * 3, 2, *[IMAGE] * 3)
    assert places == [(1, 3, ONE), (5, 3, OTHER)]


def test_of_unknown_size_it_stands_where_the_template_put_it() -> None:
    assert media.placed(packed(1, IMAGE, 2), IMAGE, 0, [ONE]) == (packed(1, IMAGE, 2), [(1, 0, ONE)])


@pytest.mark.parametrize("ids", [(1, 2), (IMAGE, IMAGE)], ids=["no place", "a place too many"])
def test_images_without_places_are_nowhere(ids: tuple[int, ...]) -> None:
    assert media.placed(packed(*ids), IMAGE, 3, [ONE]) is None


def test_a_name_is_the_namespaces_own() -> None:
    digest = media.of_part(part(b"cat")).digest

    names = {media.name(namespace_id, digest) for namespace_id in (b"1" * 16, b"2" * 16)}

    assert len(names) == 2
    assert {len(name) for name in names} == {media.NAME_BYTES}


def test_the_engine_gets_our_names_and_never_a_clients() -> None:
    named, unnamed = part(b"cat") | {"uuid": "theirs"}, {"type": "input_audio", "uuid": "theirs", "x": 1}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "uuid"}, named, "more", unnamed]},
    ]

    given = media.for_engine(messages, iter([ONE, None]))

    assert given[0] == messages[0]
    assert given[1]["content"] == [
        {"type": "text", "text": "uuid"},
        part(b"cat") | {"uuid": ONE.hex()},
        "more",
        {"type": "input_audio", "x": 1},
    ]
