"""The directory in virtual time: a production shard, told of things by method calls.

Owns: what of a shard's effects is carried out here.   Must not know: delays, who else hears.
Units: `now` in seconds; wall time and monotonic time are one here."""

from collections.abc import Sequence

from ..bus.messages import Dispatched, Holdings, KvDump, KvEvents, Load, Lookup, Outcome, WarmOrder
from ..directory.ledger import AskDump, Effect
from ..directory.placement import PlacementRules
from ..directory.shard import Settings, Shard


class Directory:
    """One shard, one replica. Methods return the workers to ask for a dump."""

    def __init__(self, placement: PlacementRules | None = None) -> None:
        self.shard = Shard(Settings(placement=placement or PlacementRules()))
        self._gives_orders = placement is not None
        self.dumps_asked = 0

    def __repr__(self) -> str:
        return f"<Directory {self.shard!r}>"

    def answer(self, asked: Lookup, now: float) -> Holdings:
        return self.shard.lookup(asked, now)

    def hear_load(self, load: Load, now: float) -> list[str]:
        return self._asked(self.shard.heartbeat(load, load.event_seq, now))

    def hear_events(self, message: KvEvents | KvDump, now: float) -> list[str]:
        return self._asked(self.shard.events(message, now))

    def hear_dispatched(self, sent: Dispatched, now: float) -> None:
        self.shard.dispatched(sent, now, now)

    def hear_outcome(self, outcome: Outcome, now: float) -> list[str]:
        return self._asked(self.shard.outcome(outcome, now))

    def orders(self, now: float) -> list[WarmOrder]:
        """Ask for them several times a second."""
        return self.shard.orders(now) if self._gives_orders else []

    def tick(self, now: float) -> list[str]:
        """Call it several times a second."""
        asked = self._asked(self.shard.tick(now))
        while self.shard.do_slice(now):
            pass
        return asked

    def _asked(self, effects: Sequence[Effect]) -> list[str]:
        if not effects:
            return []
        workers = [effect.worker for effect in effects if isinstance(effect, AskDump)]
        self.dumps_asked += len(workers)
        return workers
