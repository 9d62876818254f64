"""The directory's event-derived state, built anew from the stream."""

import random

from prefixbus.bus.messages import HOST, Cleared, KvDump, KvEvents, Removed, Stored
from prefixbus.lab.rebuild import Held, Rebuild

NS, OTHER = b"n" * 16, b"o" * 16


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def events(worker: str, seq: int, *ops: Stored | Removed | Cleared, incarnation: int = 1) -> KvEvents:
    return KvEvents(1, worker, incarnation, seq, list(ops))


def test_it_is_what_the_events_up_to_there_say() -> None:
    rebuild = Rebuild()

    rebuild.take(0, events("w1", 1, Stored(NS, 0, keys(1, 2, 3)), Stored(OTHER, 0, keys(7))))
    rebuild.take(0, events("w1", 2, Removed(NS, keys(3))))
    rebuild.take(0, events("w2", 1, Stored(NS, 0, keys(1)), Stored(NS, 0, keys(1, 2), HOST)))

    assert rebuild.held() == [Held(0, "w1", 1, 2, True, 3, 0), Held(0, "w2", 1, 1, True, 1, 2)]
    assert rebuild.namespaces == 2


def test_a_new_life_holds_nothing_of_the_one_before() -> None:
    rebuild = Rebuild()

    rebuild.take(0, events("w1", 1, Stored(NS, 0, keys(1, 2, 3))))
    rebuild.take(0, events("w1", 1, Stored(NS, 0, keys(9)), incarnation=2))

    assert rebuild.held() == [Held(0, "w1", 2, 1, True, 1, 0)]


def test_a_gap_is_told_until_a_dump_has_mended_it() -> None:
    rebuild = Rebuild()
    rebuild.take(0, events("w1", 1, Stored(NS, 0, keys(1))))
    rebuild.take(0, events("w1", 3, Stored(NS, 0, keys(5))))

    (before,) = rebuild.held()
    rebuild.take(0, KvDump(1, "w1", 1, 3, 1, 0, 1, [Stored(NS, 0, keys(1, 2)), Stored(NS, 0, keys(5))]))
    (after,) = rebuild.held()

    assert not before.complete
    assert after == Held(0, "w1", 1, 3, True, 3, 0)


def test_shards_have_a_story_of_each_worker_of_their_own() -> None:
    rebuild = Rebuild()

    rebuild.take(1, events("w1", 1, Stored(NS, 0, keys(1, 2))))
    rebuild.take(0, events("w1", 1, Stored(OTHER, 0, keys(1))))

    assert [(held.shard, held.gpu_blocks) for held in rebuild.held()] == [(0, 1), (1, 2)]


def test_a_long_random_story_ends_with_what_plain_sets_say() -> None:
    rng = random.Random(4)
    rebuild, truth = Rebuild(), {worker: set[int]() for worker in ("w1", "w2", "w3")}

    for seq in range(1, 400):
        for worker, held in truth.items():
            run = [rng.randrange(1, 200) for _ in range(4)]
            if rng.random() < 0.5:
                held.update(run)
                rebuild.take(0, events(worker, seq, Stored(NS, 0, keys(*run))))
            elif rng.random() < 0.02:
                held.clear()
                rebuild.take(0, events(worker, seq, Cleared()))
            else:
                held.difference_update(run)
                rebuild.take(0, events(worker, seq, Removed(NS, keys(*run))))

    assert {held.worker: held.gpu_blocks for held in rebuild.held()} == {
        worker: len(held) for worker, held in truth.items()
    }
