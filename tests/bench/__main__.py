"""`make bench`: one JSON line a bench. Names as arguments run only those (`make bench ONLY=path,decide`)."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import (
    decide_bench,
    engine_bench,
    gateway_bench,
    index_bench,
    path_bench,
    recovery_bench,
    replay_bench,
    tokenize_bench,
)

BENCHES: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "index_lookup": [index_bench.bench_index_lookup],
    "index_apply": [index_bench.bench_index_apply],
    "index_growth": [index_bench.bench_index_growth],
    "shard_lookup": [index_bench.bench_shard_lookup],
    "decide": [
        lambda: decide_bench.bench_decide(64),
        *(functools.partial(decide_bench.bench_decide, 256, held) for held in decide_bench.HOLDINGS),
    ],
    "replay": [replay_bench.bench_replay],
    "key_chain": [tokenize_bench.bench_key_chain],
    "tokenize": [tokenize_bench.bench_tokenize],
    "engine_sim": [engine_bench.bench_engine_steps],
    "path": [lambda: path_bench.bench_path(4096), lambda: path_bench.bench_path(230)],
    "gateway": [lambda: gateway_bench.bench_gateway(4096), lambda: gateway_bench.bench_gateway(230)],
    "recovery": [recovery_bench.bench_recovery],
    "vanish": [recovery_bench.bench_vanish],
    "long_prompts": [recovery_bench.bench_long_prompts],
}
# Without a name these run, in about 5 minutes; the others by name.
USUAL = ["index_lookup", "index_apply", "decide", "key_chain", "tokenize", "engine_sim", "path", "gateway"]


def main(arguments: list[str]) -> int:
    names = [name for argument in arguments for name in argument.split(",")] or USUAL
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        sys.stderr.write(f"no bench named {', '.join(unknown)}; there are {', '.join(BENCHES)}\n")
        return 2
    for name in names:
        for bench in BENCHES[name]:
            sys.stdout.write(json.dumps(bench()) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
