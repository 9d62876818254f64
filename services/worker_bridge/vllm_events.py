# ruff: noqa: TID251 - the adapter to vLLM's ZMQ sockets
"""vLLM's block events as one whole story, told to a `Listener` in order.

One *session* is one connection to one engine process: it begins by replaying everything since the engine's start, goes
on live, mends gaps by replay, and ends when the connection does or the numbers rewind; then everything told is void and
a new session begins. Sockets are made anew with each, so that nothing an old engine said can come late.

The engine never waits for us: what we are too slow for it drops, and replay brings it back.

Whoever is told our address can publish to it, another deployment's engine by mistake. Batches are told apart by their
topic, once it is known what the engine's is; those of others are passed over.

Owns: sockets and their order.   Must not know: what events mean.
Source: facts/vllm.md, "KV events over ZMQ" (who binds, the replay protocol, REQ would see only the first reply)."""

import asyncio
from typing import Protocol

import anyio
import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from . import engine_events
from .engine_events import Batch, EventsInvalid
from .event_order import EventOrder, Turn

_END_OF_REPLAY = b"\xff" * 8
# A replay answer comes within milliseconds; an engine that is paused or in a long step is asked again.
_REPLAY_PATIENCE_MS = 2000
# A lost last batch shows by no later number: ask now and then while it is quiet.
_QUIET_MS = 5000
_RECONNECT_S = 0.05
# Applying a batch does not wait for anything, so a long replay must give way by itself.
_BATCHES_IN_A_GO = 16


class Endpoints(msgspec.Struct, frozen=True):
    """The engine's own settings, and the machine it is on. `replay` may be empty: then a story with gaps stays
    incomplete."""

    live: str
    replay: str = ""
    host: str = "127.0.0.1"

    def at_engine(self, address: str) -> str:
        """What to connect to where the engine listens: at every address of its machine, when it was told `*`."""
        return address.replace("*", f"[{self.host}]" if ":" in self.host else self.host)

    def engine_binds(self) -> bool:
        """vLLM's rule: it binds wildcards, ipc:// and inproc://, and connects to a plain tcp:// address."""
        return "*" in self.live or "::" in self.live or self.live.startswith(("ipc://", "inproc://"))


class Listener(Protocol):
    """Who the story is told to. Methods are called in order, never while another runs; none may block."""

    def began(self) -> None:
        """An engine is there: what was told before is void, its story begins."""

    def heard(self, batch: Batch) -> None: ...

    def caught_up(self) -> None:
        """All that happened before the session has been told; called once a session."""

    def missed(self) -> None:
        """Events are lost for good: what is known may be gone, and what is held may be unknown."""

    def overheard(self, topic: str) -> None:
        """A batch of another engine came; nothing of it is told."""

    def ended(self) -> None:
        """The engine is gone, or another one has taken its place."""


class VllmEvents:
    """`run` it as a task; it never ends by itself."""

    def __init__(self, endpoints: Endpoints, listener: Listener) -> None:
        self._endpoints = endpoints
        self._listener = listener
        self.gaps = 0
        self.sessions = 0
        self.failure = "not connected"
        """Why there is no story now; empty while there is one."""
        self.topic: bytes | None = None
        """What the engine marks its batches with; None: nobody knows, and all are taken for its."""
        self._session: _Session | None = None

    def __repr__(self) -> str:
        return f"<VllmEvents {self._endpoints.live} {self.failure or 'connected'}, {self.sessions} sessions>"

    def engine_says(self, topic: str | None) -> None:
        """Its topic. What others' batches made of a story that they are in is told anew without them."""
        said = None if topic is None else topic.encode()
        is_another = self.topic not in (None, said)
        self.topic = said
        if self._session is not None and (is_another or (said is not None and self._session.topics - {said})):
            self._session.end()

    async def run(self) -> None:
        context = zmq.asyncio.Context()
        try:
            while True:
                session = self._session = _Session(context, self._endpoints, self._listener, self)
                try:
                    await session.run()
                except zmq.ZMQError as exc:
                    # The address is still taken by a socket that is being closed, or by someone else.
                    self.failure = str(exc)
                finally:
                    session.close()
                await asyncio.sleep(_RECONNECT_S)
        finally:
            context.destroy(linger=0)


