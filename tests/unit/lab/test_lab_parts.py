"""The lab's parts: the clock, chance, workloads, traces; and that its shells are those that run live."""

import json
import struct

import pytest

from prefixbus.bus.config import BridgeSection, RouterSection
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.lab import router as lab_router
from prefixbus.lab import synthetic, traces
from prefixbus.lab.chance import Chance
from prefixbus.lab.results import times
from prefixbus.lab.setup import Setup
from prefixbus.lab.timeline import Timeline
from prefixbus.lab.workload import Segment, keys_of
from prefixbus.router import dispatching


def keys(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def test_the_labs_shells_wait_as_long_as_those_that_run_live() -> None:
    live, bridge, setup = RouterSection(), BridgeSection(), Setup()

    assert lab_router.ANNOUNCED_S == dispatching.ANNOUNCED_S
    assert lab_router.UNLISTED_S == dispatching.UNLISTED_S
    assert lab_router.ACCEPT_S == live.accept_timeout_ms / 1000
    assert (lab_router.SUSPECT_AFTER_S, lab_router.LOST_AFTER_S) == (live.suspect_after_s, live.lost_after_s)
    assert setup.max_attempts == live.max_attempts
    assert setup.report_every_s == bridge.heartbeat_s
    assert (setup.slots, setup.cold_reserve) == (bridge.slots, bridge.cold_reserve)
    assert setup.prefill_window_tokens == bridge.prefill_window_tokens


# --- the clock


def test_events_happen_in_order_of_time_and_equal_ones_in_order_of_asking() -> None:
    timeline = Timeline()
    happened: list[str] = []

    timeline.at(2.0, happened.append, "second")
    timeline.at(1.0, happened.append, "first")
    timeline.at(2.0, happened.append, "third")
    timeline.at(1.0, timeline.after, 5.0, happened.append, "last")
    timeline.run_until(2.0)
    at_two = list(happened)
    timeline.run(lambda: True)

    assert at_two == ["first", "second", "third"]
    assert (happened[-1], timeline.now) == ("last", 6.0)


def test_nothing_can_be_asked_of_the_past() -> None:
    timeline = Timeline()
    timeline.run_until(3.0)

    with pytest.raises(ValueError, match="before"):
        timeline.at(2.0, print)


# --- chance


def test_chance_is_repeatable_and_its_streams_are_independent() -> None:
    draws = [Chance(1, "a").uniform() for _ in range(2)] + [Chance(1, "b").uniform(), Chance(2, "a").uniform()]

    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_chance_is_spread_evenly() -> None:
    chance = Chance(0, "spread")

    drawn = [chance.below(10) for _ in range(10_000)]
    waits = [chance.exponential(2.0) for _ in range(10_000)]

    assert all(drawn.count(number) == pytest.approx(1000, rel=0.15) for number in range(10))
    assert sum(waits) / len(waits) == pytest.approx(2.0, rel=0.05)


# --- workloads


def test_prompts_share_keys_exactly_as_far_as_their_text_is_the_same() -> None:
    shared, block = Segment(1, 70), 32

    one = keys(keys_of([shared, Segment(2, 100)], block, seed=5))
    other = keys(keys_of([shared, Segment(3, 100)], block, seed=5))
    of_another_tenant = keys(keys_of([shared, Segment(2, 100)], block, seed=6))

    assert len(one) == 170 // 32
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False]
    assert not set(one) & set(of_another_tenant)


def test_a_session_continues_what_it_said_before() -> None:
    load = synthetic.sessions(sessions=1, turns=3, seconds=1)
    first, second, third = load.arrivals

    assert second.keys.startswith(first.keys) and third.keys.startswith(second.keys)
    assert first.prompt_tokens < second.prompt_tokens < third.prompt_tokens


def test_hot_prefixes_are_as_hot_as_their_rank_says() -> None:
    load = synthetic.zipf_prefixes(rate=100, count=5000, prefixes=10, exponent=1.0)
    beginnings = [arrival.keys[:8] for arrival in load.arrivals]

    counts = sorted((beginnings.count(one) for one in set(beginnings)), reverse=True)

    assert len(counts) == 10
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.2)


# --- traces


def line(timestamp: int, tokens: int, ids: list[int], **more: object) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": tokens, "output_length": 10, "hash_ids": ids, "unknown": 1} | more
    )


def test_equal_ids_of_a_trace_are_equal_keys_and_a_last_part_block_has_none() -> None:
    load = traces.load([line(1500, 1100, [1, 2, 3]), line(0, 1024, [1, 9]), ""], trace_block=512)
    later, first = load.arrivals[1], load.arrivals[0]

    assert (first.at, later.at, load.block_size) == (0.0, 1.5, 512)
    assert len(keys(later.keys)) == len(keys(first.keys)) == 2
    assert keys(later.keys)[0] == keys(first.keys)[0]
    assert keys(later.keys)[1] != keys(first.keys)[1]


def test_a_trace_with_the_time_of_day_begins_with_its_first_request() -> None:
    now_ms = 1_796_000_000_000
    load = traces.load([line(now_ms + 250, 512, [1]), line(now_ms, 512, [1])], trace_block=512)

    assert [arrival.at for arrival in load.arrivals] == [0.0, 0.25]


def test_a_block_of_a_trace_becomes_several_smaller_ones() -> None:
    (arrival,) = traces.load([line(0, 512 + 100, [1, 2])], trace_block=512, block_size=32).arrivals

    assert len(keys(arrival.keys)) == (512 + 100) // 32
    assert len(set(keys(arrival.keys))) == (512 + 100) // 32


def test_tenants_of_a_trace_share_nothing() -> None:
    load = traces.load([line(0, 512, [1], tenant="acme"), line(0, 512, [1], tenant="globex")], trace_block=512)

    assert load.arrivals[0].keys != load.arrivals[1].keys


@pytest.mark.parametrize(
    ("lines", "block", "named"),
    [
        pytest.param([line(0, 5, [1]), "{}"], 512, "line 2", id="a field is missing"),
        pytest.param(["not JSON"], 512, "line 1", id="not JSON"),
        pytest.param([line(0, 5, [1])], 100, "block_size", id="blocks that do not fit"),
        pytest.param([line(0, 5, [1]), line(8 * 86_400_000, 5, [1])], 512, "timestamp", id="a date that stands alone"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(lines: list[str], block: int, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        traces.load(lines, trace_block=512, block_size=block)


# --- results


def test_quantiles_are_values_that_occurred() -> None:
    of_hundred = times([float(number) for number in range(1, 101)])

    assert (of_hundred.p50, of_hundred.p95, of_hundred.p99, of_hundred.highest) == (50.0, 95.0, 99.0, 100.0)
    assert times([7.0]).p95 == 7.0
    with pytest.raises(ValueError, match="no request"):
        times([])
