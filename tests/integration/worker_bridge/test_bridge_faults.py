"""The same bridge when its engine, its bus or its name fails it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg
from support.nats import eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.clock import Clock
from prefixbus.bus.errors import BusUnavailable, WorkerRefused
from prefixbus.bus.messages import KvEvents
from prefixbus.worker_bridge import life
from prefixbus.worker_bridge.engine import Generation, Progress, VllmHttp

from .bridge_world import BLOCK, MODEL, WORKER, Answer, World, prompt, world


async def begun(at: World, seed: int = 1) -> tuple[messages.Job, Answer]:
    job = at.job(prompt(seed, 3 * BLOCK), params={"max_tokens": 1500})
    answer = await at.listen(job)
    assert (await at.send(at.dispatch(job))).refused == ""
    await eventually(lambda: len(answer.chunks) > 2, "the answer has begun")
    return job, answer


def words(at: World, job: messages.Job, attempt: int = 1) -> list[str]:
    """What the router heard of an attempt."""
    return [accept.refused for accept in at.accepts[job.request_id, attempt]]


def last_word(at: World, job: messages.Job, attempt: int = 1) -> str:
    return words(at, job, attempt)[-1]


async def hears_no_work(at: World) -> bool:
    """Whether the server itself tells a router that no bridge listens there: then it asks another worker at once."""
    try:
        await at.router.request(subjects.work(WORKER), timeout_s=0.5)
    except BusUnavailable as exc:
        return "nobody listens" in str(exc)
    raise AssertionError("bytes that are no dispatch were answered")


async def fill_up(at: World, stream: str) -> None:
    """The stream has room for what it holds, and no more."""
    jetstream = (await at.server.bus("deploy")).jetstream
    info = await jetstream.stream_info(stream)
    info.config.max_bytes = max(1, info.state.bytes)
    await jetstream.update_stream(info.config)


# -- the engine


async def test_a_killed_engine_voids_its_incarnation_and_the_next_one_serves(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        before = here.loads[-1].incarnation
        streaming, answer = await begun(here)
        await here.engine.post("/sim/pause")
        waiting = here.job(prompt(2, 20))
        silent = await here.listen(waiting)
        await here.send(here.dispatch(waiting))

        await here.engine.kill()

        # What had begun is ended with its error; what had not is given back, and says nothing to the client.
        await eventually(lambda: bool(answer.finals), "the end of what had begun")
        assert answer.finals[0]["Pb-Error"] == "worker_lost"
        assert (await here.outcome(streaming)).error == "worker_lost"
        await eventually(lambda: last_word(here, waiting) == "worker_lost", "the other is given back")
        assert not silent.chunks and not silent.finals
        await eventually(lambda: not bridge.life.incarnation, "the incarnation is over")
        await eventually(lambda: hears_no_work(here), "it hears no dispatch any more")

        await here.engine.start()
        load = await here.until_serving(bridge, after=before)
        assert bridge.index.held_keys == 0 and bridge.index.complete
        job = here.job(prompt(1, 3 * BLOCK))
        await here.ask(job, incarnation=load.incarnation)
        assert (await here.outcome(job)).cached_tokens == 0
        await here.until_idle(bridge)
        # One story per life, each from 1 on.
        for incarnation in (before, load.incarnation):
            told = [e.seq for e in here.kv if isinstance(e, KvEvents) and e.incarnation == incarnation]
            assert told == list(range(1, len(told) + 1))


async def test_an_engine_may_come_after_its_bridge(tmp_path: Path) -> None:
    async with world(tmp_path, start=False) as here, here.bridge() as bridge:
        await eventually(lambda: "cannot be reached" in bridge.life.why_not, "the reason why it does not serve")
        assert not here.loads
        assert await hears_no_work(here)

        await here.engine.start()

        await here.until_serving(bridge)
        await here.ask(here.job(prompt(1, 20)))


async def test_an_engine_that_binds_its_socket_is_connected_to(tmp_path: Path) -> None:
    async with world(tmp_path, ipc=True) as here, here.serving() as bridge:
        await here.ask(here.job(prompt(1, 3 * BLOCK)))

        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")


async def test_a_paused_engine_silences_its_worker_and_comes_back(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        incarnation = here.loads[-1].incarnation
        here.engine.pause()
        job = here.job(prompt(1, 20))
        await here.listen(job)
        await here.send(here.dispatch(job))
        await eventually(lambda: bridge.life.stalled, "the engine is found stalled")
        # The lease runs out while it is silent, so others may answer: the request is not kept.
        await eventually(lambda: last_word(here, job) == "worker_lost", "the request is given back")
        heard = len(here.loads)

        here.engine.go_on()

        await eventually(lambda: len(here.loads) > heard, "heartbeats again")
        assert here.loads[-1].incarnation == incarnation
        await here.ask(here.job(prompt(2, 20)))
        await here.until_idle(bridge)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"served_model_name": "another/model"}, "another/model"),
        ({"enable_prompt_tokens_details": None}, "--enable-prompt-tokens-details"),
        ({"ignore_salt": ""}, "reuses blocks across salts"),
        ({"leaky_tier": "8"}, "reuses blocks across salts"),
        ({"leaky_tier": "256"}, "in a tier beyond its own memory"),
        ({"block_size": "4"}, "4 tokens"),
        ({"block_size": "16"}, "16 tokens"),
        ({"served_model_name": "another/model", "block_size": "16"}, "16 tokens"),
    ],
    ids=[
        *("another model", "no cached tokens", "salts do not isolate", "a tier without salts"),
        *("a tier that keeps long prompts alone", "smaller blocks", "larger blocks", "two misfits at once"),
    ],
)
async def test_an_engine_that_does_not_match_is_not_registered(
    tmp_path: Path, engine: dict[str, str | None], reason: str
) -> None:
    async with world(tmp_path, engine=engine) as here, here.bridge() as bridge:
        await eventually(lambda: reason in bridge.life.why_not, f"the reason; {bridge!r}", 10)

        assert not here.loads


async def test_an_address_that_another_engine_has_taken_is_not_used(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        await here.engine.kill()
        await here.engine.start(served_model_name="another/model")

        await eventually(lambda: "another/model" in bridge.life.why_not, "the reason", 10)

        assert await hears_no_work(here)


async def test_evictions_are_told_and_counted(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"num_gpu_blocks": "40"}) as here, here.serving() as bridge:
        foreign_at_first = bridge.index.foreign
        for seed in range(12):
            await here.ask(here.job(prompt(seed, 5 * BLOCK)))

        stats = await here.engine.stats()
        held = bridge.index

        assert stats["totals"]["evictions"] > 0
        await eventually(
            lambda: held.held_keys + held.foreign == stats["keys_cached"], f"what the engine has; {held!r}, {stats}"
        )
        assert held.complete
        evicted = stats["totals"]["evictions"] - (foreign_at_first - held.foreign)
        assert here.metric("prefixbus_bridge_evicted_block_age_seconds_count") == evicted
        assert here.metric("prefixbus_bridge_evicted_block_age_seconds_sum") > 0
        assert here.metric("prefixbus_bridge_kv_occupancy_ratio") == stats["keys_cached"] / 40
        await here.until_idle(bridge)


class Liar(VllmHttp):
    """An engine that comes to say it reused a block more than it has."""

    lies = False

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        async with super().generate(request) as progress:
            yield self._lied(progress)

    async def _lied(self, progress: AsyncIterator[Progress]) -> AsyncIterator[Progress]:
        async for step in progress:
            if self.lies and step.usage is not None:
                step.usage = msgspec.structs.replace(step.usage, cached_tokens=BLOCK + (step.usage.cached_tokens or 0))
            yield step


async def test_a_hit_beyond_what_is_held_is_counted_as_wrong(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        liar = Liar(here.engine.url, MODEL)
        async with here.serving(engine=liar):
            honest, lied = here.job(prompt(1, 3 * BLOCK)), here.job(prompt(2, BLOCK - 1))
            await here.ask(honest)
            liar.lies = True
            await here.ask(lied)

            def wrong() -> float | None:
                return here.registry.get_sample_value("prefixbus_wrong_hits_total")

            await eventually(lambda: wrong() == 1, "a wrong hit")


async def test_an_engine_that_begins_to_leak_is_found_out_recorded_and_serves_no_more(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        tokens = prompt(1, 3 * BLOCK + 1)
        await here.engine.post("/sim/leak")
        await here.ask(here.job(tokens))
        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
        thief = here.job(tokens, scope="team-b")

        await here.ask(thief)

        assert (await here.outcome(thief)).cached_tokens == 3 * BLOCK
        assert (await here.engine.stats())["wrong_hits"] == 3
        await eventually(lambda: here.metric("prefixbus_wrong_hits_total") == 1, "a wrong hit")
        await eventually(lambda: "reuses blocks across salts" in bridge.life.why_not, f"no more work; {bridge!r}")
        assert await hears_no_work(here)
        await bridge.streams.outbox.idle()
        facts = await here.stored(subjects.STREAM_AUDIT, subjects.audit("worker_bridge", WORKER))
        (found,) = [fact for fact in facts if fact["kind"] == "wrong_hit"]
        expected = {"tenant": "acme", "scope": "team-b", "worker": WORKER, "tokens": 3 * BLOCK}
        assert found.items() >= {"request_id": thief.request_id, **expected}.items()


async def test_a_wrong_hit_that_no_probe_confirms_costs_the_worker_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        liar = Liar(here.engine.url, MODEL)
        async with here.serving(engine=liar) as bridge:
            incarnation = bridge.life.incarnation
            liar.lies = True
            await here.ask(here.job(prompt(2, BLOCK - 1)))
            liar.lies = False
            asked = (await here.engine.stats())["totals"]["prompt_tokens"]

            await eventually(lambda: here.metric("prefixbus_wrong_hits_total") == 1, "a wrong hit")

            async def probed() -> bool:
                return bool((await here.engine.stats())["totals"]["prompt_tokens"] >= asked + 3 * (BLOCK + 1))

            await eventually(probed, "the engine is asked again")
            await here.ask(here.job(prompt(3, 20)))
            assert bridge.life.incarnation == incarnation


class Broken(VllmHttp):
    """An engine whose client fails as nobody foresaw."""

    async def reset_prefix_cache(self) -> None:
        raise RuntimeError("a defect")


async def test_a_reset_that_fails_unforeseen_is_an_error_and_ends_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving(engine=Broken(here.engine.url, MODEL)):
        reply = await here.control("reset")

        assert reply.error
        assert here.registry.get_sample_value("prefixbus_failures_total", {"code": "internal"}) == 1
        await here.ask(here.job(prompt(1, 20)))


# -- the name


async def test_a_second_bridge_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving():
        with pytest.raises(ExceptionGroup) as caught:
            async with here.bridge():
                await asyncio.Event().wait()

        assert caught.group_contains(WorkerRefused)
        await here.ask(here.job(prompt(1, 20)))


async def a_rival(at: World) -> int:
    """Another bridge that lives under the same name; its incarnation."""
    rival = await at.server.bus("worker_bridge", WORKER)
    incarnation = await rival.publish_acked(f"$KV.{subjects.BUCKET_WORKERS}.{WORKER}", b"{}")
    reply = messages.CONTROL_REPLY.encode(messages.ControlReply(messages.VERSION, WORKER, incarnation))

    async def answer(message: Msg) -> None:
        await rival.publish(message.reply, reply)

    await rival.subscribe(subjects.control(WORKER, "ping"), answer)
    await rival.flush()
    return incarnation


async def test_a_bridge_whose_name_was_taken_steps_down(tmp_path: Path) -> None:
    """As one that was paused while another started in its place."""
    async with world(tmp_path) as here:
        with pytest.raises(ExceptionGroup) as caught:
            async with here.serving() as bridge:
                await a_rival(here)
                await eventually(lambda: not bridge.life.incarnation, "it steps down")
                await asyncio.Event().wait()

        assert caught.group_contains(WorkerRefused, match="since .*Give this one another name")


async def test_a_bridge_that_waits_for_its_engine_steps_down_for_one_that_lives(tmp_path: Path) -> None:
    async with world(tmp_path, start=False) as here:
        with pytest.raises(ExceptionGroup) as caught:
            async with here.bridge() as bridge:
                await eventually(lambda: "cannot be reached" in bridge.life.why_not, "it waits for its engine")
                incarnation = await a_rival(here)
                async with asyncio.timeout(10):
                    await asyncio.Event().wait()

        assert caught.group_contains(WorkerRefused, match=rf"incarnation {incarnation}\b.*Give this one another name")


async def test_a_bridge_whose_engine_comes_late_takes_no_name_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was paused while it waited: its first look at the others is the one before it registers."""
    monkeypatch.setattr(life, "_RIVAL_EVERY_S", 3600.0)
    async with world(tmp_path, start=False) as here:
        with pytest.raises(ExceptionGroup) as caught:
            async with here.bridge() as bridge:
                await eventually(lambda: "cannot be reached" in bridge.life.why_not, "it waits for its engine")
                incarnation = await a_rival(here)
                await here.engine.start()
                async with asyncio.timeout(10):
                    await asyncio.Event().wait()

        assert caught.group_contains(WorkerRefused)
        assert not here.loads
        stream = await here.operator.jetstream.stream_info(f"KV_{subjects.BUCKET_WORKERS}")
        assert stream.state.last_seq == incarnation, "nobody registered after it"


