"""Which workers hold which block keys, per namespace.

Owns: slots (small numbers for workers), holder masks, the per-slot log of keys, the byte estimate.
Must not know: tenants, NATS, clocks, worker names, how keys are made, which namespace is worth its memory.
Units: key u64; a run or chain of keys is bytes, u64 LE each; mask an int whose bit `s` means slot `s`; depth in blocks.
Source: facts/index.md (dict u64 -> interned int mask, 256 shards, galloping over the chain). What it does not say: a
namespace starts with one shard, because most are small; a key that comes back after a removal is not logged twice.

Masks and keys are plain ints on purpose: a dict of ints is invisible to the garbage collector, and one tracked value in
it would make every full collection walk all entries (132 ms at 5M).

A slot stands for one holder: a worker's GPU tier or its host tier, so a chain is looked up once for both and removing
one copy keeps the other."""

import heapq
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

Levels = list[tuple[int, int]]
"""`[(depth_blocks, mask)]`, deepest first: these slots hold the first `depth_blocks` of the chain and no more, so each
slot is in at most one level."""

NOTHING: Mapping[int, int] = MappingProxyType({})

_LANES = 256
# One dict this large resizes in 0.1 ms; unsharded ones reach 301 ms (facts/index.md).
_SPLIT_AT = 4096
_JOIN_AT = 512
# Keys a log segment holds: the unit of sweeping and of compaction, about 1 ms of work.
_SEGMENT = 2048
# Forgotten keys may stay in a slot's log up to a quarter of what it holds, and this many in any case.
_STALE_MIN = 512
# ... but never more than this: the dict of them must not pause when it grows.
_STALE_MAX = 32768
# The table of shared masks starts afresh when it reaches this: sharing is an economy, nothing depends on it.
_MASKS_MAX = 65536
# A dict never shrinks by deletion alone. It is made anew when its table takes this much for each entry that is left;
# one that just grew takes 40 to 60 bytes, and one that stores keep busy is made anew by its own growth.
_SPARSE_BYTES = 84
_SMALL_BYTES = 256
# Entries after which no more dicts are made anew in one go.
_COPIED_MAX = 8192
# Namespaces that were shed, of which a run is not taken without its parent; the oldest is forgotten first.
_SHED_MAX = 16384

# Measured with tracemalloc; a test keeps them honest (few namespaces and many, one holder and several).
_ENTRY_BYTES = 78
_STALE_BYTES = 84
_MASK_BYTES = 136
_NAMESPACE_BYTES = 600
_SPLIT_BYTES = 18_500
_LOG_BYTES = 530
_SHED_BYTES = 120


class Plane(Protocol):
    """Something that keeps bits of slots, and so decides with others when a slot may be reused."""

    def forget(self, slot: int, successor: int | None) -> None:
        """The slot was closed; call `Slots.forgotten(slot)`, now or after some slices, once none of its bits is left.

        What belongs to the worker rather than to the closed slot moves to `successor`."""


class Slots:
    """Numbers for holders of blocks. A closed slot answers nothing from that instant, and is reused only when every
    plane has forgotten it; the lowest free one goes first, which keeps the masks short."""

    def __init__(self) -> None:
        self.visible = 0
        """Mask of the slots that lookups may answer."""
        self._planes: list[Plane] = []
        self._free: list[int] = []
        self._count = 0
        self._open: set[int] = set()
        self._closing: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Slots open={len(self._open)} closing={len(self._closing)} free={len(self._free)}>"

    def join(self, plane: Plane) -> None:
        self._planes.append(plane)

    def open(self, *, visible: bool = True) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._count
            self._count += 1
        self._open.add(slot)
        if visible:
            self.visible |= 1 << slot
        return slot

    def reveal(self, slot: int) -> None:
        """Let lookups see a slot that was opened invisible, with all it holds, at once."""
        if slot not in self._open:
            raise ValueError(f"slot {slot} is not open")
        self.visible |= 1 << slot

    def close(self, slot: int, successor: int | None = None) -> None:
        if slot not in self._open:
            raise ValueError(f"slot {slot} is not open")
        self._open.remove(slot)
        self.visible &= ~(1 << slot)
        self._closing[slot] = len(self._planes)
        if not self._planes:
            self._release(slot)
        for plane in self._planes:
            plane.forget(slot, successor)

    def forgotten(self, slot: int) -> None:
        """One plane has no bit of this slot any more."""
        self._closing[slot] -= 1
        if not self._closing[slot]:
            self._release(slot)

    def is_open(self, slot: int) -> bool:
        return slot in self._open

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def width(self) -> int:
        """How many slot numbers were ever given out: the length of the longest mask, in bits."""
        return self._count

    def _release(self, slot: int) -> None:
        del self._closing[slot]
        heapq.heappush(self._free, slot)


