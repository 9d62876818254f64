"""What of an engine's settings does not fit its bridge's: a sentence each, with what to change.

What an engine does not say is no misfit; what it does (handshake) is looked at besides.

Owns: the rules.   Must not know: how an engine is asked.   Source: facts/vllm.md, "HTTP API"; docs/vllm.md."""

from collections.abc import Mapping, Sequence

import msgspec

from ..bus.errors import WorkerRefused


class ServedModel(msgspec.Struct, frozen=True):
    """One line of /v1/models. `max_model_len` is None when the engine does not say, as vLLM for an adapter; `parent` is
    the model that an adapter belongs to."""

    id: str
    max_model_len: int | None = 0
    parent: str | None = None


class EventSource(msgspec.Struct, frozen=True):
    """Where an engine publishes its KV events, and what it marks them with (None: it does not say)."""

    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of how it was started. 0, empty or None: it does not say. `event_sources` are those of its
    data-parallel ranks; `resets`: whether its cache can be emptied from outside."""

    version: str = ""
    block_size: int = 0
    kv_blocks: int = 0
    caches_prefixes: bool | None = None
    event_sources: list[EventSource] | None = None
    resets: bool | None = None


def misfits(
    settings: EngineSettings,
    served: Mapping[str, ServedModel],
    *,
    model: str,
    adapters: Sequence[str],
    block_size: int,
) -> list[WorkerRefused]:
    """Why the worker may not register with this engine; none: nothing that it says speaks against it. `adapters` are
    what the engine must call those that the config names."""
    found = []
    if model not in served:
        found.append(
            WorkerRefused(
                f"The engine serves {', '.join(sorted(served)) or 'nothing'}, not {model}.",
                remedy="Start it with --served-model-name, or correct the worker's address.",
            )
        )
    else:
        found += [
            WorkerRefused(
                f"The engine serves no adapter {adapter} of {model}.",
                remedy=f"Start it with --enable-lora --lora-modules {adapter}=PATH, or correct the config.",
            )
            for adapter in adapters
            if adapter not in served or served[adapter].parent != model
        ]
    if settings.caches_prefixes is False:
        found.append(WorkerRefused("The engine keeps no prefixes.", remedy="Start it with --enable-prefix-caching."))
    if settings.block_size and settings.block_size != block_size:
        found.append(wrong_block_size(settings.block_size, block_size))
    sources = settings.event_sources
    if sources is not None and not sources:
        found.append(no_events())
    if sources is not None and len(sources) > 1:
        found.append(
            WorkerRefused(
                f"The engine has {len(sources)} data-parallel ranks, each with a cache of its own.",
                remedy="Start an engine for each, and a bridge before each.",
            )
        )
    return found


def shortcomings(settings: EngineSettings) -> list[str]:
    """What will not work with this engine though its worker may register."""
    found = []
    if settings.resets is False:
        found.append(
            "The engine has no /reset_prefix_cache, so its cache cannot be emptied from here. Start it with "
            "VLLM_SERVER_DEV_MODE=1, where nobody but its bridge reaches its port."
        )
    return found


def wrong_block_size(engines: int, ours: int) -> WorkerRefused:
    return WorkerRefused(
        f"The engine's blocks have {engines} tokens, the config says {ours}.",
        remedy="Start it with --block-size, or correct block_size.",
    )


def foreign_events(theirs: str, ours: str) -> WorkerRefused:
    return WorkerRefused(
        f"The engine's events do not come, and those of another do: their topic is {theirs!r}, the engine's {ours!r}.",
        remedy="Give each engine addresses of its own for events and replay, and its bridge the same.",
    )


def no_events() -> WorkerRefused:
    return WorkerRefused(
        "The engine publishes no KV events.",
        remedy="Start it with --kv-events-config, its endpoint being this bridge's.",
    )
