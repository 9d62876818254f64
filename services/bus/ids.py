"""Internal request ids: unique, ordered by time, safe as a subject token.

A ULID (https://github.com/ulid/spec): 48 bits of Unix milliseconds and 80 random bits in 26 characters of Crockford's
base 32. Ids of one millisecond are not ordered among themselves; nothing here needs that."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ENTROPY_BYTES = 10
# The end of an id tells requests apart, its beginning says when they came: people are shown this much of the end.
SHOWN = 8


def request_id(wall: float, entropy: bytes) -> str:
    """The id of a request that came at `wall` (Unix seconds), made unique by 10 random bytes.

    :raises ValueError: the entropy is not 10 bytes."""
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"entropy must be {ENTROPY_BYTES} bytes, got {len(entropy)}")
    number = (int(wall * 1000) & ((1 << 48) - 1)) << 80 | int.from_bytes(entropy, "big")
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def made_at(text: str) -> float | None:
    """When the request of this id came (Unix seconds, to the millisecond); None if it is none of our ids."""
    if len(text) != 26 or text[0] > "7" or not set(text) <= set(_ALPHABET):
        return None
    milliseconds = 0
    for character in text[:10]:
        milliseconds = milliseconds << 5 | _ALPHABET.index(character)
    return milliseconds / 1000
