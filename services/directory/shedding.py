"""Which entries go first when the index may hold no more: those of namespaces that were of least use for their bytes.

Owns: how useful each namespace was lately, and the order in which they are shed.
Must not know: tenants, NATS, clocks, what an entry looks like, whether an entry is true (directory/trust.py).
Units: `now` in seconds on the caller's monotonic clock; use in blocks that look-ups found.   Source: DESIGN 5.

The use of a namespace is the blocks that look-ups found in it plus one for each look-up, halved every `half_life_s`.
Looking for the least useful walks a few hundred namespaces a slice, in turn, and remembers the worst it has seen: exact
while there are few, a sample like that of Redis' eviction while there are many, and never a pause."""

import functools
import math
from dataclasses import dataclass

from .index import Index

# Namespaces looked at in one slice (about 0.3 ms); how many of the worst are remembered from slice to slice, and how
# many of them are shed in one at most: what is left over is what those of the next slice are compared with.
_LOOKED_AT = 256
_REMEMBERED = 128
_SHED_AT_ONCE = 32
# Finding who holds a namespace takes as long as dropping so many keys (256 workers).
_NAMESPACE_COSTS = 32
# Uses that are remembered: also of namespaces that hold nothing yet, since the first look-up comes before the first
# block. About 250 bytes each.
_USES_MAX = 32768


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much the index may hold. Bytes are those of `Index.estimated_bytes`."""

    memory_bytes: int = 1 << 30
    namespaces_max: int = 65536
    # Of one tenant (quota.py).
    namespaces_per_tenant: int = 8192
    # Shedding goes on to this share of both bounds, so that it does not begin again with the next event.
    relieved_at: float = 0.95
    half_life_s: float = 600.0


class Shedding:
    """Keeps the index within its bounds: by `relieve`, as long as that says so, once in a while, and by one `relieve`
    after each message that left the index beyond them. Then it is never beyond by more than a message."""

    def __init__(self, index: Index, bounds: Bounds) -> None:
        self._index = index
        self._bounds = bounds
        # Use and the time it is of, least recently used first.
        self._uses: dict[bytes, tuple[float, float]] = {}
        self._worst: list[bytes] = []
        self._round: list[bytes] = []
        self.shed_pairs = 0
        """(slot, key) facts that were given up, ever."""

    def __repr__(self) -> str:
        return f"<Shedding uses={len(self._uses)} shed={self.shed_pairs}>"

    @property
    def is_beyond(self) -> bool:
        return self._is_over(1.0)

    def looked_up(self, ns_id: bytes, found_blocks: int, now: float) -> None:
        """A look-up found so many blocks of its chain, at most, with any one worker."""
        use = self.use(ns_id, now) + 1 + found_blocks
        self._uses.pop(ns_id, None)
        self._uses[ns_id] = use, now
        if len(self._uses) > _USES_MAX:
            del self._uses[next(iter(self._uses))]

    def use(self, ns_id: bytes, now: float) -> float:
        use, at = self._uses.get(ns_id, (0.0, now))
        return use * math.exp2((at - now) / self._bounds.half_life_s)

    def relieve(self, now: float, budget: int) -> bool:
        """Drop about `budget` keys, at most a log's segment more, if there are too many; true if there still are.

        Entries of closed slots go first."""
        index = self._index
        if not self._is_over(self._bounds.relieved_at):
            return False
        if index.is_sweeping:
            index.sweep(budget)
        elif index.namespaces:
            self._shed(now, budget)
        return index.namespaces > 0 and self._is_over(self._bounds.relieved_at)

    def reduce(self, ns_ids: list[bytes], most: int, now: float, budget: int) -> bool:
        """Drop about `budget` keys of the least useful of these, which the index holds, if they are more than `most`;
        true if they still are."""
        too_many = len(ns_ids) - most
        if too_many <= 0:
            return False
        worst = sorted(ns_ids, key=functools.partial(self._worth, now))[: min(too_many, _SHED_AT_ONCE)]
        for ns_id in worst:
            budget = self._shed_one(ns_id, budget)
            if budget <= 0:
                break
        return sum(1 for ns_id in ns_ids if ns_id in self._index.namespace_ids) > most

    def _shed(self, now: float, budget: int) -> None:
        for ns_id in self._least_useful(now)[:_SHED_AT_ONCE]:
            budget = self._shed_one(ns_id, budget)
            if budget <= 0 or not self._is_over(self._bounds.relieved_at):
                return

    def _shed_one(self, ns_id: bytes, budget: int) -> int:
        """What is left of the budget."""
        index = self._index
        before = index.pairs
        index.shed(ns_id, budget)
        self.shed_pairs += before - index.pairs
        return budget - (before - index.pairs + _NAMESPACE_COSTS)

    def _worth(self, now: float, ns_id: bytes) -> float:
        return self.use(ns_id, now) / self._index.bytes_of(ns_id)

    def _is_over(self, share: float) -> bool:
        index, bounds = self._index, self._bounds
        return index.estimated_bytes > share * bounds.memory_bytes or index.namespaces > share * bounds.namespaces_max

    def _least_useful(self, now: float) -> list[bytes]:
        """Of those looked at in this slice and the worst of earlier ones, worst first; the index holds at least one."""
        known = self._index.namespace_ids
        looked_at: list[bytes] = []
        while not looked_at:
            if not self._round:
                self._round = list(known)
            looked_at = [ns_id for ns_id in self._round[-_LOOKED_AT:] + self._worst if ns_id in known]
            del self._round[-_LOOKED_AT:]
        worth = {ns_id: self._worth(now, ns_id) for ns_id in looked_at}
        self._worst = sorted(worth, key=worth.__getitem__)[:_REMEMBERED]
        return self._worst
