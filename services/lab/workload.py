"""What is asked of a fleet: requests with their arrival, as lengths and block keys instead of text.

    key_i = xxh3_64(what fills block i, seed = key_(i-1)),  key_(-1) = the tenant's seed

Owns: the form of a request, and keys from a description of its text.   Must not know: workers, policies.
Units: seconds, tokens; keys u64 LE, 8 bytes each."""

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from .chance import Chance

_hash = xxhash.xxh3_64_intdigest


class Arrival(msgspec.Struct, frozen=True):
    """One request. `keys` are those of all full blocks of its prompt, in the run's block size; tenants share none.

    `cancel_after_s`: its client cancels it that long after it came."""

    at: float
    keys: bytes
    prompt_tokens: int
    output_tokens: int
    tenant: str = "acme"
    prefix_class: str = "session"
    cancel_after_s: float | None = None


class Workload(NamedTuple):
    """Arrivals in order of time, keyed for blocks of this size."""

    arrivals: list[Arrival]
    block_size: int

    def faster(self, speed: float) -> "Workload":
        """The same requests, arriving `speed` times as fast."""
        sped = [msgspec.structs.replace(arrival, at=arrival.at / speed) for arrival in self.arrivals]
        return Workload(sped, self.block_size)

    def jittered(self, seed: int, seconds: float = 0.005) -> "Workload":
        """The same requests, each up to so much later: what comes out another time is no difference.

        Recorded arrivals are often rounded; those of one instant come in another order for each seed."""
        chance = Chance(seed, "jitter")
        later = [
            msgspec.structs.replace(arrival, at=arrival.at + seconds * chance.uniform()) for arrival in self.arrivals
        ]
        later.sort(key=lambda arrival: arrival.at)
        return Workload(later, self.block_size)

    def at_once(self) -> "Workload":
        """The same requests, all at the start: how long they take tells what a fleet can do."""
        return Workload([msgspec.structs.replace(arrival, at=0.0) for arrival in self.arrivals], self.block_size)

    def __add__(self, other: object) -> "Workload":
        """Both together. :raises ValueError: their blocks differ."""
        if not isinstance(other, Workload):
            return NotImplemented
        if other.block_size != self.block_size:
            raise ValueError(f"blocks of {self.block_size} and of {other.block_size} tokens")
        both = sorted([*self.arrivals, *other.arrivals], key=lambda arrival: arrival.at)
        return Workload(both, self.block_size)


class Segment(NamedTuple):
    """A stretch of text that is the same wherever its name is."""

    name: int
    tokens: int


@functools.cache
def ns_of(tenant: str, revision: int = 0) -> bytes:
    """The namespace id of a tenant under a revision of the model: 16 bytes."""
    return xxhash.xxh3_128_digest(tenant.encode(), revision)


def keys_under(revision: int, keys: bytes) -> bytes:
    """The same blocks' keys under a revision, 0 being the one that arrivals are keyed for: as equal to one another as
    before, and to none of another revision."""
    if not revision:
        return keys
    mask = _hash(b"revision", revision).to_bytes(8, "little") * (len(keys) // 8)
    return (int.from_bytes(keys, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(keys), "little")


def seed_of(tenant: str) -> int:
    return _hash(tenant.encode())


def keys_of(segments: Sequence[Segment], block_size: int, seed: int) -> bytes:
    """Keys of the full blocks of these segments in a row: equal as far as all that lies before is equal."""
    keys = []
    key = seed
    filled: list[int] = []
    room = block_size
    for name, tokens in segments:
        while tokens >= room:
            filled += (name, room)
            key = _hash(struct.pack(f"<{len(filled)}Q", *filled), key) or 1
            keys.append(key)
            tokens -= room
            filled, room = [], block_size
        if tokens:
            filled += (name, tokens)
            room -= tokens
    return struct.pack(f"<{len(keys)}Q", *keys)
