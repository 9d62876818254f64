"""Ends of requests whose worker was given up without a word of it: it may live, and end them, too."""

import functools
from typing import Any

import anyio
import pytest
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.connection import WrongSequence
from prefixbus.bus.errors import BusUnavailable
from prefixbus.router.attempts import MAX_ASKED, State

from .fakes import FakeBridge
from .test_cancelled_tasks import Await, say_nothing_at_all, scene
from .test_ends import ends
from .test_router import CLOCK, FAST_LEASES, RunningRouter, World, world

__all__ = ["world"]


async def claims(by: FakeBridge, request_id: str = "R1") -> bool:
    """Whether this worker may answer the request."""
    try:
        await by.bus.publish_acked(subjects.claim(request_id), f"{by.worker} 1".encode(), expect_last_seq=0)
    except WrongSequence:
        return False
    return True


async def one_silent_worker(world: World, **settings: Any) -> tuple[FakeBridge, RunningRouter]:
    """It has what it is sent, and nothing is heard of it but heartbeats."""
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    bridge.deaf_to_control = True
    router = await world.router(**{"accept_timeout_ms": 200.0} | settings)
    await eventually(functools.partial(router.knows, "w1"), "the worker is known")
    return bridge, router


async def test_what_the_router_ends_beside_a_worker_that_may_be_running_no_worker_can_begin(world: World) -> None:
    bridge, _ = await one_silent_worker(world)

    answer = await world.client.send(CLOCK.wall(), deadline_s=0.5)
    await world.ended(answer)

    assert answer.code == "deadline_exceeded"
    assert not await claims(bridge)
    await world.books_balance()
    (end,) = await ends(world)
    assert end.error == "deadline_exceeded"


async def test_what_a_worker_has_begun_that_was_given_up_is_left_to_it(world: World) -> None:
    bridge, router = await one_silent_worker(world, accept_timeout_ms=1500.0)
    answer = await world.client.send(CLOCK.wall(), deadline_s=0.5)
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    assert await claims(bridge)
    request = router.desk.in_hand["R1"]
    await eventually(lambda: request.attempts.state is State.ASKING, "the router finds that it has begun")
    heard = len(answer.keepalives)
    await eventually(lambda: len(answer.keepalives) > heard, "its client hears that somebody is there")
    assert answer.ends == []

    await bridge.start_answer(bridge.dispatches[0])
    await bridge.end_answer(bridge.dispatches[0])
    await world.books_balance()

    await world.ended(answer)
    assert answer.code == ""
    (end,) = await ends(world)
    assert (end.worker, end.status) == ("w1", "ok")


async def test_what_a_worker_had_claimed_that_died_is_ended_by_the_router(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router(**FAST_LEASES, max_attempts=1)
    await eventually(functools.partial(router.knows, "w1"), "the worker is known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    assert await claims(bridge)

    await bridge.vanish()
    await world.ended(answer)

    assert answer.code == "worker_lost"
    await world.books_balance()
    (end,) = await ends(world)
    assert (end.worker, end.error) == ("w1", "worker_lost")


async def test_what_a_worker_had_claimed_of_which_nothing_is_heard_is_ended_by_the_router(world: World) -> None:
    bridge, _ = await one_silent_worker(world)
    bridge.deaf_to_control, bridge.mute_to_control = False, True
    answer = await world.client.send(CLOCK.wall(), deadline_s=0.5)
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    assert await claims(bridge)

    await world.ended(answer)

    assert answer.code == "deadline_exceeded"
    assert answer.header(subjects.HEADER_SEQ) is None
    await world.books_balance()
    await eventually(lambda: bridge.aborts.count(("R1", 1)) > MAX_ASKED, "it was asked so often")


async def test_without_an_answer_of_the_claims_stream_the_router_ends_the_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, router = await one_silent_worker(world)
    publish = router.rt.bus.publish_acked

    async def without_claims(subject: str, payload: bytes, **options: Any) -> int:
        if subject == subjects.claim("R1"):
            raise BusUnavailable("The stream is away.")
        return await publish(subject, payload, **options)

    monkeypatch.setattr(router.rt.bus, "publish_acked", without_claims)

    answer = await world.client.send(CLOCK.wall(), deadline_s=0.5)
    await world.ended(answer)

    assert answer.code == "deadline_exceeded"
    await world.books_balance()


async def test_an_end_that_no_worker_can_contradict_is_not_claimed(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: "no_slot"
    router = await world.router()
    await eventually(functools.partial(router.knows, "w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "overloaded"
    assert await claims(bridge)


async def test_a_request_cancelled_while_it_asks_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = Await("while it is offered", say_nothing_at_all, lambda at: bool(at.bridge.dispatches))
    here = await scene(world, offered, monkeypatch)
    assert await claims(here.bridge)
    request = here.router.desk.in_hand["R1"]
    request.post(request.attempts.deadline)
    await eventually(lambda: here.state is State.WITHDRAWING, "it is withdrawn")
    request.post(functools.partial(request.attempts.silent, 1))
    await eventually(lambda: here.state is State.ASKING, "it asks")

    await here.cancel()

    here.assert_nothing_is_left()
    await world.ended(here.answer)
    await here.announcements_are_taken_back()
    (end,) = await ends(world)
    assert (end.status, end.error) == ("error", "deadline_exceeded")


async def test_a_request_cancelled_while_it_claims_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Await("while it is offered", say_nothing_at_all, lambda at: bool(at.bridge.dispatches))
    here = await scene(world, offered, monkeypatch)
    publish = here.router.rt.bus.publish_acked
    asked = anyio.Event()

    async def hang_once(subject: str, payload: bytes, **options: Any) -> int:
        if subject == subjects.claim("R1") and not asked.is_set():
            asked.set()
            await anyio.sleep_forever()
        return await publish(subject, payload, **options)

    monkeypatch.setattr(here.router.rt.bus, "publish_acked", hang_once)
    request = here.router.desk.in_hand["R1"]
    request.post(request.attempts.deadline)
    request.post(functools.partial(request.attempts.silent, 1))
    await asked.wait()

    await here.cancel()

    here.assert_nothing_is_left()
    await world.ended(here.answer)
    assert not await claims(here.bridge)
    (end,) = await ends(world)
    assert (end.status, end.error) == ("error", "deadline_exceeded")
