"""Several routers decide about as well as one; and what happens when they do not tell each other what they do."""

from pathlib import Path

import pytest

from prefixbus.lab import synthetic, traces
from prefixbus.lab.harness import run
from prefixbus.lab.results import Result
from prefixbus.lab.setup import Setup
from prefixbus.lab.workload import Workload

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
CONVERSATION = TRACES / "mooncake_conversation.jsonl"
ROUTERS = (2, 4, 8)
DEAF = Setup(routers=8, announce_delay_s=None, bounded_start=False)


def mean_ttft(result: Result) -> float:
    assert result.leftovers == []
    assert {one.status for one in result.served} == {"ok"}
    return result.ttft().mean


@pytest.fixture(scope="module")
def conversation() -> Workload:
    """A part of the trace, three times as fast: about ten requests come in the same millisecond every second."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION.name} is not beside the project (shared/data)")
    with CONVERSATION.open("rb") as lines:
        whole = traces.load(lines, 512)
    return Workload(whole.arrivals[:2000], 512).faster(3.0)


@pytest.fixture(scope="module")
def waves() -> Workload:
    """Twelve prompts at once every second, in length as different as in the trace; a third of them asks about documents
    that came before."""
    shapes = synthetic.never_repeating(rate=1, count=600, prompt_tokens=9000, output_tokens=200, seed=5)
    again = synthetic.zipf_prefixes(rate=1, count=300, prefixes=40, prefix_tokens=8000, output_tokens=200, seed=6)
    return in_waves(shapes, 8) + in_waves(again, 4)


def in_waves(load: Workload, size: int) -> Workload:
    """The same requests, `size` of them at once every second."""
    arrivals = [
        type(arrival)(float(number // size), arrival.keys, arrival.prompt_tokens, arrival.output_tokens)
        for number, arrival in enumerate(load.arrivals)
    ]
    return Workload(arrivals, load.block_size)


@pytest.fixture(scope="module")
def alone_on_the_conversation(conversation: Workload) -> float:
    return mean_ttft(run(Setup(), conversation))


@pytest.fixture(scope="module")
def alone_on_the_waves(waves: Workload) -> float:
    return mean_ttft(run(Setup(), waves))


@pytest.mark.parametrize("routers", ROUTERS)
def test_several_routers_stay_within_a_twentieth_of_one_on_a_real_trace(
    conversation: Workload, alone_on_the_conversation: float, routers: int
) -> None:
    assert mean_ttft(run(Setup(routers=routers), conversation)) <= 1.05 * alone_on_the_conversation


@pytest.mark.parametrize("routers", ROUTERS)
def test_several_routers_stay_within_a_twentieth_of_one_when_requests_come_at_once(
    waves: Workload, alone_on_the_waves: float, routers: int
) -> None:
    assert mean_ttft(run(Setup(routers=routers), waves)) <= 1.05 * alone_on_the_waves


def test_eight_routers_that_tell_each_other_nothing_herd_on_a_real_trace(
    conversation: Workload, alone_on_the_conversation: float
) -> None:
    assert mean_ttft(run(DEAF, conversation)) > 1.25 * alone_on_the_conversation


def test_eight_routers_that_tell_each_other_nothing_herd_when_requests_come_at_once(
    waves: Workload, alone_on_the_waves: float
) -> None:
    assert mean_ttft(run(DEAF, waves)) > 1.25 * alone_on_the_waves
