# ruff: noqa: TID251 - a shell
"""The directory's shell: events, heartbeats and announcements in, look-ups answered.

A process is one replica of one shard: it knows the namespaces that belong there, and no other. Every replica follows
its shard's events and hears every heartbeat itself; look-ups go to any one of them (queue group). A replica begins with
the newest snapshot and what the stream holds after it. It answers only once it has caught up: it has applied all that
was in the stream when it began, knows the workers that live and has the whole story of each, or has waited `CATCH_UP_S`
for those that do not tell it.

Owns: the subscriptions.   Must not know: how the index works, what a worker is good for."""

import time
from collections.abc import Sequence

import anyio
import msgspec
from nats.aio.msg import Msg

from ..bus import messages, namespace, subjects
from ..bus.errors import BadSubject, BusUnavailable, ConfigInvalid, PrefixbusError
from ..bus.messages import Dispatched, Holdings, Load, Lookup, MessageInvalid, Outcome
from ..bus.runtime import Runtime
from .ledger import AskDump, Effect, NewIncarnation, Rules, WorkerBack, WorkerLost, WorkerSuspect
from .metrics import DirectoryMetrics
from .placement import PlacementRules
from .shard import Settings, Shard
from .shedding import Bounds
from .shelf import Shelf
from .trust import TrustRules

CATCH_UP_S = 3.0
_TICK_S = 0.1
_LAG_EVERY_S = 1.0
_TURNS: dict[type[Effect], str] = {
    NewIncarnation: "new",
    WorkerSuspect: "suspect",
    WorkerLost: "lost",
    WorkerBack: "back",
}


