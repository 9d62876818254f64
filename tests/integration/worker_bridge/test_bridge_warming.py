"""Prefixes that are computed while nobody wants anything: for nobody to hear, and given up for anybody who comes."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.nats import eventually

from prefixbus.bus import subjects
from prefixbus.bus.messages import Accept, Job

from .bridge_world import BLOCK, DEADLINE_S, WORKER, World, prompt, world

PREFIX = 1200
"""Tokens: two steps of the default size."""


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, engine={"profile": "h100-8b"}) as made:
        yield made


def an_order(at: World, seed: int = 1, tokens: int = PREFIX, **changes: Any) -> Job:
    made = at.job(prompt(seed, tokens), reply="", client_request_id="", **changes)
    return msgspec.structs.replace(made, params=b'{"max_tokens": 1000, "ignore_eos": true}')


async def order(at: World, job: Job, **changes: Any) -> Accept:
    return await at.send(at.dispatch(job, decision="warm", **changes))


async def until_the_engine_has_one(at: World) -> None:
    async def has_one() -> bool:
        stats = await at.engine.stats()
        return bool(stats["running"] + stats["waiting"])

    await eventually(has_one, "the engine has it", DEADLINE_S)


def orders(at: World, result: str) -> float:
    return at.registry.get_sample_value("prefixbus_bridge_warm_orders_total", {"result": result}) or 0.0


async def test_the_next_request_finds_the_prefix_without_anybody_having_paid_for_it(here: World) -> None:
    async with here.serving() as bridge:
        job = an_order(here)

        assert (await order(here, job)).refused == ""
        outcome = await here.outcome(job)
        request = here.job(prompt(1, PREFIX) + prompt(2, 20))
        await here.ask(request)

        assert (outcome.status, outcome.decision, outcome.prefix_class) == ("ok", "warm", "")
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.prefill_tokens) == (PREFIX, 0, PREFIX)
        assert outcome.ttft_ms is None and outcome.output_tokens == 0
        assert (await here.outcome(request)).cached_tokens == PREFIX
        await here.until_idle(bridge)


async def test_an_order_is_in_no_load_report_and_in_no_metric_of_requests(here: World) -> None:
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        job = an_order(here)
        await order(here, job)
        await until_the_engine_has_one(here)
        before = here.loads[-1].report
        await eventually(lambda: here.loads[-1].report > before + 1, "two reports", DEADLINE_S)

        last = here.loads[-1]
        await here.engine.post("/sim/resume")
        await here.outcome(job)

        assert (last.running, last.waiting, last.queue_ms, last.accepted, last.kv_usage) == (0, 0, 0.0, [], 0.0)
        assert not here.metric("prefixbus_bridge_frames_total")
        names = {sample.name for metric in here.registry.collect() for sample in metric.samples if sample.value}
        assert not names & {"prefixbus_bridge_requests_total", "prefixbus_bridge_input_tokens_total"}
        assert orders(here, "done") == 1
        await here.until_idle(bridge)


async def test_a_request_that_comes_ends_an_order_at_once_and_what_was_computed_stays(here: World) -> None:
    async with here.serving() as bridge:
        job = an_order(here)
        await here.engine.post("/sim/pause")
        await order(here, job)
        await until_the_engine_has_one(here)
        await here.engine.post("/sim/step")
        await eventually(lambda: bridge.index.held_keys > 0, "the first step is done", DEADLINE_S)
        held_blocks = bridge.index.held_keys

        request = here.job(prompt(1, PREFIX))
        answer = await here.listen(request)
        assert (await here.send(here.dispatch(request))).refused == ""
        given_up = await here.outcome(job)
        await here.engine.post("/sim/resume")
        await eventually(lambda: bool(answer.finals), "the answer", DEADLINE_S)

        assert (given_up.status, given_up.error) == ("cancelled", "cancelled")
        assert (await here.outcome(request)).cached_tokens == held_blocks * BLOCK > 0
        assert orders(here, "given_up") == 1
        await here.until_idle(bridge)


async def test_a_worker_with_anything_to_do_takes_no_order(here: World) -> None:
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        request = here.job(prompt(3, 40))
        answer = await here.listen(request)
        await here.send(here.dispatch(request))

        refused = (await order(here, an_order(here))).refused

        await here.engine.post("/sim/resume")
        await eventually(lambda: bool(answer.finals), "the answer", DEADLINE_S)
        assert refused == "busy"
        await here.until_idle(bridge)


async def test_a_second_order_is_refused_while_one_is_in_work(here: World) -> None:
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        first = an_order(here)
        await order(here, first)

        refused = (await order(here, an_order(here, seed=2))).refused

        await here.engine.post("/sim/resume")
        await here.outcome(first)
        assert refused == "busy"
        await here.until_idle(bridge)


async def test_what_is_held_already_is_refused_and_so_are_orders_for_another_life_or_too_late(here: World) -> None:
    async with here.serving() as bridge:
        done = an_order(here)
        await order(here, done)
        await here.outcome(done)
        await eventually(lambda: bridge.index.held_keys == PREFIX // BLOCK, "its blocks are told of", DEADLINE_S)

        again = (await order(here, an_order(here))).refused
        elsewhere = (await order(here, an_order(here, seed=2), incarnation=10_000)).refused
        late = (await order(here, an_order(here, seed=2), accept_by_at=time.time() - 1)).refused

        assert (again, elsewhere, late) == ("held", "wrong_incarnation", "too_late")


async def test_an_order_passes_the_same_checks_as_a_request(here: World) -> None:
    async with here.serving():
        job = an_order(here)
        revoked = msgspec.structs.replace(job, namespace=msgspec.structs.replace(job.namespace, acl_epoch=b"e" * 16))
        stolen = here.dispatch(an_order(here, scope="another"), decision="warm")

        of_a_revoked_epoch = (await order(here, revoked)).refused
        of_another_namespace = (
            await here.send(msgspec.structs.replace(here.dispatch(job, decision="warm"), ns_id=stolen.ns_id))
        ).refused
        with_a_client = (await order(here, here.job(prompt(1, 40)))).refused
        no_order = (await here.send(here.dispatch(an_order(here)))).refused

        assert (of_a_revoked_epoch, of_another_namespace) == ("stale_namespace", "stale_namespace")
        assert (with_a_client, no_order) == ("bad_request", "forged_reply")


async def test_a_prefix_computed_for_one_namespace_is_no_hit_in_another(here: World) -> None:
    async with here.serving() as bridge:
        job = an_order(here)
        await order(here, job)
        await here.outcome(job)

        stranger = here.job(prompt(1, PREFIX), scope="another")
        await here.ask(stranger)

        assert (await here.outcome(stranger)).cached_tokens == 0
        await here.until_idle(bridge)


async def test_an_order_is_on_the_record_as_what_it_is(here: World) -> None:
    async with here.serving():
        job = an_order(here)
        await order(here, job)
        await here.outcome(job)

        [fact] = await here.stored(subjects.STREAM_AUDIT, subjects.audit("worker_bridge", WORKER))

        assert (fact["kind"], fact["decision"], fact["tenant"], fact["request_id"]) == (
            "warm",
            "warm",
            "acme",
            job.request_id,
        )


async def test_an_engine_that_dies_ends_the_order_and_the_next_life_takes_one(here: World) -> None:
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        job = an_order(here)
        await order(here, job)
        await until_the_engine_has_one(here)
        life = here.loads[-1].incarnation

        await here.engine.kill()
        assert (await here.outcome(job)).status in ("error", "cancelled")
        await here.engine.start(profile="h100-8b")
        await here.until_serving(bridge, after=life)

        again = an_order(here)
        assert (await order(here, again)).refused == ""
        assert (await here.outcome(again)).status == "ok"


async def test_a_bridge_that_drains_gives_an_order_up(here: World) -> None:
    async with here.serving() as bridge:
        await here.engine.post("/sim/pause")
        job = an_order(here)
        await order(here, job)
        await until_the_engine_has_one(here)

        here.stopping.set()

        assert (await here.outcome(job)).status == "cancelled"
        assert not bridge.warming.in_work
