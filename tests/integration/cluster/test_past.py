"""What workers held at a past sequence of KV_EVENTS, read with the operator's key."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.nats import NatsServer

from prefixbus.bus import messages, subjects
from prefixbus.bus.errors import BadRequest
from prefixbus.bus.messages import KvEvents, Removed, Stored
from prefixbus.bus.objects import Objects
from prefixbus.cluster import past, provision
from prefixbus.cluster.records import AgedOut
from prefixbus.directory import snapshot
from prefixbus.directory.index import Index, Slots
from prefixbus.directory.ledger import Ledger

NS = b"n" * 16


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """With two events of w1: it stored three blocks, and removed one."""
    async with NatsServer(tmp_path, workers=["w1"]) as running:
        await provision.provision((await running.bus("deploy")).jetstream)
        bridge = await running.bus("worker_bridge", "w1")
        for seq, op in ((1, Stored(NS, 0, bytes(range(24)))), (2, Removed(NS, bytes(range(16, 24))))):
            event = KvEvents(messages.VERSION, "w1", 1, seq, [op])
            await bridge.publish_acked(subjects.kv(0, "w1"), messages.KV.encode(event))
        yield running


@pytest.mark.parametrize(("seq", "blocks"), [(1, 3), (2, 2)])
async def test_each_sequence_has_its_own_state(server: NatsServer, seq: int, blocks: int) -> None:
    rebuild, unreadable = await past.directory_at(await server.bus("operator"), seq, 1)

    assert not unreadable
    assert [(held.worker, held.gpu_blocks, held.last_event) for held in rebuild.held()] == [("w1", blocks, seq)]


async def test_a_sequence_that_was_not_reached_yet_is_refused(server: NatsServer) -> None:
    with pytest.raises(BadRequest, match="KV_EVENTS has no message 3 yet: the newest is 2"):
        await past.directory_at(await server.bus("operator"), 3, 1)


async def forgotten_before(server: NatsServer, messages_left: int) -> None:
    """The stream's first messages age out."""
    config = next(one for one in provision.stream_configs() if one.name == subjects.STREAM_KV_EVENTS)
    config.max_msgs = messages_left
    await (await server.bus("deploy")).jetstream.update_stream(config)


async def snapshot_after_two(server: NatsServer) -> None:
    """What a replica writes that has applied both events."""
    directory = await server.bus("directory")
    index = Index(Slots())
    ledger = Ledger(index)
    ledger.events("w1", 1, 1, [Stored(NS, 0, bytes(range(24)))], 0.0)
    ledger.events("w1", 1, 2, [Removed(NS, bytes(range(16, 24)))], 0.0)
    made = (await directory.stream_state(subjects.STREAM_KV_EVENTS)).made

    async def pieces() -> AsyncIterator[bytes]:
        for piece in snapshot.take(ledger, index, snapshot.Header(0, 1, made, 2, 0.0)):
            yield piece

    await Objects(directory, subjects.BUCKET_DIRECTORY).write(snapshot.name_of(0, 1), pieces(), {})


async def test_once_the_beginning_is_gone_nothing_is_made_up(server: NatsServer) -> None:
    await forgotten_before(server, 1)

    with pytest.raises(AgedOut, match=r"begins at message 2: .* no snapshot to begin with yet. The oldest state"):
        await past.directory_at(await server.bus("operator"), 2, 1)


async def test_a_snapshot_stands_for_what_is_gone_and_names_the_oldest_state(server: NatsServer) -> None:
    await snapshot_after_two(server)
    bridge, operator = await server.bus("worker_bridge", "w1"), await server.bus("operator")
    for seq, op in ((3, Stored(NS, 0, bytes(range(32, 48)))), (4, Removed(NS, bytes(range(32, 40))))):
        await bridge.publish_acked(
            subjects.kv(0, "w1"), messages.KV.encode(KvEvents(messages.VERSION, "w1", 1, seq, [op]))
        )
    await forgotten_before(server, 3)

    blocks = {}
    for seq in (2, 3, 4):
        (held,) = (await past.directory_at(operator, seq, 1)).rebuild.held()
        blocks[seq] = (held.gpu_blocks, held.last_event, held.complete)
    with pytest.raises(AgedOut, match=r"begins at message 2: .* snapshots, after message 2\."):
        await past.directory_at(operator, 1, 1)

    assert blocks == {2: (2, 2, True), 3: (4, 3, True), 4: (3, 4, True)}


async def test_a_snapshot_that_the_events_no_longer_follow_is_of_no_use(server: NatsServer) -> None:
    await snapshot_after_two(server)
    bridge = await server.bus("worker_bridge", "w1")
    for seq in (3, 4, 5):
        event = KvEvents(messages.VERSION, "w1", 1, seq, [Stored(NS, 0, bytes(range(8 * seq, 8 * seq + 8)))])
        await bridge.publish_acked(subjects.kv(0, "w1"), messages.KV.encode(event))
    await forgotten_before(server, 1)

    with pytest.raises(AgedOut, match="no snapshot to begin with yet"):
        await past.directory_at(await server.bus("operator"), 5, 1)


async def test_what_a_directory_dropped_is_left_out_of_the_past_and_named(server: NatsServer) -> None:
    bridge, operator = await server.bus("worker_bridge", "w1"), await server.bus("operator")
    forged = KvEvents(messages.VERSION, "w2", 9, 1, [Stored(NS, 0, bytes(range(24)))])
    for data in (b"rubbish", b"", messages.KV.encode(forged)):
        await bridge.publish_acked(subjects.kv(0, "w1"), data)

    state = await past.directory_at(operator, 5, 1)
    told = await past.told(operator, None, None)

    assert state.unreadable == told.unreadable == [subjects.kv(0, "w1")] * 3
    (held,) = state.rebuild.held()
    assert (held.worker, held.gpu_blocks) == ("w1", 2)
    assert [life.worker for life in told.lives] == ["w1"]


async def test_a_restart_is_known_of_a_worker_that_has_said_nothing_since(server: NatsServer) -> None:
    """Its events tell of the life that ended, its registrations of the one that began."""
    bridge, operator = await server.bus("worker_bridge", "w1"), await server.bus("operator")
    registered = [await bridge.publish_acked("$KV.WORKERS.w1", b"{}") for _ in range(3)]

    told = await past.told(operator, None, None)

    began = {life.incarnation: life.at for life in told.lives if life.worker == "w1"}
    assert sorted(began) == registered
    assert [began[incarnation] for incarnation in registered] == sorted(began.values())
