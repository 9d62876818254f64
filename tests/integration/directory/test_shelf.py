"""Which replica writes a shard's snapshot, and which snapshots are believed; on a real server."""

import base64
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext
from support.nats import NatsServer, eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import Config
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import KvEvents, Load, Lookup, Stored
from prefixbus.bus.objects import Objects
from prefixbus.bus.runtime import Runtime
from prefixbus.directory.metrics import DirectoryMetrics
from prefixbus.directory.service import Directory
from prefixbus.directory.shard import Shard
from prefixbus.directory.shelf import Shelf

NS = bytes(16)
EVERY_S = Config().directory.snapshot_every_s


class Replica:
    """One replica's state and its shelf, with a clock that the test moves."""

    def __init__(self, server: NatsServer, clock: VirtualClock, name: str) -> None:
        self._server = server
        self.core = Shard()
        self.applied = 0
        self.rt = Runtime("directory", name, server.state, Config(), clock)

    async def start(self) -> "Replica":
        self.rt.bus = await self._server.bus("directory", instance=self.rt.instance)
        self.shelf = Shelf(self.rt, self.core, 0, lambda: self.applied, DirectoryMetrics(self.rt.registry))
        return self

    async def load(self) -> int | None:
        return await self.shelf.load(lambda effects: None)

    def value(self, name: str, **labels: str) -> float:
        return self.rt.registry.get_sample_value(f"prefixbus_directory_{name}", labels) or 0.0


class World:
    """A server, a bridge that publishes events, and replicas that hear them when told to."""

    def __init__(self, server: NatsServer, bridge: Bus) -> None:
        self.server = server
        self.bridge = bridge
        self.clock = VirtualClock()
        self.events: list[KvEvents] = []

    async def replica(self, name: str) -> Replica:
        return await Replica(self.server, self.clock, name).start()

    async def event(self, *hearers: Replica) -> None:
        seq = len(self.events) + 1
        event = KvEvents(messages.VERSION, "w1", 1, seq, [Stored(NS, 0, array("Q", [seq]).tobytes())])
        self.events.append(event)
        stream_seq = await self.bridge.publish_acked(subjects.kv(0, "w1"), messages.KV.encode(event))
        for hearer in hearers:
            hearer.core.events(event, self.clock.now())
            hearer.applied = stream_seq

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.provision()
        yield World(server, await server.bus("worker_bridge", "w1"))


async def test_what_one_replica_writes_another_begins_with(world: World) -> None:
    writer, starter = await world.replica("d1"), await world.replica("d2")
    assert await starter.load() is None
    for _ in range(3):
        await world.event(writer)

    await writer.shelf.write_if_due()

    assert await starter.load() == writer.applied == 3
    view = starter.core.ledger.view("w1")
    assert view is not None
    assert (view.last_seq, view.complete) == (3, True)
    assert starter.value("snapshot_bytes") == writer.value("snapshot_bytes") > 0
    assert starter.value("snapshot_failures_total", of="read") == 0


async def test_a_recent_snapshot_of_another_replica_is_enough(world: World) -> None:
    one, other = await world.replica("d1"), await world.replica("d2")
    await world.event(one, other)
    await one.shelf.write_if_due()
    await world.event(one, other)

    world.passes(EVERY_S / 4)
    await other.shelf.write_if_due()
    assert other.value("snapshots_total") == 0
    assert other.value("snapshot_age_seconds") == EVERY_S / 4

    world.passes(EVERY_S)
    await other.shelf.write_if_due()
    assert other.value("snapshots_total") == 1


async def test_a_replica_that_is_behind_does_not_replace_what_one_that_is_not_has_written(world: World) -> None:
    one, behind = await world.replica("d1"), await world.replica("d2")
    await world.event(one, behind)
    await world.event(one)
    await one.shelf.write_if_due()

    world.passes(10 * EVERY_S)
    await behind.shelf.write_if_due()

    assert behind.value("snapshots_total") == 0
    assert await (await world.replica("d3")).load() == 2


