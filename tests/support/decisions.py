"""Decisions as a router makes and records them: random fleets, random requests, every policy."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from prefixbus.bus import messages
from prefixbus.bus.messages import DecisionRecord, Route, ShadowRecord
from prefixbus.router import cost, journal, policy
from prefixbus.router.cost import PrefillModel
from prefixbus.router.policy import Candidate, Policy, Pull, RequestShape
from prefixbus.router.shortlist import Shortlist

KEY = bytes(32)


def recorded(count: int, seed: int = 1) -> Iterator[DecisionRecord]:
    """Records that went through JSON, as the journal keeps them."""
    rng = random.Random(seed)
    for number in range(count):
        yield messages.DECISION.decode(messages.DECISION.encode(record(rng, number)))


def record(rng: random.Random, number: int = 0, **changed: Any) -> DecisionRecord:
    """One decision of the router's own code, over a fleet nobody else will ever see."""
    block_size = rng.choice([16, 32])
    prompt_tokens = rng.randrange(1, 40_000)
    classes = {"": rng.choice([*cost.PROFILES.values(), _model(rng)]), "slow": _model(rng)}
    candidates = [_candidate(rng, f"w{one}", prompt_tokens, block_size, classes) for one in range(rng.randrange(1, 13))]
    shared_blocks = rng.randrange(8)
    shape = RequestShape(
        prompt_tokens=prompt_tokens,
        output_tokens=rng.randrange(1, 4096),
        block_size=block_size,
        home=rng.choice(["", "", candidates[0].worker]),
        blind=rng.random() < 0.1,
        ordinal=number,
        has_waited=rng.random() < 0.1,
        fleet_rho=rng.random(),
        shared_tokens=policy.shared_tokens(shared_blocks, block_size),
    )
    chosen = _policy(rng)
    decision = policy.decide(shape, candidates, chosen, 1.7e9 + rng.random() * 1e6)
    other = random.Random(decision.decided_at)
    shadow = _shadow(other, shape, candidates, decision.decided_at) if other.random() < 0.3 else None
    made = journal.build(
        _route(number, shape),
        decision,
        Shortlist(shape, candidates, shared_blocks, rng.randrange(64)),
        chosen,
        attempt=1,
        router="router-1",
        excluded={},
        key=KEY,
        code_version="0",
        shadow=shadow,
    )
    return msgspec.structs.replace(made, **changed)


def _shadow(rng: random.Random, shape: RequestShape, candidates: list[Candidate], wall: float) -> ShadowRecord:
    """Of another policy, which may believe candidates less and look at fewer."""
    other = _policy(rng)
    seen = [
        msgspec.structs.replace(one, cached_tokens=one.cached_tokens // 2, trust=one.trust / 2)
        if rng.random() < 0.3
        else one
        for one in candidates[: rng.randrange(1, len(candidates) + 1)]
    ]
    return journal.shadow(other, policy.decide(shape, seen, other, wall))


def _candidate(
    rng: random.Random, worker: str, prompt_tokens: int, block_size: int, classes: dict[str, PrefillModel]
) -> Candidate:
    cached = rng.choice([0, rng.randrange(prompt_tokens)]) // block_size * block_size
    pinned = rng.randrange(1_000_000)
    worker_class = rng.choice(list(classes))
    held = cached // block_size + rng.randrange(4)
    to_pull = (prompt_tokens - cached) // block_size // 2 * block_size
    return Candidate(
        worker=worker,
        cached_tokens=cached,
        queue_ms=rng.choice([0.0, rng.expovariate(0.01), rng.random() * 1e-9]),
        rho=rng.random(),
        pinned_tokens=pinned,
        free_tokens=1_050_000 - pinned,
        model=classes[worker_class],
        worker_class=worker_class,
        speed=rng.choice([1.0, 0.5 + rng.random()]),
        only_reserved=rng.random() < 0.1,
        pull=Pull("w99", to_pull, rng.expovariate(0.02)) if to_pull and rng.random() < 0.3 else None,
        held_blocks=held,
        announced_blocks=rng.randrange(held + 1),
        trust=rng.choice([1.0, rng.random()]),
    )


def _model(rng: random.Random) -> PrefillModel:
    return PrefillModel(rng.random() * 30, rng.random() * 0.1, rng.random() * 1e-7, rng.random() * 1e-4)


def _policy(rng: random.Random) -> Policy:
    if rng.random() < 0.2:
        return Policy(name="round-robin")
    return Policy(
        version=f"v{rng.randrange(9)}",
        new_kv_price=rng.random(),
        decode_price=4 * rng.random(),
        queue_share=2 * rng.random(),
        sibling_bonus_ms=rng.random() * 60,
        margin_ms=rng.choice([None, 0.0, rng.random() * 100]),
        max_warm_wait_ms=rng.random() * 3000,
        max_pull_rho=rng.random(),
        kv_turnover_ms=rng.random() * 9000,
        least_loaded=rng.randrange(1, 9),
    )


def _route(number: int, shape: RequestShape) -> Route:
    return Route(
        v=messages.VERSION,
        request_id=f"R{number}",
        client_request_id=f"c{number}",
        tenant="acme",
        model="m",
        serves="digest",
        ns_id=bytes(16),
        keys=b"",
        prompt_tokens=shape.prompt_tokens,
        output_tokens=shape.output_tokens,
        prefix_class="session",
        reply="_INBOX.acme.1",
        deadline_at=1e12,
        job=b"",
    )
