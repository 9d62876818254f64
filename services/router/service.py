# ruff: noqa: TID251 - service shell
"""The router: takes requests from the tokenizers' queue, and gives each to the worker worth choosing.

Copies share the queue group; each hears all heartbeats, announcements, outcomes and cancels, so all see one fleet.

Owns: the subscriptions.   Must not know: how a request is decided (policy.py) or lived (dispatching.py)."""

import functools

import anyio
from nats.aio.msg import Msg

from ..bus import subjects
from ..bus.errors import BadSubject, PrefixbusError
from ..bus.messages import (
    ACCEPT,
    CONTROL_REPLY,
    DISPATCHED,
    LOAD,
    OUTCOME,
    ROUTE,
    WARM_ORDER,
    Dispatched,
    Load,
    Outcome,
    Route,
)
from ..bus.runtime import Runtime
from .dispatching import ABORTS, CLIENTS, DISPATCHES, STARTED, STATUSES, Desk, Request
from .rollout import ROLES, Role, changed
from .warming import WARMS

QUEUE_GROUP = "router"
POLICY_STREAM = f"KV_{subjects.BUCKET_POLICIES}"
POLICY_SUBJECT = f"$KV.{subjects.BUCKET_POLICIES}"
# The fleet is learned before the first request is taken: three heartbeats (DESIGN 5).
LEARN_S = 0.6
SWEEP_S = 0.1
FLUSH_S = 2.0


async def run(rt: Runtime) -> None:
    """Serves until `rt.stopping`, then ends the requests in hand."""
    desk = Desk(rt, journal_key=rt.purpose_key("journal"))
    wires = Wires(desk)
    rt.bus.on_connection_change.append(wires.connection_changed)
    rt.task_group.start_soon(wires.sweep)
    await rt.listen(subjects.ALL_LOAD, LOAD, wires.load)
    await rt.listen(subjects.DISPATCHED, DISPATCHED, wires.dispatched)
    await rt.listen(subjects.ALL_OUTCOME, OUTCOME, wires.outcome)
    await rt.listen(subjects.WARM, WARM_ORDER, desk.warming.order)
    await rt.listen_plain(subjects.ALL_CANCELLED, wires.cancelled)
    await rt.listen_plain(desk.addresses.all(DISPATCHES), wires.accept)
    await rt.listen_plain(desk.addresses.all(ABORTS), wires.aborted)
    await rt.listen_plain(desk.addresses.all(STATUSES), wires.status)
    await rt.listen_plain(desk.addresses.all(CLIENTS), wires.client)
    await rt.listen_plain(f"{rt.bus.inbox_prefix}.{WARMS}.*.*", desk.warming.answered)
    for role in ROLES:
        heard = functools.partial(wires.new_policy, role)
        await rt.bus.follow(POLICY_STREAM, f"{POLICY_SUBJECT}.{role}", heard, start="last")
    await anyio.sleep(LEARN_S)
    requests = await rt.listen(subjects.ALL_ROUTE, ROUTE, wires.route, queue=QUEUE_GROUP)
    rt.ready()
    await rt.stopping.wait()
    await requests.drain()
    await desk.empty.wait()
    with anyio.move_on_after(FLUSH_S):
        await desk.records.idle()


