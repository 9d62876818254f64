"""A cache tier behind the engine's memory that forgets whose blocks they are: a fault, to prove that it is noticed.

vLLM's ExampleConnector is such a one: it keeps what was computed by its tokens alone, so one salt's blocks are found
under another. Only whole chunks are kept, as other connectors do (LMCache: 256 tokens).

Owns: what is kept, for ever; the counts vLLM has of such a tier.   Must not know: blocks in memory, requests, time.
Units: tokens.   Source: facts/vllm.md (288 of 300 tokens leaked)."""

import xxhash

from .sequence import TokenSequence


class LeakyTier:
    """`keep` what was computed, `find` how much of a prompt is there."""

    def __init__(self, chunk_tokens: int) -> None:
        """:raises ValueError: a chunk of no tokens."""
        if chunk_tokens < 1:
            raise ValueError(f"a chunk of {chunk_tokens} tokens holds nothing")
        self.queries = 0
        self.hits = 0
        self._chunk_tokens = chunk_tokens
        self._kept: set[int] = set()

    def __repr__(self) -> str:
        return f"<LeakyTier {len(self._kept)} chunks of {self._chunk_tokens} tokens>"

    def keep(self, sequence: TokenSequence) -> None:
        self._kept.update(self._names(sequence))

    def find(self, sequence: TokenSequence) -> int:
        """How many tokens of it are kept, from the first on."""
        found = 0
        for name in self._names(sequence):
            if name not in self._kept:
                break
            found += self._chunk_tokens
        self.queries += sequence.length
        self.hits += found
        return found

    def _names(self, sequence: TokenSequence) -> list[int]:
        digest = xxhash.xxh3_64()
        names = []
        for start in range(0, sequence.length - self._chunk_tokens + 1, self._chunk_tokens):
            digest.update(sequence.ids[start : start + self._chunk_tokens].tobytes())
            names.append(digest.intdigest())
        return names
