"""What is known of who holds a prompt, corrected by who should know.

Must not know: NATS, where an answer came from.   Units: depths in blocks."""

import msgspec

from ..bus.messages import Holdings, Level


def corrected(holdings: Holdings, worker: str, depth: int) -> Holdings:
    """The same, but this worker holds `depth` blocks: its own bridge has said so. That is believed whole, and includes
    what was announced."""
    levels = []
    for level in holdings.levels:
        workers = [one for one in level.workers if one != worker] if level.tier == "gpu" else level.workers
        if workers:
            levels.append(Level(level.depth, workers, level.tier))
    if depth > 0:
        levels.append(Level(depth, [worker]))
        levels.sort(key=_depth, reverse=True)
    return msgspec.structs.replace(
        holdings,
        levels=levels,
        incomplete=[one for one in holdings.incomplete if one != worker],
        trust={one: share for one, share in holdings.trust.items() if one != worker},
        announced={one: blocks for one, blocks in holdings.announced.items() if one != worker},
    )


def _depth(level: Level) -> int:
    return level.depth
