"""Rules that other routers choose by, to compare with: each as its authors publish it, and no weaker.

What a rule looks at is no worse here than where it comes from: hits are those of the production directory and not of
an approximate tree, and queues are those that bridges report. Where a router keeps a tree of what it sent, a hit is
what was dispatched, too; where it goes by engines' events alone, so does the rule. So what is compared is the rule.

Owns: the rules by name, their parameters and where these come from.
Must not know: wires, engines, how their knowledge is kept.   Units: tokens, ms, seconds."""

import bisect
import enum
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from ..bus.errors import ConfigInvalid
from ..router import cost
from ..router.policy import Candidate, RequestShape
from .chance import Chance
from .inflight import InFlight
from .workload import Arrival

_hash = xxhash.xxh3_64_intdigest

# Of Preble: how far back a worker's load is counted.
HISTORY_S = 180.0
# Of a decode step, what one more sequence of a batch costs besides its context: a share of the step.
_DECODE_STEP_MS = 6.0
_DECODE_BATCH = 16


class Truth(Protocol):
    """What nobody can know: workers as they are in this instant, with what is on its way to them."""

    def queue_ms(self, worker: str) -> float: ...
    def cached_tokens(self, worker: str, arrival: Arrival) -> int: ...


class Sight(NamedTuple):
    """What a rule may look at. `candidates` are all workers, by name; `keys` those of the prompt's full blocks."""

    request: RequestShape
    arrival: Arrival
    keys: list[int]
    candidates: list[Candidate]
    in_flight: InFlight
    now: float
    truth: Truth


class Rule(Protocol):
    """One router's rule, with what it remembers."""

    def choose(self, sight: Sight) -> str: ...


MakeRule = Callable[[int], Rule]
"""A router's own rule, of a seed."""


class Cache(enum.Enum):
    """What engines have under a rule. All but `OWN` are for bounds (bounds.py): one cache for all of them."""

    OWN = "own"
    POOLED = "pooled"
    UNBOUNDED = "unbounded"


class Source(NamedTuple):
    """A rule by name: how one is made (of a parameter, a seed), its published default, and where it is from."""

    make: Callable[[float, int], Rule]
    default: float
    parameter: str
    description: str
    cache: Cache = Cache.OWN


# --- rules that look at no cache ---


class _InTurn:
    def __init__(self, _parameter: float, _seed: int) -> None:
        pass

    def choose(self, sight: Sight) -> str:
        return sight.candidates[sight.request.ordinal % len(sight.candidates)].worker


class _Random:
    def __init__(self, _parameter: float, seed: int) -> None:
        self._chance = Chance(seed, "rule")

    def choose(self, sight: Sight) -> str:
        return sight.candidates[self._chance.below(len(sight.candidates))].worker


class _LeastLoaded:
    def __init__(self, _parameter: float, _seed: int) -> None:
        pass

    def choose(self, sight: Sight) -> str:
        return min(sight.candidates, key=lambda one: (one.queue_ms, one.pinned_tokens, one.worker)).worker


class _LeastRequests:
    def __init__(self, _parameter: float, _seed: int) -> None:
        pass

    def choose(self, sight: Sight) -> str:
        return _fewest_requests(sight, sight.candidates)


class _PowerOfTwo:
    def __init__(self, _parameter: float, seed: int) -> None:
        self._chance = Chance(seed, "rule")

    def choose(self, sight: Sight) -> str:
        return _fewer_of_two(sight, self._chance)


# --- rules that do ---


