"""What choosing by cache gained a request, and what it gave up for it: the figures that metrics add up.

    saved   what the prefill of the tokens that came from cache would have taken, by the model and the speed that the
            decision priced the chosen worker with
    extra   how much longer the chosen worker's queue was than the shortest of all candidates, as the decision knew it
    net     saved - extra: both only grow, so they are two counters, and whoever looks takes the difference
    left    why a worker that holds more of the prompt was passed over: for the policy's reasons (`spill-` decisions),
            or since it was none of those who might have been chosen

Owns: these definitions.   Must not know: Prometheus, how a decision is made.   Units: ms, tokens, blocks."""

from collections.abc import Mapping

from ..bus.blockkeys import reusable_blocks
from ..bus.messages import Holdings
from . import cost
from .policy import Decision

_SPILL = "spill-"
TRIED = "tried"
"""An earlier attempt there did not come to an end."""
# Why a worker that may serve the request could not be chosen all the same.
_BARRED = frozenset(("busy", "draining", "suspect", "lost", TRIED))


def saved_prefill_ms(decision: Decision, prompt_tokens: int, cached_tokens: int) -> float:
    """By tokens that were really reused, not by those predicted."""
    candidate = decision.ranking[0].candidate
    computed = max(1, prompt_tokens - cached_tokens)
    whole_ms = cost.prefill_ms(candidate.model, prompt_tokens, prompt_tokens)
    return candidate.speed * max(0.0, whole_ms - cost.prefill_ms(candidate.model, computed, prompt_tokens))


def extra_queue_ms(decision: Decision) -> float:
    """Never negative."""
    return decision.queue_ms - min(terms.candidate.queue_ms for terms in decision.ranking)


def left_because(
    decision: Decision,
    holdings: Holdings | None,
    excluded: Mapping[str, str],
    *,
    prompt_tokens: int,
    block_size: int,
    min_reuse_tokens: int,
) -> str:
    """Empty if no worker holds at least `min_reuse_tokens` more than the chosen one, or nobody knows.

    A home that is chosen over a holder is no loss: it will hold the prefix from now on."""
    if decision.name.startswith(_SPILL):
        return decision.name.removeprefix(_SPILL)
    if holdings is None:
        return ""
    enough = decision.ranking[0].found_tokens + min_reuse_tokens
    reusable = reusable_blocks(prompt_tokens, block_size)
    for level in holdings.levels:
        if min(level.depth, reusable) * block_size < enough:
            return ""
        if level.tier != "gpu":
            continue
        reasons = [excluded.get(worker, "") for worker in level.workers]
        if "" in reasons:
            # It could have been chosen: the decision's name says why it was not.
            return ""
        barred = [reason for reason in reasons if reason in _BARRED]
        if barred:
            return barred[0]
    return ""
