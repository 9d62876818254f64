"""What the directory said, corrected by the bridges: as if it had known."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.messages import HOLDINGS, NAMED_MAX, VERSION, Holdings, Level, MessageInvalid
from prefixbus.router.holdings import check, corrected

workers = st.sampled_from(["w1", "w2", "w3", "w4"])


@st.composite
def holdings(draw: st.DrawFn) -> Holdings:
    levels: dict[tuple[int, str], list[str]] = {}
    for tier in ("gpu", "host"):
        for worker in draw(st.lists(workers, unique=True)):
            levels.setdefault((draw(st.integers(1, 9)), tier), []).append(worker)
    return Holdings(
        VERSION,
        [Level(depth, names, tier) for (depth, tier), names in sorted(levels.items(), reverse=True)],
        draw(st.lists(workers, unique=True)),
        draw(st.dictionaries(workers, st.floats(0, 1))),
        "d1",
        7,
        draw(st.dictionaries(workers, st.integers(1, 9))),
    )


def heard(levels: list[Level], **more: object) -> Holdings:
    """As a router hears it."""
    return HOLDINGS.decode(HOLDINGS.encode(msgspec.structs.replace(Holdings(VERSION, levels), **more)))


@given(holdings())
def test_what_a_directory_may_say_is_believed(known: Holdings) -> None:
    check(HOLDINGS.decode(HOLDINGS.encode(known)), 9)


IMPOSSIBLE: dict[str, tuple[list[Level], dict[str, object]]] = {
    "deeper than the chain": ([Level(10, ["w1"])], {}),
    "absurdly deep": ([Level(1 << 62, ["w1"])], {}),
    "no depth": ([Level(0, ["w1"])], {}),
    "below nothing": ([Level(-1, ["w1"])], {}),
    "not the deepest first": ([Level(3, ["w1"]), Level(4, ["w2"])], {}),
    "one name again and again": ([Level(3, ["w1"] * (NAMED_MAX + 1))], {}),
    "many levels of it": ([Level(3, ["w1"] * 10)] * (NAMED_MAX // 10 + 1), {}),
    "trusted less than not at all": ([], {"trust": {"w1": -0.5}}),
    "trusted like no number": ([], {"trust": {"w1": float("nan")}}),
    "trusted without end": ([], {"trust": {"w1": float("inf")}}),
    "announced below nothing": ([], {"announced": {"w1": -1}}),
    "a sequence below nothing": ([], {"stream_seq": -1}),
    "a name that is a text": ([Level(3, ["w" * 1000])], {}),
    "incomplete without end": ([], {"incomplete": ["w1"] * (NAMED_MAX + 1)}),
    "another version": ([], {"v": 2}),
    "of another shard": ([], {"refused": "the namespace is not of shard 1 of 3"}),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_is_not_believed(case: str) -> None:
    levels, more = IMPOSSIBLE[case]

    with pytest.raises(MessageInvalid):
        check(heard(levels, **more), 9)


def depths(known: Holdings, tier: str) -> dict[str, int]:
    return {worker: level.depth for level in known.levels if level.tier == tier for worker in level.workers}


@given(holdings(), workers, st.integers(0, 12))
def test_one_worker_holds_what_its_bridge_says_and_nobody_else_changes(
    known: Holdings, worker: str, depth: int
) -> None:
    found = corrected(known, worker, depth)

    wanted = depths(known, "gpu") | {worker: depth}
    assert depths(found, "gpu") == {one: its for one, its in wanted.items() if its}
    assert depths(found, "host") == depths(known, "host")
    assert [level.depth for level in found.levels] == sorted((level.depth for level in found.levels), reverse=True)
    assert all(level.workers for level in found.levels)


@given(holdings(), workers, st.integers(0, 12))
def test_its_word_is_believed_whole(known: Holdings, worker: str, depth: int) -> None:
    found = corrected(known, worker, depth)

    assert worker not in {*found.incomplete, *found.trust, *found.announced}
    assert {worker, *found.trust} == {worker, *known.trust}
    assert (found.replica, found.stream_seq) == ("d1", 7)
