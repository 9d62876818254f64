"""Recorded traffic: JSON Lines with a chained id for each block of a prompt.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}   + tenant, class, session

Equal ids mean equal prefixes up to and including that block. A trace's block may be cut into several of ours: the
part of an id is then as chained as the id itself.

Owns: the format.   Must not know: where lines come from, workers.   Units: as workload.py.
Source: Mooncake (FAST'25) traces."""

import functools
import struct
from collections.abc import Iterable

import msgspec
import xxhash

from ..bus.errors import ConfigInvalid
from .workload import Arrival, Workload, seed_of

_hash = xxhash.xxh3_64_intdigest


class Line(msgspec.Struct, frozen=True):
    """A request of a trace; fields that are not named here are not looked at."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: str = "acme"
    prefix_class: str = msgspec.field(default="session", name="class")


_decoder = msgspec.json.Decoder(Line)


def load(lines: Iterable[bytes | str], trace_block: int, block_size: int = 0) -> Workload:
    """A trace whose ids stand for `trace_block` tokens each, for engines with blocks of `block_size` (0: the same).

    :raises ConfigInvalid: a line is not of this format, or blocks do not fit into the trace's."""
    block_size = block_size or trace_block
    if trace_block % block_size:
        raise ConfigInvalid(
            f"blocks of {block_size} tokens do not divide the trace's {trace_block}.",
            field="block_size",
            remedy="Take a divisor.",
        )
    parts = trace_block // block_size

    @functools.cache
    def keys_of_id(block: int, seed: int) -> bytes:
        return b"".join(
            (_hash(struct.pack("<qQ", block, part), seed) or 1).to_bytes(8, "little") for part in range(parts)
        )

    arrivals = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ConfigInvalid(str(exc), field=f"line {number}", remedy="Correct the trace.") from exc
        seed = seed_of(one.tenant)
        keys = b"".join([keys_of_id(block, seed) for block in one.hash_ids])
        full = one.input_length // block_size
        arrivals.append(
            Arrival(
                one.timestamp / 1000.0,
                keys[: 8 * full],
                one.input_length,
                max(1, one.output_length),
                one.tenant,
                one.prefix_class,
            )
        )
    arrivals.sort(key=lambda arrival: arrival.at)
    return Workload(arrivals, block_size)