class Directory:
    """One replica of a shard: `core` decides, this ties it to the bus."""

    def __init__(self, rt: Runtime, shard: int) -> None:
        self.shard = shard
        self._shards = rt.config.directory.shards
        self.applied_seq = 0
        """The stream sequence of the last event applied."""
        self._lag = 0
        # Heartbeats name events: they are weighed when the stream's own have been repeated. None from then on.
        self._early: dict[str, Load] | None = {}
        self._rt = rt
        self._now = rt.clock.now
        section, placement = rt.config.directory, rt.config.placement
        self.core = Shard(
            Settings(
                Rules(suspect_after_s=section.suspect_after_s, lost_after_s=section.lost_after_s),
                Bounds(
                    memory_bytes=section.memory_bytes,
                    namespaces_max=section.namespaces_max,
                    namespaces_per_tenant=section.namespaces_per_tenant,
                ),
                TrustRules(fresh_s=section.entries_fresh_s),
                PlacementRules(
                    copies_max=placement.copies_max,
                    copies_share=placement.copies_share,
                    rewarm_share=placement.rewarm_share,
                    idle_share=placement.idle_share,
                ),
            )
        )
        self._watch_numbers(rt)

    def _watch_numbers(self, rt: Runtime) -> None:
        core = self.core
        self.metrics = DirectoryMetrics(rt.registry)
        self.metrics.watch(
            {
                "shard": lambda: self.shard,
                "lag_events": lambda: self._lag,
                "entries": lambda: core.index.entries,
                "bytes": lambda: core.index.estimated_bytes,
                "namespaces": lambda: core.index.namespaces,
                "announced_requests": lambda: len(core.predictions),
                "announced_blocks": lambda: core.predictions.blocks,
                "workers": lambda: sum(1 for _ in core.ledger.views()),
                "incomplete_workers": lambda: len(core.ledger.incomplete()),
                "popular_prefixes": lambda: len(core.placement),
                "doubts": lambda: len(core.trust),
                "shed_pairs": lambda: core.shedding.shed_pairs,
            }
        )

    def lookup(self, asked: Lookup, message: Msg) -> None:
        """Answers with `Holdings`. Who asks what cannot be read gets no answer, and decides blind.

        :raises MessageInvalid: it is not ours to know; who asked is told, too."""
        if not self._is_ours(asked.ns_id):
            why = f"the namespace is not of shard {self.shard} of {self._shards}; is [directory] shards another there?"
            self._send(message.reply, messages.HOLDINGS.encode(Holdings(messages.VERSION, [], refused=why)))
            raise MessageInvalid(f"A router asks for another shard's: {why}")
        started = time.perf_counter()
        found = self.core.lookup(asked, self._now())
        holdings = msgspec.structs.replace(found, replica=self._rt.instance, stream_seq=self.applied_seq)
        self.metrics.lookup_seconds.observe(time.perf_counter() - started)
        self._send(message.reply, messages.HOLDINGS.encode(holdings))

    def load(self, load: Load, message: Msg) -> None:
        """A worker's heartbeat."""
        _check_sender(load.worker, message)
        if self._early is None:
            self._heartbeat(load)
        else:
            self._early[load.worker] = load

    def _heartbeat(self, load: Load) -> None:
        self._perform(self.core.heartbeat(load, load.seq_for(self.shard, self._shards), self._now()))

    async def events(self, message: Msg) -> None:
        """A worker's block changes, or a part of its dump."""
        try:
            event = messages.KV.decode(message.data)
            _check_sender(event.worker, message)
        except PrefixbusError as exc:
            self._rt.caught(exc, "an event was dropped", subject=message.subject)
        else:
            self.metrics.events.inc()
            self._perform(self.core.events(event, self._now()))
        self.applied_seq = message.metadata.sequence.stream

    def dispatched(self, sent: Dispatched, _: Msg) -> None:
        """A router announces a dispatch, or takes it back."""
        if not sent.worker or self._is_ours(sent.ns_id):
            self.core.dispatched(sent, self._now(), self._rt.clock.wall())

    def outcome(self, outcome: Outcome, message: Msg) -> None:
        """A request ended."""
        if message.subject != subjects.outcome(outcome.worker, outcome.request_id):
            raise BadSubject(f"an outcome of {outcome.worker} came on {message.subject}.")
        if self._is_ours(bytes.fromhex(outcome.ns_id)):
            self._perform(self.core.outcome(outcome, self._now()))

    async def keep_time(self) -> None:
        """Leases, expiry and sweeping, in slices that never hold the loop."""
        while True:
            now = self._now()
            self._perform(self.core.tick(now))
            self._order(now)
            more = True
            while more:
                more = self.core.do_slice(now)
                await anyio.sleep(0 if more else _TICK_S)

    def _order(self, now: float) -> None:
        """What should be computed before it is asked for."""
        for order in self.core.orders(now):
            self.metrics.warm_orders.labels(order.kind).inc()
            self._send(subjects.WARM, messages.WARM_ORDER.encode(order))

    async def follow(self, shelf: Shelf) -> None:
        """Begins with the snapshot, or without one with the next event; returns when all that was in the stream is
        applied.

        :raises BusUnavailable: the event stream is not there."""
        bus, subject = self._rt.bus, subjects.kv(self.shard, "*")
        after_seq = await shelf.load(self._perform)
        last_seq = await self._last_seq()
        if after_seq is None:
            self.applied_seq = last_seq
            await bus.follow(subjects.STREAM_KV_EVENTS, subject, self.events, start="new")
        else:
            self.applied_seq = after_seq
            await bus.follow(subjects.STREAM_KV_EVENTS, subject, self.events, start="all", after_seq=after_seq)
        while self.applied_seq < last_seq:
            await anyio.sleep(_TICK_S)
            if await self._last_seq() <= self.applied_seq:
                # The last of them aged out before it came.
                break
        early, self._early = self._early or {}, None
        for load in early.values():
            try:
                self._heartbeat(load)
            except PrefixbusError as exc:
                self._rt.caught(exc, "a heartbeat was dropped", worker=load.worker)

    async def _last_seq(self) -> int:
        """Of the shard's last event in the stream; 0 if there is none."""
        last = await self._rt.bus.stored(subjects.STREAM_KV_EVENTS, subjects.kv(self.shard, "*"))
        return last.seq if last is not None else 0

    async def watch_lag(self) -> None:
        while True:
            try:
                self._lag = max(0, await self._last_seq() - self.applied_seq)
            except BusUnavailable as exc:
                self._rt.caught(exc, "how far behind we are is not known")
            await anyio.sleep(_LAG_EVERY_S)

    async def catch_up(self) -> None:
        """Returns when every worker heard in one lease's time has told its whole story, or after `CATCH_UP_S`."""
        await anyio.sleep(self._rt.config.directory.suspect_after_s)
        for _ in range(int(CATCH_UP_S / _TICK_S)):
            if not self.core.ledger.incomplete():
                return
            await anyio.sleep(_TICK_S)
        self._rt.log.warning("some workers have not told their whole story; answering without it")

    def connection_changed(self, connected: bool) -> None:
        """While we are cut off, others' silence says nothing about them."""
        if connected:
            self.core.ledger.observer_back(self._now())
        else:
            self.core.ledger.observer_cut(self._now())

    def _is_ours(self, ns_id: bytes) -> bool:
        return namespace.shard_of(ns_id, self._shards) == self.shard

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case AskDump(worker, incarnation, reason):
                    self.metrics.dumps_asked.labels(reason).inc()
                    request = messages.DumpRequest(messages.VERSION, incarnation, reason, self.shard)
                    self._send(subjects.control(worker, "dump"), messages.DUMP_REQUEST.encode(request))
                case WorkerLost(worker) | WorkerSuspect(worker):
                    self.metrics.leases.labels(_TURNS[type(effect)]).inc()
                    self._rt.log.warning("worker %s: %s", worker, _TURNS[type(effect)])
                case NewIncarnation(worker) | WorkerBack(worker):
                    self.metrics.leases.labels(_TURNS[type(effect)]).inc()
                    self._rt.log.info("worker %s: %s", worker, _TURNS[type(effect)])

    def _send(self, subject: str, payload: bytes) -> None:
        try:
            self._rt.bus.send(subject, payload)
        except BusUnavailable as exc:
            # Look-ups are answered again by whoever is asked next; dumps are asked for again by the ledger.
            self._rt.caught(exc, "not published", subject=subject)


