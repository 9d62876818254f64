"""How much of the beginning of prompts repeats, and what that is worth: the question before any router.

    common prefix    the blocks from the first on that an earlier request of the same tenant had, too
    infinite         a cache that forgets nothing: all that repeats is reused
    ceiling          a cache of all workers' bytes that knows the future: what placement alone can never pass
    pooled           one LRU of all workers' bytes: what good placement comes near
    in turn          an LRU on each worker, requests dealt in turn: what nobody needs a router for

Time does not pass here: each request is there before the next one comes, and takes no room for its answer. So these
are bounds of what can be reused, and nothing about queues.

The rule (`verdict`) is about prefill ms a request: pooled minus in turn is what choosing workers well comes near to
gaining. Go if that is at least SHARE of all prefill, and at least WORTH times what the way through the bus costs a
request. The ceiling minus in turn is said beside it: engines forget what was used least recently, and reach it seldom.

Owns: these bounds and the rule.   Must not know: policies, engines but for their prefill times.
Units: tokens, ms, shares of 1. An id of a trace's last block, which need not be full, counts as such a block, as in the
published figures of these traces."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ..engine_sim.profile import Profile
from . import clairvoyant
from .traces import Line

# What a request's way through the bus takes beside the engine's own (docs/performance.md, 4,000 tokens).
PATH_MS = 7.0
# A policy reaches a part of the bound, and what is gained must be worth running it.
WORTH = 2.0
SHARE = 0.05
# Borders of the histogram of common prefixes.
BORDERS = (1, 256, 1024, 4096, 16384, 65536)


class Prompt(NamedTuple):
    """`blocks` are numbers of chained blocks: equal in two prompts if all up to it is equal and one tenant's."""

    blocks: Sequence[int]
    tokens: int
    prefix_class: str


class Spread(msgspec.Struct, frozen=True):
    """Of common prefixes, in tokens: at rank ceil(q*n)."""

    p10: int
    p50: int
    p90: int
    p99: int
    longest: int


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """Of some requests: how much an infinite cache would give them."""

    requests: int
    # Those that have anything in common with an earlier one.
    repeating: int
    prompt_tokens: int
    reusable_tokens: int
    prefix_tokens: Spread
    # (from so many tokens, to below so many or null, requests)
    histogram: list[tuple[int, int | None, int]]

    @property
    def share(self) -> float:
        return self.reusable_tokens / max(1, self.prompt_tokens)


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What caches would give all requests."""

    token_reuse: float
    prefill_ms_saved: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill_ms` is what all prompts take with no cache at all."""

    workers: int
    kv_tokens: int
    profile: str
    all: Repeated
    by_class: dict[str, Repeated]
    prefill_ms: float
    infinite: Bound
    ceiling: Bound
    pooled: Bound
    in_turn: Bound
    go: bool
    verdict: str


