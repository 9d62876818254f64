"""Whether the directory is worth waiting for: one that hangs must not cost every request its whole timeout.

After MISSES look-ups in a row without an answer requests are decided blind at once, but for one every PROBE_S that
asks; its answer ends that.

Owns: the count of misses.   Must not know: what a look-up is, NATS, clocks.   Units: seconds, monotonic."""

# With one replica of two hanging, four misses in a row come by chance once in 16; with all of them, at once.
MISSES = 4
PROBE_S = 0.5


class Patience:
    def __init__(self) -> None:
        self._misses = 0
        self._probe_at = 0.0

    def may_ask(self, now: float) -> bool:
        """Whether this request should ask; a yes while patience is out is the probe of the next PROBE_S."""
        if self._misses < MISSES:
            return True
        if now < self._probe_at:
            return False
        self._probe_at = now + PROBE_S
        return True

    def answered(self) -> None:
        self._misses = 0

    def missed(self, now: float) -> None:
        self._misses += 1
        if self._misses == MISSES:
            self._probe_at = now + PROBE_S

    def __repr__(self) -> str:
        return f"<Patience misses={self._misses}>"
