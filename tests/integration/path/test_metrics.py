"""What a scrape shows after a known workload, to the number: real processes, asked at their own ports."""

import asyncio
import importlib.util
import json
import os
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import nats
import pytest
from support.cluster import MODEL, TEST_TIMEOUT_S, Answer, Cluster, ask, chat, total_of
from support.nats import eventually
from support.ports import free_port
from support.processes import spawned

from prefixbus.bus import labels
from prefixbus.bus.blockkeys import warmth
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import PrefixbusError
from prefixbus.bus.messages import DECISION, OUTCOME, DecisionRecord, Outcome
from prefixbus.client import Client
from prefixbus.cluster import deployment
from prefixbus.router import cost
from prefixbus.router.cost import PrefillModel

BLOCK = 32
POOL = "gold"
SENTENCE = "The router asks the directory who holds the longest part of a prompt before it decides. "
GENERATE = Path(__file__).resolve().parents[3] / "docs" / "generate.py"
SERVICES = {
    "tokenizer": "tokenizer",
    "router": "router",
    "directory": "directory",
    "worker_bridge": "bridge",
    "auditor": "audit",
    "gateway": "gateway",
}
ENVIRON = {
    "PREFIXBUS_BRIDGE__POOL": POOL,
    # Engines get one request at a time, so that a second one waits.
    "PREFIXBUS_BRIDGE__PREFILL_WINDOW_TOKENS": "1",
    # A slow machine should not make attempts fail, or leases lapse, where the workload does not mean it.
    "PREFIXBUS_ROUTER__ACCEPT_TIMEOUT_MS": "10000",
    "PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS": "10000",
    "PREFIXBUS_ROUTER__SUSPECT_AFTER_S": "10",
    "PREFIXBUS_ROUTER__LOST_AFTER_S": "20",
    "PREFIXBUS_DIRECTORY__SUSPECT_AFTER_S": "2",
    "PREFIXBUS_DIRECTORY__LOST_AFTER_S": "20",
    # Nothing is computed that nobody asked for.
    "PREFIXBUS_PLACEMENT__COPIES_MAX": "0",
    "PREFIXBUS_PLACEMENT__REWARM_SHARE": "0",
}
# What a round does to each metric that tells requests apart, whatever the machine's pace.
ROUND = {"warm": 3, "partial": 2, "cold": 5}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("watched"), "--workers", "2", environ=ENVIRON) as cluster:
        yield cluster


@pytest.fixture
async def operator(watched: Cluster) -> AsyncIterator[Bus]:
    bus = await watched.operator()
    yield bus
    await bus.close()


