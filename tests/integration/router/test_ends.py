"""However a request ends, the journal says so once: as its bridge's outcome or as the router's."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.messages import Outcome
from prefixbus.cluster import records, streams

from .fakes import Answer, FakeBridge
from .test_router import CLOCK, FAST_LEASES, RunningRouter, World, world

__all__ = ["world"]


async def ends(world: World, request_id: str = "R1") -> list[Outcome]:
    """What the journal holds, of whomever, when the routers have written all they had to."""
    for router in world.routers:
        await router.desk.records.idle()
    operator = await world.server.bus("operator", instance="reader")
    found = records.Records([], [])
    async for kept in streams.read(operator, subjects.STREAM_JOURNAL, "pb.v1.>"):
        records.add(found, kept.subject, kept.data)
    assert found.unreadable == []
    return [outcome for outcome in found.outcomes if outcome.request_id == request_id]


Way = Callable[[World], Awaitable[Answer]]


async def knows(router: RunningRouter, *workers: str) -> None:
    await eventually(functools.partial(router.knows, *workers), "the workers are known")


async def dispatched(bridge: FakeBridge) -> None:
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")


async def no_worker(world: World) -> Answer:
    await world.router()
    return await world.client.send(CLOCK.wall())


async def overload(world: World) -> Answer:
    bridge = await world.bridge("w1")
    bridge.queue_ms = 900_000.0
    await knows(await world.router(), "w1")
    return await world.client.send(CLOCK.wall())


async def refused_everywhere(world: World) -> Answer:
    first, second = await world.bridge("w1"), await world.bridge("w2")
    first.answer = second.answer = lambda dispatch: "no_slot"
    second.queue_ms = 500.0
    await knows(await world.router(), "w1", "w2")
    return await world.client.send(CLOCK.wall())


async def past_its_deadline(world: World) -> Answer:
    await world.bridge("w1")
    await knows(await world.router(), "w1")
    return await world.client.send(CLOCK.wall(), deadline_s=-0.5)


async def deadline_while_offered(world: World) -> Answer:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    await knows(await world.router(accept_timeout_ms=60_000.0), "w1")
    return await world.client.send(CLOCK.wall(), deadline_s=0.3)


async def cancelled_before_it_came(world: World) -> Answer:
    router = await world.router()
    await world.bridge("w1")
    await knows(router, "w1")
    await world.client.cancel("mine")
    await eventually(lambda: router.desk.cancels.covers("acme", "mine", CLOCK.now()), "the cancel is heard")
    return await world.client.send(CLOCK.wall(), label="mine")


async def cancelled_and_refused(world: World) -> Answer:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router(accept_timeout_ms=300.0)
    await knows(router, "w1")
    answer = await world.client.send(CLOCK.wall(), label="mine")
    await dispatched(bridge)
    await world.client.cancel("mine")
    return answer


async def worker_lost_after_its_first_frame(world: World) -> Answer:
    bridge = await world.bridge("w1")
    bridge.streams = False
    await knows(await world.router(**FAST_LEASES), "w1")
    answer = await world.client.send(CLOCK.wall())
    await dispatched(bridge)
    await bridge.start_answer(bridge.dispatches[0])
    await bridge.vanish()
    return answer


async def router_going_away(world: World) -> Answer:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router(accept_timeout_ms=60_000.0)
    await knows(router, "w1")
    answer = await world.client.send(CLOCK.wall())
    await dispatched(bridge)
    router.task.cancel()
    await asyncio.wait({router.task}, timeout=10)
    return answer


@pytest.mark.parametrize(
    ("way", "worker", "status", "code"),
    [
        pytest.param(no_worker, "", "error", "no_workers", id="no worker"),
        pytest.param(overload, "", "error", "overloaded", id="overload"),
        pytest.param(refused_everywhere, "w2", "error", "overloaded", id="refused everywhere"),
        pytest.param(past_its_deadline, "", "error", "deadline_exceeded", id="past its deadline"),
        pytest.param(deadline_while_offered, "w1", "error", "deadline_exceeded", id="deadline while offered"),
        pytest.param(cancelled_before_it_came, "", "cancelled", "cancelled", id="cancelled before it came"),
        pytest.param(cancelled_and_refused, "w1", "cancelled", "cancelled", id="cancelled, and nobody had accepted"),
        pytest.param(worker_lost_after_its_first_frame, "w1", "error", "worker_lost", id="worker lost"),
        pytest.param(router_going_away, "w1", "error", "unavailable", id="router going away"),
    ],
)
async def test_what_a_router_ends_itself_has_one_end_in_the_journal(
    world: World, way: Way, worker: str, status: str, code: str
) -> None:
    answer = await way(world)
    await world.ended(answer)

    (end,) = await ends(world)

    assert answer.code == code
    assert (end.worker, end.status, end.error) == (worker, status, code)
    assert (end.cached_tokens, end.prefill_tokens, end.queue_wait_ms, end.ttft_ms) == (None, None, None, None)
    assert end.total_ms >= 0


@pytest.mark.parametrize("cancelled", [False, True], ids=["ok", "cancelled"])
async def test_what_a_bridge_ends_has_its_end_alone_in_the_journal(world: World, cancelled: bool) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    await knows(await world.router(), "w1")
    answer = await world.client.send(CLOCK.wall(), label="mine")
    await dispatched(bridge)
    await bridge.start_answer(bridge.dispatches[0])
    if cancelled:
        await world.client.cancel("mine")
    await bridge.end_answer(bridge.dispatches[0], cancelled=cancelled)
    await world.ended(answer)
    await world.books_balance()

    (end,) = await ends(world)

    assert (end.worker, end.status) == ("w1", "cancelled" if cancelled else "ok")
    assert end.ttft_ms is not None


async def test_of_an_attempt_that_both_have_ended_the_journal_keeps_the_first_end(world: World) -> None:
    """A worker that was taken for lost after its first frame, and was not, ends its answer, too."""
    bridge = await world.bridge("w1")
    bridge.streams = False
    await knows(await world.router(**FAST_LEASES), "w1")
    answer = await world.client.send(CLOCK.wall())
    await dispatched(bridge)
    await bridge.start_answer(bridge.dispatches[0])
    bridge.go_silent()
    await world.ended(answer)
    await world.routers[0].desk.records.idle()
    # Returns when the stream has answered.
    await bridge.end_answer(bridge.dispatches[0])

    (end,) = await ends(world)

    assert (end.worker, end.attempt, end.error) == ("w1", 1, "worker_lost")


async def test_a_request_that_ended_elsewhere_after_its_worker_was_lost_has_one_end(world: World) -> None:
    first, second = await world.bridge("w1"), await world.bridge("w2")
    first.streams = False
    second.queue_ms = 500.0
    await knows(await world.router(**FAST_LEASES), "w1", "w2")
    answer = await world.client.send(CLOCK.wall())
    await dispatched(first)
    await first.vanish()
    await world.ended(answer)
    await world.books_balance()

    (end,) = await ends(world)

    assert (end.worker, end.attempt, end.status) == ("w2", 2, "ok")