def _check_sender(worker: str, message: Msg) -> None:
    """The server's permissions vouch for the subject, nobody for the body."""
    if worker != message.subject.rsplit(".", 1)[1]:
        raise BadSubject(f"a message of {worker} came on {message.subject}.")


async def run(rt: Runtime, shard: int = 0) -> None:
    """One replica of a shard, until `rt.stopping`.

    :raises ConfigInvalid: there is no such shard.   :raises BusUnavailable: the event stream is not there."""
    if not 0 <= shard < rt.config.directory.shards:
        last = rt.config.directory.shards - 1
        raise ConfigInvalid(
            f"there is no shard {shard}.",
            field="--shard",
            remedy=f"Name one of 0 to {last}, or raise [directory] shards in config.toml and restart the cluster.",
        )
    directory = Directory(rt, shard)
    rt.bus.on_connection_change.append(directory.connection_changed)
    await rt.listen(subjects.ALL_LOAD, messages.LOAD, directory.load)
    await rt.listen(subjects.DISPATCHED, messages.DISPATCHED, directory.dispatched)
    await rt.listen(subjects.ALL_OUTCOME, messages.OUTCOME, directory.outcome)
    shelf = Shelf(rt, directory.core, shard, lambda: directory.applied_seq, directory.metrics)
    await directory.follow(shelf)
    rt.task_group.start_soon(directory.keep_time)
    rt.task_group.start_soon(directory.watch_lag)
    await directory.catch_up()
    rt.task_group.start_soon(shelf.run)
    lookups = await rt.listen(subjects.lookup(shard), messages.LOOKUP, directory.lookup, queue="directory")
    rt.ready()
    await rt.stopping.wait()
    await lookups.drain()