class _ConsistentHash:
    """A ring of 160 points a worker; the key is that of the first `blocks` blocks that distinguish the prompt, those
    that most traffic shares not counted."""

    def __init__(self, blocks: float, _seed: int) -> None:
        self._blocks = int(blocks)
        self._ring: list[tuple[int, str]] = []
        self._of: list[str] = []

    def choose(self, sight: Sight) -> str:
        names = [one.worker for one in sight.candidates]
        if names != self._of:
            self._of = names
            self._ring = sorted(
                (_hash(struct.pack("<q", point), _hash(n.encode())), n) for n in names for point in range(160)
            )
        keys, size = sight.keys, sight.request.block_size
        if not keys:
            return names[sight.request.ordinal % len(names)]
        depth = min(len(keys), sight.request.shared_tokens // size + self._blocks)
        place = bisect.bisect_left(self._ring, (keys[depth - 1], ""))
        return self._ring[place % len(self._ring)][1]


class _LongestHit:
    def __init__(self, _parameter: float, _seed: int) -> None:
        pass

    def choose(self, sight: Sight) -> str:
        return _fewest_requests(sight, _longest(sight.candidates))


class _Threshold:
    """The longest hit if it is at least this share of the prompt, else the fewer requests of two drawn; while requests
    in flight differ by more than 64 and by more than 1.5 times, the fewest requests."""

    ABSOLUTE, RELATIVE = 64, 1.5

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._chance = Chance(seed, "rule")

    def choose(self, sight: Sight) -> str:
        counts = [sight.in_flight.requests(one.worker) for one in sight.candidates]
        least, most = min(counts), max(counts)
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            return _fewest_requests(sight, sight.candidates)
        longest = _longest(sight.candidates)
        if longest[0].cached_tokens > self._share * sight.request.prompt_tokens:
            return _fewest_requests(sight, longest)
        return _fewer_of_two(sight, self._chance)


class _Overlap:
    """Least of weight x blocks to prefill + blocks in use, both with this request counted in. Hits are those that
    engines reported: what was sent and is not reported yet is work to its router, and no hit."""

    SEES_ANNOUNCED = False

    def __init__(self, weight: float, _seed: int) -> None:
        self._weight = weight

    def choose(self, sight: Sight) -> str:
        request, books = sight.request, sight.in_flight
        size = request.block_size

        def logit(one: Candidate) -> tuple[float, int, str]:
            cached = one.cached_tokens if self.SEES_ANNOUNCED else _reported_tokens(one, size)
            prefill = (books.prefill_tokens(one.worker) + request.prompt_tokens - cached) / size
            used = books.blocks_with(one.worker, sight.keys, request.prompt_tokens, size)
            return self._weight * prefill + used, books.placed_tokens(one.worker), one.worker

        return min(sight.candidates, key=logit).worker


class _OverlapAnnounced(_Overlap):
    """The same with what it lacks: what was sent counts as held."""

    SEES_ANNOUNCED = True


class _ExploitExplore:
    """Exploit when more is cached than remains: the least loaded of those with the longest hit, unless it has more than
    `imbalance` times the load of the least loaded. Else explore: least of load + eviction + prefill.

    Load is engine time of what was sent there in the last three minutes; eviction the prefill time of the tokens that
    must go, weighted by the worker's share of reused tokens."""

    def __init__(self, imbalance: float, _seed: int) -> None:
        self._imbalance = imbalance
        self._asked: dict[str, int] = {}
        self._reused: dict[str, int] = {}

    def choose(self, sight: Sight) -> str:
        request, books, now = sight.request, sight.in_flight, sight.now
        load = {one.worker: books.recent_ms(one.worker, now) for one in sight.candidates}
        longest = _longest(sight.candidates)
        chosen = min(sight.candidates, key=lambda one: (load[one.worker] + self._adds_ms(request, one), one.worker))
        if 2 * longest[0].cached_tokens > request.prompt_tokens:
            warm = min(longest, key=lambda one: (load[one.worker], one.worker))
            if load[warm.worker] <= self._imbalance * min(load.values()) or len(longest) == len(sight.candidates):
                chosen = warm
        self._asked[chosen.worker] = self._asked.get(chosen.worker, 0) + request.prompt_tokens
        self._reused[chosen.worker] = self._reused.get(chosen.worker, 0) + chosen.cached_tokens
        return chosen.worker

    def _adds_ms(self, request: RequestShape, one: Candidate) -> float:
        uncached = max(1, request.prompt_tokens - one.cached_tokens)
        reuse = self._reused.get(one.worker, 0) / max(1, self._asked.get(one.worker, 0))
        evicted_ms = reuse * cost.kv_price_ms(one.model, uncached, request.prompt_tokens)
        return evicted_ms + cost.prefill_ms(one.model, uncached, request.prompt_tokens)


class _Oracle:
    """The soonest first token, were nobody to come after: true queues, true caches. Greedy, so no bound."""

    def __init__(self, _parameter: float, _seed: int) -> None:
        pass

    def choose(self, sight: Sight) -> str:
        request, truth = sight.request, sight.truth

        def ttft_ms(one: Candidate) -> tuple[float, str]:
            cached = truth.cached_tokens(one.worker, sight.arrival)
            uncached = max(1, request.prompt_tokens - cached)
            return truth.queue_ms(one.worker) + cost.prefill_ms(one.model, uncached, request.prompt_tokens), one.worker

        return min(sight.candidates, key=ttft_ms).worker


def compute_ms(request: RequestShape, candidate: Candidate) -> float:
    """Engine time of a request, as exploit/explore counts it: its prefill and its share of the steps that decode it."""
    uncached = max(1, request.prompt_tokens - candidate.cached_tokens)
    return cost.prefill_ms(candidate.model, uncached, request.prompt_tokens) + (
        request.output_tokens * _DECODE_STEP_MS / _DECODE_BATCH
    )


def _reported_tokens(one: Candidate, block_size: int) -> int:
    """Of what it finds there, what its engine has reported."""
    return min(one.cached_tokens, (one.held_blocks - one.announced_blocks) * block_size)


def _longest(candidates: list[Candidate]) -> list[Candidate]:
    most = max(one.cached_tokens for one in candidates)
    return [one for one in candidates if one.cached_tokens == most]


def _fewest_requests(sight: Sight, among: list[Candidate]) -> str:
    return min(among, key=lambda one: (sight.in_flight.requests(one.worker), one.worker)).worker


def _fewer_of_two(sight: Sight, chance: Chance) -> str:
    """Of equals the first that was drawn: by name, an idle fleet would never use its last worker."""
    count = len(sight.candidates)
    first = chance.below(count)
    second = (first + 1 + chance.below(max(1, count - 1))) % count
    names = sight.candidates[first].worker, sight.candidates[second].worker
    return min(names, key=sight.in_flight.requests)


RULES: dict[str, Source] = {
    "round-robin": Source(_InTurn, 0, "", "one after the other, by name"),
    "random": Source(_Random, 0, "", "drawn evenly"),
    "least-loaded": Source(_LeastLoaded, 0, "", "the least prefill work queued, as bridges report it"),
    "least-requests": Source(_LeastRequests, 0, "", "the fewest requests in flight (least connections)"),
    "power-of-two": Source(_PowerOfTwo, 0, "", "the fewer requests in flight, of two drawn"),
    "consistent-hash": Source(
        _ConsistentHash, 1, "blocks", "a hash ring keyed by the first blocks that distinguish a prompt"
    ),
    "longest-hit": Source(_LongestHit, 0, "", "always who holds most of it; of equals, the fewest requests"),
    "threshold": Source(
        _Threshold,
        0.3,
        "share of the prompt",
        "threshold cache-aware, as SGLang's gateway: 0.3, 64 requests, 1.5 times, the fewer of two below it",
    ),
    "overlap": Source(
        _Overlap, 1, "weight", "overlap minus load in blocks, as NVIDIA Dynamo's router: weight 1, temperature 0"
    ),
    "overlap-announced": Source(
        _OverlapAnnounced, 1, "weight", "the same, given what of our own router helps it most: announced placements"
    ),
    "exploit-explore": Source(
        _ExploitExplore,
        2,
        "imbalance",
        "Preble's E2: exploit when more is cached than remains, else explore; the imbalance that ends exploiting is our"
        " choice, and its later rebalancing and replication are left out",
    ),
    "oracle": Source(_Oracle, 0, "", "greedy with true queues and caches, which no router can know"),
    "pooled-lru": Source(
        _LeastLoaded, 0, "", "a yardstick: one LRU cache of all workers' size, free to all; by load", Cache.POOLED
    ),
    "infinite": Source(
        _LeastLoaded, 0, "", "a bound: one cache without end, free to all; placed by load", Cache.UNBOUNDED
    ),
}


class Ruled(msgspec.Struct, frozen=True):
    """A rule and its parameter, as a run is set up with: `overlap:64`, or `overlap` for the published default."""

    name: str
    parameter: float

    @property
    def label(self) -> str:
        source = RULES[self.name]
        return f"{self.name}:{self.parameter:g}" if source.parameter else self.name

    def __call__(self, seed: int) -> Rule:
        return RULES[self.name].make(self.parameter, seed)


def cache_of(policy: object) -> Cache:
    """What a run with this policy or rule gives its engines."""
    return RULES[policy.name].cache if isinstance(policy, Ruled) else Cache.OWN


def ruled(text: str) -> Ruled:
    """:raises ConfigInvalid: no such rule, or it takes no such parameter."""
    name, _, given = text.partition(":")
    source = RULES.get(name)
    if source is None:
        raise ConfigInvalid(f"{name[:80]!r} is no rule.", field="policies", remedy=f"Use one of: {', '.join(RULES)}.")
    if not given:
        return Ruled(name, source.default)
    if not source.parameter:
        raise ConfigInvalid(f"{name} takes no parameter.", field="policies", remedy=f"Write {name} alone.")
    try:
        parameter = float(given)
    except ValueError:
        parameter = -1.0
    if not 0 <= parameter <= 1e6:
        raise ConfigInvalid(
            f"{given[:80]!r} is not a {source.parameter}.", field="policies", remedy="Give a number from 0 to 1e6."
        )
    return Ruled(name, parameter)