# -- the bus

# A tenant that is back before the callout is, is turned away; nats-py leaves the refused connection to the collector.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")


@refused_connections
async def test_a_killed_bus_leaves_all_in_hand_to_the_router(tmp_path: Path) -> None:
    """Nobody knows what arrived of what had begun, and what had not may be at another worker by now."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        streaming, answer = await begun(here)
        await here.engine.post("/sim/pause")
        waiting = here.job(prompt(2, 20))
        silent = await here.listen(waiting)
        await here.send(here.dispatch(waiting))
        heard = len(answer.messages)

        here.server.kill()
        await eventually(lambda: not bridge.streams.bus.connected, "the bridge notices")
        here.server.start_again()
        await here.engine.post("/sim/resume")

        await eventually(lambda: last_word(here, waiting) == "worker_lost", "what had not begun is given back", 10)
        await eventually(lambda: last_word(here, streaming) == "worker_lost", "what had begun, too", 10)
        assert words(here, streaming)[-2:] == ["started", "worker_lost"]
        assert words(here, waiting) == ["", "worker_lost"]
        await eventually(lambda: here.tenant.connected, "the client is connected again", 10)
        assert (await here.abort(streaming)).error == "started"
        assert (await here.abort(waiting)).error == ""
        await here.ask(here.job(prompt(3, 20)))
        await here.until_idle(bridge)
        assert len(answer.messages) == heard and not silent.messages
        assert not {streaming.request_id, waiting.request_id} & {outcome.request_id for outcome in here.outcomes}


@refused_connections
async def test_a_router_that_comes_back_later_than_the_bridge_hears_of_it(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        await here.engine.post("/sim/pause")
        waiting = here.job(prompt(2, 20))
        await here.listen(waiting)
        await here.send(here.dispatch(waiting))
        await here.accepting.unsubscribe()

        here.server.kill()
        await eventually(lambda: not bridge.streams.bus.connected, "the bridge notices")
        here.server.start_again()
        await eventually(lambda: bridge.streams.words_unheard > 0, "it is told that nobody listens", 10)
        await here.hear_accepts()

        await eventually(lambda: last_word(here, waiting) == "worker_lost", "given back", 10)
        await here.engine.post("/sim/resume")


@refused_connections
async def test_block_changes_during_an_outage_leave_a_gap_that_a_dump_mends(tmp_path: Path) -> None:
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        await here.ask(here.job(prompt(1, 3 * BLOCK)))
        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
        before = here.loads[-1].event_seq

        here.server.kill()
        await eventually(lambda: not bridge.streams.bus.connected, "the bridge notices")
        await here.compute(bridge, here.job(prompt(2, 2 * BLOCK)))
        await eventually(lambda: bridge.index.held_keys == 5, "the engine is heard without the bus")
        here.server.start_again()
        await eventually(lambda: here.router.connected and here.operator.connected, "connected again", 10)
        await eventually(lambda: here.loads[-1].event_seq > before, "a heartbeat names what was not sent", 10)

        load = here.loads[-1]
        request = messages.DumpRequest(messages.VERSION, load.incarnation, "tail")
        await eventually(lambda: bridge.streams.bus.connected, "the bridge is connected again", 10)
        assert (await here.control("dump", messages.DUMP_REQUEST.encode(request))).error == ""
        await eventually(lambda: any(isinstance(each, messages.KvDump) for each in here.kv), "a dump", 10)
        dump = next(each for each in here.kv if isinstance(each, messages.KvDump))
        assert dump.seq >= load.event_seq > before
        assert sum(len(run.keys) for run in dump.runs) == 5 * 8


async def test_a_record_that_cannot_be_written_gives_the_request_back(tmp_path: Path) -> None:
    """Nothing of an answer is published before the fact of its reuse is acknowledged; where nothing can have been
    reused the fact may come later, and does."""
    async with world(tmp_path, without_stream=subjects.STREAM_AUDIT) as here, here.serving() as bridge:
        cold = here.job(prompt(1, 3 * BLOCK))
        await here.ask(cold)
        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
        job = here.job(prompt(1, 3 * BLOCK))
        answer = await here.listen(job)

        await here.send(here.dispatch(job))

        await eventually(lambda: last_word(here, job) == "unavailable", "given back")
        assert not answer.chunks and not answer.finals
        await here.until_idle(bridge)
        await here.server.provision()
        await eventually(lambda: "<Outbox 0 pending>" in repr(bridge.streams.outbox), "all are delivered", 10)
        facts = await here.stored(subjects.STREAM_AUDIT, subjects.audit("worker_bridge", WORKER))
        assert sorted(fact["request_id"] for fact in facts) == sorted([cold.request_id, job.request_id])


async def test_a_request_that_another_attempt_answers_is_not_answered_twice(tmp_path: Path) -> None:
    """Its router took the worker of the first attempt for lost, and it was not."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        begun, cancelled = here.job(prompt(1, 20)), here.job(prompt(2, 20))
        refused = here.job(prompt(3, 20), params={"max_tokens": 0})
        answers = {job.request_id: await here.listen(job) for job in (begun, cancelled, refused)}
        for job in (begun, cancelled, refused):
            await bridge.streams.bus.publish_acked(subjects.claim(job.request_id), b"w2 1")

        await here.send(here.dispatch(begun, attempt=2))
        await eventually(lambda: last_word(here, begun, 2) == "already_streaming", "the router hears of it")
        await here.engine.post("/sim/pause")
        for job in (cancelled, refused):
            await here.send(here.dispatch(job, attempt=2))
        await here.cancel(cancelled)
        await eventually(lambda: last_word(here, cancelled, 2) == "already_streaming", "so of an end without frames")
        await here.engine.post("/sim/resume")
        await eventually(lambda: last_word(here, refused, 2) == "already_streaming", "and of an engine's refusal")

        assert (await here.abort(begun, 2)).error == "started"
        assert (await here.send(here.dispatch(begun, attempt=2))).refused == "already_streaming"
        await here.tenant.flush()
        assert not any(answer.chunks or answer.finals for answer in answers.values())
        assert here.metric("prefixbus_bridge_attempts_superseded_total") == 3
        await here.until_idle(bridge)
        assert not here.outcomes