async def test_where_nothing_happens_the_same_is_not_written_again_and_again(world: World) -> None:
    one = await world.replica("d1")
    await world.event(one)

    for _ in range(29):
        await one.shelf.write_if_due()
        world.passes(EVERY_S)
    assert one.value("snapshots_total") == 1

    world.passes(2 * EVERY_S)  # but before the bucket forgets it
    await one.shelf.write_if_due()
    assert one.value("snapshots_total") == 2


async def test_a_snapshot_of_events_that_the_stream_does_not_have_is_not_believed(world: World) -> None:
    """The stream was made anew: sequences mean other events now."""
    one, starter = await world.replica("d1"), await world.replica("d2")
    await world.event(one)
    one.applied = 7
    await one.shelf.write_if_due()

    assert await starter.load() is None

    assert starter.core.ledger.view("w1") is None
    assert starter.value("snapshot_failures_total", of="read") == 1


async def test_bytes_that_are_no_snapshot_are_not_believed_and_are_replaced(world: World) -> None:
    one, starter = await world.replica("d1"), await world.replica("d2")
    await world.event(one)

    async def nonsense() -> AsyncIterator[bytes]:
        yield b"nonsense"

    objects = Objects(one.rt.bus, subjects.BUCKET_DIRECTORY)
    await objects.write("shard-0-of-1", nonsense(), {})

    assert await starter.load() is None
    assert starter.value("snapshot_failures_total", of="read") == 1
    await one.shelf.write_if_due()
    assert await starter.load() == 1


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"taken_at": "yesterday"},
        {"stream_seq": "many"},
        {"taken_at": "4102444800.0"},
        {"taken_at": "nan"},
        {"taken_at": "inf"},
        {"stream_seq": "1" + "0" * 30},
    ],
    ids=str,
)
async def test_what_is_said_of_a_snapshot_keeps_no_replica_from_writing_for_ever(
    world: World, said: dict[str, str]
) -> None:
    """A word that was no number ended the process; a time to come, of a clock that was wrong, stood for 75 years."""
    replica = await world.replica("d1")
    await world.event(replica)
    await replica.shelf.write_if_due()
    store = Objects(replica.rt.bus, subjects.BUCKET_DIRECTORY)
    found = await store.find("shard-0-of-1")
    assert found is not None
    whole, about = bytes(await store.read(found.object)), found.object.metadata

    async def pieces() -> AsyncIterator[bytes]:
        yield whole

    await store.write("shard-0-of-1", pieces(), {**about, **said} if said else {"stream": about["stream"]})
    world.passes(2 * EVERY_S)
    await world.event(replica)
    await replica.shelf.write_if_due()

    assert replica.value("snapshots_total") == 2


META = "$O.DIRECTORY.M." + base64.urlsafe_b64encode(b"shard-0-of-1").decode()


def said_of(**changes: Any) -> bytes:
    """What a store says of an object, as if by somebody else."""
    said = {
        "name": "shard-0-of-1",
        "bucket": "DIRECTORY",
        "nuid": "shard-0-of-1-a",
        "size": 1,
        "chunks": 1,
        "digest": "SHA-256=",
        "metadata": {},
    }
    return json.dumps(said | changes).encode()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"\xff" * 1000,
        b"[1, 2]",
        said_of(nuid=7),
        said_of(nuid="elsewhere.>"),
        said_of(nuid="x y"),
        said_of(nuid=""),
        said_of(nuid="*"),
        said_of(chunks=-1),
        said_of(chunks=1 << 62),
        said_of(size=-1),
        said_of(deleted=True),
        said_of(metadata={"stream": "of another life"}),
        said_of(metadata={"x": "y" * 100_000}),
    ],
    ids=lambda said: said[-40:].decode("ascii", "replace"),
)
async def test_a_store_that_says_nonsense_of_a_snapshot_is_done_without_and_written_anew(
    world: World, said: bytes
) -> None:
    """What could not be read could not be replaced either: no snapshot was written until the bucket forgot it."""
    replica = await world.replica("d1")
    await world.event(replica)
    await replica.shelf.write_if_due()
    await replica.rt.bus.publish_acked(META, said, headers={"Nats-Rollup": "sub"})

    assert await (await world.replica("d2")).load() is None
    world.passes(2 * EVERY_S)
    await replica.shelf.write_if_due()

    assert await (await world.replica("d3")).load() == 1


