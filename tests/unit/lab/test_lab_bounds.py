"""The bounds: what no placement can beat, and that none does."""

import pytest

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.lab import synthetic
from prefixbus.lab.bounds import shared_pool, token_reuse
from prefixbus.lab.harness import run
from prefixbus.lab.rules import RULES, Cache, MakeRule, ruled
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Arrival, Segment, Workload, keys_of, seed_of
from prefixbus.router.policy import Policy

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

BLOCK = 32
WORKERS = 4
# All together half of what is asked for again.
KV_TOKENS = 16_000
POLICIES: dict[str, Policy | MakeRule] = {
    "prefix-aware": Policy(),
    **{name: ruled(name) for name, source in RULES.items() if source.cache is Cache.OWN},
}


def request(at: float, *segments: tuple[int, int], output_tokens: int = 1) -> Arrival:
    parts = [Segment(*segment) for segment in segments]
    keys = keys_of(parts, BLOCK, seed_of("acme"))
    return Arrival(at, keys, sum(tokens for _, tokens in segments), output_tokens)


@pytest.fixture(scope="module")
def load() -> Workload:
    return synthetic.zipf_prefixes(rate=20, count=250, prefixes=60, exponent=0.8, prefix_tokens=2000, seed=3)


@pytest.fixture(scope="module")
def bounds(load: Workload) -> tuple[float, float]:
    return token_reuse(load, WORKERS * KV_TOKENS), token_reuse(load, None)


# --- the cache alone


def test_without_end_all_that_came_before_is_reused_but_for_one_token() -> None:
    load = Workload([request(0, (1, 128)), request(1, (1, 128)), request(2, (1, 64), (2, 64))], BLOCK)

    assert token_reuse(load, None) == (96 + 64) / (3 * 128)


def test_what_was_used_longest_ago_goes_first_and_of_a_chain_its_tail() -> None:
    requests = [request(0, (1, 128)), request(1, (2, 64)), request(2, (1, 128))]

    assert token_reuse(Workload(requests, BLOCK), 6 * BLOCK) == 96 / 320
    assert token_reuse(Workload(requests, BLOCK), 4 * BLOCK) == 64 / 320
    assert token_reuse(Workload(requests, BLOCK), 2 * BLOCK) == 0


def test_output_takes_room_in_the_cache() -> None:
    short = [request(0, (1, 128)), request(1, (2, 32)), request(2, (1, 128))]
    long = [short[0], request(1, (2, 32), output_tokens=97), short[2]]

    assert token_reuse(Workload(short, BLOCK), 5 * BLOCK) == 96 / 288
    assert token_reuse(Workload(long, BLOCK), 5 * BLOCK) == 32 / 288


# --- and in the harness


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_policy_reuses_more_than_the_bounds(
    load: Workload, bounds: tuple[float, float], policy: Policy | MakeRule
) -> None:
    pooled, endless = bounds

    reuse = run(Setup(policy=policy, workers=WORKERS, kv_tokens=KV_TOKENS), load).token_reuse

    assert reuse <= pooled < endless


def test_engines_with_one_cache_reuse_what_the_cache_alone_would(load: Workload, bounds: tuple[float, float]) -> None:
    setups = [Setup(policy=ruled(name), workers=WORKERS, kv_tokens=KV_TOKENS) for name in ("pooled-lru", "infinite")]

    pooled, endless = (run(setup, load) for setup in setups)

    assert (pooled.token_reuse, endless.token_reuse) == pytest.approx(bounds, rel=0.02)
    assert pooled.leftovers == endless.leftovers == []


def test_more_memory_that_all_share_is_sooner(load: Workload) -> None:
    """All three place by load alone: memory is all the difference."""
    means = [
        run(Setup(policy=ruled(name), workers=WORKERS, kv_tokens=KV_TOKENS), load).ttft().mean
        for name in ("infinite", "pooled-lru", "least-loaded")
    ]

    assert means == sorted(means)


def test_the_pooled_cache_is_as_large_as_the_workers_together(load: Workload) -> None:
    setup = Setup(policy=ruled("pooled-lru"), workers=4, kv_tokens=3200, kv_tokens_of={"w1": 6400})

    pool = shared_pool(setup, load)

    assert pool is not None
    assert pool.capacity == (3 * 3200 + 6400) // BLOCK
    assert shared_pool(Setup(), load) is None


def test_one_cache_of_all_has_no_part_that_a_worker_could_lose(load: Workload) -> None:
    with pytest.raises(ConfigInvalid, match="one cache of all"):
        run(Setup(policy=ruled("infinite"), resets=((1.0, "w1"),)), load)
