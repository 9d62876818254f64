# ruff: noqa: TID251 - a shell: it waits on the event loop
"""The worker's life: from an engine that answers to an incarnation, and to its end.

    engine answers -> it fits -> its events are whole -> they come -> registered (an incarnation) -> serving -> lost
    -> again

Dispatches are listened for only in between the last three: one to a worker without a life should be told by the server
that nobody is there, and cost its router nothing. What a bridge without a life answers, routers take for a second
bridge's word, and wait for the first one's.

The stream sequence of a registration is the incarnation. Whatever loses the engine (its process, its address, its
events' connection) ends the incarnation: running requests fail, all it held is void, and the next life begins. An
engine that is there and silent keeps its incarnation, but the worker is silent too.

Owns: the incarnation, and why there is none.   Must not know: what a dispatch is, how vLLM is spoken to.
Source: DESIGN 5 (Leases) and 7."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from ..bus import messages, subjects
from ..bus.errors import PrefixbusError, WorkerLost, WorkerRefused
from ..bus.messages import VERSION, ControlReply
from ..bus.runtime import Runtime
from .blocks import BlockIndex
from .engine import Engine
from .engine_events import Batch, BlockStored
from .handshake import examine, hear_events, probe_isolation
from .kv_feed import KvFeeds
from .vllm_events import Endpoints, VllmEvents

# Asked this often whether it works; a dead one is noticed by its closed sockets long before.
_HEALTH_EVERY_S = 1.0
_RETRY_S = 0.25
# A mismatched engine is looked at again: somebody may be correcting it.
_REFUSED_RETRY_S = 2.0
_EVENTS_WITHIN_S = 10.0
_PING_S = 0.5
_RIVAL_EVERY_S = 2.0
_OTHER_NAME = "Give this one another name, or stop the other."


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker's registration (JSON, bucket WORKERS). `boot` names the bridge process; `adapters` are those served with
    the model, with their revisions; `lacks` are sentences on what does not work with this engine."""

    v: int
    worker: str
    model: str
    serves: str
    engine: str
    block_size: int
    slots: int
    kv_tokens: int
    boot: str
    registered_at: float
    adapters: dict[str, str] = {}
    model_revision: str = ""
    engine_version: str = ""
    lacks: list[str] = []


class Follower(Protocol):
    """Who follows the worker's lives."""

    async def hear_work(self) -> None:
        """A life is about to begin, and dispatches with its first heartbeat. :raises BusUnavailable: not now."""

    async def hear_no_work(self) -> None:
        """It is over, or did not begin."""

    def born(self, incarnation: int) -> None: ...

    def died(self, *, replaced: bool) -> None:
        """`replaced`: another bridge has the name, and everyone has given up what this one had in hand."""