class Workload:
    """Rounds of three cold requests, two repeats, two that go on differently, a cancel, a deadline, an unknown model,
    and one that leaves a worker that is stuck. Remembers what clients were told, by our client's id."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}
        self._cluster = cluster
        self._client = client

    async def round(self) -> None:
        systems = [f"{uuid.uuid4().hex} {SENTENCE * 20}" for _ in range(3)]
        for system in systems:
            await self._ask(chat("Who has it?", system=system))
        for system in systems[:2]:
            await self._ask(chat("Who has it?", system=system))
            await self._ask(chat(SENTENCE * 8, system=system))
        await self._stuck_engines()
        await self._ask(chat("Hello?"), model="nobody-serves-this")
        await self._one_that_leaves()
        await self._cluster.settles()

    async def _stuck_engines(self) -> None:
        """A cancel, and a deadline, of requests that their engines do not answer."""
        for worker in self._cluster.file.engines:
            await self._control(worker, "pause")
        cancelled = uuid.uuid4().hex
        waiting = asyncio.create_task(self._ask(chat(uuid.uuid4().hex + SENTENCE), request_id=cancelled))
        await self._until_one_waits()
        await self._client.cancel(cancelled)
        await waiting
        await self._ask_until_its_deadline(chat(uuid.uuid4().hex + SENTENCE))
        for worker in self._cluster.file.engines:
            await self._control(worker, "resume")

    async def _one_that_leaves(self) -> None:
        """The engine that holds the prompt takes no step: one request waits for it, the next one goes elsewhere."""
        system = f"{uuid.uuid4().hex} {SENTENCE * 250}"
        held = await self._cluster_held()
        await self._ask(chat("first", system=system))
        (warm,) = [worker for worker, blocks in (await self._cluster_held()).items() if blocks > held[worker]]
        await self._control(warm, "pause")
        waiting = asyncio.create_task(self._ask(chat("stuck", system=system)))
        await self._until_one_waits()
        await self._ask(chat("second", system=system))
        await self._control(warm, "resume")
        await waiting

    async def _ask(self, body: dict[str, Any], *, request_id: str = "", **options: Any) -> None:
        request_id = request_id or uuid.uuid4().hex
        try:
            self.answers[request_id] = await ask(self._client, body, request_id=request_id, **options)
        except PrefixbusError as exc:
            self.errors[request_id] = exc.code

    async def _ask_until_its_deadline(self, body: dict[str, Any]) -> None:
        """Our client would give up itself, and cancel."""
        request_id = uuid.uuid4().hex
        connection = await nats.connect(
            self._cluster.url, user="demo", password=self._cluster.token, inbox_prefix=b"_INBOX.demo"
        )
        inbox = connection.new_inbox()
        frames = await connection.subscribe(inbox)
        headers = {"Pb-Request-Id": request_id, "Pb-Deadline": f"{time.time() + 0.5:.3f}"}
        await connection.publish(f"pb.v1.infer.demo.{MODEL}", json.dumps(body).encode(), reply=inbox, headers=headers)
        while (frame := await frames.next_msg(timeout=10)).data:
            pass
        self.errors[request_id] = (frame.headers or {})["Pb-Error"]
        await connection.close()

    async def _until_one_waits(self) -> None:
        async def one_waits() -> bool:
            return (await asyncio.to_thread(self._cluster.metrics, "worker_bridge"))["prefixbus_bridge_waiting"] == 1

        await eventually(one_waits, "one is waiting", 10)

    async def _cluster_held(self) -> dict[str, int]:
        return {worker: stats["keys_cached"] for worker, stats in self._cluster.engine_stats().items()}

    async def _control(self, worker: str, verb: str) -> None:
        url = f"{self._cluster.file.engines[worker].url}/sim/{verb}"
        async with aiohttp.ClientSession() as session, session.post(url) as reply:
            reply.raise_for_status()


async def journal(operator: Bus, names: set[str]) -> tuple[dict[str, list[DecisionRecord]], dict[str, Outcome]]:
    """Decisions in order, and the outcome, of those of these requests that a router had; by client's id."""
    decisions: dict[str, list[DecisionRecord]] = {}
    outcomes: dict[str, Outcome] = {}

    async def decided(message: Any) -> None:
        record = DECISION.decode(message.data)
        if record.client_request_id in names:
            decisions.setdefault(record.client_request_id, []).append(record)

    async def ended(message: Any) -> None:
        outcome = OUTCOME.decode(message.data)
        if outcome.client_request_id in names:
            outcomes[outcome.client_request_id] = outcome

    for subject, hear in (("pb.v1.journal.*", decided), ("pb.v1.outcome.*.*", ended)):
        await operator.follow("JOURNAL", subject, hear, start="all")
    await eventually(lambda: len(decisions) == len(outcomes) == len(names) - 1, "all but the refused one", 10)
    return decisions, outcomes


