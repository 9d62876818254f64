"""A steady load through the public subject, and what became of each request."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from prefixbus.bus.errors import PrefixbusError
from prefixbus.client import Client

from .cluster import ask, chat

# A request that has not ended by then hangs: longer than any lease, resend and restart together.
HANGS_AFTER_S = 40.0


class Result(msgspec.Struct, frozen=True):
    """How one request ended: `code` is ok, an error's code, short or hang; times are Unix seconds, as the journal's."""

    name: str
    code: str
    started_at: float
    ended_at: float
    attempts: int
    detail: str = ""


class Outage(NamedTuple):
    """When something died, or did not run: Unix seconds."""

    from_at: float
    until_at: float

    def overlaps(self, result: Result) -> bool:
        return result.started_at <= self.until_at and result.ended_at >= self.from_at


class Storm:
    """`async with Storm(client, rate_per_s) as storm:` keeps asking until it is left; then every request has ended."""

    def __init__(self, client: Client, rate_per_s: float, *, seed: int = 1, max_tokens: int = 20) -> None:
        self._client = client
        self._every_s = 1 / rate_per_s
        self._chance = random.Random(seed)
        self._max_tokens = max_tokens
        self._stop = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._asked = 0
        self.seed = seed
        self.results: list[Result] = []

    async def __aenter__(self) -> "Storm":
        self._asking = asyncio.create_task(self._ask_until_stopped())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._asking
        await asyncio.gather(*self._running)

    @property
    def ended_ok(self) -> int:
        return sum(result.code == "ok" for result in self.results)

    def codes(self) -> Counter[str]:
        return Counter(result.code for result in self.results)

    def failures(self, *allowed: str, of: Callable[[Result], bool] = lambda result: True) -> list[Result]:
        """Requests that ended otherwise than well; with these codes, only those that may: `of` says which."""
        return [
            result for result in self.results if result.code != "ok" and not (result.code in allowed and of(result))
        ]

    async def _ask_until_stopped(self) -> None:
        while not self._stop.is_set():
            task = asyncio.create_task(self._one(self._asked))
            self._asked += 1
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            try:
                async with asyncio.timeout(self._every_s * self._chance.uniform(0.5, 1.5)):
                    await self._stop.wait()
            except TimeoutError:
                pass

    async def _one(self, number: int) -> None:
        name = f"storm-{self.seed}-{id(self):x}-{number}"
        started = time.time()
        text = f"{self._chance.getrandbits(64):x} of topic {number % 5}: " + "why do requests wait? " * 20
        attempts = 0
        code, detail = "ok", ""
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                answer = await ask(
                    self._client, chat(text, max_tokens=self._max_tokens), request_id=name, deadline_s=HANGS_AFTER_S
                )
            attempts = max(answer.attempts, default=0)
            if answer.usage.get("completion_tokens") != self._max_tokens:
                code, detail = "short", str(answer.usage)
        except TimeoutError:
            code = "hang"
        except PrefixbusError as exc:
            code, detail = exc.code, exc.sentence()
        self.results.append(Result(name, code, started, time.time(), attempts, detail))
