"""What workers held at a past sequence of KV_EVENTS, read with the operator's key."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.nats import NatsServer

from prefixbus.bus import messages, subjects
from prefixbus.bus.errors import BadRequest
from prefixbus.bus.messages import KvEvents, Removed, Stored
from prefixbus.cluster import past, provision
from prefixbus.cluster.records import AgedOut

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
    rebuild = await past.directory_at(await server.bus("operator"), seq)

    assert [(held.worker, held.gpu_blocks, held.last_event) for held in rebuild.held()] == [("w1", blocks, seq)]


async def test_a_sequence_that_was_not_reached_yet_is_refused(server: NatsServer) -> None:
    with pytest.raises(BadRequest, match="KV_EVENTS has no message 3 yet: the newest is 2"):
        await past.directory_at(await server.bus("operator"), 3)


async def test_once_the_beginning_is_gone_nothing_is_made_up(server: NatsServer) -> None:
    config = next(one for one in provision.stream_configs() if one.name == subjects.STREAM_KV_EVENTS)
    config.max_msgs = 1
    await (await server.bus("deploy")).jetstream.update_stream(config)

    with pytest.raises(AgedOut, match=r"begins at message 2: .* The oldest state that can be rebuilt is"):
        await past.directory_at(await server.bus("operator"), 2)
