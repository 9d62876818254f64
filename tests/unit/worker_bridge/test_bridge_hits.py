"""A hit on blocks that the namespace does not have is found; one that the index merely hears of late is not."""

from test_bridge_blocks import NS_A, SALT_A, X, Y, Z, index, keys, removed, stored

from prefixbus.worker_bridge.blocks import BlockIndex
from prefixbus.worker_bridge.engine_events import AllBlocksCleared
from prefixbus.worker_bridge.hits import PATIENCE_S, Answered, HitCheck

CHAIN = keys(NS_A, (X, Y, Z))


def answered(blocks: BlockIndex, cached_tokens: int, generation: int | None = None) -> Answered:
    return Answered(
        request_id="r1",
        tenant="acme",
        scope="",
        ns_id=NS_A,
        keys=CHAIN,
        cached_tokens=cached_tokens,
        generation=blocks.generation if generation is None else generation,
    )


def test_a_hit_on_what_is_held_is_right() -> None:
    blocks, check = (made := index()), HitCheck(made)
    blocks.apply([stored(SALT_A, (X, Y, Z))])

    check.answered(answered(blocks, 6), 0.0)

    assert check.settle(PATIENCE_S + 1) == []


def test_a_hit_on_what_nobody_stored_is_wrong() -> None:
    blocks, check = (made := index()), HitCheck(made)
    blocks.apply([stored(SALT_A, (X,))])
    wrong = answered(blocks, 4)

    check.answered(wrong, 0.0)

    assert check.settle(PATIENCE_S / 2) == []
    assert check.settle(PATIENCE_S) == [wrong]
    assert check.settle(PATIENCE_S) == []


def test_a_hit_on_what_is_told_late_is_right() -> None:
    blocks, check = (made := index()), HitCheck(made)

    check.answered(answered(blocks, 4), 0.0)
    blocks.apply([stored(SALT_A, (X, Y))])

    assert check.settle(PATIENCE_S) == []
    assert check.unverified == 0


def test_a_hit_on_what_was_evicted_since_is_right() -> None:
    blocks, check = (made := index()), HitCheck(made)
    blocks.apply([stored(SALT_A, (X, Y))])
    hit = answered(blocks, 4)
    blocks.apply([removed(SALT_A, (X, Y)), removed(SALT_A, (X,))])

    check.answered(hit, 0.0)

    assert check.settle(PATIENCE_S) == []


def test_a_hit_that_a_cleared_cache_hides_is_not_judged() -> None:
    blocks, check = (made := index()), HitCheck(made)
    blocks.apply([stored(SALT_A, (X, Y))])
    hit = answered(blocks, 4)
    blocks.apply([AllBlocksCleared()])

    check.answered(hit, 0.0)

    assert check.settle(PATIENCE_S) == []
    assert check.unverified == 1


def test_blocks_that_are_computed_and_never_told_of_are_noticed() -> None:
    blocks, check = (made := index()), HitCheck(made)

    check.answered(answered(blocks, 0), 0.0)

    assert check.settle(PATIENCE_S) == []
    assert check.silent == 1
