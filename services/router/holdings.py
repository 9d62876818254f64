"""What a directory said of who holds a prompt: whether it can be true, and with workers put at other depths by who
knows better.

Must not know: NATS, where an answer came from.   Units: depths in blocks."""

from collections.abc import Mapping, Sequence

import msgspec

from ..bus.messages import NAMED_MAX, Holdings, Level, MessageInvalid


def check(holdings: Holdings, blocks: int) -> None:
    """Returns if it is an answer about a chain of so many blocks. Of one that cannot be, nothing is believed: what is
    wrong with the rest of it nobody knows.

    :raises MessageInvalid: the directory says that it does not know, or says what cannot be."""
    if holdings.refused:
        raise MessageInvalid(f"The directory does not know: {holdings.refused}")
    deepest, named = blocks, 0
    for level in holdings.levels:
        if level.depth > deepest:
            raise MessageInvalid(f"A depth of {level.depth} blocks where at most {deepest} can be.")
        deepest = level.depth
        named += len(level.workers)
    if named > NAMED_MAX:
        raise MessageInvalid(f"It names {named} workers.")


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
