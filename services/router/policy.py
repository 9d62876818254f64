"""Which worker answers a request: a pure choice among candidates, and every number behind it.

`decide` only compares; asking it changes nothing, so a decision can be replayed, and another policy can be tried on it.
Everything it looks at is in its arguments, and journal.py records them.

Owns: the policies by name, the order of candidates, the names of decisions.
Must not know: how candidates were found, NATS, clocks, what an engine is.
Units: ms, tokens.   Source: DESIGN 6, facts/policy.md.

Decisions, by what was chosen:
    prefer-warm-worker   it holds all full blocks but at most the last
    partial-hit          it holds at least one block
    home-worker          nobody holds this prefix yet, and this is its home
    balanced-cold        nobody holds anything of use: by load
    blind                the directory did not answer: by load
    round-robin          the policy of that name looks at neither caches nor load
and, where a worker that holds more was passed over, by why:
    spill-max-wait       its queue is over `max_warm_wait_ms`
    spill-margin         it is later by more than the hit is worth, or than `margin_ms` allows
    spill-memory         it would be chosen but for its wait for KV memory"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ..bus.blockkeys import Warmth, warmth
from ..bus.errors import ConfigInvalid
from . import cost
from .cost import PrefillModel

# As good as no limit (11 days), and a number in JSON.
NO_LIMIT_MS = 1e9

_BY_WARMTH: dict[Warmth, str] = {
    "warm": "prefer-warm-worker",
    "partial": "partial-hit",
    "cold": "balanced-cold",
}

_Ms = Annotated[float, Meta(ge=0)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named policy and its weights; JSON in the bucket POLICIES. The defaults are "F" of facts/policy.md."""

    name: str = "prefix-aware"
    # Whoever changes a weight names the result; decisions and metrics speak of it.
    version: str = "default"
    # Per ms of prefill: what creating KV costs those whose KV it evicts.
    new_kv_price: Annotated[float, Meta(ge=0, le=10)] = 0.3
    # Keeps a prefix that many sessions share from gathering them all; over 100 it costs reuse.
    home_bonus_ms: _Ms = 30.0
    # At most this much later than the best cold candidate may a warm choice be; null: the prices alone decide. A cap
    # near 0 would void `new_kv_price` and the externality, which are there to accept a later start.
    margin_ms: _Ms | None = None
    # The longest queue a warm choice may wait in while somebody else's is shorter ...
    max_warm_wait_ms: _Ms = 2000.0
    # ... for an expected output up to this; longer ones get the share long_output_tokens / output of it.
    long_output_tokens: Annotated[int, Meta(gt=0)] = 1024
    externality_cap: Annotated[float, Meta(ge=0, le=100)] = 4.0
    # Differences in cached tokens below this are not spoken of as leaving a warm worker.
    min_reuse_tokens: Annotated[int, Meta(gt=0)] = 64
    # A bridge whose true queue is longer than predicted by this much more than the runner-up's lead gives back.
    rechoose_ms: _Ms = 50.0
    # The time in which pinned KV is taken to be given back: 200 output tokens at 20 ms.
    kv_turnover_ms: _Ms = 4000.0
    # Share of the depth to believe of a worker whose entries the directory doubts.
    suspect_trust: Annotated[float, Meta(ge=0, le=1)] = 0.5
    # Least loaded workers among the candidates, and least loaded holders of each depth.
    least_loaded: Annotated[int, Meta(ge=1, le=64)] = 4


class RequestShape(msgspec.Struct, frozen=True):
    """What a decision needs to know of a request. `home` is the rendezvous home of a fresh prefix, empty if somebody
    holds it; `ordinal` counts the requests of this router."""

    prompt_tokens: int
    output_tokens: int
    block_size: int
    home: str = ""
    blind: bool = False
    ordinal: int = 0


class Candidate(msgspec.Struct, frozen=True):
    """A worker as it looks to this request. `queue_ms` is prefill work ahead; `rho` the share of time it is busy with
    prefill; `pinned_tokens` the KV in use; `cached_tokens` never exceeds what an engine can serve."""

    worker: str
    cached_tokens: int
    queue_ms: float
    rho: float
    pinned_tokens: int
    free_tokens: int
    model: PrefillModel


