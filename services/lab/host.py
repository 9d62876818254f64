"""A worker's host store: the KV blocks it has in main memory, behind those in its GPU.

Blocks are written through as they are computed, as vLLM's and LMCache's offloading do, so what the GPU evicts is still
here. It is not filled by evictions alone: the first block of a system prompt is never evicted, and chains without their
beginning could not be found. Least recently used goes first, of a chain its tail.

Owns: which blocks, in which order they go.   Must not know: the GPU's pool, how long a load takes.
Units: blocks; keys u64.   Complexity: O(1) a block."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class HostStore:
    """`capacity` blocks. `removed` collects what went until someone takes it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.removed: list[tuple[bytes, int]] = []
        """(namespace, key) of each."""
        self._ns_ids: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ns_ids)

    def __repr__(self) -> str:
        return f"<HostStore {len(self)}/{self.capacity}>"

    def store(self, ns_id: bytes, keys: Sequence[int]) -> bool:
        """These blocks of a chain are in the GPU, and used now; whether one of them was not here."""
        ns_ids, before = self._ns_ids, len(self._ns_ids)
        for key in reversed(keys):
            ns_ids[key] = ns_id
            ns_ids.move_to_end(key)
        is_new = len(ns_ids) > before
        while len(ns_ids) > self.capacity:
            key, of = ns_ids.popitem(last=False)
            self.removed.append((of, key))
        return is_new

    def depth(self, keys: Sequence[int], first: int, limit: int) -> int:
        """How far `keys[:limit]` goes on here from block `first` on; `first` if it does not."""
        for index in range(first, limit):
            if keys[index] not in self._ns_ids:
                return index
        return max(first, limit)

    def clear(self) -> None:
        """Reports no removals: the caller announces one clearing."""
        self._ns_ids.clear()
        self.removed.clear()

    def items(self) -> Iterator[tuple[int, bytes]]:
        """(key, namespace) of all blocks."""
        return iter(self._ns_ids.items())
