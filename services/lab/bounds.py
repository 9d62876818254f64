"""What placement is measured against: one cache for all workers, of their size together or without end.

Two ways to look at it. `token_reuse` plays the requests one after the other through the cache alone: what could be
reused if nothing took time. `shared_pool` is the memory of engines that have one cache together, for the harness: what
any of them computed all find, at no cost and from the step that computes it on, and a request fits if it fits anywhere.

The unbounded cache is a bound for everybody. The pooled one is a yardstick that placement comes near and seldom passes:
caches apart can keep what one LRU, flooded by what is never asked again, would lose; and its requests are placed by
load alone. What no placement can pass with so much memory is clairvoyant.py's.

Owns: both.   Must not know: how requests are placed, what a step costs.   Units: tokens, blocks."""

from collections import OrderedDict

from ..bus.errors import ConfigInvalid
from ..engine_sim.pool import BlockPool
from ..engine_sim.sequence import VirtualSequence
from .rules import Cache, cache_of
from .setup import Setup
from .workload import Workload


def token_reuse(workload: Workload, capacity_tokens: int | None) -> float:
    """Reused / prompt tokens with an LRU cache of this size, or without bound. As in an engine, output has KV, at least
    one token of a prompt is computed, and a chain's tail goes before its head."""
    size = workload.block_size
    capacity = None if capacity_tokens is None else capacity_tokens // size
    cache: OrderedDict[int, None] = OrderedDict()
    reused = asked = 0
    for number, arrival in enumerate(workload.arrivals):
        prompt = arrival.prompt_tokens
        keys = memoryview(arrival.keys).cast("Q").tolist()
        depth = next((depth for depth, key in enumerate(keys) if key not in cache), len(keys))
        reused += min(depth, (prompt - 1) // size) * size
        asked += prompt
        sequence = VirtualSequence(prompt, keys, number)
        # Its last token is emitted and has no KV.
        sequence.ensure_keys((prompt + arrival.output_tokens - 1) // size)
        for key in reversed(sequence.keys):
            cache[key] = None
            cache.move_to_end(key)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return reused / max(1, asked)


def shared_pool(setup: Setup, workload: Workload) -> BlockPool | None:
    """The memory of all engines together, if the run's policy is a bound.

    :raises ConfigInvalid: of a run in which some of them lose what they hold."""
    cache = cache_of(setup.policy)
    if cache is Cache.OWN:
        return None
    if setup.resets or setup.failures or setup.upgrade is not None:
        raise ConfigInvalid(
            "one cache of all workers cannot lose the part of one.",
            field="policies",
            remedy="Leave the bounds out of runs with faults.",
        )
    size = workload.block_size
    if cache is Cache.POOLED:
        default = setup.kv_tokens // size
        given = [tokens // size for tokens in setup.kv_tokens_of.values()]
        return BlockPool(default * (setup.workers - len(given)) + sum(given))
    # Enough for everything, with nothing ever given up.
    return BlockPool(1 + sum(-(-(one.prompt_tokens + one.output_tokens) // size) for one in workload.arrivals))
