"""What a shard has learned from events up to a moment, as bytes and back.

It is taken in slices while events go on. `Header.stream_seq` is the last event applied before the first slice, so
whoever loads it repeats every event that a slice may or may not have seen. Events say what *is* (held, not held), which
makes that harmless: what no event touched was true at the beginning, and of the rest the last event decides. A worker
is told with the seq of its own that its keys are good for, as its bridge would in a dump, and is given to the ledger as
one.

Left out are workers whose story has holes (a dump has to tell it anyway) or that began anew under our eyes; and what
was never an event: leases, announcements, trust, age.

The form: 8 bytes that name it and its version; then frames of u32 LE length, u32 LE check and a msgpack array, of which
the first is a `Header` and the last an `End`. A check covers the frame and, through its seed, all frames before it.

Owns: the form.   Must not know: where the bytes are kept, clocks, when it is time for one.
Source: DESIGN 5 (Snapshots)."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from ..bus.errors import PrefixbusError
from ..bus.messages import GPU, HOST, Stored
from .index import Index
from .ledger import Effect, Lease, Ledger, WorkerView

VERSION = 1
_MAGIC = b"pbsnaps"
# Keys given to the ledger in one go, and what a segment has beyond: 1.8 ms in 99 of 100 (1M keys of 32 workers).
_PART_KEYS = 2048
# Checked in one go: about 0.3 ms.
_CHECKED_BYTES = 1024 * 1024
# No dump of a bridge's has this id: theirs begin at 1.
_DUMP_ID = 0


class SnapshotUnusable(PrefixbusError):
    """A snapshot of the directory that is damaged, of another version, or not of this shard and stream."""

    code = "snapshot_unusable"
    status = 500


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """`stream` names one life of the event stream; all its events up to `stream_seq` are in here. `taken_at` in Unix
    seconds."""

    shard: int
    shards: int
    stream: str
    stream_seq: Annotated[int, Meta(ge=0)]
    taken_at: float


class Worker(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Its `Keys` follow; they hold its events up to `last_seq`."""

    name: str
    incarnation: int
    last_seq: int


