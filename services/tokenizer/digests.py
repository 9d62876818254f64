"""Keyed digests of a prompt's segments: two prompts' records say where they differ, and neither says what it holds.

A prompt is cut where its tokens say so, not at fixed places: what stands behind something that was inserted is cut as
before, and has the same digests at another place. Cuts depend on what lies before them alone, so prompts with a common
beginning have common segments. Segments grow with their place: 64 of them reach far into a long prompt, and the last
takes what is left.

Digests are keyed by the family of namespaces that differ in the model's revisions alone: one tenant, one scope, one
epoch. Within it a prompt can be followed over a change of template; across it nothing can be compared, and nobody
without the deployment's key can try out guesses.

Owns: the cuts, the digests.   Must not know: texts, templates, who reads them.
Units: token ids u32 LE (4 bytes each).   Source: DESIGN 10; content-defined cuts as in Muthitacharoen et al., "A
low-bandwidth network file system" (2001)."""

import hashlib

import msgspec

from ..bus.namespace import Namespace, canonical

MOST_SEGMENTS = 64
_FAMILY_BYTES = 16
_DIGEST_BYTES = 8


class _Reach:
    """Segments that begin before token `until`: at least `least` tokens long, at most eight times that, and cut behind
    a token whose hash is a multiple of `step`, which one in `step` has."""

    def __init__(self, until: int, least: int, step: int) -> None:
        self.until = until
        self.least = least
        # Positions are found by `bytes.find`, at memory speed: 1 where a cut may be.
        self.marks = bytes(int(hashed % step == 0) for hashed in range(256))


# What a token adds to the hash at its own place and at the next two, by its id's low byte.
_TABLES = [
    bytes(hashlib.blake2b(bytes((low, place)), digest_size=1).digest()[0] for low in range(256)) for place in range(3)
]
# A segment is about `least + step` tokens long: 21 in each of the first two reaches, and 22 that reach 8k tokens more.
_REACHES = (_Reach(2_048, 32, 64), _Reach(6_144, 64, 128), _Reach(1 << 32, 128, 256))


def family(key: bytes, namespace: Namespace) -> bytes:
    """16 bytes for all namespaces that differ in revisions of the model alone; `key` is the deployment's (purpose
    "journal")."""
    bare = msgspec.structs.replace(
        namespace, model_revision="", tokenizer_revision="", template_version="", position_digest="", kv_dtype=""
    )
    return hashlib.blake2b(canonical(bare), digest_size=_FAMILY_BYTES, key=key).digest()


def segments(family_key: bytes, ids: bytes) -> bytes:
    """12 bytes a segment: where it ends, in tokens (u32 LE), and its digest (u64 LE). At most MOST_SEGMENTS."""
    parts = []
    start = 0
    for end in ends(ids):
        digest = hashlib.blake2b(ids[4 * start : 4 * end], digest_size=_DIGEST_BYTES, key=family_key).digest()
        parts.append(end.to_bytes(4, "little") + digest)
        start = end
    return b"".join(parts)


def ends(ids: bytes) -> list[int]:
    """Where the segments of a prompt end, in tokens; the last is the prompt's end."""
    hashes = _hashes(ids)
    found: list[int] = []
    start = 0
    for reach in _REACHES:
        marks = hashes[: reach.until + 8 * reach.least].translate(reach.marks)
        while start < min(reach.until, len(hashes)) and len(found) < MOST_SEGMENTS - 1:
            mark = marks.find(1, start + reach.least - 1, start + 8 * reach.least)
            end = min(mark + 1 if mark >= 0 else start + 8 * reach.least, len(hashes))
            found.append(end)
            start = end
    if start < len(hashes):
        found.append(len(hashes))
    return found


def _hashes(ids: bytes) -> bytes:
    """A byte for each token, made of it and the two before it: cuts fall in any text, however few words it has."""
    low = ids[::4]
    # As one number: 20 us for 4k tokens.
    mixed = 0
    for place, table in enumerate(_TABLES):
        mixed ^= int.from_bytes(low.translate(table), "little") << 8 * place
    return mixed.to_bytes(len(low) + len(_TABLES), "little")[: len(low)]
