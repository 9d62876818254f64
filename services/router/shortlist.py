"""From the fleet and the directory's answer to the few candidates a decision compares.

Considered are, of each depth the directory reports, the least loaded holders; the least loaded workers of all; and the
home of a fresh prefix (DESIGN 6). Pricing everybody would cost a millisecond at 256 workers and change nothing: a
worker that holds no more than another and has more queued is never the cheapest but for its memory, which the several
least loaded allow for.

Owns: nothing.   Must not know: prices, NATS, how a fleet is kept.   Units: blocks, tokens, ms."""

import heapq
from typing import NamedTuple

from ..bus.blockkeys import reusable_blocks
from ..bus.messages import Holdings, Route
from .cost import PrefillModel
from .fleet import Available
from .home import home
from .policy import Candidate, Policy, RequestShape

# The deepest depths that are looked at; in the worst case every worker is at its own.
MAX_LEVELS = 16


class Shortlist(NamedTuple):
    """What `policy.decide` gets, and the depth its distinguishing block follows (for the journal)."""

    shape: RequestShape
    candidates: list[Candidate]
    shared_blocks: int
    held_blocks: int


def shortlist(
    route: Route,
    available: list[Available],
    holdings: Holdings | None,
    shared_blocks: int,
    model: PrefillModel,
    policy: Policy,
    now: float,
    *,
    whole_fleet: bool = False,
    ordinal: int = 0,
) -> Shortlist:
    """Candidates among at least one available worker. `holdings` is None when the directory did not answer: then the
    request is blind, and load alone decides."""
    block_size = available[0].worker.block_size
    names = {one.name: one for one in available}
    levels = [
        (level.depth, held)
        for level in (holdings.levels if holdings else [])
        if (held := [names[worker] for worker in level.workers if worker in names])
    ]
    held_blocks = levels[0][0] if levels else 0
    depths: dict[str, int] = {}
    if whole_fleet:
        chosen = dict(names)
    else:
        chosen = {one.name: one for one in _least_loaded(available, policy.least_loaded)}
    for position, (depth, held) in enumerate(levels):
        if not whole_fleet and position < MAX_LEVELS:
            chosen.update((one.name, one) for one in _least_loaded(held, policy.least_loaded))
        depths.update((one.name, depth) for one in held if one.name in chosen)
    home_worker = ""
    if holdings is not None and held_blocks <= shared_blocks < len(route.keys) // 8:
        home_worker = _home(route.keys, shared_blocks, available)
        if home_worker not in chosen:
            chosen[home_worker] = names[home_worker]
            depths.update((home_worker, depth) for depth, held in levels for one in held if one.name == home_worker)
    reusable = reusable_blocks(route.prompt_tokens, block_size)
    doubted = holdings.incomplete if holdings else []
    candidates = []
    for one in chosen.values():
        depth = min(depths.get(one.name, 0), reusable)
        if depth and one.name in doubted:
            depth = int(depth * policy.suspect_trust)
        candidates.append(
            Candidate(
                one.name,
                depth * block_size,
                one.queue_ms,
                one.worker.rho(now),
                one.worker.pinned_tokens,
                one.worker.free_tokens,
                model,
            )
        )
    shape = RequestShape(
        prompt_tokens=route.prompt_tokens,
        output_tokens=route.output_tokens,
        block_size=block_size,
        home=home_worker,
        blind=holdings is None,
        ordinal=ordinal,
    )
    return Shortlist(shape, candidates, shared_blocks, held_blocks)


def _home(keys: bytes, shared_blocks: int, available: list[Available]) -> str:
    key = int.from_bytes(keys[8 * shared_blocks : 8 * shared_blocks + 8], "little")
    return home(key, [(one.name, one.worker.kv_tokens) for one in available])


def _least_loaded(workers: list[Available], count: int) -> list[Available]:
    return workers if len(workers) <= count else heapq.nsmallest(count, workers, key=_by_load)


def _by_load(one: Available) -> tuple[float, int, str]:
    return one.queue_ms, one.running, one.name
