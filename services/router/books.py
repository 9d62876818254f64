"""What a router enters when a dispatch is sent or taken back, by itself or by another router.

A dispatch is known in three places: as queued work (fleet.py), as blocks that will be there (recent.py), and, once a
request, as traffic (traffic.py). Here they are entered together, by the router that runs and by the one in the lab.

Owns: `traffic` and `recent`; it enters bookings into the fleet it is given.
Must not know: NATS, clocks, prices, how a dispatch ends.
Units: ms, `now` and what it is compared with in monotonic seconds; keys u64 LE (8 bytes each)."""

import math

from ..bus.messages import Dispatched
from .fleet import Fleet
from .recent import Recent
from .traffic import Traffic


class Books:
    def __init__(self, fleet: Fleet) -> None:
        self.traffic = Traffic()
        self.recent = Recent()
        self._fleet = fleet

    def __repr__(self) -> str:
        return f"<Books {self.traffic!r} {self.recent!r} {self._fleet!r}>"

    def sent(
        self,
        request_id: str,
        attempt: int,
        worker: str,
        incarnation: int,
        work_ms: float,
        ns_id: bytes,
        keys: bytes,
        now: float,
        until: float,
        *,
        unlisted_until: float = math.inf,
    ) -> None:
        """This attempt (from 1) was dispatched there; `until` and `unlisted_until` are as in `Fleet.book`."""
        if attempt == 1:
            self.traffic.note(ns_id, keys)
        self.recent.note(request_id, attempt, ns_id, keys, worker, now)
        self._fleet.book(request_id, attempt, worker, incarnation, work_ms, now, until, unlisted_until=unlisted_until)

    def taken_back(self, request_id: str, attempt: int, now: float) -> None:
        """It will not run there."""
        self._fleet.settle(request_id, attempt, now, never_ran=True)
        self.recent.take_back(request_id, attempt)

    def announced(self, said: Dispatched, now: float, until: float, unlisted_until: float) -> None:
        """Another router has sent a dispatch, or taken it back."""
        if not said.worker:
            self.taken_back(said.request_id, said.attempt, now)
            return
        self.sent(
            said.request_id,
            said.attempt,
            said.worker,
            said.incarnation,
            said.prefill_ms,
            said.ns_id,
            said.keys,
            now,
            until,
            unlisted_until=unlisted_until,
        )
