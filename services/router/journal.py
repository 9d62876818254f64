"""The record of a decision: what was chosen, why, and all it was chosen from; and that of an end without a bridge.

`inputs` turns a record back into the arguments of `policy.decide`, which must give the same decision bit for bit; so
does `shadow_inputs` for the decision of a shadow.

Owns: the form of the record.   Must not know: NATS, clocks, prompts (a record holds no text, token or key)."""

import hashlib
import struct
from typing import Any

import msgspec

from ..bus.errors import Cancelled, PrefixbusError
from ..bus.messages import VERSION, CandidateRecord, DecisionRecord, Outcome, Route, ShadowRecord
from .attempts import Attempts
from .cost import PrefillModel
from .policy import Candidate, Decision, Policy, Pull, RequestShape, Terms, shared_tokens
from .shortlist import Shortlist

_DIGEST_BYTES = 8


def prefix_key(key: bytes, ns_id: bytes, keys: bytes, held_blocks: int) -> str:
    """16 hex digits that name the last stable block before the question, comparable within a namespace alone.

    Stable is what somebody holds already; of a prefix nobody holds, all full blocks. Empty below one block. `key` is
    the deployment's (purpose "journal")."""
    last = min(held_blocks, len(keys) // 8) or len(keys) // 8
    if not last:
        return ""
    return hashlib.blake2b(keys[8 * last - 8 : 8 * last], digest_size=_DIGEST_BYTES, key=key, salt=ns_id).hexdigest()


def ending(
    route: Route,
    attempts: Attempts,
    decision: Decision | None,
    error: PrefixbusError,
    *,
    total_ms: float,
    ended_at: float,
    traceparent: str,
) -> Outcome:
    """The outcome of a request that the router ends itself; `decision` is the last one, if there was any."""
    return Outcome(
        v=VERSION,
        request_id=route.request_id,
        client_request_id=route.client_request_id,
        attempt=attempts.attempt,
        worker=attempts.worker,
        incarnation=attempts.incarnation,
        tenant=route.tenant,
        model=route.model,
        ns_id=route.ns_id.hex(),
        status="cancelled" if isinstance(error, Cancelled) else "error",
        error=error.code,
        prefix_class=route.prefix_class,
        decision=decision.name if decision else "",
        prompt_tokens=route.prompt_tokens,
        predicted_tokens=decision.predicted_tokens if decision else 0,
        cached_tokens=None,
        prefill_tokens=None,
        output_tokens=0,
        queue_wait_ms=None,
        ttft_ms=None,
        total_ms=total_ms,
        ended_at=ended_at,
        traceparent=traceparent,
        adapter=route.adapter,
    )


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
    rollout: str = "active",
    shadow: ShadowRecord | None = None,
) -> DecisionRecord:
    """The record of one decision; `excluded` says why the workers that were no candidates were none, `rollout` by which
    right the policy decided, `shadow` what another one would have done."""
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
        policy=policy.label,
        excluded=excluded,
        output_tokens=shape.output_tokens,
        block_size=shape.block_size,
        home=shape.home,
        blind=shape.blind,
        ordinal=shape.ordinal,
        shared_blocks=shortlisted.shared_blocks,
        held_blocks=shortlisted.held_blocks,
        has_waited=shape.has_waited,
        fleet_rho=shape.fleet_rho,
        prefill_model=_figures(decision.ranking[0].candidate.model),
        prefill_models=_models(decision),
        policy_weights=msgspec.structs.asdict(policy),
        policy_digest=digest(policy),
        rollout=rollout,
        directory=shortlisted.directory,
        stream_seq=shortlisted.stream_seq,
        code_version=code_version,
        shadow=shadow,
        template_version=route.template_version,
        tokenizer_revision=route.tokenizer_revision,
        segments=_segments(route.segments),
        adapter=route.adapter,
        **decided(decision),
    )


def digest(policy: Policy) -> str:
    """16 hex digits that name the policy's content, whatever its version says."""
    content = msgspec.json.encode(policy, order="sorted")
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def shadow(policy: Policy, decision: Decision) -> ShadowRecord:
    """The record of a decision that was not acted on, made at the same time about the same request."""
    made = decided(decision)
    # It is that of the decision beside it.
    del made["decided_at"]
    return ShadowRecord(
        policy=policy.label,
        policy_digest=digest(policy),
        cost_ms=decision.ranking[0].cost_ms,
        policy_weights=msgspec.structs.asdict(policy),
        prefill_models=_models(decision),
        **made,
    )


