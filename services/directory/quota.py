"""Whose namespaces the index holds, and who has too many: a client's salts make as many as it likes.

An owner is learned from outcomes, which name a request's tenant and its namespace; nothing else here knows tenants.

Owns: owners of namespaces, of a bounded number.   Must not know: what is held, how useful it is, time."""

from collections.abc import Container


class Quota:
    """At most `each_max` namespaces an owner. Remembers the owners of `remembered_max`, about 300 bytes each, the least
    recently named are forgotten first."""

    def __init__(self, each_max: int, remembered_max: int) -> None:
        self.each_max = each_max
        self._remembered_max = remembered_max
        # Least recently named first.
        self._owners: dict[bytes, str] = {}
        self._owned: dict[str, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __repr__(self) -> str:
        return f"<Quota namespaces={len(self._owners)} owners={len(self._owned)}>"

    def named(self, ns_id: bytes, owner: str) -> None:
        """A request of this owner was in this namespace."""
        self._forget(ns_id)
        self._owners[ns_id] = owner
        self._owned.setdefault(owner, {})[ns_id] = None
        if len(self._owners) > self._remembered_max:
            self._forget(next(iter(self._owners)))

    def beyond(self, held: Container[bytes]) -> list[bytes]:
        """The held namespaces of an owner who has too many; none if nobody has."""
        for owned in self._owned.values():
            if len(owned) > self.each_max:
                theirs = [ns_id for ns_id in owned if ns_id in held]
                if len(theirs) > self.each_max:
                    return theirs
        return []

    def _forget(self, ns_id: bytes) -> None:
        owner = self._owners.pop(ns_id, None)
        if owner is not None:
            owned = self._owned[owner]
            del owned[ns_id]
            if not owned:
                del self._owned[owner]
