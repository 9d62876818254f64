"""What is worked on where: the loop gets its turn however many pieces a prompt has."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import orjson
import pytest
from support import models

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.model import TokenizerModel
from prefixbus.tokenizer.work import SLICE, SMALL_BYTES, Workshop, is_small

T = TypeVar("T")


class WithoutThreads(Workshop):
    """Every turn that the loop gets is one that the workshop gave it."""

    async def run(self, size: int, work: Callable[..., T], *args: object) -> T:
        return work(*args)


async def test_the_loop_turns_between_slices_of_a_prompt_of_many_pieces() -> None:
    """A megabyte that was all in the memo once was looked up in one go."""
    model = models.load(models.tiny())
    at = WithoutThreads(Memo(tenant_bytes=1 << 24, total_bytes=1 << 26), b"k" * 32, VirtualClock())
    messages = 1000
    body = orjson.dumps({"messages": [{"role": "user", "content": str(number)} for number in range(messages)]})
    request = intake.parse(body, "m", LimitsSection())
    first = await at.tokens(model, "acme", "", request, 1 << 20, len(body))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    second = await at.tokens(model, "acme", "", request, 1 << 20, len(body))
    turning.cancel()

    assert second.ids == first.ids
    assert second.memo_tokens > messages
    # A message is two special tokens and the texts between them.
    assert turns >= 4 * messages // SLICE - 1


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (orjson.dumps({"prompt": "x" * (SMALL_BYTES - 13)}), True),
        (orjson.dumps({"prompt": "x" * SMALL_BYTES}), False),
        (orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 63}), True),
        (orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 64}), False),
    ],
    ids=["one text", "one text too long", "63 messages", "64 messages"],
)
def test_a_body_is_small_in_bytes_and_in_parts(body: bytes, small: bool) -> None:
    assert is_small(body) is small


async def test_what_blocks_the_loop_is_caught_in_every_test() -> None:
    """The fixture in tests/conftest.py: loading a tokenizer takes seconds, and belongs in a thread."""
    with pytest.raises(ConfigInvalid, match="BlockingError"):
        TokenizerModel.load(models.tiny())

    await asyncio.to_thread(TokenizerModel.load, models.tiny())
