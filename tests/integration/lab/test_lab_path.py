"""A small cluster with simulated engines, and the lab on its virtual clock, decide the same of the same requests."""

import functools
import operator
import random
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat
from support.journal import Journal
from support.nats import eventually

from prefixbus.bus import messages, subjects
from prefixbus.cluster import deployment
from prefixbus.lab.harness import run
from prefixbus.lab.setup import Failure, Setup
from prefixbus.lab.workload import Arrival, Workload

REQUESTS = 50
# The lab counts its workers from w0, and a cluster from w1: homes go by names. So one of the lab's is never there.
ABSENT = Failure(0.0, "w0")
# It is forgotten by then.
BEGIN_S = 5.0
NOISE_MS = 3.0
QUEUES = "prefixbus_router_worker_queue_ms"
WORDS = "the worker holds what it has computed and nobody asks it twice for a thing that is there".split()


def dialogs() -> list[dict[str, object]]:
    """Questions to three documents of about 2000 tokens, to one system prompt, and to nothing."""
    rng = random.Random(4)
    documents = [f"Document {number}. " + " ".join(rng.choices(WORDS, k=1800)) for number in range(3)]
    asked = []
    for number in range(REQUESTS):
        question = f"Question {number}: " + " ".join(rng.choices(WORDS, k=30))
        system = rng.choice([*documents, "You answer in one word.", ""])
        asked.append(chat(question, system=system, max_tokens=4))
    return asked


@pytest.mark.timeout(TEST_TIMEOUT_S)
async def test_the_lab_decides_as_a_live_cluster_does(tmp_path: Path) -> None:
    environ = {
        "PREFIXBUS_PLACEMENT__COPIES_MAX": "0",
        "PREFIXBUS_PLACEMENT__REWARM_SHARE": "0",
        # The lab's directory is never late, either.
        "PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS": "10000",
    }
    keys: dict[str, bytes] = {}
    with Cluster(tmp_path, "--workers", "3", environ=environ) as cluster:
        listener = await deployment.connect(cluster.state, "directory", cluster.url)

        def hear(message: Msg) -> None:
            announced = messages.DISPATCHED.decode(message.data)
            if announced.worker and announced.attempt == 1:
                keys[announced.request_id] = announced.keys

        await listener.listen(subjects.DISPATCHED, hear)
        async with await cluster.client() as client, await Journal.of(cluster) as journal:
            for number, body in enumerate(dialogs()):
                await ask(client, body, request_id=f"q{number}")
                ended = functools.partial(operator.contains, journal.outcomes, f"q{number}")
                await eventually(ended, f"the outcome of q{number}", 10)
                # The lab's reports are never late; of a queue that is over, a live router may not have heard yet.
                await eventually(lambda: not cluster.total("router", QUEUES), "nothing is queued anywhere", 10)
            live = [journal.decisions[f"q{number}"][-1] for number in range(REQUESTS)]
            outcomes = [journal.outcomes[f"q{number}"][-1] for number in range(REQUESTS)]
        await listener.close()

    began_at = live[0].decided_at
    arrivals = [
        Arrival(
            BEGIN_S + one.decided_at - began_at,
            keys[one.request_id],
            one.prompt_tokens,
            4,
            prefix_class=one.prefix_class,
        )
        for one in live
    ]
    setup = Setup(workers=4, failures=(ABSENT,), kv_tokens=deployment.SIMULATED_KV_TOKENS)
    lab = run(setup, Workload(arrivals, live[0].block_size))

    pairs = list(zip(live, outcomes, lab.served, strict=True))
    assert [one.predicted_cached_tokens for one, _, _ in pairs] == [played.predicted_tokens for _, _, played in pairs]
    warm = [(one.decision, played.decision) for one, _, played in pairs if one.predicted_cached_tokens]
    assert len(warm) > REQUESTS / 4 and all(lived == played for lived, played in warm)
    assert [outcome.cached_tokens for _, outcome, _ in pairs] == [played.cached_tokens for _, _, played in pairs]
    # Where cold ones go elsewhere, the live router found both as good: how busy a worker was of late is timing. Two in
    # five ask about no document.
    elsewhere = [(one, played.worker) for one, _, played in pairs if one.selected_worker != played.worker]
    assert len(elsewhere) < REQUESTS / 2
    assert all(one.predicted_cached_tokens < one.prompt_tokens / 2 for one, _ in elsewhere)
    assert [costs_more_ms(one, other) for one, other in elsewhere if costs_more_ms(one, other) > NOISE_MS] == []


def costs_more_ms(record: messages.DecisionRecord, worker: str) -> float:
    """Than the worker that was chosen."""
    cost_ms = {one.worker: one.cost_ms for one in record.candidate_workers}
    return cost_ms[worker] - cost_ms[record.selected_worker]
