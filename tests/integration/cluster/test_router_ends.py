"""Requests that a router ended itself are found and explained, whether or not a worker had been chosen."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.decisions import record
from support.nats import NatsServer

from prefixbus.bus import ids, messages, subjects
from prefixbus.bus.messages import Outcome
from prefixbus.cluster import explain, provision, records


@pytest.fixture
async def provisioned(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=["w1"]) as server:
        deploy = await server.bus("deploy")
        await provision.provision(deploy.jetstream)
        yield server


def end(request_id: str, label: str, **changed: Any) -> Outcome:
    fields: dict[str, Any] = {
        "v": messages.VERSION,
        "request_id": request_id,
        "client_request_id": label,
        "attempt": 0,
        "worker": "",
        "incarnation": 0,
        "tenant": "acme",
        "model": "m",
        "ns_id": "00" * 16,
        "status": "error",
        "error": "overloaded",
        "prefix_class": "session",
        "decision": "",
        "prompt_tokens": 40,
        "predicted_tokens": 0,
        "cached_tokens": None,
        "prefill_tokens": None,
        "output_tokens": 0,
        "queue_wait_ms": None,
        "ttft_ms": None,
        "total_ms": 0.4,
        "ended_at": 1.7e9,
    }
    return Outcome(**(fields | changed))


async def test_a_request_that_no_worker_was_chosen_for_is_explained(provisioned: NatsServer) -> None:
    router, operator = await provisioned.bus("router"), await provisioned.bus("operator")
    refused = ids.request_id(1.7e9, random.randbytes(10))
    again = ids.request_id(1.7e9 + 1, random.randbytes(10))
    await router.publish_acked(subjects.ended(refused), messages.OUTCOME.encode(end(refused, "mine")))
    decision = record(random.Random(1), request_id=again, client_request_id="mine")
    await router.publish_acked(subjects.journal(again), messages.DECISION.encode(decision))

    by_ours, _ = await records.of_request(operator, refused)
    by_label, others = await records.of_request(operator, "mine")
    told = "\n".join(str(part) for part in explain.story(by_ours, ()))

    assert by_ours.outcomes == [end(refused, "mine")]
    assert "no worker was chosen" in told
    assert "then: error (overloaded), said by the router 2023-11-14 22:13:20.000Z, 0.4 ms after it came" in told
    assert [one.request_id for one in by_label.decisions] == [again]
    assert others == [refused]


async def test_an_end_under_the_subject_of_another_request_is_left_out(provisioned: NatsServer) -> None:
    router, operator = await provisioned.bus("router"), await provisioned.bus("operator")
    await router.publish_acked(subjects.ended("R1"), messages.OUTCOME.encode(end("R2", "mine")))

    found = await records.between(operator)

    assert (found.outcomes, found.unreadable) == ([], [subjects.ended("R1")])


async def test_the_last_attempt_that_a_router_ended_is_told_with_its_decision(provisioned: NatsServer) -> None:
    router, operator = await provisioned.bus("router"), await provisioned.bus("operator")
    request_id = ids.request_id(1.7e9, random.randbytes(10))
    decision = record(random.Random(1), request_id=request_id, client_request_id="mine")
    lost = end(request_id, "mine", attempt=decision.attempt, worker=decision.selected_worker, error="worker_lost")
    await router.publish_acked(subjects.journal(request_id), messages.DECISION.encode(decision))
    await router.publish_acked(subjects.ended(request_id), messages.OUTCOME.encode(lost))

    found, _ = await records.of_request(operator, request_id)
    told = "\n".join(str(part) for part in explain.story(found, ()))

    assert f"then: error (worker_lost) on {decision.selected_worker}, 0.4 ms in all" in told
    assert "no outcome is in the journal" not in told
