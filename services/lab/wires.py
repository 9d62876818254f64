"""The bus in virtual time: who hears what, and how much later.

Owns: delays and losses.   Must not know: what anyone does with a message.
Units: seconds; wall time and monotonic time are one here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..bus.messages import (
    Accept,
    Dispatch,
    Dispatched,
    Holdings,
    KvDump,
    KvEvents,
    Load,
    Lookup,
    Outcome,
    WarmOrder,
)
from ..directory.ledger import AskDump, Effect
from ..directory.shard import Shard
from ..router.policy import Policy
from .chance import Chance
from .fetching import Line, Reply
from .setup import Setup
from .timeline import Timeline
from .workload import Arrival


class RouterEnd(Protocol):
    def hear_load(self, load: Load) -> None: ...
    def hear_accept(self, accept: Accept) -> None: ...
    def hear_dispatched(self, announced: Dispatched) -> None: ...
    def hear_outcome(self, outcome: Outcome) -> None: ...
    def hear_cancel(self, tenant: str, request_id: str) -> None: ...
    def hear_first_token(self, request_id: str) -> None: ...


class Withdrawn(NamedTuple):
    """A worker's answer to an abort, as `ControlReply` is: how far the attempt was."""

    worker: str
    incarnation: int
    attempt: int
    stage: str


