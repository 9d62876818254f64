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

from prefixbus.bus.messages import VERSION, Cleared, Dispatched, KvEvents, Load, Lookup, Removed, Stored
from prefixbus.directory.index import Index, Slots
from prefixbus.directory.ledger import Ledger, Op
from prefixbus.directory.shard import Shard

CHAIN_BLOCKS = 2048
WORKERS = 256
DOCUMENTS = 48
HOLDERS = 24
DEPTHS = 8
LOOKUPS = 20_000
RUN_BLOCKS = 32
GROWTH_SIZES = (100_000, 1_000_000, 10_000_000)
GROWTH_LOOKUPS = 5_000
GROWTH_TURNS = 20
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
    machine `max_pause_cpu_ms` is the part of it that was our work, and `changes_per_cpu_s` what a whole core would do.
    """
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
    began_at, began_cpu_at = clock(), cpu_clock()
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
    spent_s, spent_cpu_s = clock() - began_at, cpu_clock() - began_cpu_at
    gc.unfreeze()
    return {
        "bench": "index_apply",
        "changes": changes,
        "changes_per_s": round(changes / spent_s),
        "changes_per_cpu_s": round(changes / spent_cpu_s),
        "message_p50_us": round(_quantile(sorted(pauses), 0.5) * 1e6, 1),
        "max_pause_ms": round(max(pauses) * 1e3, 2),
        "max_pause_cpu_ms": round(max(cpu_pauses) * 1e3, 2),
        "entries": index.entries,
        "pairs": index.pairs,
    }


def bench_shard_lookup() -> dict[str, object]:
    """All of an answer but its encoding: levels by name, trust, announcements. Then again while eight
    workers have announced blocks in the namespace, and eight others are doubted there."""
    rng = random.Random(1)
    shard = Shard()
    seqs = dict.fromkeys((f"w{number}" for number in range(WORKERS)), 0)

    def tell(worker: str, keys: bytes) -> None:
        seqs[worker] += 1
        shard.events(KvEvents(VERSION, worker, 1, seqs[worker], [Stored(NS_ID, 0, keys)]), 0.0)

    for worker in seqs:
        # version, worker, life, report, event; model, serves; queue, running, waiting, slots; KV in use, tokens, block.
        load = Load(VERSION, worker, 1, 1, 0, "m", "m", 0.0, 0, 0, 256, 0.0, 1 << 20, 32, False, [])
        shard.heartbeat(load, 0, 0.0)
    queries: list[Lookup] = []
    for _ in range(DOCUMENTS):
        chain = _chain(rng)
        depths = [CHAIN_BLOCKS, *(rng.randrange(1, CHAIN_BLOCKS) for _ in range(DEPTHS - 1))]
        for worker in rng.sample(list(seqs), HOLDERS):
            tell(worker, chain[: 8 * rng.choice(depths)])
        for worker in seqs:
            tell(worker, chain[: 8 * 16])
        queries.append(Lookup(VERSION, NS_ID, chain))

    def measure() -> list[float]:
        times = []
        for _ in range(LOOKUPS // 4):
            asked = rng.choice(queries)
            began_at = time.perf_counter()
            shard.lookup(asked, 1.0)
            times.append((time.perf_counter() - began_at) * 1e6)
        return sorted(times)

    plain = measure()
    for number in range(8):
        sent = Dispatched(VERSION, f"r{number}", 1, "r", f"w{number}", 1, 1.0, NS_ID, queries[number].keys, 100.0)
        shard.dispatched(sent, 0.0, 0.0)
        shard.trust.outcome(f"w{8 + number}", 1, NS_ID, 4000, 0, 0.0)
    busy = measure()
    return {
        "bench": "shard_lookup",
        "workers": WORKERS,
        "p50_us": round(_quantile(plain, 0.5), 1),
        "p99_us": round(_quantile(plain, 0.99), 1),
        "announced_and_doubted_p50_us": round(_quantile(busy, 0.5), 1),
        "announced_and_doubted_p99_us": round(_quantile(busy, 0.99), 1),
    }


def bench_index_growth() -> dict[str, object]:
    """The same look-ups among 100 thousand, 1 million and 10 million entries; takes 1.6 GB for a minute.

    Documents of 2048 blocks, each held whole by one worker and to a half by seven others. At each size as many of them
    are asked for, old and new ones alike, so that what differs is the index and not how much of it is asked for; the
    sizes take turns, and each figure is the median of all its turns. A question's keys are as a message just received
    leaves them: in the processor's caches.

    `cold` is the same with the caches filled with other things before each look-up, at every size. `all` asks for any
    document there is: then it is the caches that are outgrown, from a few MB to all of 1 GB."""
    rng = random.Random(3)
    indexes, documents = [], []
    for size in GROWTH_SIZES:
        index, chains = _grown(rng, size)
        indexes.append(index)
        documents.append(chains)
    few = [rng.sample(chains, DOCUMENTS) for chains in documents]
    gc.collect()
    gc.freeze()
    same = _in_turns(rng, indexes, few, GROWTH_LOOKUPS)
    cold = _in_turns(rng, indexes, few, GROWTH_LOOKUPS // 10, bytearray(64 << 20))
    every = _in_turns(rng, indexes, documents, GROWTH_LOOKUPS)
    gc.unfreeze()
    found: dict[str, object] = {"bench": "index_growth", "documents_asked_for": DOCUMENTS}
    for name, times in (("", same), ("cold_", cold), ("all_", every)):
        p50s = [_quantile(sorted(of_size), 0.5) for of_size in times]
        found |= {f"{name}p50_us_at_{size}": round(p50, 1) for size, p50 in zip(GROWTH_SIZES, p50s, strict=True)}
        found[f"{name}p50_growth"] = round(p50s[-1] / p50s[0], 2)
    found["pairs"] = indexes[-1].pairs
    found["estimated_mb"] = indexes[-1].estimated_bytes // 2**20
    return found


def _grown(rng: random.Random, size: int) -> tuple[Index, list[bytes]]:
    index = Index(Slots())
    slots = [index.slots.open() for _ in range(WORKERS)]
    documents = []
    while index.entries < size:
        chain = _chain(rng)
        first, *others = rng.sample(slots, HOLDERS // 3)
        for at in range(0, len(chain), 8 * RUN_BLOCKS):
            index.store(NS_ID, first, chain[at : at + 8 * RUN_BLOCKS])
        for slot in others:
            index.store(NS_ID, slot, chain[: len(chain) // 2])
        documents.append(chain)
    return index, documents


def _in_turns(
    rng: random.Random, indexes: list[Index], asked: list[list[bytes]], lookups: int, filler: bytearray | None = None
) -> "list[array[float]]":
    """Microseconds of each look-up, by index; before each the caches are filled with `filler`."""
    times = [array("d") for _ in indexes]
    for _ in range(GROWTH_TURNS):
        for index, chains, taken in zip(indexes, asked, times, strict=True):
            for _ in range(lookups // GROWTH_TURNS):
                chosen = rng.choice(chains)
                if filler is not None:
                    filler.count(1)
                keys = bytes(bytearray(chosen))
                began_at = time.perf_counter()
                index.lookup(NS_ID, keys)
                taken.append((time.perf_counter() - began_at) * 1e6)
    return times


if __name__ == "__main__":
    for bench in (bench_index_lookup, bench_index_apply):
        sys.stdout.write(json.dumps(bench()) + "\n")
        sys.stdout.flush()
