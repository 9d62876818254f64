"""How long KV takes from one worker to another, learned from transfers: `setup_ms + ms_per_byte * bytes`.

A pair of workers starts from what all pairs together have shown, and all together from what is configured; each has
its own from its first transfer on. Estimates are bounded and robust as regression.py says. From its own host store a
worker loads at a rate that is configured.

Owns: one regression for each of the last MAX_PAIRS pairs.   Must not know: who may pull what, NATS, clocks.
Units: bytes, ms; KV in tokens of `kv_token_bytes` each.   Arithmetic only, like all that decisions are made from."""

import math
from collections import OrderedDict

from .regression import Regression

# A bridge's request with a ticket, answered, checked and renamed into place: no measurement yet.
SETUP_MS = 5.0
# The rate at which pulling was found worth 1 to 4 % (facts/policy.md); what is measured replaces it.
BYTES_PER_MS = 10e9 / 1000
# 256 workers have 65,000 pairs; those that transfer are few.
MAX_PAIRS = 4096


class Links:
    """Estimates for all pairs of workers of a model. `kv_token_bytes` is the KV of one token, in all layers.

    No bytes a ms: there is no such way, and all takes for ever."""

    def __init__(
        self,
        kv_token_bytes: int,
        *,
        setup_ms: float = SETUP_MS,
        bytes_per_ms: float = BYTES_PER_MS,
        host_bytes_per_ms: float = 0.0,
    ) -> None:
        self._kv_token_bytes = kv_token_bytes
        self._host_bytes_per_ms = host_bytes_per_ms
        self._busy_until: dict[str, float] = {}
        self._all = Regression((setup_ms, 1.0 / bytes_per_ms if bytes_per_ms else math.inf))
        self._pairs: OrderedDict[tuple[str, str], Regression] = OrderedDict()

    def transfer_ms(self, source: str, target: str, tokens: int) -> float:
        """From its own host store if the source is the target."""
        if source == target:
            return tokens * self._kv_token_bytes / self._host_bytes_per_ms if self._host_bytes_per_ms else math.inf
        known = self._pairs.get((source, target), self._all)
        return known.predict((1.0, tokens * self._kv_token_bytes))

    def wait_ms(self, source: str, target: str, now: float) -> float:
        """How long until those transfers are over that were begun on either's link; `now` in seconds."""
        if source == target:
            return 0.0
        free_at = max(self._busy_until.get(f">{source}", now), self._busy_until.get(f"<{target}", now))
        return max(0.0, free_at - now) * 1000

    def begun(self, source: str, target: str, tokens: int, now: float) -> None:
        """One was ordered: it goes once those before it are over."""
        if source != target:
            ends_at = now + (self.wait_ms(source, target, now) + self.transfer_ms(source, target, tokens)) / 1000
            self._busy_until = {line: at for line, at in self._busy_until.items() if at > now}
            self._busy_until[f">{source}"] = self._busy_until[f"<{target}"] = ends_at

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