class WorkerEnd(Protocol):
    incarnation: int

    def hear_dispatch(
        self, dispatch: Dispatch, arrival: Arrival, reply: Callable[[Accept], None], source: str = ""
    ) -> None: ...
    def hear_pull(self, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None: ...
    def hear_cancel(self, tenant: str, request_id: str) -> None: ...
    def hear_abort(self, request_id: str, attempt: int, reply: Callable[[Withdrawn], None] | None) -> None: ...
    def hear_dump_request(self) -> None: ...
    def hear_order(self, order: WarmOrder, prefix: "Prefix") -> None: ...


class Prefix(NamedTuple):
    """What an order needs besides: the chain up to there, and whose it is."""

    tenant: str
    keys: bytes


class Wires:
    """Connect the ends, then send. A message reaches all its listeners at the same instant.

    `workers` are those that listen; what is sent to another is heard by nobody, and nobody is told so."""

    def __init__(self, timeline: Timeline, setup: Setup, directory: Shard) -> None:
        self.routers: list[RouterEnd] = []
        self.workers: dict[str, WorkerEnd] = {}
        self.directory = directory
        self.lost_events = 0
        self.dumps_asked = 0
        # Dispatches that have not arrived, by request id: the worker, and what is asked.
        self.on_the_way: dict[str, tuple[str, Arrival]] = {}
        # What routers remember of prefixes, all together.
        self._prefixes: dict[tuple[bytes, int], Prefix] = {}
        # Requests whose answers have begun: a worker claims one just before.
        self._begun: set[str] = set()
        self._timeline = timeline
        self._setup = setup
        self._chance = Chance(setup.seed, "events")

    def __repr__(self) -> str:
        return f"<Wires routers={len(self.routers)} workers={len(self.workers)} lost events={self.lost_events}>"

    def look_up(self, asked: Lookup, reply: Callable[[Holdings], None]) -> None:
        self._timeline.after(self._setup.hop_s, self._look_up, asked, reply)

    def dispatch(
        self, worker: str, dispatch: Dispatch, arrival: Arrival, reply: Callable[[Accept], None], source: str = ""
    ) -> None:
        """`source`: from which it is to pull up to where the dispatch says that it finds the prompt."""
        self.on_the_way[dispatch.request_id] = worker, arrival
        self._timeline.after(self._setup.hop_s, self._dispatch, worker, dispatch, arrival, reply, source)

    def abort(
        self, worker: str, request_id: str, attempt: int, reply: Callable[[Withdrawn], None] | None = None
    ) -> None:
        self._timeline.after(self._setup.hop_s, self._abort, worker, request_id, attempt, reply)

    def withdrawn(self, withdrawn: Withdrawn, reply: Callable[[Withdrawn], None]) -> None:
        self._timeline.after(self._setup.hop_s, reply, withdrawn)

    def begin(self, request_id: str) -> None:
        """An attempt answers from here on: live it claims the request. :raises AssertionError: another one has."""
        if request_id in self._begun:
            raise AssertionError(f"{request_id} is answered twice")
        self._begun.add(request_id)

    def claim(self, request_id: str, reply: Callable[[bool], None]) -> None:
        """A router asks whether it may end a request of which an attempt may be running."""
        self._timeline.after(2 * self._setup.hop_s, self._claim, request_id, reply)

    def pull(self, source: str, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None:
        """One worker asks another for what it should pull from it."""
        self._timeline.after(self._setup.hop_s, self._pull, source, keys, first, upto, reply)

    def accept(self, accept: Accept, reply: Callable[[Accept], None]) -> None:
        self._timeline.after(self._setup.hop_s, reply, accept)

    def announce(self, announced: Dispatched, sender: RouterEnd) -> None:
        setup = self._setup
        if setup.announce_delay_s is not None and len(self.routers) > 1:
            self._timeline.after(setup.announce_delay_s, self._announce, announced, sender)
        if setup.predict_delay_s is not None:
            self._timeline.after(setup.predict_delay_s, self._predict, announced)

    def remember(self, tenant: str, ns_id: bytes, keys: bytes, blocks: int) -> None:
        """A router has dispatched a request of which so many blocks are held somewhere."""
        if blocks and self._setup.orders is not None:
            prefix = keys[: 8 * blocks]
            self._prefixes[ns_id, int.from_bytes(prefix[-8:], "little")] = Prefix(tenant, prefix)

    def order(self, orders: list[WarmOrder]) -> None:
        """From the directory by way of a router."""
        for order in orders:
            prefix = self._prefixes[order.ns_id, order.key]
            self._timeline.after(2 * self._setup.hop_s, self._order, order, prefix)

    def order_taken(self, announced: Dispatched) -> None:
        self._timeline.after(2 * self._setup.hop_s, self._predict, announced)

    def order_ended(self, outcome: Outcome) -> None:
        self._timeline.after(self._setup.hop_s, self._order_ended, outcome)

    def load(self, load: Load) -> None:
        self._timeline.after(self._setup.hop_s, self._load, load)

    def outcome(self, outcome: Outcome) -> None:
        self._timeline.after(self._setup.hop_s, self._outcome, outcome)

    def first_token(self, request_id: str) -> None:
        """For rules whose routers see answers pass."""
        if not isinstance(self._setup.policy, Policy):
            self._timeline.after(self._setup.hop_s, self._first_token, request_id)

    def cancel(self, tenant: str, request_id: str) -> None:
        self._timeline.after(self._setup.hop_s, self._cancel, tenant, request_id)

    def events(self, message: KvEvents | KvDump) -> None:
        if self._setup.event_loss and self._chance.uniform() < self._setup.event_loss:
            self.lost_events += 1
            return
        self._timeline.after(self._setup.event_delay_s, self._events, message)

    def perform(self, effects: Sequence[Effect]) -> None:
        """What the directory wants done: dumps are asked for. Turns of leases are for a log, of which there is none."""
        for effect in effects:
            if isinstance(effect, AskDump):
                self.dumps_asked += 1
                self._timeline.after(self._setup.hop_s, self._ask_dump, effect)

    def _dispatch(
        self, worker: str, dispatch: Dispatch, arrival: Arrival, reply: Callable[[Accept], None], source: str
    ) -> None:
        del self.on_the_way[dispatch.request_id]
        end = self.workers.get(worker)
        if end is not None:
            end.hear_dispatch(dispatch, arrival, reply, source)

    def _abort(self, worker: str, request_id: str, attempt: int, reply: Callable[[Withdrawn], None] | None) -> None:
        end = self.workers.get(worker)
        if end is not None:
            end.hear_abort(request_id, attempt, reply)

    def _claim(self, request_id: str, reply: Callable[[bool], None]) -> None:
        reply(request_id not in self._begun)

    def _order(self, order: WarmOrder, prefix: Prefix) -> None:
        """Meant for another life, it is refused."""
        end = self.workers.get(order.worker)
        if end is not None and end.incarnation == order.incarnation:
            end.hear_order(order, prefix)

    def _ask_dump(self, asked: AskDump) -> None:
        end = self.workers.get(asked.worker)
        if end is not None and end.incarnation == asked.incarnation:
            end.hear_dump_request()

    def _pull(self, source: str, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None:
        end = self.workers.get(source)
        if end is None:
            reply(0, Line())
        else:
            end.hear_pull(keys, first, upto, reply)

    def _look_up(self, asked: Lookup, reply: Callable[[Holdings], None]) -> None:
        self._timeline.after(self._setup.hop_s, reply, self.directory.lookup(asked, self._timeline.now))

    def _announce(self, announced: Dispatched, sender: RouterEnd) -> None:
        for router in self.routers:
            if router is not sender:
                router.hear_dispatched(announced)

    def _predict(self, announced: Dispatched) -> None:
        now = self._timeline.now
        self.directory.dispatched(announced, now, wall=now)

    def _events(self, message: KvEvents | KvDump) -> None:
        self.perform(self.directory.events(message, self._timeline.now))

    def _load(self, load: Load) -> None:
        for router in self.routers:
            router.hear_load(load)
        self.perform(self.directory.heartbeat(load, load.event_seq, self._timeline.now))

    def _order_ended(self, outcome: Outcome) -> None:
        self.perform(self.directory.outcome(outcome, self._timeline.now))

    def _outcome(self, outcome: Outcome) -> None:
        for router in self.routers:
            router.hear_outcome(outcome)
        self.perform(self.directory.outcome(outcome, self._timeline.now))

    def _first_token(self, request_id: str) -> None:
        for router in self.routers:
            router.hear_first_token(request_id)

    def _cancel(self, tenant: str, request_id: str) -> None:
        for router in self.routers:
            router.hear_cancel(tenant, request_id)
        for worker in self.workers.values():
            worker.hear_cancel(tenant, request_id)
