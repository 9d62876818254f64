"""Requests through a bridge: on a real bus, by a simulated engine that speaks vLLM's protocols."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.nats import eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.messages import VERSION, DumpRequest, KvDump, KvEvents, Stored

from .bridge_world import BLOCK, MODEL, WORKER, Answer, World, prompt, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[World]:
    """An engine with an H100's speed: a long answer can be met on its way."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as made:
        yield made


async def test_an_answer_is_a_numbered_stream_with_usage_and_an_end(here: World) -> None:
    async with here.serving():
        job = here.job(prompt(1, 20))

        answer = await here.ask(job)

    chunks = answer.chunks
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{job.request_id}"}
    assert {chunk["model"] for chunk in chunks} == {MODEL}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.text
    (final,) = answer.finals
    assert final == {
        "Pb-Request-Id": job.client_request_id,
        "Pb-Final": "1",
        "Pb-Seq": str(len(chunks)),
        "Pb-Attempt": "1",
    }
    assert [accept.refused for accept in here.accepts[job.request_id, 1]] == ["", "started"]


async def test_the_clients_trace_is_in_the_outcome(here: World) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with here.serving():
        traced, untraced = here.job(prompt(1, 20), traceparent=trace), here.job(prompt(2, 20))

        await here.ask(traced)
        await here.ask(untraced)

        assert (await here.outcome(traced)).traceparent == trace
        assert (await here.outcome(untraced)).traceparent == ""


async def test_a_repeat_hits_what_was_held_and_the_record_says_so(here: World) -> None:
    async with here.serving() as bridge:
        tokens = prompt(1, 5 * BLOCK)
        await here.ask(first := here.job(tokens, kind="completions"))
        await eventually(lambda: bridge.index.held_keys == 5, "five blocks in the index")

        accept_of = here.accepts
        repeat = here.job(tokens, kind="completions")
        await here.ask(repeat, predicted_tokens=4 * BLOCK)

        one, two = await here.outcome(first), await here.outcome(repeat)
        assert (one.status, one.cached_tokens, one.prefill_tokens) == ("ok", 0, 40)
        assert (two.status, two.cached_tokens, two.prefill_tokens) == ("ok", 32, 8)
        assert two.predicted_tokens == two.cached_tokens
        # At least one token is always computed: of five held blocks four can be reused.
        assert accept_of[repeat.request_id, 1][0].held_blocks == 4
        await here.until_idle(bridge)
        facts = await here.stored(subjects.STREAM_AUDIT, subjects.audit("worker_bridge", WORKER))
        assert [(fact["kind"], fact["request_id"], fact.get("tokens", 0)) for fact in facts] == [
            ("reuse", first.request_id, 0),
            ("reuse", repeat.request_id, 32),
        ]
        outcomes = await here.stored(subjects.STREAM_JOURNAL, subjects.outcome(WORKER, "*"))
        assert [outcome["request_id"] for outcome in outcomes] == [first.request_id, repeat.request_id]


async def test_scopes_and_client_salts_do_not_share_blocks(here: World) -> None:
    async with here.serving() as bridge:
        tokens = prompt(1, 3 * BLOCK + 1)
        await here.ask(here.job(tokens))
        await eventually(lambda: bridge.index.held_keys >= 3, "blocks in the index")
        other_scope = here.job(tokens, scope="legal")
        own_salt = here.job(tokens, namespace=here.identity.namespace("acme", "", "mine"))

        for job in (other_scope, own_salt):
            await here.ask(job)
            assert (await here.outcome(job)).cached_tokens == 0
            assert here.accepts[job.request_id, 1][0].held_blocks == 0
        await here.until_idle(bridge)


async def test_block_changes_are_told_in_order_from_one(here: World) -> None:
    async with here.serving() as bridge:
        await here.ask(here.job(prompt(1, 3 * BLOCK)))
        await here.ask(here.job(prompt(2, 2 * BLOCK)))
        await eventually(lambda: bridge.index.held_keys == 5, "five blocks in the index")
        incarnation = here.loads[-1].incarnation

        def told() -> list[bytes]:
            events = [event for event in here.kv if isinstance(event, KvEvents) and event.incarnation == incarnation]
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            return [op.keys for event in events for op in event.ops if isinstance(op, Stored)]

        await eventually(lambda: sum(map(len, told())) == 5 * 8, "all blocks told of")
        await eventually(lambda: here.loads[-1].event_seq == here.kv[-1].seq, "a heartbeat that names the last event")


