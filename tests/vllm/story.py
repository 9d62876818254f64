"""What an engine holds, by its own word: its replayed block events, read here without any code of the bridge's."""

from collections import Counter
from typing import Any

import msgspec
import zmq

Hash = int | bytes
_PATIENCE_MS = 20_000
_END = b"\xff" * 8


class Story:
    """`copies` of each block hash that is held now. `batches` were told since the engine's start; `twice` blocks were
    stored while they were held; `orphaned` were left by a removal of their parents. `salts` are what beside tokens went
    into the names of first blocks."""

    def __init__(self) -> None:
        self.copies: Counter[Hash] = Counter()
        self.batches = 0
        self.twice = 0
        self.removed = 0
        self.orphaned = 0
        self.salts: set[str] = set()
        self._parents: dict[Hash, Hash | None] = {}
        self._children: Counter[Hash] = Counter()

    def __repr__(self) -> str:
        return f"<Story of {self.batches} batches, {len(self.copies)} blocks held, {self.removed} removed>"

    def add(self, events: list[dict[str, Any]]) -> None:
        self.batches += 1
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event["block_hashes"], event["parent_block_hash"])
                if event["parent_block_hash"] is None:
                    self.salts |= {key for key in (event.get("extra_keys") or [None])[0] or () if isinstance(key, str)}
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name)
            else:
                assert event["type"] == "AllBlocksCleared", event
                self.copies.clear()
                self._parents.clear()
                self._children.clear()

    def _store(self, names: list[Hash], parent: Hash | None) -> None:
        for name in names:
            self.twice += name in self.copies
            if name not in self.copies:
                self._parents[name] = parent
                if parent is not None:
                    self._children[parent] += 1
            self.copies[name] += 1
            parent = name

    def _remove(self, name: Hash) -> None:
        self.removed += 1
        self.copies[name] -= 1
        assert self.copies[name] >= 0, f"{name!r} was removed more often than stored"
        if self.copies[name]:
            return
        del self.copies[name]
        self.orphaned += self._children[name] > 0
        parent = self._parents.pop(name)
        if parent is not None:
            self._children[parent] -= 1


def read(replay: str) -> Story:
    """All that the engine at this replay address has told since its start, in order. It keeps 10,000 batches."""
    story = Story()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvhwm = 0
        socket.connect(replay)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert socket.poll(_PATIENCE_MS), f"no end of the replay from {replay}: {story!r}"
            frames = socket.recv_multipart()
            if frames[-2] == _END:
                return story
            seq = int.from_bytes(frames[-2], "big")
            assert seq == story.batches, f"batch {seq} after {story.batches} batches"
            story.add(msgspec.msgpack.decode(frames[-1])[1])
