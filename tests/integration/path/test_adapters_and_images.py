"""The whole path for a model with adapters that takes images."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from support import models
from support.cluster import MODEL, TEST_TIMEOUT_S, Cluster, ask, chat
from support.nats import eventually

from prefixbus.bus.errors import BadRequest
from prefixbus.cluster import state

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

QUESTION = "What is the difference between one thing and another, and who says so? " * 6


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("pictured"), "--workers", "2")
    cluster.init()
    text = state.config_text(cluster.state, {MODEL: state.Model(tokenizer=models.tiny_with_images())})
    text += 'media_revision = "sha256:p"\nimage_tokens = 100\n'
    text += f'[models.{MODEL}.adapters.french]\nrevision = "sha256:f"\n'
    text += f'[models.{MODEL}.adapters.legal]\nrevision = "sha256:l"\nengine_name = "lora-legal"\n'
    (cluster.state / "config.toml").write_text(text)
    with cluster:
        yield cluster


async def cached_once_told(at: Cluster, body: dict[str, Any], model: str, most: int) -> int:
    """Asked until the whole of it is found again: blocks are told of a moment after the answer."""
    found = [0]
    async with await at.client() as client:

        async def again() -> bool:
            found[0] = (await ask(client, body, model=model)).cached_tokens
            return found[0] >= most

        await eventually(again, f"{most} cached tokens of {model}, not {found}", 20)
    return found[0]


async def test_adapters_find_their_own_kv_and_nobody_elses(pictured: Cluster) -> None:
    body = chat(QUESTION, max_tokens=4)
    async with await pictured.client() as client:
        first = [await ask(client, body, model=name) for name in (MODEL, f"{MODEL}:french", f"{MODEL}:legal")]

    assert [answer.cached_tokens for answer in first] == [0, 0, 0]
    assert len({answer.text for answer in first}) == 3
    for name in (MODEL, f"{MODEL}:french", f"{MODEL}:legal"):
        prompt_tokens = first[0].usage["prompt_tokens"]
        assert await cached_once_told(pictured, body, name, (prompt_tokens - 1) // 32 * 32) < prompt_tokens
    assert all(stats["wrong_hits"] == 0 for stats in pictured.engine_stats().values())


def about(picture: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True}


async def test_the_same_image_is_found_again_and_another_is_not(pictured: Cluster) -> None:
    async with await pictured.client() as client:
        cat = await ask(client, about(b"cat"))
    prompt_tokens = cat.usage["prompt_tokens"]
    whole = (prompt_tokens - 1) // 32 * 32

    again = await cached_once_told(pictured, about(b"cat"), MODEL, whole)
    async with await pictured.client() as client:
        dog = await ask(client, about(b"dog"))

    assert again == whole
    assert dog.usage["prompt_tokens"] == prompt_tokens
    assert dog.cached_tokens <= whole - 96, "of the image itself nothing is found"
    assert pictured.total("worker_bridge", "prefixbus_bridge_engine_prompts_total", verdict="differs") == 0
    assert pictured.total("worker_bridge", "prefixbus_wrong_hits_total") == 0
    assert all(stats["wrong_hits"] == 0 for stats in pictured.engine_stats().values())


async def test_an_image_that_only_the_engine_could_fetch_is_its_to_refuse(pictured: Cluster) -> None:
    body = about(b"")
    body["messages"][0]["content"][1]["image_url"]["url"] = "https://example.org/cat.png"

    async with await pictured.client() as client:
        with pytest.raises(BadRequest, match="cannot be loaded"):
            await ask(client, body)
        assert (await ask(client, chat(QUESTION))).text

    assert pictured.total("tokenizer", "prefixbus_tokenizer_uncacheable_total") == 1
