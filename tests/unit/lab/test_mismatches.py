"""Why reuse was not what was predicted, or could have been."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import record

from prefixbus.bus.messages import CandidateRecord, DecisionRecord, Outcome
from prefixbus.lab import mismatches
from prefixbus.lab.mismatches import CAUSES, Life, Removal, Report

BLOCK = 32
NS = "aa" * 16
Pair = tuple[DecisionRecord, Outcome]


def ended(
    name: str,
    at: float,
    prompt: str,
    *,
    predicted: int = 0,
    cached: int = 0,
    worker: str = "w1",
    incarnation: int = 1,
    ns_id: str = NS,
    announced_blocks: int = 0,
    others_cached: int = 0,
    length: int = 128,
    **changed: Any,
) -> Pair:
    """A request decided at `at` that ended a second later. Each letter of `prompt` is a segment of `length` tokens."""
    segments = [((place + 1) * length, f"{ord(letter):016x}") for place, letter in enumerate(prompt)]
    template = record(random.Random(1)).candidate_workers[0]
    candidates = [
        _candidate(template, worker, predicted, announced_blocks),
        _candidate(template, "w9", others_cached, 0),
    ]
    fields: dict[str, Any] = {
        "request_id": name,
        "decided_at": at,
        "block_size": BLOCK,
        "prompt_tokens": len(prompt) * length,
        "predicted_cached_tokens": predicted,
        "selected_worker": worker,
        "candidate_workers": candidates,
        "segments": segments,
        "template_version": "t1",
        "tokenizer_revision": "k1",
        "blind": False,
    }
    decision = record(random.Random(1), **(fields | changed))
    outcome = Outcome(
        v=1,
        request_id=name,
        client_request_id="",
        attempt=1,
        worker=worker,
        incarnation=incarnation,
        tenant="acme",
        model="m",
        ns_id=ns_id,
        status="ok",
        error="",
        prefix_class="session",
        decision="",
        prompt_tokens=decision.prompt_tokens,
        predicted_tokens=predicted,
        cached_tokens=cached,
        prefill_tokens=None,
        output_tokens=1,
        queue_wait_ms=0.0,
        ttft_ms=1.0,
        total_ms=1000.0,
        ended_at=at + 1.0,
    )
    return decision, outcome


def _candidate(template: CandidateRecord, worker: str, cached: int, announced_blocks: int) -> CandidateRecord:
    return msgspec.structs.replace(template, worker=worker, cached_tokens=cached, announced_blocks=announced_blocks)


def reported(*pairs: Pair, removals: list[Removal] | None = None, lives: list[Life] | None = None) -> Report:
    decisions, outcomes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return mismatches.report(decisions, outcomes, removals or [], lives or [])


def causes(found: Report) -> dict[str, tuple[int, int, list[str]]]:
    """(requests, tokens, examples) of the causes that there are."""
    return {
        name: (group.requests, group.tokens, group.examples) for name, group in found.causes.items() if group.requests
    }


# --- fallen short of the prediction


def test_what_was_removed_between_decision_and_use_is_an_eviction() -> None:
    pair = ended("late", 100.0, "abcd", predicted=384, cached=128)

    found = reported(pair, removals=[Removal("w1", NS, 100.2)])

    assert causes(found) == {"eviction": (1, 256, ["late"])}
    assert (found.predicted, found.cached, found.requests) == (384, 128, 1)


@pytest.mark.parametrize(
    "removal",
    [
        pytest.param(Removal("w2", NS, 100.2), id="another worker's"),
        pytest.param(Removal("w1", "bb" * 16, 100.2), id="another namespace's"),
        pytest.param(Removal("w1", NS, 50.0), id="long before"),
        pytest.param(Removal("w1", NS, 150.0), id="after its end"),
    ],
)
def test_a_removal_that_has_nothing_to_do_with_it_explains_nothing(removal: Removal) -> None:
    found = reported(ended("late", 100.0, "abcd", predicted=384, cached=128), removals=[removal])

    assert causes(found) == {"unknown": (1, 256, ["late"])}


def test_an_emptied_cache_is_an_eviction_in_every_namespace() -> None:
    found = reported(ended("late", 100.0, "abcd", predicted=384, cached=0), removals=[Removal("w1", "", 100.5)])

    assert causes(found) == {"eviction": (1, 384, ["late"])}


def test_a_worker_that_began_anew_while_it_was_decided_is_a_restart() -> None:
    pair = ended("late", 100.0, "abcd", predicted=384, cached=0, incarnation=2)

    found = reported(pair, lives=[Life("w1", 1, 10.0)], removals=[Removal("w1", "", 100.5)])

    assert causes(found) == {"restart": (1, 384, ["late"])}


def test_a_worker_that_is_heard_of_for_the_first_time_did_not_restart() -> None:
    found = reported(ended("late", 100.0, "abcd", predicted=384, cached=0, incarnation=2))

    assert causes(found) == {"unknown": (1, 384, ["late"])}


def test_what_was_only_announced_and_never_came_is_not_materialised() -> None:
    found = reported(ended("sibling", 100.0, "abcd", predicted=384, cached=128, announced_blocks=8))

    assert causes(found) == {"not-materialised": (1, 256, ["sibling"])}


def test_announced_blocks_do_not_explain_more_than_they_are() -> None:
    found = reported(ended("sibling", 100.0, "abcd", predicted=384, cached=128, announced_blocks=7))

    assert causes(found) == {"unknown": (1, 256, ["sibling"])}


def test_less_than_a_block_is_no_mismatch_and_more_than_predicted_is_counted_apart() -> None:
    found = reported(
        ended("near", 100.0, "ab", predicted=BLOCK, cached=1), ended("more", 200.0, "cd", predicted=0, cached=96)
    )

    assert causes(found) == {}
    assert (found.more.requests, found.more.tokens, found.more.examples) == (1, 96, ["more"])


# --- gone since, and foreseen


@pytest.mark.parametrize(
    ("removals", "lives", "cause"),
    [
        pytest.param([Removal("w1", NS, 50.0)], [], "eviction", id="evicted"),
        pytest.param([], [Life("w1", 2, 50.0)], "restart", id="restarted"),
        pytest.param([], [], "unknown", id="nothing known"),
    ],
)
def test_a_beginning_that_was_there_and_was_not_found_is_foreseen(
    removals: list[Removal], lives: list[Life], cause: str
) -> None:
    found = reported(
        ended("first", 10.0, "abcd"), ended("again", 100.0, "abcx", worker="w2"), removals=removals, lives=lives
    )

    assert causes(found) == {cause: (1, 384, ["again"])}
    assert found.causes[cause].foreseen == 1


def test_a_worker_that_held_more_and_was_passed_over_is_a_decision_and_no_mismatch() -> None:
    found = reported(ended("first", 10.0, "abcd"), ended("spilled", 100.0, "abcd", worker="w2", others_cached=384))

    assert causes(found) == {}


def test_a_blind_decision_is_no_mismatch() -> None:
    found = reported(ended("first", 10.0, "abcd"), ended("blind", 100.0, "abcd", worker="w2", blind=True))

    assert causes(found) == {}


def test_a_request_that_ran_at_the_same_time_left_nothing_behind_yet() -> None:
    found = reported(ended("first", 99.5, "abcd"), ended("beside", 100.0, "abcd", worker="w2"))

    assert causes(found) == {}


# --- changed prompts


def test_something_inserted_in_the_prefix_costs_all_that_comes_after_it() -> None:
    found = reported(ended("first", 10.0, "abcdef"), ended("with", 100.0, "abXcdef", predicted=256, cached=256))

    assert causes(found) == {"inserted": (1, 512, ["with"])}
    assert found.causes["inserted"].foreseen == 1
    assert found.same_document.requests == 1


def test_something_changed_at_the_very_beginning_is_found_too() -> None:
    found = reported(ended("first", 10.0, "Tabcd"), ended("later", 100.0, "Uabcd"))

    assert causes(found) == {"inserted": (1, 512, ["later"])}
    assert found.same_document.requests == 0


def test_another_question_to_the_same_prefix_is_no_insertion() -> None:
    found = reported(ended("first", 10.0, "abcQ"), ended("other", 100.0, "abcR", predicted=384, cached=384))

    assert causes(found) == {}


def test_a_document_under_another_prefix_is_counted_and_is_no_insertion() -> None:
    found = reported(ended("first", 10.0, "pDDE"), ended("other", 100.0, "qrstuvDDE"))

    assert causes(found) == {}
    assert (found.same_document.requests, found.same_document.examples) == (1, ["other"])


def test_the_first_prompt_after_a_change_of_template_says_so_and_the_second_finds_its_blocks() -> None:
    found = reported(
        ended("old", 10.0, "abcd"),
        ended("new", 100.0, "abcd", ns_id="bb" * 16, template_version="t2"),
        ended("newer", 200.0, "abcd", ns_id="bb" * 16, template_version="t2", predicted=480, cached=480),
    )

    assert causes(found) == {"template-change": (1, 480, ["new"])}


def test_a_change_of_tokenizer_says_so_as_far_as_tokens_are_the_same() -> None:
    found = reported(ended("old", 10.0, "abcd"), ended("new", 100.0, "abXY", ns_id="bb" * 16, tokenizer_revision="k2"))

    assert causes(found) == {"tokenizer-difference": (1, 256, ["new"])}


def test_another_model_revision_or_salt_shares_nothing_by_intent() -> None:
    found = reported(ended("old", 10.0, "abcd"), ended("new", 100.0, "abcd", ns_id="bb" * 16))

    assert causes(found) == {}
    assert found.same_document.requests == 0


# --- for all


def test_requests_that_failed_or_were_not_counted_are_left_out() -> None:
    (failed, failure), (uncounted, outcome) = ended("a", 1.0, "ab", predicted=256), ended("b", 2.0, "ab", predicted=256)
    failure = msgspec.structs.replace(failure, status="error")
    outcome = msgspec.structs.replace(outcome, cached_tokens=None)

    assert reported((failed, failure), (uncounted, outcome)).requests == 0


def test_records_without_segments_are_judged_by_their_prediction_alone() -> None:
    found = reported(
        ended("old", 10.0, "abcd", segments=[]),
        ended("short", 100.0, "abcd", predicted=384, cached=128, segments=[]),
    )

    assert causes(found) == {"unknown": (1, 256, ["short"])}


@given(
    st.lists(
        st.tuples(
            st.text("abcdef", min_size=1, max_size=8),
            st.sampled_from(["w1", "w2"]),
            st.integers(0, 8),
            st.integers(0, 8),
        ),
        max_size=20,
    )
)
def test_every_request_has_at_most_one_cause_and_none_loses_more_than_its_prompt(
    asked: list[tuple[str, str, int, int]],
) -> None:
    pairs = [
        ended(
            f"r{number}",
            10.0 * number,
            prompt,
            worker=worker,
            predicted=min(predicted, len(prompt)) * 128,
            cached=min(cached, len(prompt)) * 128,
        )
        for number, (prompt, worker, predicted, cached) in enumerate(asked)
    ]

    found = reported(*pairs)

    assert sum(group.requests for group in found.causes.values()) <= found.requests == len(pairs)
    assert set(found.causes) == set(CAUSES)
    lost = sum(group.tokens for group in found.causes.values())
    assert 0 <= lost <= sum(len(prompt) * 128 for prompt, *_ in asked)
