"""A request's task cancelled at each of its awaits: nothing stays behind, and its client is not left waiting."""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import pytest
from nats.aio.msg import Msg
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.messages import DISPATCHED, Dispatched, Route
from prefixbus.router import dispatching
from prefixbus.router.attempts import State

from .fakes import Answer, FakeBridge
from .test_ends import ends
from .test_router import CLOCK, RunningRouter, World, world

__all__ = ["world"]


class Scene:
    """One worker, one router, one request, whose task the test cancels as the runtime does, and what was announced."""

    def __init__(self, world: World, bridge: FakeBridge, router: RunningRouter, answer: Answer) -> None:
        self.world = world
        self.bridge = bridge
        self.router = router
        self.answer = answer
        self.announced: list[Dispatched] = []
        self.scope = anyio.CancelScope()

    @property
    def state(self) -> State:
        return self.router.desk.in_hand["R1"].attempts.state

    async def cancel(self) -> None:
        self.scope.cancel()
        await eventually(lambda: not self.router.desk.in_hand, "the task is over")
        await self.router.rt.bus.flush()
        await self.bridge.bus.flush()

    def assert_nothing_is_left(self) -> None:
        desk = self.router.desk
        assert desk.idle() == []
        assert desk.by_label == {}
        assert not any(desk.waiting.values())

    async def announcements_are_taken_back(self) -> None:
        def none_stands() -> bool:
            last = {(one.request_id, one.attempt): one.worker for one in self.announced}
            return not any(last.values())

        await eventually(none_stands, "what was announced is taken back")


@dataclass(frozen=True)
class Await:
    """A place where the task waits: how the world is made for it to get there, and how one sees that it is there.

    `aborts`: a bridge may have the attempt, and has to hear that nobody wants it."""

    name: str
    arrange: Callable[[World, FakeBridge, pytest.MonkeyPatch], Awaitable[None]]
    is_there: Callable[[Scene], bool]
    aborts: bool = False
    accept_timeout_ms: float = 60_000.0


