"""The engine's KV memory: blocks, who holds them, and which of them can be found again by key.

A block is *held* (references > 0) or *free*; a free block keeps its key and can be hit until it is taken for something
else. Free blocks are taken oldest first, and a request gives its blocks back tail first, so a prefix outlives its
continuations. One key may name several blocks (two requests computed the same thing at once): each is a copy of its
own, a lookup finds the oldest, and each copy's removal is reported.

Owns: blocks, references, keys in the cache, the LRU order.   Must not know: requests, tokens, time.
Complexity: O(1) a block in every method.   Source: vLLM v1's block pool, whose order of eviction this keeps."""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence


class BlockPool:
    """`capacity` blocks. `removed` collects the key of every evicted copy until someone takes the list."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity}")
        self.capacity = capacity
        self.removed: list[int] = []
        self.version = 0
        """Changes whenever an allocation that failed might now succeed."""
        self._references = [0] * capacity
        self._keys: list[int | None] = [None] * capacity
        self._origins = [0] * capacity
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))
        self._cached: dict[int, int | dict[int, None]] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_count}/{self.capacity} held, {len(self._cached)} keys cached>"

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Blocks held by requests (cached blocks nobody holds are not among them)."""
        return self.capacity - len(self._free)

    @property
    def cached_keys(self) -> int:
        return len(self._cached)

    @property
    def cached_count(self) -> int:
        """Blocks that can be found, copies of one key counted apart. O(capacity)."""
        return self.capacity - self._keys.count(None)

    def keys(self) -> KeysView[int]:
        """What can be found."""
        return self._cached.keys()

    def copies(self, key: int) -> int:
        """How many blocks can be found under `key`."""
        entry = self._cached.get(key)
        if entry is None:
            return 0
        return 1 if isinstance(entry, int) else len(entry)

    def references(self, block: int) -> int:
        return self._references[block]

    def origin(self, block: int) -> int:
        """What the block was computed from, as its first holder said."""
        return self._origins[block]

    def lookup(self, keys: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest prefix of `keys[:limit]`; changes nothing."""
        found: list[int] = []
        get = self._cached.get
        for index in range(limit):
            entry = get(keys[index])
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return found

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: holding them takes that much of `free_count`."""
        references = self._references
        return sum(1 for block in blocks if not references[block])

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each, which takes it off the free list."""
        references = self._references
        free = self._free
        for block in blocks:
            if not references[block]:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` (<= free_count) free blocks, oldest first; what they held is forgotten and reported removed."""
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            if self._keys[block] is not None:
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: int, origin: int) -> None:
        """From now on the (full, held) block can be found under `key`."""
        self.version += 1
        self._keys[block] = key
        self._origins[block] = origin
        entry = self._cached.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._cached[key] = {entry: None, block: None}

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's blocks (in sequence order); the tail becomes evictable first."""
        self.version += 1
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if not references[block]:
                self._free[block] = None

    def clear(self) -> None:
        """Forget every key. Reports no removals: the caller announces one clearing.

        :raises ValueError: blocks are still held."""
        if self.used_count:
            raise ValueError(f"{self.used_count} blocks are still held")
        self.version += 1
        self._cached.clear()
        self._keys = [None] * self.capacity

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        entry = self._cached[key]
        if isinstance(entry, int):
            del self._cached[key]
        else:
            del entry[block]
            if len(entry) == 1:
                self._cached[key] = next(iter(entry))
        self.removed.append(key)
