"""The record of a decision: what was chosen, why, and all it was chosen from.

`inputs` turns a record back into the arguments of `policy.decide`, which must give the same decision bit for bit.

Owns: the form of the record.   Must not know: NATS, clocks, prompts (a record holds no text, token or key)."""

import hashlib
from typing import Any

import msgspec

from ..bus.messages import VERSION, CandidateRecord, DecisionRecord, Route
from .cost import PrefillModel
from .policy import Candidate, Decision, Policy, RequestShape, Terms
from .shortlist import Shortlist

_PREFIX_KEY_BYTES = 8


def prefix_key(key: bytes, ns_id: bytes, keys: bytes, held_blocks: int) -> str:
    """16 hex digits that name the last stable block before the question, comparable within a namespace alone.

    Stable is what somebody holds already; of a prefix nobody holds, all full blocks. Empty below one block. `key` is
    the deployment's (purpose "journal")."""
    last = min(held_blocks, len(keys) // 8) or len(keys) // 8
    if not last:
        return ""
    return hashlib.blake2b(
        keys[8 * last - 8 : 8 * last], digest_size=_PREFIX_KEY_BYTES, key=key, salt=ns_id
    ).hexdigest()


def build(
    route: Route,
    decision: Decision,
    shortlisted: Shortlist,
    policy: Policy,
    *,
    attempt: int,
    router: str,
    excluded: dict[str, str],
    key: bytes,
    code_version: str,
) -> DecisionRecord:
    """The record of one decision; `excluded` says why the workers that were no candidates were none."""
    shape = shortlisted.shape
    return DecisionRecord(
        v=VERSION,
        request_id=route.request_id,
        client_request_id=route.client_request_id,
        attempt=attempt,
        router=router,
        model=route.model,
        tenant=route.tenant,
        prefix_class=route.prefix_class,
        prefix_key=prefix_key(key, route.ns_id, route.keys, shortlisted.held_blocks),
        prompt_tokens=route.prompt_tokens,
        policy=f"{policy.name}/{policy.version}",
        excluded=excluded,
        output_tokens=shape.output_tokens,
        block_size=shape.block_size,
        home=shape.home,
        blind=shape.blind,
        ordinal=shape.ordinal,
        shared_blocks=shortlisted.shared_blocks,
        held_blocks=shortlisted.held_blocks,
        prefill_model=list(msgspec.structs.astuple(decision.ranking[0].candidate.model)),
        policy_weights=msgspec.structs.asdict(policy),
        code_version=code_version,
        **decided(decision),
    )


def decided(decision: Decision) -> dict[str, Any]:
    """The fields of a record that the decision itself says, by name: what a replay must find again."""
    return {
        "selected_worker": decision.worker,
        "predicted_cached_tokens": decision.predicted_tokens,
        "decision": decision.name,
        "candidate_workers": [_candidate(terms) for terms in decision.ranking],
        "decided_at": decision.decided_at,
        "max_queue_ms": decision.max_queue_ms,
    }


def inputs(record: DecisionRecord) -> tuple[RequestShape, list[Candidate], Policy, float]:
    """The arguments with which `policy.decide` made this decision."""
    shape = RequestShape(
        record.prompt_tokens, record.output_tokens, record.block_size, record.home, record.blind, record.ordinal
    )
    model = msgspec.convert(record.prefill_model, PrefillModel, strict=False)
    candidates = [
        Candidate(one.worker, one.cached_tokens, one.queue_ms, one.rho, one.pinned_tokens, one.free_tokens, model)
        for one in record.candidate_workers
    ]
    return shape, candidates, msgspec.convert(record.policy_weights, Policy, strict=False), record.decided_at


def _candidate(terms: Terms) -> CandidateRecord:
    candidate = terms.candidate
    return CandidateRecord(
        worker=candidate.worker,
        cached_tokens=candidate.cached_tokens,
        queue_ms=candidate.queue_ms,
        prefill_ms=terms.prefill_ms,
        interference_ms=terms.interference_ms,
        memory_wait_ms=terms.memory_wait_ms,
        new_kv_ms=terms.new_kv_ms,
        externality_ms=terms.externality_ms,
        home_bonus_ms=terms.home_bonus_ms,
        ttft_ms=terms.ttft_ms,
        cost_ms=terms.cost_ms,
        rho=candidate.rho,
        pinned_tokens=candidate.pinned_tokens,
        free_tokens=candidate.free_tokens,
    )