class Wires:
    """What each kind of message means to the desk. What these raise is counted, and the message dropped
    (`Runtime.listen`)."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._rt = desk.rt

    def route(self, route: Route, _: Msg) -> None:
        self._rt.task_group.start_soon(self._desk.serve, route)

    def load(self, load: Load, message: Msg) -> None:
        _check_sender(subjects.load(load.worker), message)
        lost = self._desk.fleet.heard(load, self._desk.clock.now())
        if lost is not None:
            self._desk.lost(lost)

    def dispatched(self, announced: Dispatched, _: Msg) -> None:
        """Another router's: the runtime's connection does not hear itself."""
        self._desk.dispatched(announced)

    def outcome(self, outcome: Outcome, message: Msg) -> None:
        _check_sender(subjects.outcome(outcome.worker, outcome.request_id), message)
        self._desk.outcome(outcome)

    def cancelled(self, message: Msg) -> None:
        tenant, client_request_id = subjects.parse_cancelled(message.subject)
        self._desk.cancelled(tenant, client_request_id)

    def accept(self, message: Msg) -> None:
        """A bridge's answer to a dispatch, or the server's, that nobody listens there."""
        request, request_id, attempt = self._asked(message)
        if _nobody_listens(message):
            if request is not None:
                request.post(functools.partial(request.attempts.unreachable, attempt))
            return
        accept = ACCEPT.decode(message.data)
        if (accept.request_id, accept.attempt) != (request_id, attempt):
            self._desk.metrics.foreign_answers.inc()
        elif request is not None:
            request.post(functools.partial(request.hear_accept, accept))
        elif request_id in self._desk.answered and accept.refused in ("", STARTED):
            # The client has been told that it failed: whoever still works on it should stop.
            self._desk.abort(accept.worker, request_id, accept.attempt)

    def aborted(self, message: Msg) -> None:
        """A bridge's answer to an abort, or the server's."""
        request, _, attempt = self._asked(message)
        if request is None:
            return
        if _nobody_listens(message):
            request.post(functools.partial(request.attempts.unreachable, attempt))
        else:
            request.post(functools.partial(request.hear_withdrawn, attempt, CONTROL_REPLY.decode(message.data)))

    def status(self, message: Msg) -> None:
        """A bridge's answer to the question where an attempt is. That nobody listens says nothing: it has a lease."""
        request, _, attempt = self._asked(message)
        if request is not None and not _nobody_listens(message):
            request.post(functools.partial(request.hear_status, attempt, CONTROL_REPLY.decode(message.data)))

    def client(self, message: Msg) -> None:
        """The server's word that nobody listens at a client's inbox. A client has no business answering there."""
        request, _, _ = self._asked(message)
        if request is not None and _nobody_listens(message):
            self._desk.client_gone(request)

    async def new_policy(self, role: Role, message: Msg) -> None:
        """An invalid record is refused, and what was in force stays; without any, the configured policy is active."""
        choices = self._desk.choices
        gone = bool(message.headers and message.headers.get("KV-Operation"))
        try:
            choices.rollout = changed(choices.rollout, role, None if gone else message.data, choices.configured)
        except PrefixbusError as exc:
            choices.metrics.policies_refused.inc()
            self._rt.caught(exc, "a policy is refused", role=role)
            return
        self._rt.log.info("policies: %s", choices.rollout)

    def connection_changed(self, connected: bool) -> None:
        if connected:
            self._desk.reconnected()
        else:
            self._desk.fleet.cut_off(self._desk.clock.now())

    async def sweep(self) -> None:
        """Runs leases and bookings out, and shows the fleet's size."""
        desk = self._desk
        while True:
            now = desk.clock.now()
            for lost in desk.fleet.sweep(now):
                self._rt.log.warning("worker lost", extra={"fields": {"worker": lost.worker}})
                desk.metrics.leases.labels("lost").inc()
                desk.lost(lost)
            for worker in desk.fleet.newly_suspect(now):
                self._rt.log.warning("worker suspect", extra={"fields": {"worker": worker}})
                desk.metrics.leases.labels("suspect").inc()
                desk.suspect(worker)
            desk.look_around()
            desk.warming.sweep(now)
            desk.metrics.in_hand.set(len(desk.in_hand))
            desk.metrics.in_flight.set(sum(desk.fleet.in_flight().values()))
            desk.metrics.workers.set(len(desk.fleet))
            await anyio.sleep(SWEEP_S)

    def _asked(self, message: Msg) -> tuple[Request | None, str, int]:
        """The request and attempt that an answer in our inbox is about: none, if it came where nobody was told to
        answer."""
        named = self._desk.addresses.read(message.subject)
        if named is None:
            self._desk.metrics.foreign_answers.inc()
            return None, "", 0
        request_id, attempt = named
        return self._desk.in_hand.get(request_id), request_id, attempt


def _check_sender(expected: str, message: Msg) -> None:
    """The server's permissions vouch for the subject, nobody for the body."""
    if message.subject != expected:
        raise BadSubject(f"a message for {expected} came on {message.subject}.")


def _nobody_listens(message: Msg) -> bool:
    return message.headers is not None and message.headers.get("Status") == "503"
