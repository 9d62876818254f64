"""A bridge that writes what it likes under its own subjects of JOURNAL spoils the reading of nobody else's records."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.decisions import record
from support.nats import NatsServer

from prefixbus.bus import ids, messages, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import Captured, Outcome
from prefixbus.cluster import provision, records, resend

TRUE = Outcome(
    1, "R1", "mine", 1, "w1", 1, "t", "m", "", "ok", "", "rag", "blind", 320, 0, 32, None, 1, 0.0, 9.0, 1, 1.0
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """With a request of w1, its decision and its outcome."""
    async with NatsServer(tmp_path, workers=["w1", "evil"]) as running:
        await provision.provision((await running.bus("deploy")).jetstream)
        decision = record(random.Random(1), request_id="R1", client_request_id="mine")
        router, bridge = await running.bus("router"), await running.bus("worker_bridge", "w1")
        await router.publish_acked(subjects.journal("R1"), messages.DECISION.encode(decision))
        await bridge.publish_acked(subjects.outcome("w1", "R1"), messages.OUTCOME.encode(TRUE))
        yield running


@pytest.fixture
async def operator(server: NatsServer) -> Bus:
    return await server.bus("operator")


async def written(server: NatsServer, data: bytes) -> None:
    evil = await server.bus("worker_bridge", "evil")
    await evil.publish_acked(subjects.outcome("evil", "R1"), data)


def evil(**changed: Any) -> bytes:
    return messages.OUTCOME.encode(msgspec.structs.replace(TRUE, **{"worker": "evil", **changed}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\xff",
        b"{}",
        b'{"v": 2}',
        b"[" * 100_000,
        evil(worker="w1", status="error", error="forged"),
        evil(request_id="R2"),
        evil(ended_at=1e300),
        evil(ended_at=-1.0),
        evil().replace(b'"ended_at":1.0', b'"ended_at":NaN'),
        evil(total_ms=1e300),
        evil(prompt_tokens=1 << 62),
    ],
    ids=[
        "nothing",
        "bytes",
        "no fields",
        "a later version",
        "deep",
        "of another worker",
        "of another request",
        "of no time",
        "before all time",
        "NaN",
        "endless",
        "too long",
    ],
)
async def test_what_is_no_outcome_of_its_subject_is_named_and_left_out(
    server: NatsServer, operator: Bus, data: bytes
) -> None:
    await written(server, data)

    everything = await records.between(operator)
    of_one, _ = await records.of_request(operator, "mine")

    for found in (everything, of_one):
        assert [one.request_id for one in found.decisions] == ["R1"]
        assert found.outcomes == [TRUE]
        assert found.unreadable == [subjects.outcome("evil", "R1")]


async def test_a_captured_request_that_cannot_be_read_is_named_and_the_others_are_sent(
    server: NatsServer, operator: Bus
) -> None:
    tokenizer = await server.bus("tokenizer")
    request_id = ids.request_id(1.7e9, bytes(10))
    request = Captured(1, request_id, "mine", "acme", "", "m", "", msgspec.Raw(b"{}"))
    for name, data in (
        ("R1", b"rubbish"),
        ("R2", messages.CAPTURED.encode(msgspec.structs.replace(request, request_id="no id of ours"))),
        (request_id, messages.CAPTURED.encode(request)),
    ):
        await tokenizer.publish_acked(subjects.capture("acme", name), data)

    found = await resend.captured(operator, "acme", None, None)

    assert [one.request_id for one in found.requests] == [request_id]
    assert found.unreadable == [subjects.capture("acme", "R1"), subjects.capture("acme", "R2")]
