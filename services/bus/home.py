"""The worker that a prefix belongs to before anybody holds it: weighted rendezvous hashing.

Every router computes the same home without asking anyone, and a worker that leaves moves only its own prefixes.
The usual weighting takes a logarithm; here a worker enters with several tickets instead, one for each time its cache
holds the smallest one's (exact, and the same on every machine).

Must not know: what is held where.   Source: Thaler & Ravishankar, "Using name-based mappings to increase hit rates"
(1998)."""

from collections.abc import Iterable

import xxhash

MAX_TICKETS = 8

_hash = xxhash.xxh3_64_intdigest


def home(key: int, workers: Iterable[tuple[str, int]]) -> str:
    """The home of `key` (a block key) among (worker, kv_tokens) pairs, in any order; empty if there are none."""
    sized = list(workers)
    smallest = min((kv_tokens for _, kv_tokens in sized if kv_tokens > 0), default=1)
    best, best_score = "", -1
    for worker, kv_tokens in sized:
        name = worker.encode()
        score = _hash(name, key)
        if kv_tokens >= 2 * smallest:
            for ticket in range(1, min(MAX_TICKETS, kv_tokens // smallest)):
                score = max(score, _hash(name + b"\0" + bytes((ticket,)), key))
        if score > best_score or (score == best_score and worker > best):
            best, best_score = worker, score
    return best
