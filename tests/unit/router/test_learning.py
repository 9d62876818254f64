"""Prefill models and speeds learned from outcomes: they come to the truth, and nothing absurd leads them away."""

import math
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.bus.messages import Outcome
from prefixbus.router import cost
from prefixbus.router.cost import PROFILES, PrefillModel
from prefixbus.router.fleet import Surroundings, WorkerClass
from prefixbus.router.learning import (
    FORGET_AFTER_S,
    MAX_CLASSES,
    MAX_WORKERS,
    SPEED_BOUND,
    STEADY_SAMPLES,
    Learner,
)
from prefixbus.router.regression import BOUND, MEMORY, Regression

H100 = PROFILES["h100-8b"]
CLASS = WorkerClass("m", "digest", "h100")
ALONE = Surroundings(CLASS, 0, 0.0)
LENGTHS = [(40, 1_000), (300, 300), (2_000, 8_000), (8_000, 8_000), (500, 60_000), (60_000, 60_000)]


def outcome(ttft_ms: float | None, computed: int | None = 2_000, prompt: int = 8_000, **changed: Any) -> Outcome:
    values: dict[str, Any] = {
        "v": 1,
        "request_id": "R1",
        "client_request_id": "c1",
        "attempt": 1,
        "worker": "w1",
        "incarnation": 1,
        "tenant": "acme",
        "model": "m",
        "ns_id": "",
        "status": "ok",
        "error": "",
        "prefix_class": "session",
        "decision": "partial-hit",
        "prompt_tokens": prompt,
        "predicted_tokens": 0,
        "cached_tokens": 0,
        "prefill_tokens": computed,
        "output_tokens": 1,
        "queue_wait_ms": 0.0,
        "ttft_ms": ttft_ms,
        "total_ms": 1.0,
        "ended_at": 0.0,
    }
    return Outcome(**(values | changed))


def machine(fixed: float, token: float, attention: float) -> PrefillModel:
    """One that takes so many times what the profile says."""
    return PrefillModel(
        H100.fixed_ms * fixed,
        H100.token_ms * token,
        H100.attention_ms * attention,
        H100.decode_context_token_ms,
    )


def serve(
    learner: Learner,
    truth: PrefillModel,
    rng: random.Random,
    *,
    slowness: float = 1.0,
    now: float = 0.0,
    **changed: Any,
) -> None:
    """A request of a random length ends; it took what the machine takes, give or take a tenth."""
    computed, prompt = rng.choice(LENGTHS)
    took_ms = slowness * cost.prefill_ms(truth, computed, prompt) * rng.uniform(0.9, 1.1)
    learner.hear(outcome(took_ms, computed, prompt, **changed), ALONE, 0.0)


def errors(learner: Learner, truth: PrefillModel) -> list[float]:
    """How far off the model is for each length, relative to the truth."""
    model = learner.model_of(CLASS)
    return [abs(cost.prefill_ms(model, *length) / cost.prefill_ms(truth, *length) - 1.0) for length in LENGTHS]


def is_bounded(learner: Learner) -> bool:
    """Whether every figure is a number within its bound."""
    model = learner.model_of(CLASS)
    learned = (model.fixed_ms, model.token_ms, model.attention_ms)
    priors = (H100.fixed_ms, H100.token_ms, H100.attention_ms)
    factors = [figure / prior for figure, prior in zip(learned, priors, strict=True)]
    speed = learner.speed_of("w1", 1, 0.0)
    return all(0.999 / BOUND <= factor <= 1.001 * BOUND for factor in factors) and (
        1 / SPEED_BOUND <= speed <= SPEED_BOUND
    )


# --- the model of a class


def test_the_profile_holds_until_something_is_measured() -> None:
    assert Learner({"m": H100}).model_of(CLASS) == H100


@given(
    factors=st.tuples(*3 * [st.sampled_from([0.5, 1.0, 2.0])]),
    seed=st.integers(0, 1000),
)
@example(factors=(2.0, 2.0, 2.0), seed=0)
@example(factors=(0.5, 0.5, 0.5), seed=0)
@example(factors=(2.0, 0.5, 2.0), seed=0)
def test_a_prior_wrong_by_two_is_corrected_in_200_samples(factors: tuple[float, float, float], seed: int) -> None:
    learner, rng, truth = Learner({"m": H100}), random.Random(seed), machine(*factors)

    for _ in range(200):
        serve(learner, truth, rng)

    assert max(errors(learner, truth)) < 0.1


def test_a_machine_ten_times_as_slow_as_its_profile_is_found_out() -> None:
    learner, rng, truth = Learner({"m": H100}), random.Random(1), machine(10, 10, 10)

    for _ in range(200):
        serve(learner, truth, rng)

    assert max(errors(learner, truth)) < 0.1


def test_a_class_that_turns_slower_is_followed() -> None:
    learner, rng = Learner({"m": H100}), random.Random(1)
    for _ in range(500):
        serve(learner, H100, rng)

    for _ in range(4 * MEMORY):
        serve(learner, machine(2, 2, 2), rng, worker=f"w{rng.randrange(8)}")

    assert max(errors(learner, machine(2, 2, 2))) < 0.1