@pytest.mark.timeout(2 * TEST_TIMEOUT_S)
async def test_a_scrape_shows_exactly_what_happened(watched: Cluster, operator: Bus) -> None:
    before = {service: watched.metrics(service) for service in SERVICES}
    async with await watched.client() as client:
        workload = Workload(watched, client)
        await workload.round()
    after = {service: watched.metrics(service) for service in SERVICES}
    answers, errors = workload.answers, workload.errors
    decisions, outcomes = await journal(operator, {*answers, *errors})

    def total(service: str, name: str, **wanted: str) -> float:
        """How much it has grown."""
        name = name if name.startswith("prefixbus") else f"prefixbus_{SERVICES[service]}_{name}"
        return total_of(after[service], name, **wanted) - total_of(before[service], name, **wanted)

    def now(service: str, name: str) -> float:
        return total_of(after[service], f"prefixbus_{SERVICES[service]}_{name}")

    of_all = {"model": MODEL, "pool": POOL}
    assert sorted(errors.values()) == ["cancelled", "deadline_exceeded", "unknown_model"]
    prompts = {name: answer.usage["prompt_tokens"] for name, answer in answers.items()}
    found = Counter(warmth(prompts[name], answer.cached_tokens, BLOCK) for name, answer in answers.items())
    assert found == ROUND

    # The bridges: what attempts measured, as clients were told.
    cached = sum(answer.cached_tokens for answer in answers.values())
    assert total("worker_bridge", "input_tokens_total", source="cached", **of_all) == cached
    assert total("worker_bridge", "input_tokens_total", source="uncached", **of_all) == sum(prompts.values()) - cached
    assert total("worker_bridge", "output_tokens_total", **of_all) == 8 * len(answers)
    for kind, count in found.items():
        assert total("worker_bridge", "ttft_seconds_count", warmth=kind, **of_all) == count
        assert total("worker_bridge", "request_seconds_count", warmth=kind, **of_all) == count
    assert (
        total("worker_bridge", "ttft_seconds_count") == total("worker_bridge", "request_seconds_count") == len(answers)
    )
    predicted = sum(outcomes[name].predicted_tokens for name in answers)
    met = sum(min(outcomes[name].predicted_tokens, answer.cached_tokens) for name, answer in answers.items())
    assert total("worker_bridge", "predicted_tokens_total", verdict="met", **of_all) == met == cached
    assert total("worker_bridge", "predicted_tokens_total", verdict="missed", **of_all) == predicted - met == 0
    assert total("worker_bridge", "predicted_tokens_total", verdict="unforeseen", **of_all) == 0
    assert total("worker_bridge", "requests_total", status="ok", error="none", **of_all) == len(answers)
    for status, error in (("cancelled", "cancelled"), ("error", "deadline_exceeded")):
        assert total("worker_bridge", "requests_total", status=status, error=error, **of_all) == 1
    assert total("worker_bridge", "requests_total") == len(answers) + 2
    assert total("worker_bridge", "attempts_given_back_total", error="waited_for_long") == 1
    assert total("worker_bridge", "prefixbus_wrong_hits_total") == 0
    by_class = Counter(outcomes[name].prefix_class for name in answers)
    for prefix_class, count in by_class.items():
        assert total("worker_bridge", "ttft_seconds_count", prefix_class=prefix_class) == count
        assert total("router", "requests_total", prefix_class=prefix_class, code="ok") == count

    # The router: what was decided, as the journal says, and what came of it, as clients were told.
    last = {name: records[-1] for name, records in decisions.items()}
    for name, count in Counter(record.decision for record in last.values()).items():
        assert total("router", "requests_total", decision=name, **of_all) == count
    waits = Counter(outcome.decision for outcome in outcomes.values() if outcome.queue_wait_ms is not None)
    for name, count in waits.items():
        assert total("worker_bridge", "queue_wait_seconds_count", decision=name, **of_all) == count
    assert total("router", "requests_total", code="ok", **of_all) == len(answers)
    assert total("router", "requests_total", code="cancelled", **of_all) == 1
    assert total("router", "requests_total", code="deadline_exceeded", **of_all) == 1
    assert total("router", "requests_total") == len(answers) + 2
    (spilled,) = (name for name, records in decisions.items() if len(records) > 1)
    assert last[spilled].decision == "spill-max-wait"
    assert total("router", "left_warm_worker_total", reason="max-wait", **of_all) == 1
    assert total("router", "left_warm_worker_total") == 1
    assert total("router", "failovers_total", reason="waited") == total("router", "failovers_total") == 1
    saved_ms = sum(saved(last[name], prompts[name], answers[name].cached_tokens) for name in answers)
    assert total("router", "prefill_saved_ms_total", **of_all) == pytest.approx(saved_ms)
    assert total("router", "extra_queue_ms_total", **of_all) == pytest.approx(
        sum(extra(last[name]) for name in answers)
    )
    assert total("router", "lookup_ms_count") == len(answers) + 2
    assert total("router", "decide_us_count") == len(answers) + 3
    assert total("router", "lookup_failures_total") == total("router", "lookups_skipped_total") == 0
    assert total("router", "journal_lost_total") == 0

    # The directory: who asked, and what it knows.
    assert total("directory", "lookup_seconds_count") == len(answers) + 2
    assert now("directory", "workers") == 2
    keys_held = sum(stats["keys_cached"] for stats in watched.engine_stats().values())
    assert now("worker_bridge", "held_blocks") + now("worker_bridge", "foreign_blocks") == keys_held
    # Both workers hold what the request that left has in common with those that waited.
    twice = total("worker_bridge", "held_blocks") - total("directory", "entries")
    assert prompts[spilled] // BLOCK - 1 <= twice <= prompts[spilled] // BLOCK
    assert total("worker_bridge", "evicted_block_age_seconds_count") == 0
    assert total("directory", "shed_pairs_total") == now("directory", "doubts") == 0

    # Who was refused before there was anything to decide.
    assert total("tokenizer", "requests_total", code="ok") == len(answers) + 2
    assert total("tokenizer", "requests_total", code="unknown_model") == 1


def saved(record: DecisionRecord, prompt_tokens: int, cached_tokens: int) -> float:
    model = msgspec.convert(record.prefill_model, PrefillModel, strict=False)
    whole_ms = cost.prefill_ms(model, prompt_tokens, prompt_tokens)
    return record.candidate_workers[0].speed * (
        whole_ms - cost.prefill_ms(model, prompt_tokens - cached_tokens, prompt_tokens)
    )


def extra(record: DecisionRecord) -> float:
    return record.candidate_workers[0].queue_ms - min(one.queue_ms for one in record.candidate_workers)