class Terms(NamedTuple):
    """A candidate's price, term by term, in ms."""

    candidate: Candidate
    work_ms: float
    prefill_ms: float
    interference_ms: float
    memory_wait_ms: float
    new_kv_ms: float
    externality_ms: float
    home_bonus_ms: float
    ttft_ms: float
    cost_ms: float


class Decision(msgspec.Struct, frozen=True):
    """The choice. `work_ms` is what it adds to the worker's queue of `queue_ms`; `max_queue_ms` the longest true queue
    with which the choice still stands. `ranking` starts with the chosen one and goes on in failover order."""

    worker: str
    name: str
    predicted_tokens: int
    work_ms: float
    queue_ms: float
    max_queue_ms: float
    ranking: list[Terms]
    decided_at: float

    @property
    def order(self) -> list[str]:
        return [terms.candidate.worker for terms in self.ranking]


class Scheme(NamedTuple):
    """A policy by name: its function, and whether it must see every worker rather than a shortlist."""

    decide: Callable[[RequestShape, list[Candidate], Policy, float], Decision]
    whole_fleet: bool


def decide(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    """The choice among at least one candidate. Deterministic: equal arguments, equal decision.

    Ties go to the least queued work, then to the name."""
    return SCHEMES[policy.name].decide(request, candidates, policy, now)


def parse(data: bytes | str) -> Policy:
    """A policy from its JSON. :raises ConfigInvalid: an unknown field or name, or a weight out of its range."""
    try:
        policy = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigInvalid(str(exc), field="policy", remedy="Correct it and publish it again.") from exc
    return known(policy)


def known(policy: Policy) -> Policy:
    """The policy itself. :raises ConfigInvalid: there is none of this name."""
    if policy.name not in SCHEMES:
        raise ConfigInvalid(
            f"{policy.name[:80]!r} is not a policy.", field="policy.name", remedy=f"Use one of: {', '.join(SCHEMES)}."
        )
    return policy


def price(request: RequestShape, candidate: Candidate, policy: Policy) -> Terms:
    """All terms of one candidate. At least one token of a prompt is always computed."""
    model = candidate.model
    uncached = max(1, request.prompt_tokens - candidate.cached_tokens)
    kv_price_ms = cost.kv_price_ms(model, uncached, request.prompt_tokens)
    prefill_ms = cost.prefill_ms(model, uncached, request.prompt_tokens)
    interference_ms = cost.interference_ms(model, uncached, candidate.pinned_tokens)
    memory_wait_ms = cost.memory_wait_ms(
        uncached + request.output_tokens, candidate.free_tokens, candidate.pinned_tokens, policy.kv_turnover_ms
    )
    new_kv_ms = policy.new_kv_price * kv_price_ms
    work_ms = cost.work_ms(model, uncached, request.prompt_tokens)
    externality_ms = cost.externality(candidate.rho, policy.externality_cap) * work_ms
    home_bonus_ms = policy.home_bonus_ms if candidate.worker == request.home else 0.0
    ttft_ms = candidate.queue_ms + prefill_ms + interference_ms + memory_wait_ms
    cost_ms = ttft_ms + new_kv_ms + externality_ms - home_bonus_ms
    return Terms(
        candidate,
        work_ms,
        prefill_ms,
        interference_ms,
        memory_wait_ms,
        new_kv_ms,
        externality_ms,
        home_bonus_ms,
        ttft_ms,
        cost_ms,
    )


def warm_wait_ms(policy: Policy, output_tokens: int) -> float:
    """The longest queue a warm choice may wait in: who stays long on a hot worker should not also wait long for it."""
    if output_tokens <= policy.long_output_tokens:
        return policy.max_warm_wait_ms
    return policy.max_warm_wait_ms * policy.long_output_tokens / output_tokens


def _prefix_aware(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    ranked = [price(request, candidate, policy) for candidate in candidates]
    ranked.sort(key=_by_cost)
    chosen, barred_because = _first_permitted(request, ranked, policy)
    name = _name(request, chosen, ranked, barred_because, policy)
    if chosen is not ranked[0]:
        ranked.remove(chosen)
        ranked.insert(0, chosen)
    return _decision(name, ranked, _max_queue_ms(request, ranked, policy), now)


def _round_robin(request: RequestShape, candidates: list[Candidate], policy: Policy, now: float) -> Decision:
    """The next worker by name, whatever it holds; the others follow in turn."""
    ranked = [price(request, candidate, policy) for candidate in sorted(candidates, key=_by_name)]
    first = request.ordinal % len(ranked)
    return _decision("round-robin", ranked[first:] + ranked[:first], NO_LIMIT_MS, now)


def _decision(name: str, ranking: list[Terms], max_queue_ms: float, now: float) -> Decision:
    chosen = ranking[0]
    candidate = chosen.candidate
    return Decision(
        worker=candidate.worker,
        name=name,
        predicted_tokens=candidate.cached_tokens,
        work_ms=chosen.work_ms,
        queue_ms=candidate.queue_ms,
        max_queue_ms=max_queue_ms,
        ranking=ranking,
        decided_at=now,
    )


def _first_permitted(request: RequestShape, ranked: list[Terms], policy: Policy) -> tuple[Terms, str]:
    """The cheapest candidate that no cap bars, and what barred the cheapest of all (empty: nothing).

    Warm means holding more than the least any candidate holds: a system prompt that all hold makes nobody warm. Those
    who hold the least are never barred, so there is always somebody."""
    floor = min(terms.candidate.cached_tokens for terms in ranked)
    wait_cap_ms = warm_wait_ms(policy, request.output_tokens)
    somebody_is_under_it = any(terms.candidate.queue_ms <= wait_cap_ms for terms in ranked)
    latest_ms = NO_LIMIT_MS
    if policy.margin_ms is not None:
        latest_ms = policy.margin_ms + min(t.ttft_ms for t in ranked if t.candidate.cached_tokens == floor)
    because = ""
    for terms in ranked:
        if terms.candidate.cached_tokens > floor:
            if terms.candidate.queue_ms > wait_cap_ms and somebody_is_under_it:
                because = because or "spill-max-wait"
                continue
            if terms.ttft_ms > latest_ms:
                because = because or "spill-margin"
                continue
        return terms, because
    raise AssertionError("unreachable: those who hold the least are never barred")


def _name(request: RequestShape, chosen: Terms, ranked: list[Terms], barred_because: str, policy: Policy) -> str:
    if request.blind:
        return "blind"
    worker, cached = chosen.candidate.worker, chosen.candidate.cached_tokens
    if worker == request.home:
        return "home-worker"
    # `ranked` is in order of cost and max takes the first of equals.
    warmest = max(ranked, key=_by_cached)
    if warmest.candidate.cached_tokens - cached >= policy.min_reuse_tokens:
        if barred_because:
            return barred_because
        in_memory_alone = warmest.memory_wait_ms > 0 and warmest.cost_ms - warmest.memory_wait_ms <= chosen.cost_ms
        return "spill-memory" if in_memory_alone else "spill-margin"
    return _BY_WARMTH[warmth(request.prompt_tokens, cached, request.block_size)]


def _max_queue_ms(request: RequestShape, ranked: list[Terms], policy: Policy) -> float:
    """Beyond this true queue the runner-up is better by more than `rechoose_ms` (herding: facts/policy.md)."""
    if len(ranked) == 1:
        return NO_LIMIT_MS
    chosen = ranked[0]
    queue_ms = chosen.candidate.queue_ms
    lead_ms = max(0.0, min(terms.cost_ms for terms in ranked[1:]) - chosen.cost_ms)
    limit_ms = queue_ms + lead_ms + policy.rechoose_ms
    if chosen.candidate.cached_tokens > min(terms.candidate.cached_tokens for terms in ranked):
        limit_ms = min(limit_ms, max(queue_ms, warm_wait_ms(policy, request.output_tokens)))
    return limit_ms


def _by_cost(terms: Terms) -> tuple[float, float, str]:
    return terms.cost_ms, terms.candidate.queue_ms, terms.candidate.worker


def _by_cached(terms: Terms) -> int:
    return terms.candidate.cached_tokens


def _by_name(candidate: Candidate) -> str:
    return candidate.worker


SCHEMES: dict[str, Scheme] = {
    "prefix-aware": Scheme(_prefix_aware, whole_fleet=False),
    "round-robin": Scheme(_round_robin, whole_fleet=True),
}

_decoder = msgspec.json.Decoder(Policy)
