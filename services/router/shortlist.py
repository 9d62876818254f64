"""From the fleet and the directory's answer to the few candidates a decision compares.

Considered are, of each depth the directory reports, the least loaded holders; the least loaded workers of all; and the
home of a fresh prefix (DESIGN 6). Pricing everybody would cost a millisecond at 256 workers and change nothing: a
worker that holds no more than another and has more queued is never the cheapest but for its memory, which the several
least loaded allow for.

What a worker has in its host store is nothing that its engine would find: it counts as what others could pull from it,
and only where `links` are given. No bridge can pull yet, so the service gives none.

Owns: nothing.   Must not know: prices, NATS, how a fleet is kept.   Units: blocks, tokens, ms."""

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from ..bus.blockkeys import reusable_blocks
from ..bus.home import home
from ..bus.messages import Holdings, Route
from .fleet import Available
from .learning import Learner
from .policy import Candidate, Policy, Pull, RequestShape, shared_tokens
from .transfer import Links

# The deepest depths that are looked at; in the worst case every worker is at its own.
MAX_LEVELS = 16


class Shortlist(NamedTuple):
    """What `policy.decide` gets, and for the journal: the depth its distinguishing block follows, the deepest that
    anybody holds, and who said so as of which event."""

    shape: RequestShape
    candidates: list[Candidate]
    shared_blocks: int
    held_blocks: int
    directory: str = ""
    stream_seq: int = 0


def shortlist(
    route: Route,
    available: list[Available],
    holdings: Holdings | None,
    shared_blocks: int,
    learner: Learner,
    policy: Policy,
    now: float,
    *,
    whole_fleet: bool = False,
    ordinal: int = 0,
    has_waited: bool = False,
    links: Links | None = None,
) -> Shortlist:
    """Candidates among at least one available worker. `holdings` is None when the directory did not answer: then the
    request is blind, and load alone decides. `has_waited`: a bridge gave it back since it had waited for long."""
    block_size = available[0].worker.block_size
    names = {one.name: one for one in available}
    levels = [
        (level.depth, held)
        for level in (holdings.levels if holdings else [])
        if level.tier == "gpu" and (held := [names[worker] for worker in level.workers if worker in names])
    ]
    held_blocks = levels[0][0] if levels else 0
    depths: dict[str, int] = {}
    if whole_fleet:
        chosen = dict(names)
    else:
        chosen = {one.name: one for one in _least_loaded(available, policy.least_loaded)}
        if any(one.only_reserved for one in chosen.values()):
            # Those are for cold requests, and what this one is turns out only beside others.
            unreserved = [one for one in available if not one.only_reserved]
            chosen.update((one.name, one) for one in _least_loaded(unreserved, policy.least_loaded))
    for position, (depth, held) in enumerate(levels):
        if not whole_fleet and position < MAX_LEVELS:
            chosen.update((one.name, one) for one in _least_loaded(held, policy.least_loaded, _by_use))
        depths.update((one.name, depth) for one in held if one.name in chosen)
    home_worker = ""
    if holdings is not None and held_blocks <= shared_blocks < len(route.keys) // 8:
        home_worker = _home(route.keys, shared_blocks, available)
        if home_worker not in chosen:
            chosen[home_worker] = names[home_worker]
            depths.update((home_worker, depth) for depth, held in levels for one in held if one.name == home_worker)
    reusable = reusable_blocks(route.prompt_tokens, block_size)
    trust = _trust(holdings, policy)
    announced = holdings.announced if holdings else {}
    sources = _sources(holdings, reusable, trust) if links is not None and holdings is not None else []
    candidates = []
    for one in chosen.values():
        worker, depth = one.worker, depths.get(one.name, 0)
        believed = trust.get(one.name, 1.0)
        blocks = min(depth, reusable)
        if believed != 1.0:
            blocks = int(blocks * believed)
        candidates.append(
            Candidate(
                one.name,
                blocks * block_size,
                one.queue_ms,
                worker.rho(now),
                worker.pinned_tokens,
                worker.free_tokens,
                learner.model_of(worker.worker_class),
                worker.load.worker_class,
                learner.speed_of(one.name, worker.incarnation, now),
                one.only_reserved,
                None if links is None else _offer(one.name, blocks, sources, block_size, links),
                depth,
                announced.get(one.name, 0),
                believed,
            )
        )
    shape = RequestShape(
        prompt_tokens=route.prompt_tokens,
        output_tokens=route.output_tokens,
        block_size=block_size,
        home=home_worker,
        blind=holdings is None,
        ordinal=ordinal,
        has_waited=has_waited,
        shared_tokens=shared_tokens(shared_blocks, block_size),
        fleet_rho=_mean_rho(available, now) if sources else 0.0,
    )
    if holdings is None:
        return Shortlist(shape, candidates, shared_blocks, held_blocks)
    return Shortlist(shape, candidates, shared_blocks, held_blocks, holdings.replica, holdings.stream_seq)


def _trust(holdings: Holdings | None, policy: Policy) -> dict[str, float]:
    """What share of its depth to believe, of each worker that is not believed whole."""
    if holdings is None:
        return {}
    # In this order NaN is 0.
    trust = {worker: min(1.0, max(0.0, share)) for worker, share in holdings.trust.items()}
    for worker in holdings.incomplete:
        trust[worker] = min(trust.get(worker, 1.0), policy.suspect_trust)
    return trust


def _sources(holdings: Holdings, reusable: int, trust: dict[str, float]) -> list[tuple[int, str]]:
    """(depth, worker) of all that could give blocks, in either tier, be they open to new work or not."""
    return [
        (int(min(level.depth, reusable) * trust.get(worker, 1.0)), worker)
        for level in holdings.levels
        for worker in level.workers
    ]


def _offer(worker: str, blocks: int, sources: list[tuple[int, str]], block_size: int, links: Links) -> Pull | None:
    """The most that another worker can give it beyond its `blocks`; of equals, the soonest."""
    others = [(depth, one) for depth, one in sources if one != worker and depth > blocks]
    if not others:
        return None
    deepest = max(depth for depth, _ in others)
    tokens = (deepest - blocks) * block_size
    offers = [(links.transfer_ms(one, worker, tokens), one) for depth, one in others if depth == deepest]
    transfer_ms, source = min(offers)
    return Pull(source, tokens, transfer_ms)


def _mean_rho(available: list[Available], now: float) -> float:
    total = 0.0
    for one in available:
        total += min(1.0, one.worker.rho(now))
    return total / len(available)


def _home(keys: bytes, shared_blocks: int, available: list[Available]) -> str:
    key = int.from_bytes(keys[8 * shared_blocks : 8 * shared_blocks + 8], "little")
    return home(key, [(one.name, one.worker.kv_tokens) for one in available])


def _by_load(one: Available) -> tuple[float, int, str]:
    return one.queue_ms, one.running, one.name


def _by_use(one: Available) -> tuple[bool, float, int, str]:
    """Of holders: reserved slots are not for those who come for what they hold."""
    return one.only_reserved, one.queue_ms, one.running, one.name


def _least_loaded(
    workers: list[Available], count: int, key: Callable[[Available], tuple[Any, ...]] = _by_load
) -> list[Available]:
    return workers if len(workers) <= count else heapq.nsmallest(count, workers, key=key)
