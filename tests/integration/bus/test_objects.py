"""Objects in a bucket: replaced whole or not at all, and damage is found."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.nats import NatsServer

from prefixbus.bus import subjects
from prefixbus.bus.connection import WrongSequence
from prefixbus.bus.objects import ObjectDamaged, Objects

BUCKET = subjects.BUCKET_DIRECTORY
LARGE = bytes(range(256)) * 1500  # three chunks


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, []) as running:
        await running.provision()
        yield running


@pytest.fixture
async def objects(server: NatsServer) -> Objects:
    return Objects(await server.bus("directory"), BUCKET)


async def pieces(data: bytes, size: int = 5000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def content(objects: Objects, name: str) -> bytes:
    found = await objects.find(name)
    assert found is not None
    return bytes(await objects.read(found.object))


async def test_what_is_written_is_read(objects: Objects) -> None:
    assert await objects.find("one") is None

    written = await objects.write("one", pieces(LARGE), {"k": "v"})

    found = await objects.find("one")
    assert found is not None
    assert found.object == written
    assert (written.size, written.chunks, written.metadata) == (len(LARGE), 3, {"k": "v"})
    assert await content(objects, "one") == LARGE


@pytest.mark.parametrize("data", [b"", b"x", LARGE[: 128 * 1024]], ids=["empty", "small", "one chunk to the byte"])
async def test_any_size_comes_back(objects: Objects, data: bytes) -> None:
    await objects.write("one", pieces(data), {})

    assert await content(objects, "one") == data


async def test_an_object_that_is_replaced_can_still_be_read_by_who_has_found_it(objects: Objects) -> None:
    await objects.write("one", pieces(LARGE), {})
    before = await objects.find("one")
    assert before is not None

    await objects.write("one", pieces(b"new"), {})

    assert await objects.read(before.object) == LARGE
    assert await content(objects, "one") == b"new"


async def test_no_more_than_two_versions_take_room(server: NatsServer, objects: Objects) -> None:
    js = (await server.probe("directory")).jetstream
    for number in range(6):
        await objects.write("one", pieces(LARGE + bytes([number])), {})

    state = (await js.stream_info(subjects.STREAM_DIRECTORY)).state

    assert state.messages == 2 * 3 + 1
    assert await content(objects, "one") == LARGE + bytes([5])


async def test_what_was_replaced_twice_is_known_to_be_gone(objects: Objects) -> None:
    await objects.write("one", pieces(LARGE), {})
    before = await objects.find("one")
    assert before is not None
    for data in (b"new", b"newer"):
        await objects.write("one", pieces(data), {})

    with pytest.raises(ObjectDamaged):
        await objects.read(before.object)


async def test_a_writer_that_dies_half_way_leaves_the_last_version(objects: Objects) -> None:
    await objects.write("one", pieces(LARGE), {})

    async def dying() -> AsyncIterator[bytes]:
        yield LARGE
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        await objects.write("one", dying(), {})

    assert await content(objects, "one") == LARGE
    await objects.write("one", pieces(b"after"), {})
    assert await content(objects, "one") == b"after"


async def test_of_two_writers_at_once_one_gives_way(server: NatsServer, objects: Objects) -> None:
    """And what is there in the end is one of the two, whole."""
    other = Objects(await server.bus("directory", instance="i2"), BUCKET)

    async def overtaken() -> AsyncIterator[bytes]:
        yield LARGE
        await other.write("one", pieces(b"the other's"), {})
        yield LARGE

    with pytest.raises(WrongSequence):
        await objects.write("one", overtaken(), {})

    assert await content(objects, "one") == b"the other's"


async def test_a_chunk_of_somebody_elses_is_found(server: NatsServer, objects: Objects) -> None:
    written = await objects.write("one", pieces(b"right"), {})
    writer = await server.bus("directory", instance="i2")
    await writer.publish_acked(f"$O.{BUCKET}.C.{written.nuid}", b"wrong", headers={"Nats-Rollup": "sub"})

    with pytest.raises(ObjectDamaged, match="digest"):
        await content(objects, "one")


async def test_the_client_librarys_own_store_knows_it(server: NatsServer, objects: Objects) -> None:
    """So the `nats` tool does."""
    written = await objects.write("one", pieces(LARGE), {"k": "v"})
    store = await (await server.probe("directory")).jetstream.object_store(BUCKET)

    info = await store.get_info("one")

    assert (info.size, info.chunks, info.digest, info.nuid) == (
        written.size,
        written.chunks,
        written.digest,
        written.nuid,
    )
