"""What the directory said, corrected by the bridges: as if it had known."""

from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.messages import VERSION, Holdings, Level
from prefixbus.router.holdings import corrected

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
