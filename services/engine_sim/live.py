# ruff: noqa: TID251 - a shell: this is where the pure core meets the event loop's clock
"""The core driven by the event loop: each step takes its modelled time, then its events and tokens go out.

Owns: the pace, who waits for which request's tokens.   Must not know: HTTP, ZMQ.
The next step starts when the last one should have ended, not when the loop woke up: timers are coarse (uvloop: 1 ms)
and the error must not add up. Only after a real delay (a stalled process) does the schedule start anew."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from .core import EngineCore, StepResult
from .request import Request
from .sequence import NO_TOKEN
from .wire import KvEvent, events_of

STALL_MS = 50.0
"""Later than this and the lost time is not made up for: bursts of overdue steps would be no engine."""


class Scanner(Protocol):
    """What becomes of the text on its way out."""

    hit: str | None
    """Set where the output ends with this piece: the stop string, empty if there is none to tell of."""

    def push(self, piece: str) -> str: ...

    def flush(self) -> str: ...


class Publisher(Protocol):
    def publish(self, events: list[KvEvent]) -> None: ...


class Watcher(Protocol):
    def first_token(self, waited_ms: float, queued_ms: float, prefill_ms: float) -> None: ...

    def ended(self, total_ms: float, decode_ms: float) -> None: ...


class Generation:
    """One request's output on its way to a client. One reader; the engine never waits for it."""

    __slots__ = ("_pieces", "_scanner", "_text", "_waiter", "finish_reason", "request", "stop_reason")

    def __init__(self, request: Request, text: Callable[[int], str], scanner: Scanner | None) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self._text = text
        self._scanner = scanner
        self._pieces: list[tuple[int, str]] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all of it was asked for."""
        return self.finish_reason is not None and not self._pieces

    async def next(self) -> list[tuple[int, str]]:
        """(token, text) pairs in order, at least one. When it `has_ended` they are the last: do not ask again."""
        if not self._pieces and self.finish_reason is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def push(self, token: int) -> bool:
        """One more token; True if it completed a stop string."""
        text = self._text(token)
        if self._scanner is not None:
            text = self._scanner.push(text)
        self._pieces.append((token, text))
        self._wake()
        return self._scanner is not None and self._scanner.hit is not None

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._scanner is not None:
            self.stop_reason = self._scanner.hit or None
            if rest := self._scanner.flush():
                self._pieces.append((NO_TOKEN, rest))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveEngine:
    """Run `run` as a task; `submit` and `abort` from the same loop."""

    def __init__(
        self,
        core: EngineCore,
        text: Callable[[int], str],
        *,
        publisher: Publisher | None = None,
        watcher: Watcher | None = None,
        adapters: Mapping[str, int] | None = None,
        is_virtual: bool = False,
    ) -> None:
        """`is_virtual`: steps are not waited for, and the time that they would have taken is what passes."""
        self.core = core
        self._virtual_ms = 0.0 if is_virtual else None
        self._text = text
        self._publisher = publisher
        self._watcher = watcher
        self._adapters = adapters or {}
        self._generations: dict[Request, Generation] = {}
        self._wake = asyncio.Event()
        self._paused = False
        self._single_steps = 0  # still to be taken while paused

    def __repr__(self) -> str:
        return f"<LiveEngine {'paused, ' if self._paused else ''}{len(self._generations)} open, {self.core!r}>"

    @property
    def paused(self) -> bool:
        return self._paused

    def now_ms(self) -> float:
        if self._virtual_ms is not None:
            return self._virtual_ms
        return asyncio.get_running_loop().time() * 1000

    def submit(self, request: Request, scanner: Scanner | None = None) -> Generation:
        """Queue a request.

        :raises DoesNotFit: as `EngineCore.add_request`."""
        self.core.add_request(request)
        generation = Generation(request, self._text, scanner)
        self._generations[request] = generation
        self._wake.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """The client is gone; nothing happens if the request has ended."""
        request = generation.request
        if self._generations.pop(request, None) is not None:
            self.core.abort(request, self.now_ms())
            generation.finish("abort")

    def pause(self) -> None:
        """Take no further step until `resume`: lets a test look at an engine that is at work."""
        self._paused = True

    def step_once(self) -> None:
        """Take one more step although paused (it waits for work)."""
        self._single_steps += 1
        self._wake.set()

    def resume(self) -> None:
        self._paused = False
        self._single_steps = 0
        self._wake.set()

    async def run(self) -> None:
        """Step for as long as there is work, until cancelled."""
        start = self.now_ms()
        while True:
            if (self._paused and not self._single_steps) or not self.core.has_work:
                self._wake.clear()
                await self._wake.wait()
                start = self.now_ms()
                continue
            if self._paused:
                self._single_steps -= 1
            result = self.core.step(start)
            end = start + result.duration_ms
            if self._virtual_ms is not None:
                self._virtual_ms = end
            await asyncio.sleep(max(0.0, end - self.now_ms()) / 1000)
            self._deliver(result)
            now = self.now_ms()
            start = now if result.duration_ms == 0 or now - end > STALL_MS else end

    def _deliver(self, result: StepResult) -> None:
        if self._publisher is not None and (events := events_of(result, self.core.block_size, self._adapters)):
            self._publisher.publish(events)
        now = self.now_ms()
        generations = self._generations
        for request in result.first_tokens:
            if self._watcher is not None and request in generations:
                scheduled = request.arrived_ms if request.scheduled_ms is None else request.scheduled_ms
                queued = max(0.0, scheduled - request.arrived_ms)
                self._watcher.first_token(now - request.arrived_ms, queued, max(0.0, now - request.arrived_ms - queued))
        for request, token in result.emitted:
            generation = generations.get(request)
            if generation is not None and generation.push(token):
                self.core.abort(request, now, "stop")
                self._close(generation, "stop", now)
        for request in result.finished:
            if (generation := generations.get(request)) is not None:
                self._close(generation, request.finish_reason or "length", now)

    def _close(self, generation: Generation, reason: str, now_ms: float) -> None:
        request = generation.request
        del self._generations[request]
        generation.finish(reason)
        if self._watcher is not None:
            first = request.arrived_ms if request.first_token_ms is None else request.first_token_ms
            self._watcher.ended(now_ms - request.arrived_ms, max(0.0, now_ms - first))
