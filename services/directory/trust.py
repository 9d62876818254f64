"""How much of what the directory says of a worker in a namespace should be expected to come true.

    trust = outcomes x (0.5 while the worker's story has holes) x age, at least `floor`

*Outcomes*: an answer that reused less than predicted takes trust off at once, in proportion to what was missing; one
that reused all of it gives a tenth of what is missing back; and so does time, by half-lives, since a worker that is
believed less gets fewer requests that could prove it right. Predictions are scaled by trust before they are compared,
so trust settles where predictions just come true. Answers that fall far short several times running ask for a dump.
*Age*: entries that neither an event nor a good answer touched for long lose trust slowly, and never all of it: an idle
engine does keep its cache.

Owns: doubts per namespace and worker.   Must not know: clocks, NATS, which worker is alive, what a router does with it.
Units: tokens; times in seconds, `now` on the caller's monotonic clock; trust 0 to 1.   Source: DESIGN 5 (Trust)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# A doubt that has shrunk to this is none.
_NEGLIGIBLE = 0.01


@dataclass(frozen=True, slots=True)
class TrustRules:
    """How doubts come and go."""

    floor: float = 0.1
    # Less than this missing is no shortfall: a block or two went, or the engine rounds otherwise.
    tolerance_tokens: int = 64
    fall: float = 0.75
    rise: float = 0.1
    forget_half_life_s: float = 120.0
    # A miss: at least half of the prediction is missing, and so much that it mattered.
    miss_share: float = 0.5
    miss_tokens: int = 256
    misses_to_ask: int = 3
    incomplete: float = 0.5
    # Entries untouched for this long begin to age.
    fresh_s: float = 3600.0
    age_half_life_s: float = 3600.0
    age_floor: float = 0.5
    # Doubts (about 400 bytes each) and old entries (100 bytes) that are remembered; over it, the namespace that had
    # none for longest is forgotten.
    doubts_max: int = 32768
    old_max: int = 65536


class Doubt(NamedTuple):
    """What outcomes say of one life of a worker in a namespace."""

    worker: str
    incarnation: int
    trust: float


class _Doubt:
    """`trust` as of `at`; `misses` in a row."""

    __slots__ = ("at", "incarnation", "misses", "trust")

    def __init__(self, incarnation: int, at: float) -> None:
        self.incarnation = incarnation
        self.trust = 1.0
        self.at = at
        self.misses = 0


class Trust:
    """Doubts by namespace and worker; who is not named is trusted."""

    def __init__(self, rules: TrustRules | None = None) -> None:
        self.rules = rules or TrustRules()
        self._doubts: dict[bytes, dict[str, _Doubt]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Trust {self._count} doubts in {len(self._doubts)} namespaces>"

    def outcome(
        self, worker: str, incarnation: int, ns_id: bytes, predicted_tokens: int, cached_tokens: int, now: float
    ) -> bool:
        """An answer reused so much, where so much was predicted. True if it is time to ask the worker for a dump."""
        if predicted_tokens <= 0:
            return False
        rules = self.rules
        missing = predicted_tokens - cached_tokens
        doubts = self._doubts.get(ns_id)
        doubt = doubts.get(worker) if doubts is not None else None
        if doubt is not None and doubt.incarnation > incarnation:
            return False
        if missing < rules.tolerance_tokens:
            if doubt is not None and doubt.incarnation == incarnation:
                trust = self._now_worth(doubt, now)
                doubt.trust, doubt.at, doubt.misses = trust + rules.rise * (1 - trust), now, 0
            return False
        if doubt is None or doubt.incarnation < incarnation:
            doubt = self._begin(worker, incarnation, ns_id, now)
        taken = rules.fall * min(1.0, missing / predicted_tokens)
        doubt.trust, doubt.at = max(rules.floor, self._now_worth(doubt, now) * (1 - taken)), now
        if missing < max(rules.miss_tokens, rules.miss_share * predicted_tokens):
            doubt.misses = 0
            return False
        doubt.misses += 1
        if doubt.misses < rules.misses_to_ask:
            return False
        doubt.misses = 0
        return True

    def doubts(self, ns_id: bytes, now: float) -> list[Doubt]:
        """Whom outcomes made us trust less in this namespace; about 0.3 us each."""
        doubts = self._doubts.get(ns_id)
        if doubts is None:
            return []
        found = [Doubt(worker, doubt.incarnation, self._now_worth(doubt, now)) for worker, doubt in doubts.items()]
        for each in found:
            if each.trust > 1 - _NEGLIGIBLE:
                self.forget(ns_id, each.worker)
        return found

    def forget(self, ns_id: bytes, worker: str) -> None:
        """That life of the worker is over."""
        doubts = self._doubts.get(ns_id, {})
        if worker in doubts:
            del doubts[worker]
            self._count -= 1
            if not doubts:
                del self._doubts[ns_id]

    def _now_worth(self, doubt: _Doubt, now: float) -> float:
        return 1 - (1 - doubt.trust) * math.exp2((doubt.at - now) / self.rules.forget_half_life_s)

    def _begin(self, worker: str, incarnation: int, ns_id: bytes, now: float) -> _Doubt:
        doubts = self._doubts.pop(ns_id, None) or {}
        self._doubts[ns_id] = doubts
        self._count += worker not in doubts
        doubts.pop(worker, None)
        doubts[worker] = doubt = _Doubt(incarnation, now)
        while self._count > self.rules.doubts_max:
            oldest = next(iter(self._doubts))
            self.forget(oldest, next(iter(self._doubts[oldest])))
        return doubt


class Ages:
    """Slots whose entries in a namespace were old when last looked at, and what that takes off.

    Whoever walks the index now and then `mark`s them; a look-up asks for the marked ones of its namespace alone, and
    finds out how old they are by then."""

    def __init__(self, rules: TrustRules) -> None:
        self._rules = rules
        self._old: dict[bytes, dict[int, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def mark(self, ns_id: bytes, slot: int) -> None:
        slots = self._old.setdefault(ns_id, {})
        self._count += slot not in slots
        slots[slot] = None
        while self._count > self._rules.old_max and len(self._old) > 1:
            self._count -= len(self._old.pop(next(iter(self._old))))

    def clear(self, ns_id: bytes, slot: int) -> None:
        """It was touched, or is gone."""
        slots = self._old.get(ns_id, {})
        if slot in slots:
            del slots[slot]
            self._count -= 1
            if not slots:
                del self._old[ns_id]

    def marked(self, ns_id: bytes) -> Iterator[int]:
        return iter(list(self._old.get(ns_id, ())))

    def trust(self, untouched_s: float) -> float:
        """1 while entries are fresh; then it halves by half-lives, down to what an idle worker keeps."""
        rules = self._rules
        old_s = max(0.0, untouched_s - rules.fresh_s)
        return rules.age_floor + (1 - rules.age_floor) * math.exp2(-old_s / rules.age_half_life_s)
