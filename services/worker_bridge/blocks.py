"""What this worker's engine holds, under our names: the authority that everyone else only believes.

The engine names blocks by its own hashes and tells a prompt's salt with the first block only. From the salt we know the
namespace, from the namespace and the tokens our keys, and every later block finds both through its parent.

Owns: engine hash -> block, our keys per namespace, copies of each, what went lately.
Must not know: sockets, sequence numbers, requests, clocks.
Units: key u64, a chain of keys is bytes (u64 LE each), depth in blocks, tokens u32.
Memory: proportional to the engine's blocks (about 300 bytes each), plus at most `_GONE_MAX` keys that went.
Source: DESIGN 7; facts/vllm.md (a hash may be stored more than once, each copy's removal is one event)."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ..bus import blockkeys, namespace
from ..bus.messages import Cleared, Removed, Stored
from .engine_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, Hash
from .evictions import Evictions

Op = Stored | Removed | Cleared

GPU = "GPU"
DUMP_KEYS = 4096
# About 0.7 ms of work on a snapshot; all of 32,768 keys in one go held the frames up for 42 ms.
SLICE_KEYS = 512
# Keys that went are remembered so that a hit on a block evicted since is not taken for a wrong one: 64k keys of 32
# tokens are two whole caches of 1M tokens.
_GONE_MAX = 65536


class _Entry(msgspec.Struct, gc=False):
    """One of our keys: its parent's key (0 at the start of a chain), since when it is held, and the number of physical
    copies there are.

    Like blocks, never part of a cycle: the collector need not look at tens of thousands of them (8 ms a collection)."""

    parent: int
    stored_at: float
    copies: int = 1


class _Space:
    """One namespace's keys."""

    __slots__ = ("entries", "ns_id", "seed")

    def __init__(self, ns_id: bytes) -> None:
        self.ns_id = ns_id
        self.seed = namespace.seed(ns_id)
        self.entries: dict[int, _Entry] = {}


class _Block(msgspec.Struct, gc=False):
    """One of the engine's hashes; `space` is None for blocks under a salt that is not ours."""

    space: _Space | None
    key: int
    copies: int = 1


class _Ops:
    """Collects changes in order; removals that follow each other in one namespace become one run."""

    def __init__(self) -> None:
        self._done: list[Op] = []
        self._removed_of = b""
        self._removed = array("Q")

    def append(self, op: Op) -> None:
        self._close_run()
        self._done.append(op)

    def remove(self, ns_id: bytes, key: int) -> None:
        if ns_id != self._removed_of:
            self._close_run()
            self._removed_of = ns_id
        self._removed.append(key)

    def take(self) -> list[Op]:
        self._close_run()
        return self._done

    def _close_run(self) -> None:
        if self._removed:
            self._done.append(Removed(self._removed_of, self._removed.tobytes()))
            self._removed = array("Q")


class Unused:
    """Events that told us nothing, in blocks, by reason."""

    def __init__(self) -> None:
        self.other_tier = 0
        self.malformed = 0
        self.unknown_parent = 0