class Keys(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Some of what the worker named last holds; u64 LE each."""

    tier: int
    ns_id: bytes
    keys: bytes

    def __post_init__(self) -> None:
        """As `Stored`, which it becomes; called by the decoder, which turns the error into a SnapshotUnusable."""
        if len(self.keys) % 8:
            raise ValueError("keys are not whole u64s")


class Voided(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What was said of the worker named last does not count."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """How many workers were told, and how many were left out."""

    workers: int
    left_out: int


Frame = Header | Worker | Keys | Voided | End

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Frame)
_first_bytes = _MAGIC + bytes([VERSION])


class _Frames:
    """Frames as bytes, each with its check."""

    def __init__(self) -> None:
        self._check = 0

    def encode(self, frame: Frame) -> bytes:
        payload = _encode(frame)
        self._check = _check(payload, self._check)
        return len(payload).to_bytes(4, "little") + self._check.to_bytes(4, "little") + payload


def name_of(shard: int, shards: int) -> str:
    """What the object that holds a shard's snapshot is called."""
    return f"shard-{shard}-of-{shards}"


def take(ledger: Ledger, index: Index, header: Header) -> Iterator[bytes]:
    """The bytes of a snapshot, piece by piece (0.5 us a key, about 0.5 ms each).

    Ledger and index may change between two pieces; `header` must have been made before the first, with the last event
    that was applied."""
    frames = _Frames()
    yield _first_bytes + frames.encode(header)
    told = left_out = 0
    for name in [view.worker for view in ledger.views()]:
        view = ledger.view(name)
        if view is None or not _is_whole(view):
            left_out += 1
            continue
        yield frames.encode(Worker(name, view.incarnation, view.last_seq))
        for tier, slot in ((GPU, view.slot), (HOST, view.host_slot)):
            runs = index.runs_of(slot) if slot is not None else iter(())
            while is_good := _is_same(view, ledger.view(name), tier):
                run = next(runs, None)
                if run is None:
                    break
                yield frames.encode(Keys(tier, *run))
            if not is_good:
                yield frames.encode(Voided())
                left_out += 1
                break
        else:
            told += 1
    yield frames.encode(End(told, left_out))


def header_of(data: bytes | bytearray) -> Header:
    """:raises SnapshotUnusable: these bytes are no snapshot of this version."""
    if not data.startswith(_first_bytes):
        if data.startswith(_MAGIC) and len(data) > len(_MAGIC):
            raise SnapshotUnusable(f"It is of version {data[len(_MAGIC)]}, not {VERSION}.")
        raise SnapshotUnusable("It does not begin as one.")
    header = next((_decoded(payload) for payload in _payloads(data)), None)
    if not isinstance(header, Header):
        raise SnapshotUnusable("It has no header.")
    return header


def verify(data: bytes | bytearray) -> Iterator[None]:
    """Looks at every byte, in slices. :raises SnapshotUnusable: one is wrong or missing."""
    header_of(data)
    checked, last = 0, b""
    for payload in _payloads(data):
        last = payload
        checked += len(payload)
        if checked > _CHECKED_BYTES:
            checked = 0
            yield
    if not isinstance(_decoded(last), End):
        raise SnapshotUnusable("Its end is missing.")


def restore(data: bytes | bytearray, ledger: Ledger, now: float) -> Iterator[Sequence[Effect]]:
    """Tells a ledger that has heard nothing yet, in slices. The snapshot must have been verified.

    :raises SnapshotUnusable: its frames make no sense together."""
    worker: Worker | None = None
    held: list[Keys] = []
    for payload in _payloads(data):
        frame = _decoded(payload)
        if isinstance(frame, Keys):
            if worker is None:
                raise SnapshotUnusable("It has keys that are nobody's.")
            held.append(frame)
        elif isinstance(frame, Voided):
            worker, held = None, []
        else:
            if worker is not None:
                yield from _tell(ledger, worker, held, now)
            worker, held = frame if isinstance(frame, Worker) else None, []


def _tell(ledger: Ledger, worker: Worker, held: list[Keys], now: float) -> Iterator[Sequence[Effect]]:
    """The worker's dump, as its bridge would have written it."""
    parts: list[list[Stored]] = [[]]
    room = _PART_KEYS
    for keys in held:
        count = len(keys.keys) // 8
        if count > room and parts[-1]:
            parts.append([])
            room = _PART_KEYS
        parts[-1].append(Stored(keys.ns_id, 0, keys.keys, keys.tier))
        room -= count
    for number, runs in enumerate(parts):
        yield ledger.dump_chunk(
            worker.name, worker.incarnation, _DUMP_ID, number, len(parts), worker.last_seq, runs, now
        )


def _is_whole(view: WorkerView) -> bool:
    return view.complete and view.lease is not Lease.LOST


def _is_same(told: WorkerView, view: WorkerView | None, tier: int) -> bool:
    """Whether it is still the life, the story and the slot that we began to tell of.

    A cache that was cleared also ends it: what was there before the last seq told can no longer be read."""
    if view is None or view.incarnation != told.incarnation or not _is_whole(view):
        return False
    return view.slot == told.slot if tier == GPU else view.host_slot == told.host_slot or told.host_slot is None


def _payloads(data: bytes | bytearray) -> Iterator[bytes]:
    """The frames' payloads. :raises SnapshotUnusable: one is cut or changed, or frames were."""
    at, check = len(_first_bytes), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        payload = bytes(data[at + 8 : at + 8 + length])
        check = _check(payload, check)
        if len(payload) != length or data[at + 4 : at + 8] != check.to_bytes(4, "little"):
            raise SnapshotUnusable(f"It is damaged at byte {at}.")
        yield payload
        at += 8 + length


def _check(payload: bytes, before: int) -> int:
    return xxhash.xxh3_64_intdigest(payload, before) & 0xFFFF_FFFF


def _decoded(payload: bytes) -> Frame:
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as exc:
        raise SnapshotUnusable(f"A frame cannot be read: {exc}.") from exc
