"""What a bridge claims, and what it leaves unclaimed: nobody else may answer a request that is claimed."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.errors import BusUnavailable, Cancelled, WorkerLost
from prefixbus.bus.messages import Job
from prefixbus.worker_bridge.acks import Settled
from prefixbus.worker_bridge.engine import Generation, Progress, VllmHttp
from prefixbus.worker_bridge.service import Bridge
from prefixbus.worker_bridge.stream import Told

from .bridge_world import MODEL, World, prompt, world
from .test_bridge_faults import JumpingClock, last_word, words


async def claimed(here: World) -> set[str]:
    """The ids of requests."""
    jetstream = (await here.server.bus("deploy")).jetstream
    info = await jetstream.stream_info(subjects.STREAM_CLAIMS, subjects_filter=subjects.claim("*"))
    return {subject.rpartition(".")[2] for subject in info.state.subjects or {}}


async def test_an_answer_and_an_end_without_frames_are_claimed(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        answered, cancelled = here.job(prompt(1, 20)), here.job(prompt(2, 20))
        await here.ask(answered)
        await here.engine.post("/sim/pause")
        answer = await here.listen(cancelled)
        await here.send(here.dispatch(cancelled))
        await here.cancel(cancelled)
        await eventually(lambda: bool(answer.finals), "it is cancelled")

        assert await claimed(here) == {answered.request_id, cancelled.request_id}
        await here.engine.post("/sim/resume")
        await here.until_idle(bridge)


async def test_what_is_left_to_other_workers_is_not_claimed(tmp_path: Path) -> None:
    """Stopped by its router, or given back with its engine, before there was anything to tell the client."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        aborted, given_back = here.job(prompt(1, 20)), here.job(prompt(2, 20))
        answers = [await here.listen(job) for job in (aborted, given_back)]
        await here.engine.post("/sim/pause")
        for job in (aborted, given_back):
            await here.send(here.dispatch(job))

        await here.abort(aborted)
        await here.engine.kill()

        await eventually(lambda: len(words(here, given_back)) > 1, "given back")
        await eventually(lambda: bridge.streams.in_work == 0, "both are over")
        assert await claimed(here) == set()
        await here.tenant.flush()
        assert not any(answer.chunks or answer.finals for answer in answers)


async def test_of_an_answer_that_another_attempt_gives_no_router_hears_that_it_starts(tmp_path: Path) -> None:
    """It would ask nobody else, and take us for the one who answers."""
    async with world(tmp_path) as here, here.serving() as bridge:
        job = here.job(prompt(1, 20))
        await bridge.streams.bus.publish_acked(subjects.claim(job.request_id), b"w2 1")

        await here.send(here.dispatch(job, attempt=2))

        await eventually(lambda: last_word(here, job, 2) == "already_streaming", "the router hears of it")
        assert words(here, job, 2) == ["", "already_streaming"]


async def test_without_claims_a_later_attempts_refusal_by_its_engine_is_given_back(tmp_path: Path) -> None:
    """An earlier attempt may have begun to answer; the first one has nobody before it."""
    async with world(tmp_path, without_stream=subjects.STREAM_CLAIMS) as here, here.serving() as bridge:
        first, later = (here.job(prompt(seed, 20), params={"max_tokens": 0}) for seed in (1, 2))
        ended, silent = await here.listen(first), await here.listen(later)

        await here.send(here.dispatch(first))
        await here.send(here.dispatch(later, attempt=2))

        await eventually(lambda: len(words(here, later, 2)) > 1, "given back")
        await eventually(lambda: bool(ended.finals), "the first one is answered")
        await here.until_idle(bridge)
        await here.tenant.flush()
        assert not silent.chunks and not silent.finals
        assert {outcome.request_id for outcome in here.outcomes} == {first.request_id}


class Stopped(VllmHttp):
    """An engine before whose first token its bridge was stopped for long."""

    def __init__(self, url: str, clock: JumpingClock) -> None:
        super().__init__(url, MODEL)
        self.is_stopping = False
        self._clock = clock

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        async with super().generate(request) as progress:
            yield self._late(progress) if self.is_stopping else progress

    async def _late(self, progress: AsyncIterator[Progress]) -> AsyncIterator[Progress]:
        async for step in progress:
            if self.is_stopping and step.pieces:
                self.is_stopping = False
                self._clock.jump(10.0)
            yield step


async def test_under_a_lapsed_lease_nothing_is_claimed(tmp_path: Path) -> None:
    """Its router has asked another worker by now, which could not answer."""
    async with world(tmp_path) as here:
        here.clock = clock = JumpingClock(here.clock)
        engine = Stopped(here.engine.url, clock)
        async with here.serving(engine=engine):
            engine.is_stopping = True
            job = here.job(prompt(1, 20))
            answer = await here.listen(job)

            await here.send(here.dispatch(job))

            await eventually(lambda: last_word(here, job) == "worker_lost", "left to the router")
            await here.tenant.flush()
            assert await claimed(here) == set()
            assert not answer.chunks and not answer.finals


def is_aborted(bridge: Bridge, job: Job) -> None:
    ticket = bridge.admission.stop_attempt(job.request_id, 1, 0.0)
    assert ticket is not None
    assert not bridge.streams.stop(ticket, Cancelled(), Told.NOBODY), "the router is told that nothing was published"


def is_lost(bridge: Bridge, job: Job) -> None:
    """And the lease is renewed before its task runs on: as after a pause of the process."""
    bridge.streams.give_up_all(WorkerLost())


def is_cancelled(bridge: Bridge, job: Job) -> None:
    for ticket in bridge.admission.cancel("acme", job.client_request_id, 0.0):
        bridge.streams.stop(ticket, Cancelled())


@pytest.mark.parametrize(
    ("happens", "heard", "is_ended"),
    [(is_aborted, [""], False), (is_lost, ["", "worker_lost"], False), (is_cancelled, [""], True)],
    ids=["it is aborted", "its lease is lost", "it is cancelled"],
)
async def test_an_attempt_that_is_stopped_in_the_moment_in_which_its_claim_is_stored_publishes_no_frame(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Bridge, Job], None],
    heard: list[str],
    is_ended: bool,
) -> None:
    """Its task is to run on already, and can be cancelled only where it waits next."""
    async with world(tmp_path) as here, here.serving() as bridge:
        job = here.job(prompt(1, 20))
        put = bridge.streams.acks.put

        def stopped_with_it(to: str, name: str, payload: bytes, now: float, settled: Settled, **options: str) -> None:
            def settle(failure: BusUnavailable | None) -> None:
                settled(failure)
                if to == subjects.claim(job.request_id):
                    happens(bridge, job)

            put(to, name, payload, now, settle, **options)

        monkeypatch.setattr(bridge.streams.acks, "put", stopped_with_it)
        answer = await here.listen(job)

        await here.send(here.dispatch(job))

        await eventually(lambda: bridge.streams.in_work == 0, "it is over")
        await here.until_idle(bridge)
        await here.router.flush()
        await here.tenant.flush()
        assert words(here, job) == heard
        assert not answer.chunks
        assert [final["Pb-Error"] for final in answer.finals] == (["cancelled"] if is_ended else [])
