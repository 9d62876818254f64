"""How long blocks live in the cache, for `--kv-cache-metrics`: a pool that tells when a block with a key is evicted.

    lifetime      from being taken to being evicted
    idle          from the last use to being evicted
    reuse gaps    between the last four uses

Owns: times of use.   Must not know: metrics, requests.   Units: seconds.
Source: facts on vLLM 0.32, which watches a hundredth of the blocks; here it is all of them."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .pool import BlockPool

USES_KEPT = 4

Evicted = Callable[[float, float, Sequence[float]], None]
"""(lifetime, idle, reuse gaps)."""


class WatchedPool(BlockPool):
    """`evicted` is called for every block that is evicted; `now` tells seconds."""

    def __init__(self, capacity: int, now: Callable[[], float], evicted: Evicted) -> None:
        super().__init__(capacity)
        self._now = now
        self._evicted = evicted
        self._taken_at = [0.0] * capacity
        self._uses: list[deque[float]] = [deque(maxlen=USES_KEPT) for _ in range(capacity)]

    def hold(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().hold(blocks)
        now = self._now()
        for block in blocks:
            self._uses[block].append(now)

    def allocate(self, count: int) -> list[int]:
        taken = super().allocate(count)
        now = self._now()
        for block in taken:
            self._taken_at[block] = now
            self._uses[block].clear()
            self._uses[block].append(now)
        return taken

    def _forget(self, block: int) -> None:
        super()._forget(block)
        now, uses = self._now(), list(self._uses[block])
        gaps = [later - earlier for earlier, later in itertools.pairwise(uses)]
        self._evicted(now - self._taken_at[block], now - uses[-1], gaps)
