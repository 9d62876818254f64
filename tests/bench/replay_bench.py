"""Recorded decisions made again (DESIGN 10): how many come out otherwise, and what one costs.

    make bench ONLY=replay

The decisions are the router's own, over random fleets, policies and prefill models, through JSON as the journal keeps
them. The bar is 0 differences in 10,000."""

import time

from support.decisions import recorded

from prefixbus.lab import replay

DECISIONS = 10_000


def bench_replay() -> dict[str, object]:
    records = list(recorded(DECISIONS, seed=DECISIONS))
    cpu_at = time.process_time()
    replayed = [replay.replay(record) for record in records]
    cpu_s = time.process_time() - cpu_at
    return {
        "bench": "replay",
        "decisions": len(replayed),
        "differences": sum(not one.same for one in replayed),
        "us_each": round(cpu_s / DECISIONS * 1e6, 1),
    }
