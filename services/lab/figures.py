"""What a run reports: the figures by which policies are compared.

    reused             prompt tokens that came from cache; token reuse = reused / prompt tokens of what engines began
    saved              what prefilling the reused tokens would have taken, by the fleet's profile
    net saved          saved - what requests waited for their engine: herding saves much, and loses it in queues
    warm, partial, cold    by what was found, not by what was predicted (bus.blockkeys.warmth)

Owns: these definitions.   Must not know: how a run is made, how figures are shown.
Units: ms, tokens, shares of 1; seconds of virtual time."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from ..bus.blockkeys import Warmth, warmth
from ..engine_sim.profile import Profile
from .results import Result, Served, Times, times

_SPILL = "spill-"
WARMTHS: tuple[Warmth, ...] = ("warm", "partial", "cold")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run's. A time is null where no request has it."""

    requests: int
    # How requests ended: ok, error, cancelled, shed.
    ended: dict[str, int]
    errors: dict[str, int]
    duration_s: float

    # Requests that found at least one block, of those that an engine began.
    request_hit_rate: float
    token_reuse: float
    prompt_tokens: int
    prefill_tokens_avoided: int
    prefill_ms_saved: float
    prefill_ms_saved_net: float

    # Of the reused tokens: fetched from workers' own host stores, and from other workers, with the bytes of these.
    loaded_tokens: int
    pulled_tokens: int
    transferred_bytes: int

    queue_ms: Times | None
    ttft_ms: Times | None
    ttft_ms_by_warmth: dict[str, Times | None]
    # From the first token on, a token: of requests with at least two.
    tpot_ms: Times | None
    e2e_ms: Times | None

    # Means over the samples of a run; 0 if it has none.
    copies_per_block: float
    kv_in_use: float
    kv_cached: float

    # The busiest worker to the mean of all: in requests, and in tokens computed.
    imbalance_requests: float
    imbalance_tokens: float
    # Of the requests that an engine began, by the router's reason: those that it did not send where most of their
    # prompt was. A rule has no reasons.
    left_warm_worker: dict[str, float]
    decisions: dict[str, int]
    refused: int
    given_back: int
    preemptions: int
    # Blocks that an engine served from other tokens or another tenant's: must be 0.
    wrong_hits: int
    lost_events: int


def figures(result: Result, profile: Profile, block_size: int) -> Figures:
    """`profile` is that of the run's engines, `block_size` that of its workload."""
    served = result.served
    begun = [one for one in served if one.cached_tokens is not None]
    prompt_tokens = sum(one.prompt_tokens for one in begun)
    reused = sum(_cached(one) for one in begun)
    saved_ms = sum(_saved_ms(one, profile) for one in begun)
    by_warmth: dict[str, list[float]] = {name: [] for name in WARMTHS}
    for one in begun:
        if one.ttft_ms is not None:
            by_warmth[warmth(one.prompt_tokens, _cached(one), block_size)].append(one.ttft_ms)
    spilled = Counter(one.decision.removeprefix(_SPILL) for one in begun if one.decision.startswith(_SPILL))
    return Figures(
        requests=len(served),
        ended=dict(sorted(Counter(one.status for one in served).items())),
        errors=dict(sorted(Counter(one.error for one in served if one.error).items())),
        duration_s=result.ended_at,
        request_hit_rate=sum(_cached(one) >= block_size for one in begun) / max(1, len(begun)),
        token_reuse=reused / max(1, prompt_tokens),
        prompt_tokens=prompt_tokens,
        prefill_tokens_avoided=reused,
        prefill_ms_saved=saved_ms,
        prefill_ms_saved_net=saved_ms - sum(one.queue_ms or 0.0 for one in begun),
        loaded_tokens=sum(one.loaded_tokens for one in served),
        pulled_tokens=sum(one.pulled_tokens for one in served),
        transferred_bytes=sum(one.transferred_bytes for one in served),
        queue_ms=_times(one.queue_ms for one in served),
        ttft_ms=_times(one.ttft_ms for one in served),
        ttft_ms_by_warmth={name: _times(some) for name, some in by_warmth.items()},
        tpot_ms=_times(_tpot_ms(one) for one in served),
        e2e_ms=_times(one.e2e_ms for one in served if one.status == "ok"),
        copies_per_block=_mean([sample.copies for sample in result.samples]),
        kv_in_use=_mean([sample.kv_in_use for sample in result.samples]),
        kv_cached=_mean([sample.kv_cached for sample in result.samples]),
        imbalance_requests=result.busiest_to_mean,
        imbalance_tokens=result.busiest_prefill_to_mean,
        left_warm_worker={reason: count / len(begun) for reason, count in sorted(spilled.items())},
        decisions=result.decisions,
        refused=sum(worker.refused for worker in result.workers),
        given_back=sum(worker.given_back for worker in result.workers),
        preemptions=sum(worker.preemptions for worker in result.workers),
        wrong_hits=sum(worker.wrong_hits for worker in result.workers),
        lost_events=result.lost_events,
    )


def _cached(one: Served) -> int:
    return one.cached_tokens or 0


def _saved_ms(one: Served, profile: Profile) -> float:
    computed = one.prompt_tokens - _cached(one)
    return profile.chunk_ms(one.prompt_tokens, one.prompt_tokens) - profile.chunk_ms(computed, one.prompt_tokens)


def _tpot_ms(one: Served) -> float | None:
    if one.status != "ok" or one.e2e_ms is None or one.ttft_ms is None or one.output_tokens < 2:
        return None
    return (one.e2e_ms - one.ttft_ms) / (one.output_tokens - 1)


def _times(some: Iterable[float | None]) -> Times | None:
    known = [one for one in some if one is not None]
    return times(known) if known else None


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))
