"""Block changes go out in messages of bounded size, in the order in which they happened, and never all at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st
from test_bridge_blocks import NS_A, NS_B, SALT_A, SALT_B, Chain, index, removed, stored, u64s

from prefixbus.bus import messages as wire
from prefixbus.bus import namespace, subjects
from prefixbus.bus.messages import Cleared, KvDump, KvEvents, Removed, Stored
from prefixbus.directory.index import Index, Slots
from prefixbus.directory.ledger import Ledger
from prefixbus.worker_bridge import kv_feed
from prefixbus.worker_bridge.blocks import BlockIndex, Op, split
from prefixbus.worker_bridge.engine_events import AllBlocksCleared, EngineEvent

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
    messages = [message for message in kv_feed.in_messages(changes) if message is not None]

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


# -- the feed in whole, with a directory at its other end

SLICE_KEYS = 8
DUMP_KEYS = 40
MANY = 20 * SLICE_KEYS


class Stream:
    """The bus as the feed sees it; everything sent is kept."""

    connected = True

    def __init__(self) -> None:
        self.sent: list[KvEvents | KvDump] = []

    def send(self, subject: str, payload: bytes = b"") -> None:
        self.sent.append(wire.KV.decode(payload))


@contextlib.asynccontextmanager
async def feeding(blocks: BlockIndex) -> AsyncIterator[tuple[kv_feed.KvFeed, Stream]]:
    stream = Stream()
    feed = kv_feed.KvFeed(stream, "w1", blocks, dump_keys=DUMP_KEYS, slice_keys=SLICE_KEYS)
    task = asyncio.create_task(feed.run())
    yield feed, stream
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def turns_until_quiet(stream: Stream) -> int:
    """How many turns of the loop pass until nothing more is sent."""
    turns, last, since = 0, len(stream.sent), 0
    while since < 50:
        await asyncio.sleep(0)
        turns += 1
        since = since + 1 if len(stream.sent) == last else 0
        last = len(stream.sent)
    return turns - since


def chain(number: int, blocks: int) -> Chain:
    return tuple((number, block) for block in range(blocks))


def many() -> BlockIndex:
    """Long chains and short ones."""
    blocks = index()
    blocks.apply([stored(SALT_A, chain(1, MANY // 2))])
    blocks.apply([stored(SALT_A, chain(2 + number, 4)) for number in range(MANY // 8)])
    return blocks


async def test_a_large_dump_gives_way_between_slices() -> None:
    blocks = many()
    async with feeding(blocks) as (feed, stream):
        feed.begin(1)
        assert await turns_until_quiet(stream) >= MANY // SLICE_KEYS

        feed.ask_dump()
        assert await turns_until_quiet(stream) >= MANY // SLICE_KEYS

        assert feed.dumps == 1
        dump = [each for each in stream.sent if isinstance(each, KvDump)]
        assert [each.part for each in dump] == list(range(MANY // DUMP_KEYS))
        assert {each.parts for each in dump} == {MANY // DUMP_KEYS}
        assert sum(len(run.keys) // 8 for each in dump for run in each.runs) == MANY


def tell(directory: Ledger, message: KvEvents | KvDump) -> None:
    each = message
    if isinstance(each, KvEvents):
        directory.events("w1", 1, each.seq, each.ops, 0.0)
    else:
        directory.dump_chunk("w1", 1, each.dump_id, each.part, each.parts, each.seq, each.runs, 0.0)


def changes_of(chains: list[int]) -> list[EngineEvent]:
    """One event for each number: a new chain, the end of an old one, or (0) a cleared cache."""
    made: list[EngineEvent] = []
    for number in chains:
        if not number:
            made.append(AllBlocksCleared())
        elif number % 2:
            made.append(stored(SALT_A, chain(50_000 + number, 4)))
        else:
            made.append(removed(SALT_A, *(chain(2 + number // 2, depth) for depth in (4, 3))))
    return made


@given(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 40), max_size=4)), max_size=8),
    st.sampled_from([[], [0]]),
    st.integers(1, 6),
)
def test_a_dump_that_races_live_events_ends_right(
    happenings: list[tuple[int, list[int]]], last: list[int], lost: int
) -> None:
    """Whatever changes between its slices: a directory that missed an event and takes dump and events as they come
    holds in the end what the bridge does."""

    async def scenario() -> None:
        blocks = many()
        async with feeding(blocks) as (feed, stream):
            feed.begin(1)
            await turns_until_quiet(stream)
            feed.ask_dump()
            for turns, numbers in [*happenings, (1, last)]:
                for _ in range(turns):
                    await asyncio.sleep(0)
                feed.add(blocks.apply(changes_of(numbers)))
            await turns_until_quiet(stream)
            if last:
                feed.ask_dump()  # the one before it is void
                await turns_until_quiet(stream)
        held = Index(Slots())
        directory = Ledger(held)
        directory.heartbeat("w1", 1, 0, 0.0)
        lost_seq = min(lost, next(each.seq for each in stream.sent if isinstance(each, KvDump)))

        for message in stream.sent:
            if not (isinstance(message, KvEvents) and message.seq == lost_seq):
                tell(directory, message)

        view = directory.view("w1")
        assert view is not None and view.slot is not None and view.complete
        truth = {(run.ns_id, key) for run in blocks.snapshot().runs() if run for key in memoryview(run.keys).cast("Q")}
        assert {each for each in truth if held.holds(each[0], view.slot, each[1])} == truth
        assert held.held_by(view.slot) == len(truth)

    asyncio.run(scenario())


# -- several shards

SHARDS = 2


class Subjects:
    """The bus as the feeds to all shards see it."""

    connected = True

    def __init__(self) -> None:
        self.sent: dict[str, list[KvEvents | KvDump]] = {}
        self.count = 0

    def send(self, subject: str, payload: bytes = b"") -> None:
        self.sent.setdefault(subject, []).append(wire.KV.decode(payload))
        self.count += 1

    async def are_quiet(self) -> None:
        since, last = 0, -1
        while since < 50:
            await asyncio.sleep(0)
            since = since + 1 if self.count == last else 0
            last = self.count


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SALT_A, SALT_B]), st.integers(1, 6), st.sampled_from(["stores", "evicts", "clears"])
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_each_shard_is_told_the_whole_story_of_its_own_namespaces_and_no_other(
    happenings: list[tuple[str, int, str]], dumped: bool
) -> None:
    async def scenario() -> None:
        blocks, outlet = index(), Subjects()
        blocks.apply([stored(SALT_A, chain(1, 3)), stored(SALT_B, chain(1, 5))])
        feeds = kv_feed.KvFeeds(outlet, "w1", blocks, SHARDS)
        task = asyncio.create_task(feeds.run())
        feeds.begin(1)
        for salt, number, what in happenings:
            events: dict[str, EngineEvent] = {
                "stores": stored(salt, chain(number, 3)),
                "evicts": removed(salt, chain(number, 3)),
                "clears": AllBlocksCleared(),
            }
            feeds.add(blocks.apply([events[what]]))
        await outlet.are_quiet()
        if dumped:
            assert feeds.ask_dump(1)
            await outlet.are_quiet()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

        assert {namespace.shard_of(ns_id, SHARDS) for ns_id in (NS_A, NS_B)} == {0, 1}
        for ns_id in (NS_A, NS_B):
            shard = namespace.shard_of(ns_id, SHARDS)
            told = outlet.sent.get(subjects.kv(shard, "w1"), [])
            assert [each.seq for each in told if isinstance(each, KvEvents)] == list(range(1, feeds.seqs[shard] + 1))
            assert any(isinstance(each, KvDump) for each in told) == (dumped and shard == 1)
            runs = [op for each in told for op in (each.ops if isinstance(each, KvEvents) else each.runs)]
            assert {op.ns_id for op in runs if not isinstance(op, Cleared)} <= {ns_id}
            held = Index(Slots())
            directory = Ledger(held)
            directory.heartbeat("w1", 1, 0, 0.0)
            for message in told:
                tell(directory, message)
            view = directory.view("w1")
            assert view is not None and view.slot is not None and view.complete
            truth = {key for run in blocks.snapshot().runs() if run and run.ns_id == ns_id for key in u64s(run.keys)}
            assert all(held.holds(ns_id, view.slot, key) for key in truth)
            assert held.held_by(view.slot) == len(truth)

    asyncio.run(scenario())


def test_a_dump_of_a_shard_that_is_not_there_is_not_begun() -> None:
    feeds = kv_feed.KvFeeds(Subjects(), "w1", index(), SHARDS)

    assert [feeds.ask_dump(shard) for shard in (-1, 0, 1, 2)] == [False, True, True, False]
