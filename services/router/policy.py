"""Which worker answers a request: a pure choice among candidates, and every number behind it.

`decide` only compares; asking it changes nothing, so a decision can be replayed, and another policy can be tried on it.
Everything it looks at is in its arguments, and journal.py records them.

Owns: the policies by name, the order of candidates, the names of decisions.
Must not know: how candidates were found, who can pull from whom, NATS, clocks, what an engine is.
Units: ms, tokens.   Source: DESIGN 6, facts/policy.md.

Decisions, by what was chosen:
    prefer-warm-worker   it holds all full blocks but at most the last
    partial-hit          it holds at least one block
    remote-pull          what it lacks comes from another worker, sooner than it would be computed
    home-worker          nobody holds this prefix yet, and this is its home
    cold-reserve         nothing of use is there, and only slots kept for such requests are free
    balanced-cold        nobody holds anything of use: by load
    blind                the directory did not answer, or is not believed (credit.py): by load
    round-robin          the policy of that name looks at neither caches nor load
and, where a worker that holds more was passed over, by why:
    spill-max-wait       its queue is over `max_warm_wait_ms`, its free slots are kept for cold requests, or the request
                         has waited there
    spill-margin         it is later by more than the hit is worth, or than `margin_ms` allows
    spill-memory         it would be chosen but for its wait for KV memory"""

import bisect
import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ..bus.blockkeys import Warmth, reusable_blocks, warmth
from ..bus.errors import ConfigInvalid, told_by_msgspec
from . import cost
from .cost import PrefillModel

# Of a prefix that most traffic shares this much is every worker's business. A longer one is worth its affinity: 8192
# tokens are 140 ms of prefill.
MAX_SHARED_TOKENS = 8192
# More than sums of floats in another order differ by.
_HOME_LEAD_MS = 1e-3
# As good as no limit (11 days), and a number in JSON.
NO_LIMIT_MS = 1e9

_BY_WARMTH: dict[Warmth, str] = {
    "warm": "prefer-warm-worker",
    "partial": "partial-hit",
    "cold": "balanced-cold",
}

