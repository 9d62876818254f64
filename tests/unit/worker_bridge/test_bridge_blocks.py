"""The bridge's index: whatever the engine stores and evicts, it says what plain sets would, and tells it to others."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixbus.bus import blockkeys, namespace
from prefixbus.bus.messages import Cleared, Removed, Stored
from prefixbus.worker_bridge.adapters import Adapters
from prefixbus.worker_bridge.blocks import BlockIndex, Op
from prefixbus.worker_bridge.engine_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, Hash

KEY = bytes(range(32))
NS_A, NS_B = b"a" * 16, b"b" * 16
SALTS = {namespace.salt(KEY, NS_A): NS_A, namespace.salt(KEY, NS_B): NS_B, "somebody else's": None}
SALT_A, SALT_B, FOREIGN = SALTS

Block = tuple[int, int]
Chain = tuple[Block, ...]


ADAPTERS = Adapters(KEY, {"french": "lora-french", "legal": "lora-legal"})
SALT_FRENCH = namespace.salt(KEY, NS_A, "french")


def index() -> BlockIndex:
    return BlockIndex(2, ADAPTERS.owner)


def engine_hash(salt: str, chain: Chain) -> Hash:
    return hash((salt, chain)) & (1 << 64) - 1


def stored(salt: str, chain: Chain, first: int = 0, *, hashes: list[Hash] | None = None) -> BlockStored:
    """The engine's event for blocks `first`.. of a prompt."""
    parts = [chain[: number + 1] for number in range(first, len(chain))]
    extra: list[object] = [None] * len(parts)
    if first == 0:
        extra[0] = [["cache_salt", salt]]
    return BlockStored(
        block_hashes=hashes or [engine_hash(salt, part) for part in parts],
        parent_block_hash=engine_hash(salt, chain[:first]) if first else None,
        token_ids=[token for block in chain[first:] for token in block],
        block_size=2,
        medium="GPU",
        extra_keys=extra,
        group_idx=0,
    )


def removed(salt: str, *chains: Chain) -> BlockRemoved:
    return BlockRemoved(block_hashes=[engine_hash(salt, chain) for chain in chains], medium="GPU")


def keys(ns_id: bytes, chain: Chain) -> bytes:
    tokens = b"".join(token.to_bytes(4, "little") for block in chain for token in block)
    return blockkeys.chain(tokens, 2, namespace.seed(ns_id))


def key(ns_id: bytes, chain: Chain) -> int:
    return int.from_bytes(keys(ns_id, chain)[-8:], "little")


def u64s(run: bytes) -> list[int]:
    return list(memoryview(run).cast("Q"))


X, Y, Z = (1, 2), (3, 4), (5, 6)


class Listener:
    """A directory's naive view of one worker: sets of keys."""

    def __init__(self) -> None:
        self.held: dict[bytes, set[int]] = {}

    def hear(self, ops: Iterable[Op]) -> None:
        for op in ops:
            match op:
                case Stored():
                    self.held.setdefault(op.ns_id, set()).update(u64s(op.keys))
                case Removed():
                    self.held[op.ns_id] -= set(u64s(op.keys))
                case Cleared():
                    self.held.clear()


