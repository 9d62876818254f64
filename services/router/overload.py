"""When a request is refused because nobody could begin it soon, and when to come again.

A queue of prefill work is shorter by a millisecond each millisecond, so it is known when it will be short enough, if
nobody else comes. What idle workers do on the directory's order is in no queue, and no reason to refuse.

Owns: nothing.   Must not know: workers, requests, NATS, clocks.   Units: ms; whole seconds for clients."""

import math
from collections.abc import Sequence


def longest_ms(configured_ms: float, left_ms: float) -> float:
    """The longest queue to wait in: what is configured, and for no longer than until the request's deadline."""
    return min(configured_ms, max(0.0, left_ms))


def is_overloaded(queues_ms: Sequence[float], longest_ms: float) -> bool:
    """Whether each of the candidates, one at least, has more to do first."""
    return min(queues_ms) > longest_ms


def retry_after_s(open_ms: Sequence[float], full_ms: Sequence[float], longest_ms: float) -> int:
    """In how many seconds, 1 at least, the shortest queue is short enough.

    `open_ms` are the queues of workers with a free slot. Without any, those of the others, `full_ms`: what waits there
    has slots already, so the first to have begun all of it is the one to ask. When nothing is known it is 1."""
    if open_ms:
        over_ms = min(open_ms) - longest_ms
    else:
        over_ms = min(full_ms, default=0.0)
    return max(1, math.ceil(over_ms / 1000.0))
