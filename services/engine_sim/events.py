# ruff: noqa: TID251 - an adapter: batches carry the wall clock's time, replay answers run on the event loop
"""The engine's KV event sockets: PUB for the live stream, ROUTER for replay, as vLLM's ZMQ publisher has them.

Live: [topic, seq (8 bytes big-endian), payload]; `seq` starts at 0 in every process.
Replay: a DEALER sends [b"", first seq (8 B BE)] and gets [b"", topic, seq, payload] for each kept batch from there on,
then [b"", b"", ff*8, b""]. The newest 10,000 batches are kept.

Owns: sockets, seq, the replay buffer.   Must not know: what a step is.
A publisher never waits for its subscribers: past the high-water mark batches are dropped, and replay fills the gap."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from .wire import EventBatch, KvEvent

REPLAY_BATCHES = 10_000  # vLLM's default buffer_steps
HIGH_WATER_MARK = 100_000  # vLLM's default hwm
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


def binds(endpoint: str) -> bool:
    """vLLM's rule for the live socket: wildcards, ipc and inproc bind; a plain tcp address is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class EventPublisher:
    """`publish` from the event loop's thread; run `answer_replays` as a task; `close` when done."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = REPLAY_BATCHES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._topic = topic.encode()
        self._wall = wall
        self._seq = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        # A plain PUB beside the loop-bound ROUTER: sending to PUB never blocks, so it needs no await.
        self._pub: zmq.Socket[bytes] = zmq.Socket(zmq.Context(self._context), zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        self._pub.linger = 0
        if binds(endpoint):
            self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)
        self.endpoint = str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        self._router: zmq.asyncio.Socket | None = None
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.linger = 0
            self._router.bind(replay_endpoint)
            self.replay_endpoint = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    def __repr__(self) -> str:
        return f"<EventPublisher {self.endpoint} next seq {self._seq}, {len(self._kept)} batches kept>"

    @property
    def next_seq(self) -> int:
        return self._seq

    def publish(self, events: list[KvEvent]) -> None:
        """Send one batch under the next seq."""
        payload = self._encode(EventBatch(ts=self._wall(), events=events))
        seq = self._seq.to_bytes(8, "big")
        self._seq += 1
        self._kept.append((seq, payload))
        self._pub.send_multipart((self._topic, seq, payload))

    async def answer_replays(self) -> None:
        """Serve the replay socket until cancelled."""
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("replay request with %d frames ignored", len(frames))
                continue
            peer, _, first = frames
            kept = list(self._kept)
            for number, (seq, payload) in enumerate(kept):
                if seq >= first:  # big-endian: bytes compare as the numbers do
                    await self._router.send_multipart((peer, b"", self._topic, seq, payload))
                if number % 256 == 255:
                    await asyncio.sleep(0)  # sends that need no waiting do not yield by themselves
            await self._router.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        self._pub.close()
        if self._router is not None:
            self._router.close()
        self._context.term()
