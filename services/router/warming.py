# ruff: noqa: TID251 - a shell: it sends what it decides
"""Orders of the directory carried out: an idle worker is given a prefix that it should have.

All routers hear an order. In its first round the one that dispatched the prefix last acts, since it has the tokens;
later, in case that one is gone, whoever has them. That two act does no harm: the bridge takes one order at a time, and
nothing that it holds.

To the bridge it is a dispatch like any other, with the same checks, but for a decision `warm` and a job without a
client. To the books it is nothing: no queue is longer for it, and no request waits.

Owns: the tokens remembered (prefixes.py), orders that a bridge has not answered yet, and who is at work on one.
Must not know: requests in hand, what should be where.   Source: DESIGN 5 (Placement)."""

import contextlib
import secrets

from nats.aio.msg import Msg

from ..bus import ids, subjects
from ..bus.errors import BusUnavailable, PrefixbusError
from ..bus.messages import (
    ACCEPT,
    DISPATCH,
    DISPATCHED,
    JOB,
    VERSION,
    WARM,
    Dispatch,
    Dispatched,
    Job,
    Outcome,
    Route,
    WarmOrder,
)
from ..bus.runtime import Runtime
from .fleet import Fleet
from .metrics import Metrics
from .prefixes import Prefix, Prefixes

# Below our inbox, where bridges answer.
WARMS = "w"
STALE_NAMESPACE = "stale_namespace"
# What is not computed by then is not worth it any more.
WITHIN_S = 60.0
# Orders that no bridge has answered, of which the oldest is forgotten.
_OFFERED_MAX = 64
_EXPIRE_EVERY_S = 10.0


