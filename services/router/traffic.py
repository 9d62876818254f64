"""Which prefixes most traffic of a namespace shares, so that placement can look past them.

A system prompt that every session starts with says nothing about where a session belongs: the block that tells sessions
apart is the first one past it (DESIGN 6, *distinguishing block*). A prefix counts as shared once `QUORUM` of the last
`WINDOW` requests start with it: one in eight, because what an eighth of the traffic needs is no business of one worker.

Owns: the first keys of the last few requests, per namespace.   Must not know: workers, who holds what, clocks.
Units: keys u64 LE (8 bytes each), depths in blocks.   Cost: about 20 us a question, 64 KiB a namespace at most."""

from collections import OrderedDict, deque

WINDOW = 32
QUORUM = 4
# A prefix longer than this is worth its affinity even if all share it: 256 blocks of 32 are 140 ms of prefill.
MAX_BLOCKS = 256
MAX_NAMESPACES = 256


class Traffic:
    """Bounded memory of recent requests. All routers hear all dispatches, so all see about the same."""

    def __init__(self) -> None:
        self._recent: OrderedDict[bytes, deque[bytes]] = OrderedDict()

    def note(self, ns_id: bytes, keys: bytes) -> None:
        """A request with this chain was dispatched."""
        recent = self._recent.get(ns_id)
        if recent is None:
            recent = self._recent[ns_id] = deque(maxlen=WINDOW)
            if len(self._recent) > MAX_NAMESPACES:
                self._recent.popitem(last=False)
        else:
            self._recent.move_to_end(ns_id)
        recent.append(keys[: 8 * MAX_BLOCKS])

    def shared_blocks(self, ns_id: bytes, keys: bytes) -> int:
        """How many leading blocks of this chain at least QUORUM of the recent requests have, too."""
        first = keys[:8]
        alike = [chain for chain in self._recent.get(ns_id, ()) if chain[:8] == first]
        if not first or len(alike) < QUORUM:
            return 0
        # Chained keys: who has the key at a depth has all before it, so the count only falls with depth.
        low, high = 1, min(len(keys) // 8, MAX_BLOCKS)
        while low < high:
            middle = (low + high + 1) // 2
            start, end = 8 * middle - 8, 8 * middle
            key = keys[start:end]
            if sum(1 for chain in alike if chain[start:end] == key) >= QUORUM:
                low = middle
            else:
                high = middle - 1
        return low

    def __repr__(self) -> str:
        return f"<Traffic namespaces={len(self._recent)}>"
