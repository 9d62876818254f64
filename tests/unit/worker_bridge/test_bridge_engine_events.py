"""The engine's events: read from their bytes, and put in order."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.worker_bridge import engine_events
from prefixbus.worker_bridge.engine_events import AllBlocksCleared, BlockRemoved, BlockStored, EventsInvalid
from prefixbus.worker_bridge.event_order import EventOrder, Turn

STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["a salt"]],
    "group_idx": 0,
    "session_id": "a field of a later version",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [b"\x01" * 32], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])


def test_a_batch_is_read_as_vllm_writes_it() -> None:
    batch = engine_events.decode(payload(CLEARED, REMOVED, STORED))

    cleared, removed, stored = batch.events
    assert (batch.ts, batch.skipped) == (12.5, 0)
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(removed, BlockRemoved) and removed.block_hashes == [b"\x01" * 32]
    assert isinstance(stored, BlockStored) and stored.block_hashes == [2**64 - 1] and stored.extra_keys == [["a salt"]]


def test_unknown_kinds_are_skipped_and_counted() -> None:
    batch = engine_events.decode(payload({"type": "BlockMoved", "to": [1]}, REMOVED))

    assert (len(batch.events), batch.skipped) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        payload()[:-3],
        msgspec.msgpack.encode({"ts": 1}),
        payload(STORED | {"token_ids": "no"}),
        payload(7),
    ],
    ids=["empty", "not msgpack", "cut", "a map", "wrong type of a known kind", "no map"],
)
def test_what_cannot_be_read_is_an_error(raw: bytes) -> None:
    with pytest.raises(EventsInvalid):
        engine_events.decode(raw)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    try:
        engine_events.decode(raw)
    except EventsInvalid:
        pass


def test_batches_in_order_are_applied() -> None:
    order = EventOrder()

    assert [order.live(seq) for seq in range(3)] == [Turn.APPLY] * 3


def test_what_was_replayed_comes_late_when_it_comes_live() -> None:
    order = EventOrder()
    assert [order.replayed(seq) for seq in range(5)] == [Turn.APPLY] * 5

    assert [order.live(seq) for seq in (3, 4, 5)] == [Turn.LATE, Turn.LATE, Turn.APPLY]


def test_a_gap_is_mended_by_replay() -> None:
    order = EventOrder()
    order.live(0)

    assert order.live(3) is Turn.GAP
    assert order.missing_from == 1
    assert [order.replayed(seq) for seq in (1, 2, 3)] == [Turn.APPLY] * 3
    assert order.live(4) is Turn.APPLY


def test_what_is_lost_for_good_is_skipped() -> None:
    order = EventOrder()
    assert order.replayed(100) is Turn.GAP

    order.skip_to(100)

    assert order.replayed(100) is Turn.APPLY
    with pytest.raises(ValueError, match="applied already"):
        order.skip_to(50)


@pytest.mark.parametrize("seq", [0, 4, 5])
def test_live_numbers_that_do_not_grow_are_another_engines(seq: int) -> None:
    order = EventOrder()
    for before in range(6):
        order.live(before)

    assert order.live(seq) is Turn.RESTART


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_every_batch_is_applied_once_and_in_order(live_dropped: set[int], replay_dropped: set[int]) -> None:
    """Whatever is dropped of the live stream, replay brings it back; what replay has dropped, too, is skipped once."""
    order = EventOrder()
    applied: list[int] = []

    def replay() -> None:
        for seq in range(order.missing_from, live + 1):
            if seq not in replay_dropped:
                if order.replayed(seq) is Turn.GAP:
                    order.skip_to(seq)
                    assert order.replayed(seq) is Turn.APPLY
                applied.append(seq)

    for live in range(31):
        if live in live_dropped:
            continue
        turn = order.live(live)
        if turn is Turn.GAP:
            replay()
            if order.applied < live:
                order.skip_to(live)
                turn = order.replayed(live)
        if turn is Turn.APPLY:
            applied.append(live)

    last = max(set(range(31)) - live_dropped, default=-1)
    assert applied == sorted(set(applied))
    assert set(applied) == {seq for seq in range(last + 1) if seq not in live_dropped or seq not in replay_dropped}
