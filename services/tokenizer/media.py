"""What is no text in a client's messages: which parts of it can be named by their content, and where they stand.

    image_url with a data: URL                     named by a digest of its bytes
    a URL to be fetched, bytes that are no base64  unnamed: nothing is ever fetched here, so nobody can say that two of
    audio, video, files, whatever else             them are one

A named image enters the keys of the blocks that it stands in. A request with anything unnamed shares nothing with any
other. A client's own name for a medium (vLLM's `uuid`) is never passed on: engines believe it, and it could be another
tenant's.

Owns: digests, places, the parts that engines get.   Must not know: templates, namespaces' fields, engines.
Units: tokens u32 LE; digests 32 bytes, names 16.   Source: DESIGN 3; vLLM `entrypoints/chat_utils.py` (content parts,
uuid), `v1/core/kv_cache_utils.py` (a medium's name is a key of each block that it reaches into)."""

import base64
import binascii
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..bus.blockkeys import Placed

NAME_BYTES = 16
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of content parts that are text, and the field it stands in."""


class Medium(msgspec.Struct, frozen=True):
    """One part that is no text. `digest` is of what it shows, empty if it is unnamed."""

    is_image: bool
    digest: bytes = b""


def of_part(part: dict[str, Any]) -> Medium:
    """What a content part that is no text is; never an error: what an engine makes of it is the engine's to say."""
    if part.get("type") != "image_url":
        return Medium(is_image=False)
    image = part.get("image_url")
    url, detail = (image.get("url"), image.get("detail")) if isinstance(image, dict) else (image, None)
    content = _content(url) if isinstance(url, str) else None
    if content is None or not (detail is None or isinstance(detail, str)):
        return Medium(is_image=True)
    digest = hashlib.blake2b(content, digest_size=32, person=b"image")
    digest.update(b"\0" + (detail or "").encode("utf-8", "surrogatepass"))
    return Medium(is_image=True, digest=digest.digest())


def _content(url: str) -> bytes | None:
    """The bytes of a data: URL of an image; None for anything else."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        return None
    try:
        return base64.b64decode(data, validate=True) or None
    except (binascii.Error, ValueError):
        return None


def name(namespace_id: bytes, digest: bytes) -> bytes:
    """What the medium is called in this namespace: engines keep what they make of media under these names, too, and
    must not find one tenant's for another."""
    return hashlib.blake2b(digest, digest_size=NAME_BYTES, key=namespace_id).digest()


def placed(ids: bytes, image_token: int, tokens_each: int, names: Sequence[bytes]) -> tuple[bytes, list[Placed]] | None:
    """The ids as the engine will have them, so many for each image, and where these are.

    With `tokens_each` 0 nobody knows how many the engine makes of an image: ids stay as they are, and nothing behind
    the first image has a key. None: there are more or fewer places than images."""
    given = array("I", ids)
    if given.count(image_token) != len(names):
        return None
    made = array("I")
    places: list[Placed] = []
    begin = 0
    for named in names:
        at = given.index(image_token, begin)
        made += given[begin:at]
        places.append((len(made), tokens_each, named))
        made += array("I", [image_token]) * max(1, tokens_each)
        begin = at + 1
    return (made + given[begin:]).tobytes(), places


def for_engine(messages: list[dict[str, Any]], names: Iterator[bytes | None]) -> list[dict[str, Any]]:
    """The messages with our names for their media, in order; None leaves one unnamed."""
    return [
        {**message, "content": [_for_engine(part, names) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _for_engine(part: Any, names: Iterator[bytes | None]) -> Any:
    if not is_medium(part):
        return part
    named = next(names)
    bare = {key: value for key, value in part.items() if key != "uuid"}
    return bare if named is None else bare | {"uuid": named.hex()}


def is_medium(part: Any) -> bool:
    """Whether a content part is no text."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in TEXT_PARTS