async def test_a_dump_says_all_that_is_held_as_of_its_seq(here: World) -> None:
    async with here.serving() as bridge:
        await here.ask(here.job(prompt(1, 3 * BLOCK)))
        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")
        incarnation = here.loads[-1].incarnation

        other = await here.control("dump", messages.DUMP_REQUEST.encode(DumpRequest(VERSION, incarnation + 1, "gap")))
        reply = await here.control("dump", messages.DUMP_REQUEST.encode(DumpRequest(VERSION, incarnation, "gap")))

        assert other.error and not reply.error
        await eventually(lambda: any(isinstance(each, KvDump) for each in here.kv), "a dump in the stream")
        (dump,) = [each for each in here.kv if isinstance(each, KvDump)]
        events = [each for each in here.kv if isinstance(each, KvEvents)]
        assert (dump.part, dump.parts, dump.dump_id, dump.seq) == (0, 1, 1, events[-1].seq)
        (run,) = dump.runs
        assert len(run.keys) == 3 * 8 and run.parent == 0


async def test_a_restarted_bridge_knows_what_its_engine_holds(here: World) -> None:
    async with here.serving():
        await here.ask(here.job(prompt(1, 3 * BLOCK)))
    before = here.loads[-1].incarnation

    async with here.bridge() as again:
        load = await here.until_serving(again, after=before)
        assert again.index.held_keys == 3 and again.index.complete
        job = here.job(prompt(1, 3 * BLOCK))
        await here.ask(job, incarnation=load.incarnation)
        assert (await here.outcome(job)).cached_tokens == 2 * BLOCK

        def retold() -> int:
            events = [e for e in here.kv if isinstance(e, KvEvents) and e.incarnation == load.incarnation]
            return sum(len(op.keys) // 8 for event in events for op in event.ops if isinstance(op, Stored))

        await eventually(lambda: retold() == 3, "what is held is told again in the new incarnation")


async def test_a_reset_is_announced_though_the_engine_is_idle(here: World) -> None:
    async with here.serving() as bridge:
        await here.ask(here.job(prompt(1, 3 * BLOCK)))
        await eventually(lambda: bridge.index.held_keys == 3, "three blocks in the index")

        reply = await here.control("reset")

        assert reply.error == ""
        assert bridge.index.held_keys == 0
        job = here.job(prompt(1, 3 * BLOCK))
        await here.ask(job)
        assert (await here.outcome(job)).cached_tokens == 0
        await eventually(lambda: bridge.index.held_keys == 3, "the blocks are there again")


async def test_a_reset_that_the_engine_does_not_do_is_an_error(slow: World) -> None:
    async with slow.serving() as bridge:
        job = slow.job(prompt(1, 3 * BLOCK), params={"max_tokens": 1000})
        answer = await slow.listen(job)
        await slow.send(slow.dispatch(job))
        await eventually(lambda: bool(answer.chunks), "the answer has begun")

        reply = await slow.control("reset")

        assert "running" in reply.error
        await slow.cancel(job)
        await slow.until_idle(bridge)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": 99}, "wrong_incarnation"),
        ({"accept_by_at": 1.0}, "too_late"),
        ({"max_queue_ms": -1.0}, "queue_too_long"),
        ({"ns_id": bytes(16)}, "stale_namespace"),
    ],
)
async def test_a_dispatch_that_does_not_fit_is_refused_at_once(
    here: World, change: dict[str, Any], reason: str
) -> None:
    async with here.serving() as bridge:
        job = here.job(prompt(1, 20))

        accept = await here.send(here.dispatch(job, **change))

        assert accept.refused == reason
        await here.until_idle(bridge)


async def test_a_forged_reply_is_refused_and_recorded(here: World) -> None:
    async with here.serving() as bridge:
        job = here.job(prompt(1, 20), reply="_INBOX.victim.c1.x")

        accept = await here.send(here.dispatch(job))

        assert accept.refused == "forged_reply"
        await eventually(lambda: not bridge.admission.waiting, "nothing was started")
        facts = await _facts(here, 1)
        assert [(fact["kind"], fact["tenant"]) for fact in facts] == [("forged_reply", "acme")]


