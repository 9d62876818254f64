"""Of a whole fleet, the few workers that a decision is between.

`policy.decide` among these decides as it would among everybody: for the same worker, under the same name, with the same
bounds. That takes the cheapest of all, the cheapest that no cap bars, the cheapest of those that find most (whoever
leaves them says why), and who sets the caps: the shortest queue, and the soonest of those that find least. A bonus only
makes cheaper, so those who get one are the caller's to add; so is, if there are offers to pull, who could use one.

Pricing everybody would cost more than all the rest of a decision. A worker's cost is at least the wait and the prefill
and the new KV of what it lacks, were it as fast as the fastest: those who lack as much are taken by queue, and the more
they lack the later, until even that is too much.

Owns: nothing.   Must not know: what is held where, what a decision is called, NATS.   Units: ms, tokens."""

import math
from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from . import cost
from .cost import PrefillModel
from .fleet import Available
from .policy import NO_LIMIT_MS, Caps, Policy, RequestShape, barred, caps_of

# Sums of floats in another order differ by less than this share; nobody is left out for a rounding.
_SLACK = 1.0 + 1e-9


class Group(NamedTuple):
    """Available workers of one model that find as much of the prompt, by queue; at least one."""

    cached_tokens: int
    model: PrefillModel
    workers: list[Available]


class Speeds(NamedTuple):
    """`of` a worker as a factor of its model's time, asked only of those who are not at 1; `least` is nobody below."""

    odd: frozenset[str]
    of: Callable[[Available], float]
    least: float


def contenders(
    request: RequestShape, groups: list[Group], policy: Policy, speeds: Speeds, now: float
) -> list[Available]:
    """Each available worker is in one of the groups: at least one, those that find most first. Some may be named
    twice."""
    most, least = groups[0].cached_tokens, groups[-1].cached_tokens
    coldest = [group for group in groups if group.cached_tokens == least]
    shortest = min((group.workers[0] for group in groups), key=_queue_ms)
    contest = _Contest(request, policy, speeds, shortest.queue_ms, now)
    soonest, soonest_ms = coldest[0].workers[0], NO_LIMIT_MS
    if policy.margin_ms is not None:
        soonest, soonest_ms = contest.soonest(coldest)
    caps = caps_of(request, policy, least, shortest.queue_ms, soonest_ms)
    found = contest.cheapest(groups, max(2, policy.least_loaded))
    if contest.prices[found[0].name][0] < most:
        found += contest.cheapest([group for group in groups if group.cached_tokens == most], 1)
    if contest.is_barred(found[0], caps):
        found += contest.cheapest(groups, 1, caps)
    return [*found, shortest, soonest]


# What it finds in tokens, `ttft_ms` and `cost_ms`. Made for every worker of an idle fleet, so no more than a tuple.
_Price = tuple[int, float, float]
# `cost.parts_ms` of what a group's workers would compute. The same.
_Parts = tuple[float, float, float]


class _Contest:
    """What the workers would cost one request: computed for few of them, and once."""

    def __init__(
        self, request: RequestShape, policy: Policy, speeds: Speeds, shortest_queue_ms: float, now: float
    ) -> None:
        self._request = request
        self._policy = policy
        self._speeds = speeds
        self._shortest_queue_ms = shortest_queue_ms
        self._now = now
        self.prices: dict[str, _Price] = {}
        self._computed: dict[int, _Parts] = {}

    def cheapest(self, groups: list[Group], count: int, caps: Caps | None = None) -> list[Available]:
        """The first `count` by `policy`'s order; with `caps`, of those that none bars. Groups that find most come
        first."""
        best: list[tuple[float, float, str, Available]] = []
        limit_ms = math.inf
        # What the rest of a model's groups cost at least: those that find less have more to compute.
        floor_ms: dict[int, float] = {}
        share, new_kv_price = self._policy.queue_share, self._policy.new_kv_price
        for group in groups:
            # A wait is at least the queue's share.
            model = id(group.model)
            if share * group.workers[0].queue_ms + floor_ms.get(model, 0.0) > limit_ms:
                continue
            parts = self._computed.get(id(group)) or self._parts(group)
            least_ms = self._speeds.least * (parts[0] + new_kv_price * parts[1])
            is_over = share * self._shortest_queue_ms + least_ms > limit_ms
            floor_ms[model] = math.inf if is_over else least_ms
            if is_over:
                continue
            for one in group.workers:
                wait_ms = cost.wait_ms(group.model, one.queue_ms, share)
                if wait_ms + least_ms > limit_ms:
                    break
                price = self.prices.get(one.name) or self._price(group, parts, one, wait_ms, limit_ms)
                if price is None or price[2] > limit_ms or (caps is not None and self.is_barred(one, caps)):
                    continue
                insort(best, (price[2], one.queue_ms, one.name, one))
                if len(best) > count:
                    best.pop()
                if len(best) == count:
                    limit_ms = best[-1][0] * _SLACK
        return [one for *_, one in best]

    def soonest(self, groups: list[Group]) -> tuple[Available, float]:
        """Who would have its first token first, and after how many ms."""
        best, best_ms = groups[0].workers[0], math.inf
        for group in groups:
            parts = self._computed.get(id(group)) or self._parts(group)
            for one in group.workers:
                wait_ms = cost.wait_ms(group.model, one.queue_ms, self._policy.queue_share)
                if wait_ms + self._speeds.least * parts[0] > best_ms * _SLACK:
                    break
                price = self.prices.get(one.name) or self._price(group, parts, one, wait_ms, math.inf)
                if price is not None and price[1] < best_ms:
                    best, best_ms = one, price[1]
        return best, best_ms

    def is_barred(self, one: Available, caps: Caps) -> bool:
        """Of one that has a price."""
        cached_tokens, ttft_ms, _ = self.prices[one.name]
        is_reserved = one.only_reserved
        return bool(barred(self._request, caps, cached_tokens, one.queue_ms, ttft_ms, only_reserved=is_reserved))

    def _parts(self, group: Group) -> _Parts:
        prompt = self._request.prompt_tokens
        parts = self._computed[id(group)] = cost.parts_ms(group.model, self._created(group), prompt)
        return parts

    def _created(self, group: Group) -> int:
        return max(1, self._request.prompt_tokens - group.cached_tokens)

    def _price(self, group: Group, parts: _Parts, one: Available, wait_ms: float, limit_ms: float) -> _Price | None:
        """What `policy.price` says, to the last bit, but for a bonus and a pull; None if it is clearly over the
        limit."""
        policy, worker = self._policy, one.worker
        prefill_ms, kv_ms, work_ms = parts
        created, pinned_tokens = self._created(group), worker.pinned_tokens
        speed = self._speeds.of(one) if one.name in self._speeds.odd else 1.0
        interference_ms = speed * cost.interference_ms(group.model, created, pinned_tokens)
        ttft_ms = wait_ms + speed * prefill_ms + interference_ms
        needed_tokens = created + self._request.output_tokens
        if needed_tokens > worker.free_tokens:
            ttft_ms += cost.memory_wait_ms(needed_tokens, worker.free_tokens, pinned_tokens, policy.kv_turnover_ms)
        cost_ms = ttft_ms + policy.new_kv_price * speed * kv_ms + policy.decode_price * interference_ms
        if cost_ms > limit_ms:
            return None
        externality = cost.externality(worker.rho(self._now), policy.externality_cap)
        cost_ms += externality * (speed * work_ms)
        price = self.prices[one.name] = group.cached_tokens, ttft_ms, cost_ms
        return price


_queue_ms = attrgetter("queue_ms")
