"""Accepted requests that wait for their turn with the engine: given to it as it gets done, and gone without a trace."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.nats import eventually

from prefixbus.bus.messages import Job
from prefixbus.worker_bridge.service import Bridge

from .bridge_world import BLOCK, Answer, World, prompt, world

PROMPT = 40
REFUSED = "prefixbus_bridge_dispatches_refused_total"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that gets one prompt at a time."""
    async with world(tmp_path, engine={"profile": "h100-8b"}, bridge={"prefill_window_tokens": PROMPT}) as made:
        yield made


async def given_one_of(at: World, bridge: Bridge, count: int) -> list[tuple[Job, Answer]]:
    """That many accepted requests, of which a paused engine has the first."""
    await at.engine.post("/sim/pause")
    found = []
    for seed in range(count):
        job = at.job(prompt(seed, PROMPT))
        found.append((job, await at.listen(job)))
        assert (await at.send(at.dispatch(job))).refused == ""
    assert (bridge.admission.waiting, bridge.admission.held_back) == (count, count - 1)
    await eventually(lambda: engine_has(at, 1), "the engine has one")
    return found


async def engine_has(at: World, count: int) -> bool:
    stats = await at.engine.stats()
    return bool(stats["running"] + stats["waiting"] == count)


async def end_of(answer: Answer) -> None:
    await eventually(lambda: bool(answer.finals), "the end")


async def last_word(at: World, job: Job, word: str) -> None:
    """Returns when that is the last that the router heard of its first attempt."""
    await eventually(lambda: at.accepts[job.request_id, 1][-1].refused == word, f"{job.request_id}: {word}")


async def test_the_engine_is_given_no_more_than_the_window_and_all_are_answered(here: World) -> None:
    async with here.serving() as bridge:
        requests = await given_one_of(here, bridge, 5)
        await eventually(lambda: here.loads[-1].waiting == 5 and here.loads[-1].queue_ms == 4 * 5.0, "all is reported")
        assert await engine_has(here, 1)

        await here.engine.post("/sim/resume")

        for job, answer in requests:
            await end_of(answer)
            assert (await here.outcome(job)).status == "ok"
        ended = [outcome.request_id for outcome in here.outcomes]
        assert ended == [job.request_id for job, _ in requests]
        # What the engine had when they came is in nobody's turn.
        went_before = [(outcome.ahead_own_tokens, outcome.ahead_others_tokens) for outcome in here.outcomes]
        assert went_before == [(0, 0), (0, 0), (PROMPT, 0), (2 * PROMPT, 0), (3 * PROMPT, 0)]
        await here.until_idle(bridge)


async def test_what_waits_and_has_been_computed_by_others_meanwhile_goes_with_them(here: World) -> None:
    """Siblings of one prompt: the first computes it, the others take its blocks together."""
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        jobs = [here.job(prompt(1, PROMPT)) for _ in range(4)]
        for job in jobs:
            await here.listen(job)
            await here.send(here.dispatch(job))
        assert bridge.admission.held_back == 3

        await here.engine.post("/sim/resume")

        outcomes = [await here.outcome(job) for job in jobs]
        assert [outcome.cached_tokens for outcome in outcomes] == [0, 32, 32, 32]
        await here.until_idle(bridge)


@pytest.mark.parametrize("how", ["cancelled", "aborted", "past its deadline", "asked anew", "left by its client"])
async def test_a_request_that_ends_while_it_waits_leaves_nothing(here: World, how: str) -> None:
    async with here.serving() as bridge:
        [(first, _)] = await given_one_of(here, bridge, 1)
        job = here.job(prompt(9, PROMPT), **({"deadline_at": here.clock.wall() + 0.5} if "deadline" in how else {}))
        answer = await here.listen(job)
        assert (await here.send(here.dispatch(job))).refused == ""
        assert bridge.admission.held_back == 1

        match how:
            case "cancelled":
                await here.cancel(job)
                await eventually(lambda: bool(answer.finals), "the end")
                assert (await here.outcome(job)).ahead_own_tokens is None
            case "aborted":
                assert (await here.abort(job)).error == ""
            case "past its deadline":
                await eventually(lambda: bool(answer.finals), "the end")
            case "asked anew":
                assert (await here.send(here.dispatch(job, attempt=2))).refused == ""
                assert bridge.admission.held_back == 1
                assert (await here.abort(job, 2)).error == ""
            case _:
                await answer.subscription.unsubscribe()

        await eventually(lambda: bridge.admission.held_back == 0, "it waits no more")
        assert not answer.chunks
        assert await engine_has(here, 1)
        await here.engine.post("/sim/resume")
        await here.outcome(first)
        await here.until_idle(bridge)


