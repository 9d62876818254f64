"""Streams read at once: everything comes, few are open, and nothing is left open by whoever leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from prefixbus.gateway.lanes import together


class Streams:
    """Streams of three items each, which say when they are open."""

    def __init__(self, count: int, *, broken: int = -1) -> None:
        self.open = 0
        self.most_open = 0
        self.begun = 0
        self.has_begun = asyncio.Event()
        self._count = count
        self._broken = broken

    async def one(self, number: int) -> AsyncGenerator[tuple[int, int], None]:
        self.open += 1
        self.begun += 1
        self.has_begun.set()
        self.most_open = max(self.most_open, self.open)
        try:
            for item in range(3):
                await asyncio.sleep(0)
                if number == self._broken and item:
                    raise ValueError(number)
                yield number, item
        finally:
            self.open -= 1

    def together(self, lanes: int) -> AsyncGenerator[tuple[int, int], None]:
        return together((self.one(number) for number in range(self._count)), lanes)


@pytest.mark.parametrize("lanes", [1, 3, 10])
async def test_everything_comes_and_each_streams_in_order(lanes: int) -> None:
    streams = Streams(10)

    found = [item async for item in streams.together(lanes)]

    assert sorted(found) == [(number, item) for number in range(10) for item in range(3)]
    assert all([item for at, item in found if at == number] == [0, 1, 2] for number in range(10))
    assert (streams.open, streams.most_open) == (0, lanes)


async def test_the_first_failure_is_the_wholes_and_closes_all_others() -> None:
    streams = Streams(10, broken=1)

    with pytest.raises(ValueError, match="1"):
        async for _ in streams.together(3):
            pass

    assert streams.open == 0
    assert streams.begun < 10


async def test_no_stream_waits_for_the_end_of_others() -> None:
    streams = Streams(9)

    found = [number async for number, _ in streams.together(3)]

    assert set(found[:6]) == {0, 1, 2}
    assert all(found[:6].count(number) == 2 for number in range(3))


async def test_whoever_leaves_leaves_nothing_open() -> None:
    streams = Streams(10)

    async with contextlib.aclosing(streams.together(3)) as found:
        await anext(found)

    assert streams.open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_whoever_is_cancelled_leaves_nothing_open() -> None:
    streams = Streams(1000)

    async def read() -> None:
        async with contextlib.aclosing(streams.together(3)) as found:
            async for _ in found:
                pass

    reading = asyncio.create_task(read())
    await streams.has_begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    assert streams.open == 0


async def test_nobody_reads_ahead_of_a_slow_reader() -> None:
    streams = Streams(10)

    async with contextlib.aclosing(streams.together(2)) as found:
        await anext(found)
        for _ in range(100):
            await asyncio.sleep(0)
        assert streams.begun == 2
