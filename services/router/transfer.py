"""How long KV takes from one worker to another, learned from transfers: `setup_ms + ms_per_byte * bytes`.

A pair of workers starts from what all pairs together have shown, and all together from what is configured; each has
its own from its first transfer on. Estimates are bounded and robust as regression.py says.

Owns: one regression for each of the last MAX_PAIRS pairs.   Must not know: who may pull what, NATS, clocks.
Units: bytes, ms; KV in tokens of `kv_token_bytes` each.   Arithmetic only, like all that decisions are made from."""

from collections import OrderedDict

from .regression import Regression

# A bridge's request with a ticket, answered, checked and renamed into place: no measurement yet.
SETUP_MS = 5.0
# The rate at which pulling was found worth 1 to 4 % (facts/policy.md); what is measured replaces it.
BYTES_PER_MS = 10e9 / 1000
# 256 workers have 65,000 pairs; those that transfer are few.
MAX_PAIRS = 4096


class Links:
    """Estimates for all pairs of workers of a model. `kv_token_bytes` is the KV of one token, in all layers."""

    def __init__(self, kv_token_bytes: int, *, setup_ms: float = SETUP_MS, bytes_per_ms: float = BYTES_PER_MS) -> None:
        self._kv_token_bytes = kv_token_bytes
        self._all = Regression((setup_ms, 1.0 / bytes_per_ms))
        self._pairs: OrderedDict[tuple[str, str], Regression] = OrderedDict()

    def transfer_ms(self, source: str, target: str, tokens: int) -> float:
        known = self._pairs.get((source, target), self._all)
        return known.predict((1.0, tokens * self._kv_token_bytes))

    def learn(self, source: str, target: str, transferred_bytes: int, took_ms: float) -> bool:
        """A transfer came whole in this time; False if that is no measurement."""
        if transferred_bytes <= 0:
            return False
        features = (1.0, transferred_bytes)
        pair = self._pairs.get((source, target)) or Regression(self._all.coefficients)
        if not pair.learn(features, took_ms):
            return False
        self._all.learn(features, took_ms)
        self._pairs[source, target] = pair
        self._pairs.move_to_end((source, target))
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return True

    def __repr__(self) -> str:
        return f"<Links pairs={len(self._pairs)} {self._all!r}>"
