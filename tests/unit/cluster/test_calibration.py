"""Out of what probes took, the times of all other prefills; noise only adds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import config
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.cluster import calibration
from prefixbus.cluster.calibration import Sample
from prefixbus.engine_sim.profile import PRESETS, Profile

BLOCK = 32


def taken(profile: Profile, most_tokens: int = 4096, noise: random.Random | None = None) -> list[Sample]:
    """What the plan's probes take on an engine of this profile; with noise up to twice that, but once at each point."""
    samples = []
    for number, probe in enumerate(calibration.plan(BLOCK, 1 << 20, most_tokens)):
        computed = probe.prompt_tokens - probe.after // BLOCK * BLOCK
        ms = profile.step_ms + profile.prefill_ms(computed, probe.prompt_tokens)
        steps = probe.answer_tokens - 1
        context = probe.prompt_tokens + (steps + 1) / 2
        step_ms = profile.step_ms + profile.decode_ms(1, round(context)) if steps else 0.0
        factor = 1.0 + noise.random() if noise is not None and number // 6 != number % 3 else 1.0
        samples.append(Sample(probe.prompt_tokens, computed, ms * factor, step_ms * factor))
    return samples


def told(measured: calibration.Measured, computed: int, prompt: int) -> float:
    one = measured.section
    return one.fixed_ms + one.token_ms * computed + one.attention_ms * computed * (prompt - computed / 2)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "instant"])
@pytest.mark.parametrize("computed, prompt", [(16, 16), (300, 2000), (32, 4000), (8000, 8000), (100, 8000)])
def test_what_a_profile_takes_is_told_for_prompts_that_were_never_asked(name: str, computed: int, prompt: int) -> None:
    profile = PRESETS[name]

    measured = calibration.fit(taken(profile), block_size=BLOCK, kv_tokens=0)

    assert told(measured, computed, prompt) == pytest.approx(
        profile.step_ms + profile.prefill_ms(computed, prompt), rel=0.02
    )
    assert measured.decode_step_ms == pytest.approx(profile.step_ms, rel=0.05)
    assert measured.section.decode_context_token_ms == pytest.approx(profile.decode_context_token_ms, rel=0.05)


def test_what_made_some_probes_slower_is_not_taken_for_the_engine() -> None:
    profile = PRESETS["h100-70b"]
    samples = taken(profile, noise=random.Random(3))
    measured = calibration.fit(samples, block_size=BLOCK, kv_tokens=0)

    assert measured == calibration.fit(taken(profile), block_size=BLOCK, kv_tokens=0)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 1e6)), min_size=3, max_size=30))
def test_whatever_was_measured_no_coefficient_is_below_nothing(points: list[tuple[int, float]]) -> None:
    samples = [Sample(tokens, tokens, ms) for tokens, ms in points]

    try:
        measured = calibration.fit(samples, block_size=BLOCK, kv_tokens=1).section
    except ConfigInvalid:
        return

    assert measured.fixed_ms > 0
    assert min(measured.token_ms, measured.attention_ms, measured.decode_context_token_ms) >= 0


def test_an_engine_that_computes_in_no_time_has_nothing_to_be_measured() -> None:
    with pytest.raises(ConfigInvalid, match="in no time"):
        calibration.fit(taken(PRESETS["instant"]), block_size=BLOCK, kv_tokens=0)


@pytest.mark.parametrize("most_tokens", [512, 4096, 100_000])
@pytest.mark.parametrize("max_model_len", [600, 8192, 131_072])
def test_the_probes_are_few_fit_and_compute_a_bounded_number_of_tokens(most_tokens: int, max_model_len: int) -> None:
    probes = calibration.plan(BLOCK, max_model_len, most_tokens)

    assert len(probes) == 6 * calibration.REPEATS
    assert all(probe.prompt_tokens + probe.answer_tokens <= max_model_len for probe in probes)
    assert sum(probe.prompt_tokens - probe.after for probe in probes) <= 7 * most_tokens
    assert all(0 <= probe.after < probe.prompt_tokens for probe in probes)


def test_prompts_that_are_too_short_to_tell_lengths_apart_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="at least 512"):
        calibration.plan(BLOCK, 8192, 100)


CONFIG = """\
# Ours.
[models.m]
tokenizer = "t"
model_revision = "sha256:m"

[models."org/m 7"]
tokenizer = "t"
model_revision = "sha256:m"
"""


@pytest.mark.parametrize("model", ["m", "org/m 7"])
def test_it_is_written_beside_what_people_wrote_and_replaces_what_was_measured_before(model: str) -> None:
    first = calibration.fit(taken(PRESETS["h100-8b"]), block_size=BLOCK, kv_tokens=1000)
    second = calibration.fit(taken(PRESETS["h100-70b"]), block_size=BLOCK, kv_tokens=2000)

    once = calibration.written_into(CONFIG, model, first)
    twice = calibration.written_into(once + "\n# For the bridge.\n[bridge]\nslots = 3\n", model, second)

    assert once.startswith(CONFIG)
    assert config.parse(once, {}).models[model].measured == first.section
    read = config.parse(twice, {})
    assert read.models[model].measured == second.section
    assert read.bridge.slots == 3
    assert "# For the bridge.\n[bridge]" in twice
    assert twice.count(".measured]") == twice.count("# A step that decodes") == 1


def test_what_was_measured_of_other_blocks_is_no_measure() -> None:
    measured = calibration.fit(taken(PRESETS["h100-8b"]), block_size=16, kv_tokens=0)

    with pytest.raises(ConfigInvalid, match=r"models\.m\.measured.*blocks of 16 tokens, not 32"):
        config.parse(calibration.written_into(CONFIG, "m", measured), {})