@pytest.mark.parametrize("stream_seq", [-1, -(1 << 40), 1 << 40, (1 << 64) - 1])
async def test_a_snapshot_of_a_place_that_no_stream_has_is_not_believed(world: World, stream_seq: int) -> None:
    replica = await world.replica("d1")
    await world.event(replica)
    replica.applied = stream_seq
    await replica.shelf.write_if_due()

    starter = await world.replica("d2")
    assert await starter.load() is None
    assert starter.value("snapshot_failures_total", of="read") == 1


async def test_a_snapshot_that_is_gone_while_it_is_read_is_done_without(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks age out before what is said of it, or an operator clears the bucket."""
    replica, starter = await world.replica("d1"), await world.replica("d2")
    await world.event(replica)
    await replica.shelf.write_if_due()
    jetstream = (await world.server.bus("deploy")).jetstream
    find = Objects.find

    async def find_and_lose(self: Objects, name: str) -> Any:
        found = await find(self, name)
        config = (await jetstream.stream_info(subjects.STREAM_DIRECTORY)).config
        config.max_age = 0.1
        config.duplicate_window = 0.1
        await jetstream.update_stream(config)
        await eventually(lambda: is_empty(jetstream), "nothing is kept any more")
        return found

    monkeypatch.setattr(Objects, "find", find_and_lose)

    assert await starter.load() is None
    assert starter.value("snapshot_failures_total", of="read") == 1


async def is_empty(jetstream: JetStreamContext) -> bool:
    return not (await jetstream.stream_info(subjects.STREAM_DIRECTORY)).state.messages


class Asking:
    """A directory process but for its look-ups, and the dumps that it asks of w1."""

    def __init__(self, world: World) -> None:
        self.asked: list[str] = []
        self._world = world
        self._rt = Runtime("directory", "d2", world.server.state, Config(), world.clock)

    async def start(self) -> "Asking":
        bridge = self._world.bridge
        self._rt.bus = await self._world.server.bus("directory", instance="d2")
        directory = self.directory = Directory(self._rt, 0)

        async def hear(message: Msg) -> None:
            self.asked.append(messages.DUMP_REQUEST.decode(message.data).reason)

        await bridge.subscribe(subjects.control("w1", "*"), hear)
        await bridge.flush()
        await directory.follow(Shelf(self._rt, directory.core, 0, lambda: directory.applied_seq, directory.metrics))
        return self

    def beat(self, event_seq: int) -> None:
        """A heartbeat that names the last event."""
        load = Load(1, "w1", 1, 1, event_seq, "m", "s", 0.0, 0, 0, 8, 0.0, 1000, 16, False, [])
        self.directory.load(load, Msg(self._rt.bus.client, subjects.load("w1")))

    def passes(self, seconds: float) -> None:
        """And what time does is done."""
        clock = self._world.clock
        clock.advance(seconds)
        self.directory._perform(self.directory.core.tick(clock.now()))


@pytest.mark.parametrize("kept", [0, 1], ids=["nothing is kept", "the last event is kept"])
async def test_what_aged_out_between_the_snapshot_and_the_stream_is_asked_for_and_believed_less(
    world: World, kept: int
) -> None:
    writer = await world.replica("d1")
    for _ in range(2):
        await world.event(writer)
    await writer.shelf.write_if_due()
    for _ in range(3):
        await world.event(writer)
    jetstream = (await world.server.bus("deploy")).jetstream
    config = (await jetstream.stream_info(subjects.STREAM_KV_EVENTS)).config
    if kept:
        config.max_msgs = kept
    else:
        config.max_age = config.duplicate_window = 0.1
    await jetstream.update_stream(config)

    async def is_trimmed() -> bool:
        return (await jetstream.stream_info(subjects.STREAM_KV_EVENTS)).state.messages <= kept

    await eventually(is_trimmed, "the first events are gone")

    starter = await Asking(world).start()
    for _ in range(4):
        starter.beat(5)
        starter.passes(0.4)

    await eventually(lambda: bool(starter.asked), "a dump is asked for")
    found = starter.directory.core.lookup(Lookup(messages.VERSION, NS, array("Q", [1]).tobytes()), world.clock.now())
    assert found.incomplete == ["w1"]
    assert found.trust["w1"] < 1
