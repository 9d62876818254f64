# ruff: noqa: TID251 - an entry point: it reads the environment and starts the event loop
"""`python -m prefixbus.engine_sim --model-dir DIR --served-model-name NAME ...`: one engine in the foreground."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from .events import REPLAY_BATCHES
from .profile import PRESETS
from .server import EngineConfig, run


def parse(arguments: Sequence[str] | None = None) -> EngineConfig:
    """Flags are vLLM's where it has one."""
    parser = argparse.ArgumentParser(prog="python -m prefixbus.engine_sim", description="A stand-in for a vLLM server.")
    add = parser.add_argument
    add("--model-dir", type=Path, required=True, help="local Hugging Face tokenizer directory")
    add("--served-model-name", required=True)
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free one, told by the ready line (default)")
    add("--block-size", type=int, default=32)
    add("--num-gpu-blocks", type=int, default=2048, help="KV memory in blocks; one is the null block")
    add("--max-model-len", type=int, default=8192)
    add("--profile", choices=sorted(PRESETS), default="h100-8b")
    add("--max-num-seqs", type=int, help="most requests in one step (default: the profile's)")
    add("--max-num-batched-tokens", type=int, help="token budget of a step (default: the profile's)")
    add("--kv-events-endpoint", help="ZMQ address; tcp://host:port is connected to, * and ipc:// are bound")
    add("--kv-events-replay-endpoint", help="ZMQ address to bind for replays")
    add("--kv-events-topic", default="")
    add("--kv-events-buffer-steps", type=int, default=REPLAY_BATCHES, help="how many batches can be replayed")
    add("--enable-prompt-tokens-details", action="store_true", help="report cached_tokens in usage")
    add("--model-revision", default="", help="part of what output and cache depend on")
    add(
        "--adapter",
        action="append",
        default=[],
        dest="adapters",
        metavar="NAME",
        help="serve a LoRA adapter (repeatable)",
    )
    add("--eos-one-in", type=int, default=256, help="natural ends: one token in so many; 0: never")
    add("--kv-cache-metrics", action="store_true", help="histograms of how long blocks live in the cache")
    add("--dev-mode", action="store_true", help="serve /reset_prefix_cache (also VLLM_SERVER_DEV_MODE=1)")
    add("--tool-call-parser", help="with --enable-auto-tool-choice: find calls of tools; any name will do")
    add("--enable-auto-tool-choice", action="store_true")
    add("--reasoning-parser", help="chats begin with a little reasoning, told apart; any name will do")
    add("--ignore-salt", action="store_true", help="leave the salt out of block keys, to provoke wrong hits")
    add("--virtual-time", action="store_true", help="wait for no step; metrics say what each would have taken")
    add("--image-token", default="", help="takes images, for each of which the template prints this token")
    add("--image-tokens", type=int, default=64, help="how many tokens an image is")
    add("--leaky-tier", type=int, default=0, metavar="TOKENS", help="a tier of chunks so long that ignores salts, too")
    options = vars(parser.parse_args(arguments))
    options["adapters"] = tuple(options["adapters"])
    options["dev_mode"] = options["dev_mode"] or os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    return EngineConfig(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = parse(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"engine_sim: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
