"""What a step of the simulated engine costs in CPU time: a trace in virtual time, by block keys alone.

Requests arrive at random; documents are asked several questions, so that prefixes are found, and memory is short, so
that they are evicted. A run of decode-only steps counts as so many steps."""

import heapq
import random
import time
from typing import Any

from prefixbus.engine_sim.core import EngineCore
from prefixbus.engine_sim.profile import PRESETS
from prefixbus.engine_sim.request import Request
from prefixbus.engine_sim.sequence import VirtualSequence

REQUESTS = 12_000
BLOCK = 16
BLOCKS = 8192
DOCUMENTS = 300
MEAN_GAP_MS = 120.0


def _arrivals(rng: random.Random) -> list[tuple[float, Request]]:
    """(ms, request), in order."""
    arrivals, now = [], 0.0
    for number in range(REQUESTS):
        now += rng.expovariate(1 / MEAN_GAP_MS)
        document = rng.randrange(DOCUMENTS)
        shared = 40 + document % 100
        own = rng.randrange(1, 12)
        keys = [document * 1000 + block for block in range(shared)] + [10**9 + number * 100 + b for b in range(own)]
        sequence = VirtualSequence(len(keys) * BLOCK + rng.randrange(1, BLOCK), keys, nonce=number)
        arrivals.append((now, Request(str(number), sequence, rng.randrange(50, 400), now_ms=now)))
    return arrivals


def bench_engine_steps() -> dict[str, Any]:
    core = EngineCore(PRESETS["h100-8b"], block_size=BLOCK, num_blocks=BLOCKS, max_model_len=8192)
    due = [(at, number, request) for number, (at, request) in enumerate(_arrivals(random.Random(7)))]
    heapq.heapify(due)
    now = 0.0
    started = time.process_time()
    while due or core.has_work:
        while due and (due[0][0] <= now or not core.has_work):
            at, _, request = heapq.heappop(due)
            now = max(now, at)
            core.add_request(request)
        now += core.advance(now, due[0][0] if due else float("inf")).duration_ms
    seconds = time.process_time() - started
    totals = core.totals
    return {
        "bench": "engine_steps",
        "steps": totals.steps,
        "us_per_step": round(1e6 * seconds / totals.steps, 2),
        "requests": REQUESTS,
        "requests_per_s": round(REQUESTS / seconds),
        "reused_ratio": round(totals.prefix_hits / totals.prefix_queries, 3),
        "evictions": totals.evictions,
    }