ABSURD = [0.0, 1e9, 1e300, -5.0, math.nan, math.inf, 1e-9]


@given(
    st.lists(st.tuples(st.sampled_from(ABSURD), st.sampled_from(LENGTHS)), min_size=1, max_size=3), st.integers(0, 99)
)
def test_a_few_absurd_outcomes_move_a_settled_model_by_less_than_a_tenth(
    absurd: list[tuple[float, tuple[int, int]]], seed: int
) -> None:
    learner, rng = Learner({"m": H100}), random.Random(seed)
    for _ in range(200):
        serve(learner, H100, rng)
    before = learner.model_of(CLASS)

    for took_ms, (computed, prompt) in absurd:
        learner.hear(outcome(took_ms, computed, prompt), ALONE, 0.0)

    assert max(errors(learner, before)) < 0.1


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats() | st.sampled_from(ABSURD),
            st.none() | st.integers(-(2**40), 2**40),
            st.integers(-(2**40), 2**40),
            st.none() | st.floats(),
            st.integers(0, 2**40),
            st.floats(),
        ),
        max_size=60,
    )
)
def test_whatever_is_heard_all_figures_stay_within_their_bounds(heard: list[Any]) -> None:
    learner = Learner({"m": H100})

    for took_ms, computed, prompt, waited_ms, pinned, neighbours_ms in heard:
        around = Surroundings(CLASS, pinned, neighbours_ms)
        learner.hear(outcome(took_ms, computed, prompt, queue_wait_ms=waited_ms), around, 0.0)

    assert is_bounded(learner)


def test_lies_told_for_ever_end_at_the_bound() -> None:
    learner = Learner({"m": H100})

    for _ in range(3_000):
        learner.hear(outcome(1e12), ALONE, 0.0)

    assert is_bounded(learner)
    assert learner.model_of(CLASS).token_ms > 4 * H100.token_ms


def test_prompts_of_one_length_say_nothing_about_others() -> None:
    """The same n for hours: what it cannot tell apart stays as the profile has it."""
    learner = Learner({"m": H100})
    for _ in range(2_000):
        learner.hear(outcome(2 * cost.prefill_ms(H100, 16_000, 16_000), 16_000, 16_000), ALONE, 0.0)

    model = learner.model_of(CLASS)

    assert cost.prefill_ms(model, 16_000, 16_000) == pytest.approx(2 * cost.prefill_ms(H100, 16_000, 16_000), rel=0.02)
    assert model.fixed_ms == pytest.approx(H100.fixed_ms, rel=0.2)
    assert model.attention_ms == pytest.approx(H100.attention_ms, rel=0.2)


def test_what_samples_no_longer_speak_of_returns_to_the_prior() -> None:
    fit = Regression((1.0, 1.0))
    for _ in range(500):
        fit.learn((1.0, 0.0), 3.0)
        fit.learn((0.0, 1.0), 3.0)

    for _ in range(20 * MEMORY):
        fit.learn((1.0, 0.0), 3.0)

    assert fit.coefficients == pytest.approx([3.0, 1.0], rel=0.05)


def test_classes_are_learned_apart() -> None:
    learner, other = Learner({"m": H100}), Surroundings(CLASS._replace(label="a100"), 0, 0.0)

    for _ in range(50):
        learner.hear(outcome(500.0), other, 0.0)

    assert learner.model_of(CLASS) == H100
    assert learner.model_of(other.worker_class) != H100


def test_a_profile_of_zeros_stays_one() -> None:
    learner = Learner({"m": PROFILES["instant"]})

    assert learner.hear(outcome(5.0), ALONE, 0.0) == "useless"
    assert learner.model_of(CLASS) == PROFILES["instant"]


# --- which outcomes count


@pytest.mark.parametrize(
    ("changed", "around", "verdict"),
    [
        pytest.param({}, ALONE, "learned", id="a plain one"),
        pytest.param({"status": "error", "error": "engine_failed"}, ALONE, "useless", id="failed"),
        pytest.param({"status": "cancelled", "error": "cancelled"}, ALONE, "useless", id="cancelled"),
        pytest.param({"prefill_tokens": None}, ALONE, "useless", id="the engine did not count"),
        pytest.param({"prefill_tokens": 0}, ALONE, "useless", id="nothing computed"),
        pytest.param({"prefill_tokens": 9_000}, ALONE, "useless", id="more computed than asked"),
        pytest.param({"ttft_ms": None}, ALONE, "useless", id="no first token"),
        pytest.param({"queue_wait_ms": None}, ALONE, "useless", id="no wait known"),
        pytest.param({"queue_wait_ms": -1.0}, ALONE, "useless", id="a negative wait"),
        pytest.param({"queue_wait_ms": 40.0}, ALONE, "contended", id="it waited, so it may have shared its steps"),
        pytest.param({}, ALONE._replace(neighbours_ms=60.0), "contended", id="others came while it was computed"),
        pytest.param({}, ALONE._replace(neighbours_ms=3.0), "learned", id="a small one came"),
        pytest.param({}, ALONE._replace(worker_class=CLASS._replace(model="x")), "useless", id="another model"),
    ],
)
def test_only_what_was_computed_alone_and_whole_counts(
    changed: dict[str, Any], around: Surroundings, verdict: str
) -> None:
    assert Learner({"m": H100}).hear(outcome(**({"ttft_ms": 60.0} | changed)), around, 0.0) == verdict


