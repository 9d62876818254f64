"""Named objects in a JetStream object store (NATS ADR-20), so that the `nats` tool can read them too.

What the client library's store does not do: an object that is replaced stays whole until it is replaced once more, so
who reads it is not cut short, and nobody needs the right to purge. An object has two places for its chunks and is
written into the one that its last version does not have; the first chunk rolls up what was there. A writer says of each
chunk which one it must come after, so of two writers at once one gives way.

Owns: the subjects and the form of chunks and of the meta message.   Must not know: what is in an object."""

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from .connection import Bus, Stored
from .errors import PrefixbusError

# What NATS's own clients take.
_CHUNK_BYTES = 128 * 1024
_DIGEST = "SHA-256="
_PLACES = ("a", "b")
_ROLL_UP = {"Nats-Rollup": "sub"}


class ObjectDamaged(PrefixbusError):
    """An object in a bucket is not what its digest says, or parts of it are missing."""

    code = "object_damaged"
    status = 500


class Object(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the store says of an object (JSON). `nuid` is where its chunks are."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    metadata: dict[str, str] = {}
    deleted: bool = False


class Found(NamedTuple):
    """`seq` is the stream sequence of what says it."""

    seq: int
    object: Object


class Objects:
    """The objects of one bucket."""

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    def __repr__(self) -> str:
        return f"<Objects of {self._bucket}>"

    async def find(self, name: str) -> Found | None:
        """None: there is no such object.

        :raises BusUnavailable: JetStream did not answer.   :raises ObjectDamaged: what it says of it cannot be read."""
        stored = await self._bus.stored(self._stream, self._meta(name))
        if stored is None:
            return None
        try:
            found = msgspec.json.decode(stored.data, type=Object)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ObjectDamaged(f"{name}: {exc}") from exc
        return None if found.deleted else Found(stored.seq, found)

    async def read(self, found: Object) -> bytearray:
        """All of it, checked.

        :raises ObjectDamaged: it is not whole, or was replaced twice meanwhile.   :raises BusUnavailable: no answer."""
        data, digest, seq = bytearray(), hashlib.sha256(), 1
        for _ in range(found.chunks):
            chunk = await self._bus.stored(self._stream, self._chunks(found.nuid), from_seq=seq)
            if chunk is None:
                raise ObjectDamaged(f"{found.name} ends after {len(data)} of {found.size} bytes.")
            data += chunk.data
            digest.update(chunk.data)
            seq = chunk.seq + 1
        if _named(digest.digest()) != found.digest:
            raise ObjectDamaged(f"{found.name} does not have its digest.")
        return data

    async def write(self, name: str, pieces: AsyncIterator[bytes], metadata: dict[str, str]) -> Object:
        """Puts an object in the place of the one of this name.

        :raises WrongSequence: another writes it just now.   :raises BusUnavailable: not stored; the last one stays."""
        before = await self._bus.stored(self._stream, self._meta(name))
        taken = _place_of(before)
        nuid = next(place for place in (f"{name}-{place}" for place in _PLACES) if place != taken)
        subject = self._chunks(nuid)
        last = await self._bus.stored(self._stream, subject)
        seq = last.seq if last is not None else 0
        size = chunks = 0
        digest, rest = hashlib.sha256(), bytearray()

        async def store(chunk: bytes) -> None:
            nonlocal seq, size, chunks
            headers = _ROLL_UP if not chunks else None
            msg_id = f"{nuid}-{seq}-{chunks}"
            seq = await self._bus.publish_acked(subject, chunk, expect_last_seq=seq, msg_id=msg_id, headers=headers)
            digest.update(chunk)
            size += len(chunk)
            chunks += 1

        async for piece in pieces:
            rest += piece
            while len(rest) >= _CHUNK_BYTES:
                await store(bytes(rest[:_CHUNK_BYTES]))
                del rest[:_CHUNK_BYTES]
        await store(bytes(rest))
        written = Object(name, self._bucket, nuid, size, chunks, _named(digest.digest()), metadata)
        await self._bus.publish_acked(
            self._meta(name),
            msgspec.json.encode(written),
            expect_last_seq=before.seq if before is not None else 0,
            msg_id=f"{nuid}-{seq}",
            headers=_ROLL_UP,
        )
        return written

    def _meta(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"


def _place_of(said: Stored | None) -> str:
    """Where the chunks of the version are that is to be replaced; empty if it has none, or nobody can read where: then
    nobody can read it either, and its room may be used."""
    try:
        return msgspec.json.decode(said.data, type=Object).nuid if said is not None else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _named(digest: bytes) -> str:
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()