async def test_without_claims_first_attempts_answer_and_later_ones_are_given_back(tmp_path: Path) -> None:
    """Nobody was asked before a first attempt; before a later one somebody was, who may have begun without a claim."""
    async with world(tmp_path, without_stream=subjects.STREAM_CLAIMS) as here, here.serving() as bridge:
        first, later = here.job(prompt(1, 20)), here.job(prompt(2, 20))
        answer = await here.listen(later)

        await here.ask(first)
        await here.send(here.dispatch(later, attempt=2))

        await eventually(lambda: last_word(here, later, 2) == "unavailable", "given back")
        assert not answer.chunks and not answer.finals
        assert here.metric("prefixbus_bridge_answers_unclaimed_total") == 1
        await here.until_idle(bridge)


async def test_a_full_stream_of_claims_ends_as_none_would_and_keeps_claims_apart(tmp_path: Path) -> None:
    """The server has one code for a stream that is full and for a claim that is there already."""
    async with world(tmp_path) as here, here.serving() as bridge:
        claimed, first, later = (here.job(prompt(seed, 20)) for seed in (1, 2, 3))
        await bridge.streams.bus.publish_acked(subjects.claim(claimed.request_id), b"w2 1")
        await fill_up(here, subjects.STREAM_CLAIMS)
        answer = await here.listen(later)

        await here.ask(first)
        await here.send(here.dispatch(later, attempt=2))
        await here.send(here.dispatch(claimed, attempt=2))

        await eventually(lambda: last_word(here, later, 2) == "unavailable", "given back")
        assert not answer.chunks and not answer.finals
        await eventually(lambda: last_word(here, claimed, 2) == "already_streaming", "the claim still counts")
        assert here.metric("prefixbus_bridge_answers_unclaimed_total") == 1
        await here.until_idle(bridge)


