"""The tokens of one request, prompt and output: their block keys, what each block was computed from, the next token.

    key_i    = xxh3_64(tokens of block i, seed = key_(i-1)),  key_(-1) from salt, adapter, revision   (the name)
    origin_i = xxh3_64(salt, adapter, revision, all tokens through block i), one running digest       (the truth)
    token_n  = vocabulary[xxh3_64(revision, adapter, all tokens before n) mod size]

A key names a block in the cache; an origin says what it holds. They are computed independently on purpose: if a fault
(or the `ignore_salt` flag) makes two namespaces share keys, the origins still differ and the core counts a wrong hit.
The output depends on tokens, revision and adapter but not on the salt, the request or its chunking: a request resumed
elsewhere as prompt + tokens so far continues exactly.

Owns: token ids, keys and origins of a request.   Must not know: blocks in memory, queues, time, text.
Units: tokens u32, keys and origins u64."""

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import xxhash

_xxh3 = xxhash.xxh3_64_intdigest
_ORIGIN_SEED = 0x6F726967696E  # any constant other than the ones below: keeps the three digests unrelated
_OUTPUT_SEED = 0x6F7574707574

NO_TOKEN = -1
"""What a virtual sequence emits: it has lengths and keys but no token ids."""


def _packed(*parts: str | None) -> bytes:
    """An unambiguous encoding: an absent part, an empty one and a moved boundary all differ."""
    out = []
    for part in parts:
        raw = None if part is None else part.encode()
        out.append(b"\x00" if raw is None else b"\x01" + struct.pack("<I", len(raw)) + raw)
    return b"".join(out)


Placed = tuple[int, int, str]
"""An image among the tokens: the first that stands for it, how many do, and its name."""


class EngineNamespace(msgspec.Struct, frozen=True):
    """All that must agree, besides the tokens, for two requests to this engine to share KV."""

    salt: str | None = None
    adapter: str | None = None
    revision: str = ""


class Vocabulary(msgspec.Struct, frozen=True):
    """Which tokens the model may emit, and how often it stops by itself."""

    spoken: Sequence[int]
    eos: int | None = None
    eos_one_in: int = 0
    """One token in so many is end-of-sequence, chosen by the same digest; 0: never."""


class KvSequence(Protocol):
    """What the core needs of a request's tokens."""

    virtual: bool
    eos: int | None
    keys: list[int]
    origins: list[int]

    @property
    def length(self) -> int: ...

    def ensure_keys(self, blocks: int) -> None:
        """Make `keys` and `origins` cover the first `blocks` blocks, all of which are full."""

    def append_next(self, may_end: bool) -> int:
        """Append the token that follows and return it; without `may_end` it is not end-of-sequence."""

    def grow(self, tokens: int) -> None:
        """Append `tokens` unnamed tokens (virtual sequences only)."""


class TokenSequence:
    """A sequence of real token ids."""

    __slots__ = (
        "_origin",
        "_output",
        "_seed",
        "_vocabulary",
        "block_size",
        "eos",
        "ids",
        "keys",
        "media",
        "origins",
        "virtual",
    )

    def __init__(
        self,
        ids: Iterable[int],
        vocabulary: Vocabulary,
        block_size: int,
        namespace: EngineNamespace,
        *,
        ignore_salt: bool = False,
        choice: int = 0,
        media: Sequence[Placed] = (),
    ) -> None:
        """`ignore_salt` leaves the salt out of the keys, as a broken engine would: it provokes wrong hits. `choice` is
        which of several answers to the same prompt this is: each says something else. `media` are the images among the
        tokens, in order.

        :raises OverflowError, TypeError: an id is not a u32."""
        self.virtual = False
        self.eos = vocabulary.eos
        self.ids = array("I", ids)
        self.keys: list[int] = []
        self.origins: list[int] = []
        self.block_size = block_size
        self._vocabulary = vocabulary
        salt = None if ignore_salt else namespace.salt
        self._seed = _xxh3(_packed(salt, namespace.adapter, namespace.revision))
        self._origin = xxhash.xxh3_64(_packed(namespace.salt, namespace.adapter, namespace.revision), _ORIGIN_SEED)
        self._output = xxhash.xxh3_64(_packed(namespace.revision, namespace.adapter), _OUTPUT_SEED + choice)
        self._output.update(self.ids.tobytes())
        self._output.update("".join(name for _, _, name in media).encode())
        self.media = media

    @property
    def length(self) -> int:
        return len(self.ids)

    def ensure_keys(self, blocks: int) -> None:
        known = len(self.keys)
        if blocks <= known:
            return
        raw = memoryview(self.ids[known * self.block_size : blocks * self.block_size].tobytes())
        width = 4 * self.block_size
        key = self.keys[-1] if known else self._seed
        origin = self._origin
        for start in range(0, len(raw), width):
            block: bytes | memoryview = raw[start : start + width]
            if self.media:
                first = known * self.block_size + start // 4
                block = b"".join((block, *(name.encode() for name, _ in self.media_in(first))))
            key = _xxh3(block, key)
            self.keys.append(key)
            origin.update(block)
            self.origins.append(origin.intdigest())

    def media_in(self, first: int) -> list[tuple[str, int]]:
        """The media in the block that begins with token `first`: names, and where each begins in the block (below 0:
        before it)."""
        return [
            (name, start - first)
            for start, count, name in self.media
            if start < first + self.block_size and start + count > first
        ]

    def append_next(self, may_end: bool) -> int:
        digest = self._output.intdigest()
        words = self._vocabulary
        if may_end and words.eos_one_in and words.eos is not None and (digest >> 32) % words.eos_one_in == 0:
            token = words.eos
        else:
            token = words.spoken[(digest & 0xFFFFFFFF) % len(words.spoken)]
        self.ids.append(token)
        self._output.update(token.to_bytes(4, "little"))
        return token

    def grow(self, tokens: int) -> None:
        raise TypeError("a sequence of real tokens grows by append_next")


class VirtualSequence:
    """A sequence known by its length and its block keys alone, for traces that carry hashes instead of text.

    `keys` are the caller's: they must already separate what must not be shared, and their count may exceed the prompt's
    full blocks (then the output's keys are known too). Blocks beyond them are named from the last key and `nonce`."""

    __slots__ = ("_nonce", "eos", "keys", "length", "origins", "virtual")

    def __init__(self, length: int, keys: Iterable[int], nonce: int = 0) -> None:
        self.virtual = True
        self.eos: int | None = None
        self.length = length
        self.keys = list(keys)
        self.origins = self.keys  # nothing but the key is known of what a block holds
        self._nonce = nonce

    def ensure_keys(self, blocks: int) -> None:
        while len(self.keys) < blocks:
            last = self.keys[-1] if self.keys else 0
            self.keys.append(_xxh3(struct.pack("<QQ", self._nonce & 0xFFFFFFFFFFFFFFFF, len(self.keys)), last))

    def append_next(self, may_end: bool) -> int:
        self.length += 1
        return NO_TOKEN

    def grow(self, tokens: int) -> None:
        self.length += tokens