class Life:
    """One worker's lives; a `Listener` to its engine's events. `record` is what it registers with; `adapters` are what
    the engine must call those that the config names."""

    def __init__(
        self,
        rt: Runtime,
        record: WorkerRecord,
        engine: Engine,
        endpoints: Endpoints,
        index: BlockIndex,
        feed: KvFeeds,
        follower: Follower,
        adapters: Sequence[str],
    ) -> None:
        self.incarnation = 0
        self.why_not = "starting"
        """Why the worker does not serve; empty while it does."""
        self.stalled = False
        """The engine is there and does not answer."""
        self.record = record
        self.events = VllmEvents(endpoints, self)
        self.batches = 0
        self.engine_block_size = 0
        self.event_lag_s = 0.0
        self.unknown_events = 0
        self.foreign_batches = 0
        self.foreign_topics: tuple[str, str] | None = None
        self._rt = rt
        self._engine = engine
        self._index = index
        self._feed = feed
        self._follower = follower
        self._adapters = adapters
        self._lost = asyncio.Event()
        self._look = asyncio.Event()
        self._doubts_isolation = False
        self._max_model_len = 0
        self._caught_up = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Life {self.record.worker} incarnation {self.incarnation} {self.why_not or 'serving'}>"

    async def run(self) -> None:
        """:raises WorkerRefused: another bridge has taken the name while this one had no life."""
        while True:
            try:
                await self._examine_engine()
                session = await self._until_events_are_whole()
                await hear_events(self._engine, self, self.record.block_size, _one_time_salt)
                later = await self._later_rival()
                if later is None:
                    await self._register(session)
            except PrefixbusError as exc:
                self._say_why_not(exc.sentence())
                await self._follower.hear_no_work()
                await asyncio.sleep(_REFUSED_RETRY_S if isinstance(exc, WorkerRefused) else _RETRY_S)
                continue
            if later is not None:
                self._step_down(later)
            await self._until_engine_is_lost()
            self._end("the engine was lost")
            await self._follower.hear_no_work()

    def doubt_engine(self) -> None:
        """It failed a request: look at once whether it is there."""
        self._look.set()

    def doubt_isolation(self) -> None:
        """It reused what it should not have: look at once whether its salts still isolate."""
        self._doubts_isolation = True
        self._look.set()

    async def _examine_engine(self) -> None:
        """:raises WorkerLost, EngineFailed: it does not answer yet.   :raises WorkerRefused: it does not fit."""
        try:
            await self._engine.health()
        except TimeoutError as exc:
            raise WorkerLost(str(exc)) from exc
        record = self.record
        facts = await examine(
            self._engine,
            model=record.model,
            adapters=self._adapters,
            block_size=record.block_size,
            one_time_salt=_one_time_salt,
        )
        wanted = self._rt.config.models[record.model].max_model_len
        self._max_model_len = facts.max_model_len
        self.events.engine_says(facts.topic)
        lacks = list(facts.shortcomings)
        if 0 < facts.max_model_len < wanted:
            lacks.append(
                f"The engine takes {facts.max_model_len} tokens, the config says {wanted}: longer prompts will fail."
            )
        for sentence in lacks:
            if sentence not in record.lacks:
                self._rt.log.warning("%s", sentence)
        self.record = msgspec.structs.replace(
            record, kv_tokens=facts.kv_tokens or record.kv_tokens, engine_version=facts.version, lacks=lacks
        )

    async def _until_events_are_whole(self) -> asyncio.Event:
        """The connection to its events, which `ended` replaces.

        :raises WorkerLost: not yet; the sentence says what is missing."""
        try:
            async with asyncio.timeout(_EVENTS_WITHIN_S):
                session = self._caught_up
                await session.wait()
        except TimeoutError as exc:
            reason = self.events.failure or "their replay is not complete"
            raise WorkerLost(f"The engine's events do not come: {reason}.") from exc
        return session

    async def _register(self, session: asyncio.Event) -> None:
        subject = f"$KV.{subjects.BUCKET_WORKERS}.{self.record.worker}"
        record = msgspec.structs.replace(self.record, registered_at=self._rt.clock.wall())
        incarnation = await self._rt.bus.publish_acked(subject, msgspec.json.encode(record))
        await self._follower.hear_work()
        if session is not self._caught_up:
            raise WorkerLost("The engine was lost while the worker registered.")
        self._lost = asyncio.Event()
        self.stalled = self._doubts_isolation = False
        self.incarnation = incarnation
        self.why_not = ""
        self._feed.begin(incarnation)
        self._follower.born(incarnation)
        fields = {"incarnation": incarnation, "serves": record.serves, "holds": repr(self._index)}
        self._rt.log.info("registered", extra={"fields": fields})

    async def _until_engine_is_lost(self) -> None:
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_EVERY_S):
                    await self._look.wait()
            self._look.clear()
            try:
                await self._engine.health()
                self.stalled = False
                if self._doubts_isolation:
                    await self._look_at_isolation()
            except TimeoutError:
                if not self.stalled:
                    self._rt.log.warning("the engine does not answer; no heartbeats until it does")
                self.stalled = True
            except PrefixbusError as exc:
                self._rt.caught(exc, "the engine is lost")
                return

    async def _look_at_isolation(self) -> None:
        """:raises WorkerRefused: its salts do not isolate."""
        try:
            await probe_isolation(self._engine, self.record.block_size, self._max_model_len, _one_time_salt)
        except WorkerRefused:
            raise
        except PrefixbusError as exc:
            self._rt.caught(exc, "whether salts isolate could not be asked yet")
        else:
            self._doubts_isolation = False

    def _end(self, reason: str, *, replaced: bool = False) -> None:
        if not self.incarnation:
            return
        self.incarnation = 0
        self._say_why_not(reason)
        self._feed.begin(0)
        self._follower.died(replaced=replaced)

    def _say_why_not(self, reason: str) -> None:
        if reason != self.why_not:
            self.why_not = reason
            self._rt.log.warning("not serving: %s", reason)

    # --- the engine's events (a Listener) ---

    def began(self) -> None:
        self._index.restart()
        self.engine_block_size = 0
        self.foreign_topics = None

    def heard(self, batch: Batch) -> None:
        self.batches += 1
        self.unknown_events += batch.skipped
        self.event_lag_s = max(0.0, self._rt.clock.wall() - batch.ts)
        for event in reversed(batch.events):
            if isinstance(event, BlockStored):
                self.engine_block_size = event.block_size
                break
        self._feed.add(self._index.apply(batch.events, batch.ts))

    def caught_up(self) -> None:
        self._caught_up.set()
        self._rt.log.info("the engine's events are whole: %r", self._index)

    def missed(self) -> None:
        self._rt.log.warning("events of the engine are lost: what it holds is known in part")
        self._feed.add(self._index.lose_story())

    def overheard(self, topic: str) -> None:
        if not self.foreign_batches:
            # Once in a bridge's life is enough for its log.
            self._rt.log.warning(
                "another engine publishes to this bridge, under the topic %r: it is passed over", topic
            )
        self.foreign_batches += 1
        self.foreign_topics = topic, (self.events.topic or b"").decode("utf-8", "replace")

    def ended(self) -> None:
        self._caught_up = asyncio.Event()
        self._lost.set()
        self._look.set()
        self._end("the engine's events broke off")
        self._index.restart()

    # --- another bridge of the same name ---

    async def be_alone(self) -> None:
        """Before anything is subscribed. :raises WorkerRefused: another bridge answers to this worker's name."""
        other = await self._ping()
        if other is not None:
            raise WorkerRefused(
                f"Another bridge serves {self.record.worker} (incarnation {other.incarnation}).",
                remedy=_OTHER_NAME,
            )

    async def watch_rivals(self) -> None:
        """Two that started at once, or one that was paused while another took its name: the later registration stays,
        since everyone else has voided the earlier one already; and one without a life makes way for one that has it.

        :raises WorkerRefused: this is the one that makes way."""
        while True:
            await asyncio.sleep(_RIVAL_EVERY_S)
            later = await self._later_rival()
            if later is not None:
                self._step_down(later)

    async def _later_rival(self) -> int | None:
        """The incarnation of a bridge of this name that has registered after this one, if one answers."""
        other = await self._ping()
        return other.incarnation if other is not None and other.incarnation > self.incarnation else None

    def _step_down(self, later: int) -> NoReturn:
        self._end("another bridge has taken the name", replaced=True)
        raise WorkerRefused(
            f"Another bridge has registered as {self.record.worker} since (incarnation {later}).", remedy=_OTHER_NAME
        )

    def is_own_ping(self, payload: bytes) -> bool:
        return payload == self.record.boot.encode()

    async def _ping(self) -> ControlReply | None:
        """What another bridge of this name answers, if there is one; our own does not answer our `boot`."""
        subject = subjects.control(self.record.worker, "ping")
        try:
            reply = await self._rt.bus.request(subject, self.record.boot.encode(), timeout_s=_PING_S)
            return messages.CONTROL_REPLY.decode(reply.data)
        except PrefixbusError:
            return None


def _one_time_salt() -> str:
    return secrets.token_hex(16)


def reply_of(life: Life, error: str = "") -> bytes:
    """This bridge's answer to a control message."""
    reply = ControlReply(VERSION, life.record.worker, life.incarnation, error)
    return messages.CONTROL_REPLY.encode(reply)
