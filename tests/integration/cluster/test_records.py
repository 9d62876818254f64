"""Ranges of a stream, and the records of a request in JOURNAL, read with the operator's key."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.decisions import record
from support.nats import NatsServer

from prefixbus.bus import ids, messages, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import BusUnavailable
from prefixbus.cluster import provision, records, streams
from prefixbus.cluster.records import AgedOut, NotRecorded

JOURNAL = subjects.STREAM_JOURNAL


@pytest.fixture
async def provisioned(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=["w1"]) as server:
        deploy = await server.bus("deploy")
        await provision.provision(deploy.jetstream)
        yield server


async def stored(server: NatsServer, *names: str, **fields: Any) -> list[str]:
    """Decisions of requests that their clients call so; our ids."""
    router = await server.bus("router")
    made: list[str] = []
    for name in names:
        request_id = ids.request_id(1.7e9 + len(made), random.randbytes(10))
        decision = record(random.Random(1), request_id=request_id, client_request_id=name, **fields)
        await router.publish_acked(subjects.journal(request_id), messages.DECISION.encode(decision))
        made.append(request_id)
    return made


async def sequences(operator: Bus, subject: str, **bounds: Any) -> list[int]:
    return [kept.seq async for kept in streams.read(operator, JOURNAL, subject, **bounds)]


async def test_a_range_of_many_batches_is_read_whole_and_in_order(
    provisioned: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BATCH", 7)
    await stored(provisioned, *(f"n{number}" for number in range(30)))
    operator = await provisioned.bus("operator")

    assert await sequences(operator, "pb.v1.>") == list(range(1, 31))
    assert await sequences(operator, "pb.v1.>", last_seq=14) == list(range(1, 15))
    assert await sequences(operator, "pb.v1.outcome.*.*") == []


async def test_a_range_is_bounded_by_the_times_at_which_messages_were_stored(provisioned: NatsServer) -> None:
    await stored(provisioned, "a", "b", "c")
    operator = await provisioned.bus("operator")
    first, second, third = [kept.at async for kept in streams.read(operator, JOURNAL, "pb.v1.>")]

    assert first < second < third
    assert await sequences(operator, "pb.v1.>", since=second) == [2, 3]
    assert await sequences(operator, "pb.v1.>", until=second) == [1, 2]
    assert await sequences(operator, "pb.v1.>", since=third + 60) == []


async def test_whoever_may_not_read_a_stream_is_told_and_does_not_wait_for_ever(
    provisioned: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_WAIT_S", 0.2)
    await stored(provisioned, "a")
    router = await provisioned.bus("router")

    with pytest.raises(BusUnavailable, match="stream JOURNAL was not read"):
        await sequences(router, "pb.v1.>")


async def test_of_several_requests_with_one_label_the_latest_is_meant(provisioned: NatsServer) -> None:
    earlier, _, latest = await stored(provisioned, "same", "other", "same")
    operator = await provisioned.bus("operator")

    found, others = await records.of_request(operator, "same")

    assert [decision.request_id for decision in found.decisions] == [latest]
    assert others == [earlier]


async def test_all_attempts_of_a_request_are_found_by_our_id(provisioned: NatsServer) -> None:
    (request_id,) = await stored(provisioned, "mine")
    router, operator = await provisioned.bus("router"), await provisioned.bus("operator")
    second = record(random.Random(1), request_id=request_id, attempt=2)
    await router.publish_acked(subjects.journal(request_id), messages.DECISION.encode(second))

    found, _ = await records.of_request(operator, request_id)

    assert [decision.attempt for decision in found.decisions] == [1, 2]


async def test_a_request_is_found_by_the_end_of_our_id_that_top_shows(provisioned: NatsServer) -> None:
    _, request_id, _ = await stored(provisioned, "before", "this", "after")
    operator = await provisioned.bus("operator")

    found, others = await records.of_request(operator, request_id[-ids.SHOWN :])

    assert [decision.request_id for decision in found.decisions] == [request_id]
    assert others == []


async def test_an_empty_journal_says_that_it_is_empty(provisioned: NatsServer) -> None:
    with pytest.raises(NotRecorded, match="which is empty"):
        await records.of_request(await provisioned.bus("operator"), "nobody")


async def test_a_request_older_than_the_journal_has_aged_out_and_is_not_called_unknown(
    provisioned: NatsServer,
) -> None:
    old, _ = await stored(provisioned, "old", "new")
    deploy, operator = await provisioned.bus("deploy"), await provisioned.bus("operator")
    journal = next(config for config in provision.stream_configs() if config.name == JOURNAL)
    journal.max_msgs = 1
    await deploy.jetstream.update_stream(journal)

    with pytest.raises(AgedOut, match=r"came at 2023-11-14 22:13:20.000Z, and the journal now begins at 2"):
        await records.of_request(operator, old)
    with pytest.raises(NotRecorded) as unknown:
        await records.of_request(operator, "never-there")
    assert unknown.type is NotRecorded
