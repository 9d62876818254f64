"""What a directory said of who holds a prompt, with workers put at other depths by who knows better.

Must not know: NATS, where an answer came from.   Units: depths in blocks."""

from collections.abc import Mapping, Sequence

import msgspec

from ..bus.messages import Holdings, Level


def corrected(holdings: Holdings, worker: str, depth: int) -> Holdings:
    """The same, but this worker holds `depth` blocks: its own bridge has said so. That is believed whole, and includes
    what was announced."""
    return msgspec.structs.replace(
        holdings,
        levels=moved(holdings.levels, {worker: depth}),
        incomplete=[one for one in holdings.incomplete if one != worker],
        trust={one: share for one, share in holdings.trust.items() if one != worker},
        announced={one: blocks for one, blocks in holdings.announced.items() if one != worker},
    )


def moved(levels: Sequence[Level], depths: Mapping[str, int]) -> list[Level]:
    """The same, deepest first, but these workers hold that much in the GPU tier and nothing else there."""
    made = [
        Level(level.depth, workers, level.tier)
        for level in levels
        if (workers := [one for one in level.workers if level.tier != "gpu" or one not in depths])
    ]
    made += [Level(depth, [worker]) for worker, depth in depths.items() if depth > 0]
    made.sort(key=_depth, reverse=True)
    return made


def _depth(level: Level) -> int:
    return level.depth
