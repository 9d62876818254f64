"""Prompts with images: of the same image the KV is found again, of another never, and of what nobody can name nothing
is advertised."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from support import models
from support.nats import eventually
from tokenizers import Tokenizer

from prefixbus.bus import blockkeys, identity, messages, namespace, revision
from prefixbus.worker_bridge.service import Bridge

from .bridge_world import BLOCK, MODEL, World, prompt, world

# The engine imports transformers with its first chat.
pytestmark = pytest.mark.timeout(60)

EACH = 20
IMAGES: dict[str, Any] = {
    "engine": {
        "model-dir": str(models.tiny_with_images()),
        "image-token": "<image>",
        "image-tokens": str(EACH),
    },
    "model": {
        "tokenizer": str(models.tiny_with_images()),
        "media_revision": "sha256:p",
        "image_tokens": EACH,
    },
}
PNG = "data:image/png;base64,Y2F0"


def in_world(at: World) -> None:
    section = at.config.models[MODEL]
    at.identity = identity.of_model(MODEL, section, revision.of_directory(models.tiny_with_images()))


def shown(at: World, name: bytes, **changes: Any) -> messages.Job:
    """A chat about an image of this name, as the tokenizer makes it."""
    tokenizer = Tokenizer.from_file(str(models.tiny_with_images() / "tokenizer.json"))
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (
            "<|im_start|>user\nLook at it closely, please, and tell what it is: ",
            "What is it?<|im_end|>\n<|im_start|>assistant\n",
        )
    )
    token = tokenizer.token_to_id("<image>")
    assert token is not None
    ids = [*before, *[token] * EACH, *after]
    content = [
        {"type": "text", "text": "Look at it closely, please, and tell what it is: "},
        {"type": "image_url", "image_url": {"url": PNG}, "uuid": name.hex()},
        {"type": "text", "text": "What is it?"},
    ]
    chat = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
    return at.job(ids, chat=orjson.dumps(chat), media=[(len(before), EACH, name)], **changes)


async def cached(at: World, job: messages.Job) -> int | None:
    await at.ask(job)
    return (await at.outcome(job)).cached_tokens


async def test_the_kv_of_an_image_is_found_again_for_the_same_image_alone(tmp_path: Path) -> None:
    async with world(tmp_path, **IMAGES) as here:
        in_world(here)
        async with here.serving() as bridge:
            cat, dog = shown(here, b"c" * 16), shown(here, b"d" * 16)
            blocks = len(cat.tokens) // 4 // BLOCK
            before_the_image = cat.media[0][0] // BLOCK

            assert await cached(here, cat) == 0
            await held_of(bridge, here, cat, blocks)
            found = [await cached(here, shown(here, b"c" * 16)), await cached(here, dog)]

            assert found == [BLOCK * ((len(cat.tokens) // 4 - 1) // BLOCK), BLOCK * before_the_image]
            assert bridge.index.unused.malformed == 0
            await held_of(bridge, here, dog, blocks)
            await here.until_idle(bridge)


async def held_of(bridge: Bridge, at: World, job: messages.Job, blocks: int) -> None:
    """Our keys of this prompt are those that the engine's events make."""
    ns_id = namespace.ns_id(at.namespace_key, job.namespace)
    keys = blockkeys.chain(job.tokens, BLOCK, namespace.seed(ns_id), job.media)
    await eventually(lambda: bridge.index.held(ns_id, keys) == blocks, f"{blocks} blocks of it; {bridge.index!r}")


async def test_of_a_prompt_that_nobody_can_name_nothing_is_advertised_or_found(tmp_path: Path) -> None:
    async with world(tmp_path, **IMAGES) as here:
        in_world(here)
        async with here.serving() as bridge:
            foreign = bridge.index.foreign
            jobs = [here.job(prompt(1, 5 * BLOCK), uncacheable=True) for _ in range(2)]

            assert [await cached(here, job) for job in jobs] == [0, 0]

            await eventually(lambda: bridge.index.foreign == foreign + 2 * 5, f"its blocks; {bridge.index!r}")
            assert bridge.index.held_keys == 0
            assert not any(isinstance(each, messages.KvEvents) and each.ops for each in here.kv)
            assert here.metric("prefixbus_wrong_hits_total") == 0
