"""What of an engine's settings does not fit: each in a sentence that says what to change, all of them at once."""

from typing import Any

import pytest

from prefixbus.worker_bridge.misfits import EngineSettings, EventSource, ServedModel, misfits, shortcomings

MODEL = "m"
FITTING: dict[str, Any] = {
    "block_size": 32,
    "caches_prefixes": True,
    "event_sources": [EventSource("tcp://127.0.0.1:5557")],
    "resets": True,
}


def found(served: list[ServedModel] | None = None, adapters: tuple[str, ...] = (), **changes: Any) -> list[str]:
    settings = EngineSettings(**{**FITTING, **changes})
    models = {each.id: each for each in served or [ServedModel(MODEL, 4096)]}
    return [each.sentence() for each in misfits(settings, models, model=MODEL, adapters=adapters, block_size=32)]


def test_an_engine_that_is_set_up_right_fits() -> None:
    assert found() == []


def test_what_an_engine_does_not_say_is_no_misfit() -> None:
    assert found(block_size=0, caches_prefixes=None, event_sources=None) == []


@pytest.mark.parametrize(
    ("changes", "said", "flag"),
    [
        ({"served": [ServedModel("other", 4096)]}, "serves other, not m", "--served-model-name"),
        ({"adapters": ("legal",)}, "no adapter legal of m", "--lora-modules legal=PATH"),
        ({"block_size": 64}, "blocks have 64 tokens, the config says 32", "--block-size"),
        ({"caches_prefixes": False}, "keeps no prefixes", "--enable-prefix-caching"),
        ({"event_sources": []}, "publishes no KV events", "--kv-events-config"),
        ({"event_sources": [EventSource("a"), EventSource("b")]}, "2 data-parallel ranks", "a bridge before each"),
    ],
    ids=["wrong model", "no adapter", "wrong block size", "no caching", "no events", "several caches"],
)
def test_each_misfit_is_one_sentence_and_what_to_do(changes: dict[str, Any], said: str, flag: str) -> None:
    (sentence,) = found(**changes)

    assert said in sentence and flag in sentence


def test_all_misfits_are_said_at_once() -> None:
    assert len(found(served=[ServedModel("other", 4096)], block_size=64, caches_prefixes=False, event_sources=[])) == 4


@pytest.mark.parametrize(("resets", "count"), [(True, 0), (None, 0), (False, 1)])
def test_an_engine_without_resets_may_serve_and_is_told(resets: bool | None, count: int) -> None:
    settings = EngineSettings(resets=resets)

    sentences = shortcomings(settings)

    assert len(sentences) == count
    assert all("VLLM_SERVER_DEV_MODE=1" in sentence for sentence in sentences)
