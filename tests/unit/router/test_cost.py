"""The terms of the cost formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.engine_sim.profile import PRESETS
from prefixbus.router import cost
from prefixbus.router.cost import PrefillModel

H100 = cost.PROFILES["h100-8b"]


def test_profiles_are_those_of_the_simulated_engines() -> None:
    simulated = {
        name: (
            profile.step_ms + profile.prefill_step_ms,
            profile.prefill_token_ms,
            profile.prefill_attention_ms,
            profile.decode_context_token_ms,
        )
        for name, profile in PRESETS.items()
    }

    ours = {
        name: (model.fixed_ms, model.token_ms, model.attention_ms, model.decode_context_token_ms)
        for name, model in cost.PROFILES.items()
    }

    assert ours.keys() == simulated.keys()
    for name, figures in ours.items():
        assert figures == pytest.approx(simulated[name])


def test_a_prefill_of_30k_tokens_takes_half_a_second_on_an_h100() -> None:
    assert cost.prefill_ms(H100, 30_000, 30_000) == pytest.approx(21.74 + 516 + 18)


@given(prompt=st.integers(1, 500_000), share=st.floats(0, 1))
def test_a_longer_hit_never_makes_prefill_longer(prompt: int, share: float) -> None:
    uncached = max(1, int(prompt * share))

    assert cost.prefill_ms(H100, uncached, prompt) <= cost.prefill_ms(H100, prompt, prompt)


def test_a_prefill_of_two_steps_meets_the_decodes_twice() -> None:
    once = cost.interference_ms(H100, 8192, 100_000)

    assert once == pytest.approx(5.2)
    assert cost.interference_ms(H100, 8193, 100_000) == 2 * once


def test_who_is_busy_ends_a_step_first_and_an_idle_worker_begins_at_once() -> None:
    model = PrefillModel(20.0, 0.01, 0.0, 0.0)

    assert cost.wait_ms(model, 0.0, 0.7) == 0.0
    assert cost.wait_ms(model, 1e-3, 0.7) == pytest.approx(20.0, abs=0.001)
    assert cost.wait_ms(model, 100.0, 0.7) == 90.0


@pytest.mark.parametrize(
    ("needed", "free", "pinned", "wait_ms"),
    [
        pytest.param(1000, 1000, 9000, 0.0, id="fits"),
        pytest.param(1900, 1000, 9000, 400.0, id="a tenth of what is pinned must go"),
        pytest.param(20_000, 1000, 9000, 4000.0, id="more than there is: all must go"),
        pytest.param(10, 0, 0, 4000.0, id="a worker without memory"),
    ],
)
def test_missing_memory_is_waited_for(needed: int, free: int, pinned: int, wait_ms: float) -> None:
    assert cost.memory_wait_ms(needed, free, pinned, 4000.0) == pytest.approx(wait_ms)


@given(rho=st.floats(-1, 100), cap=st.floats(0, 100))
def test_the_externality_is_between_zero_and_its_cap(rho: float, cap: float) -> None:
    assert 0 <= cost.externality(rho, cap) <= cap


def test_a_half_busy_worker_costs_others_as_much_as_oneself() -> None:
    assert cost.externality(0.5, 4.0) == 1.0


@given(uncached=st.integers(1, 500_000), more=st.integers(0, 500_000), name=st.sampled_from(sorted(cost.PROFILES)))
def test_parts_are_what_each_alone_is_to_the_last_bit(uncached: int, more: int, name: str) -> None:
    model, prompt = cost.PROFILES[name], uncached + more

    assert cost.parts_ms(model, uncached, prompt) == (
        cost.prefill_ms(model, uncached, prompt),
        cost.kv_price_ms(model, uncached, prompt),
        cost.work_ms(model, uncached, prompt),
    )
