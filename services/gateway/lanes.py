# ruff: noqa: TID251 - a shell: it runs tasks
"""Several streams read at once, few at a time, as one.

A lane reads one stream to its end and takes the next; each item waits until it is taken, so a slow reader slows the
lanes. The first failure is the whole's; then, and when the reader leaves, every stream that has begun is closed before
the reader goes on.

Owns: the lanes' tasks.   Must not know: what streams."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

T = TypeVar("T")


class _Over:
    """A lane's end."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def together(streams: Iterator[AsyncGenerator[T, None]], lanes: int) -> AsyncGenerator[T, None]:
    """Items of all streams as they come: those of each in its order. `streams` is asked for the next one when a lane
    is free.

    :raises Exception: what the first stream that failed has raised."""
    ready: asyncio.Queue[T | _Over] = asyncio.Queue(1)
    # Of those who wait for a place in a queue the last may be the first; locks are taken in order.
    turn = asyncio.Lock()

    async def put(item: T | _Over) -> None:
        async with turn:
            await ready.put(item)

    async def lane() -> None:
        error: Exception | None = None
        try:
            for stream in streams:
                async with contextlib.aclosing(stream):
                    async for item in stream:
                        await put(item)
        except Exception as exc:  # it is the reader's
            error = exc
        await put(_Over(error))

    tasks = [asyncio.create_task(lane()) for _ in range(lanes)]
    running = lanes
    try:
        while running:
            item = await ready.get()
            if not isinstance(item, _Over):
                yield item
                continue
            running -= 1
            if item.error is not None:
                raise item.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
