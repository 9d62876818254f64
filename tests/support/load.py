"""Clients that ask all the time, while something is done to a deployment."""

import asyncio
from collections.abc import Callable
from typing import Any

from prefixbus.bus.errors import PrefixbusError
from prefixbus.client import Client

from .cluster import MODEL, Answer, ask
from .nats import eventually

# Some answers, on a machine that starts processes meanwhile.
GOES_ON_S = 90.0


class Load:
    """`bodies` are asked together, round after round; every answer is kept, and the first error ends it."""

    def __init__(self, client: Client, bodies: Callable[[int], list[dict[str, Any]]], model: str = MODEL) -> None:
        """`bodies` of a round, by its number from 1."""
        self._client = client
        self._bodies = bodies
        self._model = model
        self.answers: list[Answer] = []
        self.failed: list[PrefixbusError] = []
        self._stopping = False

    async def run(self) -> None:
        number = 0
        while not self._stopping:
            number += 1
            asked = (ask(self._client, body, model=self._model) for body in self._bodies(number))
            try:
                self.answers += await asyncio.gather(*asked)
            except PrefixbusError as exc:
                self.failed.append(exc)
                return

    def stop(self) -> None:
        self._stopping = True

    async def goes_on(self, stage: str, answers: int = 12) -> None:
        """So many more answers have come since."""
        wanted = len(self.answers) + answers
        await eventually(
            lambda: bool(self.failed) or len(self.answers) >= wanted, f"{answers} more answers {stage}", GOES_ON_S
        )
        assert not self.failed, f"a request failed {stage}: {self.failed}"