def series(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Of all services' metrics, each series by its name and labels."""
    found = {}
    for service, own in SERVICES.items():
        for key in cluster.metrics(service):
            name = key.split("{")[0]
            if name.startswith((f"prefixbus_{own}_", "prefixbus_wrong_hits")):
                found[key] = dict(re.findall(r'(\w+)="([^"]*)"', key))
    return found


@pytest.mark.timeout(4 * TEST_TIMEOUT_S)
async def test_more_requests_make_no_more_series(watched: Cluster) -> None:
    async with await watched.client() as client:
        workload = Workload(watched, client)
        await workload.round()
        after_one = series(watched)
        for _ in range(2):
            await workload.round()
        after_three = series(watched)

    # Which decision a cold request gets, and whether a prefill was computed beside another one, is a matter of the
    # machine's pace: these labels are checked by their values.
    by_pace = re.compile(r'\b(decision|verdict)="[^"]*"')
    assert {by_pace.sub("", key) for key in after_three} == {by_pace.sub("", key) for key in after_one}
    values = {value for of in after_three.values() for value in of.values()}
    assert not values & {"demo", *workload.answers, *workload.errors}
    assert not [value for value in values if re.search(r"[0-9a-f]{16}", value)]
    said: dict[str, set[str]] = {}
    for of in after_three.values():
        for label, value in of.items():
            said.setdefault(label, set()).add(value)
    assert said["decision"] <= {*labels.DECISIONS, labels.NONE}
    assert said["verdict"] <= {"met", "missed", "unforeseen", "learned", "useless", "contended"}
    assert said["prefix_class"] <= set(labels.PREFIX_CLASSES)
    assert said["pool"] == {POOL}
    assert len(said["template"]) == 1


@pytest.mark.timeout(2 * TEST_TIMEOUT_S)
async def test_a_scrape_counts_every_block_that_an_engine_evicted(watched: Cluster) -> None:
    """Of one that has room for a prompt or two, beside two that have room for all."""
    blocks = 64
    ports = [free_port() for _ in range(3)]
    place = deployment.Engine(
        url=f"http://127.0.0.1:{ports[0]}",
        events=f"tcp://127.0.0.1:{ports[1]}",
        replay=f"tcp://127.0.0.1:{ports[2]}",
    )
    options = deployment.Options(workers=1, kv_tokens=blocks * BLOCK)
    plan = deployment.Deployment(watched.state, options, say=lambda line: None)
    bridge_command = [
        *(sys.executable, "-m", "prefixbus", "run", "worker_bridge", "--state", str(watched.state)),
        *("--worker", "small", "--engine-url", place.url, "--kv-events", place.events, "--kv-replay", place.replay),
    ]
    environ = {**os.environ, **ENVIRON}
    with spawned(plan.engine_command("small", place)), spawned(bridge_command, env=environ) as process:
        await eventually(lambda: watched.is_ready(process.pid), "its bridge is ready", 60)
        bridge = next(file for file in deployment.run_files(watched.state) if file.pid == process.pid)

        def scraped(name: str) -> float:
            return total_of(watched.metrics_of(bridge), f"prefixbus_bridge_{name}")

        # Its probe's blocks are nobody's: they are evicted, too, and of no age.
        foreign_at_first = scraped("foreign_blocks")
        async with await watched.client() as client:
            for _ in range(60):
                await ask(client, chat(uuid.uuid4().hex + SENTENCE * 40, max_tokens=1))
        await watched.settles()

        async with aiohttp.ClientSession() as session, session.get(f"{place.url}/sim/stats") as reply:
            engine = await reply.json()
        # The engine's events are a moment behind its answers.
        await eventually(
            lambda: scraped("held_blocks") + scraped("foreign_blocks") == engine["keys_cached"],
            f"it knows what its engine holds, {engine}",
        )
        assert engine["totals"]["evictions"] > 0
        gone = engine["totals"]["evictions"] - (foreign_at_first - scraped("foreign_blocks"))
        assert scraped("evicted_block_age_seconds_count") == gone
        assert scraped("evicted_block_age_seconds_sum") > 0
        assert scraped("kv_occupancy_ratio") == engine["keys_cached"] / blocks


@pytest.mark.timeout(TEST_TIMEOUT_S)
async def test_every_metric_is_in_the_reference_with_its_labels(watched: Cluster) -> None:
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    known = {}
    for rows in generate.metrics().values():
        for name, kind, names, _ in rows:
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            known.update({f"{name}{suffix}": {*names} for suffix in suffixes})

    scraped: dict[str, set[str]] = {}
    for service in SERVICES:
        for key in watched.metrics(service):
            scraped[key.split("{")[0]] = set(re.findall(r'(\w+)="', key)) - {"le"}
    # The library's own, of when a counter was made.
    scraped = {name: names for name, names in scraped.items() if not name.endswith("_created")}

    assert scraped
    assert {name: names for name, names in scraped.items() if known.get(name) != names} == {}
    without_labels = {name for name, names in known.items() if not names and "authorizations" not in name}
    assert without_labels - scraped.keys() == set()
