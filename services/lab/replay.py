"""Recorded decisions, made again: by the policy that made them, which must say the same, or by another one.

The same is the same bit for bit: fields are compared as the journal writes them, where a float has all its digits. What
another policy would have chosen is said for each decision alone, among the candidates that were recorded, and priced by
the recorded terms: that later requests would have found other queues and other caches is not in it.

Owns: the comparison and the report.   Must not know: where records come from, terminals, clocks.
Units: ms, tokens.   Source: DESIGN 10."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ..bus.messages import CandidateRecord, DecisionRecord, ShadowRecord
from ..router import journal, policy
from ..router.policy import Candidate, Decision, Policy, RequestShape

_Inputs = tuple[RequestShape, list[Candidate], Policy, float]

# A field that is in one of two lists of candidates alone.
ABSENT = "absent"


class Difference(msgspec.Struct, frozen=True):
    """A field that came out otherwise; values as JSON."""

    field: str
    recorded: str
    replayed: str


class Replayed(msgspec.Struct, frozen=True):
    """One decision made again. `problem` says why it could not be (empty: it was)."""

    request_id: str
    attempt: int
    differences: list[Difference] = []
    problem: str = ""

    @property
    def same(self) -> bool:
        return not self.differences and not self.problem


def replay(record: DecisionRecord) -> Replayed:
    """The decision again from the record's inputs, compared with what the record says was decided."""
    try:
        decision = _decide(record, None)
    except ValueError as exc:
        return Replayed(record.request_id, record.attempt, problem=str(exc))
    return Replayed(record.request_id, record.attempt, _differences(record, journal.decided(decision)))


def replay_shadow(record: DecisionRecord) -> Replayed | None:
    """The same for what a shadow would have decided; None: there was no shadow. Its fields are named `shadow.`."""
    shadow = record.shadow
    if shadow is None:
        return None
    try:
        decision = _again(shadow, functools.partial(journal.shadow_inputs, record, shadow), None)
    except ValueError as exc:
        return Replayed(record.request_id, record.attempt, problem=f"shadow: {exc}")
    again = journal.decided(decision)
    del again["decided_at"]
    again["cost_ms"] = decision.ranking[0].cost_ms
    found = [msgspec.structs.replace(one, field=f"shadow.{one.field}") for one in _differences(shadow, again)]
    return Replayed(record.request_id, record.attempt, found)


class Effect(msgspec.Struct, frozen=True):
    """What one kind of decision would have become: `count` decisions that were `recorded` and would be `replayed`, and
    sums over them, by the recorded policy's choice and by the other's. `moved` went to another worker."""

    recorded: str
    replayed: str
    count: int
    moved: int
    recorded_ttft_ms: float
    replayed_ttft_ms: float
    recorded_cached_tokens: int
    replayed_cached_tokens: int


class WhatIf(msgspec.Struct, frozen=True):
    """What another policy would have chosen. `effects` are in order of their number; `problems` names the decisions
    that could not be made again, and why."""

    policy: str
    decisions: int
    moved: int
    prompt_tokens: int
    recorded_ttft_ms: float
    replayed_ttft_ms: float
    recorded_cached_tokens: int
    replayed_cached_tokens: int
    effects: list[Effect]
    problems: list[Replayed]


def what_if(records: Iterable[DecisionRecord], other: Policy) -> WhatIf:
    """Every recorded decision as `other` would have made it."""
    groups: dict[tuple[str, str], list[tuple[CandidateRecord, CandidateRecord]]] = defaultdict(list)
    problems: list[Replayed] = []
    prompt_tokens = 0
    for record in records:
        try:
            decision = _decide(record, other)
            if all(one.worker != record.selected_worker for one in record.candidate_workers):
                raise ValueError("its choice is none of its candidates")
        except ValueError as exc:
            problems.append(Replayed(record.request_id, record.attempt, problem=str(exc)))
            continue
        prompt_tokens += record.prompt_tokens
        terms = {one.worker: one for one in record.candidate_workers}
        groups[record.decision, decision.name].append((terms[record.selected_worker], terms[decision.worker]))
    effects = sorted((_effect(*names, pairs) for names, pairs in groups.items()), key=_by_count)
    return WhatIf(
        policy=f"{other.name}/{other.version}",
        decisions=sum(effect.count for effect in effects),
        moved=sum(effect.moved for effect in effects),
        prompt_tokens=prompt_tokens,
        recorded_ttft_ms=sum(effect.recorded_ttft_ms for effect in effects),
        replayed_ttft_ms=sum(effect.replayed_ttft_ms for effect in effects),
        recorded_cached_tokens=sum(effect.recorded_cached_tokens for effect in effects),
        replayed_cached_tokens=sum(effect.replayed_cached_tokens for effect in effects),
        effects=effects,
        problems=problems,
    )


def _decide(record: DecisionRecord, other: Policy | None) -> Decision:
    """:raises ValueError: the record lacks inputs, or names a policy that this version does not have."""
    return _again(record, functools.partial(journal.inputs, record), other)


def _again(made: DecisionRecord | ShadowRecord, inputs: Callable[[], _Inputs], other: Policy | None) -> Decision:
    if not made.candidate_workers:
        raise ValueError("it has no candidates")
    try:
        shape, candidates, recorded, now = inputs()
    except msgspec.ValidationError as exc:
        raise ValueError(f"its inputs cannot be read: {exc}") from exc
    chosen = other or recorded
    if chosen.name not in policy.SCHEMES:
        raise ValueError(f"this version has no policy {chosen.name!r}")
    try:
        return policy.decide(shape, candidates, chosen, now)
    except ArithmeticError as exc:
        raise ValueError(f"its inputs make no sense: {exc}") from exc


def _differences(record: DecisionRecord | ShadowRecord, again: dict[str, Any]) -> list[Difference]:
    found = []
    for name, value in again.items():
        if name == "candidate_workers":
            found += _candidate_differences(record.candidate_workers, value)
        else:
            found += _compared(name, getattr(record, name), value)
    return found


def _candidate_differences(recorded: list[CandidateRecord], replayed: list[CandidateRecord]) -> list[Difference]:
    found = _compared("order", [one.worker for one in recorded], [one.worker for one in replayed])
    again = {one.worker: one for one in replayed}
    for one in recorded:
        if one.worker not in again:
            found.append(Difference(one.worker, "a candidate", ABSENT))
            continue
        for name, value in msgspec.structs.asdict(one).items():
            found += _compared(f"{one.worker}.{name}", value, getattr(again[one.worker], name))
    return found


def _compared(field: str, recorded: object, replayed: object) -> list[Difference]:
    one, two = (msgspec.json.encode(value).decode() for value in (recorded, replayed))
    return [] if one == two else [Difference(field, one, two)]


def _effect(recorded: str, replayed: str, pairs: list[tuple[CandidateRecord, CandidateRecord]]) -> Effect:
    return Effect(
        recorded,
        replayed,
        count=len(pairs),
        moved=sum(was.worker != would.worker for was, would in pairs),
        recorded_ttft_ms=sum(was.ttft_ms for was, _ in pairs),
        replayed_ttft_ms=sum(would.ttft_ms for _, would in pairs),
        recorded_cached_tokens=sum(was.cached_tokens for was, _ in pairs),
        replayed_cached_tokens=sum(would.cached_tokens for _, would in pairs),
    )


def _by_count(effect: Effect) -> tuple[int, str, str]:
    return -effect.count, effect.recorded, effect.replayed