async def test_bytes_that_are_no_dispatch_change_nothing(here: World) -> None:
    async with here.serving() as bridge:
        job = here.job(prompt(1, 20))
        whole = messages.DISPATCH.encode(here.dispatch(job))
        for raw in (b"", b"\xc1", whole[:-5], whole + b"x", b"[1]" * 1000):
            await here.router.publish(subjects.work(WORKER), raw, reply=f"{here.router.inbox_prefix}.d.x.1")
        for verb in ("dump", "abort", "reset", "ping"):
            await here.router.publish(subjects.control(WORKER, "abort"), b"\xff" * 9)
            await here.operator.publish(subjects.control(WORKER, verb), b"\xff" * 9)

        answer = await here.ask(job)

        assert answer.text
        await here.until_idle(bridge)


async def test_a_repeated_dispatch_is_answered_twice_and_run_once(here: World) -> None:
    async with here.serving() as bridge:
        job = here.job(prompt(1, 20))
        answer = await here.listen(job)
        dispatch = here.dispatch(job)
        probes = (await here.engine.stats())["totals"]["finished"].get("length", 0)

        first, second = await asyncio.gather(here.send(dispatch), here.send(dispatch))

        assert (first.refused, second.refused) == ("", "")
        await here.outcome(job)
        await here.until_idle(bridge)
        assert len(answer.finals) == 1 and answer.chunks
        assert (await here.engine.stats())["totals"]["finished"].get("length", 0) == probes + 1


async def test_an_engines_refusal_ends_the_answer_with_its_sentence(here: World) -> None:
    async with here.serving() as bridge:
        job = here.job(prompt(1, 20), params={"max_tokens": 0})

        answer = await here.ask(job)

        (final,) = answer.finals
        assert final["Pb-Error"] == "bad_request"
        assert "max_tokens" in final["Nats-Service-Error"]
        assert (await here.outcome(job)).error == "bad_request"
        await here.until_idle(bridge)


# -- requests that are stopped


async def begun(at: World, **changes: Any) -> tuple[messages.Job, Answer]:
    """A long answer whose first chunks have arrived."""
    job = at.job(prompt(1, 3 * BLOCK), params={"max_tokens": 1500}, **changes)
    answer = await at.listen(job)
    accept = await at.send(at.dispatch(job))
    assert accept.refused == ""
    await eventually(lambda: len(answer.chunks) > 2, "the answer has begun")
    return job, answer


async def test_a_cancel_ends_the_answer_and_the_engines_work(slow: World) -> None:
    async with slow.serving() as bridge:
        job, answer = await begun(slow)

        await slow.cancel(job)

        await eventually(lambda: bool(answer.finals), "the end")
        (final,) = answer.finals
        assert (final["Pb-Error"], final["Pb-Seq"]) == ("cancelled", str(len(answer.chunks)))
        outcome = await slow.outcome(job)
        assert (outcome.status, outcome.error) == ("cancelled", "cancelled")
        await slow.until_idle(bridge)


async def test_a_cancel_that_comes_first_refuses_its_request(slow: World) -> None:
    async with slow.serving() as bridge:
        job = slow.job(prompt(1, 20))
        await slow.cancel(job)

        accept = await slow.send(slow.dispatch(job))

        assert accept.refused == "cancelled"
        await slow.until_idle(bridge)


async def test_a_client_that_stops_listening_costs_nothing_more(slow: World) -> None:
    async with slow.serving() as bridge:
        job, answer = await begun(slow)

        await answer.subscription.unsubscribe()

        outcome = await slow.outcome(job)
        assert outcome.status == "cancelled"
        await slow.until_idle(bridge)


@pytest.mark.parametrize("paused", [True, False], ids=["in prefill", "from the start"])
async def test_a_client_that_is_gone_before_the_first_frame_is_noticed(slow: World, paused: bool) -> None:
    async with slow.serving() as bridge:
        job = slow.job(prompt(1, 3 * BLOCK), params={"max_tokens": 1500})
        if paused:
            await slow.engine.post("/sim/pause")

        await slow.send(slow.dispatch(job))

        assert (await slow.outcome(job)).status == "cancelled"
        await eventually(lambda: not bridge.admission.tickets(), "off the books")
        await slow.engine.post("/sim/resume")
        await slow.until_idle(bridge)


