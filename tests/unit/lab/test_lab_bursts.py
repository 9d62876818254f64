"""Requests for one new document that come together: the first computes it, the others find it announced."""

import pytest

from prefixbus.bus.blockkeys import reusable_blocks
from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.setup import Setup

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

SIBLINGS = 32


@pytest.mark.parametrize("routers", [1, 2, 4, 8])
@pytest.mark.parametrize("spread_s", [0.0, 0.05], ids=["at once", "within 50 ms"])
def test_32_identical_cold_prompts_cost_at_most_two_prefills_on_4_workers(routers: int, spread_s: float) -> None:
    """Of a prompt that takes longer to compute than a message takes to arrive: 8000 tokens, 180 ms."""
    load = synthetic.burst(count=SIBLINGS, prompt_tokens=8000, spread_s=spread_s)

    result = run(Setup(workers=4, routers=routers), load)

    assert sum(one.cached_tokens == 0 for one in result.served) <= 2
    # The others compute what is beyond their last full block, and nobody a part of the rest.
    computed = sum(one.prefill_tokens or 0 for one in result.served)
    assert computed <= 2 * 8000 + SIBLINGS * load.block_size
    assert result.leftovers == []


@pytest.mark.parametrize("routers", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [33, 63, 64, 128, 256, 500, 700, 1000, 1500, 2000, 2047, 2500, 4000, 8000, 30_000])
def test_how_long_a_prompt_is_makes_no_difference_to_its_siblings(tokens: int, routers: int) -> None:
    """From one block that can be found again. Of short prompts the siblings' last blocks are more work than the whole
    prompt, and another worker would be done with it sooner than they are."""
    for spread_s in (0.0, 0.002):
        load = synthetic.burst(count=SIBLINGS, prompt_tokens=tokens, spread_s=spread_s)

        result = run(Setup(workers=4, routers=routers), load)

        to_find = load.block_size * reusable_blocks(tokens, load.block_size)
        assert sum((one.cached_tokens or 0) < to_find for one in result.served) <= 2
        assert result.leftovers == []


def test_without_announcements_every_worker_computes_it() -> None:
    """What the test above would find if dispatches were not announced to the directory."""
    load = synthetic.burst(count=SIBLINGS, spread_s=0.05)

    result = run(Setup(workers=4, routers=4, predict_delay_s=None, announce_delay_s=None), load)

    assert sum(one.cached_tokens == 0 for one in result.served) > 2