def prompts(lines: Iterable[Line], trace_block: int) -> list[Prompt]:
    """In the order of a trace's time."""
    numbers: dict[tuple[str, int], int] = {}
    made = []
    for line in sorted(lines, key=lambda line: line.timestamp):
        blocks = [numbers.setdefault((line.tenant, block), len(numbers)) for block in line.hash_ids]
        made.append(Prompt(blocks[: -(-line.input_length // trace_block)], line.input_length, line.prefix_class))
    return made


class Cache:
    """Blocks in the order in which they were last wanted; of a prompt the tail goes first. None: room for all."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: Sequence[int]) -> int:
        """How many leading blocks were there; afterwards all are, as far as there is room."""
        known = self._blocks
        found = 0
        while found < len(blocks) and blocks[found] in known:
            found += 1
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        if self._capacity is not None:
            while len(known) > self._capacity:
                known.popitem(last=False)
        return found


def reused(asked: Sequence[Prompt], block_size: int, caches: Sequence[Cache]) -> list[int]:
    """The tokens that each prompt finds, if they are dealt to the caches in turn."""
    return [
        min(prompt.tokens, block_size * caches[number % len(caches)].serve(prompt.blocks))
        for number, prompt in enumerate(asked)
    ]


def report(asked: Sequence[Prompt], block_size: int, workers: int, kv_tokens: int, profile: Profile) -> Report:
    """:raises ValueError: there are no prompts."""
    if not asked:
        raise ValueError("no prompts")
    capacity = kv_tokens // block_size
    common = reused(asked, block_size, [Cache(None)])
    pooled = _bound(asked, reused(asked, block_size, [Cache(workers * capacity)]), profile)
    in_turn = _bound(asked, reused(asked, block_size, [Cache(capacity) for _ in range(workers)]), profile)
    at_most = clairvoyant.found([prompt.blocks for prompt in asked], workers * capacity)
    ceiling = _bound(
        asked, [min(one.tokens, block_size * count) for one, count in zip(asked, at_most, strict=True)], profile
    )
    prefill_ms = sum(profile.chunk_ms(prompt.tokens, prompt.tokens) for prompt in asked)
    go, sentence = verdict(len(asked), prefill_ms, ceiling, pooled, in_turn)
    classes = sorted({prompt.prefix_class for prompt in asked})
    return Report(
        workers=workers,
        kv_tokens=kv_tokens,
        profile=profile.name,
        all=_repeated(list(zip(asked, common, strict=True))),
        by_class={
            name: _repeated([pair for pair in zip(asked, common, strict=True) if pair[0].prefix_class == name])
            for name in classes
        },
        prefill_ms=prefill_ms,
        infinite=_bound(asked, common, profile),
        ceiling=ceiling,
        pooled=pooled,
        in_turn=in_turn,
        go=go,
        verdict=sentence,
    )


def verdict(requests: int, prefill_ms: float, ceiling: Bound, pooled: Bound, in_turn: Bound) -> tuple[bool, str]:
    """Whether it is worth while to choose workers by what they hold, and why."""
    gain_ms = max(0.0, pooled.prefill_ms_saved - in_turn.prefill_ms_saved)
    share, each_ms = gain_ms / prefill_ms if prefill_ms else 0.0, gain_ms / requests
    reasons = []
    if each_ms < WORTH * PATH_MS:
        reasons.append(f"less than {WORTH:g} times the {PATH_MS:g} ms that the way through the bus costs it")
    if share < SHARE:
        reasons.append(f"less than {SHARE:.0%} of all prefill")
    most_ms = max(0.0, ceiling.prefill_ms_saved - in_turn.prefill_ms_saved) / requests
    found = (
        f"choosing workers can save about {each_ms:.1f} ms of prefill a request ({share:.1%} of all) beyond what"
        f" requests find when they are dealt in turn, and never more than {most_ms:.1f} ms"
    )
    if reasons:
        return False, f"no-go: {found}: {' and '.join(reasons)}."
    return True, f"go: {found}, and the way through the bus costs {PATH_MS:g} ms."


def _bound(asked: Sequence[Prompt], found: Sequence[int], profile: Profile) -> Bound:
    saved_ms = 0.0
    for prompt, tokens in zip(asked, found, strict=True):
        whole_ms = profile.chunk_ms(prompt.tokens, prompt.tokens)
        saved_ms += whole_ms - profile.chunk_ms(prompt.tokens - tokens, prompt.tokens)
    tokens = sum(prompt.tokens for prompt in asked)
    return Bound(token_reuse=sum(found) / max(1, tokens), prefill_ms_saved=saved_ms)


def _repeated(pairs: list[tuple[Prompt, int]]) -> Repeated:
    common = sorted(tokens for _, tokens in pairs)
    count = len(common)
    p10, p50, p90, p99 = (common[-(-hundredths * count // 100) - 1] for hundredths in (10, 50, 90, 99))
    return Repeated(
        requests=count,
        repeating=sum(tokens > 0 for tokens in common),
        prompt_tokens=sum(prompt.tokens for prompt, _ in pairs),
        reusable_tokens=sum(common),
        prefix_tokens=Spread(p10, p50, p90, p99, common[-1]),
        histogram=[
            (low, high, sum(low <= tokens < (high or tokens + 1) for tokens in common))
            for low, high in zip((0, *BORDERS), (*BORDERS, None), strict=True)
        ],
    )