def test_what_decodes_cost_is_not_taken_for_prefill() -> None:
    learner, pinned = Learner({"m": H100}), 400_000
    beside_ms = cost.interference_ms(H100, 2_000, pinned)

    for _ in range(100):
        learner.hear(outcome(cost.prefill_ms(H100, 2_000, 8_000) + beside_ms), Surroundings(CLASS, pinned, 0.0), 0.0)

    assert beside_ms > 20
    assert max(errors(learner, H100)) < 0.01


# --- the speed of a worker


def test_a_worker_twice_as_slow_as_its_class_is_found_out_and_the_class_is_not_blamed() -> None:
    learner, rng = Learner({"m": H100}), random.Random(3)

    for number in range(800):
        worker = f"w{number % 8}"
        serve(learner, H100, rng, slowness=2.0 if worker == "w3" else 1.0, worker=worker)

    speeds = {f"w{n}": learner.speed_of(f"w{n}", 1, 0.0) for n in range(8)}
    assert speeds.pop("w3") == pytest.approx(2.0, rel=0.15)
    assert set(speeds.values()) == {1.0}
    assert max(errors(learner, H100)) < 0.1


def test_a_whole_class_slower_than_its_profile_makes_nobody_stand_out() -> None:
    learner, rng = Learner({"m": H100}), random.Random(4)

    for number in range(600):
        serve(learner, machine(2, 2, 2), rng, worker=f"w{number % 4}")
        assert all(learner.speed_of(f"w{n}", 1, 0.0) == 1.0 for n in range(4))

    assert max(errors(learner, machine(2, 2, 2))) < 0.1


@given(st.integers(0, 10_000))
def test_noise_makes_nobody_stand_out(seed: int) -> None:
    learner, rng = Learner({"m": H100}), random.Random(seed)

    for number in range(200):
        serve(learner, H100, rng, slowness=rng.uniform(0.7, 1.3), worker=f"w{number % 4}")
        assert all(learner.speed_of(f"w{n}", 1, 0.0) == 1.0 for n in range(4))


def test_a_slow_worker_that_recovers_is_as_the_others_again() -> None:
    learner, rng = Learner({"m": H100}), random.Random(5)
    for number in range(400):
        serve(learner, H100, rng, slowness=1.0 if number % 4 else 2.5, worker=f"w{number % 4}")
    slow = learner.speed_of("w0", 1, 0.0)

    for number in range(1_000):
        serve(learner, H100, rng, worker=f"w{number % 4}")

    assert slow > 2.0
    assert learner.speed_of("w0", 1, 0.0) == 1.0


def test_a_few_slow_answers_do_not_make_a_slow_worker() -> None:
    learner, rng = Learner({"m": H100}), random.Random(6)
    for number in range(200):
        serve(learner, H100, rng, worker=f"w{number % 4}")

    for _ in range(3):
        serve(learner, H100, rng, slowness=1000.0, worker="w0")

    assert learner.speed_of("w0", 1, 0.0) == 1.0


def test_a_speed_does_not_outlive_the_workers_life_or_its_last_sample_for_long() -> None:
    """Whoever is thought slow gets little to prove otherwise with."""
    learner, rng = Learner({"m": H100}), random.Random(7)
    for number in range(400):
        serve(learner, H100, rng, slowness=1.0 if number % 4 else 2.5, worker=f"w{number % 4}")

    assert learner.speed_of("w0", 1, FORGET_AFTER_S) > 2.0
    assert learner.speed_of("w0", 1, FORGET_AFTER_S + 1) == 1.0
    assert learner.speed_of("w0", 2, 0.0) == 1.0


def test_speeds_need_a_steady_record() -> None:
    learner, rng = Learner({"m": H100}), random.Random(8)
    for number in range(300):
        serve(learner, H100, rng, worker=f"w{1 + number % 3}")

    for _ in range(STEADY_SAMPLES - 1):
        serve(learner, H100, rng, slowness=2.0, worker="w9")
    early = learner.speed_of("w9", 1, 0.0)
    serve(learner, H100, rng, slowness=2.0, worker="w9")

    assert early == 1.0
    assert learner.speed_of("w9", 1, 0.0) > 1.4


def test_what_is_learned_is_bounded_in_number() -> None:
    learner = Learner({"m": H100})
    for number in range(MAX_WORKERS + 5):
        around = ALONE._replace(worker_class=CLASS._replace(label=str(number)))
        learner.hear(outcome(60.0, worker=f"w{number}"), around, 0.0)

    assert repr(learner) == f"<Learner classes={MAX_CLASSES} workers={MAX_WORKERS}>"
