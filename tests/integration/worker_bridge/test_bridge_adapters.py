"""A worker that serves LoRA adapters beside its model, before an engine whose events tell of them by name alone."""

from pathlib import Path
from typing import Any

import msgspec
from support.nats import eventually

from prefixbus.bus import config, identity
from prefixbus.bus.config import AdapterSection, ModelSection
from prefixbus.worker_bridge.service import Bridge

from .bridge_world import BLOCK, MODEL, World, prompt, world

ADAPTERS = {"french": {"revision": "sha256:f1", "engine_name": "lora-fr"}, "legal": {"revision": "sha256:l1"}}
WITH_ADAPTERS: dict[str, Any] = {
    "model": {"adapters": ADAPTERS},
    "engine": {"adapter=lora-fr": "", "adapter=legal": ""},
}
TOKENS = prompt(1, 3 * BLOCK + 1)


async def cached(at: World, adapter: str = "") -> int | None:
    job = at.job(TOKENS, adapter=adapter)
    await at.ask(job, incarnation=at.loads[-1].incarnation)
    return (await at.outcome(job)).cached_tokens


async def until_held(bridge: Bridge, blocks: int) -> None:
    await eventually(lambda: bridge.index.held_keys == blocks, f"{blocks} blocks in the index; {bridge.index!r}")


def with_revision(settings: config.Config, adapter: str, revision: str) -> config.Config:
    section: ModelSection = settings.models[MODEL]
    changed = AdapterSection(revision=revision, engine_name=section.engine_names()[adapter])
    adapters = {**section.adapters, adapter: changed}
    return msgspec.structs.replace(settings, models={MODEL: msgspec.structs.replace(section, adapters=adapters)})


async def test_a_model_and_its_adapters_share_nothing_and_find_their_own_again(tmp_path: Path) -> None:
    async with world(tmp_path, **WITH_ADAPTERS) as here, here.serving() as bridge:
        foreign = bridge.index.foreign

        first = [await cached(here, adapter) for adapter in ("", "french", "legal")]
        await until_held(bridge, 9)
        again = [await cached(here, adapter) for adapter in ("", "french", "legal")]

        assert first == [0, 0, 0]
        assert again == [3 * BLOCK] * 3
        assert bridge.index.foreign == foreign
        assert [outcome.adapter for outcome in here.outcomes] == ["", "french", "legal"] * 2
        await here.until_idle(bridge)


async def test_an_answer_names_the_adapter_as_it_was_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path, **WITH_ADAPTERS) as here, here.serving():
        base, french = here.job(TOKENS), here.job(TOKENS, adapter="french")

        answers = [await here.ask(base), await here.ask(french)]

        assert [{chunk["model"] for chunk in answer.chunks} for answer in answers] == [{MODEL}, {f"{MODEL}:french"}]
        assert answers[0].text != answers[1].text


async def test_a_restarted_bridge_knows_whose_adapters_blocks_are(tmp_path: Path) -> None:
    async with world(tmp_path, **WITH_ADAPTERS) as here:
        async with here.serving() as bridge:
            assert [await cached(here, adapter) for adapter in ("", "french")] == [0, 0]
            await until_held(bridge, 6)
        last = here.loads[-1].incarnation

        async with here.bridge() as bridge:
            await here.until_serving(bridge, after=last)

            assert bridge.index.held_keys == 6
            assert await cached(here, "french") == 3 * BLOCK
            await here.until_idle(bridge)


async def test_another_revision_of_an_adapter_finds_nothing_of_the_last_one(tmp_path: Path) -> None:
    """The engine is the same, and calls it by the same name."""
    async with world(tmp_path, **WITH_ADAPTERS) as here:
        async with here.serving() as bridge:
            await cached(here, "french")
            await until_held(bridge, 3)
        last = here.loads[-1]
        older = here.job(TOKENS, adapter="french")
        here.config = with_revision(here.config, "french", "sha256:f2")
        here.identity = msgspec.structs.replace(
            here.identity, adapters=identity.of_model(MODEL, here.config.models[MODEL]).adapters
        )

        async with here.bridge() as bridge:
            load = await here.until_serving(bridge, after=last.incarnation)
            refused = await here.send(here.dispatch(older, incarnation=load.incarnation))

            assert load.serves != last.serves
            assert refused.refused == "stale_namespace"
            assert await cached(here, "french") == 0
            assert await cached(here, "french") == 3 * BLOCK
            await here.until_idle(bridge)


async def test_an_engine_without_an_adapter_that_the_config_names_is_not_registered(tmp_path: Path) -> None:
    only_one: dict[str, str | None] = {"adapter=legal": ""}
    async with world(tmp_path, model=WITH_ADAPTERS["model"], engine=only_one) as here, here.bridge() as bridge:
        await eventually(lambda: "no adapter lora-fr" in bridge.life.why_not, f"the reason; {bridge!r}", 10)

        assert "--lora-modules lora-fr=PATH" in bridge.life.why_not
        assert not here.loads
