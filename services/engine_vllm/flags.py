"""How a vLLM engine is started so that a bridge can stand in front of it: its arguments and its environment.

Owns: which flags there are, and why.   Must not know: processes, NATS, which ports are free.
Source: facts/vllm.md, "Install and start"; docs/vllm.md says the same to people."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `events` and `replay` are ZMQ addresses on this machine; `kv_blocks` is the size of its KV in blocks,
    0 for as many as its memory holds. `tool_parser` and `reasoning_parser`: what takes its answers apart, empty for
    nothing."""

    weights: str
    tokenizer: str
    served_model_name: str
    port: int
    block_size: int
    max_model_len: int
    events: str
    replay: str
    topic: str
    kv_blocks: int = 0
    tool_parser: str = ""
    reasoning_parser: str = ""


def command(python: str, settings: Settings, more: Sequence[str] = ()) -> list[str]:
    """The command line, through `start.py`; `more` comes last, so that it wins."""
    arguments = {
        "model": settings.weights,
        # The very files that requests are tokenised with.
        "tokenizer": settings.tokenizer,
        "served-model-name": settings.served_model_name,
        # Only its bridge speaks to it: vLLM asks nobody for a password.
        "host": "127.0.0.1",
        "port": str(settings.port),
        "block-size": str(settings.block_size),
        "max-model-len": str(settings.max_model_len),
        "kv-events-config": json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": settings.events,
                "replay_endpoint": settings.replay,
                "topic": settings.topic,
            }
        ),
    }
    if settings.kv_blocks:
        arguments["num-gpu-blocks-override"] = str(settings.kv_blocks)
    if settings.tool_parser:
        arguments["tool-call-parser"] = settings.tool_parser
    if settings.reasoning_parser:
        arguments["reasoning-parser"] = settings.reasoning_parser
    flags = [text for name, value in arguments.items() for text in (f"--{name}", value)]
    switches = (
        "--enable-prefix-caching",
        # Without it no answer says how much of its prompt came from cache.
        "--enable-prompt-tokens-details",
        # A start takes half a minute instead of several; steps are a little slower.
        "--enforce-eager",
        # The bridge asks every second whether it works.
        "--disable-uvicorn-access-log",
    )
    # vLLM uses its tool parser, for calls that are forced as well, in this mode alone.
    finds_calls = ["--enable-auto-tool-choice"] if settings.tool_parser else []
    return [python, str(Path(__file__).with_name("start.py")), *flags, *switches, *finds_calls, *more]


def environment(cores: Sequence[int], kv_space_gib: int) -> dict[str, str]:
    """What is set for it on a machine without GPUs. `cores`: those that it computes on; vLLM's own choice would put
    every engine of a machine on the same."""
    return {
        # Nothing is looked up or reported anywhere.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its own processes speak to each other over sockets.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        # Resets of the cache exist in this mode alone.
        "VLLM_SERVER_DEV_MODE": "1",
    }


def share_of(cores: Sequence[int], number: int, of: int) -> list[int]:
    """The cores of engine `number` (from 0) of `of`: a run of its own, or one that it shares when they are too few."""
    if of >= len(cores):
        return [cores[number % len(cores)]]
    each = len(cores) // of
    return list(cores[number * each : (number + 1) * each])
