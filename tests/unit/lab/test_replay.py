"""Recorded decisions, made again."""

import random
from typing import Any

import msgspec
import pytest
from support.decisions import record, recorded

from prefixbus.bus.messages import DecisionRecord, ShadowRecord
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


def test_what_shadows_would_have_decided_replays_without_a_difference() -> None:
    """To the last bit, as what was acted on, though they saw other candidates or believed them less."""
    records = list(recorded(500, seed=7))

    replayed = [again for one in records if (again := replay.replay_shadow(one)) is not None]

    assert len(replayed) == sum(one.shadow is not None for one in records) > 100
    assert any(
        one.shadow is not None and len(one.shadow.candidate_workers) < len(one.candidate_workers) for one in records
    )
    assert [one for one in replayed if not one.same] == []


def shadowed() -> tuple[DecisionRecord, ShadowRecord]:
    return next((one, one.shadow) for one in recorded(100, seed=9) if one.shadow is not None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("selected_worker", "w99"),
        ("decision", "elsewhere"),
        ("predicted_cached_tokens", -1),
        ("cost_ms", 0.5),
        ("max_queue_ms", -1.0),
        ("max_wait_ms", -1.0),
        ("min_held_blocks", -1),
    ],
)
def test_another_choice_of_the_shadow_than_recorded_is_named_as_its_own(field: str, value: object) -> None:
    whole, shadow = shadowed()
    tampered = msgspec.structs.replace(whole, shadow=msgspec.structs.replace(shadow, **{field: value}))

    found = replay.replay_shadow(tampered)

    assert found is not None
    assert [one.field for one in found.differences] == [f"shadow.{field}"]
    assert replay.replay(tampered).same


def test_a_bit_of_a_shadows_term_is_a_difference() -> None:
    whole, shadow = shadowed()
    first, *rest = shadow.candidate_workers
    bit = msgspec.structs.replace(first, ttft_ms=first.ttft_ms * (1 + 2**-52))
    tampered = msgspec.structs.replace(whole, shadow=msgspec.structs.replace(shadow, candidate_workers=[bit, *rest]))

    found = replay.replay_shadow(tampered)

    assert found is not None
    assert [one.field for one in found.differences] == [f"shadow.{first.worker}.ttft_ms"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"candidate_workers": []}, "shadow: it has no candidates"),
        ({"policy_weights": {"name": "of-the-future"}}, "no policy 'of-the-future'"),
        ({"policy_weights": {"new_kv_price": -1}}, "inputs cannot be read"),
    ],
    ids=["of an older version", "of a later version", "of no weights"],
)
def test_a_shadow_that_cannot_be_made_again_says_why(changed: dict[str, Any], says: str) -> None:
    whole, shadow = shadowed()

    found = replay.replay_shadow(msgspec.structs.replace(whole, shadow=msgspec.structs.replace(shadow, **changed)))

    assert found is not None and not found.same
    assert says in found.problem


def test_where_nothing_looked_on_there_is_nothing_to_replay() -> None:
    assert replay.replay_shadow(msgspec.structs.replace(several(), shadow=None)) is None


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
