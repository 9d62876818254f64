"""What choosing by cache gained and cost, on figures small enough to add up by hand."""

from typing import Any

import pytest

from prefixbus.bus.messages import Holdings, Level
from prefixbus.router import gains, policy
from prefixbus.router.cost import PrefillModel
from prefixbus.router.policy import Candidate, Decision, Policy, RequestShape

BLOCK = 16
PROMPT = 1601
"""A hundred full blocks, and a token that is always computed."""
MODEL = PrefillModel(20.0, 0.5, 0.0, 0.0)
RULES = Policy()


def candidate(worker: str, cached_blocks: int = 0, queue_ms: float = 0.0, **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "worker": worker,
        "cached_tokens": cached_blocks * BLOCK,
        "queue_ms": queue_ms,
        "rho": 0.0,
        "pinned_tokens": 0,
        "free_tokens": 100_000,
        "model": MODEL,
    }
    return Candidate(**(values | changes))


def decide(*candidates: Candidate, **changes: Any) -> Decision:
    shape: dict[str, Any] = {"prompt_tokens": PROMPT, "output_tokens": 8, "block_size": BLOCK}
    return policy.decide(RequestShape(**(shape | changes)), list(candidates), RULES, 0.0)


def left(decision: Decision, levels: list[Level] | None, **excluded: str) -> str:
    return gains.left_because(
        decision,
        None if levels is None else Holdings(1, levels),
        excluded,
        prompt_tokens=PROMPT,
        block_size=BLOCK,
        min_reuse_tokens=RULES.min_reuse_tokens,
    )


@pytest.mark.parametrize(
    ("cached", "speed", "saved_ms"),
    [(1600, 1.0, 800.0), (800, 1.0, 400.0), (0, 1.0, 0.0), (800, 2.0, 800.0), (1601, 1.0, 800.0)],
    ids=["all but a token", "half", "nothing", "on a slow worker", "more than can be"],
)
def test_what_is_saved_is_the_prefill_of_what_was_really_reused(cached: int, speed: float, saved_ms: float) -> None:
    decision = decide(candidate("w1", 100, speed=speed))

    assert gains.saved_prefill_ms(decision, PROMPT, cached) == pytest.approx(saved_ms)


def test_the_extra_queue_is_that_beyond_the_shortest() -> None:
    decision = decide(
        candidate("warm", 100, queue_ms=120.0), candidate("idle", queue_ms=20.0), candidate("other", 10, 50)
    )

    assert decision.worker == "warm"
    assert gains.extra_queue_ms(decision) == 100.0


def test_who_is_chosen_with_the_shortest_queue_waits_for_nothing_extra() -> None:
    assert gains.extra_queue_ms(decide(candidate("w1", queue_ms=30.0), candidate("w2", queue_ms=40.0))) == 0.0


@pytest.mark.parametrize(
    ("queue_ms", "token_ms", "why"),
    [(2500.0, 2.0, "max-wait"), (1500.0, 0.5, "margin")],
    ids=["worth its wait, and over the cap", "later than it is worth"],
)
def test_a_holder_with_a_long_queue_is_left_for_the_policys_reason(queue_ms: float, token_ms: float, why: str) -> None:
    model = PrefillModel(20.0, token_ms, 0.0, 0.0)
    decision = decide(candidate("warm", 100, queue_ms, model=model), candidate("idle", model=model))

    assert decision.worker == "idle"
    assert left(decision, [Level(100, ["warm"])]) == why


@pytest.mark.parametrize("why", ["busy", "draining", "suspect", "lost", "tried"])
def test_a_holder_that_could_not_be_chosen_is_left_for_what_kept_it(why: str) -> None:
    assert left(decide(candidate("idle")), [Level(100, ["warm"])], warm=why) == why


def test_a_holder_that_serves_others_or_another_model_is_not_left() -> None:
    decision = decide(candidate("idle"))

    assert left(decision, [Level(100, ["theirs", "older"])], theirs="pool", older="model") == ""


def test_the_deepest_holder_that_might_have_served_it_says_why() -> None:
    decision = decide(candidate("idle"))

    assert (
        left(decision, [Level(100, ["theirs"]), Level(90, ["w2"]), Level(80, ["w3"])], theirs="pool", w2="busy")
        == "busy"
    )


def test_a_holder_whose_equal_was_there_to_be_chosen_is_not_missed() -> None:
    decision = decide(candidate("w1", 100), candidate("idle"))

    assert left(decision, [Level(100, ["w1", "w2"])], w2="busy") == ""


@pytest.mark.parametrize(
    ("chosen_blocks", "why"), [(97, ""), (96, "busy")], ids=["three blocks less", "four blocks less, as many as count"]
)
def test_a_little_less_is_not_leaving(chosen_blocks: int, why: str) -> None:
    decision = decide(candidate("w1", chosen_blocks))

    assert left(decision, [Level(100, ["w2"]), Level(chosen_blocks, ["w1"])], w2="busy") == why


def test_what_only_a_host_store_holds_is_nobodys_to_leave() -> None:
    assert left(decide(candidate("idle")), [Level(100, ["w2"], "host")], w2="busy") == ""


def test_blocks_that_no_prompt_of_this_length_can_reuse_do_not_count() -> None:
    """Its last block is always computed, so two of 33 tokens can reuse one."""
    short = policy.decide(RequestShape(17, 8, BLOCK), [candidate("idle")], RULES, 0.0)
    holdings = Holdings(1, [Level(2, ["w2"])])

    found = gains.left_because(
        short, holdings, {"w2": "busy"}, prompt_tokens=17, block_size=BLOCK, min_reuse_tokens=BLOCK + 1
    )

    assert found == ""


def test_who_decides_blind_does_not_know_whom_he_left() -> None:
    assert left(decide(candidate("idle"), blind=True), None, warm="busy") == ""
