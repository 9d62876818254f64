"""What `prefixbus explain` says of records."""

import io
import json
import random
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.decisions import record

from prefixbus.bus.messages import CandidateRecord, DecisionRecord, Outcome, ShadowRecord
from prefixbus.cluster import explain
from prefixbus.cluster.records import Records


def decision(**changed: Any) -> DecisionRecord:
    return record(
        random.Random(2), **{"request_id": "R1", "client_request_id": "mine", "selected_worker": "w2", **changed}
    )


def outcome(**changed: Any) -> Outcome:
    fields: dict[str, Any] = {
        "v": 1,
        "request_id": "R1",
        "client_request_id": "mine",
        "attempt": 1,
        "worker": "w2",
        "incarnation": 7,
        "tenant": "acme",
        "model": "m",
        "ns_id": "00" * 16,
        "status": "ok",
        "error": "",
        "prefix_class": "session",
        "decision": "partial-hit",
        "prompt_tokens": 4000,
        "predicted_tokens": 3200,
        "cached_tokens": 3200,
        "prefill_tokens": 800,
        "output_tokens": 12,
        "queue_wait_ms": 2.5,
        "ttft_ms": 45.25,
        "total_ms": 320.0,
        "ended_at": 1.7e9,
    }
    return Outcome(**(fields | changed))


def told(*records: DecisionRecord | Outcome, others: tuple[str, ...] = ()) -> str:
    decisions = [one for one in records if isinstance(one, DecisionRecord)]
    outcomes = [one for one in records if isinstance(one, Outcome)]
    console = Console(width=200, file=io.StringIO())
    for part in explain.story(Records(decisions, outcomes), others):
        console.print(part, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_term_of_every_candidate_is_in_the_table_or_said_to_be_zero_for_all() -> None:
    made = decision()
    assert len(made.candidate_workers) > 1

    text = told(made)

    for field in CandidateRecord.__struct_fields__:
        if field.endswith("_ms"):
            values = [getattr(one, field) for one in made.candidate_workers]
            if any(values):
                assert all(f"{value:.1f}" in text for value in values), field
            else:
                assert field.removesuffix("_ms").replace("_", " ") in text.partition("0 for all: ")[2], field
    assert made.selected_worker in text
    assert made.decision in text


@pytest.mark.parametrize(
    ("cached", "says"),
    [
        pytest.param(3200, "cached tokens: 3200 (as predicted); 800 computed", id="as predicted"),
        pytest.param(3000, "cached tokens: 3000 (3200 predicted, 200 fewer)", id="fewer"),
        pytest.param(3300, "cached tokens: 3300 (3200 predicted, 100 more)", id="more"),
        pytest.param(None, "3200 predicted; the engine did not say how many", id="not said"),
    ],
)
def test_predicted_stands_beside_actual(cached: int | None, says: str) -> None:
    text = told(decision(predicted_cached_tokens=3200), outcome(cached_tokens=cached))

    assert says in text
    assert "ok on w2, 320.0 ms in all" in text
    assert "waited 2.5 ms, first token after 45.2 ms" in text


def test_an_attempt_that_failed_stands_before_the_one_that_followed() -> None:
    first = decision(attempt=1)
    second = decision(attempt=2, excluded={first.selected_worker: "tried"})

    text = told(second, first, outcome(attempt=2, status="error", error="engine_failed"))

    order = [
        "attempt 1: ",
        f"then: failed, {first.selected_worker} refused it, gave it back or was lost",
        "attempt 2: ",
        f"{first.selected_worker} (tried)",
        "then: error (engine_failed) on w2",
    ]
    assert [text.find(each) for each in order] == sorted(text.find(each) for each in order)
    assert all(each in text for each in order)


def test_a_request_without_an_end_is_not_called_failed() -> None:
    assert "no outcome is in the journal (yet)" in told(decision())


def test_other_requests_of_the_same_label_are_named() -> None:
    assert "had the same label: R0." in told(decision(), others=("R0",))


def test_the_document_is_the_records() -> None:
    records = Records([decision()], [outcome()])

    assert msgspec.json.decode(explain.document(records), type=Records) == records


def test_what_the_price_rests_on_is_told_where_it_is_not_plain() -> None:
    made = decision()
    first, *rest = made.candidate_workers
    first = msgspec.structs.replace(
        first,
        transfer_ms=12.5,
        pull_source="w7",
        pull_tokens=320,
        held_blocks=20,
        announced_blocks=5,
        trust=0.5,
    )
    shadow = ShadowRecord("other/v2", "", "w3", "balanced-cold", 0, 1.0)

    text = told(msgspec.structs.replace(made, candidate_workers=[first, *rest], shadow=shadow))

    assert "320 tokens were to come from w7 in 12.5 ms." in text
    assert "said to hold 20 blocks, 5 of them announced and not there yet; 50% of that was believed" in text
    assert "In shadow, policy other/v2 would have chosen w3, balanced-cold." in text


def test_a_decision_and_its_outcome_are_one_record_to_programs() -> None:
    """In the names of DESIGN 10; a later attempt that has no outcome yet has nulls."""
    first, second = decision(), decision(attempt=2, selected_worker="w3")

    document = json.loads(explain.document(Records([first, second], [outcome()])))

    assert document["told"][0] == {
        "request_id": "R1",
        "attempt": 1,
        "model": "m",
        "prefix_key": first.prefix_key,
        "selected_worker": "w2",
        "candidate_workers": [one.worker for one in first.candidate_workers],
        "predicted_cached_tokens": first.predicted_cached_tokens,
        "actual_cached_tokens": 3200,
        "queue_wait_ms": 2.5,
        "prefill_tokens": 800,
        "decision": first.decision,
    }
    not_known = {name for name, value in document["told"][1].items() if value is None}
    assert not_known == {"actual_cached_tokens", "queue_wait_ms", "prefill_tokens"}
    assert [one["attempt"] for one in document["decisions"]] == [1, 2]
    assert len(document["outcomes"]) == 1


def test_what_went_before_it_in_the_fair_queue_is_told_if_anything_did() -> None:
    waited = told(decision(), outcome(ahead_own_tokens=640, ahead_others_tokens=96))
    at_once = told(decision(), outcome(ahead_own_tokens=0, ahead_others_tokens=0))

    assert "the engine was given 640 tokens of its own tenant and 96 of others" in waited
    assert "of others" not in at_once + told(decision(), outcome())


def test_an_outcome_of_a_worker_that_was_not_chosen_is_not_what_happened() -> None:
    shown = told(decision(), outcome(), outcome(worker="evil", status="error", error="forged"))

    assert "forged" not in shown
    assert "then: ok" in shown


def test_a_record_without_candidates_is_told_as_far_as_it_goes() -> None:
    assert "names no candidates" in told(decision(candidate_workers=[]))
