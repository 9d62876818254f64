"""Which requests can have found nothing to reuse: their namespace had no block here when they came, and nobody else
made any while they ran.

What the index holds is what has been told: a namespace whose last request has just left may have blocks that are not
told of yet, so it counts as held for `LAG_S` more.

Owns: who is in work, by namespace.   Must not know: the engine, the bus, clocks.   Units: seconds, monotonic."""

import math

from .blocks import BlockIndex

# Events leave the engine with the step that made them, the answer with the same: a second is long (as in hits).
LAG_S = 2.0


class ColdRequests:
    """`begins` and `ends` tell of every request; the answer of `is_cold` may turn false, never true."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._in_work: dict[bytes, dict[str, bool]] = {}
        self._left_at: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"<ColdRequests in {len(self._in_work)} namespaces, {len(self._left_at)} just left>"

    def begins(self, ns_id: bytes, name: str, now: float) -> None:
        others = self._in_work.setdefault(ns_id, {})
        cold = not (others or self._may_be_held(ns_id, now))
        for other in others:
            others[other] = False
        others[name] = cold

    def is_cold(self, ns_id: bytes, name: str) -> bool:
        return self._in_work[ns_id][name]

    def ends(self, ns_id: bytes, name: str, now: float) -> None:
        in_work = self._in_work[ns_id]
        del in_work[name]
        if not in_work:
            del self._in_work[ns_id]
        self._left_at.pop(ns_id, None)
        self._left_at[ns_id] = now
        while self._left_at[oldest := next(iter(self._left_at))] < now - LAG_S:
            del self._left_at[oldest]

    def _may_be_held(self, ns_id: bytes, now: float) -> bool:
        index = self._index
        lately = now - self._left_at.get(ns_id, -math.inf) <= LAG_S
        return lately or not index.complete or index.holds_namespace(ns_id)
