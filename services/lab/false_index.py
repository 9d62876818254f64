"""An index that is wrong about everything: it names a worker that does not hold the prompt, as holding all of it.

What is above it is as live: the directory trusts and announces, bridges refuse, by what comes of that.

Owns: whom it names.   Must not know: what is made of it.   Units: as directory/index.py."""

from collections.abc import Mapping

import xxhash

from ..directory.index import NOTHING, Index, Levels, Slots

_hash = xxhash.xxh3_64_intdigest


class FalseIndex(Index):
    """Each prompt is said to be with another worker, by `seed`; no two questions have the same answer, but those for
    one prompt while the same workers hold it."""

    def __init__(self, slots: Slots, seed: int) -> None:
        super().__init__(slots)
        self._seed = seed

    def lookup(self, ns_id: bytes, keys: bytes | memoryview, overlay: Mapping[int, int] = NOTHING) -> Levels:
        held = super().lookup(ns_id, keys, overlay)
        visible = self.slots.visible & ~(held[0][1] if held else 0)
        slots = [slot for slot in range(visible.bit_length()) if visible >> slot & 1]
        if not slots or not keys:
            return []
        return [(len(keys) // 8, 1 << slots[_hash(bytes(keys[-8:]), self._seed) % len(slots)])]