class Warming:
    """One router's part in placement."""

    def __init__(self, rt: Runtime, fleet: Fleet, metrics: Metrics) -> None:
        self._rt = rt
        self._fleet = fleet
        placement = rt.config.placement
        self.prefixes = Prefixes(placement.tokens_bytes, placement.tokens_bytes_per_tenant)
        self._offered: dict[str, tuple[WarmOrder, Prefix]] = {}
        # Workers that are at an order, ours or another router's, and until when that is believed.
        self._at_work: dict[str, float] = {}
        self._expired_at = 0.0
        self._orders = metrics.warm_orders
        metrics.remembered_bytes.set_function(lambda: self.prefixes.held_bytes)

    def __repr__(self) -> str:
        return f"<Warming {self.prefixes!r} at work={len(self._at_work)}>"

    # --- what requests teach it ---

    def sent(self, route: Route, held_blocks: int) -> None:
        """A request of ours, of which so many blocks are held somewhere, was dispatched for the first time."""
        block_size = self._rt.config.models[route.model].block_size
        try:
            self.prefixes.dispatched(route, held_blocks, block_size, self._rt.clock.now())
        except PrefixbusError as exc:
            # Its bridge will say so, too.
            self._rt.caught(exc, "a job cannot be read", request_id=route.request_id)

    def announced(self, sent: Dispatched) -> None:
        """By another router: a request, or that it carries out an order."""
        if sent.is_warming:
            remaining_s = min(WITHIN_S, sent.expires_at - self._rt.clock.wall())
            self._at_work[sent.worker] = self._rt.clock.now() + remaining_s
        elif sent.attempt == 1:
            self.prefixes.others(sent.ns_id, sent.keys, sent.held_blocks)

    def refused(self, ns_id: bytes, reason: str) -> None:
        """A bridge refused something of this namespace."""
        if reason == STALE_NAMESPACE:
            self.prefixes.forget_namespace(ns_id)

    # --- orders ---

    def order(self, order: WarmOrder, _: Msg) -> None:
        now = self._rt.clock.now()
        prefix = self.prefixes.find(order.ns_id, order.key, ours=order.round == 0, now=now)
        if prefix is None or prefix.blocks != order.blocks:
            self._orders.labels(order.kind, "no_tokens").inc()
        elif not self._is_idle(order, prefix, now):
            self._orders.labels(order.kind, "not_idle").inc()
        else:
            self._send(order, prefix, now)

    def answered(self, message: Msg) -> None:
        """A bridge's answer, or the server's, that nobody listens there."""
        request_id = message.subject.split(".")[-2]
        offered = self._offered.pop(request_id, None)
        if offered is None:
            return
        order, prefix = offered
        is_unheard = message.headers is not None and message.headers.get("Status") == "503"
        reason = "unheard" if is_unheard else ACCEPT.decode(message.data).refused
        if reason:
            self._at_work.pop(order.worker, None)
            self._orders.labels(order.kind, "refused").inc()
            self.refused(order.ns_id, reason)
            return
        self._orders.labels(order.kind, "taken").inc()
        self._at_work[order.worker] = self._rt.clock.now() + WITHIN_S
        announced = Dispatched(
            v=VERSION,
            request_id=request_id,
            attempt=1,
            router=self._rt.instance,
            worker=order.worker,
            incarnation=order.incarnation,
            prefill_ms=0.0,
            ns_id=order.ns_id,
            keys=prefix.keys,
            expires_at=self._rt.clock.wall() + WITHIN_S,
            is_warming=True,
        )
        with contextlib.suppress(BusUnavailable):
            self._rt.bus.send(subjects.DISPATCHED, DISPATCHED.encode(announced))

    def outcome(self, outcome: Outcome) -> None:
        """Of some router's order."""
        self._at_work.pop(outcome.worker, None)

    def sweep(self, now: float) -> None:
        """Forgets what is old. Call it now and then."""
        if now - self._expired_at >= _EXPIRE_EVERY_S:
            self._expired_at = now
            self.prefixes.expire(now)
            self._at_work = {worker: until for worker, until in self._at_work.items() if until > now}

    def _is_idle(self, order: WarmOrder, prefix: Prefix, now: float) -> bool:
        """As far as we know; the bridge knows better."""
        if self._at_work.get(order.worker, now) > now:
            return False
        namespace = prefix.namespace
        pools = self._rt.config.router.pools.get(namespace.tenant)
        survey = self._fleet.survey(namespace.model, prefix.serves, now, pools)
        return any(
            one.name == order.worker and one.worker.incarnation == order.incarnation and one.queue_ms <= 0
            for one in survey.available
        )

    def _send(self, order: WarmOrder, prefix: Prefix, now: float) -> None:
        rt = self._rt
        wall = rt.clock.wall()
        request_id = ids.request_id(wall, secrets.token_bytes(ids.ENTROPY_BYTES))
        job = Job(
            v=VERSION,
            request_id=request_id,
            client_request_id="",
            reply="",
            namespace=prefix.namespace,
            tokens=prefix.tokens,
            kind="completions",
            params=b"",
            include_usage=False,
            created_at=int(wall),
            deadline_at=wall + WITHIN_S,
        )
        accept_s = rt.config.router.accept_timeout_ms / 1000
        dispatch = Dispatch(
            v=VERSION,
            request_id=request_id,
            attempt=1,
            incarnation=order.incarnation,
            max_queue_ms=0.0,
            accept_by_at=wall + accept_s,
            prefill_ms=0.0,
            predicted_tokens=0,
            decision=WARM,
            ns_id=order.ns_id,
            job=JOB.encode(job),
        )
        reply = f"{rt.bus.inbox_prefix}.{WARMS}.{request_id}.1"
        try:
            rt.bus.send(subjects.work(order.worker), DISPATCH.encode(dispatch), reply=reply)
        except PrefixbusError as exc:
            # Nobody waits for it: the directory orders it again.
            rt.caught(exc, "an order could not be sent", request_id=request_id)
            self._orders.labels(order.kind, "unsent").inc()
            return
        self._offered[request_id] = order, prefix
        if len(self._offered) > _OFFERED_MAX:
            del self._offered[next(iter(self._offered))]
        self._at_work[order.worker] = now + accept_s
