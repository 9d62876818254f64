"""How much of prompts repeats: by hand on small traffic, and the published figures on recorded traffic."""

import functools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.engine_sim.profile import PRESETS
from prefixbus.lab import repeats, traces
from prefixbus.lab.repeats import Bound, Cache, Prompt, Report

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
H100 = PRESETS["h100-8b"]


def prompt(*blocks: int, tokens: int = 0, prefix_class: str = "session") -> Prompt:
    return Prompt(blocks, tokens or 16 * len(blocks), prefix_class)


def reported(*asked: Prompt, workers: int = 1, kv_tokens: int = 1 << 20) -> Report:
    return repeats.report(asked, 16, workers, kv_tokens, H100)


@functools.cache
def recorded(name: str) -> list[Prompt]:
    file = TRACES / f"{name}.jsonl"
    if not file.exists():
        pytest.skip(f"{file.name} is not beside the project (shared/data)")
    block = 16 if name == "tau_airline" else 512
    with file.open("rb") as lines:
        return repeats.prompts(traces.read(lines, block), block)


# --- by hand


def test_what_an_earlier_prompt_began_with_can_be_reused() -> None:
    told = reported(prompt(1, 2, 3), prompt(1, 2, 4), prompt(9), prompt(1, 2, 4, 5)).all

    assert (told.requests, told.repeating) == (4, 2)
    assert (told.prompt_tokens, told.reusable_tokens) == (16 * 11, 16 * 5)
    assert (told.prefix_tokens.p50, told.prefix_tokens.longest) == (0, 48)
    assert sum(count for _, _, count in told.histogram) == 4
    assert told.histogram[:2] == [(0, 1, 2), (1, 256, 2)]


def test_a_common_block_after_a_different_one_is_no_prefix() -> None:
    assert reported(prompt(1, 2), prompt(3, 2)).all.reusable_tokens == 0


def test_what_repeats_is_told_by_prefix_class() -> None:
    told = reported(prompt(1, prefix_class="rag"), prompt(1, 2, prefix_class="session"), prompt(3, prefix_class="rag"))

    assert {name: one.reusable_tokens for name, one in told.by_class.items()} == {"rag": 0, "session": 16}


def test_a_last_block_that_is_not_full_counts_as_many_tokens_as_it_has() -> None:
    assert reported(prompt(1, 2, tokens=20), prompt(1, 2, tokens=20)).all.reusable_tokens == 20


def test_tenants_have_no_block_in_common() -> None:
    lines = [traces.Line(0.0, 16, 1, [1], tenant="acme"), traces.Line(1.0, 16, 1, [1], tenant="globex")]

    assert reported(*repeats.prompts(lines, 16)).all.reusable_tokens == 0


def test_the_least_recently_wanted_block_goes_first_and_of_a_prompt_its_tail() -> None:
    cache = Cache(3)
    cache.serve([1, 2, 3])

    assert cache.serve([9]) == 0
    assert cache.serve([1, 2, 3]) == 2


def test_requests_dealt_in_turn_find_what_their_own_worker_had() -> None:
    asked = [prompt(1), prompt(2), prompt(1), prompt(1)]

    told = reported(*asked, workers=2)

    assert told.pooled.token_reuse == 0.5
    assert told.in_turn.token_reuse == 0.25


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_no_cache_finds_more_than_one_that_forgets_nothing(paths: list[list[int]], workers: int, blocks: int) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    asked = [
        prompt(*(numbers.setdefault(tuple(path[:depth]), len(numbers)) for depth in range(1, len(path) + 1)))
        for path in paths
    ]

    told = reported(*asked, workers=workers, kv_tokens=16 * blocks)

    assert told.infinite.token_reuse == pytest.approx(told.all.share)
    assert max(told.pooled.token_reuse, told.in_turn.token_reuse) <= told.ceiling.token_reuse
    assert told.ceiling.token_reuse <= told.infinite.token_reuse
    assert reported(*asked).in_turn == reported(*asked).pooled


