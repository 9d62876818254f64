"""What a run reports is what its requests and samples say."""

import msgspec
import pytest

from prefixbus.engine_sim.profile import PRESETS
from prefixbus.lab import synthetic
from prefixbus.lab.figures import Figures, figures
from prefixbus.lab.harness import SAMPLES, run
from prefixbus.lab.results import Result, Sample, Served, WorkerTotals
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup

H100 = PRESETS["h100-8b"]
BLOCK = 16


def served(
    cached: int | None,
    *,
    prompt: int = 320,
    ttft: float | None = 10.0,
    decision: str = "partial-hit",
    status: str = "ok",
) -> Served:
    """A request that waited 2 ms and had 5 tokens, one every 4 ms."""
    return Served(
        request_id="",
        at=0.0,
        tenant="acme",
        prefix_class="session",
        router="r0",
        prompt_tokens=prompt,
        output_tokens=5,
        worker="w0",
        decision=decision,
        cached_tokens=cached,
        queue_ms=None if ttft is None else 2.0,
        ttft_ms=ttft,
        e2e_ms=None if ttft is None else ttft + 16.0,
        status=status,
        error="" if status == "ok" else "overloaded",
    )


def totals(name: str, *, requests: int, computed: int, wrong_hits: int = 0) -> WorkerTotals:
    return WorkerTotals(
        worker=name,
        requests=requests,
        prompt_tokens=0,
        computed_tokens=computed,
        busy_ms=0.0,
        refused=1,
        given_back=0,
        preemptions=0,
        wrong_hits=wrong_hits,
    )


def result(*requests: Served, workers: list[WorkerTotals] | None = None, samples: list[Sample] | None = None) -> Result:
    return Result(
        served=list(requests),
        workers=workers or [totals("w0", requests=1, computed=1)],
        leftovers=[],
        ended_at=1.0,
        dumps_asked=0,
        lost_events=0,
        samples=samples or [],
    )


def test_a_hit_is_a_request_that_found_a_block() -> None:
    told = figures(result(served(0), served(16), served(304), served(None, ttft=None, status="shed")), H100, BLOCK)

    assert told.request_hit_rate == pytest.approx(2 / 3)
    assert told.token_reuse == pytest.approx(320 / 960)
    assert (told.prompt_tokens, told.prefill_tokens_avoided) == (960, 320)
    assert (told.ended, told.errors) == ({"ok": 3, "shed": 1}, {"overloaded": 1})


def test_what_is_saved_is_priced_by_the_profile_and_queues_are_taken_off() -> None:
    told = figures(result(served(160)), H100, BLOCK)

    saved = H100.prefill_ms(320, 320) - H100.prefill_ms(160, 320)
    assert told.prefill_ms_saved == pytest.approx(saved)
    assert told.prefill_ms_saved_net == pytest.approx(saved - 2.0)


def test_times_are_told_by_what_was_found() -> None:
    told = figures(result(served(0, ttft=30.0), served(16, ttft=20.0), served(304, ttft=10.0)), H100, BLOCK)

    means = {name: some.mean for name, some in told.ttft_ms_by_warmth.items() if some is not None}
    assert means == {"warm": 10.0, "partial": 20.0, "cold": 30.0}
    assert told.ttft_ms is not None and (told.ttft_ms.mean, told.ttft_ms.highest) == (20.0, 30.0)
    assert told.tpot_ms is not None and told.tpot_ms.mean == pytest.approx(4.0)
    assert told.e2e_ms is not None and told.e2e_ms.mean == pytest.approx(36.0)
    assert told.queue_ms is not None and told.queue_ms.mean == 2.0


def test_a_time_that_no_request_has_is_null() -> None:
    told = figures(result(served(None, ttft=None, status="shed")), H100, BLOCK)

    assert (told.ttft_ms, told.tpot_ms, told.e2e_ms, told.queue_ms) == (None, None, None, None)
    assert set(told.ttft_ms_by_warmth.values()) == {None}
    assert (told.request_hit_rate, told.token_reuse) == (0.0, 0.0)


def test_leaving_a_warm_worker_is_told_by_reason() -> None:
    decisions = ["spill-margin", "spill-margin", "spill-memory", "partial-hit"]

    told = figures(result(*(served(16, decision=name) for name in decisions)), H100, BLOCK)

    assert told.left_warm_worker == {"margin": 0.5, "memory": 0.25}


def test_workers_and_samples_are_summed_up() -> None:
    workers = [totals("w0", requests=3, computed=30, wrong_hits=1), totals("w1", requests=1, computed=10)]
    samples = [
        Sample(at=0.0, kv_in_use=0.2, kv_cached=0.4, copies=1.0),
        Sample(at=1.0, kv_in_use=0.4, kv_cached=0.8, copies=2.0),
    ]

    told = figures(result(served(0), workers=workers, samples=samples), H100, BLOCK)

    assert (told.imbalance_requests, told.imbalance_tokens, told.refused, told.wrong_hits) == (1.5, 1.5, 2, 1)
    assert (told.kv_in_use, told.kv_cached, told.copies_per_block) == pytest.approx((0.3, 0.6, 1.5))


def test_figures_are_json_and_come_back() -> None:
    told = figures(result(served(16), served(None, ttft=None, status="shed")), H100, BLOCK)

    assert msgspec.json.decode(msgspec.json.encode(told), type=Figures) == told


def test_a_run_is_sampled_and_its_parts_fit_together() -> None:
    load = synthetic.zipf_prefixes(rate=40, count=300, prefixes=10, seed=3)
    shares: list[float] = []

    played = run(Setup(policy=ruled("random"), workers=4), load, shares.append)
    told = figures(played, H100, load.block_size)

    assert len(played.samples) == len(shares) == SAMPLES
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert all(0 <= sample.kv_in_use <= 1 and 0 <= sample.kv_cached <= 1 for sample in played.samples)
    # Ten documents, which chance has brought to all four workers.
    assert 1.0 < told.copies_per_block <= 4.0
    assert told.prefill_tokens_avoided == round(told.token_reuse * told.prompt_tokens)
    assert sum(some.count for some in told.ttft_ms_by_warmth.values() if some is not None) == 300
    assert told.wrong_hits == 0


def test_what_was_fetched_is_summed_with_its_bytes() -> None:
    fetched = served(160)
    fetched.loaded_tokens, fetched.pulled_tokens, fetched.transferred_bytes = 64, 32, 32 * 131072

    told = figures(result(fetched, served(0), fetched), H100, BLOCK)

    assert (told.loaded_tokens, told.pulled_tokens, told.transferred_bytes) == (128, 64, 64 * 131072)
