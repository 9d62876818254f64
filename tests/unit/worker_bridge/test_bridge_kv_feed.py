"""Block changes go out in messages of bounded size, in the order in which they happened."""

from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.messages import Cleared, Removed, Stored
from prefixbus.worker_bridge import kv_feed
from prefixbus.worker_bridge.blocks import Op, split

keys = st.integers(0, 9000).map(lambda count: b"".join(number.to_bytes(8, "little") for number in range(1, count + 1)))
some_keys = keys.filter(bool)
ops = st.one_of(
    st.builds(Stored, st.just(b"n" * 16), st.integers(0, 5), some_keys),
    st.builds(Removed, st.just(b"n" * 16), some_keys),
    st.just(Cleared()),
)


def follows(run: Stored, next_run: Stored) -> bool:
    return run.keys[-8:] == next_run.parent.to_bytes(8, "little")


def rejoined(pieces: list[Op]) -> list[Op]:
    """Runs put together again where one names the last key of the one before it."""
    whole: list[Op] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if (
            isinstance(piece, Stored)
            and isinstance(last, Stored)
            and last.keys[-8:] == piece.parent.to_bytes(8, "little")
        ):
            whole[-1] = Stored(last.ns_id, last.parent, last.keys + piece.keys)
        elif isinstance(piece, Removed) and isinstance(last, Removed):
            whole[-1] = Removed(last.ns_id, last.keys + piece.keys)
        else:
            whole.append(piece)
    return whole


@given(st.lists(ops, max_size=40))
def test_messages_are_bounded_and_lose_nothing(changes: list[Op]) -> None:
    messages = list(kv_feed.in_messages(changes))

    for message in messages:
        assert 1 <= len(message) <= 16
        assert sum(len(op.keys) // 8 for op in message if not isinstance(op, Cleared)) <= 4096
    assert rejoined([op for message in messages for op in message]) == rejoined(changes)


@given(some_keys, st.integers(0, 100), st.integers(1, 100))
def test_pieces_of_a_run_chain_up(run: bytes, first: int, rest: int) -> None:
    pieces = list(split(Stored(b"n" * 16, 0, run), first, rest))

    assert b"".join(piece.keys for piece in pieces) == run
    parent = 0
    for number, piece in enumerate(pieces):
        assert piece.parent == parent
        assert 1 <= len(piece.keys) // 8 <= (first if number == 0 and first else rest)
        parent = int.from_bytes(piece.keys[-8:], "little")
