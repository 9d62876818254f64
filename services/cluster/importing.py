# ruff: noqa: TID251 - an import is waited for
"""Logs of requests, tokenised as they would be served.

Owns: reading the log, and what becomes of each line.   Must not know: what a line's fields mean, what a trace is."""

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..bus.clock import RealClock
from ..bus.config import LimitsSection
from ..bus.errors import BadRequest, ConfigInvalid, PrefixbusError
from ..lab import requestlog
from ..tokenizer.memo import Memo
from ..tokenizer.model import TokenizerModel
from ..tokenizer.work import Workshop

# A prompt that was served had room somewhere; only what no model takes is refused.
MAX_MODEL_LEN = 1 << 24
# What is remembered of texts that come again: a log's system prompts, and more.
_MEMO_BYTES = 256 << 20
_SAYS_EVERY = 1000


class Problem(NamedTuple):
    """Lines (numbers from 1 on) of which no request could be made, and why."""

    sentence: str
    lines: list[int]


class Imported(NamedTuple):
    """`line_count` lines were not empty; each is in the trace or in a problem."""

    trace: requestlog.Trace
    problems: list[Problem]
    line_count: int


def read(log: Path, model: Path, block_size: int, tenant_field: str, say: Callable[[str], None]) -> Imported:
    """:raises ConfigInvalid: there is no tokenizer in `model`, or the log cannot be read."""
    return asyncio.run(_read(log, TokenizerModel.load(model), block_size, tenant_field, say))


async def _read(
    log: Path, model: TokenizerModel, block_size: int, tenant_field: str, say: Callable[[str], None]
) -> Imported:
    clock = RealClock()
    # What is remembered ends with this process, and with it whatever its key is good for.
    workshop = Workshop(Memo(tenant_bytes=_MEMO_BYTES, total_bytes=_MEMO_BYTES), secrets.token_bytes(32), clock)
    limits = LimitsSection()
    trace = requestlog.Trace(block_size)
    problems: dict[str, Problem] = {}
    count = 0
    try:
        with log.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                count += 1
                try:
                    one = requestlog.entry(line, limits, tenant_field)
                    tokens = await workshop.tokens(model, one.tenant, "", one.request, MAX_MODEL_LEN, len(line))
                    if not tokens.ids:
                        raise BadRequest("is empty.", field="prompt")
                except PrefixbusError as exc:
                    sentence = f"{exc.field}: {exc.message}" if exc.field else exc.message
                    problems.setdefault(sentence, Problem(sentence, [])).lines.append(number)
                else:
                    trace.add(one, tokens.ids)
                if count % _SAYS_EVERY == 0:
                    say(f"{count} lines")
    except OSError as exc:
        raise ConfigInvalid(str(exc), field=str(log), remedy="Name a file that can be read.") from exc
    return Imported(trace, list(problems.values()), count)
