"""Cancels, remembered for a while in case they overtake the request they mean.

Owns: who cancelled what, and when.   Must not know: requests in hand, NATS.   Units: seconds, monotonic."""

REMEMBER_S = 60.0
REMEMBER_MAX = 10_000


class Cancels:
    """Bounded memory by (tenant, client request id): a cancel means nothing to another tenant's request."""

    def __init__(self) -> None:
        self._heard_at: dict[tuple[str, str], float] = {}

    def heard(self, tenant: str, client_request_id: str, now: float) -> None:
        self._heard_at.pop((tenant, client_request_id), None)
        self._heard_at[tenant, client_request_id] = now
        if len(self._heard_at) > REMEMBER_MAX:
            del self._heard_at[next(iter(self._heard_at))]

    def covers(self, tenant: str, client_request_id: str, now: float) -> bool:
        """Whether such a request was cancelled within the last REMEMBER_S."""
        heard_at = self._heard_at.get((tenant, client_request_id))
        return heard_at is not None and now - heard_at < REMEMBER_S

    def __repr__(self) -> str:
        return f"<Cancels remembered={len(self._heard_at)}>"
