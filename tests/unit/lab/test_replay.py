"""Recorded decisions, made again."""

import random
from typing import Any

import msgspec
import pytest
from support.decisions import record, recorded

from prefixbus.bus.messages import DecisionRecord
from prefixbus.lab import replay
from prefixbus.router import journal, policy
from prefixbus.router.policy import Policy


def several(seed: int = 5) -> DecisionRecord:
    """A decision with at least two candidates."""
    rng = random.Random(seed)
    return next(one for one in iter(lambda: record(rng), None) if len(one.candidate_workers) > 1)


def test_some_hundred_decisions_of_random_fleets_replay_without_a_difference() -> None:
    replayed = [replay.replay(one) for one in recorded(500, seed=7)]

    assert len(replayed) == 500
    assert [one for one in replayed if not one.same] == []


def changed_candidate(one: DecisionRecord, **fields: Any) -> DecisionRecord:
    first, *rest = one.candidate_workers
    return msgspec.structs.replace(one, candidate_workers=[msgspec.structs.replace(first, **fields), *rest])


def test_the_last_bit_of_a_term_is_a_difference() -> None:
    whole = several()
    first = whole.candidate_workers[0]
    bit = first.cost_ms * (1 + 2**-52)
    assert bit != first.cost_ms

    (difference,) = replay.replay(changed_candidate(whole, cost_ms=bit)).differences

    assert difference.field == f"{first.worker}.cost_ms"
    assert float(difference.recorded) == bit
    assert float(difference.replayed) == first.cost_ms


def test_a_negative_zero_is_a_difference() -> None:
    whole = several()
    flipped = [
        msgspec.structs.replace(one, home_bonus_ms=-0.0) if one.home_bonus_ms == 0 else one
        for one in whole.candidate_workers
    ]
    assert flipped == whole.candidate_workers

    found = replay.replay(msgspec.structs.replace(whole, candidate_workers=flipped)).differences

    zeros = [one.worker for one in whole.candidate_workers if one.home_bonus_ms == 0]
    assert zeros
    assert [each.field for each in found] == [f"{worker}.home_bonus_ms" for worker in zeros]


def _redecided(one: DecisionRecord) -> dict[str, Any]:
    return journal.decided(policy.decide(*journal.inputs(one)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("selected_worker", "w99"), ("decision", "elsewhere"), ("max_queue_ms", -1.0), ("predicted_cached_tokens", -1)],
)
def test_another_outcome_than_recorded_is_named_by_its_field(field: str, value: object) -> None:
    tampered = msgspec.structs.replace(several(), **{field: value})

    (difference,) = replay.replay(tampered).differences

    assert difference.field == field
    assert difference.recorded == msgspec.json.encode(value).decode()


def test_another_order_of_candidates_is_a_difference() -> None:
    whole = several()
    turned = msgspec.structs.replace(whole, candidate_workers=whole.candidate_workers[::-1])

    found = replay.replay(turned)

    assert "order" in [each.field for each in found.differences]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prefill_model": []}, "inputs cannot be read"),
        ({"candidate_workers": []}, "no candidates"),
        ({"policy_weights": {"name": "of-the-future"}}, "no policy 'of-the-future'"),
    ],
)
def test_what_cannot_be_made_again_says_why_and_is_not_the_same(fields: dict[str, Any], says: str) -> None:
    found = replay.replay(msgspec.structs.replace(several(), **fields))

    assert says in found.problem
    assert not found.same


def test_the_policy_that_decided_would_have_moved_nothing() -> None:
    mine = Policy(version="mine")
    rng = random.Random(3)
    records = [record(rng, policy_weights=msgspec.structs.asdict(mine)) for _ in range(50)]
    records = [msgspec.structs.replace(one, **_redecided(one)) for one in records]

    report = replay.what_if(records, mine)

    assert (report.decisions, report.moved, report.policy) == (50, 0, "prefix-aware/mine")
    assert report.replayed_ttft_ms == report.recorded_ttft_ms
    assert report.replayed_cached_tokens == report.recorded_cached_tokens
    assert all(effect.recorded == effect.replayed for effect in report.effects)


def test_another_policy_is_told_by_decision_with_what_it_would_gain_and_lose() -> None:
    by_price = [one for one in recorded(300, seed=11) if one.policy.startswith("prefix-aware")]

    report = replay.what_if(by_price, Policy(name="round-robin"))

    assert report.decisions == len(by_price)
    assert 0 < report.moved < len(by_price)
    assert report.replayed_ttft_ms > report.recorded_ttft_ms
    assert sum(effect.count for effect in report.effects) == len(by_price)
    assert {effect.replayed for effect in report.effects} == {"round-robin"}
    assert report.prompt_tokens == sum(one.prompt_tokens for one in by_price)


def test_a_decision_that_cannot_be_made_again_is_left_out_of_the_sums_and_named() -> None:
    broken = msgspec.structs.replace(several(), prefill_model=[])

    report = replay.what_if([broken, several()], Policy(name="round-robin"))

    assert report.decisions == 1
    assert [one.request_id for one in report.problems] == [broken.request_id]


@pytest.mark.parametrize(
    "changed",
    [
        {"candidate_workers": []},
        {"block_size": 0},
        {"selected_worker": "gone"},
        {"prompt_tokens": 10**400},
        {"prefill_model": [1.0, 1.0, 1.0, 1.0, 0], "prefill_models": {}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_record_whose_inputs_make_no_sense_is_a_problem_of_its_own(changed: dict[str, Any]) -> None:
    """It ended the replay of all others."""
    good, broken = record(random.Random(3), number=1), record(random.Random(3), **changed)

    assert not replay.replay(broken).same
    report = replay.what_if([good, broken], Policy())
    assert (report.decisions, len(report.problems)) == (1, 1)