async def hang_the_directory(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    world.directory.hangs = True


async def go_silent(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.go_silent()


async def be_crowded(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.answer = lambda dispatch: "queue_too_long"
    monkeypatch.setattr(dispatching, "pause_s", lambda request_id, attempt: 60.0)


async def be_away(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    await bridge.be_away()
    monkeypatch.setattr(dispatching, "SEND_AGAIN_S", 60.0)


async def say_nothing(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.answer = lambda dispatch: None


async def say_nothing_at_all(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.answer = lambda dispatch: None
    # Aborts are heard and counted, and not answered.
    bridge.mute_to_control = True


async def accept(world: World, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.streams = False


AWAITS = [
    Await("while the directory is asked", hang_the_directory, lambda at: at.world.directory.asked == 1),
    Await("while it waits for late workers", go_silent, lambda at: any(at.router.desk.waiting.values())),
    Await("while it pauses", be_crowded, lambda at: at.router.desk.in_hand["R1"].attempts.failovers == ["queue"]),
    Await(
        "before it is sent again", be_away, lambda at: at.router.value("prefixbus_router_dispatches_unheard_total") == 1
    ),
    Await("while it is offered", say_nothing, lambda at: bool(at.bridge.dispatches), aborts=True),
    Await(
        "while it is withdrawn",
        say_nothing_at_all,
        lambda at: at.state is State.WITHDRAWING and bool(at.bridge.aborts),
        aborts=True,
        accept_timeout_ms=300.0,
    ),
]


async def scene(world: World, at: Await, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The request is at that await."""
    bridge = await world.bridge("w1")
    router = await world.router(
        accept_timeout_ms=at.accept_timeout_ms, lookup_timeout_ms=60_000.0, suspect_after_s=0.5, lost_after_s=60.0
    )
    await eventually(functools.partial(router.knows, "w1"), "the worker is known")
    await at.arrange(world, bridge, monkeypatch)
    if at.arrange is go_silent:
        await eventually(lambda: not router.knows("w1"), "the worker is late")
    made = Scene(world, bridge, router, Answer())
    serve = router.desk.serve

    async def within_the_scope(route: Route) -> None:
        with made.scope:
            await serve(route)

    monkeypatch.setattr(router.desk, "serve", within_the_scope)

    async def hear(message: Msg) -> None:
        made.announced.append(DISPATCHED.decode(message.data))

    listener = await world.server.bus("directory", instance="i2")
    await listener.subscribe(subjects.DISPATCHED, hear)
    await listener.flush()
    made.answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: "R1" in router.desk.in_hand and at.is_there(made), "it is there")
    return made


@pytest.mark.parametrize("at", AWAITS, ids=lambda at: at.name)
async def test_a_request_cancelled_before_a_worker_took_it_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, at: Await
) -> None:
    here = await scene(world, at, monkeypatch)
    heard = len(here.bridge.aborts)

    await here.cancel()

    here.assert_nothing_is_left()
    assert len(here.router.desk.books.recent) == 0
    await world.ended(here.answer)
    assert here.answer.code == "unavailable"
    await here.announcements_are_taken_back()
    if at.aborts:
        await eventually(lambda: len(here.bridge.aborts) > heard, "the bridge hears that nobody wants it")
        assert set(here.bridge.aborts) == {("R1", 1)}
    else:
        assert here.bridge.aborts == []
    (end,) = await ends(world)
    assert (end.status, end.error) == ("error", "unavailable")


@pytest.mark.parametrize("started", [False, True], ids=["accepted", "streaming"])
async def test_a_request_cancelled_after_a_worker_took_it_is_ended_by_that_worker(
    world: World, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """Its booking and announcement stand until the outcome comes: the worker does have that work."""
    accepted = Await("while it is accepted", accept, lambda at: at.state is State.ACCEPTED)
    here = await scene(world, accepted, monkeypatch)
    (dispatch,) = here.bridge.dispatches
    if started:
        await here.bridge.start_answer(dispatch)
        await eventually(lambda: here.state is State.STREAMING, "it is streaming")

    await here.cancel()

    assert here.router.desk.fleet.in_flight() == {"w1": 1}
    assert (here.bridge.aborts, here.answer.ends) == ([], [])
    if not started:
        await here.bridge.start_answer(dispatch)
    await here.bridge.end_answer(dispatch)
    await world.ended(here.answer)
    assert here.answer.code == ""
    await world.books_balance()
    here.assert_nothing_is_left()
    (end,) = await ends(world)
    assert (end.worker, end.status) == ("w1", "ok")


async def test_a_request_cancelled_while_it_ends_still_ends_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cleaning up waits for the journal, and a second cancel does not cut it short."""
    offered = next(at for at in AWAITS if at.name == "while it is offered")
    here = await scene(world, offered, monkeypatch)
    reached = anyio.Event()
    go_on = anyio.Event()
    publish = here.router.rt.bus.publish_acked

    async def held(*args: object, **kwargs: object) -> int:
        reached.set()
        await go_on.wait()
        return await publish(*args, **kwargs)  # type: ignore[arg-type] # as it is called

    monkeypatch.setattr(here.router.rt.bus, "publish_acked", held)
    here.scope.cancel()
    await reached.wait()

    here.router.task.cancel()
    scope = here.router.rt.task_group.cancel_scope
    await eventually(lambda: scope.cancel_called, "the second cancel is there")
    go_on.set()
    await eventually(here.router.task.done, "the router is gone")

    here.assert_nothing_is_left()
    await world.ended(here.answer)
    assert here.answer.code == "unavailable"
    operator = await world.server.bus("operator", instance="last")
    last = await operator.jetstream.get_last_msg(subjects.STREAM_JOURNAL, subjects.ended("R1"))
    assert b'"unavailable"' in (last.data or b"")
