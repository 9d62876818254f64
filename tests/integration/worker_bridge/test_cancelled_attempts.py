"""An attempt's task cancelled at each of its awaits: nothing stays behind, and the router can answer for it."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.messages import Job
from prefixbus.worker_bridge import stream
from prefixbus.worker_bridge.service import Bridge
from prefixbus.worker_bridge.stream import Attempt, Streams

from .bridge_world import BLOCK, Answer, World, prompt, world
from .test_bridge_faults import refused_connections, words

PROMPT = 3 * BLOCK


class Scene:
    """A bridge with one request, whose task the test cancels as the task group's owner does."""

    def __init__(self, at: World, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = at
        self.bridge = bridge
        self.patch = monkeypatch
        self.job: Job
        self.answer: Answer
        self.scope = anyio.CancelScope()
        self.deadline_s = 15.0
        self._held = ""

    def hold_back(self, subject: str) -> None:
        """What is put there is not sent, so never acknowledged."""
        acks = self.bridge.streams.acks
        put = acks.put

        def held(to: str, *args: Any, **options: Any) -> None:
            if to.startswith(subject):
                self._held = to
                return
            put(to, *args, **options)

        self.patch.setattr(acks, "put", held)

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    async def begin(self) -> None:
        run = Attempt.run

        async def within_the_scope(attempt: Attempt) -> None:
            if attempt.ticket.request_id != self.job.request_id:
                await run(attempt)
                return
            with self.scope:
                await run(attempt)

        self.patch.setattr(Attempt, "run", within_the_scope)
        deadline_at = self.at.clock.wall() + self.deadline_s
        self.job = self.at.job(prompt(7, PROMPT), params={"max_tokens": 500}, deadline_at=deadline_at)
        self.answer = await self.at.listen(self.job)
        assert (await self.at.send(self.at.dispatch(self.job))).refused == ""


async def hold_its_turn(here: Scene) -> None:
    await here.at.engine.post("/sim/pause")
    other = here.at.job(prompt(1, PROMPT))
    await here.at.listen(other)
    await here.at.send(here.at.dispatch(other))


async def pause_the_engine(here: Scene) -> None:
    await here.at.engine.post("/sim/pause")


async def hold_the_record(here: Scene) -> None:
    """It may reuse what another request has just computed."""
    here.patch.setattr(here.bridge.streams.cold, "is_cold", lambda ns_id, name: False)
    here.hold_back(subjects.audit(stream.SERVICE, "w1"))


async def hold_the_claim(here: Scene) -> None:
    here.hold_back(subjects.claim("*")[:-1])


async def claim_its_end(here: Scene) -> None:
    """Its deadline passes before its first token."""
    await pause_the_engine(here)
    await hold_the_claim(here)
    here.deadline_s = 0.5


async def let_clients_be_away(here: Scene) -> None:
    here.patch.setattr(Streams, "clients_may_be_away", lambda streams: True)
    # Each probe finds nobody, for as long as the test takes.
    here.patch.setattr(stream, "_PROBE_ANSWER_S", 60.0)


async def let_it_stream(here: Scene) -> None:
    pass


async def engine_has_it(here: Scene) -> bool:
    stats = await here.at.engine.stats()
    return bool(stats["running"] + stats["waiting"] == 1)


@dataclass(frozen=True)
class Await:
    """A place where the task waits: how it gets there, how one sees that it is there, and what the router hears."""

    name: str
    arrange: Callable[[Scene], Awaitable[None]]
    is_there: Callable[[Scene], bool | Awaitable[bool]]
    words: list[str] = field(default_factory=lambda: ["", "worker_lost"])


AWAITS = [
    Await("while it waits for its turn", hold_its_turn, lambda here: here.bridge.admission.held_back == 1),
    Await("while its end is claimed", claim_its_end, lambda here: here.is_held),
    Await("while the engine has it", pause_the_engine, engine_has_it),
    Await(
        "while its reuse is recorded", hold_the_record, lambda here: here.is_held and here.bridge.admission.running == 1
    ),
    Await("while the client may be away", let_clients_be_away, lambda here: here.bridge.admission.running == 1),
    Await("while it is claimed", hold_the_claim, lambda here: here.is_held),
    Await(
        "while it streams",
        let_it_stream,
        lambda here: len(here.answer.chunks) > 2,
        ["", "started", "started", "worker_lost"],
    ),
]


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that gets one prompt at a time."""
    async with world(tmp_path, engine={"profile": "h100-8b"}, bridge={"prefill_window_tokens": PROMPT}) as made:
        yield made


@pytest.mark.parametrize("place", AWAITS, ids=lambda place: place.name)
async def test_an_attempt_cancelled_at_any_await_is_left_to_the_router_and_leaves_nothing(
    at: World, monkeypatch: pytest.MonkeyPatch, place: Await
) -> None:
    async with at.serving() as bridge:
        here = Scene(at, bridge, monkeypatch)
        await place.arrange(here)
        await here.begin()
        await eventually(functools.partial(place.is_there, here), "it is there")

        here.scope.cancel()

        await eventually(lambda: words(at, here.job) == place.words, f"the router is told: {words(at, here.job)}")
        await at.engine.post("/sim/resume")
        await eventually(lambda: bridge.streams.in_work == 0, "no attempt is left")
        await at.until_idle(bridge)
        await at.tenant.flush()
        assert here.answer.finals == []
        assert here.job.request_id not in {outcome.request_id for outcome in at.outcomes}
        has_started = "started" in place.words
        assert (await at.status(here.job)).error == ("started" if has_started else "given_back")
        assert bool(here.answer.chunks) == has_started


@dataclass(frozen=True)
class Outage:
    """An await of an attempt that the loss of the bus has ended; `has_started`: its first frame was out."""

    name: str
    has_started: bool
    is_over: bool
    """The bus is back. There is no router yet that hears the attempt's last word, so it goes on saying it."""


OUTAGES = [
    Outage("unbegun, without the bus", has_started=False, is_over=False),
    Outage("begun, without the bus", has_started=True, is_over=False),
    Outage("unbegun, while no router listens", has_started=False, is_over=True),
    Outage("begun, while routers come back", has_started=True, is_over=True),
]


@refused_connections
@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.name)
async def test_an_attempt_cancelled_after_the_bus_was_lost_leaves_nothing_and_is_not_said_to_have_ended(
    at: World, monkeypatch: pytest.MonkeyPatch, outage: Outage
) -> None:
    """Its router asks, when it is back, and is told how far it was."""
    async with at.serving() as bridge:
        here = Scene(at, bridge, monkeypatch)
        if not outage.has_started:
            await pause_the_engine(here)
        await here.begin()
        if outage.has_started:
            await eventually(lambda: len(here.answer.chunks) > 2, "it streams")
        else:
            await eventually(functools.partial(engine_has_it, here), "the engine has it")
        await at.accepting.unsubscribe()
        await at.router.flush()
        at.server.kill()
        await eventually(lambda: bridge.admission.running + bridge.admission.waiting == 0, "it is over")
        assert not bridge.streams.bus.connected
        if outage.is_over:
            at.server.start_again()
            await eventually(lambda: bridge.streams.bus.connected, "the bus is back", 10)
            if not outage.has_started:
                await eventually(lambda: bridge.streams.words_unheard > 0, "nobody hears its last word", 10)
        assert bridge.streams.in_work == 1

        here.scope.cancel()

        await eventually(lambda: bridge.streams.in_work == 0, "no attempt is left")
        if not outage.is_over:
            at.server.start_again()
        await at.engine.post("/sim/resume")
        await eventually(lambda: at.router.connected and at.tenant.connected, "the others are back", 10)
        await at.until_idle(bridge)
        assert (await at.status(here.job)).error == ("started" if outage.has_started else "given_back")
        assert here.answer.finals == []
        assert here.job.request_id not in {outcome.request_id for outcome in at.outcomes}
