"""Tokens of prefixes that several requests had, for as long as some worker may be wanted to compute them anew.

The directory knows which prefix should be where, but only by its key; a router that dispatched it had the tokens.
Nothing of a prompt but the prefix is kept, and only once the prefix is seen a second time; it is never sent anywhere
but to a worker, as a dispatch that is checked like any other.

Owns: the tokens, bounded in bytes, by tenant and by age; who dispatched each prefix last.
Must not know: NATS, clocks, workers, what is ordered.   Units: key u64; depth in blocks; tokens u32 LE; seconds."""

from collections import OrderedDict

import msgspec

from ..bus.messages import JOB, Route
from ..bus.namespace import Namespace

# Not used for this long, a prefix is forgotten.
KEPT_S = 600.0
# Prefixes seen once, at about 120 bytes each.
_SEEN_MAX = 8192
# Of an entry besides its tokens.
_ENTRY_BYTES = 1000

Id = tuple[bytes, int]
"""(namespace id, key of the prefix's last block)."""


class Prefix(msgspec.Struct, frozen=True):
    """A prefix of `blocks` whole blocks, and what it takes to have it computed."""

    namespace: Namespace
    serves: str
    ns_id: bytes
    keys: bytes
    tokens: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // 8

    @property
    def key(self) -> int:
        return int.from_bytes(self.keys[-8:], "little")

    @property
    def size(self) -> int:
        return len(self.tokens) + len(self.keys) + _ENTRY_BYTES


class _Kept:
    __slots__ = ("is_ours", "prefix", "used_at")

    def __init__(self, prefix: Prefix, now: float) -> None:
        self.prefix = prefix
        self.is_ours = True
        self.used_at = now


class Prefixes:
    """At most `bytes_max` of them, and `bytes_per_tenant` of one tenant's; the least lately used go first."""

    def __init__(self, bytes_max: int, bytes_per_tenant: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_per_tenant = bytes_per_tenant
        self._seen: OrderedDict[Id, None] = OrderedDict()
        # Least lately used first, by tenant.
        self._kept: dict[str, OrderedDict[Id, _Kept]] = {}
        self._bytes_of: dict[str, int] = {}
        self._tenant_of: dict[Id, str] = {}
        # The one namespace in use of each tenant, scope, model and so on: another one there is another revision.
        self._current: dict[Namespace, bytes] = {}
        self._keys_of: dict[bytes, dict[int, None]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __repr__(self) -> str:
        return f"<Prefixes {len(self)} of {len(self._kept)} tenants, {self._bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def dispatched(self, route: Route, blocks: int, block_size: int, now: float) -> None:
        """We sent a request of which so many blocks are held somewhere.

        :raises MessageInvalid: its job cannot be read."""
        blocks = min(blocks, len(route.keys) // 8)
        if not blocks or not self._bytes_max:
            return
        of = route.ns_id, _key(route.keys, blocks)
        tenant = self._tenant_of.get(of)
        if tenant is not None:
            kept = self._kept[tenant]
            kept[of].is_ours = True
            kept[of].used_at = now
            kept.move_to_end(of)
        elif self._was_seen(of):
            job = JOB.decode(route.job)
            if job.media:
                # Its images are in no token: nobody could compute it from these.
                return
            tokens = job.tokens[: 4 * block_size * blocks]
            self._keep(Prefix(job.namespace, route.serves, route.ns_id, route.keys[: 8 * blocks], tokens), now)

    def others(self, ns_id: bytes, keys: bytes, blocks: int) -> None:
        """Another router sent a request of which so many blocks are held somewhere."""
        blocks = min(blocks, len(keys) // 8)
        if not blocks or not self._bytes_max:
            return
        of = ns_id, _key(keys, blocks)
        tenant = self._tenant_of.get(of)
        if tenant is not None:
            self._kept[tenant][of].is_ours = False
        else:
            self._was_seen(of)

    def find(self, ns_id: bytes, key: int, *, ours: bool, now: float) -> Prefix | None:
        """The prefix, if it is here; with `ours`, only if nobody dispatched it after us."""
        tenant = self._tenant_of.get((ns_id, key))
        if tenant is None:
            return None
        kept = self._kept[tenant][ns_id, key]
        if now - kept.used_at > KEPT_S or (ours and not kept.is_ours):
            return None
        return kept.prefix

    def forget_namespace(self, ns_id: bytes) -> None:
        """It is not served any more."""
        for key in list(self._keys_of.get(ns_id, ())):
            self._drop((ns_id, key))

    def expire(self, now: float) -> None:
        """Forgets what nobody used for long; call it now and then."""
        for kept in list(self._kept.values()):
            while kept:
                of = next(iter(kept))
                if now - kept[of].used_at <= KEPT_S:
                    break
                self._drop(of)

    def _was_seen(self, of: Id) -> bool:
        """Whether it was; it is from now on."""
        was = of in self._seen
        self._seen[of] = None
        self._seen.move_to_end(of)
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)
        return was

    def _keep(self, prefix: Prefix, now: float) -> None:
        if prefix.size > min(self._bytes_max, self._bytes_per_tenant):
            return
        place = _place(prefix.namespace)
        before = self._current.get(place)
        if before is not None and before != prefix.ns_id:
            self.forget_namespace(before)
        self._current[place] = prefix.ns_id
        tenant = prefix.namespace.tenant
        of = prefix.ns_id, prefix.key
        self._kept.setdefault(tenant, OrderedDict())[of] = _Kept(prefix, now)
        self._tenant_of[of] = tenant
        self._keys_of.setdefault(prefix.ns_id, {})[prefix.key] = None
        self._bytes += prefix.size
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + prefix.size
        while self._bytes_of[tenant] > self._bytes_per_tenant:
            self._drop(next(iter(self._kept[tenant])))
        while self._bytes > self._bytes_max:
            greatest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._drop(next(iter(self._kept[greatest])))

    def _drop(self, of: Id) -> None:
        tenant = self._tenant_of.pop(of)
        kept = self._kept[tenant]
        prefix = kept.pop(of).prefix
        self._bytes -= prefix.size
        self._bytes_of[tenant] -= prefix.size
        if not kept:
            del self._kept[tenant], self._bytes_of[tenant]
        keys = self._keys_of[prefix.ns_id]
        del keys[prefix.key]
        if not keys:
            del self._keys_of[prefix.ns_id], self._current[_place(prefix.namespace)]


def _place(namespace: Namespace) -> Namespace:
    """What stays of a namespace when its revisions and its epoch change."""
    return msgspec.structs.replace(
        namespace,
        model_revision="",
        tokenizer_revision="",
        template_version="",
        adapter_revision="",
        media_revision="",
        position_digest="",
        kv_dtype="",
        block_size=0,
        acl_epoch=b"",
    )


def _key(keys: bytes, blocks: int) -> int:
    return int.from_bytes(keys[8 * blocks - 8 : 8 * blocks], "little")
