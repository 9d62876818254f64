"""Which of the engine's event batches come next: live ones, replayed ones, late ones, and what is missing.

Within one connection to one engine process, live sequence numbers only grow; the same batch may come live and by
replay. A live number that does not grow is another process's.

Owns: two sequence numbers.   Must not know: sockets, what is in a batch.
Source: facts/vllm.md (seq starts at 0 in every engine process)."""

import enum


class Turn(enum.Enum):
    APPLY = "apply"
    LATE = "late"
    """Applied before."""
    GAP = "gap"
    """Something before it is missing: replay from `missing_from`, or `skip_to` it if that is lost for good."""
    RESTART = "restart"
    """Another engine process counts here: everything before is void."""


class EventOrder:
    """One connection's order; a new connection starts a new one."""

    def __init__(self) -> None:
        self.applied = -1
        self._last_live = -1

    def __repr__(self) -> str:
        return f"<EventOrder applied {self.applied}, live {self._last_live}>"

    @property
    def missing_from(self) -> int:
        return self.applied + 1

    def live(self, seq: int) -> Turn:
        if seq <= self._last_live:
            return Turn.RESTART
        self._last_live = seq
        return self.replayed(seq)

    def replayed(self, seq: int) -> Turn:
        if seq <= self.applied:
            return Turn.LATE
        if seq > self.applied + 1:
            return Turn.GAP
        self.applied = seq
        return Turn.APPLY

    def skip_to(self, seq: int) -> None:
        """What is before `seq` will never come; `seq` is next."""
        if seq <= self.applied:
            raise ValueError(f"{seq} was applied already (up to {self.applied})")
        self.applied = seq - 1