def decided(decision: Decision) -> dict[str, Any]:
    """The fields of a record that the decision itself says, by name: what a replay must find again."""
    return {
        "selected_worker": decision.worker,
        "predicted_cached_tokens": decision.predicted_tokens,
        "decision": decision.name,
        "candidate_workers": _candidates(decision.ranking),
        "decided_at": decision.decided_at,
        "max_queue_ms": decision.max_queue_ms,
        "max_wait_ms": decision.max_wait_ms,
        "is_warm": decision.is_warm,
        "min_held_blocks": decision.min_held_blocks,
    }


def inputs(record: DecisionRecord) -> tuple[RequestShape, list[Candidate], Policy, float]:
    """The arguments with which `policy.decide` made this decision.

    :raises msgspec.ValidationError: what the record says is not what this version decides from."""
    return _inputs(record, record)


def shadow_inputs(record: DecisionRecord, of: ShadowRecord) -> tuple[RequestShape, list[Candidate], Policy, float]:
    """The arguments with which `policy.decide` made the decision of the record's shadow.

    :raises msgspec.ValidationError: as `inputs`."""
    return _inputs(record, of)


def _inputs(
    record: DecisionRecord, of: DecisionRecord | ShadowRecord
) -> tuple[RequestShape, list[Candidate], Policy, float]:
    shape = RequestShape(
        record.prompt_tokens,
        record.output_tokens,
        record.block_size,
        record.home,
        record.blind,
        record.ordinal,
        record.has_waited,
        record.fleet_rho,
        shared_tokens(record.shared_blocks, record.block_size),
    )
    models = {name: _model(figures) for name, figures in of.prefill_models.items()}
    # Records of routers that did not learn yet have but the one.
    default = _model(record.prefill_model)
    candidates = [_input(one, models.get(one.worker_class, default)) for one in of.candidate_workers]
    return shape, candidates, msgspec.convert(of.policy_weights, Policy, strict=False), record.decided_at


def _segments(packed: bytes) -> list[tuple[int, str]]:
    return [(end, f"{digest:016x}") for end, digest in struct.iter_unpack("<IQ", packed)]


def _models(decision: Decision) -> dict[str, list[float]]:
    """The prefill models of all candidates, by worker class."""
    models = {terms.candidate.worker_class: terms.candidate.model for terms in decision.ranking}
    return {name: _figures(models[name]) for name in sorted(models)}


def _figures(model: PrefillModel) -> list[float]:
    return list(msgspec.structs.astuple(model))


def _model(figures: list[float]) -> PrefillModel:
    return msgspec.convert(figures, PrefillModel, strict=False)


def _input(one: CandidateRecord, model: PrefillModel) -> Candidate:
    return Candidate(
        one.worker,
        one.cached_tokens,
        one.queue_ms,
        one.rho,
        one.pinned_tokens,
        one.free_tokens,
        model,
        one.worker_class,
        one.speed,
        one.only_reserved,
        Pull(one.pull_source, one.pull_tokens, one.pull_ms) if one.pull_tokens else None,
        one.held_blocks,
        one.announced_blocks,
        one.trust,
    )


def _candidates(ranking: list[Terms]) -> list[CandidateRecord]:
    """In their order. What each would gain is counted from the longest prefill that anybody would need for all of it:
    from one figure for all, so that the order of gains is that of costs."""
    longest_ms = max(terms.prefill_ms + terms.saved_ms for terms in ranking)
    return [_candidate(terms, longest_ms - terms.cost_ms) for terms in ranking]


def _candidate(terms: Terms, net_gain_ms: float) -> CandidateRecord:
    candidate, pull = terms.candidate, terms.candidate.pull
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
        worker_class=candidate.worker_class,
        speed=candidate.speed,
        held_blocks=candidate.held_blocks,
        announced_blocks=candidate.announced_blocks,
        trust=candidate.trust,
        only_reserved=candidate.only_reserved,
        pull_source=pull.source if pull else "",
        pull_tokens=pull.tokens if pull else 0,
        pull_ms=pull.transfer_ms if pull else 0.0,
        transfer_ms=terms.transfer_ms,
        saved_prefill_ms=terms.saved_ms,
        imbalance_penalty_ms=terms.saved_ms - terms.wait_ms - terms.transfer_ms - net_gain_ms,
        net_gain_ms=net_gain_ms,
        decode_ms=terms.decode_ms,
        wait_ms=terms.wait_ms,
    )
