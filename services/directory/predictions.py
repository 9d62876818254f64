"""Blocks that workers do not hold yet, but will: announced by dispatches, so that a burst of siblings lands together.

Owns: who announced what until when, and the masks that a lookup lays over the index.
Must not know: requests' contents, NATS, clocks, why something was dispatched.
Units: as index.py; times in seconds on the caller's monotonic clock.

An announcement says what a request's prefill will leave behind: the chain, or only the part that the worker lacks
(cheaper, and the same to a lookup). It ends by `drop` (the outcome is known), by expiry, or with its worker's slot."""

import heapq

from .index import NOTHING, Index, Levels, Slots


class _Prediction:
    __slots__ = ("expires_at", "keys", "ns_id", "slot")

    def __init__(self, slot: int, ns_id: bytes, keys: bytes, expires_at: float) -> None:
        self.slot = slot
        self.ns_id = ns_id
        self.keys = keys
        self.expires_at = expires_at


class _Counted:
    """Announced blocks of a namespace: a mask by key, and per slot how many requests announced each key."""

    __slots__ = ("counts", "masks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.counts: dict[int, dict[int, int]] = {}


class Predictions:
    """Announcements by request. Costs about 0.3 us per announced block, on the way in and on the way out."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        slots.join(self)
        self._namespaces: dict[bytes, _Counted] = {}
        self._requests: dict[str, _Prediction] = {}
        # Ids by slot, oldest first (the values say nothing: a dict keeps the order, a set does not).
        self._by_slot: dict[int, dict[str, None]] = {}
        # Closed slots that still have announcements here, and where those move to; oldest first.
        self._closing: dict[int, int | None] = {}
        # Of each request one entry that is not later than its expiry, and entries of requests that are gone.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __repr__(self) -> str:
        return f"<Predictions requests={len(self._requests)} blocks={self.blocks} closing={len(self._closing)}>"

    @property
    def blocks(self) -> int:
        """Distinct announced keys, by namespace."""
        return sum(len(counted.masks) for counted in self._namespaces.values())

    def announce(self, request_id: str, slot: int, ns_id: bytes, keys: bytes, expires_at: float) -> bool:
        """Expect these blocks (u64 LE each) on this slot. A second announcement of a request replaces the first.

        False, and nothing announced, if there is no block or the slot was closed meanwhile: its worker is gone."""
        self.drop(request_id)
        if not keys or not self._slots.is_open(slot):
            return False
        prediction = self._requests[request_id] = _Prediction(slot, ns_id, keys, expires_at)
        self._add(request_id, prediction)
        heapq.heappush(self._due, (expires_at, request_id))
        return True

    def renew(self, request_id: str, expires_at: float) -> bool:
        """Believe it until then; false if there is no such announcement (any more)."""
        prediction = self._requests.get(request_id)
        if prediction is None or self._home_of(prediction.slot) is None:
            return False
        # A later expiry is seen when the old one comes up.
        if expires_at < prediction.expires_at:
            heapq.heappush(self._due, (expires_at, request_id))
        prediction.expires_at = expires_at
        return True

    def drop(self, request_id: str) -> None:
        """The request ended, was shed or refused. Unknown ids are fine: outcomes outlive announcements."""
        prediction = self._requests.pop(request_id, None)
        if prediction is not None:
            self._subtract(request_id, prediction)
            self._let_go()

    def forget(self, slot: int, successor: int | None) -> None:
        """`Plane`: the slot was closed; `expire` moves what is announced there to its successor, or drops it."""
        if slot in self._by_slot or slot in self._closing.values():
            self._closing[slot] = successor
        else:
            self._slots.forgotten(slot)

    def expire(self, now: float, budget: int = 4096) -> bool:
        """Drop what has expired and follow closed slots, about `budget` blocks; true if there is more to do."""
        while self._closing and budget > 0:
            budget -= self._follow_one()
        while self._due and self._due[0][0] <= now and budget > 0:
            due_at, request_id = heapq.heappop(self._due)
            budget -= 1
            prediction = self._requests.get(request_id)
            if prediction is None:
                continue
            if prediction.expires_at > now:
                heapq.heappush(self._due, (prediction.expires_at, request_id))
            elif prediction.expires_at >= due_at:
                budget -= len(prediction.keys) // 8
                self.drop(request_id)
        return bool(self._closing or (self._due and self._due[0][0] <= now))

    def lookup(self, index: Index, ns_id: bytes, keys: bytes | memoryview) -> Levels:
        """The index's levels, with what is announced counted as held."""
        counted = self._namespaces.get(ns_id)
        return index.lookup(ns_id, keys, counted.masks if counted is not None else NOTHING)

    def _follow_one(self) -> int:
        """Move or drop the oldest announcement of the slot closed first; returns the blocks that took.

        A successor closes after its predecessor and so comes later here: until then it is not reused."""
        slot = next(iter(self._closing))
        if slot not in self._by_slot:
            del self._closing[slot]
            self._slots.forgotten(slot)
            return 1
        successor = self._home_of(slot)
        request_id = next(iter(self._by_slot[slot]))
        prediction = self._requests[request_id]
        blocks = len(prediction.keys) // 8
        if successor is None:
            self.drop(request_id)
            return blocks
        self._subtract(request_id, prediction)
        prediction.slot = successor
        self._add(request_id, prediction)
        return 2 * blocks

    def _home_of(self, slot: int) -> int | None:
        """The open slot where announcements for this one belong, if any."""
        home: int | None = slot
        while home in self._closing:
            home = self._closing[home]
        return home

    def _add(self, request_id: str, prediction: _Prediction) -> None:
        self._by_slot.setdefault(prediction.slot, {})[request_id] = None
        counted = self._namespaces.get(prediction.ns_id)
        if counted is None:
            counted = self._namespaces[prediction.ns_id] = _Counted()
        masks = counted.masks
        counts = counted.counts.setdefault(prediction.slot, {})
        bit = 1 << prediction.slot
        for key in memoryview(prediction.keys).cast("Q"):
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                masks[key] = masks.get(key, 0) | bit

    def _subtract(self, request_id: str, prediction: _Prediction) -> None:
        slot, ns_id = prediction.slot, prediction.ns_id
        counted = self._namespaces[ns_id]
        masks = counted.masks
        counts = counted.counts[slot]
        bit = 1 << slot
        for key in memoryview(prediction.keys).cast("Q"):
            count = counts[key]
            if count > 1:
                counts[key] = count - 1
                continue
            del counts[key]
            mask = masks[key] ^ bit
            if mask:
                masks[key] = mask
            else:
                del masks[key]
        if not counts:
            del counted.counts[slot]
            if not counted.counts:
                del self._namespaces[ns_id]
        of_slot = self._by_slot[slot]
        del of_slot[request_id]
        if not of_slot:
            del self._by_slot[slot]

    def _let_go(self) -> None:
        """With the last announcement goes the memory that was sized for the busiest moment."""
        if not self._requests:
            self._due = []
            self._requests = {}
            self._by_slot = {}
