"""Cancels, remembered for a while in case they overtake the request they mean.

Owns: who cancelled what, and when.   Must not know: requests in hand, NATS.   Units: seconds, monotonic.
Bounded per tenant: one tenant's flood pushes out none of another's. How many tenants there are is the operator's to
say, and one that cancels nothing for REMEMBER_S leaves nothing behind."""

# Longer than a request waits in a tokenizer, and than a router goes on trying.
REMEMBER_S = 60.0
# As many as one tokenizer has requests in hand; about 0.5 MB.
REMEMBER_PER_TENANT = 2048


class Cancels:
    """Memory by tenant and client request id: a cancel means nothing to another tenant's request."""

    def __init__(self) -> None:
        # Both orders are by time, the latest last: what is heard again is put at the end.
        self._heard_at: dict[str, dict[str, float]] = {}

    def heard(self, tenant: str, client_request_id: str, now: float) -> None:
        of_tenant = self._heard_at.pop(tenant, {})
        of_tenant.pop(client_request_id, None)
        of_tenant[client_request_id] = now
        if len(of_tenant) > REMEMBER_PER_TENANT:
            del of_tenant[next(iter(of_tenant))]
        self._heard_at[tenant] = of_tenant
        self._forget_the_silent(now)

    def covers(self, tenant: str, client_request_id: str, now: float) -> bool:
        """Whether such a request was cancelled within the last REMEMBER_S."""
        heard_at = self._heard_at.get(tenant, {}).get(client_request_id)
        return heard_at is not None and now - heard_at < REMEMBER_S

    def _forget_the_silent(self, now: float) -> None:
        """Tenants whose last cancel is over; amortised O(1)."""
        while True:
            tenant, of_tenant = next(iter(self._heard_at.items()))
            if now - of_tenant[next(reversed(of_tenant))] < REMEMBER_S:
                return
            del self._heard_at[tenant]

    def __len__(self) -> int:
        return sum(map(len, self._heard_at.values()))

    def __repr__(self) -> str:
        return f"<Cancels remembered={len(self)} tenants={len(self._heard_at)}>"
