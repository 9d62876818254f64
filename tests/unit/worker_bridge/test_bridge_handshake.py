"""Tiers behind the engine's memory that the handshake must see through, by engines that are nothing but such a tier."""

import contextlib
import secrets
from array import array
from collections.abc import AsyncIterator

import pytest

from prefixbus.bus.errors import WorkerRefused
from prefixbus.worker_bridge.chunks import Usage
from prefixbus.worker_bridge.engine import Generation, Progress
from prefixbus.worker_bridge.handshake import examine
from prefixbus.worker_bridge.misfits import EngineSettings, ServedModel

BLOCK = 32
MODEL = "org/tiny"


class EngineWithTier:
    """Its memory keeps one block under its salt. Its tier is vLLM's ExampleConnector: prompts as wholes, without salts,
    kept by their first `(n - 1) // 32` blocks and looked for by their first `(n - 2) // 32`."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.longest = 0
        self._memory: set[tuple[str, bytes]] = set()
        self._kept: set[bytes] = set()

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        yield self._answer(request)

    async def _answer(self, request: Generation) -> AsyncIterator[Progress]:
        tokens = array("I", request.tokens)
        length = len(tokens)
        self.longest = max(self.longest, length)
        assert length < self.max_model_len
        own = request.salt, tokens[:BLOCK].tobytes()
        cached = BLOCK if length > BLOCK and own in self._memory else 0
        asked = (length - 2) // BLOCK * BLOCK
        if asked and tokens[:asked].tobytes() in self._kept:
            cached = asked
        self._memory.add(own)
        self._kept.add(tokens[: (length - 1) // BLOCK * BLOCK].tobytes())
        yield Progress([], Usage(length, 1, cached))

    async def health(self) -> None: ...

    async def served_models(self) -> list[ServedModel]:
        return [ServedModel(MODEL, self.max_model_len)]

    async def settings(self) -> EngineSettings:
        return EngineSettings(block_size=BLOCK)

    async def has_another_tier(self) -> bool:
        return True

    async def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None: ...


# The last ones are shorter than the longest probe, and end at and around the ends of blocks.
@pytest.mark.parametrize("max_model_len", [8192, 1058, 1057, 1026, 1025, 1024, 500, 70])
async def test_a_tier_that_keeps_whole_prompts_without_their_salts_is_found_out(max_model_len: int) -> None:
    engine = EngineWithTier(max_model_len)

    with pytest.raises(WorkerRefused, match="in a tier beyond its own memory"):
        await examine(engine, model=MODEL, block_size=BLOCK, one_time_salt=lambda: secrets.token_hex(16))

    assert engine.longest > min(1024, max_model_len - 2 * BLOCK)
