"""Streams and buckets: made once, mended when they differ, and never lost without a word."""

from pathlib import Path

import pytest
from nats.js.api import StorageType
from support.nats import NatsServer

from prefixbus.bus import ids, subjects
from prefixbus.bus.errors import BusUnavailable, ConfigInvalid, Unavailable
from prefixbus.cluster import permissions, provision


async def test_a_second_time_there_is_nothing_to_do(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        first, second = await server.provision(), await server.provision()

    assert set(first.created) == set(permissions.ALL_STREAMS)
    assert (second.created, second.updated) == ((), ())
    assert second.sentence() == "Nothing to do: all streams and buckets are there."


async def test_a_stream_that_differs_is_brought_back(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        await server.provision()
        js = (await server.bus("deploy")).jetstream
        found = (await js.stream_info(subjects.STREAM_JOURNAL)).config
        await js.update_stream(found.evolve(max_age=600.0, max_bytes=1_000_000))

        report = await server.provision()

        assert (report.created, report.updated) == ((), (subjects.STREAM_JOURNAL,))
        assert report.sentence() == "Updated JOURNAL."
        mended = (await js.stream_info(subjects.STREAM_JOURNAL)).config
        wanted = next(config for config in provision.stream_configs() if config.name == subjects.STREAM_JOURNAL)
        assert provision.differences(wanted, mended) == []


async def test_a_difference_that_cannot_be_changed_is_an_error_that_names_the_stream(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        js = (await server.bus("deploy")).jetstream
        wanted = next(config for config in provision.stream_configs() if config.name == subjects.STREAM_AUDIT)
        await js.add_stream(wanted.evolve(storage=StorageType.MEMORY, max_bytes=1_000_000))

        with pytest.raises(ConfigInvalid, match=r"stream AUDIT.*storage"):
            await server.provision()


async def test_every_stream_is_bounded_in_bytes_and_ages_where_it_may(tmp_path: Path) -> None:
    for config in provision.stream_configs():
        assert config.max_bytes and config.max_bytes > 0
        bucket = str(config.name).startswith("KV_")
        assert bucket or (config.max_age and config.max_age > 0)


@pytest.mark.parametrize("role", list(subjects.STREAMS_OF))
async def test_a_service_finds_its_streams(provisioned: NatsServer, role: str) -> None:
    bus = await provisioned.bus(role, "w1" if role == "worker_bridge" else "")

    await bus.check_streams(subjects.STREAMS_OF[role])


async def test_a_request_is_claimed_once(provisioned: NatsServer) -> None:
    """By whichever bridge is first, whatever it writes."""
    first, second = await provisioned.bus("worker_bridge", "w1"), await provisioned.bus("worker_bridge", "w2")

    await first.publish_acked(subjects.claim("r1"), b"w1 1")

    for bus in (first, second):
        with pytest.raises(BusUnavailable, match="maximum messages per subject"):
            await bus.publish_acked(subjects.claim("r1"), b"w2 2")
    await second.publish_acked(subjects.claim("r2"), b"w2 1")


async def test_there_is_room_for_the_claims_of_1000_requests_a_second(tmp_path: Path) -> None:
    """For as long as they count. Without room a request whose worker was lost is begun by nobody else."""
    count = 100
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.provision()
        bridge = await server.bus("worker_bridge", "w1")
        for number in range(count):
            await bridge.publish_acked(subjects.claim(ids.request_id(1.7e9, number.to_bytes(10, "big"))), b"w1 1")
        info = await (await server.bus("deploy")).jetstream.stream_info(subjects.STREAM_CLAIMS)

    assert info.state.messages == count
    assert info.config.max_bytes is not None
    assert info.config.max_bytes >= info.state.bytes / count * 1000 * subjects.CLAIMS_KEPT_S


async def test_a_service_whose_streams_are_missing_is_told_what_to_do(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        bus = await server.bus("directory")

        with pytest.raises(Unavailable, match=r"KV_EVENTS.*prefixbus provision"):
            await bus.check_streams(subjects.STREAMS_OF["directory"])


async def test_what_is_stored_outlives_the_server(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.provision()
        stored = await (await server.bus("worker_bridge", "w1")).publish_acked("$KV.WORKERS.w1", b"{}")
        await server.close_connections()
        server.stop()
        server.start()

        assert (await server.provision()).created == ()
        found = await (await server.bus("operator")).jetstream.get_last_msg(subjects.STREAM_WORKERS, "$KV.WORKERS.w1")
        assert found.seq == stored
