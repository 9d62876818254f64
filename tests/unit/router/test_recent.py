"""Dispatches that a directory's answer cannot contain."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.messages import Holdings, Level
from prefixbus.router.recent import ON_THE_WAY_S, REMEMBER_MAX, REMEMBER_S, Recent

NS, OTHER_NS = bytes(16), bytes([1] * 16)


def chain(*blocks: int) -> bytes:
    """Keys of blocks; as in life, a key stands for all blocks before it, too."""
    keys, parent = [], 0
    for block in blocks:
        parent = hash((parent, block)) & (2**64 - 1)
        keys.append(parent)
    return struct.pack(f"<{len(keys)}Q", *keys)


def levels(holdings: Holdings) -> dict[str, int]:
    return {worker: level.depth for level in holdings.levels for worker in level.workers}


NOBODY = Holdings(1, [])


def test_a_sibling_that_was_dispatched_meanwhile_counts_as_held_and_announced() -> None:
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2, 3), "w1", 10.0)

    known = recent.complete(NOBODY, NS, chain(1, 2, 3, 4), asked_at=9.999, now=10.001)

    assert levels(known) == {"w1": 3}
    assert known.announced == {"w1": 3}


def test_a_directory_that_is_behind_by_what_a_busy_machine_costs_does_not_scatter_siblings() -> None:
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2, 3), "w1", 10.0)

    known = recent.complete(NOBODY, NS, chain(1, 2, 3, 4), asked_at=10.06, now=10.07)

    assert known.announced == {"w1": 3}


def test_only_what_they_share_counts() -> None:
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2, 3), "w1", 10.0)

    assert levels(recent.complete(NOBODY, NS, chain(1, 2, 9), 10.0, 10.0)) == {"w1": 2}
    assert recent.complete(NOBODY, NS, chain(9, 2, 3), 10.0, 10.0) is NOBODY
    assert recent.complete(NOBODY, OTHER_NS, chain(1, 2, 3), 10.0, 10.0) is NOBODY
    assert recent.complete(NOBODY, NS, b"", 10.0, 10.0) is NOBODY


def test_what_the_directory_says_is_kept_where_it_says_more() -> None:
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2, 3), "w1", 10.0)
    recent.note("r2", 1, NS, chain(1, 2, 3), "w2", 10.0)
    said = Holdings(1, [Level(4, ["w1", "w3"]), Level(2, ["w9"], "host"), Level(1, ["w2"])], announced={"w2": 1})

    known = recent.complete(said, NS, chain(1, 2, 3, 4), 10.0, 10.0)

    assert known.levels == [Level(4, ["w1", "w3"]), Level(3, ["w2"]), Level(2, ["w9"], "host")]
    assert known.announced == {"w2": 3}


def test_what_was_taken_back_does_not_count() -> None:
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2), "w1", 10.0)
    recent.note("r1", 2, NS, chain(1, 2), "w2", 10.0)
    recent.take_back("r1", 1)
    before = levels(recent.complete(NOBODY, NS, chain(1, 2), 10.0, 10.0))

    recent.take_back("r1", 2)

    assert before == {"w2": 2}
    assert recent.complete(NOBODY, NS, chain(1, 2), 10.0, 10.0) is NOBODY
    assert len(recent) == 0


def test_what_the_directory_must_have_heard_of_is_left_to_it() -> None:
    """It may have been evicted since."""
    recent = Recent()
    recent.note("r1", 1, NS, chain(1, 2), "w1", 10.0)

    assert recent.complete(NOBODY, NS, chain(1, 2), 10.0 + 2 * ON_THE_WAY_S, 10.1) is NOBODY
    assert recent.complete(NOBODY, NS, chain(1, 2), 10.0, 10.0 + 2 * REMEMBER_S) is NOBODY


def test_a_late_word_of_an_earlier_attempt_changes_nothing() -> None:
    recent = Recent()
    recent.note("r1", 2, NS, chain(1, 2), "w2", 10.0)

    recent.note("r1", 1, NS, chain(1, 2), "w1", 10.0)

    assert levels(recent.complete(NOBODY, NS, chain(1, 2), 10.0, 10.0)) == {"w2": 2}


def test_memory_is_bounded_in_time_and_number() -> None:
    recent = Recent()

    for number in range(REMEMBER_MAX + 100):
        recent.note(f"r{number}", 1, NS, chain(number), "w1", 10.0)
    at_most = len(recent)
    recent.note("last", 1, NS, chain(1), "w1", 10.0 + REMEMBER_S)

    assert at_most == REMEMBER_MAX
    assert len(recent) == 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.sampled_from("abc"))))
def test_a_worker_is_known_to_hold_what_its_longest_dispatch_has_in_common(sent: list[tuple[list[int], str]]) -> None:
    asked = [0, 1, 0, 1, 0, 1]
    recent = Recent()
    expected: dict[str, int] = {}
    for number, (blocks, worker) in enumerate(sent):
        recent.note(f"r{number}", 1, NS, chain(*blocks), worker, 10.0)
        alike = zip(blocks, asked, strict=False)
        common = next((depth for depth, (one, other) in enumerate(alike) if one != other), min(len(blocks), 6))
        if common:
            expected[worker] = max(common, expected.get(worker, 0))

    assert levels(recent.complete(NOBODY, NS, chain(*asked), 10.0, 10.0)) == expected


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(
    sent=st.lists(st.tuples(prompts, st.sampled_from(["w1", "w2", "w3"])), max_size=8),
    held=st.dictionaries(st.sampled_from(["w1", "w2"]), st.integers(1, 6)),
    asked=prompts,
)
def test_each_worker_is_known_at_the_deepest_of_all_that_was_said_and_sent(
    sent: list[tuple[list[int], str]], held: dict[str, int], asked: list[int]
) -> None:
    recent = Recent()
    for number, (blocks, worker) in enumerate(sent):
        recent.note(f"r{number}", 1, NS, chain(*blocks), worker, 10.0)
    held = {worker: min(depth, len(asked)) for worker, depth in held.items()}
    said = Holdings(1, [Level(depth, [worker]) for worker, depth in held.items()])

    known = recent.complete(said, NS, chain(*asked), 10.0, 10.0)

    expected = dict(held)
    for blocks, worker in sent:
        shared = 0
        while shared < min(len(blocks), len(asked)) and blocks[shared] == asked[shared]:
            shared += 1
        if shared:
            expected[worker] = max(shared, expected.get(worker, 0))
    assert levels(known) == expected
    assert known.announced == {
        worker: depth - held.get(worker, 0) for worker, depth in expected.items() if depth > held.get(worker, 0)
    }