class IndexAgreesWithPlainSets(RuleBasedStateMachine):
    """However blocks are stored, stored again, evicted in any order or cleared, the index and whoever follows its
    changes hold exactly the keys of which the engine has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index()
        self.listener = Listener()
        self.copies: Counter[tuple[str, Chain]] = Counter()

    def there(self) -> list[tuple[str, Chain]]:
        return sorted(name for name, count in self.copies.items() if count)

    def happen(self, *events: EngineEvent) -> None:
        ops = self.index.apply(events)
        self.check_parents(ops)
        self.listener.hear(ops)

    def check_parents(self, ops: list[Op]) -> None:
        """Every run names the key before it."""
        before: dict[tuple[bytes, int], int] = {}
        for salt, chain in self.copies:
            ns_id = SALTS[salt]
            if ns_id is not None:
                before[ns_id, key(ns_id, chain)] = key(ns_id, chain[:-1]) if chain[:-1] else 0
        for op in ops:
            if isinstance(op, Stored):
                run = u64s(op.keys)
                assert [before[op.ns_id, each] for each in run] == [op.parent, *run[:-1]]

    @rule(
        salt=st.sampled_from(list(SALTS)),
        chain=st.lists(st.sampled_from([X, Y]), min_size=1, max_size=4).map(tuple),
        data=st.data(),
    )
    def engine_stores(self, salt: str, chain: Chain, data: st.DataObject) -> None:
        starts = [0, *(n for n in range(1, len(chain)) if self.copies[salt, chain[:n]])]
        first = data.draw(st.sampled_from(starts), label="first block computed")
        for number in range(first, len(chain)):
            self.copies[salt, chain[: number + 1]] += 1

        self.happen(stored(salt, chain, first))

    @rule(data=st.data())
    def engine_computes_again(self, data: st.DataObject) -> None:
        """Two requests with one prompt at once: a second copy of each block."""
        there = self.there()
        if there:
            salt, chain = data.draw(st.sampled_from(there))
            for number in range(len(chain)):
                self.copies[salt, chain[: number + 1]] += 1
            self.happen(stored(salt, chain))

    @rule(data=st.data())
    def engine_evicts(self, data: st.DataObject) -> None:
        there = self.there()
        if there:
            salt, chain = data.draw(st.sampled_from(there))
            self.copies[salt, chain] -= 1
            self.happen(removed(salt, chain))

    @rule()
    def engine_clears(self) -> None:
        self.copies.clear()
        self.happen(AllBlocksCleared())

    def expected(self) -> dict[bytes, set[int]]:
        held: dict[bytes, set[int]] = {}
        for (salt, chain), count in self.copies.items():
            ns_id = SALTS[salt]
            if count and ns_id is not None:
                held.setdefault(ns_id, set()).add(key(ns_id, chain))
        return held

    @invariant()
    def followers_hold_what_the_engine_holds(self) -> None:
        assert {ns_id: held for ns_id, held in self.listener.held.items() if held} == self.expected()

    @invariant()
    def counts_are_of_what_is_there(self) -> None:
        assert self.index.held_keys == sum(len(held) for held in self.expected().values())
        assert self.index.foreign == sum(1 for (salt, _), count in self.copies.items() if count and salt == FOREIGN)
        assert self.index.complete

    @invariant()
    def a_dump_says_the_same_with_parents_first(self) -> None:
        held: dict[bytes, set[int]] = {}
        snapshot = self.index.snapshot()
        parts = [part for part in snapshot.dump(keys_a_part=3) if part is not None]
        assert len(parts) == snapshot.parts(keys_a_part=3)
        for part in parts:
            assert sum(len(run.keys) // 8 for run in part) <= 3
            for run in part:
                before = held.setdefault(run.ns_id, set())
                # A parent that is not there comes never: it was evicted before its child.
                assert not run.parent or run.parent in before or run.parent not in self.expected()[run.ns_id]
                before.update(u64s(run.keys))
        assert held == self.expected()

    @invariant()
    def depths_are_those_of_unbroken_chains(self) -> None:
        for chain in ((X, Y, X), (Y, Y, Y, X), (Z,)):
            for salt, ns_id in SALTS.items():
                if ns_id is not None:
                    depth = 0
                    while depth < len(chain) and self.copies[salt, chain[: depth + 1]]:
                        depth += 1
                    assert self.index.held(ns_id, keys(ns_id, chain)) == depth


TestIndexAgreesWithPlainSets = IndexAgreesWithPlainSets.TestCase
TestIndexAgreesWithPlainSets.settings = settings(max_examples=max(100, settings().max_examples))


def test_a_run_is_one_change() -> None:
    ops = index().apply([stored(SALT_A, (X, Y, Z))])

    assert ops == [Stored(NS_A, 0, keys(NS_A, (X, Y, Z)))]


def test_a_continued_run_names_the_key_before_it() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X,))])

    ops = blocks.apply([stored(SALT_A, (X, Y, Z), 1)])

    assert ops == [Stored(NS_A, key(NS_A, (X,)), keys(NS_A, (X, Y, Z))[8:])]


def test_the_last_copy_counts() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X,)), stored(SALT_A, (X,))])

    first, second = blocks.apply([removed(SALT_A, (X,))]), blocks.apply([removed(SALT_A, (X,))])

    assert first == []
    assert second == [Removed(NS_A, keys(NS_A, (X,)))]


def test_two_hashes_with_one_key_are_two_copies() -> None:
    """A collision, or an engine that hashes more than tokens: our key stays until both are gone."""
    blocks = index()
    one: Hash = 1
    other: Hash = b"\x02" * 32
    blocks.apply([stored(SALT_A, (X,), hashes=[one]), stored(SALT_A, (X,), hashes=[other])])

    first = blocks.apply([BlockRemoved([one])])
    second = blocks.apply([BlockRemoved([other])])

    assert first == []
    assert second == [Removed(NS_A, keys(NS_A, (X,)))]


def test_blocks_under_a_salt_that_is_not_ours_are_counted_and_never_told() -> None:
    blocks = index()

    ops = blocks.apply([stored(FOREIGN, (X, Y)), stored(FOREIGN, (X, Y, Z), 2)])

    assert ops == []
    assert (blocks.foreign, blocks.held_keys, blocks.complete) == (3, 0, True)
    assert list(blocks.snapshot().dump(3)) == [[]]


def test_a_foreign_block_counts_until_its_last_copy_goes() -> None:
    blocks = index()
    blocks.apply([stored(FOREIGN, (X,)), stored(FOREIGN, (X,))])

    blocks.apply([removed(FOREIGN, (X,))])
    assert blocks.foreign == 1

    blocks.apply([removed(FOREIGN, (X,))])
    assert blocks.foreign == 0


def test_a_salt_may_stand_bare_and_beside_others() -> None:
    for extra in ([SALT_A], ["an image's hash", SALT_A], [["cache_salt", SALT_A]]):
        event = stored(SALT_A, (X,))
        event = BlockStored(
            **{name: getattr(event, name) for name in event.__struct_fields__} | {"extra_keys": [extra]}
        )

        assert len(index().apply([event])) == 1, extra


def test_two_salts_of_ours_in_one_block_are_nobodys() -> None:
    event = stored(SALT_A, (X,))
    both = BlockStored(
        **{name: getattr(event, name) for name in event.__struct_fields__} | {"extra_keys": [[SALT_A, SALT_B]]}
    )

    assert index().apply([both]) == []


@pytest.mark.parametrize(
    ("case", "salt", "lora", "is_ours"),
    [
        ("the adapter of the salt", SALT_FRENCH, {"lora_name": "lora-french", "lora_id": 1}, True),
        ("another adapter that is served", SALT_FRENCH, {"lora_name": "lora-legal", "lora_id": 2}, False),
        ("the adapter's own name, which is not the engine's", SALT_FRENCH, {"lora_name": "french"}, False),
        ("an adapter that is not served", SALT_A, {"lora_name": "other", "lora_id": 3}, False),
        ("no adapter under an adapter's salt", SALT_FRENCH, {}, False),
        ("an adapter under the salt of none", SALT_A, {"lora_name": "lora-french", "lora_id": 1}, False),
        ("an adapter without a name", SALT_A, {"lora_id": 1}, False),
    ],
)
def test_an_adapters_blocks_are_its_namespaces_and_nobody_elses(
    case: str, salt: str, lora: dict[str, Any], is_ours: bool
) -> None:
    event = stored(salt, (X, Y))
    blocks = index()

    ops = blocks.apply([BlockStored(**{name: getattr(event, name) for name in event.__struct_fields__} | lora)])

    assert ops == ([Stored(NS_A, 0, keys(NS_A, (X, Y)))] if is_ours else [])
    assert blocks.foreign == (0 if is_ours else 2)


def test_a_blocks_media_are_in_its_key_by_our_names_for_them() -> None:
    cat, dog = b"c" * 16, b"d" * 16
    event = stored(SALT_A, (X, Y, Z))
    first: list[object] = [["cache_salt", SALT_A], [cat.hex(), 1]]
    extra: list[object] = [first, [[cat.hex(), -1], ["mm", dog.hex(), 1]], None]
    tokens = b"".join(token.to_bytes(4, "little") for block in (X, Y, Z) for token in block)

    ops = index().apply(
        [BlockStored(**{name: getattr(event, name) for name in event.__struct_fields__} | {"extra_keys": extra})]
    )

    media = [(1, 2, cat), (3, 1, dog)]
    assert ops == [Stored(NS_A, 0, blockkeys.chain(tokens, 2, namespace.seed(NS_A), media))]


@pytest.mark.parametrize("name", ["C" * 32, "c" * 31, "c" * 34, "what an engine made itself", ""])
def test_what_an_engine_calls_a_medium_itself_is_none_of_our_names(name: str) -> None:
    event = stored(SALT_A, (X,))
    extra: list[object] = [[["cache_salt", SALT_A], [name, 0]]]
    tokens = b"".join(token.to_bytes(4, "little") for token in X)

    (op,) = index().apply(
        [BlockStored(**{field: getattr(event, field) for field in event.__struct_fields__} | {"extra_keys": extra})]
    )

    assert isinstance(op, Stored)
    assert op.keys != keys(NS_A, (X,))
    assert op.keys != blockkeys.chain(tokens, 2, namespace.seed(NS_A), [(0, 2, b"\xcc" * 16)])


def test_an_unknown_parent_leaves_the_story_incomplete() -> None:
    blocks = index()

    ops = blocks.apply([stored(SALT_A, (X, Y), 1)])

    assert ops == []
    assert (blocks.complete, blocks.unused.unknown_parent) == (False, 1)


def test_an_emptied_cache_makes_a_broken_story_whole() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X, Y), 1)])
    assert not blocks.complete

    blocks.apply([AllBlocksCleared(), stored(SALT_A, (X,))])

    assert blocks.complete
    assert blocks.held(NS_A, keys(NS_A, (X,))) == 1


def test_events_of_other_tiers_and_groups_change_nothing() -> None:
    blocks = index()
    event = stored(SALT_A, (X,))
    fields = {name: getattr(event, name) for name in event.__struct_fields__}

    ops = blocks.apply([BlockStored(**fields | {"medium": "CPU"}), BlockStored(**fields | {"group_idx": 1})])

    assert ops == []
    assert (blocks.unused.other_tier, blocks.complete) == (1, True)


def test_a_run_whose_tokens_are_not_its_blocks_is_refused() -> None:
    blocks = index()
    event = stored(SALT_A, (X, Y))
    fields = {name: getattr(event, name) for name in event.__struct_fields__}

    ops = blocks.apply(
        [
            BlockStored(**fields | {"token_ids": [1, 2, 3]}),
            BlockStored(**fields | {"block_size": 16}),
            BlockStored(**fields | {"token_ids": [1, 2, 3, -4]}),
        ]
    )

    assert ops == []
    assert (blocks.unused.malformed, blocks.complete) == (6, False)


def test_removals_in_a_row_are_one_change() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X, Y, Z)), stored(SALT_B, (X,))])

    ops = blocks.apply([removed(SALT_A, (X, Y, Z)), removed(SALT_A, (X, Y)), removed(SALT_B, (X,))])

    expected = keys(NS_A, (X, Y, Z))
    assert ops == [Removed(NS_A, expected[16:] + expected[8:16]), Removed(NS_B, keys(NS_B, (X,)))]


def test_what_was_held_since_a_moment_is_remembered() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X, Y))])
    then = blocks.generation
    blocks.apply([removed(SALT_A, (X, Y)), removed(SALT_A, (X,))])

    assert blocks.held(NS_A, keys(NS_A, (X, Y))) == 0
    assert blocks.held_since(NS_A, keys(NS_A, (X, Y)), then) == 2
    assert blocks.held_since(NS_A, keys(NS_A, (X, Y)), blocks.generation + 1) == 0
    assert blocks.remembers(then)


def test_a_cleared_cache_forgets_what_was_held() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X,))])
    then = blocks.generation

    ops = blocks.apply([AllBlocksCleared()])

    assert ops == [Cleared()]
    assert not blocks.remembers(then)
    assert not blocks.holds_namespace(NS_A)


def test_an_evicted_block_is_as_old_as_its_key_and_a_cleared_one_is_not_evicted() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X, Y))], 100.0)
    blocks.apply([stored(SALT_A, (X,))], 105.0)

    blocks.apply([removed(SALT_A, (X, Y)), removed(SALT_A, (X,))], 110.0)
    one_copy_left = blocks.evictions.total_s
    blocks.apply([removed(SALT_A, (X,))], 130.0)
    blocks.apply([stored(SALT_A, (X,)), stored(FOREIGN, (X,)), AllBlocksCleared()], 200.0)

    assert one_copy_left == 10.0
    assert blocks.evictions.total_s == 40.0
    assert blocks.evictions.buckets()[-1] == ("+Inf", 2)