async def test_silence_is_broken_by_keepalives(slow: World) -> None:
    async with slow.serving() as bridge:
        await slow.engine.post("/sim/pause")
        job = slow.job(prompt(1, 20))
        answer = await slow.listen(job)
        await slow.send(slow.dispatch(job))

        await eventually(lambda: len(answer.keepalives) >= 2, "keep-alives")

        assert answer.keepalives[0]["choices"] == []
        assert not answer.chunks
        await slow.engine.post("/sim/resume")
        await eventually(lambda: bool(answer.finals), "the end")
        assert answer.text
        await slow.until_idle(bridge)


async def test_a_deadline_ends_the_answer(slow: World) -> None:
    async with slow.serving() as bridge:
        job = slow.job(prompt(1, 20), params={"max_tokens": 1500})
        job = msgspec.structs.replace(job, deadline_at=job.deadline_at - 14.5)

        answer = await slow.ask(job)

        (final,) = answer.finals
        assert final["Pb-Error"] == "deadline_exceeded"
        await slow.until_idle(bridge)


async def test_a_router_is_told_where_an_attempt_is(slow: World) -> None:
    async with slow.serving() as bridge:
        ended = slow.job(prompt(3, 20))
        await slow.ask(ended)
        streaming, _ = await begun(slow)

        stages = [(await slow.status(job)).error for job in (ended, streaming, slow.job(prompt(4, 20)))]

        assert stages == ["ended", "running", ""]
        await slow.abort(streaming)
        await slow.until_idle(bridge)


async def test_an_abort_says_how_far_the_attempt_was(slow: World) -> None:
    async with slow.serving() as bridge:
        ended = slow.job(prompt(3, 20))
        await slow.ask(ended)
        streaming, answer = await begun(slow)
        unseen = slow.job(prompt(4, 20))
        await slow.engine.post("/sim/pause")
        waiting = slow.job(prompt(2, 20))
        silent = await slow.listen(waiting)
        await slow.send(slow.dispatch(waiting))

        stages = [(await slow.abort(job)).error for job in (ended, streaming, waiting, unseen)]

        assert stages == ["ended", "started", "", ""]
        assert (await slow.send(slow.dispatch(unseen))).refused == "superseded"
        await slow.engine.post("/sim/resume")
        await slow.until_idle(bridge)
        assert not answer.finals and not silent.chunks and not silent.finals
        assert {outcome.request_id for outcome in slow.outcomes} == {ended.request_id}


async def test_a_newer_attempt_of_a_silent_one_replaces_it(slow: World) -> None:
    async with slow.serving() as bridge:
        await slow.engine.post("/sim/pause")
        job = slow.job(prompt(1, 20))
        answer = await slow.listen(job)
        await slow.send(slow.dispatch(job))

        second = await slow.send(slow.dispatch(job, attempt=2))

        assert second.refused == ""
        await slow.engine.post("/sim/resume")
        await slow.outcome(job, attempt=2)
        await slow.until_idle(bridge)
        assert {headers["Pb-Attempt"] for m in answer.messages if "Pb-Seq" in (headers := m.headers or {})} == {"2"}
        assert len(answer.finals) == 1


async def test_draining_finishes_what_is_in_hand_and_takes_nothing_new(slow: World) -> None:
    async with slow.serving():
        job, answer = await begun(slow)

        slow.stopping.set()
        await eventually(lambda: slow.loads[-1].draining, "a heartbeat that says so")

        assert (await slow.send(slow.dispatch(slow.job(prompt(2, 20))))).refused == "draining"
        await slow.cancel(job)
        await eventually(lambda: bool(answer.finals), "the end")
        await slow.outcome(job)


async def _facts(at: World, count: int) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = []

    async def enough() -> bool:
        facts[:] = await at.stored(subjects.STREAM_AUDIT, subjects.audit("worker_bridge", WORKER))
        return len(facts) >= count

    await eventually(enough, f"{count} facts")
    return facts
