"""How outcomes and time change what is expected of a worker in a namespace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.directory.trust import Ages, Trust, TrustRules

NS = bytes(16)
OTHER_NS = b"other-namespace!"
RULES = TrustRules()


def trust_of(trust: Trust, worker: str = "w", ns_id: bytes = NS, now: float = 0.0) -> float:
    return next((doubt.trust for doubt in trust.doubts(ns_id, now) if doubt.worker == worker), 1.0)


def answers(trust: Trust, *answers: tuple[int, int], now: float = 0.0, ns_id: bytes = NS, life: int = 1) -> list[bool]:
    """(predicted, cached) tokens, one after the other; whether each asked for a dump."""
    return [trust.outcome("w", life, ns_id, predicted, cached, now) for predicted, cached in answers]


def test_predictions_that_come_true_leave_no_doubt() -> None:
    trust = Trust()

    asked = answers(trust, (4000, 4000), (4000, 5000), (0, 0), (64, 32), (4000, 3950))

    assert not any(asked)
    assert len(trust) == 0


def test_one_total_miss_takes_most_of_the_trust_and_good_answers_give_it_back_slowly() -> None:
    trust = Trust()

    answers(trust, (4000, 0))
    after_miss = trust_of(trust)
    answers(trust, (1000, 1000))
    after_one_good = trust_of(trust)
    answers(trust, *[(1000, 1000)] * 20)

    assert after_miss == pytest.approx(0.25)
    assert after_one_good == pytest.approx(0.325)
    assert trust_of(trust) > 0.9


def test_trust_falls_in_proportion_to_what_was_missing() -> None:
    trust = Trust()

    answers(trust, (4000, 3000))

    assert trust_of(trust) == pytest.approx(1 - 0.75 / 4)


def test_trust_never_falls_below_its_floor() -> None:
    trust = Trust()

    answers(trust, *[(4000, 0)] * 50)

    assert trust_of(trust) == pytest.approx(RULES.floor)


def test_time_alone_ends_a_doubt() -> None:
    """A worker that is trusted less is chosen less, and could never prove itself."""
    trust = Trust()
    answers(trust, (4000, 0))

    by_half_lives = [trust_of(trust, now=RULES.forget_half_life_s * count) for count in (1, 2, 20)]

    assert by_half_lives == pytest.approx([0.625, 0.8125, 1.0], abs=1e-5)
    assert len(trust) == 0


@given(truth=st.floats(0.2, 0.95))
def test_trust_settles_where_scaled_predictions_just_come_true(truth: float) -> None:
    """The router predicts trust x what the index says; the worker holds a fixed share of what the index says."""
    trust = Trust()
    said = 8000
    predicted: list[float] = []

    for _ in range(200):
        share = trust_of(trust)
        predicted.append(share)
        answers(trust, (int(share * said), int(truth * said)))

    settled = sum(predicted[-50:]) / 50
    assert truth * 0.9 <= settled <= truth * 1.15 + 0.02


def test_doubts_are_about_one_worker_in_one_namespace() -> None:
    trust = Trust()

    answers(trust, (4000, 0))

    assert trust_of(trust, "v") == trust_of(trust, ns_id=OTHER_NS) == 1.0


def test_a_new_life_begins_without_doubts_and_the_old_one_says_nothing_about_it() -> None:
    trust = Trust()
    answers(trust, (4000, 0))

    answers(trust, (4000, 3000), life=2)
    of_new_life = trust_of(trust)
    answers(trust, (4000, 0), life=1)

    assert of_new_life == pytest.approx(1 - 0.75 / 4)
    assert [(doubt.incarnation, doubt.trust) for doubt in trust.doubts(NS, 0.0)] == [(2, of_new_life)]


def test_three_misses_running_ask_for_a_dump() -> None:
    trust = Trust()

    asked = answers(trust, (4000, 100), (4000, 0), (4000, 1000), (4000, 0), (4000, 0), (4000, 0))

    assert asked == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    "between",
    [
        pytest.param((4000, 4000), id="a hit"),
        pytest.param((4000, 2500), id="a shortfall of less than half"),
        pytest.param((300, 100), id="a shortfall too small to matter"),
    ],
)
def test_misses_with_something_better_between_them_do_not(between: tuple[int, int]) -> None:
    trust = Trust()

    asked = answers(trust, (4000, 0), (4000, 0), between, (4000, 0), (4000, 0))

    assert not any(asked)


def test_doubts_are_bounded_and_the_oldest_namespaces_go_first() -> None:
    trust = Trust(TrustRules(doubts_max=100))

    for number in range(1000):
        answers(trust, (4000, 0), ns_id=number.to_bytes(16, "little"))

    assert len(trust) == 100
    assert trust_of(trust, ns_id=(0).to_bytes(16, "little")) == 1.0
    assert trust_of(trust, ns_id=(999).to_bytes(16, "little")) < 1.0


def test_doubts_in_one_namespace_are_bounded_too() -> None:
    trust = Trust(TrustRules(doubts_max=100))

    for number in range(1000):
        trust.outcome(f"w{number}", 1, NS, 4000, 0, 0.0)

    assert len(trust) == 100
    assert [trust_of(trust, "w0"), trust_of(trust, "w999")] == pytest.approx([1.0, 0.25])


def test_entries_are_fresh_for_long_then_age_slowly_and_never_to_nothing() -> None:
    ages = Ages(TrustRules(fresh_s=100.0, age_half_life_s=50.0, age_floor=0.5))

    assert [ages.trust(age) for age in (0, 100, 150, 200)] == [1.0, 1.0, 0.75, 0.625]
    assert ages.trust(1e9) == 0.5


def test_marks_of_old_entries_are_bounded_and_can_be_taken_back() -> None:
    ages = Ages(TrustRules(old_max=10))

    for number in range(50):
        for slot in (0, 1):
            ages.mark(number.to_bytes(16, "little"), slot)
    kept = len(ages)
    last = (49).to_bytes(16, "little")
    ages.clear(last, 0)
    ages.clear(last, 0)
    ages.clear(bytes(16), 7)

    assert kept == 10
    assert (len(ages), list(ages.marked(last))) == (9, [1])
