"""The directory's shell in virtual time: its own index, ledger and predictions, told of things by method calls.

Owns: what ties them together, as directory/service.py does live.   Must not know: delays, who else hears.
Units: `now` in seconds; wall time and monotonic time are one here."""

from collections.abc import Sequence

from ..bus.messages import TIERS, VERSION, Dispatched, Holdings, KvDump, KvEvents, Level, Load, Lookup, Outcome
from ..directory.index import Index, Slots
from ..directory.ledger import AskDump, Effect, Ledger
from ..directory.predictions import Predictions

# As in directory/service.py.
EVENTS_FOLLOW_S = 1.0
_EVERYTHING = 1 << 62


class Directory:
    """One shard, one replica. Methods return the workers to ask for a dump."""

    def __init__(self) -> None:
        slots = Slots()
        self.index = Index(slots)
        self.predictions = Predictions(slots)
        self.ledger = Ledger(self.index)
        self.dumps_asked = 0

    def __repr__(self) -> str:
        return f"<Directory {self.index!r} {self.predictions!r}>"

    def answer(self, asked: Lookup) -> Holdings:
        levels = self.predictions.lookup(self.index, asked.ns_id, asked.keys)
        named: list[Level] = []
        for depth, mask in levels:
            workers: list[list[str]] = [[] for _ in TIERS]
            while mask:
                low = mask & -mask
                holder = self.ledger.holder_at(low.bit_length() - 1)
                if holder is not None:
                    workers[holder.tier].append(holder.worker)
                mask ^= low
            named += [Level(depth, names, TIERS[tier]) for tier, names in enumerate(workers) if names]
        return Holdings(VERSION, named, self.ledger.incomplete())

    def hear_load(self, load: Load, now: float) -> list[str]:
        return self._asked(self.ledger.heartbeat(load.worker, load.incarnation, load.event_seq, now))

    def hear_events(self, message: KvEvents | KvDump, now: float) -> list[str]:
        if isinstance(message, KvEvents):
            effects = self.ledger.events(message.worker, message.incarnation, message.seq, message.ops, now)
        else:
            effects = self.ledger.dump_chunk(
                message.worker,
                message.incarnation,
                message.dump_id,
                message.part,
                message.parts,
                message.seq,
                message.runs,
                now,
            )
        return self._asked(effects)

    def hear_dispatched(self, sent: Dispatched, now: float) -> None:
        name = _announcement(sent.request_id, sent.attempt)
        if not sent.worker:
            self.predictions.drop(name)
            return
        view = self.ledger.view(sent.worker)
        if view is None or view.slot is None or view.incarnation != sent.incarnation:
            return
        if sent.expires_at > now:
            held = self.index.depth_of_slot(sent.ns_id, view.slot, sent.keys)
            self.predictions.announce(name, view.slot, sent.ns_id, sent.keys[8 * held :], sent.expires_at)

    def hear_outcome(self, outcome: Outcome, now: float) -> None:
        name = _announcement(outcome.request_id, outcome.attempt)
        if outcome.status == "ok":
            self.predictions.renew(name, now + EVENTS_FOLLOW_S)
        else:
            self.predictions.drop(name)

    def tick(self, now: float) -> list[str]:
        """Call it several times a second."""
        asked = self._asked(self.ledger.tick(now))
        self.predictions.expire(now, _EVERYTHING)
        self.index.sweep(_EVERYTHING)
        return asked

    def _asked(self, effects: Sequence[Effect]) -> list[str]:
        if not effects:
            return []
        workers = [effect.worker for effect in effects if isinstance(effect, AskDump)]
        self.dumps_asked += len(workers)
        return workers


def _announcement(request_id: str, attempt: int) -> str:
    return f"{request_id}.{attempt}"
