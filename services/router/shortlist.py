"""From the fleet and the directory's answer to the few candidates that a decision compares.

Who must be among them so that the decision is the one that all workers together would give, contenders.py finds. To
these come the home of a fresh prefix (DESIGN 6), who is computing the prompt already, and, so that people see what was
passed over, the least loaded of all and of those who hold it to each depth.

What a worker has in its host store is not on its GPU: it counts as what the worker, or others, could pull from it,
and only where `links` are given. No bridge can pull yet, so the service gives none; whom a pull would make the cheapest
of all may not be among the candidates.

Owns: nothing.   Must not know: prices, NATS, how a fleet is kept.   Units: blocks, tokens, ms."""

import math
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from ..bus.blockkeys import reusable_blocks
from ..bus.home import home
from ..bus.messages import Holdings, Level, Route
from .contenders import Group, Speeds, contenders
from .cost import PrefillModel
from .fleet import Available
from .learning import Learner
from .policy import Candidate, Policy, Pull, RequestShape, shared_tokens
from .transfer import Links

# Of holders, beside those that can be chosen; the deepest first. In the worst case every worker has a depth of its own.
MAX_HOLDERS = 12


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
    by_queue = sorted(available, key=attrgetter("queue_ms"))
    levels = [(level.depth, level.workers) for level in (holdings.levels if holdings else ()) if level.tier == "gpu"]
    depths = {worker: depth for depth, workers in levels for worker in workers}
    names = {one.name: one for one in available}
    held_blocks = max((depth for worker, depth in depths.items() if worker in names), default=0)
    reusable = reusable_blocks(route.prompt_tokens, block_size)
    trust = _trust(holdings, policy)
    announced = holdings.announced if holdings else {}
    sources = _sources(holdings, reusable, trust) if links is not None and holdings is not None else []
    in_reach = max([held_blocks, *(depth for depth, _ in sources)])
    home_worker = ""
    if holdings is not None and in_reach <= shared_blocks < len(route.keys) // 8:
        home_worker = _home(route.keys, shared_blocks, available)
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
    usable = _usable(depths, reusable, trust)

    def speed_of(one: Available) -> float:
        return learner.speed_of(one.name, one.worker.incarnation, now)

    chosen = names
    if not whole_fleet:
        groups = _groups(by_queue, usable, block_size, learner)
        odd = learner.odd_speeds()
        speeds = Speeds(frozenset(odd), speed_of, min([1.0, *odd.values()]))
        found = by_queue[: policy.least_loaded]
        found += contenders(shape, groups, policy, speeds, now)
        found += _holders(groups, policy.least_loaded)
        chosen = {one.name: one for one in found}
        favoured = _at_it(shape, names, depths, announced, reusable)
        if home_worker:
            favoured.append(home_worker)
        chosen.update((name, names[name]) for name in favoured)
    candidates = []
    for one in chosen.values():
        worker, blocks = one.worker, usable.get(one.name, 0)
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
                speed_of(one),
                one.only_reserved,
                None if links is None else _offer(one.name, blocks, sources, block_size, links, now),
                depths.get(one.name, 0),
                announced.get(one.name, 0),
                trust.get(one.name, 1.0),
            )
        )
    if holdings is None:
        return Shortlist(shape, candidates, shared_blocks, held_blocks)
    return Shortlist(shape, candidates, shared_blocks, held_blocks, holdings.replica, holdings.stream_seq)


def _usable(depths: dict[str, int], reusable: int, trust: dict[str, float]) -> dict[str, int]:
    """Of how many blocks each worker is believed that its engine will find them."""
    usable = {worker: depth if depth < reusable else reusable for worker, depth in depths.items()}
    for worker, share in trust.items():
        if worker in usable:
            usable[worker] = int(usable[worker] * share)
    return usable


def _groups(by_queue: list[Available], usable: dict[str, int], block_size: int, learner: Learner) -> list[Group]:
    """Those that find most first. All workers are of one model and revision: their class is its label."""
    alike: dict[tuple[int, str], list[Available]] = {}
    for one in by_queue:
        key = usable.get(one.name, 0), one.worker.load.worker_class
        group = alike.get(key)
        if group is None:
            alike[key] = [one]
        else:
            group.append(one)
    models: dict[str, PrefillModel] = {}
    for (_, label), workers in alike.items():
        if label not in models:
            models[label] = learner.model_of(workers[0].worker.worker_class)
    deepest_first = sorted(alike.items(), key=_blocks, reverse=True)
    return [Group(blocks * block_size, models[label], workers) for (blocks, label), workers in deepest_first]


def _blocks(group: tuple[tuple[int, str], list[Available]]) -> int:
    return group[0][0]


def _holders(groups: list[Group], count: int) -> list[Available]:
    """Of those who find something, deepest first, the `count` least loaded of each depth."""
    holders: list[Available] = []
    for group in groups:
        if not group.cached_tokens or len(holders) >= MAX_HOLDERS:
            break
        holders += group.workers[:count]
    return holders


def _at_it(
    shape: RequestShape, names: Collection[str], depths: dict[str, int], announced: dict[str, int], reusable: int
) -> list[str]:
    """Who is computing what tells this prompt apart; if somebody has it, one who has."""
    depth = min(shape.shared_tokens // shape.block_size + 1, reusable)
    at_it = []
    for worker, held in depths.items():
        if depth <= held and worker in names:
            if held - announced.get(worker, 0) >= depth:
                return [worker]
            at_it.append(worker)
    return at_it


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
    """(depth, worker) of all that could give blocks, in either tier, be they open to new work or not. What is only
    announced cannot be given yet."""
    return [
        (int(min(level.depth - _not_there(holdings, level, worker), reusable) * trust.get(worker, 1.0)), worker)
        for level in holdings.levels
        for worker in level.workers
    ]


def _not_there(holdings: Holdings, level: Level, worker: str) -> int:
    return holdings.announced.get(worker, 0) if level.tier == "gpu" else 0


def _offer(
    worker: str, blocks: int, sources: list[tuple[int, str]], block_size: int, links: Links, now: float
) -> Pull | None:
    """The most that can come to it beyond its `blocks`; of equals, the soonest.

    What its own host store has comes from there, be there more elsewhere or not."""
    own = max((depth for depth, one in sources if one == worker), default=0)
    own_tokens = max(0, own - blocks) * block_size
    own_ms = links.transfer_ms(worker, worker, own_tokens) if own_tokens else 0.0
    if own_ms == math.inf:
        own_tokens, own_ms = 0, 0.0
    held = blocks + own_tokens // block_size
    others = [(depth, one) for depth, one in sources if one != worker and depth > held]
    if others:
        deepest = max(depth for depth, _ in others)
        tokens = (deepest - held) * block_size
        transfer_ms, source = min(
            (links.wait_ms(one, worker, now) + links.transfer_ms(one, worker, tokens), one)
            for depth, one in others
            if depth == deepest
        )
        if transfer_ms < math.inf:
            return Pull(source, own_tokens + tokens, max(own_ms, transfer_ms))
    return Pull(worker, own_tokens, own_ms) if own_tokens else None


def _mean_rho(available: list[Available], now: float) -> float:
    total = 0.0
    for one in available:
        total += min(1.0, one.worker.rho(now))
    return total / len(available)


def _home(keys: bytes, shared_blocks: int, available: list[Available]) -> str:
    key = int.from_bytes(keys[8 * shared_blocks : 8 * shared_blocks + 8], "little")
    return home(key, [(one.name, one.worker.load.kv_tokens) for one in available])