# Beyond it sums are infinite or nothing of a term is left in them, and no JSON has a word for that.
_Ms = Annotated[float, Meta(ge=0, le=NO_LIMIT_MS)]
# More digits than a float has are no weight that a record could be read with.
_Tokens = Annotated[int, Meta(gt=0, le=1 << 40)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named policy and its weights; JSON in the bucket POLICIES. The defaults are "F" of facts/policy.md."""

    name: str = "prefix-aware"
    # Whoever changes a weight names the result; decisions and metrics speak of it.
    version: Annotated[str, Meta(max_length=64, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = "default"
    # Per ms of prefill: what creating KV costs those whose KV it evicts.
    new_kv_price: Annotated[float, Meta(ge=0, le=10)] = 0.3
    # The same for what is pulled from another worker, in addition, times rho/(1-rho) of the fleet: it is there twice
    # then, and evicts what is there once and will be computed again.
    copy_price: Annotated[float, Meta(ge=0, le=10)] = 1.0
    # Per ms of work queued on a worker: the wait for it (`cost.wait_ms`).
    queue_share: Annotated[float, Meta(ge=0, le=10)] = 0.7
    # In favour of who is computing what nobody holds yet: 32 siblings of a short prompt are 20 ms of work.
    sibling_bonus_ms: _Ms = 30.0
    # At most this much later than the best cold candidate may a warm choice be; null: the prices alone decide. A cap
    # near 0 would void `new_kv_price` and the externality, which are there to accept a later start.
    margin_ms: _Ms | None = None
    # The longest queue a warm choice may wait in while somebody else's is shorter ...
    max_warm_wait_ms: _Ms = 2000.0
    # ... for an expected output up to this; longer ones get the share long_output_tokens / output of it.
    long_output_tokens: _Tokens = 1024
    # Per ms that those who decode there add to its prefill: what it costs them in turn, and itself once it decodes
    # beside them.
    decode_price: Annotated[float, Meta(ge=0, le=10)] = 3.0
    externality_cap: Annotated[float, Meta(ge=0, le=100)] = 4.0
    # Differences in cached tokens below this are not spoken of as leaving a warm worker.
    min_reuse_tokens: _Tokens = 64
    # A bridge whose true queue is longer than predicted by this much more than the runner-up's lead gives back.
    rechoose_ms: _Ms = 50.0
    # Nothing is pulled while the fleet is busier than this: the copy evicts what others need (facts/policy.md).
    max_pull_rho: Annotated[float, Meta(ge=0, le=1)] = 0.8
    # The time in which pinned KV is taken to be given back: 200 output tokens at 20 ms.
    kv_turnover_ms: _Ms = 4000.0
    # Share of the depth to believe of a worker whose entries the directory doubts.
    suspect_trust: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # Least loaded workers among the candidates, and least loaded holders of each depth.
    least_loaded: Annotated[int, Meta(ge=1, le=64)] = 4

    @property
    def label(self) -> str:
        """What decisions and metrics call it."""
        return f"{self.name}/{self.version}"


class RequestShape(msgspec.Struct, frozen=True):
    """What a decision needs to know of a request. `home` is the rendezvous home of a fresh prefix, empty if somebody
    holds it; `ordinal` counts the requests of this router. `has_waited`: a worker gave it back since it had waited
    there for as long as a hit is worth. `fleet_rho` is the workers' mean, told where there is something to pull.
    `shared_tokens` of the prompt are common to most traffic."""

    prompt_tokens: int
    output_tokens: int
    block_size: int
    home: str = ""
    blind: bool = False
    ordinal: int = 0
    has_waited: bool = False
    fleet_rho: float = 0.0
    shared_tokens: int = 0


class Pull(msgspec.Struct, frozen=True):
    """An offer: `source` has `tokens` of the prompt beyond what the candidate holds, and would give them in
    `transfer_ms`. A candidate that is its own source has them in its host store."""

    source: str
    tokens: int
    transfer_ms: float


class Candidate(msgspec.Struct, frozen=True):
    """A worker as it looks to this request. `queue_ms` is prefill work ahead; `rho` the share of time it is busy with
    prefill; `pinned_tokens` the KV in use; `cached_tokens` never exceeds what an engine can serve.

    `model` is that of its `worker_class`, `speed` its own factor of it (over 1: slow). `only_reserved`: its free slots
    are kept for requests that find nothing. `held_blocks`, `announced_blocks` of them not there yet, and `trust` are
    what `cached_tokens` was made from."""

    worker: str
    cached_tokens: int
    queue_ms: float
    rho: float
    pinned_tokens: int
    free_tokens: int
    model: PrefillModel
    worker_class: str = ""
    speed: float = 1.0
    only_reserved: bool = False
    pull: Pull | None = None
    held_blocks: int = 0
    announced_blocks: int = 0
    trust: float = 1.0


class Terms(NamedTuple):
    """A candidate's price, term by term, in ms; `transfer_ms` is 0 unless it would pull. `saved_ms` is how much longer
    its prefill would be if it had nothing of the prompt."""

    candidate: Candidate
    wait_ms: float
    work_ms: float
    prefill_ms: float
    interference_ms: float
    memory_wait_ms: float
    new_kv_ms: float
    decode_ms: float
    externality_ms: float
    home_bonus_ms: float
    ttft_ms: float
    cost_ms: float
    transfer_ms: float
    saved_ms: float
    pulls: bool

    @property
    def found_tokens(self) -> int:
        """Of the prompt, what is not computed there."""
        pull = self.candidate.pull
        return self.candidate.cached_tokens + (pull.tokens if pull is not None and self.pulls else 0)

    @property
    def copies(self) -> bool:
        """Whether it pulls from another worker."""
        pull = self.candidate.pull
        return self.pulls and pull is not None and pull.source != self.candidate.worker

    @property
    def own_tokens(self) -> int:
        """Of the prompt, what the worker has itself, on its GPU or in its host store."""
        return self.candidate.cached_tokens if self.copies else self.found_tokens


class Decision(msgspec.Struct, frozen=True):
    """The choice. `work_ms` is what it adds to the worker's queue of `queue_ms`; `max_queue_ms` the longest true queue
    with which the choice still stands. `ranking` starts with the chosen one and goes on in failover order.

    `is_warm` requests leave reserved slots alone; one that is there for its hit waits at most `max_wait_ms` (0: as long
    as it takes), and stands only where at least `min_held_blocks` are held."""

    worker: str
    name: str
    predicted_tokens: int
    work_ms: float
    queue_ms: float
    max_queue_ms: float
    ranking: list[Terms]
    decided_at: float
    is_warm: bool = False
    max_wait_ms: float = 0.0
    min_held_blocks: int = 0

    @property
    def pull(self) -> Pull | None:
        """What the chosen worker is to pull first."""
        return self.ranking[0].candidate.pull if self.ranking[0].pulls else None

    @property
    def order(self) -> list[str]:
        return [terms.candidate.worker for terms in self.ranking]


class Scheme(NamedTuple):
    """A policy by name: its function, and whether it must see every worker rather than a shortlist."""

    decide: Callable[[RequestShape, list[Candidate], Policy, float], Decision]
    whole_fleet: bool


def decide(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    """The choice among at least one candidate. Deterministic: equal arguments, equal decision.

    Ties go to the least queued work, then to the home, then to the name."""
    return SCHEMES[policy.name].decide(request, candidates, policy, now)


def parse(data: bytes | str) -> Policy:
    """A policy from its JSON. :raises ConfigInvalid: an unknown field or name, or a weight out of its range."""
    try:
        policy = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        what, where = told_by_msgspec(exc)
        raise ConfigInvalid(what, field=f"policy.{where}" if where else "policy", remedy=CORRECT) from exc
    return known(policy)


def known(policy: Policy) -> Policy:
    """The policy itself. :raises ConfigInvalid: there is none of this name."""
    if policy.name not in SCHEMES:
        raise ConfigInvalid(
            f"{policy.name[:80]!r} is not a policy.", field="policy.name", remedy=f"Use one of: {', '.join(SCHEMES)}."
        )
    return policy


def price(request: RequestShape, candidate: Candidate, policy: Policy, *, is_at_it: bool = False) -> Terms:
    """All terms of one candidate, which pulls if that is cheaper; `is_at_it`: as `_who_is_at_it` says."""
    computing = _price(request, candidate, policy, None, is_at_it)
    if candidate.pull is None:
        return computing
    is_copy = candidate.pull.source != candidate.worker
    if is_copy and (candidate.only_reserved or request.fleet_rho > policy.max_pull_rho):
        return computing
    pulling = _price(request, candidate, policy, candidate.pull, is_at_it)
    return pulling if pulling.cost_ms < computing.cost_ms else computing


def _price(
    request: RequestShape, candidate: Candidate, policy: Policy, pull: Pull | None, is_at_it: bool = False
) -> Terms:
    """At least one token of a prompt is always computed. What is pulled is new KV there like what is computed, and has
    the same price: it evicts as much."""
    model, speed, prompt = candidate.model, candidate.speed, request.prompt_tokens
    created = max(1, prompt - candidate.cached_tokens)
    uncached = created if pull is None else max(1, created - pull.tokens)
    transfer_ms = 0.0 if pull is None else pull.transfer_ms
    prefill_ms = speed * cost.prefill_ms(model, uncached, prompt)
    interference_ms = speed * cost.interference_ms(model, uncached, candidate.pinned_tokens)
    memory_wait_ms = cost.memory_wait_ms(
        created + request.output_tokens, candidate.free_tokens, candidate.pinned_tokens, policy.kv_turnover_ms
    )
    new_kv_ms = policy.new_kv_price * speed * cost.kv_price_ms(model, created, prompt)
    if pull is not None and pull.source != candidate.worker:
        copied_ms = speed * cost.kv_price_ms(model, created - uncached, prompt - uncached)
        new_kv_ms += policy.copy_price * cost.externality(request.fleet_rho, policy.externality_cap) * copied_ms
    work_ms = speed * cost.work_ms(model, uncached, prompt)
    externality_ms = cost.externality(candidate.rho, policy.externality_cap) * work_ms
    home_bonus_ms = policy.sibling_bonus_ms if is_at_it else _home_bonus_ms(request, candidate, policy)
    wait_ms = cost.wait_ms(model, candidate.queue_ms, policy.queue_share)
    ttft_ms = max(wait_ms, transfer_ms) + prefill_ms + interference_ms + memory_wait_ms
    decode_ms = policy.decode_price * interference_ms
    cost_ms = ttft_ms + new_kv_ms + decode_ms + externality_ms - home_bonus_ms
    return Terms(
        candidate,
        wait_ms,
        work_ms,
        prefill_ms,
        interference_ms,
        memory_wait_ms,
        new_kv_ms,
        decode_ms,
        externality_ms,
        home_bonus_ms,
        ttft_ms,
        cost_ms,
        transfer_ms,
        speed * cost.prefill_ms(model, prompt, prompt) - prefill_ms,
        pull is not None,
    )


def _home_bonus_ms(request: RequestShape, candidate: Candidate, policy: Policy) -> float:
    """The price of what the home of a fresh prefix lacks of that which most traffic shares.

    The first request there pays for all that come after it; were the price its own, a system prompt of 2000 tokens
    would keep all sessions on the worker that computed it first. What is as dear then but for a rounding is the home's:
    all else being equal, later sessions find it there."""
    if candidate.worker != request.home or not request.shared_tokens:
        return 0.0
    lacking = max(0, request.shared_tokens - candidate.cached_tokens)
    shared_ms = candidate.speed * cost.kv_price_ms(candidate.model, lacking, request.shared_tokens)
    return (1.0 + policy.new_kv_price) * shared_ms + _HOME_LEAD_MS


def _who_is_at_it(request: RequestShape, candidates: list[Candidate]) -> list[str]:
    """The workers that are computing what tells this prompt apart, as long as nobody has it.

    Each sibling of a burst has its last block to compute, and the work of those before it counts as queued. Of a prompt
    of 2000 tokens, which is computed in 34 ms, the twentieth would find another worker that begins at once cheaper, and
    compute all of it there. Where all of the prompt is common to most traffic, its last block stands for what tells it
    apart: so is the only prompt of all traffic, once four have come."""
    depth = min(
        request.shared_tokens // request.block_size + 1, reusable_blocks(request.prompt_tokens, request.block_size)
    )
    if not depth or any(one.held_blocks - one.announced_blocks >= depth for one in candidates):
        return []
    return [one.worker for one in candidates if one.held_blocks >= depth]


def shared_tokens(shared_blocks: int, block_size: int) -> int:
    """What of a shared prefix counts as such."""
    return min(MAX_SHARED_TOKENS, shared_blocks * block_size)


def warm_wait_ms(policy: Policy, output_tokens: int) -> float:
    """The longest queue a warm choice may wait in: who stays long on a hot worker should not also wait long for it."""
    if output_tokens <= policy.long_output_tokens:
        return policy.max_warm_wait_ms
    return policy.max_warm_wait_ms * policy.long_output_tokens / output_tokens


def is_warm(request: RequestShape, cached: int, floor_tokens: int) -> bool:
    """Whether it would be there for the cache: it finds more than anywhere (`floor_tokens`), or most of itself.

    A system prompt that all hold makes nobody warm; a long document that all hold does, and those who ask about it may
    not fill the slots that are kept for others."""
    return cached > floor_tokens or 2 * cached >= request.prompt_tokens


def _prefix_aware(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    at_it = _who_is_at_it(request, candidates)
    ranked = [price(request, candidate, policy, is_at_it=candidate.worker in at_it) for candidate in candidates]
    ranked.sort(key=functools.partial(_by_cost, request.home))
    floor_tokens = min(terms.candidate.cached_tokens for terms in ranked)
    chosen, barred_because = _first_permitted(request, ranked, policy, floor_tokens)
    name = _name(request, chosen, ranked, barred_because, policy)
    if chosen is not ranked[0]:
        ranked.remove(chosen)
        ranked.insert(0, chosen)
    max_queue_ms, max_wait_ms = _bounds(request, ranked, policy, floor_tokens)
    min_held_blocks = _min_held_blocks(request, ranked, policy)
    return _decision(request, name, ranked, floor_tokens, max_queue_ms, max_wait_ms, min_held_blocks, now)


def _round_robin(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    """The next worker by name, whatever it holds; the others follow in turn."""
    ranked = [_price(request, candidate, policy, None) for candidate in sorted(candidates, key=_by_name)]
    first = request.ordinal % len(ranked)
    floor_tokens = min(terms.candidate.cached_tokens for terms in ranked)
    ranked = ranked[first:] + ranked[:first]
    return _decision(request, "round-robin", ranked, floor_tokens, NO_LIMIT_MS, 0.0, 0, now)


def _decision(
    request: RequestShape,
    name: str,
    ranking: list[Terms],
    floor_tokens: int,
    max_queue_ms: float,
    max_wait_ms: float,
    min_held_blocks: int,
    now: float,
) -> Decision:
    chosen = ranking[0]
    candidate = chosen.candidate
    return Decision(
        worker=candidate.worker,
        name=name,
        predicted_tokens=chosen.found_tokens,
        work_ms=chosen.work_ms,
        queue_ms=candidate.queue_ms,
        max_queue_ms=max_queue_ms,
        ranking=ranking,
        decided_at=now,
        is_warm=is_warm(request, candidate.cached_tokens, floor_tokens),
        max_wait_ms=max_wait_ms,
        min_held_blocks=min_held_blocks,
    )


class Caps(NamedTuple):
    """What bars those who find more than `floor_tokens`, the least that anybody finds: a queue over `max_wait_ms`, if
    that of somebody is not, and a first token later than `latest_ms`."""

    floor_tokens: int
    least_queue_ms: float
    max_wait_ms: float
    latest_ms: float


def caps_of(request: RequestShape, policy: Policy, floor_tokens: int, least_queue_ms: float, soonest_ms: float) -> Caps:
    """`soonest_ms` is the first TTFT of those who find no more than `floor_tokens`."""
    max_wait_ms = least_queue_ms if request.has_waited else warm_wait_ms(policy, request.output_tokens)
    latest_ms = NO_LIMIT_MS if policy.margin_ms is None else policy.margin_ms + soonest_ms
    return Caps(floor_tokens, least_queue_ms, max_wait_ms, latest_ms)


def barred(
    request: RequestShape, caps: Caps, cached_tokens: int, queue_ms: float, ttft_ms: float, *, only_reserved: bool
) -> str:
    """What the decision that passes it over is called; empty if nothing bars it."""
    if only_reserved and is_warm(request, cached_tokens, caps.floor_tokens):
        return "spill-max-wait"
    if cached_tokens <= caps.floor_tokens:
        return ""
    if queue_ms > caps.max_wait_ms and caps.least_queue_ms <= caps.max_wait_ms:
        return "spill-max-wait"
    return "spill-margin" if ttft_ms > caps.latest_ms else ""


def _first_permitted(
    request: RequestShape, ranked: list[Terms], policy: Policy, floor_tokens: int
) -> tuple[Terms, str]:
    """The cheapest candidate that no cap bars, and what barred the cheapest of all (empty: nothing).

    The caps are for those who hold more than `floor_tokens`, the least that anybody holds, so but for reserved slots
    somebody is always permitted; if only these are left, the cheapest is: its bridge has the last word."""
    least_ms = min(terms.candidate.queue_ms for terms in ranked)
    soonest_ms = min(terms.ttft_ms for terms in ranked if terms.candidate.cached_tokens == floor_tokens)
    caps = caps_of(request, policy, floor_tokens, least_ms, soonest_ms)
    because = ""
    for terms in ranked:
        one = terms.candidate
        why = barred(request, caps, one.cached_tokens, one.queue_ms, terms.ttft_ms, only_reserved=one.only_reserved)
        if not why:
            return terms, because
        because = because or why
    return ranked[0], because


def _name(request: RequestShape, chosen: Terms, ranked: list[Terms], barred_because: str, policy: Policy) -> str:
    if request.blind:
        return "blind"
    if chosen.copies:
        return "remote-pull"
    candidate = chosen.candidate
    # `ranked` is in order of cost and max takes the first of equals.
    warmest = max(ranked, key=_by_own)
    is_home = candidate.worker == request.home
    if warmest.own_tokens - chosen.own_tokens >= policy.min_reuse_tokens and not is_home:
        if request.has_waited:
            return "spill-max-wait"
        if barred_because:
            return barred_because
        in_memory_alone = warmest.memory_wait_ms > 0 and warmest.cost_ms - warmest.memory_wait_ms <= chosen.cost_ms
        return "spill-memory" if in_memory_alone else "spill-margin"
    if candidate.only_reserved:
        return "cold-reserve"
    if is_home:
        return "home-worker"
    return _BY_WARMTH[warmth(request.prompt_tokens, chosen.own_tokens, request.block_size)]


def _bounds(request: RequestShape, ranked: list[Terms], policy: Policy, floor_tokens: int) -> tuple[float, float]:
    """Beyond which true queue the runner-up is better by more than `rechoose_ms` (herding: facts/policy.md), and for
    how long it may wait in the end (0: for as long as it takes). A queue that was not foreseen counts in full, whatever
    share of one has a price."""
    if len(ranked) == 1:
        return NO_LIMIT_MS, 0.0
    chosen = ranked[0]
    queue_ms = chosen.candidate.queue_ms
    lead_ms = max(0.0, min(terms.cost_ms for terms in ranked[1:]) - chosen.cost_ms)
    max_queue_ms = queue_ms + lead_ms + policy.rechoose_ms
    if chosen.candidate.cached_tokens <= floor_tokens:
        return max_queue_ms, 0.0
    max_wait_ms = max(queue_ms, warm_wait_ms(policy, request.output_tokens))
    return min(max_queue_ms, max_wait_ms), max_wait_ms


def _min_held_blocks(request: RequestShape, ranked: list[Terms], policy: Policy) -> int:
    """With fewer its prefill would take longer by more than `rechoose_ms`, and somebody else may do better."""
    chosen = ranked[0]
    candidate = chosen.candidate
    pulled = chosen.found_tokens - candidate.cached_tokens
    prompt = request.prompt_tokens

    def is_enough(blocks: int) -> bool:
        uncached = max(1, prompt - pulled - blocks * request.block_size)
        prefill_ms = candidate.speed * cost.prefill_ms(candidate.model, uncached, prompt)
        return prefill_ms - chosen.prefill_ms <= policy.rechoose_ms

    if len(ranked) == 1 or is_enough(0):
        return 0
    return bisect.bisect_left(range(candidate.cached_tokens // request.block_size), True, key=is_enough)


def _by_cost(home: str, terms: Terms) -> tuple[float, float, bool, str]:
    worker = terms.candidate.worker
    return terms.cost_ms, terms.candidate.queue_ms, worker != home, worker


def _by_own(terms: Terms) -> int:
    return terms.own_tokens


def _by_name(candidate: Candidate) -> str:
    return candidate.worker


SCHEMES: dict[str, Scheme] = {
    "prefix-aware": Scheme(_prefix_aware, whole_fleet=False),
    "round-robin": Scheme(_round_robin, whole_fleet=True),
}

# What to do about a policy that cannot be read.
CORRECT = "Correct it; all weights and their defaults: docs/reference.md#policies."
_decoder = msgspec.json.Decoder(Policy)
