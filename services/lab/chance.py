"""Chance that comes out the same on every machine and in every Python: hashes of a seed and a count.

Owns: the count.   Must not know: what it decides."""

import math
import struct

import xxhash

_hash = xxhash.xxh3_64_intdigest


class Chance:
    """A stream of draws. Two names of one seed are two independent streams."""

    def __init__(self, seed: int, name: str) -> None:
        self._seed = _hash(name.encode(), seed)
        self._count = 0

    def bits(self) -> int:
        """64 of them."""
        self._count += 1
        return _hash(struct.pack("<Q", self._count), self._seed)

    def uniform(self) -> float:
        """In [0, 1)."""
        return (self.bits() >> 11) / (1 << 53)

    def below(self, count: int) -> int:
        return int(self.uniform() * count)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.uniform())
