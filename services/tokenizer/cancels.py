"""Which of the tenants' cancels are passed on, and when: everybody hears those, so nobody may cause too many.

A tenant has a number of them to each turn; what is more waits for a later one, and a repeat within a turn is the same
cancel. Whoever floods delays and loses cancels of its own alone.

Owns: this turn's cancels, and those that wait.   Must not know: clocks, NATS, requests in hand."""

# 1000 a second with the service's tick of 0.2 s: 1 to 2 % of a router's or bridge's core.
PASSED_PER_TURN = 200
# More than one tokenizer has requests in hand.
WAITING_PER_TENANT = 4096


class Turnstile:
    """Passes each tenant's cancels on at a bounded rate, in the order they came."""

    def __init__(self) -> None:
        self._passed: dict[str, set[str]] = {}
        self._waiting: dict[str, dict[str, None]] = {}
        self.lost = 0

    def passes(self, tenant: str, client_request_id: str) -> bool:
        """Whether to pass it on now. If not, it was in this turn already, waits for the next, or is lost."""
        passed = self._passed.setdefault(tenant, set())
        if client_request_id in passed:
            return False
        if len(passed) < PASSED_PER_TURN:
            passed.add(client_request_id)
            return True
        waiting = self._waiting.setdefault(tenant, {})
        if client_request_id not in waiting and len(waiting) >= WAITING_PER_TENANT:
            self.lost += 1
        else:
            waiting[client_request_id] = None
        return False

    def turn(self) -> list[tuple[str, str]]:
        """A new turn; (tenant, client request id) of those that have waited and are passed on now."""
        waiting, self._waiting, self._passed = self._waiting, {}, {}
        return [
            (tenant, client_request_id)
            for tenant, waited in waiting.items()
            for client_request_id in waited
            if self.passes(tenant, client_request_id)
        ]

    def __repr__(self) -> str:
        return f"<Turnstile waiting={sum(map(len, self._waiting.values()))} lost={self.lost}>"