class _Namespace:
    """Holder masks by key: one dict, or `_LANES` of them by low key bits (keys are hashes, so they spread)."""

    __slots__ = ("cursor", "entries", "lanes", "shards")

    def __init__(self) -> None:
        self.lanes = 0
        self.shards: list[dict[int, int]] = [{}]
        self.entries = 0
        self.cursor = 0

    def split(self) -> None:
        (whole,) = self.shards
        self.lanes = _LANES - 1
        self.shards = [{} for _ in range(_LANES)]
        for key, mask in whole.items():
            self.shards[key & self.lanes][key] = mask

    def join(self) -> None:
        whole: dict[int, int] = {}
        for shard in self.shards:
            whole.update(shard)
        self.lanes = 0
        self.shards = [whole]

    def shrink(self, removed: int) -> None:
        """Look at the next few dicts in turn, and make anew those of which much is empty (1 ms for 40k entries)."""
        copied = 0
        for _ in range(1 + removed // 64):
            at = self.cursor = (self.cursor + 1) & self.lanes
            if _is_sparse(self.shards[at]):
                self.shards[at] = dict(self.shards[at])
                copied += len(self.shards[at])
                if copied >= _COPIED_MAX:
                    break


class _Log:
    """The keys that a slot holds in a namespace, each once, and the `stale` ones that it held and lost since.

    A list of arrays, so that nothing is ever longer to walk than a segment (or a run that was stored at once). `live`
    counts the keys held; `touched_at` is the caller's time of the last change."""

    __slots__ = ("cursor", "live", "segments", "stale", "touched_at")

    def __init__(self) -> None:
        self.segments: list[array[int]] = [array("Q")]
        self.stale: dict[int, None] = {}
        self.live = 0
        self.cursor = 0
        self.touched_at = 0.0

    def extend(self, fresh: list[int]) -> None:
        if len(self.segments[-1]) >= _SEGMENT:
            self.segments.append(array("Q"))
        self.segments[-1].fromlist(fresh)

    def compact(self) -> None:
        """Rid the next segment in turn of its stale keys, and join it with the one before where both fit in one."""
        at = self.cursor % len(self.segments)
        stale = self.stale
        kept = array("Q")
        for key in self.segments[at]:
            if key in stale:
                del stale[key]
            else:
                kept.append(key)
        self.segments[at] = kept
        if at and len(self.segments[at - 1]) + len(kept) <= _SEGMENT:
            self.segments[at - 1].extend(kept)
            del self.segments[at]
        else:
            at += 1
        self.cursor = at

    def __len__(self) -> int:
        return self.live + len(self.stale)


class Index:
    """Holder masks of all namespaces.

    A store or remove takes about 0.5 us per block and runs whole: callers keep runs to a few thousand blocks."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        slots.join(self)
        self._namespaces: dict[bytes, _Namespace] = {}
        self._nothing = _Namespace()
        self.now = 0.0
        """Set by the caller: changes from here on are of this time, on whatever clock it keeps."""
        self._logs: dict[int, dict[bytes, _Log]] = {}
        self._shed: dict[bytes, None] = {}
        self._doomed: deque[tuple[int, dict[bytes, _Log]]] = deque()
        self._masks: dict[int, int] = {}
        self._entries = 0
        self._logged = 0
        self._stale = 0
        self._log_count = 0
        self._split_count = 0

    def __repr__(self) -> str:
        return f"<Index namespaces={len(self._namespaces)} entries={self._entries} doomed={len(self._doomed)}>"

    @property
    def entries(self) -> int:
        """Keys present, each once per namespace, with those that only closed slots hold and no sweep has reached."""
        return self._entries

    @property
    def pairs(self) -> int:
        """(slot, key) facts, with those of closed slots that no sweep has reached."""
        return self._logged - self._stale

    @property
    def namespaces(self) -> int:
        return len(self._namespaces)

    @property
    def namespace_ids(self) -> Collection[bytes]:
        return self._namespaces.keys()

    @property
    def is_sweeping(self) -> bool:
        """Whether entries of closed slots are left: memory that is worth nothing to anybody."""
        return bool(self._doomed)

    @property
    def estimated_bytes(self) -> int:
        """Estimate of the memory held, within about a third."""
        return (
            self._entries * _ENTRY_BYTES
            + self._logged * 8
            + self._stale * _STALE_BYTES
            + len(self._masks) * _MASK_BYTES
            + len(self._namespaces) * _NAMESPACE_BYTES
            + self._split_count * _SPLIT_BYTES
            + self._log_count * _LOG_BYTES
            + len(self._shed) * _SHED_BYTES
        )

    def bytes_of(self, ns_id: bytes) -> int:
        """What a namespace takes, but for the logs beyond the first; never 0."""
        namespace = self._namespaces.get(ns_id, self._nothing)
        fixed = _NAMESPACE_BYTES + _LOG_BYTES + bool(namespace.lanes) * _SPLIT_BYTES
        return fixed + namespace.entries * (_ENTRY_BYTES + 8)

    def held_by(self, slot: int) -> int:
        """How many blocks an open slot holds."""
        return sum(log.live for log in self._logs.get(slot, {}).values())

    def touched_at(self, ns_id: bytes, slot: int) -> float | None:
        """When what the slot holds of the namespace last changed or was `touch`ed; None if it holds nothing of it."""
        log = self._logs.get(slot, {}).get(ns_id)
        return log.touched_at if log is not None else None

    def touch(self, ns_id: bytes, slot: int) -> None:
        """What the slot holds of the namespace was just found to be true."""
        log = self._logs.get(slot, {}).get(ns_id)
        if log is not None:
            log.touched_at = self.now

    def untouched_since(self, slot: int, at: float) -> list[bytes]:
        """Namespaces of which the slot holds blocks that nothing touched since then; 50 ns for each it holds."""
        return [ns_id for ns_id, log in self._logs.get(slot, {}).items() if log.touched_at < at]

    def runs_of(self, slot: int) -> Iterator[tuple[bytes, bytes]]:
        """What an open slot holds, as (namespace, keys), in the order in which it came; 0.3 ms from one to the next.

        The index may change in between, as long as the slot stays open: whatever is held all the time is told, and of
        what comes or goes meanwhile, some."""
        bit = 1 << slot
        for ns_id in list(self._logs.get(slot, ())):
            log = self._logs.get(slot, {}).get(ns_id)
            # These arrays only grow: compaction moves keys to others, and takes none out of them.
            for segment in list(log.segments) if log is not None else ():
                namespace = self._namespaces.get(ns_id, self._nothing)
                shards, lanes = namespace.shards, namespace.lanes
                held = array("Q", [key for key in segment if shards[key & lanes].get(key, 0) & bit])
                if held:
                    yield ns_id, held.tobytes()

    def store(self, ns_id: bytes, slot: int, keys: bytes | memoryview, parent: int = 0) -> None:
        """The slot holds these blocks; those it held already change nothing.

        After a shed, a run that continues a chain whose block `parent` is gone from here would never be found, and is
        not taken."""
        if parent and self._shed and ns_id in self._shed and not self.holds(ns_id, slot, parent):
            return
        run = array("Q")
        run.frombytes(keys)
        if not run:
            return
        namespace = self._namespaces.get(ns_id)
        if namespace is None:
            namespace = self._namespaces[ns_id] = _Namespace()
        logs = self._logs.get(slot)
        if logs is None:
            logs = self._logs[slot] = {}
        log = logs.get(ns_id)
        if log is None:
            log = logs[ns_id] = _Log()
            self._log_count += 1
        log.touched_at = self.now
        lanes, shards, stale = namespace.lanes, namespace.shards, log.stale
        bit = 1 << slot
        fresh: list[int] = []
        before, after = -1, -1
        added = entered = revived = 0
        for key in run:
            shard = shards[key & lanes]
            mask = shard.get(key, 0)
            # Along a chain the holders hardly change, and equal masks are one object: skip the arithmetic.
            if mask is not before:
                if mask & bit:
                    continue
                before, after = mask, self._shared(mask | bit)
            shard[key] = after
            added += 1
            if not mask:
                entered += 1
            if stale and key in stale:
                del stale[key]
                revived += 1
            else:
                fresh.append(key)
        if added:
            log.live += added
            self._stale -= revived
            self._logged += len(fresh)
            if fresh:
                log.extend(fresh)
            namespace.entries += entered
            self._entries += entered
            if not lanes and namespace.entries > _SPLIT_AT:
                namespace.split()
                self._split_count += 1

    def remove(self, ns_id: bytes, slot: int, keys: bytes | memoryview) -> None:
        """The slot holds these blocks no longer; those it did not hold change nothing."""
        logs = self._logs.get(slot)
        log = logs.get(ns_id) if logs is not None else None
        if logs is None or log is None:
            return
        run = array("Q")
        run.frombytes(keys)
        lost = self._strip(self._namespaces[ns_id], ns_id, 1 << slot, run, log.stale)
        log.touched_at = self.now
        log.live -= lost
        self._stale += lost
        if not log.live:
            del logs[ns_id]
            if not logs:
                del self._logs[slot]
            self._drop(log)
            return
        stale_max = min(log.live // 4 + _STALE_MIN, _STALE_MAX)
        # Even if each pass finds only its fair share of them, two segments a pass outrun the run that came in.
        for _ in range(2 + 2 * lost // _STALE_MIN):
            if len(log.stale) <= stale_max:
                break
            found = len(log.stale)
            log.compact()
            self._logged -= found - len(log.stale)
            self._stale -= found - len(log.stale)
        if _is_sparse(log.stale):
            log.stale = dict(log.stale)

    def shed(self, ns_id: bytes, budget: int) -> bool:
        """Drop about `budget` keys of a namespace, whoever holds them; true if there is more of it.

        What came last goes first, from whoever holds most, a segment at the least: ends of chains go before their
        beginnings, so the rest can still be found. A removal of what was dropped changes nothing later."""
        held = [(-log.live, slot) for slot, logs in self._logs.items() if (log := logs.get(ns_id)) is not None]
        heapq.heapify(held)
        if held:
            self._shed[ns_id] = None
            if len(self._shed) > _SHED_MAX:
                del self._shed[next(iter(self._shed))]
        while held and budget > 0:
            slot = held[0][1]
            logs = self._logs[slot]
            log = logs[ns_id]
            segment = log.segments.pop()
            budget -= len(segment) + 1
            forgotten = [key for key in segment if key in log.stale]
            for key in forgotten:
                del log.stale[key]
            log.live -= self._strip(self._namespaces[ns_id], ns_id, 1 << slot, segment, {})
            self._logged -= len(segment)
            self._stale -= len(forgotten)
            if not log.segments:
                log.segments.append(array("Q"))
            if log.live:
                heapq.heapreplace(held, (-log.live, slot))
                continue
            heapq.heappop(held)
            del logs[ns_id]
            if not logs:
                del self._logs[slot]
            self._drop(log)
        return bool(held)

    def forget(self, slot: int, successor: int | None) -> None:
        """`Plane`: the slot was closed. Its entries go in slices (`sweep`); until then its bits are only masked out."""
        logs = self._logs.pop(slot, None)
        if logs is None:
            self.slots.forgotten(slot)
        else:
            self._doomed.append((slot, logs))

    def sweep(self, budget: int) -> bool:
        """Erase about `budget` keys of closed slots; true if there is more to do. One segment is the least it does."""
        while self._doomed and budget > 0:
            slot, logs = self._doomed[0]
            if not logs:
                self._doomed.popleft()
                self.slots.forgotten(slot)
                continue
            ns_id = next(reversed(logs))
            log = logs[ns_id]
            segment = log.segments.pop()
            # A slot's last entry may have taken the namespace with it: the rest of the log is stale then.
            namespace = self._namespaces.get(ns_id)
            if namespace is not None:
                self._strip(namespace, ns_id, 1 << slot, segment, {})
            budget -= len(segment) + 1
            if not log.segments:
                del logs[ns_id]
                self._drop(log)
        return bool(self._doomed)

    def lookup(self, ns_id: bytes, keys: bytes | memoryview, overlay: Mapping[int, int] = NOTHING) -> Levels:
        """How deep each visible slot holds this chain. `overlay` adds masks by key.

        Holders only get fewer with depth, so only the depths where one drops out are searched: gallop to the end, then
        halve the stretches whose two ends differ. Costs log2(depth) probes for each drop, whatever the fleet's size.
        If a slot's chain has holes the answer may overstate it, and never understates it (`depth_of_slot` is exact).
        A namespace that does not exist takes the same steps as one that does not hold the first block."""
        chain = memoryview(keys).cast("Q")
        end = len(chain)
        namespace = self._namespaces.get(ns_id, self._nothing)
        shards, lanes = namespace.shards, namespace.lanes
        high, high_raw, high_mask = 1, 0, 0
        if end:
            key = chain[0]
            high_raw = shards[key & lanes].get(key, 0) | overlay.get(key, 0)
            high_mask = high_raw & self.slots.visible
        if not high_mask:
            return []

        # To the left of `high`, nearest on top: depth, the mask as stored, the mask of those unbroken so far.
        lefts: list[tuple[int, int, int]] = []
        while high < end and high_mask:
            lefts.append((high, high_raw, high_mask))
            high = min(2 * high, end)
            key = chain[high - 1]
            high_raw = shards[key & lanes].get(key, 0)
            if overlay:
                high_raw |= overlay.get(key, 0)
            high_mask &= high_raw
        levels: Levels = [(high, high_mask)] if high_mask else []
        while lefts:
            low, low_raw, low_mask = lefts.pop()
            while low_mask != high_mask:
                if high - low == 1:
                    levels.append((low, low_mask ^ high_mask))
                    high_mask = low_mask
                    break
                middle = (low + high) // 2
                key = chain[middle - 1]
                raw = shards[key & lanes].get(key, 0)
                if overlay:
                    raw |= overlay.get(key, 0)
                # Equal masks are mostly one object, and one that is stored at an end means the same in between.
                if raw is low_raw:
                    low = middle
                elif raw is high_raw:
                    high = middle
                else:
                    lefts.append((low, low_raw, low_mask))
                    low, low_raw, low_mask = middle, raw, raw & low_mask | high_mask
            high, high_raw = low, low_raw
        return levels

    def depth_of_slot(self, ns_id: bytes, slot: int, keys: bytes | memoryview) -> int:
        """How many blocks of the chain the slot holds before the first it does not; walks them all (0.1 us each)."""
        namespace = self._namespaces.get(ns_id, self._nothing)
        shards, lanes = namespace.shards, namespace.lanes
        bit = 1 << slot
        depth = 0
        for key in memoryview(keys).cast("Q"):
            if not shards[key & lanes].get(key, 0) & bit:
                break
            depth += 1
        return depth

    def holds(self, ns_id: bytes, slot: int, key: int) -> bool:
        namespace = self._namespaces.get(ns_id, self._nothing)
        return bool(namespace.shards[key & namespace.lanes].get(key, 0) >> slot & 1)

    def _strip(self, namespace: _Namespace, ns_id: bytes, bit: int, run: "array[int]", lost: dict[int, None]) -> int:
        """Take the bit from these keys, noting in `lost` which had it; the namespace's last key takes it along."""
        shards, lanes = namespace.shards, namespace.lanes
        before, after = -1, -1
        count = left = 0
        for key in run:
            shard = shards[key & lanes]
            mask = shard.get(key, 0)
            if mask is not before:
                if not mask & bit:
                    continue
                before, after = mask, self._shared(mask ^ bit)
            count += 1
            lost[key] = None
            if after:
                shard[key] = after
                continue
            del shard[key]
            left += 1
        if left:
            namespace.shrink(left)
        namespace.entries -= left
        self._entries -= left
        if lanes and namespace.entries < _JOIN_AT:
            namespace.join()
            self._split_count -= 1
        if not namespace.entries:
            del self._namespaces[ns_id]
            if not self._namespaces:
                self._masks.clear()
                self._shed.clear()
        return count

    def _drop(self, log: _Log) -> None:
        self._logged -= len(log)
        self._stale -= len(log.stale)
        self._log_count -= 1

    def _shared(self, mask: int) -> int:
        """The one object for this mask, so that entries share it."""
        if len(self._masks) >= _MASKS_MAX:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)


def _is_sparse(entries: dict[int, int] | dict[int, None]) -> bool:
    return sys.getsizeof(entries) > _SMALL_BYTES + _SPARSE_BYTES * len(entries)


def depth_in(levels: Levels, slot: int) -> int:
    """The slot's depth by these levels, 0 if it is in none."""
    return next((depth for depth, mask in levels if mask >> slot & 1), 0)
