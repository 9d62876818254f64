"""The router's neighbours, as small real services on a real bus: a bridge, a directory, a client with its tokenizer."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from nats.aio.msg import Msg

from prefixbus.bus import frames, namespace, subjects
from prefixbus.bus.connection import Bus, Subscription
from prefixbus.bus.errors import Cancelled
from prefixbus.bus.messages import (
    ABORT,
    ACCEPT,
    CONTROL_REPLY,
    DISPATCH,
    HOLDINGS,
    JOB,
    LOAD,
    LOOKUP,
    OUTCOME,
    ROUTE,
    VERSION,
    Accept,
    ControlReply,
    Dispatch,
    Holdings,
    Job,
    Level,
    Load,
    Outcome,
    Route,
)

MODEL, SERVES = "m", "digest"
BLOCK = 16
TENANT = "acme"
NS_ID = b"n" * 16


class FakeBridge:
    """A bridge without an engine. `answer(dispatch)` is its word on a dispatch: "" accepts, None says nothing, all else
    refuses with that reason. With `streams` an accepted attempt is answered at once, else the test drives it."""

    def __init__(self, bus: Bus, worker: str, **load: Any) -> None:
        self.bus = bus
        self.worker = worker
        # Whose heartbeats it sends.
        self.speaks_for = worker
        self.answer: Callable[[Dispatch], str | None] = lambda dispatch: ""
        self.streams = True
        self.deaf_to_control = False
        # Hears aborts, and answers nothing.
        self.mute_to_control = False
        self.forgets = False
        # Whether outcomes are dropped on their way.
        self.outcomes_get_lost = False
        self.queue_ms = 0.0
        # What its outcomes say.
        self.ttft_ms = 1.0
        self.incarnation = 1
        self.dispatches: list[Dispatch] = []
        self.aborts: list[tuple[str, int]] = []
        self.stages: dict[tuple[str, int], str] = {}
        self._load = load
        self._reports = itertools.count(1)
        self._accepted: list[str] = []
        self.replies: dict[tuple[str, int], str] = {}
        self._subscriptions: list[Subscription] = []
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> "FakeBridge":
        await self.be_back()
        self.beat()
        return self

    def beat(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def vanish(self) -> None:
        """As kill -9 does: no more heartbeats, and nobody listens."""
        self.go_silent()
        await self.be_away()

    async def be_back(self) -> None:
        self._subscriptions = [
            await self.bus.subscribe(subjects.work(self.worker), self._hear_dispatch),
            await self.bus.subscribe(subjects.control(self.worker, "*"), self._hear_abort),
        ]
        await self.bus.flush()

    async def be_away(self) -> None:
        """Nobody listens."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self.bus.flush()

    def go_silent(self) -> None:
        """As SIGSTOP does, for heartbeats."""
        if self._beating is not None:
            self._beating.cancel()

    async def report(self) -> None:
        values: dict[str, Any] = {
            "v": VERSION,
            "worker": self.speaks_for,
            "incarnation": self.incarnation,
            "report": next(self._reports),
            "event_seq": 0,
            "model": MODEL,
            "serves": SERVES,
            "queue_ms": self.queue_ms,
            "running": 0,
            "waiting": 0,
            "slots": 8,
            "kv_usage": 0.1,
            "kv_tokens": 100_000,
            "block_size": BLOCK,
            "draining": False,
            "accepted": list(self._accepted),
        }
        self._accepted.clear()
        await self.bus.publish(subjects.load(self.worker), LOAD.encode(Load(**(values | self._load))))

    async def start_answer(self, dispatch: Dispatch) -> None:
        """The notice, then the first frame."""
        self.stages[dispatch.request_id, dispatch.attempt] = "started"
        await self._say(dispatch, "started")
        job = JOB.decode(dispatch.job)
        headers = frames.chunk_headers(job.client_request_id, seq=0, attempt=dispatch.attempt)
        await self.bus.publish(job.reply, b'{"choices":[{"text":"hi"}]}', headers=headers)

    async def end_answer(self, dispatch: Dispatch, *, cancelled: bool = False) -> None:
        """The last frame and the outcome."""
        self.stages[dispatch.request_id, dispatch.attempt] = "ended"
        job = JOB.decode(dispatch.job)
        label = job.client_request_id
        if cancelled:
            headers = frames.error_headers(Cancelled(), label, attempt=dispatch.attempt)
        else:
            headers = frames.final_headers(label, seq=1, attempt=dispatch.attempt)
        await self.bus.publish(job.reply, b"", headers=headers)
        outcome = Outcome(
            v=VERSION,
            request_id=dispatch.request_id,
            client_request_id=label,
            attempt=dispatch.attempt,
            worker=self.worker,
            incarnation=self.incarnation,
            tenant=TENANT,
            model=MODEL,
            ns_id=NS_ID.hex(),
            status="cancelled" if cancelled else "ok",
            error="cancelled" if cancelled else "",
            prefix_class="session",
            decision=dispatch.decision,
            prompt_tokens=100,
            predicted_tokens=dispatch.predicted_tokens,
            cached_tokens=dispatch.predicted_tokens,
            prefill_tokens=100 - dispatch.predicted_tokens,
            output_tokens=1,
            queue_wait_ms=0.5,
            ttft_ms=self.ttft_ms,
            total_ms=2.0,
            ended_at=0.0,
        )
        if self.outcomes_get_lost:
            return
        msg_id = subjects.outcome_id(self.replies.get((dispatch.request_id, dispatch.attempt), self.worker))
        await self.bus.publish_acked(
            subjects.outcome(self.worker, dispatch.request_id), OUTCOME.encode(outcome), msg_id=msg_id
        )

    async def _say(self, dispatch: Dispatch, refused: str) -> None:
        request_id, attempt, life = dispatch.request_id, dispatch.attempt, self.incarnation
        accept = Accept(VERSION, request_id, attempt, self.worker, life, refused, self.queue_ms, 0)
        await self.bus.publish(self.replies[dispatch.request_id, dispatch.attempt], ACCEPT.encode(accept))

    async def _beat(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(0.1)

    async def _hear_dispatch(self, message: Msg) -> None:
        dispatch = DISPATCH.decode(message.data)
        attempt = (dispatch.request_id, dispatch.attempt)
        self.replies[attempt] = message.reply
        answer = "superseded" if self.stages.get(attempt) == "aborted" else self.answer(dispatch)
        self.dispatches.append(dispatch)
        if answer is None:
            return
        await self._say(dispatch, answer)
        if answer == "":
            self._accepted.append(dispatch.request_id)
            if self.streams:
                await self.start_answer(dispatch)
                await self.end_answer(dispatch)

    async def _hear_abort(self, message: Msg) -> None:
        if self.deaf_to_control:
            return
        abort = ABORT.decode(message.data)
        attempt = (abort.request_id, abort.attempt)
        if message.subject.endswith(".status"):
            stage = self.stages.get(attempt, "accepted" if attempt in self.replies else "")
            where = {"accepted": "running", "started": "running", "aborted": "given_back"}.get(stage, stage)
            await self._reply(message, "" if self.forgets else where)
            return
        self.aborts.append(attempt)
        stage = self.stages.get(attempt, "")
        if stage != "ended":
            self.stages[attempt] = "aborted"
        if message.reply and not self.mute_to_control:
            said = stage if stage in ("started", "ended") else ""
            await self._reply(message, said)

    async def _reply(self, message: Msg, said: str) -> None:
        reply = ControlReply(VERSION, self.worker, self.incarnation, said)
        await self.bus.publish(message.reply, CONTROL_REPLY.encode(reply))


class FakeDirectory:
    """Answers every lookup with `levels` and what else it has to say, or, while it `hangs`, none."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.levels: list[Level] = []
        self.more: dict[str, Any] = {}
        # What it answers instead, if anything.
        self.raw: bytes | None = None
        self.hangs = False
        self.asked = 0
        self._subscription: Subscription | None = None

    async def start(self) -> "FakeDirectory":
        self._subscription = await self._bus.subscribe(subjects.lookup(0), self._hear, queue="directory")
        return self

    async def go(self) -> None:
        """Nobody listens any more."""
        assert self._subscription is not None
        await self._subscription.unsubscribe()
        await self._bus.flush()

    async def _hear(self, message: Msg) -> None:
        LOOKUP.decode(message.data)
        self.asked += 1
        if self.hangs:
            return
        answer = HOLDINGS.encode(Holdings(VERSION, self.levels, **self.more)) if self.raw is None else self.raw
        await self._bus.publish(message.reply, answer)


class Answer:
    """What a client received for one request."""

    def __init__(self) -> None:
        self.chunks: list[Msg] = []
        self.keepalives: list[Msg] = []
        self.ends: list[Msg] = []

    @property
    def code(self) -> str:
        """The error code of the only end ("" if it ended well)."""
        assert len(self.ends) == 1
        headers = self.ends[0].headers
        assert headers is not None
        return headers.get(subjects.HEADER_ERROR, "")

    def header(self, name: str) -> str | None:
        headers = self.ends[0].headers
        assert headers is not None
        return headers.get(name)

    def hear(self, message: Msg) -> None:
        headers = message.headers or {}
        if subjects.HEADER_FINAL in headers:
            self.ends.append(message)
        elif subjects.HEADER_SEQ in headers:
            self.chunks.append(message)
        else:
            self.keepalives.append(message)


class Client:
    """A tenant's connection to listen with, and a tokenizer's to put routes on the bus."""

    def __init__(self, listening: Bus, tokenizer: Bus) -> None:
        self._listening = listening
        self._tokenizer = tokenizer
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> "Client":
        async def hear(message: Msg) -> None:
            with contextlib.suppress(KeyError):
                self._answers[message.subject.rsplit(".", 1)[1]].hear(message)

        await self._listening.subscribe(f"{self._listening.inbox_prefix}.q.*", hear)
        await self._listening.flush()
        return self

    async def send(
        self,
        wall: float,
        *,
        deadline_s: float = 60.0,
        keys: bytes = b"k" * 48,
        label: str = "",
        sending: int = 1,
        resumable: bool = False,
    ) -> Answer:
        number = str(next(self._numbers))
        answer = self._answers[number] = Answer()
        reply = f"{self._listening.inbox_prefix}.q.{number}"
        label = label or f"c{number}"
        fields: dict[str, Any] = {
            "v": VERSION,
            "request_id": f"R{number}",
            "client_request_id": label,
            "reply": reply,
            "deadline_at": wall + deadline_s,
            "prefix_class": "session",
        }
        whole = namespace.Namespace(TENANT, "", MODEL, "", "", "", "", "", "", "", "", BLOCK, bytes(16))
        job = Job(
            namespace=whole,
            tokens=keys[:4] + b"tail",
            kind="completions",
            params=b"{}",
            include_usage=False,
            created_at=int(wall),
            **fields,
        )
        route = Route(
            tenant=TENANT,
            model=MODEL,
            serves=SERVES,
            ns_id=NS_ID,
            keys=keys,
            prompt_tokens=len(keys) // 8 * BLOCK + 4,
            output_tokens=8,
            job=JOB.encode(job),
            kind=job.kind,
            created_at=job.created_at,
            sending=sending,
            resumable=resumable,
            **fields,
        )
        await self._tokenizer.publish(subjects.route(MODEL), ROUTE.encode(route))
        return answer

    async def cancel(self, label: str) -> None:
        await self._tokenizer.publish(subjects.cancelled(TENANT, label))
