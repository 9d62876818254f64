"""Eight prompts of 100,000 tokens at once: no service's loop stands still, no lease is lost, the ids are right."""

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import Cluster, ask, chat

from prefixbus.cluster import deployment

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

PROMPTS = 8
WORDS = 95_000
# The bound is 100 ms for the p99; it is printed by `make bench ONLY=long_prompts`.
HEALTHZ_DEADLINE_S = 0.4


@pytest.fixture(scope="module")
def long_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"PREFIXBUS_MODELS__SMOLLM2__MAX_MODEL_LEN": "131072", "PREFIXBUS_MODELS__SMOLLM2__PROFILE": "instant"}
    running = Cluster(tmp_path_factory.mktemp("long"), "--workers", "2", environ=environ)
    running.start()
    yield running
    running.stop()


def long_texts() -> list[str]:
    """Texts that share nothing, of common words: a little over a token each."""
    words = "the router asks which worker holds a prefix before it decides where a request waits least".split()
    chance = random.Random(7)
    return [" ".join(chance.choices(words, k=WORDS)) for _ in range(PROMPTS)]


async def test_eight_long_prompts_at_once(long_cluster: Cluster) -> None:
    texts = long_texts()
    lost_before = lost_leases(long_cluster)
    watching = asyncio.create_task(asyncio.to_thread(watch, long_cluster, (done := asyncio.Event()).is_set))

    async with await long_cluster.client() as client:
        bodies = [chat(text, max_tokens=2) for text in texts]
        answers = await asyncio.gather(*(ask(client, body, deadline_s=120, resend_after_s=60) for body in bodies))
    done.set()
    slow = await watching

    assert [answer.usage["prompt_tokens"] for answer in answers] == [count(long_cluster, body) for body in bodies]
    assert all(answer.usage["prompt_tokens"] > WORDS for answer in answers)
    assert lost_leases(long_cluster) == lost_before
    for name, waits in slow.items():
        p99 = sorted(waits)[int(0.99 * len(waits))]
        assert p99 < HEALTHZ_DEADLINE_S, f"{name}: p99 of /healthz {1000 * p99:.0f} ms over {len(waits)} requests"
    await long_cluster.settles(20)


def watch(cluster: Cluster, done: Any) -> dict[str, list[float]]:
    """How long /healthz took, by process, until done."""
    waits: dict[str, list[float]] = {}
    files = deployment.run_files(cluster.state)
    while not done():
        for file in files:
            started = time.perf_counter()
            with urllib.request.urlopen(f"{file.http}/healthz", timeout=30):
                pass
            waits.setdefault(file.instance, []).append(time.perf_counter() - started)
    return waits


def lost_leases(cluster: Cluster) -> float:
    return cluster.metrics("directory").get('prefixbus_directory_leases_total{turn="WorkerLost"}', 0.0)


def count(cluster: Cluster, body: dict[str, Any]) -> int:
    """The engine's own count of a chat's tokens: rendered and tokenised whole, in one go."""
    engine = next(iter(cluster.file.engines.values()))
    request = urllib.request.Request(
        f"{engine.url}/tokenize",
        data=json.dumps({"model": "smollm2", "messages": body["messages"]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        counted: int = json.load(reply)["count"]
        return counted
