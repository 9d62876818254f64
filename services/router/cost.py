"""What a request costs on a worker: the terms of the decision, each by itself.

    ttft = wait + prefill + interference + memory wait
    cost = ttft + new-KV price * KV price + decode price * interference + externality * work - home bonus  (DESIGN 6)

Owns: the formulas and the prefill profiles that price a model until its workers are measured.
Must not know: workers, requests, which term wins, clocks.
Units: milliseconds and tokens.   Source: facts/policy.md ("F"). Arithmetic only: a recorded decision must come out
bit for bit on another machine, and libm's transcendentals differ between them."""

import msgspec

from ..bus.errors import ConfigInvalid


class PrefillModel(msgspec.Struct, frozen=True, array_like=True):
    """Prefill time of one (machine, model) pair: `fixed_ms + token_ms*n + attention_ms*n*(L - n/2)` for n uncached
    tokens of a prompt of L, and what decoding beside it adds to each step.

    `step_tokens` is the engine's budget of a step: a longer prompt takes more of them."""

    fixed_ms: float
    token_ms: float
    attention_ms: float
    decode_context_token_ms: float
    step_tokens: int = 8192


# The engine simulator has the same figures and says where they come from (engine_sim/profile.py): `fixed_ms` is its
# step_ms + prefill_step_ms.
PROFILES: dict[str, PrefillModel] = {
    "h100-8b": PrefillModel(5.74 + 16.0, 0.0172, 4e-8, 5.2e-5),
    "a100-8b": PrefillModel(5.74 + 4.8 * 0.64 + 16.0, 0.0172 * 2.4, 4e-8 * 2.4, 5.2e-5 * 1.64),
    "h100-70b": PrefillModel(5.74 + 4.8 * 1.19 + 2.0 + 16.0, 0.0172 * 2.19 * 1.2, 4e-8 * 1.25, 5.2e-5 * 0.625),
    "instant": PrefillModel(0.0, 0.0, 0.0, 0.0),
}


def profile_of(model: str, profile: str) -> PrefillModel:
    """The profile that the config names for a model. :raises ConfigInvalid: there is none of this name."""
    if profile not in PROFILES:
        raise ConfigInvalid(
            f"{profile[:80]!r} is not a profile.",
            field=f"models.{model}.profile",
            remedy=f"Use one of: {', '.join(PROFILES)}.",
        )
    return PROFILES[profile]


def kv_price_ms(model: PrefillModel, uncached_tokens: int, prompt_tokens: int) -> float:
    """Computing the KV of the last `uncached_tokens` of the prompt, without the fixed part of a step."""
    context = prompt_tokens - uncached_tokens / 2
    return model.token_ms * uncached_tokens + model.attention_ms * uncached_tokens * context


def prefill_ms(model: PrefillModel, uncached_tokens: int, prompt_tokens: int) -> float:
    """From the start of its first step to the first token, alone on the engine."""
    return model.fixed_ms + kv_price_ms(model, uncached_tokens, prompt_tokens)


def work_ms(model: PrefillModel, uncached_tokens: int, prompt_tokens: int) -> float:
    """What this prefill adds to a queue: its KV, and its share of the fixed part of the steps it is computed in.

    Prefills that wait together are computed in one step of `step_tokens`. Counting the whole fixed part for each would
    make a burst of siblings look 20 times as long as it is, and send each of them to prefill on another worker."""
    share = uncached_tokens / model.step_tokens
    return model.fixed_ms * share + kv_price_ms(model, uncached_tokens, prompt_tokens)


def parts_ms(model: PrefillModel, uncached_tokens: int, prompt_tokens: int) -> tuple[float, float, float]:
    """`prefill_ms`, `kv_price_ms` and `work_ms` of the same prefill, to the last bit, in a third of the time."""
    kv_ms = kv_price_ms(model, uncached_tokens, prompt_tokens)
    return model.fixed_ms + kv_ms, kv_ms, model.fixed_ms * (uncached_tokens / model.step_tokens) + kv_ms


def wait_ms(model: PrefillModel, queue_ms: float, queue_share: float) -> float:
    """Until a request that is dispatched to a worker with so much prefill work ahead is begun there.

    A step that has begun must end, and the worker pays the fixed part of one more: a millisecond of work left is a wait
    of some twenty. Of a long queue it is less than what is counted, since a request counts in full until its first
    token."""
    return 0.0 if queue_ms <= 0.0 else model.fixed_ms + queue_share * queue_ms


def interference_ms(model: PrefillModel, uncached_tokens: int, pinned_tokens: int) -> float:
    """What the sequences in decode add to the steps of this prefill; `pinned_tokens` stands for their context."""
    steps = -(-uncached_tokens // model.step_tokens)
    return model.decode_context_token_ms * pinned_tokens * steps


def memory_wait_ms(needed_tokens: int, free_tokens: int, pinned_tokens: int, turnover_ms: float) -> float:
    """How long until the KV that is missing has been given back, if all that is pinned goes in `turnover_ms`.

    `needed_tokens` are those the request adds (uncached and output); what it finds held is in neither sum."""
    missing = needed_tokens - free_tokens
    if missing <= 0:
        return 0.0
    if missing >= pinned_tokens:
        return turnover_ms
    return turnover_ms * missing / pinned_tokens


def externality(rho: float, cap: float) -> float:
    """What one ms of prefill costs those who come after, in ms: rho/(1-rho) for a worker busy a share `rho` of its
    time, at most `cap`.

    Capped because rho is an estimate, and because a worker short of KV is not made faster by more patience."""
    if rho <= 0.0:
        return 0.0
    if rho >= 1.0:
        return cap
    return min(cap, rho / (1.0 - rho))
