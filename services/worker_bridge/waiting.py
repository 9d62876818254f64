"""Accepted requests that the engine does not have yet, and whose turn it is.

The engine serves in the order in which it is asked, and cannot be asked to wait. So it gets no more uncached prefill at
once than keeps it busy, and the rest waits here, where order can still be chosen: fair between tenants by uncached
tokens, so that whoever sends most does not make all others wait; and fair between a tenant's warm and cold requests, so
that a unique request does not stand behind a tenant's whole hot queue. In order of arrival within each of these flows.

Fair is deficit round robin with a quantum of one token: all who wait earn alike, and whoever can pay for his next
request first is served. What two tenants that both wait are given never differs by more than one request's tokens.

What waits is passed over for nobody: a large request that does not fit into what is left of the window holds up the
smaller ones behind it, or it would starve.

Owns: the order, and the tokens that the engine has been given.
Must not know: what a request is, clocks.   Units: tokens without KV here (at least 1 a request).
Source: DESIGN 6 (Fair between tenants); M. Shreedhar and G. Varghese, Efficient Fair Queuing Using Deficit Round-Robin
(1995)."""

from typing import Generic, NamedTuple, Protocol, TypeVar

K = TypeVar("K")
Entry = tuple[str, int]
"""A request's id and its tokens."""


class _Line(Protocol):
    """Requests in an order."""

    def head(self) -> Entry: ...

    def pop(self, tokens: int) -> None:
        """The head goes, for that many tokens: by now it may be others than it came with."""

    def __bool__(self) -> bool: ...


class _Flow:
    """In order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, request_id: str, tokens: int) -> None:
        self._entries[request_id] = tokens

    def head(self) -> Entry:
        return next(iter(self._entries.items()))

    def pop(self, tokens: int) -> None:
        del self._entries[next(iter(self._entries))]

    def remove(self, request_id: str) -> None:
        del self._entries[request_id]


L = TypeVar("L", bound=_Line)


class _Fair(Generic[K, L]):
    """Lines that take turns. Each has earned some tokens since it came, less than its head costs."""

    def __init__(self) -> None:
        self.lines: dict[K, L] = {}
        self._earned: dict[K, int] = {}

    def __bool__(self) -> bool:
        return bool(self.lines)

    def join(self, name: K, line: L) -> L:
        self._earned[name] = 0
        return self.lines.setdefault(name, line)

    def leave_if_empty(self, name: K) -> None:
        """It takes nothing along: who comes back has earned nothing meanwhile."""
        if not self.lines[name]:
            del self.lines[name], self._earned[name]

    def head(self) -> Entry:
        return self.lines[self._first()].head()

    def pop(self, tokens: int) -> None:
        first = self._first()
        lacking = self._lacking(first)
        if lacking > 0:
            for name in self._earned:
                self._earned[name] += lacking
        line = self.lines.pop(first)
        # It joins the end: of those who can pay at the same time, the one that waited longer goes first.
        left = self._earned.pop(first) - tokens
        line.pop(tokens)
        self.lines[first] = line
        self._earned[first] = left
        self.leave_if_empty(first)

    def _first(self) -> K:
        return min(self.lines, key=self._lacking)

    def _lacking(self, name: K) -> int:
        return self.lines[name].head()[1] - self._earned[name]


class Ahead(NamedTuple):
    """What the engine was given while a request waited for its turn: of its own tenant, and of others."""

    own_tokens: int
    others_tokens: int


class _Place(NamedTuple):
    """Where a request waits, and what had been given when it came: in all, and of its tenant."""

    tenant: str
    is_warm: bool
    given_tokens: int
    given_own_tokens: int


class Waiting:
    """`come` with each request; `next_up`, and `begin_next`, until there is no room; `left` when its prefill is over or
    it goes away. All is O(tenants that wait)."""

    def __init__(self, window_tokens: int) -> None:
        self.window_tokens = window_tokens
        self._begun: dict[str, int] = {}
        self._begun_tokens = 0
        self._flows: dict[str, _Place] = {}
        self._given_tokens = 0
        # Of tenants that wait, since they do.
        self._given_of: dict[str, int] = {}
        self._tenants: _Fair[str, _Fair[bool, _Flow]] = _Fair()

    def __repr__(self) -> str:
        return f"<Waiting {len(self._flows)}, {self._begun_tokens} tokens with the engine>"

    def __len__(self) -> int:
        return len(self._flows)

    def has_room(self, tokens: int) -> bool:
        """For one more; there is always room for one alone."""
        return not self._begun or self._begun_tokens + tokens <= self.window_tokens

    def come(self, request_id: str, tenant: str, is_warm: bool, tokens: int) -> bool:
        """Whether it may go to the engine at once: nobody waits, and there is room. Else it waits."""
        if not self._flows and self.has_room(tokens):
            self._begin(request_id, tokens)
            return True
        given_own_tokens = self._given_of.setdefault(tenant, 0)
        self._flows[request_id] = _Place(tenant, is_warm, self._given_tokens, given_own_tokens)
        of_tenant = self._tenants.lines.get(tenant) or self._tenants.join(tenant, _Fair())
        flow = of_tenant.lines.get(is_warm) or of_tenant.join(is_warm, _Flow())
        flow.add(request_id, tokens)
        return False

    def next_up(self) -> str | None:
        """Whose turn it is, if there is room for it; it may cost less by now than when it came."""
        return self._tenants.head()[0] if self._tenants else None

    def begin_next(self, tokens: int) -> Ahead | None:
        """The next one goes to the engine, with that many tokens, after this; None, and it stays, if there is no
        room."""
        if not self.has_room(tokens):
            return None
        request_id = self._tenants.head()[0]
        self._tenants.pop(tokens)
        place = self._flows.pop(request_id)
        own_tokens = self._given_of[place.tenant] - place.given_own_tokens
        ahead = Ahead(own_tokens, self._given_tokens - place.given_tokens - own_tokens)
        self._given_of[place.tenant] += tokens
        self._forget_if_gone(place.tenant)
        self._begin(request_id, tokens)
        return ahead

    def left(self, request_id: str) -> None:
        """Its prefill is over, or it will never have one."""
        tokens = self._begun.pop(request_id, None)
        if tokens is not None:
            self._begun_tokens -= tokens
            return
        place = self._flows.pop(request_id)
        of_tenant = self._tenants.lines[place.tenant]
        of_tenant.lines[place.is_warm].remove(request_id)
        of_tenant.leave_if_empty(place.is_warm)
        self._tenants.leave_if_empty(place.tenant)
        self._forget_if_gone(place.tenant)

    def _forget_if_gone(self, tenant: str) -> None:
        if tenant not in self._tenants.lines:
            del self._given_of[tenant]

    def _begin(self, request_id: str, tokens: int) -> None:
        self._begun[request_id] = tokens
        self._begun_tokens += tokens
        self._given_tokens += tokens