class BlockIndex:
    """Takes the engine's events in order and returns what changed in our terms.

    `owner(salt, lora_name)` gives the ns_id of a salt of ours, under the adapter that it was made for (None: none);
    None for any other. `complete` is false once part of the story
    was missed: then we may hold more than the index says (never less, as long as the caller calls `clear` where
    removals may have been missed)."""

    def __init__(self, block_size: int, owner: Callable[[str, str | None], bytes | None]) -> None:
        self.block_size = block_size
        self.complete = True
        self.unused = Unused()
        self.foreign = 0
        """Hashes held under salts that are not ours: never advertised."""
        self.held_keys = 0
        self.clears = 0
        self.evictions = Evictions()
        """Keys whose last copy was removed; what is cleared is not in it."""
        self.generation = 0
        """Counts applied events: a point in the story, see `held_since`."""
        self._owner = owner
        self._blocks: dict[Hash, _Block] = {}
        self._spaces: dict[bytes, _Space] = {}
        self._gone: dict[tuple[bytes, int], int] = {}
        self._gone_known_from = 0
        self._at = 0.0

    def __repr__(self) -> str:
        story = "complete" if self.complete else "incomplete"
        return f"<BlockIndex {self.held_keys} keys in {len(self._spaces)} namespaces, {self.foreign} foreign, {story}>"

    # --- questions ---

    def held(self, ns_id: bytes, keys: bytes) -> int:
        """How many leading blocks of the chain `keys` this worker holds."""
        space = self._spaces.get(ns_id)
        if space is None:
            return 0
        entries = space.entries
        depth = 0
        for key in _u64s(keys):
            if key not in entries:
                break
            depth += 1
        return depth

    def held_since(self, ns_id: bytes, keys: bytes, generation: int) -> int:
        """How many leading blocks were held at some time since `generation`. Meaningful if `remembers(generation)`."""
        space = self._spaces.get(ns_id)
        entries = space.entries if space is not None else {}
        gone = self._gone
        depth = 0
        for key in _u64s(keys):
            if key not in entries and gone.get((ns_id, key), -1) < generation:
                break
            depth += 1
        return depth

    def remembers(self, generation: int) -> bool:
        """Whether everything that went since `generation` is still known by name."""
        return self.complete and generation >= self._gone_known_from

    def holds_namespace(self, ns_id: bytes) -> bool:
        """Whether a single block of the namespace is left."""
        return ns_id in self._spaces

    # --- what happens ---

    def apply(self, events: Iterable[EngineEvent], at: float = 0.0) -> list[Op]:
        """The changes that these events make, in order; `at` is when the engine made them, in seconds."""
        ops = _Ops()
        self._at = at
        for event in events:
            self.generation += 1
            if type(event) is BlockStored:
                self._store(event, ops)
            elif type(event) is BlockRemoved:
                self._remove(event, ops)
            elif type(event) is AllBlocksCleared:
                for op in self.empty():
                    ops.append(op)
        return ops.take()

    def clear(self) -> list[Op]:
        """The engine's cache went, or what is in it can no longer be told."""
        self.generation += 1
        self.clears += 1
        self._blocks.clear()
        self._spaces.clear()
        self._gone.clear()
        self._gone_known_from = self.generation
        self.foreign = 0
        self.held_keys = 0
        return [Cleared()]

    def empty(self) -> list[Op]:
        """The engine's cache was emptied: all that will be in it is told from here on, whatever was missed before."""
        self.complete = True
        return self.clear()

    def restart(self) -> None:
        """A new engine process, or a story told from its beginning."""
        self.clear()
        self.complete = True

    def lose_story(self) -> list[Op]:
        """Events were missed for good: what is known may be gone, and what is held may be unknown."""
        self.complete = False
        return self.clear()

    def _store(self, event: BlockStored, ops: _Ops) -> None:
        hashes = event.block_hashes
        count = len(hashes)
        if not self._is_ours_to_count(event.medium, event.group_idx, count):
            return
        tokens = self._tokens_of(event)
        parent = None if event.parent_block_hash is None else self._blocks.get(event.parent_block_hash)
        if tokens is None:
            self.unused.malformed += count
            self.complete = False
            return
        if parent is not None:
            space, key, parent_key = parent.space, parent.key, parent.key
        elif event.parent_block_hash is None:
            space = self._space_of(event)
            key = space.seed if space is not None else 0
            parent_key = 0
        else:
            self.unused.unknown_parent += count
            self.complete = False
            return
        width = 4 * self.block_size
        extra = event.extra_keys or ()
        run = array("Q")
        run_parent = parent_key
        for number, hash_ in enumerate(hashes):
            block = self._blocks.get(hash_)
            if block is None:
                if space is not None:
                    names = _media(extra[number]) if number < len(extra) else b""
                    key = blockkeys.extend(tokens[number * width : (number + 1) * width], key, names)
                block = self._blocks[hash_] = _Block(space, key)
                if self._count_copy(block, parent_key):
                    run.append(key)
                    parent_key = key
                    continue
            else:
                block.copies += 1
                if block.space is not None:
                    block.space.entries[block.key].copies += 1
            # Known already: what follows is a run of its own.
            if run and space is not None:
                ops.append(Stored(space.ns_id, run_parent, run.tobytes()))
                run = array("Q")
            space, key, parent_key = block.space, block.key, block.key
            run_parent = parent_key
        if run and space is not None:
            ops.append(Stored(space.ns_id, run_parent, run.tobytes()))

    def _count_copy(self, block: _Block, parent_key: int) -> bool:
        """Enters a block that is new to us under its key; whether the key is new too.

        It is not when two hashes share a key: then the key goes when the last copy of both has."""
        space = block.space
        if space is None:
            self.foreign += 1
            return False
        if not space.entries:
            self._spaces[space.ns_id] = space
        entry = space.entries.get(block.key)
        if entry is not None:
            entry.copies += 1
            return False
        space.entries[block.key] = _Entry(parent_key, self._at)
        self.held_keys += 1
        return True

    def _remove(self, event: BlockRemoved, ops: _Ops) -> None:
        if not self._is_ours_to_count(event.medium, event.group_idx, len(event.block_hashes)):
            return
        for hash_ in event.block_hashes:
            block = self._blocks.get(hash_)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[hash_]
            space = block.space
            if space is None:
                self.foreign -= not block.copies
                continue
            entry = space.entries[block.key]
            entry.copies -= 1
            if not entry.copies:
                self.evictions.add(self._at - entry.stored_at)
                self._forget_key(space, block.key)
                ops.remove(space.ns_id, block.key)

    def _forget_key(self, space: _Space, key: int) -> None:
        del space.entries[key]
        self.held_keys -= 1
        if not space.entries:
            del self._spaces[space.ns_id]
        gone = self._gone
        name = (space.ns_id, key)
        gone.pop(name, None)
        gone[name] = self.generation
        if len(gone) > _GONE_MAX:
            oldest = next(iter(gone))
            self._gone_known_from = gone.pop(oldest) + 1

    def _is_ours_to_count(self, medium: str | None, group: int | None, count: int) -> bool:
        if medium is not None and medium != GPU:
            self.unused.other_tier += count
            return False
        return not group

    def _tokens_of(self, event: BlockStored) -> bytes | None:
        """The run's tokens, u32 LE; None if they are not what the event says."""
        if event.block_size != self.block_size or len(event.token_ids) != len(event.block_hashes) * self.block_size:
            return None
        try:
            return array("I", event.token_ids).tobytes()
        except OverflowError:
            return None

    def _space_of(self, event: BlockStored) -> _Space | None:
        """The namespace of a prompt's first block; None if no salt of ours made it, or none for its adapter."""
        first = event.extra_keys[0] if event.extra_keys else None
        is_nameless = event.lora_name is None and event.lora_id is not None
        if is_nameless or not isinstance(first, list | tuple):
            return None
        found = {ns_id for text in _salts(first) if (ns_id := self._owner(text, event.lora_name)) is not None}
        if len(found) != 1:
            return None
        (ns_id,) = found
        return self._spaces.get(ns_id) or _Space(ns_id)

    # --- dumps ---

    def snapshot(
        self, slice_keys: int = SLICE_KEYS, belongs: Callable[[bytes], bool] = lambda ns_id: True
    ) -> "Snapshot":
        """All that is held now of the namespaces that belong to it; about 30 ns a key."""
        spaces = [(space.ns_id, dict(space.entries)) for space in self._spaces.values() if belongs(space.ns_id)]
        return Snapshot(spaces, slice_keys)


