"""What a lookup and an applied block change cost (DESIGN 12). Run as a program it prints a JSON line for each.

    python tests/bench/index_bench.py

The fleet: 256 workers; documents of 2048 blocks, each held by some workers whole, by others to a few common depths, as
system prompts, shared histories and evictions leave them. Times include all that a caller of the index pays."""

import gc
import json
import random
import sys
import time
from array import array

from prefixbus.bus.messages import Cleared, Removed, Stored
from prefixbus.directory.index import Index, Slots
from prefixbus.directory.ledger import Ledger, Op

CHAIN_BLOCKS = 2048
WORKERS = 256
DOCUMENTS = 48
HOLDERS = 24
DEPTHS = 8
LOOKUPS = 20_000
RUN_BLOCKS = 32
NS_ID = bytes(16)


def _chain(rng: random.Random, blocks: int = CHAIN_BLOCKS) -> bytes:
    return rng.randbytes(8 * blocks)


def _quantile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def bench_index_lookup() -> dict[str, object]:
    """Chains of 2048 blocks, half of them with an end that nobody holds; a random one each time, so caches are cold."""
    rng = random.Random(1)
    index = Index(Slots())
    slots = [index.slots.open() for _ in range(WORKERS)]
    queries: list[bytes] = []
    for _ in range(DOCUMENTS):
        chain = _chain(rng)
        depths = [CHAIN_BLOCKS, *(rng.randrange(1, CHAIN_BLOCKS) for _ in range(DEPTHS - 1))]
        for slot in rng.sample(slots, HOLDERS):
            index.store(NS_ID, slot, chain[: 8 * rng.choice(depths)])
        # The root of each document is everywhere.
        for slot in slots:
            index.store(NS_ID, slot, chain[: 8 * 16])
        queries += [chain, chain[: 8 * 1536] + _chain(rng, 512)]
    staggered = _chain(rng)
    for number, slot in enumerate(slots):
        index.store(NS_ID, slot, staggered[: 8 * 8 * (number + 1)])
    order = [rng.choice(queries) for _ in range(LOOKUPS)]

    def measure(chains: list[bytes]) -> list[float]:
        clock, lookup = time.perf_counter, index.lookup
        times = []
        for chain in chains:
            began_at = clock()
            lookup(NS_ID, chain)
            times.append((clock() - began_at) * 1e6)
        return sorted(times)

    measure(order[:1000])
    times = measure(order)
    miss = measure([_chain(rng) for _ in range(200)])
    worst = measure([staggered] * 200)
    return {
        "bench": "index_lookup",
        "chain_blocks": CHAIN_BLOCKS,
        "workers": WORKERS,
        "pairs": index.pairs,
        "entries": index.entries,
        "p50_us": round(_quantile(times, 0.5), 1),
        "p99_us": round(_quantile(times, 0.99), 1),
        "miss_p50_us": round(_quantile(miss, 0.5), 1),
        "own_depth_each_p50_us": round(_quantile(worst, 0.5), 1),
        "bytes_per_pair": round(index.estimated_bytes / index.pairs, 1),
    }


def bench_index_apply() -> dict[str, object]:
    """Event messages through the ledger, 32 blocks each: every worker fills its cache, then evicts to store more.

    Now and then one restarts and is swept beside the events. A pause is the longest single call of any kind; on a busy
    machine `max_pause_cpu_ms` is the part of it that was our work."""
    rng = random.Random(2)
    index = Index(Slots())
    ledger = Ledger(index)
    shared = [_chain(rng, 1024) for _ in range(64)]
    capacity = 192
    messages: list[tuple[str, int, int, list[Op]]] = []
    runs: list[list[bytes]] = [[] for _ in range(WORKERS)]
    lives = [(1, 0)] * WORKERS
    for number in range(60_000):
        worker = number % WORKERS
        incarnation, seq = lives[worker]
        if number % 5000 == 4999:
            incarnation, seq, runs[worker] = incarnation + 1, 0, []
        if rng.random() < 0.5:
            at = rng.randrange(1024 // RUN_BLOCKS) * RUN_BLOCKS
            keys = rng.choice(shared)[8 * at : 8 * (at + RUN_BLOCKS)]
        else:
            keys = _chain(rng, RUN_BLOCKS)
        ops: list[Op] = []
        if len(runs[worker]) >= capacity:
            ops.append(Removed(NS_ID, runs[worker].pop(rng.randrange(capacity))))
        ops.append(Stored(NS_ID, 0, keys))
        runs[worker].append(keys)
        lives[worker] = incarnation, seq + 1
        messages.append((f"w{worker}", incarnation, seq + 1, ops))
    changes = sum(len(op.keys) // 8 for *_, ops in messages for op in ops if not isinstance(op, Cleared))
    gc.collect()
    gc.freeze()
    clock, cpu_clock = time.perf_counter, time.thread_time
    pauses, cpu_pauses = array("d"), array("d")
    began_at = clock()
    for number, (name, life, at_seq, ops) in enumerate(messages):
        call_at, cpu_at = clock(), cpu_clock()
        ledger.events(name, life, at_seq, ops, 0.0)
        cpu_pauses.append(cpu_clock() - cpu_at)
        pauses.append(clock() - call_at)
        if number % 16 == 0:
            call_at, cpu_at = clock(), cpu_clock()
            index.sweep(1024)
            cpu_pauses.append(cpu_clock() - cpu_at)
            pauses.append(clock() - call_at)
    spent_s = clock() - began_at
    gc.unfreeze()
    return {
        "bench": "index_apply",
        "changes": changes,
        "changes_per_s": round(changes / spent_s),
        "message_p50_us": round(_quantile(sorted(pauses), 0.5) * 1e6, 1),
        "max_pause_ms": round(max(pauses) * 1e3, 2),
        "max_pause_cpu_ms": round(max(cpu_pauses) * 1e3, 2),
        "entries": index.entries,
        "pairs": index.pairs,
    }


if __name__ == "__main__":
    for bench in (bench_index_lookup, bench_index_apply):
        sys.stdout.write(json.dumps(bench()) + "\n")
        sys.stdout.flush()
