"""A log of requests as a trace: what is read of a line, and what goes out.

    {"messages": [...], "tools": [...], "timestamp": ..., "tenant": ..., "max_tokens": ..., "usage": {...}}

A line is an OpenAI chat-completions or completions body, or has it under `request` or `body`. It is read as the
tokenizer reads what clients publish: what is refused there is refused here. Beside the body, or in it:

    timestamp    Unix seconds (from 1e11 on: milliseconds), or ISO 8601, UTC unless it says otherwise
    tenant       who may share with whom; another field can be named, such as `user`
    class        the prefix class, as a client may give it
    usage        of the answer, or under `response`: its `completion_tokens` are the length of the answer

No text goes out, no name and no hash of either: blocks and tenants are numbered in the order in which they first come.

Owns: these forms.   Must not know: tokenizers, files.   Units: ms from the first request on, tokens."""

import math
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from ..bus import blockkeys
from ..bus.config import LimitsSection
from ..bus.errors import BadRequest, InvalidJson
from ..tokenizer import classify, intake
from ..tokenizer.classify import AnswerLengths
from ..tokenizer.intake import Request
from .traces import Line
from .workload import seed_of

# A Unix time in seconds is below this until the year 5138, one in milliseconds above it since 1973.
_MILLISECONDS_FROM = 1e11
# Of an answer for which no limit is given.
_LONGEST_ANSWER = 1 << 20
# Between requests of a log without times.
_APART_MS = 1000.0


class Entry(NamedTuple):
    """A line. `at_ms` is None where it has no time, `output_tokens` where nothing says how long the answer was."""

    request: Request
    at_ms: float | None
    tenant: str
    prefix_class: str
    output_tokens: int | None


def entry(line: bytes, limits: LimitsSection, tenant_field: str) -> Entry:
    """:raises PrefixbusError: it is no request, or none that would be served; the error names the field."""
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise InvalidJson(f"is not JSON: {exc}.", field="line") from exc
    if not isinstance(tree, dict):
        raise InvalidJson("is no object.", field="line")
    body = next((tree[name] for name in ("request", "body") if isinstance(tree.get(name), dict)), tree)
    model = body.get("model")
    request = intake.parse(orjson.dumps(body), model if isinstance(model, str) else "", limits)

    def named(name: str) -> Any:
        return tree.get(name) if tree.get(name) is not None else body.get(name)

    tenant, hint = named(tenant_field), named("class")
    if tenant is not None and not isinstance(tenant, str | int):
        raise BadRequest("is neither a text nor a number.", field=tenant_field)
    if hint is not None and hint not in intake.PREFIX_CLASSES:
        raise BadRequest(f"is none of {', '.join(intake.PREFIX_CLASSES)}.", field="class")
    return Entry(
        request,
        _at_ms(named("timestamp")),
        "" if tenant is None else str(tenant),
        classify.prefix_class(request, hint or ""),
        _output_tokens(tree),
    )


def _at_ms(given: Any) -> float | None:
    """:raises BadRequest: it is no time."""
    if given is None:
        return None
    try:
        if isinstance(given, str):
            moment = datetime.fromisoformat(given)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
        if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given >= 0:
            return float(given) if given >= _MILLISECONDS_FROM else given * 1000.0
    except (ValueError, OverflowError):
        pass
    raise BadRequest("is neither Unix seconds nor a time in ISO 8601.", field="timestamp")


def _output_tokens(tree: Mapping[str, Any]) -> int | None:
    """:raises BadRequest: a usage is there that counts nothing."""
    response = tree.get("response")
    usage = tree.get("usage") or (response.get("usage") if isinstance(response, dict) else None)
    if usage is None:
        return None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or not 0 <= tokens <= 1 << 32:
        raise BadRequest("is no count of tokens.", field="usage.completion_tokens")
    return tokens


class Trace:
    """The lines of a trace in the making, one for each request that is added."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lengths = AnswerLengths()
        self._blocks: dict[int, int] = {}
        self._tenants: dict[str, str] = {}
        self._lines: list[tuple[float | None, Line]] = []
        self.estimated_count = 0
        """Answers of unknown length: as long as others of the class, within the request's limit (the tokenizer's own
        estimate)."""

    def add(self, one: Entry, tokens: bytes) -> None:
        """`tokens` are the ids of its prompt: u32 LE, 4 bytes each; at least one."""
        output_tokens = one.output_tokens
        if output_tokens is None:
            self.estimated_count += 1
            limit = one.request.max_tokens or _LONGEST_ANSWER
            output_tokens = self._lengths.estimate(one.prefix_class, limit)
        else:
            self._lengths.observe(one.prefix_class, output_tokens)
        packed = blockkeys.chain(tokens, self._block_size, seed_of(one.tenant))
        keys = struct.unpack(f"<{len(packed) // 8}Q", packed)
        line = Line(
            timestamp=0.0,
            input_length=len(tokens) // 4,
            output_length=output_tokens,
            hash_ids=[self._blocks.setdefault(key, len(self._blocks)) for key in keys],
            tenant=self._tenants.setdefault(one.tenant, f"tenant-{len(self._tenants)}"),
            prefix_class=one.prefix_class,
        )
        self._lines.append((one.at_ms, line))

    @property
    def untimed_count(self) -> int:
        return sum(at_ms is None for at_ms, _ in self._lines)

    def lines(self) -> list[Line]:
        """In the order of time, from 0 on. Where no request has a time they come one a second; where some have, those
        without come with the one before them."""
        if self.untimed_count == len(self._lines):
            return [_at(line, _APART_MS * number) for number, (_, line) in enumerate(self._lines)]
        known = min(at_ms for at_ms, _ in self._lines if at_ms is not None)
        first_ms, timed = known, []
        for at_ms, line in self._lines:
            known = known if at_ms is None else at_ms
            timed.append(_at(line, known - first_ms))
        return sorted(timed, key=lambda line: line.timestamp)


def _at(line: Line, at_ms: float) -> Line:
    # Milliseconds to three digits: a Unix time in ms has no more in a float.
    return Line(round(at_ms, 3), line.input_length, line.output_length, line.hash_ids, line.tenant, line.prefix_class)