class Snapshot:
    """What was held at one moment, to be told in slices: a `None` in what `runs` and `dump` give is the place for a
    pause, after at most `slice_keys` keys."""

    def __init__(self, spaces: list[tuple[bytes, dict[int, _Entry]]], slice_keys: int) -> None:
        self._spaces = spaces
        self._slice_keys = slice_keys
        self.keys = sum(len(entries) for _, entries in spaces)

    def __repr__(self) -> str:
        return f"<Snapshot {self.keys} keys>"

    def runs(self) -> Iterator[Stored | None]:
        """All of it, as runs, parents before children."""
        looked_at, slice_keys = 0, self._slice_keys
        for ns_id, entries in self._spaces:
            children: dict[int, list[int]] = {}
            starts: list[int] = []
            for key, entry in entries.items():
                if entry.parent in entries:
                    children.setdefault(entry.parent, []).append(key)
                else:
                    starts.append(key)
                looked_at += 1
                if not looked_at % slice_keys:
                    yield None
            starts.reverse()
            while starts:
                key = starts.pop()
                run = array("Q", (key,))
                while following := children.get(key):
                    key = following[0]
                    run.append(key)
                    starts.extend(following[1:])
                    looked_at += 1
                    if not looked_at % slice_keys:
                        yield None
                yield Stored(ns_id, entries[run[0]].parent, run.tobytes())
                looked_at += 1
                if not looked_at % slice_keys:
                    yield None

    def parts(self, keys_a_part: int) -> int:
        """How many `dump` will give."""
        return max(1, -(-self.keys // keys_a_part))

    def dump(self, keys_a_part: int) -> Iterator[list[Stored] | None]:
        """`runs` in parts of exactly so many keys each, but for the last one; at least one part."""
        part: list[Stored] = []
        room = keys_a_part
        for run in self.runs():
            if run is None:
                yield None
                continue
            for piece in split(run, room, keys_a_part):
                if not room:
                    yield part
                    part, room = [], keys_a_part
                part.append(piece)
                room -= len(piece.keys) // 8
        yield part


def split(run: Stored, first: int, rest: int) -> Iterator[Stored]:
    """A run in pieces of at most `first` (if any), then `rest` keys; each piece names the key before it."""
    keys, parent = run.keys, run.parent
    width = 8 * (first or rest)
    while keys:
        piece, keys = keys[:width], keys[width:]
        yield Stored(run.ns_id, parent, piece)
        parent = int.from_bytes(piece[-8:], "little")
        width = 8 * rest


def _media(extra: object) -> bytes:
    """The names of the media in a block, among its extra keys: (name, where it begins in the block), or the same after
    "mm" (vLLM tags its keys so within, and its events may one day)."""
    if not isinstance(extra, list | tuple):
        return b""
    names = []
    for item in extra:
        if not isinstance(item, list | tuple):
            continue
        pair = item[1:] if len(item) == 3 and item[0] == "mm" else item
        if len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int:
            names.append(_name(pair[0]))
    return b"".join(names)


def _name(text: str) -> bytes:
    """Ours are 32 hex digits; what an engine called it itself is some other name, and never one of ours."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    return name if len(name) == 16 and name.hex() == text else hashlib.blake2b(text.encode(), digest_size=17).digest()


def _salts(extra: Sequence[object]) -> Iterator[str]:
    """What may be a salt among a block's extra keys: bare texts, and ("cache_salt", text)."""
    for item in extra:
        if isinstance(item, str):
            yield item
        elif isinstance(item, list | tuple) and len(item) == 2 and item[0] == "cache_salt" and isinstance(item[1], str):
            yield item[1]


def _u64s(keys: bytes) -> memoryview:
    return memoryview(keys).cast("Q")
