"""How little it costs when what routers know is late, lost, divided or wrong (DESIGN 12, "robustness")."""

import functools

import msgspec
import pytest

from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.setup import Setup, misjudged
from prefixbus.lab.workload import Workload

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

BAR = 1.05


def wrong_by(factor: float) -> Setup:
    return Setup(model=misjudged("h100-8b", factor))


@functools.cache
def loads() -> list[Workload]:
    """Sessions, and more documents than one worker can hold; long enough for ten seconds to be a small part of it."""
    documents = [
        synthetic.zipf_prefixes(rate=12, count=900, prefixes=150, exponent=0.8, prefix_tokens=6000, seed=seed)
        for seed in range(2)
    ]
    return [*documents, synthetic.sessions(sessions=150, turns=5, seconds=60)]


@functools.cache
def mean_ms(faults: "Faults") -> float:
    results = [run(faults.setup(), load) for load in loads()]
    return sum(result.ttft().mean for result in results) / len(results)


class Faults(msgspec.Struct, kw_only=True, frozen=True):
    """What of a setup is changed here."""

    event_delay_s: float = 0.005
    event_loss: float = 0.0
    routers: int = 1
    wrong_by: float = 1.0
    learns: bool = True

    def setup(self) -> Setup:
        return msgspec.structs.replace(
            wrong_by(self.wrong_by),
            event_delay_s=self.event_delay_s,
            event_loss=self.event_loss,
            routers=self.routers,
            learns=self.learns,
            kv_tokens=1 << 19,
        )


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(event_delay_s=0.0), id="events at once"),
        pytest.param(Faults(event_delay_s=0.1), id="events 0.1 s late"),
        pytest.param(Faults(event_delay_s=1.0), id="events 1 s late"),
        pytest.param(Faults(event_delay_s=10.0), id="events 10 s late"),
        pytest.param(Faults(event_loss=0.05), id="one event message in twenty lost"),
        pytest.param(Faults(routers=8), id="8 routers"),
        pytest.param(Faults(wrong_by=0.5), id="prefill taken for half of what it is"),
        pytest.param(Faults(wrong_by=2.0), id="prefill taken for twice what it is"),
        pytest.param(Faults(wrong_by=0.5, learns=False), id="for half, and nothing is learned"),
        pytest.param(Faults(wrong_by=2.0, learns=False), id="for twice, and nothing is learned"),
    ],
)
@pytest.mark.timeout(120)
def test_what_is_late_lost_or_wrong_costs_at_most_a_twentieth(faults: Faults) -> None:
    assert mean_ms(faults) <= BAR * mean_ms(Faults())


def test_sibling_bursts_reuse_three_quarters() -> None:
    """Twelve bursts of eight siblings each, for documents that nobody has asked for before."""
    firsts = synthetic.never_repeating(rate=1, count=12, prompt_tokens=6000, seed=1)
    arrivals = [
        msgspec.structs.replace(one, at=one.at + sibling * 0.01) for one in firsts.arrivals for sibling in range(8)
    ]
    arrivals.sort(key=lambda one: one.at)

    result = run(Setup(routers=4), Workload(arrivals, firsts.block_size))

    assert result.token_reuse >= 0.75
