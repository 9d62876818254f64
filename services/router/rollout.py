"""Which policy decides a request: the active one, or for a share of the traffic a canary; and which one looks on.

A canary decides a share of the requests, or of those of one prefix class, chosen by a hash of the request's id: all
routers and all attempts agree on it, and nobody has to remember. A shadow decides every request too, and is only
recorded. What each would do next to the other is then read from the journal.

Owns: the forms of a canary and a shadow as people write them.   Must not know: NATS, how a policy decides."""

from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from ..bus.errors import ConfigInvalid, told_by_msgspec
from . import policy
from .policy import Policy

Role = Literal["active", "canary", "shadow"]
ROLES: tuple[Role, ...] = ("active", "canary", "shadow")
# Other than those of homes (bus/home.py).
_SEED = 0x726F6C6C6F7574
_HASHES = float(1 << 64)

T = TypeVar("T", "Canary", "Shadow")


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """JSON under the key `canary`: this policy decides a share (0 to 1) of the requests of a prefix class, of all if it
    is empty."""

    policy: Policy
    share: Annotated[float, Meta(ge=0, le=1)]
    prefix_class: Literal["", "system", "document", "session", "rag"] = ""

    def __str__(self) -> str:
        return f"{self.policy.label} for {100 * self.share:g} % of {self.prefix_class or 'all'} requests"


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """JSON under the key `shadow`: what this policy would choose is recorded with every decision."""

    policy: Policy


class Acting(NamedTuple):
    """The policy that decides, and by which right."""

    policy: Policy
    role: Role


class Rollout(msgspec.Struct, frozen=True):
    """All policies in force."""

    active: Policy
    canary: Canary | None = None
    shadow: Shadow | None = None

    def __str__(self) -> str:
        parts = [self.active.label]
        if self.canary is not None:
            parts.append(f"canary {self.canary}")
        if self.shadow is not None:
            parts.append(f"shadow {self.shadow.policy.label}")
        return ", ".join(parts)

    def acting(self, request_id: str, prefix_class: str) -> Acting:
        """Who decides this request; for one id and class always the same."""
        canary = self.canary
        if canary is not None and canary.prefix_class in ("", prefix_class):
            # The product is exact, and for a share of 1 above every hash.
            if xxhash.xxh3_64_intdigest(request_id.encode(), _SEED) < int(canary.share * _HASHES):
                return Acting(canary.policy, "canary")
        return Acting(self.active, "active")


def changed(rollout: Rollout, role: Role, data: bytes | None, configured: Policy) -> Rollout:
    """The rollout after this record of the bucket; None: the record is gone, so that the configured policy is active
    and there is no canary or shadow. :raises ConfigInvalid: it is refused, and nothing changes."""
    match role:
        case "active":
            return msgspec.structs.replace(rollout, active=configured if data is None else policy.parse(data))
        case "canary":
            return msgspec.structs.replace(rollout, canary=None if data is None else _parse(data, Canary))
        case "shadow":
            return msgspec.structs.replace(rollout, shadow=None if data is None else _parse(data, Shadow))


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        what, where = told_by_msgspec(exc)
        name = kind.__name__.lower()
        raise ConfigInvalid(what, field=f"{name}.{where}" if where else name, remedy=policy.CORRECT) from exc
    policy.known(found.policy)
    return found
