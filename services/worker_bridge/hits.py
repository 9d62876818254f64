"""Whether what the engine reused was there to be reused: the live check for wrong hits.

The engine says how many tokens of a prompt it took from its cache. If that is more than our index held for the
request's namespace at any time since the request was accepted, then either the events that tell of those blocks have
not arrived yet (so it is looked at again), or blocks of another namespace were used, which must never happen.

Owns: what is still in doubt (bounded).   Must not know: the engine, NATS, clocks.   Units: seconds, monotonic; tokens.
Source: DESIGN 7 (wrong hit)."""

from collections import deque

import msgspec

from .blocks import BlockIndex

# Events leave the engine with the step that made them, the answer with the same: a second is long.
PATIENCE_S = 2.0
_MOST = 4096


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request: `generation` is the index's at acceptance, `keys` all full blocks' keys of the prompt."""

    request_id: str
    tenant: str
    scope: str
    ns_id: bytes
    keys: bytes
    cached_tokens: int
    generation: int


class _Doubt(msgspec.Struct, frozen=True):
    answered: Answered
    until: float


class HitCheck:
    """Give it every answer; `settle` now and then returns those that were wrong."""

    def __init__(self, index: BlockIndex) -> None:
        self.unverified = 0
        """Answers that could not be judged: the index's story has holes, or the cache was reset meanwhile."""
        self.silent = 0
        """Answers whose blocks were computed, and no event came: the engine does not tell us what it holds."""
        self._index = index
        self._doubts: deque[_Doubt] = deque()

    def __repr__(self) -> str:
        return f"<HitCheck {len(self._doubts)} in doubt>"

    def answered(self, answered: Answered, now: float) -> None:
        if self._explained(answered):
            return
        if len(self._doubts) >= _MOST:
            self.unverified += 1
            return
        self._doubts.append(_Doubt(answered, now + PATIENCE_S))

    def settle(self, now: float) -> list[Answered]:
        """The answers that events have not explained in time."""
        wrong: list[Answered] = []
        for _ in range(len(self._doubts)):
            doubt = self._doubts.popleft()
            answered = doubt.answered
            if self._explained(answered):
                continue
            if now < doubt.until:
                self._doubts.append(doubt)
            elif not self._covered(answered):
                if self._index.remembers(answered.generation):
                    wrong.append(answered)
                else:
                    self.unverified += 1
            else:
                self.silent += 1
        return wrong

    def _explained(self, answered: Answered) -> bool:
        return self._covered(answered) and self._heard_of(answered)

    def _covered(self, answered: Answered) -> bool:
        needed = -(-answered.cached_tokens // self._index.block_size)
        keys = answered.keys[: 8 * needed]
        return self._index.held_since(answered.ns_id, keys, answered.generation) >= needed

    def _heard_of(self, answered: Answered) -> bool:
        """Blocks that were computed are told of; the last one is not full, or was computed again."""
        computed = len(answered.keys) // 8 - 1 - answered.cached_tokens // self._index.block_size
        return computed <= 0 or self._index.generation > answered.generation