async def test_a_request_whose_turn_does_not_come_in_time_is_given_back(here: World) -> None:
    """One that has its turn is not, however long the engine takes."""
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        first, second = here.job(prompt(1, PROMPT)), here.job(prompt(2, PROMPT))
        answers = [await here.listen(first), await here.listen(second)]
        await here.send(here.dispatch(first, max_wait_ms=200.0))
        await here.send(here.dispatch(second, max_wait_ms=400.0))

        await last_word(here, second, "waited")

        # By the estimates the engine was done long ago.
        assert bridge.admission.queue_ms(here.clock.now()) == 0.0
        assert here.accepts[second.request_id, 1][-1].queue_ms >= 400.0
        assert bridge.admission.held_back == 0
        assert (await here.status(second)).error == "given_back"
        assert (await here.status(first)).error == "running"
        await here.engine.post("/sim/resume")
        await end_of(answers[0])
        assert not answers[1].chunks and not answers[1].finals
        await here.until_idle(bridge)
        assert {outcome.request_id for outcome in here.outcomes} == {first.request_id}


async def test_a_hit_that_is_gone_is_refused_before_any_work(here: World) -> None:
    """What a request in hand is about to leave behind counts; what the engine has evicted, or never had, does not."""
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        alone, first = here.job(prompt(1, PROMPT)), here.job(prompt(2, PROMPT))
        sibling = here.job([*prompt(2, PROMPT), 5, 6, 7])
        for job in (alone, first, sibling):
            await here.listen(job)

        gone = await here.send(here.dispatch(alone, min_held_blocks=1))
        assert (gone.refused, gone.held_blocks) == ("stale_hit", 0)
        assert bridge.admission.waiting == 0 and await engine_has(here, 0)
        await here.send(here.dispatch(first))
        more = await here.send(here.dispatch(sibling, min_held_blocks=6))
        assert (more.refused, more.held_blocks) == ("stale_hit", 5)
        assert (await here.send(here.dispatch(sibling, attempt=2, min_held_blocks=5))).refused == ""

        await here.engine.post("/sim/resume")
        assert (await here.outcome(sibling, attempt=2)).cached_tokens == 5 * BLOCK
        assert here.registry.get_sample_value(REFUSED, {"reason": "stale_hit"}) == 2
        await here.until_idle(bridge)


async def test_slots_kept_for_cold_requests_are_told_and_kept(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"profile": "h100-8b"}, bridge={"slots": 10, "cold_reserve": 0.8}) as here:
        async with here.serving() as bridge:
            assert (here.loads[-1].slots, here.loads[-1].reserved_slots) == (10, 8)
            await here.engine.post("/sim/pause")
            jobs = [here.job(prompt(seed, PROMPT)) for seed in range(4)]
            for job in jobs:
                await here.listen(job)

            warm = [(await here.send(here.dispatch(job, is_warm=True))).refused for job in jobs[:3]]
            cold = (await here.send(here.dispatch(jobs[3]))).refused

            assert (warm, cold) == (["", "", "no_slot"], "")
            await here.engine.post("/sim/resume")
            await here.outcome(jobs[3])
            await here.until_idle(bridge)


async def test_what_waits_is_given_back_with_a_lost_engine(here: World) -> None:
    async with here.serving() as bridge:
        requests = await given_one_of(here, bridge, 3)

        await here.engine.kill()

        for job, answer in requests:
            await last_word(here, job, "worker_lost")
            assert not answer.chunks and not answer.finals
        await eventually(lambda: not bridge.streams.in_work, "nothing is in work")
        assert (bridge.admission.waiting, bridge.admission.held_back, bridge.admission.prompt_tokens) == (0, 0, 0)


async def test_a_draining_bridge_answers_those_who_wait(here: World) -> None:
    async with here.serving() as bridge:
        requests = await given_one_of(here, bridge, 3)

        here.stopping.set()
        await eventually(lambda: here.loads[-1].draining, "a heartbeat that says so")
        await here.engine.post("/sim/resume")

        for _, answer in requests:
            await end_of(answer)
            assert "Pb-Error" not in answer.finals[0]
