"""What a decision costs (DESIGN 12). Run as a program it prints a JSON line for each fleet size.

    python tests/bench/decide_bench.py

A decision is everything between the directory's answer and the dispatch: the shared prefix, the survey of the fleet,
the shortlist, the prices and the choice. The requests are chats under a common system prompt that most workers hold,
with histories held by a few at various depths. p50 and p99 are CPU time of the deciding thread: on a shared machine the
wall clock's 99th percentile measures the neighbours; its median is given beside them."""

import gc
import json
import random
import sys
import time

from prefixbus.bus.messages import Holdings, Level, Load, Route
from prefixbus.router import policy
from prefixbus.router.cost import PROFILES
from prefixbus.router.fleet import Fleet
from prefixbus.router.learning import Learner
from prefixbus.router.policy import Policy
from prefixbus.router.shortlist import shortlist
from prefixbus.router.traffic import Traffic

BLOCKS = 256
SYSTEM_BLOCKS = 32
REQUESTS = 2_000
NS_ID = bytes(16)


def _load(worker: str, rng: random.Random) -> Load:
    return Load(
        v=1,
        worker=worker,
        incarnation=1,
        report=1,
        event_seq=0,
        model="m",
        serves="digest",
        queue_ms=rng.choice([0.0, rng.uniform(0, 500)]),
        running=rng.randrange(64),
        waiting=0,
        slots=256,
        kv_usage=rng.random(),
        kv_tokens=1_050_000,
        block_size=16,
        draining=False,
        accepted=[],
    )


def _route(number: int, keys: bytes) -> Route:
    return Route(
        v=1,
        request_id=f"R{number}",
        client_request_id=f"c{number}",
        tenant="acme",
        model="m",
        serves="digest",
        ns_id=NS_ID,
        keys=keys,
        prompt_tokens=len(keys) * 2 + 7,
        output_tokens=200,
        prefix_class="session",
        reply="_INBOX.acme.1",
        deadline_at=1e12,
        job=b"",
    )


def _holdings(names: list[str], rng: random.Random) -> Holdings:
    """Half of the requests: some deep holders; most workers hold the system prompt."""
    mixed = rng.sample(names, len(names))
    levels = []
    if rng.random() < 0.5:
        depths = sorted(rng.sample(range(SYSTEM_BLOCKS + 1, BLOCKS), 6), reverse=True)
        levels = [Level(depth, [mixed.pop()]) for depth in depths]
    levels.append(Level(SYSTEM_BLOCKS, mixed[: len(mixed) * 3 // 4]))
    return Holdings(1, levels)


def bench_decide(workers: int) -> dict[str, object]:
    rng = random.Random(1)
    names = [f"worker-{number:03d}" for number in range(workers)]
    fleet, traffic, current = Fleet(0.6, 3.0), Traffic(), Policy()
    learner = Learner({"m": PROFILES["h100-8b"]})
    for name in names:
        fleet.heard(_load(name, rng), 0.0)
    system = rng.randbytes(8 * SYSTEM_BLOCKS)
    asked = [_route(n, system + rng.randbytes(8 * (BLOCKS - SYSTEM_BLOCKS))) for n in range(REQUESTS)]
    answers = [_holdings(names, rng) for _ in range(REQUESTS)]
    times: list[float] = []
    wall_times: list[float] = []
    gc.collect()
    gc.freeze()
    for number, (route, held) in enumerate(zip(asked, answers, strict=True)):
        now = number * 1e-5
        started_at, cpu_at = time.perf_counter_ns(), time.thread_time_ns()
        shared = traffic.shared_blocks(route.ns_id, route.keys)
        available = fleet.survey(route.model, route.serves, now).available
        found = shortlist(route, available, held, shared, learner, current, now)
        decision = policy.decide(found.shape, found.candidates, current, now)
        fleet.book(route.request_id, 1, decision.worker, 1, decision.work_ms, now, now + 60)
        traffic.note(route.ns_id, route.keys)
        times.append((time.thread_time_ns() - cpu_at) / 1000)
        wall_times.append((time.perf_counter_ns() - started_at) / 1000)
        if number >= workers:
            fleet.settle(f"R{number - workers}", 1, now)
    gc.unfreeze()
    times.sort()
    return {
        "bench": "decide",
        "workers": workers,
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "wall_p50_us": round(sorted(wall_times)[len(wall_times) // 2], 1),
    }


def main() -> int:
    for workers in (64, 256):
        sys.stdout.write(json.dumps(bench_decide(workers)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
