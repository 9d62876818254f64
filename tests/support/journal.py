"""The journal as it is written: who decided what for which request, and how its attempts ended."""

from collections import defaultdict
from typing import Any, Self

from prefixbus.bus import messages, subjects
from prefixbus.bus.connection import Bus

from .cluster import Cluster
from .nats import eventually


class Journal:
    """`async with await Journal.of(cluster) as journal:` reads from now on. Times in records are Unix seconds."""

    def __init__(self, operator: Bus) -> None:
        self._operator = operator
        self._read_through = 0
        self.decisions: dict[str, list[messages.DecisionRecord]] = defaultdict(list)
        """By the client's request id, in the order of the stream; a request that was sent again has several ids."""
        self.outcomes: dict[str, list[messages.Outcome]] = defaultdict(list)

    @classmethod
    async def of(cls, cluster: Cluster) -> "Journal":
        journal = cls(await cluster.operator())
        await journal._operator.follow(subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.>", journal._hear, start="new")
        return journal

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._operator.close()

    def at(self, moment: float, client_request_id: str) -> list[messages.DecisionRecord]:
        """The last decision until then for each sending of the request."""
        last = {each.request_id: each for each in self.decisions[client_request_id] if each.decided_at <= moment}
        return list(last.values())

    def in_hand_of(self, worker: str) -> list[str]:
        """Client's ids of requests whose last decision names this worker, and that have no outcome."""
        return [
            label
            for label, made in self.decisions.items()
            if made and made[-1].selected_worker == worker and not self.outcomes.get(label)
        ]

    async def is_read(self) -> None:
        """Returns when all that is in the stream by now has been read here."""
        info = await self._operator.jetstream.stream_info(subjects.STREAM_JOURNAL)
        await eventually(lambda: self._read_through >= info.state.last_seq, "the journal is read", 10)

    async def _hear(self, message: Any) -> None:
        self._read_through = message.metadata.sequence.stream
        if not message.subject.startswith(f"{subjects.PREFIX}.journal."):
            outcome = messages.OUTCOME.decode(message.data)
            self.outcomes[outcome.client_request_id].append(outcome)
        else:
            decision = messages.DECISION.decode(message.data)
            self.decisions[decision.client_request_id].append(decision)