async def test_what_was_claimed_may_be_forgotten_so_old_requests_are_begun_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        old = int(here.clock.wall() - subjects.CLAIMS_KEPT_S)
        first, later = here.job(prompt(1, 20), created_at=old), here.job(prompt(2, 20), created_at=old)
        answer = await here.listen(later)

        await here.ask(first)
        await here.send(here.dispatch(later, attempt=2))

        await eventually(lambda: last_word(here, later, 2) == "unavailable", "given back")
        assert not answer.chunks and not answer.finals
        await here.until_idle(bridge)


async def test_a_lapsed_lease_leaves_all_in_hand_to_the_router(tmp_path: Path) -> None:
    """As after a pause of the bridge: it learns by its own clock that it was silent for too long. The router has ended
    what had begun, and given the rest to others: a word more would be one too many."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here:
        clock = JumpingClock(here.clock)
        here.clock = clock
        async with here.serving() as bridge:
            streaming, answer = await begun(here)
            await here.engine.post("/sim/pause")
            waiting = here.job(prompt(2, 20))
            silent = await here.listen(waiting)
            await here.send(here.dispatch(waiting))
            await here.tenant.flush()

            clock.jump(10.0)
            await eventually(lambda: last_word(here, waiting) == "worker_lost", "given back")
            await eventually(lambda: last_word(here, streaming) == "worker_lost", "left to the router")
            await here.tenant.flush()
            heard = len(answer.messages)

            assert words(here, streaming) == ["", "started", "started", "worker_lost"]
            assert (await here.abort(streaming)).error == "started"
            await here.engine.post("/sim/resume")
            await here.ask(here.job(prompt(3, 20)))
            await here.until_idle(bridge)
            assert len(answer.messages) == heard and not answer.finals
            assert not silent.chunks and not silent.finals
            assert not {streaming.request_id, waiting.request_id} & {outcome.request_id for outcome in here.outcomes}


async def test_an_answer_whose_lease_lapsed_before_its_last_frame_is_not_ended(tmp_path: Path) -> None:
    """The bridge was stopped between the engine's last token and the end."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here:
        clock = JumpingClock(here.clock)
        here.clock = clock
        engine = Tiring(here.engine.url, MODEL, clock)
        async with here.serving(engine=engine):
            engine.tires = True
            job = here.job(prompt(1, 20))
            answer = await here.listen(job)

            await here.send(here.dispatch(job))

            await eventually(lambda: last_word(here, job) == "worker_lost", "left to the router")
            await here.tenant.flush()
            assert not answer.finals and not here.outcomes


class Tiring(VllmHttp):
    """An engine after whose last word a long time has passed."""

    def __init__(self, url: str, model: str, clock: "JumpingClock") -> None:
        super().__init__(url, model)
        self.tires = False
        self._clock = clock

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        async with super().generate(request) as progress:
            yield progress
            if self.tires:
                self._clock.jump(10.0)


class JumpingClock:
    """The machine's clock, ahead by what tests say: a process that was stopped finds it so."""

    def __init__(self, real: Clock) -> None:
        self._real = real
        self._ahead_s = 0.0

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds

    def now(self) -> float:
        return self._real.now() + self._ahead_s

    def wall(self) -> float:
        return self._real.wall()