class _Session:
    def __init__(
        self, context: zmq.asyncio.Context, endpoints: Endpoints, listener: Listener, story: VllmEvents
    ) -> None:
        self._context = context
        self._endpoints = endpoints
        self._listener = listener
        self._story = story
        self._order = EventOrder()
        self._told = 0
        self._began = False
        self._scope: anyio.CancelScope | None = None
        self.topics: set[bytes] = set()
        """Of the batches that were told before the engine's own topic was known."""
        self._replay_socket: zmq.asyncio.Socket | None = None
        self._live = context.socket(zmq.SUB)
        self._live.linger = 0
        # The index must hear everything: no bound here, the engine's side has one.
        self._live.rcvhwm = 0
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._live.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)

    async def run(self) -> None:
        """One session, from waiting for the engine to its end."""
        if self._endpoints.engine_binds():
            self._live.connect(self._endpoints.at_engine(self._endpoints.live))
        else:
            self._live.bind(self._endpoints.live)
        await self._until(zmq.Event.HANDSHAKE_SUCCEEDED)
        self._story.sessions += 1
        self._story.failure = ""
        self._began = True
        self._listener.began()
        async with anyio.create_task_group() as group:
            self._scope = group.cancel_scope
            group.start_soon(self._end_on_disconnect, group.cancel_scope)
            await self._tell(group.cancel_scope)

    def end(self) -> None:
        """Another one begins."""
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        if self._began:
            self._story.failure = "not connected"
            self._listener.ended()
        self._live.disable_monitor()
        for socket in (self._monitor, self._live, self._replay_socket):
            if socket is not None:
                socket.close(linger=0)

    async def _until(self, wanted: zmq.Event) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == wanted:
                return

    async def _end_on_disconnect(self, scope: anyio.CancelScope) -> None:
        await self._until(zmq.Event.DISCONNECTED)
        scope.cancel()

    async def _tell(self, scope: anyio.CancelScope) -> None:
        await self._replay()
        self._listener.caught_up()
        while True:
            if not await self._live.poll(_QUIET_MS):
                await self._replay()
                continue
            frames = await self._live.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8 or not self._is_engines(frames[0]):
                continue
            seq = int.from_bytes(frames[1], "big")
            turn = self._order.live(seq)
            if turn is Turn.GAP:
                self._story.gaps += 1
                await self._replay()
                if self._order.applied < seq:
                    self._miss_until(seq)
                    turn = self._order.replayed(seq)
                else:
                    turn = Turn.LATE
            if turn is Turn.RESTART:
                scope.cancel()
                return
            if turn is Turn.LATE:
                continue
            await self._hear(frames[2])

    def _is_engines(self, topic: bytes) -> bool:
        if self._story.topic is None:
            self.topics.add(topic)
            return True
        if topic != self._story.topic:
            self._listener.overheard(topic.decode("utf-8", "replace"))
            return False
        return True

    async def _hear(self, payload: bytes) -> None:
        try:
            self._listener.heard(engine_events.decode(payload))
        except EventsInvalid:
            self._listener.missed()
        self._told += 1
        if self._told % _BATCHES_IN_A_GO == 0:
            await asyncio.sleep(0)

    def _miss_until(self, seq: int) -> None:
        self._order.skip_to(seq)
        self._listener.missed()

    async def _replay(self) -> None:
        """Everything from the first missing batch to the engine's newest, as far as it still has them."""
        if not self._endpoints.replay:
            return
        asked_twice_for = -1
        while True:
            first = self._order.missing_from
            hole = await self._replay_from(first, may_skip=asked_twice_for == first)
            if not hole:
                return
            # Answers overrun the engine's queue and are dropped in the middle: ask again for what is missing. What is
            # missing at the beginning of two answers is lost.
            asked_twice_for = self._order.missing_from

    async def _replay_from(self, first: int, *, may_skip: bool) -> bool:
        """Applies one answer to its end; whether it had a hole (then nothing behind the hole was applied)."""
        socket = await self._ask_replay(first)
        hole = False
        while True:
            if not await socket.poll(_REPLAY_PATIENCE_MS):
                socket = await self._ask_replay(self._order.missing_from)
                continue
            frames = await socket.recv_multipart()
            if len(frames) < 3:
                continue
            if frames[-2] == _END_OF_REPLAY:
                return hole
            if not self._is_engines(frames[-3]):
                continue
            seq = int.from_bytes(frames[-2], "big")
            turn = self._order.replayed(seq)
            if turn is Turn.GAP and may_skip and not hole:
                self._miss_until(seq)
                turn = self._order.replayed(seq)
            if turn is Turn.GAP:
                hole = True
            elif turn is Turn.APPLY:
                await self._hear(frames[-1])

    async def _ask_replay(self, first: int) -> zmq.asyncio.Socket:
        # A new socket each time: an answer to an earlier question cannot be taken for this one's.
        if self._replay_socket is not None:
            self._replay_socket.close(linger=0)
        socket = self._replay_socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = 0
        socket.connect(self._endpoints.at_engine(self._endpoints.replay))
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        return socket
