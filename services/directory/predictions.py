"""Blocks that workers do not hold yet, but will: announced by dispatches, so that a burst of siblings lands together.

Owns: who announced what until when, and the masks that a lookup lays over the index.
Must not know: requests' contents, NATS, clocks, why something was dispatched.
Units: as index.py; times in seconds on the caller's monotonic clock.

An announcement says what a request's prefill will leave behind: the chain, or only the part that the worker lacks
(cheaper, and the same to a lookup). A request has one at most, of its latest attempt. It ends by `stored` (the last of
it is there: from now on only events say what is), by `ended` or `drop` (the outcome is known), by expiry, or with its
worker's slot. Router and worker tell of the same attempt by ways of their own: an end that overtook its announcement is
remembered for a while."""

import heapq

from .index import NOTHING, Index, Levels, Slots

# Ends that are remembered; at 1000 requests a second those of four seconds.
_ENDED_MAX = 4096


class _Prediction:
    __slots__ = ("attempt", "expires_at", "keys", "ns_id", "slot")

    def __init__(self, slot: int, ns_id: bytes, keys: bytes, expires_at: float, attempt: int) -> None:
        self.attempt = attempt
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
    """Announcements by request. Costs about 0.3 us per announced block, on the way in and on the way out, and about 200
    bytes; what would be more than `blocks_max` is not taken."""

    def __init__(self, slots: Slots, blocks_max: int = 1 << 18) -> None:
        self._slots = slots
        slots.join(self)
        self._blocks_max = blocks_max
        self._announced_blocks = 0
        # The last attempt of a request that is known to have ended, oldest first.
        self._ended: dict[str, int] = {}
        self._namespaces: dict[bytes, _Counted] = {}
        # Ids by the last block announced, by slot and namespace.
        self._awaited: dict[tuple[int, bytes], dict[int, dict[str, None]]] = {}
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

    def slots_of(self, ns_id: bytes) -> int:
        """Mask of the slots where blocks of this namespace are announced."""
        counted = self._namespaces.get(ns_id)
        return sum(1 << slot for slot in counted.counts) if counted is not None else 0

    def announce(
        self, request_id: str, slot: int, ns_id: bytes, keys: bytes, expires_at: float, attempt: int = 1
    ) -> bool:
        """Expect these blocks (u64 LE each) on this slot. A second announcement of a request replaces the first, unless
        that is of a later attempt.

        False, and nothing announced, if there is no block, the attempt has ended, the slot was closed meanwhile (its
        worker is gone) or too much is announced already."""
        standing = self._requests.get(request_id)
        if (standing is not None and standing.attempt > attempt) or self._ended.get(request_id, 0) >= attempt:
            return False
        self.drop(request_id)
        full = self._announced_blocks + len(keys) // 8 > self._blocks_max
        if not keys or full or not self._slots.is_open(slot):
            return False
        prediction = self._requests[request_id] = _Prediction(slot, ns_id, keys, expires_at, attempt)
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

    def ended(self, request_id: str, attempt: int, believed_until: float | None = None) -> None:
        """The attempt is over: what it announced is there and its events will say so by `believed_until`; or it failed,
        was shed, refused or taken back (None), and nothing will come of it."""
        standing = self._requests.get(request_id)
        if standing is not None and standing.attempt > attempt:
            return
        self._ended.pop(request_id, None)
        self._ended[request_id] = attempt
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        if believed_until is None or (standing is not None and standing.attempt < attempt):
            self.drop(request_id)
        elif standing is not None:
            self.renew(request_id, believed_until)

    def stored(self, slot: int, ns_id: bytes, keys: bytes) -> None:
        """These blocks (u64 LE each) have come into the worker's cache, and may be evicted again at any time."""
        awaited = self._awaited.get((slot, ns_id))
        if awaited is None:
            return
        for key in awaited.keys() & memoryview(keys).cast("Q").tolist():
            for request_id in list(awaited[key]):
                self.drop(request_id)

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
        self._announced_blocks += len(prediction.keys) // 8
        self._by_slot.setdefault(prediction.slot, {})[request_id] = None
        awaited = self._awaited.setdefault((prediction.slot, prediction.ns_id), {})
        awaited.setdefault(_last(prediction.keys), {})[request_id] = None
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
        self._announced_blocks -= len(prediction.keys) // 8
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
        awaited, last = self._awaited[slot, ns_id], _last(prediction.keys)
        del awaited[last][request_id]
        if not awaited[last]:
            del awaited[last]
            if not awaited:
                del self._awaited[slot, ns_id]

    def _let_go(self) -> None:
        """With the last announcement goes the memory that was sized for the busiest moment."""
        if not self._requests:
            self._due = []
            self._requests = {}
            self._by_slot = {}


def _last(keys: bytes) -> int:
    return int.from_bytes(keys[-8:], "little")
