"""A directory that is always wrong is not acted on; one that is sometimes wrong is."""

import pytest

from prefixbus.router.cost import PROFILES
from prefixbus.router.credit import PROBE_EVERY, Credit, said_blocks
from prefixbus.router.policy import Candidate


def asks(credit: Credit, requests: int = 10 * PROBE_EVERY) -> int:
    return sum(credit.may_ask() for _ in range(requests))


def after(*answers: tuple[int, int], shared_blocks: int = 0) -> Credit:
    credit = Credit()
    for said, found in answers:
        credit.heard(said, found, shared_blocks)
    return credit


@pytest.mark.parametrize(
    ("answers", "shared_blocks"),
    [
        pytest.param([], 0, id="nothing heard yet"),
        pytest.param([(100, 100)] * 50, 0, id="always right"),
        pytest.param([(100, 0), (100, 100)] * 50, 0, id="wrong every other time"),
        pytest.param([(100, 40)] * 50, 0, id="nearly half of it there"),
        pytest.param([(0, 100)] * 50, 0, id="says nothing"),
        pytest.param([(60, 60)] * 50, 60, id="says what all know"),
        pytest.param([(100, 0)] * 20, 0, id="a worker's whole cache just went"),
    ],
)
def test_a_directory_is_asked_that_is_not_wrong_all_the_time(
    answers: list[tuple[int, int]], shared_blocks: int
) -> None:
    assert asks(after(*answers, shared_blocks=shared_blocks)) == 10 * PROBE_EVERY


@pytest.mark.parametrize(
    ("answers", "shared_blocks"),
    [
        pytest.param([(100, 0)] * 25, 0, id="nothing there"),
        pytest.param([(100, 60)] * 25, 60, id="only what all know is there"),
        pytest.param([(100, 10)] * 50, 0, id="a tenth of it there"),
    ],
)
def test_a_directory_that_is_wrong_all_the_time_is_asked_now_and_then(
    answers: list[tuple[int, int]], shared_blocks: int
) -> None:
    assert asks(after(*answers, shared_blocks=shared_blocks)) == 10


def test_belief_comes_back_with_answers_that_are_true() -> None:
    credit = after(*[(100, 0)] * 25)

    for _ in range(8):
        credit.heard(100, 100, 0)

    assert asks(credit) == 10 * PROBE_EVERY


def test_more_than_was_said_is_no_more_than_right() -> None:
    """Or a few lucky hits would pay for many wrong answers."""
    assert asks(after((1, 1000), *[(100, 0)] * 25)) == 10


def test_what_is_only_announced_is_not_the_directorys_word_nor_what_no_engine_can_reuse() -> None:
    chosen = Candidate("w1", 0, 0.0, 0.0, 0, 0, PROFILES["h100-8b"], held_blocks=10, announced_blocks=3)

    assert said_blocks(chosen, prompt_tokens=10 * 32 + 1, block_size=32) == 7
    assert said_blocks(chosen, prompt_tokens=10 * 32, block_size=32) == 6
