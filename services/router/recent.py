"""Dispatches that a directory's answer cannot contain: those made while it was on its way.

Requests for one new document that come together ask the directory before any of them is dispatched, and are all told
that nobody holds it. The first to be decided goes to some worker; for the others its blocks count as held there.

Owns: the last dispatches, our own and announced ones, for `REMEMBER_S`.
Must not know: prices, who asks, NATS, clocks.
Units: keys u64 LE (8 bytes each), depths in blocks, `now` in seconds.   Cost: a few us for each dispatch that begins
with the same block, of which at most `MAX_ALIKE` are looked at."""

from collections import OrderedDict

import msgspec

from ..bus.blockkeys import common_blocks
from ..bus.messages import Holdings
from .holdings import moved

# Longer than a look-up may take, and than a directory takes to hear of a dispatch.
REMEMBER_S = 0.25
# A directory may not have heard of a dispatch made so shortly before it was asked: on a machine whose cores are all in
# use, it is tens of ms behind, and siblings told that nobody holds anything would each be computed.
ON_THE_WAY_S = 0.1
REMEMBER_MAX = 4096
MAX_ALIKE = 64


class _Sent:
    __slots__ = ("at", "attempt", "beginning", "keys", "worker")

    def __init__(self, beginning: bytes, keys: bytes, worker: str, attempt: int, at: float) -> None:
        self.beginning = beginning
        self.keys = keys
        self.worker = worker
        self.attempt = attempt
        self.at = at


class Recent:
    """The last dispatches by request, and by the block that they begin with."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        # Of each beginning the requests in order; the values say nothing (a dict keeps the order, a set does not).
        self._alike: dict[bytes, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __repr__(self) -> str:
        return f"<Recent {len(self._sent)}>"

    def note(self, request_id: str, attempt: int, ns_id: bytes, keys: bytes, worker: str, now: float) -> None:
        """This attempt was dispatched. An older one than is known changes nothing."""
        known = self._sent.get(request_id)
        if known is not None:
            if known.attempt > attempt:
                return
            self._forget(request_id)
        while self._sent:
            oldest = next(iter(self._sent))
            if now - self._sent[oldest].at < REMEMBER_S and len(self._sent) < REMEMBER_MAX:
                break
            self._forget(oldest)
        if keys:
            beginning = ns_id + keys[:8]
            self._sent[request_id] = _Sent(beginning, keys, worker, attempt, now)
            self._alike.setdefault(beginning, {})[request_id] = None

    def take_back(self, request_id: str, attempt: int) -> None:
        """It was refused, or came to nothing."""
        known = self._sent.get(request_id)
        if known is not None and known.attempt <= attempt:
            self._forget(request_id)

    def complete(self, holdings: Holdings, ns_id: bytes, keys: bytes, asked_at: float, now: float) -> Holdings:
        """The answer to a look-up of `asked_at`, with what was dispatched since counted as held, and as announced."""
        alike = self._alike.get(ns_id + keys[:8])
        if not alike:
            return holdings
        held = {worker: level.depth for level in holdings.levels if level.tier == "gpu" for worker in level.workers}
        gained: dict[str, int] = {}
        since = max(asked_at - ON_THE_WAY_S, now - REMEMBER_S)
        for looked_at, request_id in enumerate(reversed(alike)):
            sent = self._sent[request_id]
            if sent.at < since or looked_at >= MAX_ALIKE:
                break
            depth = gained.get(sent.worker) or held.get(sent.worker, 0)
            # Who has the next key has all before it, too: most add nothing to what is held.
            following = keys[8 * depth : 8 * depth + 8]
            if following and following == sent.keys[8 * depth : 8 * depth + 8]:
                gained[sent.worker] = common_blocks(keys, sent.keys)
        return _merged(holdings, held, gained) if gained else holdings

    def _forget(self, request_id: str) -> None:
        sent = self._sent.pop(request_id)
        alike = self._alike[sent.beginning]
        del alike[request_id]
        if not alike:
            del self._alike[sent.beginning]


def _merged(holdings: Holdings, held: dict[str, int], gained: dict[str, int]) -> Holdings:
    """Each worker of `gained` at that depth, which is deeper than what it holds; what it gains is not there yet."""
    announced = dict(holdings.announced)
    for worker, depth in gained.items():
        announced[worker] = announced.get(worker, 0) + depth - held.get(worker, 0)
    return msgspec.structs.replace(holdings, levels=moved(holdings.levels, gained), announced=announced)
