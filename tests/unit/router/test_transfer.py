"""What a transfer takes, learned from transfers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.router.regression import BOUND
from prefixbus.router.transfer import BYTES_PER_MS, MAX_PAIRS, SETUP_MS, Links

KV = 128 * 1024


def transfer(links: Links, rng: random.Random, *, setup_ms: float, bytes_per_ms: float, source: str = "a") -> None:
    size = rng.choice([1, 16, 256, 2048]) * 2**20
    links.learn(source, "b", size, (setup_ms + size / bytes_per_ms) * rng.uniform(0.9, 1.1))


def test_before_anything_is_measured_the_configured_rate_holds() -> None:
    assert Links(KV).transfer_ms("a", "b", 1_000) == pytest.approx(SETUP_MS + 1_000 * KV / BYTES_PER_MS)


@pytest.mark.parametrize("gb_per_s", [2.5, 10, 25])
def test_setup_and_rate_are_learned_apart(gb_per_s: float) -> None:
    links, rng = Links(KV), random.Random(1)

    for _ in range(200):
        transfer(links, rng, setup_ms=12.0, bytes_per_ms=gb_per_s * 1e6)

    assert links.transfer_ms("a", "b", 0) == pytest.approx(12.0, rel=0.1)
    assert links.transfer_ms("a", "b", 16_384) == pytest.approx(12.0 + 16_384 * KV / (gb_per_s * 1e6), rel=0.1)


def test_pairs_are_learned_apart_and_a_new_one_starts_from_all() -> None:
    links, rng = Links(KV), random.Random(2)
    for _ in range(100):
        transfer(links, rng, setup_ms=5.0, bytes_per_ms=20e6, source="near")
        transfer(links, rng, setup_ms=5.0, bytes_per_ms=2e6, source="far")

    near, far, new = (links.transfer_ms(source, "b", 16_384) for source in ("near", "far", "new"))

    assert near < new < far
    assert far == pytest.approx(5 + 16_384 * KV / 2e6, rel=0.1)


@given(st.lists(st.tuples(st.sampled_from([0.0, -1.0, 1e12, math.nan, math.inf]), st.integers(-5, 2**40)), max_size=5))
def test_a_few_absurd_transfers_move_an_estimate_by_less_than_a_tenth(absurd: list[tuple[float, int]]) -> None:
    links, rng = Links(KV), random.Random(3)
    for _ in range(300):
        transfer(links, rng, setup_ms=5.0, bytes_per_ms=10e6)
    before = links.transfer_ms("a", "b", 16_384)

    for took_ms, size in absurd:
        links.learn("a", "b", size, took_ms)

    assert links.transfer_ms("a", "b", 16_384) == pytest.approx(before, rel=0.1)


@given(st.lists(st.tuples(st.floats(), st.integers(-(2**60), 2**60)), max_size=40))
def test_estimates_stay_within_their_bounds(heard: list[tuple[float, int]]) -> None:
    links, prior_ms = Links(KV), Links(KV).transfer_ms("a", "b", 1_000)

    for took_ms, size in heard:
        links.learn("a", "b", size, took_ms)

    assert prior_ms / BOUND**2 <= links.transfer_ms("a", "b", 1_000) <= prior_ms * BOUND**2


def test_pairs_are_bounded_in_number() -> None:
    links = Links(KV)

    for number in range(MAX_PAIRS + 3):
        links.learn(f"w{number}", "b", 2**20, 6.0)

    assert f"pairs={MAX_PAIRS} " in repr(links)
