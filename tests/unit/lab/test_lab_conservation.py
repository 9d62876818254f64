"""What holds in every run, whatever the fleet, the policy and the faults: nothing is lost, doubled or overfilled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup
from prefixbus.router.policy import Policy

pytestmark = pytest.mark.timeout(90)

POLICIES = st.sampled_from(
    [
        Policy(),
        Policy(name="round-robin"),
        *map(ruled, ("random", "threshold", "overlap:8", "exploit-explore", "oracle")),
    ]
)


@settings(max_examples=100)
@given(
    policy=POLICIES,
    workers=st.integers(1, 4),
    routers=st.integers(1, 3),
    kv_tokens=st.sampled_from([4096, 8192, 65_536]),
    host_tokens=st.sampled_from([0, 16_384]),
    transfer_bandwidth=st.sampled_from([None, 1e9, 100e9]),
    event_delay_s=st.sampled_from([0.005, 1.0]),
    event_loss=st.sampled_from([0.0, 0.2]),
    rate=st.sampled_from([5.0, 50.0, 500.0]),
    seed=st.integers(0, 5),
)
def test_every_request_ends_once_every_token_is_accounted_for_and_no_worker_is_overfull(
    policy: Policy,
    workers: int,
    routers: int,
    kv_tokens: int,
    host_tokens: int,
    transfer_bandwidth: float | None,
    event_delay_s: float,
    event_loss: float,
    rate: float,
    seed: int,
) -> None:
    load = synthetic.zipf_prefixes(
        rate=rate, count=60, prefixes=8, prefix_tokens=1500, question_tokens=100, output_tokens=30, seed=seed
    )
    setup = Setup(
        policy=policy,
        workers=workers,
        routers=routers,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        transfer_bandwidth=transfer_bandwidth,
        event_delay_s=event_delay_s,
        event_loss=event_loss,
        placement=None,
        seed=seed,
    )

    result = run(setup, load)

    # The harness raises if one ends twice.
    assert [one.status for one in result.served] == ["ok"] * len(load.arrivals)
    assert result.leftovers == []
    for one in result.served:
        assert one.cached_tokens is not None and 0 <= one.cached_tokens < one.prompt_tokens
        assert not one.loaded_tokens or host_tokens
        assert not one.pulled_tokens or transfer_bandwidth
    assert sum(worker.wrong_hits for worker in result.workers) == 0
    for sample in result.samples:
        assert 0.0 <= sample.kv_in_use <= 1.0 and 0.0 <= sample.kv_cached <= 1.0
        assert sample.copies <= workers
    asked = sum(one.prompt_tokens + one.output_tokens - 1 for one in result.served)
    reused = sum(one.cached_tokens or 0 for one in result.served)
    computed = sum(worker.computed_tokens for worker in result.workers)
    # Who was preempted computes some of it again.
    if any(worker.preemptions for worker in result.workers):
        assert computed + reused >= asked
    else:
        assert computed + reused == asked
