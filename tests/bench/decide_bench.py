"""What a decision costs (DESIGN 12). Run as a program it prints a JSON line for each fleet size.

    python tests/bench/decide_bench.py

A decision is everything between the directory's answer and the dispatch: the shared prefix, the survey of the fleet,
the shortlist, the prices and the choice. It is one among the whole fleet: all workers are open to the request, and the
choice is the one that pricing each of them would give (tests/unit/router/test_contenders.py), though few are priced.

`chats` are under a common system prompt that most workers hold, with histories held by a few at various depths. Under
`depths` every worker holds some of the prompt: 16 at each of 16 depths, or as many as there are; under `own_depths`
each to a depth of its own. `idle` is a fleet without work where all hold as much: every worker is as good as the next,
and has to be looked at.

p50 and p99 are CPU time of the deciding thread: on a shared machine the wall clock's 99th percentile measures the
neighbours; its median is given beside them."""

import gc
import json
import random
import sys
import time
from collections.abc import Callable

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


def _load(worker: str, rng: random.Random, *, idle: bool) -> Load:
    return Load(
        v=1,
        worker=worker,
        incarnation=1,
        report=1,
        event_seq=0,
        model="m",
        serves="digest",
        queue_ms=0.0 if idle else rng.choice([0.0, rng.uniform(0, 500)]),
        running=0 if idle else rng.randrange(64),
        waiting=0,
        slots=256,
        kv_usage=0.0 if idle else rng.random(),
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


def _chats(names: list[str], rng: random.Random) -> Holdings:
    """Half of the requests: some deep holders; most workers hold the system prompt."""
    mixed = rng.sample(names, len(names))
    levels = []
    if rng.random() < 0.5:
        depths = sorted(rng.sample(range(SYSTEM_BLOCKS + 1, BLOCKS), 6), reverse=True)
        levels = [Level(depth, [mixed.pop()]) for depth in depths]
    levels.append(Level(SYSTEM_BLOCKS, mixed[: len(mixed) * 3 // 4]))
    return Holdings(1, levels)


def _depths(names: list[str], rng: random.Random, count: int = 16) -> Holdings:
    """Everybody holds some of it."""
    mixed = rng.sample(names, len(names))
    depths = sorted(rng.sample(range(1, BLOCKS + 1), count), reverse=True)
    return Holdings(1, [Level(depth, mixed[at::count]) for at, depth in enumerate(depths)])


def _own_depths(names: list[str], rng: random.Random) -> Holdings:
    return _depths(names, rng, len(names))


def _alike(names: list[str], rng: random.Random) -> Holdings:
    return Holdings(1, [Level(SYSTEM_BLOCKS, names)])


HOLDINGS: dict[str, Callable[[list[str], random.Random], Holdings]] = {
    "chats": _chats,
    "depths": _depths,
    "own_depths": _own_depths,
    "idle": _alike,
}


def bench_decide(workers: int, held: str = "chats") -> dict[str, object]:
    rng = random.Random(1)
    names = [f"worker-{number:03d}" for number in range(workers)]
    fleet, traffic, current = Fleet(0.6, 3.0), Traffic(), Policy()
    learner = Learner({"m": PROFILES["h100-8b"]})
    for name in names:
        fleet.heard(_load(name, rng, idle=held == "idle"), 0.0)
    system = rng.randbytes(8 * SYSTEM_BLOCKS)
    asked = [_route(n, system + rng.randbytes(8 * (BLOCKS - SYSTEM_BLOCKS))) for n in range(REQUESTS)]
    answers = [HOLDINGS[held](names, rng) for _ in range(REQUESTS)]
    times: list[float] = []
    wall_times: list[float] = []
    gc.collect()
    gc.freeze()
    for number, (route, answer) in enumerate(zip(asked, answers, strict=True)):
        now = number * 1e-5
        started_at, cpu_at = time.perf_counter_ns(), time.thread_time_ns()
        shared = traffic.shared_blocks(route.ns_id, route.keys)
        available = fleet.survey(route.model, route.serves, now).available
        found = shortlist(route, available, answer, shared, learner, current, now)
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
        "held": held,
        "p50_us": round(times[len(times) // 2], 1),
        "p99_us": round(times[int(len(times) * 0.99)], 1),
        "wall_p50_us": round(sorted(wall_times)[len(wall_times) // 2], 1),
    }


def main() -> int:
    sys.stdout.write(json.dumps(bench_decide(64)) + "\n")
    for held in HOLDINGS:
        sys.stdout.write(json.dumps(bench_decide(256, held)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
