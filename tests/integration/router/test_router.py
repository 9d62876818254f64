"""The router on a real bus, between bridges and a directory that speak its messages."""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from nats.aio.msg import Msg
from support.nats import NatsServer, eventually

from prefixbus.bus import config, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import (
    ACCEPT,
    CONTROL_REPLY,
    DECISION,
    DISPATCHED,
    HOLDINGS,
    JOB,
    VERSION,
    Accept,
    ControlReply,
    DecisionRecord,
    Dispatched,
    Holdings,
    Job,
    Level,
)
from prefixbus.bus.runtime import Runtime
from prefixbus.router import dispatching, journal, patience, service
from prefixbus.router.attempts import State
from prefixbus.router.policy import Policy, decide

from .fakes import BLOCK, MODEL, TENANT, Answer, Client, FakeBridge, FakeDirectory

CLOCK = RealClock()
FAST_LEASES: dict[str, Any] = {"suspect_after_s": 0.4, "lost_after_s": 0.8, "accept_timeout_ms": 200.0}


class RunningRouter:
    """The service in the test's own loop; `desk` is what its requests share."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.desk: dispatching.Desk
        self.task: asyncio.Task[None]

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series with these labels, whatever their others."""
        samples = (sample for metric in self.rt.registry.collect() for sample in metric.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def knows(self, *workers: str) -> bool:
        available = self.desk.fleet.survey("m", "digest", CLOCK.now()).available
        return sorted(one.name for one in available) == sorted(workers)


class World:
    """A server with everybody on it that the router talks to."""

    def __init__(self, server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self._monkeypatch = monkeypatch
        self.client: Client
        self.directory: FakeDirectory
        self.routers: list[RunningRouter] = []
        self.records: list[DecisionRecord] = []

    async def watch_the_journal(self) -> None:
        async def hear(message: Msg) -> None:
            self.records.append(DECISION.decode(message.data))

        operator = await self.server.bus("operator")
        await operator.subscribe(subjects.journal("*"), hear)
        await operator.flush()

    async def bridge(self, worker: str, **load: Any) -> FakeBridge:
        return await FakeBridge(await self.server.bus("worker_bridge", worker), worker, **load).start()

    async def router(self, name: str = "router-1", *, policy: str = "prefix-aware", **settings: Any) -> RunningRouter:
        section = msgspec.convert(settings, config.RouterSection)
        model = config.ModelSection(tokenizer="t", model_revision="sha256:w", block_size=BLOCK)
        chosen = config.Config(router=section, policy=config.PolicySection(name=policy), models={MODEL: model})
        rt = Runtime("router", name, self.server.state, chosen, CLOCK)
        rt.bus = await self.server.bus("router", instance=name, echo=False)
        running = RunningRouter(rt)
        made: list[dispatching.Desk] = []

        def desk(*args: Any, **kwargs: Any) -> dispatching.Desk:
            made.append(dispatching.Desk(*args, **kwargs))
            return made[0]

        self._monkeypatch.setattr(service, "Desk", desk)
        ready = asyncio.Event()
        self._monkeypatch.setattr(rt, "ready", lambda: ready.set())

        async def serve() -> None:
            async with anyio.create_task_group() as task_group:
                rt.task_group = task_group
                await service.run(rt)
                task_group.cancel_scope.cancel()

        running.task = asyncio.create_task(serve())
        waiting = asyncio.create_task(ready.wait())
        done, _ = await asyncio.wait({running.task, waiting}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        if running.task in done:
            waiting.cancel()
            await running.task
        assert ready.is_set()
        await rt.bus.flush()
        running.desk = made[0]
        self.routers.append(running)
        return running

    async def close(self) -> None:
        for router in self.routers:
            router.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await router.task

    async def ended(self, answer: Answer) -> None:
        await eventually(lambda: bool(answer.ends), "the answer ends", 10)

    async def books_balance(self) -> None:
        for router in self.routers:
            await eventually(functools.partial(is_idle, router), "nothing is left in hand")


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with NatsServer(tmp_path, workers=["w1", "w2"]) as server:
        await server.provision()
        await server.callout()
        # Tests wait for the workers they need.
        monkeypatch.setattr(service, "LEARN_S", 0.0)
        made = World(server, monkeypatch)
        tenant = await server.tenant_bus(TENANT, server.token(TENANT))
        made.client = await Client(tenant, await server.bus("tokenizer")).start()
        made.directory = await FakeDirectory(await server.bus("directory")).start()
        await made.watch_the_journal()
        yield made
        await made.close()


def is_idle(router: RunningRouter) -> bool:
    return router.desk.idle() == []


async def test_a_request_is_answered_by_the_worker_that_holds_its_prefix(world: World) -> None:
    await world.bridge("w1")
    holder = await world.bridge("w2")
    world.directory.levels = [Level(6, ["w2"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    await eventually(lambda: bool(world.records), "the decision is recorded")
    [record] = world.records
    assert answer.code == ""
    assert [chunk.data for chunk in answer.chunks] == [b'{"choices":[{"text":"hi"}]}']
    assert (record.selected_worker, record.decision) == ("w2", "prefer-warm-worker")
    assert (record.predicted_cached_tokens, holder.dispatches[0].predicted_tokens) == (96, 96)
    assert router.value("prefixbus_router_requests_total", decision="prefer-warm-worker", code="ok") == 1
    await world.books_balance()


async def test_without_a_directory_the_least_loaded_worker_is_chosen_blind(world: World) -> None:
    idle = await world.bridge("w2")
    busy = await world.bridge("w1", queue_ms=10_000.0)
    router = await world.router(lookup_timeout_ms=0.001)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert (len(idle.dispatches), len(busy.dispatches)) == (1, 0)
    assert idle.dispatches[0].decision == "blind"
    await world.books_balance()


async def test_a_directory_that_hangs_costs_only_a_few_requests_their_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PROBE_S", 3600.0)
    await world.bridge("w1")
    world.directory.hangs = True
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")
    for _ in range(patience.MISSES):
        await world.ended(await world.client.send(CLOCK.wall()))

    answers = [await world.client.send(CLOCK.wall()) for _ in range(8)]
    for answer in answers:
        await world.ended(answer)

    assert [answer.code for answer in answers] == [""] * 8
    assert world.directory.asked == patience.MISSES
    assert router.value("prefixbus_router_lookups_skipped_total") == 8


async def test_a_directory_that_was_not_there_is_asked_as_soon_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nobody listens is known at once: it costs nothing to ask again, and patience is not lost over it."""
    monkeypatch.setattr(patience, "PROBE_S", 3600.0)
    await world.bridge("w1")
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")
    await world.directory.go()
    for _ in range(2 * patience.MISSES):
        await world.ended(await world.client.send(CLOCK.wall()))
    assert world.directory.asked == 0
    assert all(record.blind for record in world.records)

    await world.directory.start()
    await world.ended(await world.client.send(CLOCK.wall()))

    assert world.directory.asked == 1
    assert not world.records[-1].blind


async def test_a_hit_that_is_gone_is_forgotten_and_the_request_goes_where_it_now_belongs(world: World) -> None:
    """The directory says that w1 holds it, and w1 says that it does not."""
    emptied, other = await world.bridge("w1", queue_ms=5.0), await world.bridge("w2")
    keys = b"".join(number.to_bytes(8, "little") for number in range(1, 1001))
    world.directory.levels = [Level(1000, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    emptied.answer = lambda dispatch: "stale_hit"

    answer = await world.client.send(CLOCK.wall(), keys=keys)
    await world.ended(answer)

    assert answer.code == ""
    assert emptied.dispatches[0].min_held_blocks > 0
    assert [dispatch.attempt for dispatch in other.dispatches] == [2]
    await eventually(lambda: len(world.records) == 2, "both decisions are recorded")
    first, second = (record.candidate_workers for record in world.records)
    assert {one.worker: one.cached_tokens for one in first} == {"w1": 1000 * BLOCK, "w2": 0}
    assert {one.worker: one.cached_tokens for one in second} == {"w1": 0, "w2": 0}
    assert world.records[0].min_held_blocks == emptied.dispatches[0].min_held_blocks
    assert router.value("prefixbus_router_failovers_total", reason="stale") == 1
    await world.books_balance()


async def test_a_refusal_with_the_true_queue_leads_to_another_worker(world: World) -> None:
    crowded, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    crowded.queue_ms = 60_000.0
    crowded.answer = lambda dispatch: "queue_too_long"

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""
    assert [dispatch.attempt for dispatch in other.dispatches] == [2]
    assert router.value("prefixbus_router_failovers_total", reason="queue") == 1
    await world.books_balance()


async def test_a_warm_request_that_has_waited_for_long_goes_where_it_starts_sooner(world: World) -> None:
    """Its bridge gives it back after the time that its dispatch names, with the true queue; a millisecond is less than
    the hit saves, but others have none."""
    holder, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    holder.queue_ms = 1.0
    holder.answer = lambda dispatch: "waited"

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""
    assert [(one.is_warm, one.max_wait_ms) for one in holder.dispatches] == [(True, Policy().max_warm_wait_ms)]
    assert [(one.attempt, one.is_warm, one.max_wait_ms) for one in other.dispatches] == [(2, False, 0.0)]
    assert router.value("prefixbus_router_failovers_total", reason="waited") == 1
    await eventually(lambda: len(world.records) == 2, "both decisions are recorded")
    assert [(one.decision, one.has_waited) for one in world.records] == [
        ("prefer-warm-worker", False),
        ("spill-max-wait", True),
    ]
    await world.books_balance()


async def test_a_tenant_is_served_by_workers_of_its_pools_alone(world: World) -> None:
    holder, own = await world.bridge("w1", pool="others"), await world.bridge("w2", pool="acme's")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router(pools={TENANT: ["acme's"]})
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert (answer.code, len(holder.dispatches), len(own.dispatches)) == ("", 0, 1)
    await eventually(lambda: bool(world.records), "the decision is recorded")
    assert world.records[0].excluded == {"w1": "pool"}


async def test_a_tenant_without_a_worker_in_its_pools_hears_nothing_of_others(world: World) -> None:
    await world.bridge("w1", pool="others")
    router = await world.router(pools={TENANT: ["acme's"]})
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "no_workers"
    assert "pool" not in (answer.header("Nats-Service-Error") or "")


async def test_what_prefills_took_is_what_the_next_one_is_thought_to_take(world: World) -> None:
    bridge = await world.bridge("w1", worker_class="slow")
    bridge.ttft_ms = 200.0
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    for _ in range(5):
        await world.ended(await world.client.send(CLOCK.wall()))
        await world.books_balance()

    await eventually(lambda: len(world.records) == 5, "the decisions are recorded")
    expected = [one.candidate_workers[0].prefill_ms for one in world.records]
    assert expected == sorted(set(expected))
    assert expected[-1] > 1.5 * expected[0]
    assert router.value("prefixbus_router_prefill_samples_total", verdict="learned") == 5
    assert list(world.records[-1].prefill_models) == ["slow"]


async def test_a_worker_that_nobody_is_behind_costs_little_time(world: World) -> None:
    gone, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router(accept_timeout_ms=60_000.0, suspect_after_s=60.0, lost_after_s=120.0)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    await gone.vanish()

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""
    assert len(other.dispatches) == 1
    assert router.value("prefixbus_router_failovers_total", reason="unreachable") == 1
    await world.books_balance()


@pytest.mark.parametrize("silent", [False, True], ids=["accepts", "is silent"])
async def test_a_second_bridge_without_a_life_does_not_speak_for_the_first(world: World, silent: bool) -> None:
    """Started while the first was paused, it refused what the first one took, and confirmed every withdrawal: each
    request was answered twice."""
    first, other = await world.bridge("w1"), await world.bridge("w2")
    first.streams = False
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router(accept_timeout_ms=100.0 if silent else 60_000.0)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    rival = await world.bridge("w1")
    rival.incarnation = 0
    rival.go_silent()
    rival.answer = lambda dispatch: "wrong_incarnation"
    if silent:
        first.answer = lambda dispatch: None
        first.deaf_to_control = True

    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(first.dispatches and rival.dispatches), "both are asked")
    expected = 3 if silent else 1
    await eventually(
        lambda: router.value("prefixbus_router_foreign_answers_total") >= expected, "the second one's word is counted"
    )
    await first.start_answer(first.dispatches[0])
    await first.end_answer(first.dispatches[0])
    await world.ended(answer)

    assert answer.code == ""
    assert other.dispatches == []
    await world.books_balance()


async def test_a_worker_that_was_away_for_a_moment_is_sent_to_again(world: World) -> None:
    """A 503 of the server is no proof that a worker is gone: it drops who reads too slowly, and lets it in again."""
    holder, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    await holder.be_away()

    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: router.value("prefixbus_router_dispatches_unheard_total") == 1, "nobody heard it")
    await holder.be_back()
    await world.ended(answer)

    assert answer.code == ""
    assert [dispatch.attempt for dispatch in holder.dispatches] == [1]
    assert other.dispatches == []
    await world.books_balance()


async def test_a_silent_worker_is_withdrawn_from_before_another_is_asked(world: World) -> None:
    silent, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router(accept_timeout_ms=100.0)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    silent.answer = lambda dispatch: None

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""
    assert silent.aborts == [("R1", 1)]
    assert [dispatch.attempt for dispatch in other.dispatches] == [2]
    await world.books_balance()


async def test_a_worker_lost_before_its_first_frame_is_replaced(world: World) -> None:
    first, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    first.streams = False
    router = await world.router(**FAST_LEASES)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(first.dispatches), "the first worker has it")
    first.go_silent()
    await world.ended(answer)

    assert answer.code == ""
    assert len(answer.chunks) == 1
    assert other.dispatches[0].attempt == 2
    assert ("R1", 1) in first.aborts
    assert router.value("prefixbus_router_failovers_total", reason="lost") == 1
    await world.books_balance()


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_worker_lost_after_its_first_frame_ends_the_answer_once(world: World, resumable: bool) -> None:
    first, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    first.streams = False
    router = await world.router(**FAST_LEASES)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall(), resumable=resumable)
    await eventually(lambda: bool(first.dispatches), "the first worker has it")
    await first.start_answer(first.dispatches[0])
    await eventually(lambda: bool(answer.chunks), "the first frame is here")
    first.go_silent()
    await world.ended(answer)

    assert answer.code == "worker_lost"
    assert answer.header(subjects.HEADER_SEQ) is None
    assert answer.header(subjects.HEADER_RESUME) == ("resumable" if resumable else "not_resumable")
    assert other.dispatches == []
    await world.books_balance()


async def test_an_end_that_was_not_heard_leaves_no_phantom_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped outcome stayed on the books until the deadline."""
    monkeypatch.setattr(dispatching, "DOUBT_S", 0.1)
    monkeypatch.setattr(dispatching, "OUTCOME_LATE_S", 0.1)
    bridge = await world.bridge("w1")
    bridge.outcomes_get_lost = True
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall(), deadline_s=300.0)
    await world.ended(answer)
    await world.books_balance()
    await router.rt.bus.flush()

    assert answer.code == ""
    assert router.value("prefixbus_router_ends_unheard_total") == 1


async def test_what_waits_for_long_is_announced_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was believed for 10 s beyond the time that was foreseen; siblings that came later computed it elsewhere."""
    monkeypatch.setattr(dispatching, "DOUBT_S", 0.1)
    bridge = await world.bridge("w1")
    bridge.streams = False
    router, other = await world.router("router-1"), await world.router("router-2")
    await eventually(lambda: router.knows("w1") and other.knows("w1"), "the worker is known")
    announced: list[Dispatched] = []

    async def hear(message: Msg) -> None:
        announced.append(DISPATCHED.decode(message.data))

    listener = await world.server.bus("directory", instance="i2")
    await listener.subscribe(subjects.DISPATCHED, hear)
    await listener.flush()

    answer = await world.client.send(CLOCK.wall(), deadline_s=300.0)
    await eventually(lambda: len(announced) >= 5, "it is renewed, again and again")
    first, *renewals = announced[:5]
    await bridge.start_answer(bridge.dispatches[0])
    await eventually(lambda: bool(answer.chunks), "its answer begins")
    await bridge.end_answer(bridge.dispatches[0])
    await world.ended(answer)
    await world.books_balance()

    assert not first.renews
    assert [(one.request_id, one.attempt, one.worker, one.renews) for one in renewals] == 4 * [("R1", 1, "w1", True)]
    assert all(one.keys == first.keys for one in renewals)
    assert first.expires_at < renewals[0].expires_at < renewals[-1].expires_at
    # No other router takes these for requests that have the prefix in common.
    assert other.desk.books.traffic.shared_blocks(first.ns_id, first.keys) == 0


async def test_a_giving_back_that_was_not_heard_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "DOUBT_S", 0.1)
    first, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    first.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(first.dispatches), "the first worker has it")
    first.stages["R1", 1] = "given_back"
    await world.ended(answer)

    assert answer.code == ""
    assert [dispatch.attempt for dispatch in other.dispatches] == [2]
    await world.books_balance()


async def test_a_request_that_its_worker_does_not_know_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "DOUBT_S", 0.1)
    first, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    first.streams = False
    first.forgets = True
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "worker_lost"
    assert other.dispatches == []
    await world.books_balance()


async def test_a_cancel_reaches_a_request_before_and_after_its_dispatch(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    await world.client.cancel("early")
    await eventually(lambda: router.desk.cancels.covers(TENANT, "early", CLOCK.now()), "the cancel is here")
    overtaken = await world.client.send(CLOCK.wall(), label="early")
    await world.ended(overtaken)
    accepted = await world.client.send(CLOCK.wall(), label="late")
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    await world.client.cancel("late")
    await bridge.end_answer(bridge.dispatches[0], cancelled=True)
    await world.ended(accepted)
    await world.books_balance()

    assert (overtaken.code, accepted.code) == ("cancelled", "cancelled")
    assert len(bridge.dispatches) == 1
    assert router.value("prefixbus_router_requests_total", decision="none", code="cancelled") == 1


async def test_a_request_that_is_sent_again_runs_once(world: World) -> None:
    """Clients send again what they hear nothing of for 3 s; the first sending went on beside the second."""
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    first = await world.client.send(CLOCK.wall(), label="mine")
    await eventually(lambda: len(bridge.dispatches) == 1, "it is dispatched")
    again = await world.client.send(CLOCK.wall(), label="mine")
    await world.ended(first)
    late = await world.client.send(CLOCK.wall() - 3.0, label="mine")
    await world.ended(late)
    await eventually(lambda: len(bridge.dispatches) == 2, "the second sending is dispatched")
    await bridge.start_answer(bridge.dispatches[1])
    await bridge.end_answer(bridge.dispatches[1])
    await world.ended(again)

    assert (first.code, again.code, late.code) == ("cancelled", "", "cancelled")
    assert bridge.aborts == [("R1", 1)]
    assert len(bridge.dispatches) == 2
    await world.books_balance()


async def test_a_sending_from_a_stopped_tokenizers_backlog_does_not_end_a_later_one(world: World) -> None:
    """A tokenizer that was stopped dates what it finds there by its own waking: later than what was sent meanwhile."""
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    again = await world.client.send(CLOCK.wall(), label="mine", sending=2)
    await eventually(lambda: len(bridge.dispatches) == 1, "the second sending is dispatched")
    first = await world.client.send(CLOCK.wall() + 5.0, label="mine", sending=1)
    await world.ended(first)
    await bridge.start_answer(bridge.dispatches[0])
    await bridge.end_answer(bridge.dispatches[0])
    await world.ended(again)

    assert (first.code, again.code) == ("cancelled", "")
    assert len(bridge.dispatches) == 1
    await world.books_balance()


async def test_another_request_with_the_same_id_is_another_request(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answers = [await world.client.send(CLOCK.wall(), label="mine", keys=key * 48) for key in (b"k", b"l")]
    await eventually(lambda: len(bridge.dispatches) == 2, "both are dispatched")
    for dispatch in bridge.dispatches:
        await bridge.start_answer(dispatch)
        await bridge.end_answer(dispatch)
    for answer in answers:
        await world.ended(answer)

    assert [answer.code for answer in answers] == ["", ""]
    await world.books_balance()


async def test_without_a_worker_the_client_is_told_at_once(world: World) -> None:
    await world.router()

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "no_workers"
    assert answer.header("Retry-After") == "1"
    await world.books_balance()


async def test_while_all_workers_are_late_a_request_waits_and_its_client_hears_so(world: World) -> None:
    bridge = await world.bridge("w1")
    router = await world.router(suspect_after_s=0.4, lost_after_s=60.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")
    bridge.go_silent()
    await eventually(lambda: router.knows(), "the worker is suspect")

    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(answer.keepalives), "a keep-alive")
    assert answer.ends == []
    bridge.beat()
    await world.ended(answer)

    assert answer.code == ""
    await world.books_balance()


async def test_a_request_that_waits_for_late_workers_is_told_when_all_are_lost(world: World) -> None:
    bridge = await world.bridge("w1")
    router = await world.router(**FAST_LEASES)
    await eventually(lambda: router.knows("w1"), "the worker is known")
    bridge.go_silent()
    await eventually(lambda: router.knows(), "the worker is suspect")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "no_workers"
    await world.books_balance()


async def test_a_full_fleet_is_overload_and_says_when_to_come_again(world: World) -> None:
    await world.bridge("w1", slots=0)
    router = await world.router()
    await eventually(lambda: len(router.desk.fleet) == 1, "the worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "overloaded"
    assert answer.header("Retry-After") == "1"


async def test_while_all_queues_are_long_a_client_is_told_when_to_come_again_and_then_is_served(world: World) -> None:
    """Nothing is dispatched for it before."""
    first, second = await world.bridge("w1"), await world.bridge("w2")
    first.queue_ms, second.queue_ms = 900_000.0, 600_000.0
    router = await world.router(overload_queue_ms=30_000.0)
    await eventually(lambda: router.knows("w1", "w2"), "the workers are known")

    refused = await world.client.send(CLOCK.wall(), deadline_s=3600.0)
    await world.ended(refused)

    assert refused.code == "overloaded"
    assert refused.header(subjects.HEADER_SERVICE_ERROR) == "No worker could begin the request soon enough."
    # From the last report on, the queue is shorter by what has passed.
    assert 560 <= int(refused.header("Retry-After") or "") <= 570
    assert first.dispatches == second.dispatches == []
    assert router.value("prefixbus_router_requests_total", code="overloaded") == 1
    await world.books_balance()

    second.queue_ms = 20_000.0
    fleet = router.desk.fleet
    await eventually(lambda: fleet.living()["w2"].queue_ms(CLOCK.now()) < 30_000.0, "the shorter queue is heard of")
    served = await world.client.send(CLOCK.wall(), deadline_s=3600.0)
    await world.ended(served)

    assert served.code == ""
    assert [len(first.dispatches), len(second.dispatches)] == [0, 1]


async def test_a_request_that_no_worker_could_begin_before_its_deadline_is_overload_at_once(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.queue_ms = 600_000.0
    router = await world.router(overload_queue_ms=3_600_000.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")

    hasty = await world.client.send(CLOCK.wall(), deadline_s=300.0)
    await world.ended(hasty)
    patient = await world.client.send(CLOCK.wall(), deadline_s=1800.0)
    await world.ended(patient)

    assert (hasty.code, patient.code) == ("overloaded", "")
    assert 260 <= int(hasty.header("Retry-After") or "") <= 301
    assert len(bridge.dispatches) == 1


async def test_when_all_slots_are_taken_the_shortest_queue_says_when_to_come_again(world: World) -> None:
    first, second = await world.bridge("w1", slots=0), await world.bridge("w2", slots=0)
    first.queue_ms, second.queue_ms = 900_000.0, 600_000.0
    router = await world.router()
    await eventually(lambda: len(router.desk.fleet) == 2, "the workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "overloaded"
    assert 560 <= int(answer.header("Retry-After") or "") <= 600


async def test_a_request_past_its_deadline_is_never_dispatched(world: World) -> None:
    bridge = await world.bridge("w1")
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall(), deadline_s=-0.5)
    await world.ended(answer)

    assert answer.code == "deadline_exceeded"
    assert bridge.dispatches == []


async def test_a_deadline_that_passes_while_a_worker_is_silent_is_answered(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router(accept_timeout_ms=60_000.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall(), deadline_s=0.3)
    await world.ended(answer)

    assert answer.code == "deadline_exceeded"
    assert bridge.aborts == [("R1", 1)]
    await world.books_balance()


async def test_a_client_hears_that_its_request_lives_while_no_worker_has_accepted(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router(accept_timeout_ms=60_000.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")

    wall = CLOCK.wall()
    answer = await world.client.send(wall, deadline_s=5.0)
    await eventually(lambda: bool(answer.keepalives), "a keep-alive")

    # The same id, object and time as the chunks that the bridge will send.
    assert msgspec.json.decode(answer.keepalives[0].data) == {
        "id": "cmpl-R1",
        "object": "text_completion",
        "created": int(wall),
        "model": "m",
        "choices": [],
    }
    assert answer.ends == []


@pytest.mark.parametrize("has_started", [False, True], ids=["accepted", "streaming"])
async def test_a_client_hears_that_its_request_lives_while_its_worker_is_silent(
    world: World, has_started: bool
) -> None:
    """Its lease lasts as long as clients wait for a frame: without a word, they would give up just before the router
    asks another worker or ends the answer."""
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router(suspect_after_s=0.4, lost_after_s=60.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")
    answer = await world.client.send(CLOCK.wall(), deadline_s=30.0)
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    if has_started:
        await bridge.start_answer(bridge.dispatches[0])

    bridge.go_silent()
    await eventually(lambda: len(answer.keepalives) >= 2, "keep-alives", 10)

    bridge.beat()
    await eventually(lambda: router.knows("w1"), "the worker is back")
    if not has_started:
        await bridge.start_answer(bridge.dispatches[0])
    await bridge.end_answer(bridge.dispatches[0])
    await world.ended(answer)
    assert answer.code == ""
    await world.books_balance()


async def test_after_the_last_attempt_the_client_is_told(world: World) -> None:
    one, two = await world.bridge("w1"), await world.bridge("w2")
    one.answer = two.answer = lambda dispatch: "queue_too_long"
    router = await world.router(max_attempts=3)
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == "overloaded"
    attempts = sorted(dispatch.attempt for dispatch in one.dispatches + two.dispatches)
    assert attempts == [1, 2, 3]
    await world.books_balance()


async def test_policies_change_without_a_restart_and_a_bad_one_changes_nothing(world: World) -> None:
    one, two = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    operator = await world.server.bus("operator")

    async def publish(policy: bytes) -> None:
        await operator.publish_acked(f"{service.POLICY_SUBJECT}.active", policy)

    await publish(b'{"name": "round-robin", "version": "v2"}')
    await eventually(lambda: router.desk.choices.rollout.active.version == "v2", "the policy is in force")
    await publish(b'{"name": "coin-toss"}')
    await eventually(lambda: router.value("prefixbus_router_policies_refused_total") == 1, "the bad one is refused")
    for _ in range(4):
        await world.ended(await world.client.send(CLOCK.wall()))

    assert router.desk.choices.rollout.active.version == "v2"
    assert (len(one.dispatches), len(two.dispatches)) == (2, 2)


async def test_a_canary_decides_and_a_shadow_looks_on_until_they_are_taken_away(world: World) -> None:
    holder, other = await world.bridge("w1"), await world.bridge("w2")
    world.directory.levels = [Level(6, ["w1"])]
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    operator = await world.server.bus("operator")

    async def publish(role: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        await operator.publish_acked(f"{service.POLICY_SUBJECT}.{role}", data, headers=headers)

    await publish("canary", b'{"policy": {"name": "round-robin", "version": "v2"}, "share": 1.0}')
    await publish("shadow", b'{"policy": {"version": "v3"}}')
    await publish("canary", b'{"policy": {}, "share": 7}')
    await eventually(lambda: router.value("prefixbus_router_policies_refused_total") == 1, "the bad one is refused")
    await eventually(lambda: router.desk.choices.rollout.shadow is not None, "the shadow is in force")
    for _ in range(4):
        await world.ended(await world.client.send(CLOCK.wall()))
    await eventually(lambda: len(world.records) == 4, "the decisions are recorded")

    assert (len(holder.dispatches), len(other.dispatches)) == (2, 2)
    assert {(one.rollout, one.policy) for one in world.records} == {("canary", "round-robin/v2")}
    shadows = [one.shadow for one in world.records if one.shadow is not None]
    assert [(one.policy, one.selected_worker) for one in shadows] == [("prefix-aware/v3", "w1")] * 4
    assert router.value("prefixbus_router_shadow_decisions_total", verdict="agrees") == 2
    assert router.value("prefixbus_router_shadow_decisions_total", verdict="differs") == 2

    for role in ("canary", "shadow"):
        await publish(role, b"", {"KV-Operation": "DEL"})
    await eventually(lambda: str(router.desk.choices.rollout) == "prefix-aware/default", "both are gone")
    await world.ended(await world.client.send(CLOCK.wall()))
    await eventually(lambda: len(world.records) == 5, "the decision is recorded")
    assert (world.records[4].rollout, world.records[4].shadow) == ("active", None)


async def test_a_record_of_a_live_decision_decides_the_same_again(world: World) -> None:
    await world.bridge("w1", worker_class="a")
    await world.bridge("w2", worker_class="b", reserved_slots=8)
    world.directory.levels = [Level(6, ["w1"]), Level(3, ["w2"])]
    world.directory.more = {"trust": {"w1": 0.7}, "replica": "directory-1", "stream_seq": 77, "announced": {"w1": 2}}
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")

    for _ in range(3):
        await world.ended(await world.client.send(CLOCK.wall()))

    await eventually(lambda: len(world.records) == 3, "the decisions are recorded")
    for record in world.records:
        shape, candidates, by, at = journal.inputs(record)
        again = journal.decided(decide(shape, candidates, by, at))
        assert {name: getattr(record, name) for name in again} == again
        assert journal.digest(by) == record.policy_digest
    first = {one.worker: one for one in world.records[0].candidate_workers}
    assert (first["w1"].trust, first["w1"].held_blocks, first["w1"].announced_blocks) == (0.7, 6, 2)
    assert (first["w1"].cached_tokens, first["w2"].only_reserved) == (4 * BLOCK, True)
    assert (world.records[0].directory, world.records[0].stream_seq) == ("directory-1", 77)


async def test_routers_share_the_requests_and_know_of_each_others_dispatches(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    routers = [await world.router("router-1"), await world.router("router-2")]
    for router in routers:
        await eventually(functools.partial(router.knows, "w1"), "the worker is known")

    answers = [await world.client.send(CLOCK.wall()) for _ in range(6)]
    await eventually(lambda: len(bridge.dispatches) == 6, "all are dispatched")

    def both_know() -> bool:
        return all(router.desk.fleet.in_flight() == {"w1": 6} for router in routers)

    await eventually(both_know, "both know of all six")
    assert sum(len(router.desk.in_hand) for router in routers) == 6
    for dispatch in bridge.dispatches:
        await bridge.end_answer(dispatch)
    for answer in answers:
        await world.ended(answer)
        assert answer.code == ""
    await world.books_balance()


async def test_a_router_does_not_hear_its_own_announcements(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.bridge("w1")
    router = await world.router("router-1")
    await eventually(lambda: router.knows("w1"), "the worker is known")
    heard: list[str] = []
    monkeypatch.setattr(router.desk, "dispatched", lambda announced: heard.append(announced.router))
    other = await world.server.bus("router", instance="router-2")

    await world.ended(await world.client.send(CLOCK.wall()))
    await router.rt.bus.flush()
    theirs = Dispatched(VERSION, "R9", 1, "router-2", "w1", 1, 1.0, bytes(16), b"", CLOCK.wall() + 9)
    await other.publish(subjects.DISPATCHED, DISPATCHED.encode(theirs))
    await eventually(lambda: bool(heard), "the other's is heard")

    assert heard == ["router-2"]


async def test_a_router_that_stops_ends_what_it_has_in_hand_first(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")

    router.rt.stopping.set()
    await world.server.bus("router", instance="bystander")
    still_running = not router.task.done()
    await bridge.start_answer(bridge.dispatches[0])
    await bridge.end_answer(bridge.dispatches[0])
    await world.ended(answer)
    await asyncio.wait_for(router.task, 10)

    assert still_running
    assert answer.code == ""
    assert router.desk.idle() == []


async def test_cancelling_the_router_leaves_nothing_booked_and_nobody_waiting(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router(accept_timeout_ms=60_000.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")

    router.task.cancel()
    await asyncio.wait({router.task}, timeout=10)
    await world.ended(answer)

    assert answer.code == "unavailable"
    assert router.desk.idle() == []


async def test_what_a_router_announced_and_lets_go_of_is_taken_back(world: World) -> None:
    """Else the other routers and the directory would count on it until it expires, 10 s later."""
    bridge = await world.bridge("w1")
    bridge.answer = lambda dispatch: None
    router = await world.router("router-1", accept_timeout_ms=60_000.0)
    await eventually(lambda: router.knows("w1"), "the worker is known")
    announced: list[Dispatched] = []

    async def hear(message: Msg) -> None:
        announced.append(DISPATCHED.decode(message.data))

    listener = await world.server.bus("directory", instance="i2")
    await listener.subscribe(subjects.DISPATCHED, hear)
    await listener.flush()
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")

    router.task.cancel()
    await asyncio.wait({router.task}, timeout=10)
    await world.ended(answer)

    await eventually(lambda: len(announced) == 2, "it is taken back")
    assert [(one.request_id, one.attempt, one.worker) for one in announced] == [("R1", 1, "w1"), ("R1", 1, "")]


async def test_what_a_worker_accepted_stays_announced_when_its_router_goes(world: World) -> None:
    bridge = await world.bridge("w1")
    bridge.streams = False
    router = await world.router("router-1")
    await eventually(lambda: router.knows("w1"), "the worker is known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(bridge.dispatches), "it is dispatched")
    await eventually(lambda: router.desk.in_hand["R1"].attempts.state is State.ACCEPTED, "it is accepted")
    announced: list[Dispatched] = []

    async def hear(message: Msg) -> None:
        announced.append(DISPATCHED.decode(message.data))

    listener = await world.server.bus("directory", instance="i2")
    await listener.subscribe(subjects.DISPATCHED, hear)
    await listener.flush()
    router.task.cancel()
    await asyncio.wait({router.task}, timeout=10)
    await router.rt.bus.flush()
    await listener.flush()

    assert announced == []
    assert bridge.aborts == []
    assert answer.ends == []


async def test_messages_that_are_not_ours_are_counted_and_the_router_goes_on(world: World) -> None:
    await world.bridge("w1")
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")
    tokenizer = await world.server.bus("tokenizer", instance="i2")

    await tokenizer.publish(subjects.route("m"), b"\x00rubbish")
    await eventually(
        lambda: router.value("prefixbus_failures_total", code="message_invalid") == 1, "the rubbish is counted"
    )
    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""


async def test_a_heartbeat_that_speaks_for_another_worker_is_counted_and_not_believed(world: World) -> None:
    await world.bridge("w1")
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    impostor = await world.bridge("w2", report=10**9, draining=True)
    impostor.speaks_for = "w1"
    await eventually(lambda: router.value("prefixbus_failures_total", code="bad_subject") > 0, "it is counted")

    assert router.knows("w1")


async def test_a_message_that_breaks_its_handler_is_counted_and_the_next_is_served(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.bridge("w1")
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(router.desk, "cancelled", broken)
        await world.client.cancel("mine")
        await eventually(lambda: router.value("prefixbus_failures_total", code="internal") == 1, "it is counted")
    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""


@pytest.mark.parametrize(
    "absurd",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"kv_usage": math.nan},
        {"kv_usage": math.inf},
        {"kv_usage": -1.0},
        {"queue_ms": math.nan},
        {"queue_ms": math.inf},
        {"queue_ms": -1e9},
        {"slots": 1 << 63},
        {"running": -(1 << 62)},
        {"kv_tokens": -1},
    ],
    ids=str,
)
async def test_a_heartbeat_with_absurd_figures_is_refused_and_harms_no_other_worker(
    world: World, absurd: dict[str, Any]
) -> None:
    router = await world.router()
    await world.watch_the_journal()
    await world.bridge("w1", **absurd)
    await eventually(lambda: router.value("prefixbus_failures_total", code="message_invalid") > 0, "it is refused")
    await world.bridge("w2")
    await eventually(lambda: router.knows("w2"), "the other worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    assert answer.code == ""
    await eventually(lambda: bool(world.records), "the decision is recorded")
    assert [one.worker for one in world.records[0].candidate_workers] == ["w2"]


async def test_a_worker_that_tells_another_block_size_than_its_models_is_no_candidate(world: World) -> None:
    router = await world.router()
    await world.watch_the_journal()
    await world.bridge("w1", block_size=7)
    await eventually(lambda: router.knows("w1"), "it is known")
    await world.bridge("w2")
    await eventually(lambda: router.knows("w1", "w2"), "the other worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    await eventually(lambda: bool(world.records), "the decision is recorded")
    assert world.records[0].excluded == {"w1": "model"}
    assert world.records[0].block_size == BLOCK


NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "no message": b"\xc1garbage",
    "cut short": HOLDINGS.encode(Holdings(VERSION, [Level(6, ["w1"])]))[:-3],
    "deeper than the prompt": HOLDINGS.encode(Holdings(VERSION, [Level(7, ["w1"])])),
    "below nothing": HOLDINGS.encode(Holdings(VERSION, [Level(-6, ["w1"])])),
    "trust like no number": HOLDINGS.encode(Holdings(VERSION, [Level(6, ["w1"])], trust={"w1": math.nan})),
    "a name without end": HOLDINGS.encode(Holdings(VERSION, [Level(6, ["w1"] * 100_000)])),
    "another shard's": HOLDINGS.encode(Holdings(VERSION, [], refused="not of shard 0 of 3")),
}


@pytest.mark.parametrize("case", NONSENSE)
async def test_a_directory_that_says_what_cannot_be_is_asked_again_and_not_believed(world: World, case: str) -> None:
    idle, busy = await world.bridge("w2"), await world.bridge("w1")
    busy.queue_ms = 100.0
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both are known")

    world.directory.raw = NONSENSE[case]
    for _ in range(4):
        answer = await world.client.send(CLOCK.wall())
        await world.ended(answer)
        assert answer.code == ""
    assert len(idle.dispatches) == 4
    world.directory.raw, world.directory.levels = None, [Level(6, ["w1"])]
    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    await eventually(lambda: len(world.records) == 5, "all decisions are recorded")
    assert [record.decision for record in world.records[:4]] == ["blind"] * 4
    assert not any(record.predicted_cached_tokens for record in world.records[:4])
    assert world.records[4].held_blocks == 6
    assert router.value("prefixbus_router_lookup_failures_total") == 4
    assert router.value("prefixbus_failures_total", code="message_invalid") == 4
    await world.books_balance()


async def test_workers_that_nobody_knows_are_no_candidates_whatever_a_directory_says_of_them(world: World) -> None:
    await world.bridge("w1")
    world.directory.levels = [Level(6, [f"ghost-{number}" for number in range(1000)]), Level(2, ["w1", "w9", ""])]
    router = await world.router()
    await eventually(lambda: router.knows("w1"), "the worker is known")

    answer = await world.client.send(CLOCK.wall())
    await world.ended(answer)

    await eventually(lambda: bool(world.records), "the decision is recorded")
    assert [one.worker for one in world.records[0].candidate_workers] == ["w1"]
    assert world.records[0].held_blocks == 2
    await world.books_balance()


FORGED = {
    "it was refused": ("d", "draining", {}),
    "it was given back": ("d", "given_back", {}),
    "it has begun": ("d", "started", {}),
    "nobody listens": ("d", "", {"Status": "503"}),
    "it was withdrawn": ("a", "", {}),
    "its worker knows nothing of it": ("s", "", {}),
    "its client is gone": ("c", "", {"Status": "503"}),
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_bridge_that_refused_cannot_speak_of_what_another_one_has(world: World, case: str) -> None:
    """It knows the request, and where it was itself expected to answer."""
    kind, word, headers = FORGED[case]
    liar, honest = await world.bridge("w1"), await world.bridge("w2")
    liar.answer = lambda dispatch: "draining"
    honest.queue_ms, honest.streams = 1000.0, False
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both are known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(honest.dispatches), "the second has it")
    dispatch = honest.dispatches[0]
    request = router.desk.in_hand[dispatch.request_id]
    await eventually(lambda: request.attempts.state is State.ACCEPTED, "and has said so")

    own = liar.replies[dispatch.request_id, 1].split(".")
    own[-3] = kind
    mark = own[-1].removeprefix("1")
    addresses = [".".join([*own[:-1], name]) for name in ("2", f"2{mark}", f"2{mark[:-1]}", own[-1])]
    if kind == "d" and word:
        forged = ACCEPT.encode(Accept(VERSION, dispatch.request_id, 2, "w2", honest.incarnation, word, 0.0, 0))
    else:
        forged = CONTROL_REPLY.encode(ControlReply(VERSION, "w2", honest.incarnation, word))
    for address in addresses:
        await liar.bus.publish(address, forged, headers=headers)
    await liar.bus.flush()
    await router.rt.bus.flush()

    assert dispatch.attempt == 2
    assert router.value("prefixbus_router_foreign_answers_total") >= 3
    assert (request.attempts.state, request.attempts.attempt) == (State.ACCEPTED, 2)
    assert honest.aborts == []
    await honest.start_answer(dispatch)
    await honest.end_answer(dispatch)
    await world.ended(answer)
    assert answer.code == ""
    await world.books_balance()


async def test_a_bridge_that_refused_cannot_keep_records_of_what_another_one_has_out_of_the_journal(
    world: World,
) -> None:
    """A stream keeps one message of an id, whoever was first to use it."""
    liar, honest = await world.bridge("w1"), await world.bridge("w2")
    liar.answer = lambda dispatch: None
    honest.queue_ms = 1000.0
    router = await world.router(accept_timeout_ms=500.0)
    await eventually(lambda: router.knows("w1", "w2"), "both are known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(liar.dispatches), "the first has it")

    request_id = liar.dispatches[0].request_id
    own = liar.replies[request_id, 1]
    later = own.removesuffix("1") + "2"
    for msg_id in (f"outcome-{request_id}-2", f"{request_id}.2", f"outcome-{later}", f"decision-{request_id}-2"):
        await liar.bus.publish_acked(subjects.outcome("w1", "none"), b"{}", msg_id=msg_id)
    await world.ended(answer)

    assert honest.dispatches[0].attempt == 2
    operator = await world.server.bus("operator")
    for subject, least in ((subjects.journal(request_id), 2), (subjects.outcome("w2", request_id), 1)):
        await eventually(functools.partial(are_stored, operator, subject, least), f"{least} of {subject}")


async def are_stored(operator: Bus, subject: str, count: int) -> bool:
    info = await operator.jetstream.stream_info(subjects.STREAM_JOURNAL, subjects_filter=subject)
    return bool((info.state.subjects or {}).get(subject, 0) >= count)


@pytest.mark.parametrize("attempt", [2, 3, 1 << 40])
async def test_a_bridge_that_refused_cannot_end_what_another_one_has(world: World, attempt: int) -> None:
    liar, honest = await world.bridge("w1"), await world.bridge("w2")
    liar.answer = lambda dispatch: "draining"
    honest.queue_ms, honest.streams = 1000.0, False
    router = await world.router()
    await eventually(lambda: router.knows("w1", "w2"), "both are known")
    answer = await world.client.send(CLOCK.wall())
    await eventually(lambda: bool(honest.dispatches), "the second has it")

    dispatch = honest.dispatches[0]
    await liar.end_answer(
        msgspec.structs.replace(dispatch, attempt=attempt, job=JOB.encode(replying_nowhere(dispatch.job)))
    )
    await eventually(lambda: router.value("prefixbus_router_foreign_answers_total") == 1, "it is counted")

    assert dispatch.attempt == 2
    assert list(router.desk.in_hand) == [dispatch.request_id]
    assert router.desk.fleet.in_flight() == {"w1": 0, "w2": 1}
    await honest.start_answer(dispatch)
    await honest.end_answer(dispatch)
    await world.ended(answer)
    await world.books_balance()


def replying_nowhere(job: bytes) -> Job:
    return msgspec.structs.replace(JOB.decode(job), reply="_INBOX.nobody.1")
