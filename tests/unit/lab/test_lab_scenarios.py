"""The situations that a router meets, one by one, as made-up traffic."""

from collections import Counter

import pytest

from prefixbus.lab import synthetic
from prefixbus.lab.harness import run
from prefixbus.lab.results import Result
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

IN_TURN = ruled("round-robin")


def reuse(result: Result, prefix_class: str) -> float:
    mine = [one for one in result.served if one.prefix_class == prefix_class]
    return sum(one.cached_tokens or 0 for one in mine) / sum(one.prompt_tokens for one in mine)


def test_200_questions_to_one_long_document_and_then_to_several_find_it_on_4_workers() -> None:
    load = synthetic.long_documents(rate=10)

    ours, in_turn = run(Setup(workers=4), load), run(Setup(workers=4, policy=IN_TURN), load)

    assert Counter(one.prefix_class for one in ours.served) == {"first": 200, "others": 200}
    assert {one.status for one in ours.served} == {"ok"}
    # Of the first at most 4 are computed, of each of the others 4: the memory of each worker holds all of them.
    assert reuse(ours, "first") >= 0.97 and reuse(ours, "others") >= 0.9
    assert ours.ttft(prefix_class="others").mean <= in_turn.ttft(prefix_class="others").mean
    assert ours.leftovers == []


def test_documents_that_gathered_on_one_worker_leave_it_when_all_are_wanted() -> None:
    """Requests alone would leave too late: none computes 16,000 tokens anew before its queue is as long as that. Copies
    that the directory orders of idle workers are there before."""
    unordered = run(Setup(workers=4, placement=None), synthetic.hot_worker(rate=30, seconds=15))
    ours = run(Setup(workers=4), synthetic.hot_worker(rate=30, seconds=15))

    gathered = Counter(one.worker for one in ours.served if one.prefix_class == "gathering")
    hot = Counter(one.worker for one in ours.served if one.prefix_class == "hot")
    assert len(gathered) == 1
    assert len(hot) >= 3 and max(hot.values()) <= 0.65 * hot.total()
    assert ours.ttft(prefix_class="hot").mean <= 0.6 * unordered.ttft(prefix_class="hot").mean
    assert ours.leftovers == []


def test_a_local_hit_costs_the_rest_of_the_prompt() -> None:
    result = run(Setup(workers=4), synthetic.asked_again(documents=6))

    assert reuse(result, "again") > 0.97
    assert result.ttft(prefix_class="again").highest < 0.2 * result.ttft(prefix_class="first").mean


@pytest.mark.parametrize("busy_tokens", [30_000, 60_000])
def test_a_hit_whose_holder_is_busy_for_long_is_not_waited_for(busy_tokens: int) -> None:
    """Waiting for the holder would take longer than computing 16,000 tokens elsewhere."""
    load = synthetic.asked_again(documents=6, busy_tokens=busy_tokens)

    result = run(Setup(workers=4), load)

    of = {kind: [one for one in result.served if one.prefix_class == kind] for kind in ("busy", "again")}
    assert all(busy.worker != again.worker for busy, again in zip(of["busy"], of["again"], strict=True))
    first, again = result.ttft(prefix_class="first"), result.ttft(prefix_class="again")
    assert again.highest < 1.2 * first.highest
