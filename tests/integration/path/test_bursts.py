"""The same new prompt, asked by many at once of a fleet that has never seen it: real processes, two of each service."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat

BLOCK = 32
SIBLINGS = 32
SENTENCE = "The router asks the directory who holds the longest part of a prompt before it decides. "

# What a router does that a directory leaves without an answer is not asked here, however busy the machine.
PATIENT = {"PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS": "10000"}

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    scale = ["--workers", "4", "--scale", "router=2,directory=2"]
    with Cluster(tmp_path_factory.mktemp("four"), *scale, environ=PATIENT) as running:
        yield running
        assert running.stop() == 0


async def test_32_identical_cold_prompts_at_once_on_4_workers_cost_at_most_two_prefills(four: Cluster) -> None:
    body = chat(f"{uuid.uuid4().hex} {SENTENCE * 300}")
    async with await four.client() as client:
        answers = await asyncio.gather(*(ask(client, body) for _ in range(SIBLINGS)))
    await four.settles()

    prompt = answers[0].usage["prompt_tokens"]
    assert prompt > 4000
    cold = [answer for answer in answers if answer.cached_tokens == 0]
    assert 1 <= len(cold) <= 2
    # Nobody computed a part of it either: the others found all but their last block.
    computed = sum(prompt - answer.cached_tokens for answer in answers)
    assert computed <= len(cold) * prompt + (SIBLINGS - len(cold)) * BLOCK
