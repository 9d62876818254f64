"""A deployment of two real engines: what comes back, and that what was predicted is what the engine reused."""

import secrets

from support.cluster import ask, chat, outcome_of
from support.nats import eventually
from support.vllm import BLOCK, VllmCluster

from prefixbus.bus.connection import Bus
from prefixbus.client import Client


def long_text(words: int = 200) -> str:
    """What no other test has asked."""
    return " ".join(secrets.token_hex(3) for _ in range(words))


async def test_an_answer_comes_back(client: Client) -> None:
    answer = await ask(client, chat("Hello", max_tokens=5))

    assert answer.usage["completion_tokens"] == 5
    assert answer.finish_reason == "length"


async def test_what_is_asked_again_is_reused_as_predicted(client: Client, operator: Bus, cluster: VllmCluster) -> None:
    body = chat(long_text(), max_tokens=2)
    before = sum(cluster.engine_metric(worker, "vllm:prefix_cache_hits_total") for worker in ("w1", "w2"))

    first = await ask(client, body)
    await cluster.settles()
    second_id = secrets.token_hex(8)
    second = await ask(client, body, request_id=second_id)

    tokens = second.usage["prompt_tokens"]
    outcome = await outcome_of(operator, second_id)
    hits = sum(cluster.engine_metric(worker, "vllm:prefix_cache_hits_total") for worker in ("w1", "w2"))
    assert first.cached_tokens == 0
    assert second.cached_tokens == (tokens - 1) // BLOCK * BLOCK > 0
    assert outcome.predicted_tokens == outcome.cached_tokens == second.cached_tokens
    assert hits - before == second.cached_tokens


async def test_the_directory_hears_what_an_engine_computed(client: Client, cluster: VllmCluster) -> None:
    held = cluster.total("directory", "prefixbus_directory_entries")

    answer = await ask(client, chat(long_text(), max_tokens=1))

    blocks = answer.usage["prompt_tokens"] // BLOCK
    await eventually(
        lambda: cluster.total("directory", "prefixbus_directory_entries") >= held + blocks, "its blocks", 20.0
    )
