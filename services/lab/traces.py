"""Recorded traffic: JSON Lines with a chained id for each block of a prompt.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}   + tenant, class, session

Equal ids mean equal prefixes up to and including that block. A trace's block may be cut into several of ours: the
part of an id is then as chained as the id itself.

Owns: the format.   Must not know: where lines come from, workers.   Units: as workload.py.
Source: Mooncake (FAST'25) traces."""

import functools
import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from ..bus.errors import ConfigInvalid
from .workload import Arrival, Workload, seed_of

_hash = xxhash.xxh3_64_intdigest


# Time that nobody uses is played as well.
LONGEST_S = 7 * 86400.0


class Line(msgspec.Struct, frozen=True):
    """A request of a trace; fields that are not named here are not looked at. Ids are 64 bits with their sign."""

    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: Annotated[int, Meta(ge=1, le=1 << 32)]
    output_length: Annotated[int, Meta(ge=0, le=1 << 32)]
    hash_ids: list[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]
    tenant: str = "acme"
    prefix_class: str = msgspec.field(default="session", name="class")


_decoder = msgspec.json.Decoder(Line)


def read(lines: Iterable[bytes | str], trace_block: int, first: int = 0) -> Iterator[Line]:
    """A trace's lines, as they stand; of `first` requests only (0: all).

    :raises ConfigInvalid: a line is not of this format, or has not as many ids as blocks of `trace_block` tokens."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in itertools.islice(numbered, first or None):
        try:
            one = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ConfigInvalid(str(exc), field=f"line {number}", remedy="Correct the trace.") from exc
        full, ids = one.input_length // trace_block, len(one.hash_ids)
        # The last block need not be full, and may have an id or not.
        if not full <= ids <= -(-one.input_length // trace_block):
            raise ConfigInvalid(
                f"{ids} ids are not those of {one.input_length} tokens in blocks of {trace_block}.",
                field=f"line {number}",
                remedy="Say how many tokens an id stands for (--trace-block), or correct the trace.",
            )
        yield one


def load(lines: Iterable[bytes | str], trace_block: int, block_size: int = 0, first: int = 0) -> Workload:
    """A trace whose ids stand for `trace_block` tokens each, for engines with blocks of `block_size` (0: the same).

    :raises ConfigInvalid: as `read`, or blocks do not fit into the trace's, or it is over `LONGEST_S` long."""
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
    for one in read(lines, trace_block, first):
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
    if arrivals and arrivals[-1].at - arrivals[0].at > LONGEST_S:
        raise ConfigInvalid(
            f"the last request comes {arrivals[-1].at - arrivals[0].at:.0f} s after the first, over {LONGEST_S:.0f} s.",
            field="timestamp",
            remedy="Timestamps are in milliseconds. Correct one that stands alone, or play a part of the trace.",
        )
    # Real logs have the time of day; virtual time begins with the first request.
    return Workload([msgspec.structs.replace(one, at=one.at - arrivals[0].at) for one in arrivals], block_size)
