"""What no cache of a size can pass, however it is divided and whoever places requests: one that knows the future.

Belady's rule (IBM Systems Journal 5, 1966), with the right to let a block pass: of the blocks in the cache and the one
that is asked for, the one that is asked for again last has to go. A block counts as found also behind one that is not,
so this is no less than what any cache finds of prompts' beginnings.

Owns: that rule.   Must not know: what blocks are.   Complexity: O(log n) a block."""

import heapq
from collections.abc import Sequence

_NEVER = float("inf")


def found(asked: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """How many blocks of each prompt are there when it is asked; a prompt has each of its blocks once."""
    next_asked: dict[int, float] = {}
    again: list[list[float]] = []
    for number in range(len(asked) - 1, -1, -1):
        again.append([next_asked.get(block, _NEVER) for block in asked[number]])
        for block in asked[number]:
            next_asked[block] = number
    again.reverse()
    kept: dict[int, float] = {}
    # (minus when it is asked again, block); of a block that was since asked for, entries that are no longer true.
    last: list[tuple[float, int]] = []
    counts = []
    for prompt, following in zip(asked, again, strict=True):
        counts.append(sum(block in kept for block in prompt))
        for block, when in zip(prompt, following, strict=True):
            kept.pop(block, None)
            if when != _NEVER:
                kept[block] = when
                heapq.heappush(last, (-when, block))
        while len(kept) > capacity:
            when, block = heapq.heappop(last)
            if kept.get(block) == -when:
                del kept[block]
    return counts
