"""Token ids of texts seen before, for one tenant and scope at a time.

A shared memo would tell one tenant, by its speed, what another has sent: each tenant has a share of its own, a key
holds the scope, and no tenant's use ever pushes out another's entries. Keys are keyed hashes, so that nobody who sees
them (a core dump, a heap profile) can test a guess of the text.

    full share          its own oldest entries go
    full memo           a share that wants more gives up its own oldest entries; one that has none gets nothing
    idle share          goes whole after `idle_s`, by the clock alone

Owns: entries, their order and their bytes.   Must not know: models, texts (only their keys), clocks.
Units: bytes, ids u32 LE (4 bytes a token), seconds.   Source: facts/index.md (84 ms a 32k chat in full, 6 ms its next
turn)."""

import hashlib
from collections import OrderedDict

KEY_BYTES = 16
# What an entry costs beside its ids: key and value objects and their slot in the dict (sys.getsizeof, CPython 3.11).
ENTRY_OVERHEAD_BYTES = 250


def scope_key(secret: bytes, model: str, scope: str) -> bytes:
    """The hash key of one (tokenizer revision, scope): 32 bytes. `model` names the revision, not the model's name."""
    digest = hashlib.blake2b(key=secret, digest_size=32)
    digest.update(len(model.encode()).to_bytes(4, "big") + model.encode() + scope.encode())
    return digest.digest()


def text_key(key: bytes, text: str) -> bytes:
    """The name of a text under a `scope_key`: 16 bytes."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=KEY_BYTES).digest()


class _Share:
    __slots__ = ("entries", "held", "used_at")

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.held = 0
        self.used_at = 0.0


class Memo:
    """Bounded in bytes per tenant and altogether."""

    def __init__(self, *, tenant_bytes: int, total_bytes: int, idle_s: float = 900.0) -> None:
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._idle_s = idle_s
        self._shares: dict[str, _Share] = {}
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """What all entries cost, overhead included."""
        return self._held

    @property
    def entries(self) -> int:
        return sum(len(share.entries) for share in self._shares.values())

    def get(self, tenant: str, key: bytes, now: float) -> bytes | None:
        """The ids kept under `key`, now this tenant's most recently used; None if there are none."""
        share = self._shares.get(tenant)
        if share is None:
            return None
        ids = share.entries.get(key)
        if ids is not None:
            share.entries.move_to_end(key)
            share.used_at = now
        return ids

    def put(self, tenant: str, key: bytes, ids: bytes, now: float) -> bool:
        """Keeps `ids` under `key` if this tenant has or can make room for them; whether it did."""
        cost = len(ids) + ENTRY_OVERHEAD_BYTES
        share = self._shares.get(tenant)
        own = share.held if share is not None else 0
        if cost > self._tenant_bytes or self._held - own + cost > self._total_bytes:
            return False
        if share is None:
            share = self._shares[tenant] = _Share()
        share.used_at = now
        if key in share.entries:
            self._drop(share, key)
        while share.held + cost > self._tenant_bytes or self._held + cost > self._total_bytes:
            self._drop(share, next(iter(share.entries)))
        share.entries[key] = ids
        share.held += cost
        self._held += cost
        return True

    def forget(self, tenant: str) -> int:
        """Drops all of a tenant's entries (an erase of one of its scopes drops all of them); how many."""
        share = self._shares.pop(tenant, None)
        if share is None:
            return 0
        self._held -= share.held
        return len(share.entries)

    def expire(self, now: float) -> None:
        """Drops the shares of tenants that have been idle too long."""
        for tenant in [name for name, share in self._shares.items() if now - share.used_at > self._idle_s]:
            self.forget(tenant)

    def __repr__(self) -> str:
        return f"<Memo {len(self._shares)} tenants, {self.entries} entries, {self._held} bytes>"

    def _drop(self, share: _Share, key: bytes) -> None:
        cost = len(share.entries.pop(key)) + ENTRY_OVERHEAD_BYTES
        share.held -= cost
        self._held -= cost