def test_a_scan_of_what_is_never_asked_again_takes_nothing_from_the_ceiling() -> None:
    """One LRU of both workers' four blocks loses the prompt that repeats; a worker of its own would keep it."""
    scan = iter(range(100, 200))
    asked = [prompt(1) if number % 6 == 0 else prompt(next(scan)) for number in range(24)]

    told = reported(*asked, workers=2, kv_tokens=2 * 16)

    assert told.pooled.token_reuse == 0
    assert told.ceiling.token_reuse == told.infinite.token_reuse == 3 / 24


def test_of_no_prompts_nothing_can_be_said() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        reported()


# --- go or no-go


def bound(saved_ms: float) -> Bound:
    return Bound(token_reuse=0.0, prefill_ms_saved=saved_ms)


@pytest.mark.parametrize(
    ("prefill_ms", "pooled_ms", "in_turn_ms", "go", "because"),
    [
        pytest.param(100_000, 50_000, 10_000, True, "go: ", id="much is gained"),
        pytest.param(100_000, 50_000, 50_000, False, "no-go: ", id="all of it is there without a router"),
        pytest.param(100_000, 10_000, 0, False, "less than 2 times the 7 ms", id="less than the way costs"),
        pytest.param(1_000_000, 40_000, 0, False, "less than 5% of all prefill", id="a small part of the work"),
    ],
)
def test_go_means_that_choosing_workers_gains_more_than_it_costs(
    prefill_ms: float, pooled_ms: float, in_turn_ms: float, go: bool, because: str
) -> None:
    """A thousand requests."""
    decided, sentence = repeats.verdict(1000, prefill_ms, bound(2 * pooled_ms), bound(pooled_ms), bound(in_turn_ms))

    assert decided is go
    assert because in sentence


def test_traffic_that_never_repeats_is_a_no_go() -> None:
    told = reported(*(prompt(*range(1000 * number, 1000 * number + 500)) for number in range(20)), workers=4)

    assert not told.go
    assert told.verdict.startswith("no-go: choosing workers can save about 0.0 ms")


# --- recorded traffic


@pytest.mark.parametrize(
    ("name", "share"), [("mooncake_conversation", 0.374), ("mooncake_synthetic", 0.651), ("tau_airline", 0.926)]
)
def test_a_cache_that_forgets_nothing_finds_the_published_share(name: str, share: float) -> None:
    asked = recorded(name)
    block = 16 if name == "tau_airline" else 512

    found = repeats.reused(asked, block, [Cache(None)])

    assert sum(found) / sum(one.tokens for one in asked) == pytest.approx(share, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "workers", "share"),
    [
        ("mooncake_conversation", 8, 0.2708),
        ("mooncake_conversation", 16, 0.3415),
        ("mooncake_synthetic", 8, 0.5413),
        ("mooncake_synthetic", 16, 0.6406),
    ],
)
def test_one_pooled_cache_finds_the_published_share(name: str, workers: int, share: float) -> None:
    asked = recorded(name)

    found = repeats.reused(asked, 512, [Cache(workers * (1 << 20) // 512)])

    assert sum(found) / sum(one.tokens for one in asked) == pytest.approx(share, abs=0.00006)


def test_recorded_conversations_are_a_go() -> None:
    told = repeats.report(recorded("mooncake_conversation"), 512, 8, 1 << 20, H100)

    assert told.go
    assert told.in_turn.token_reuse < told.pooled.token_reuse < told.infinite.token_reuse
    assert msgspec.json.decode(msgspec.json.encode(told), type=Report) == told


# --- the format


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1]}', "1 ids are not those of 1024"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": []}', "timestamp"),
        ('{"messages": []}', "timestamp"),
    ],
)
def test_a_line_that_is_none_of_a_trace_is_named(line: str, said: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}'

    with pytest.raises(ConfigInvalid, match=said) as raised:
        list(traces.read([good, line], 512))

    assert raised.value.field == "line 2"


def test_of_a_trace_as_many_requests_are_read_as_are_asked_for() -> None:
    lines = [f'{{"timestamp": {at}, "input_length": 5, "output_length": 1, "hash_ids": []}}' for at in range(9)]

    assert [line.timestamp for line in traces.read(["", *lines, "broken"], 512, first=3)] == [0, 1, 2]
