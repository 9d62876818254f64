"""Decisions and outcomes out of JOURNAL, read with the operator's key.

Owns: how a request is found by its names.   Must not know: terminals, what records mean."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from ..bus import ids, messages, subjects
from ..bus.connection import Bus
from ..bus.errors import BadSubject, PrefixbusError
from ..bus.messages import DecisionRecord, Outcome
from . import deployment, moments, streams

_DECISIONS = f"{subjects.PREFIX}.journal."
_ENDED = f"{subjects.PREFIX}.ended."


class NotRecorded(PrefixbusError):
    """The journal has nothing of this request."""

    code = "not_recorded"
    status = 404


class AgedOut(NotRecorded):
    """What is asked for is older than all that is kept."""

    code = "aged_out"
    status = 410


class Records(msgspec.Struct, frozen=True, omit_defaults=True):
    """In the order in which they were stored. `unreadable` are subjects under which there was something else."""

    decisions: list[DecisionRecord]
    outcomes: list[Outcome]
    unreadable: list[str] = []


@contextlib.asynccontextmanager
async def operator(directory: Path) -> AsyncIterator[Bus]:
    """A connection to the running deployment. :raises Unavailable: nothing runs on this state directory."""
    bus = await deployment.connect(directory, "operator", deployment.read_cluster(directory).nats_url)
    try:
        yield bus
    finally:
        await bus.close()


async def between(bus: Bus, since: float | None = None, until: float | None = None) -> Records:
    """Everything from `since` to `until`, by the time at which it was stored (Unix seconds; None: no bound)."""
    found = Records([], [])
    async for kept in streams.read(bus, subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.>", since=since, until=until):
        add(found, kept.subject, kept.data)
    return found


async def of_request(bus: Bus, name: str) -> tuple[Records, list[str]]:
    """All attempts of a request by our id, its end as `prefixbus top` shows it, or the client's id; and the ids of
    others that are called the same: of these the latest is meant.

    :raises NotRecorded: there is none.   :raises AgedOut: there is none any more.   :raises BadSubject: no id."""
    request_ids = await _called(bus, subjects.token(name, "REQUEST_ID"))
    if not request_ids:
        await _raise_unknown(bus, name)
    request_id = request_ids[-1]
    found = Records([], [])
    for subject in (subjects.journal(request_id), subjects.outcome("*", request_id), subjects.ended(request_id)):
        async for kept in streams.read(bus, subjects.STREAM_JOURNAL, subject):
            add(found, kept.subject, kept.data)
    return found, request_ids[:-1]


async def _called(bus: Bus, name: str) -> list[str]:
    """Our ids of the requests that are called so by us, in short by us or by their clients, in the order of their
    first records."""
    if ids.made_at(name) is not None:
        for subject in (subjects.journal(name), subjects.ended(name)):
            if [kept async for kept in streams.read(bus, subjects.STREAM_JOURNAL, subject)]:
                return [name]
    # Clients' ids are in no subject: the whole journal is looked through, and only what may match is decoded.
    found: dict[str, int] = {}
    for subject in (subjects.journal("*"), subjects.ALL_ENDED):
        async for kept in streams.read(bus, subjects.STREAM_JOURNAL, subject):
            if name.encode() not in kept.data:
                continue
            read = Records([], [])
            add(read, kept.subject, kept.data)
            names = [(one.request_id, one.client_request_id) for one in read.decisions]
            names += [(one.request_id, one.client_request_id) for one in read.outcomes]
            for request_id, label in names:
                if name in (label, request_id[-ids.SHOWN :]):
                    found.setdefault(request_id, kept.seq)
    return sorted(found, key=lambda request_id: found[request_id])


async def _raise_unknown(bus: Bus, name: str) -> None:
    held = await streams.state(bus, subjects.STREAM_JOURNAL)
    first = await streams.first_at(bus, subjects.STREAM_JOURNAL)
    came_at = ids.made_at(name)
    if came_at is not None and first is not None and came_at < first and held.first_seq > 1:
        raise AgedOut(
            f"{name} came at {moments.show(came_at)}, and the journal now begins at {moments.show(first)}.",
        )
    begins = f", which begins at {moments.show(first)}" if first is not None else ", which is empty"
    raise NotRecorded(
        f"nothing of {name} is in the journal{begins}.",
        remedy="Requests that were refused before they came to a router have no record.",
    )


def add(records: Records, subject: str, data: bytes) -> None:
    """Adds what was stored under a subject of JOURNAL.

    What cannot be read, or is about another worker or request than its subject, is named and left out: the server's
    permissions vouch for the subject alone, and who may write one record must not spoil or forge the others."""
    try:
        if subject.startswith(_DECISIONS):
            decision = messages.DECISION.decode(data)
            _check_subject(subject, subjects.journal(decision.request_id))
            records.decisions.append(decision)
        else:
            outcome = messages.OUTCOME.decode(data)
            own = subject.startswith(_ENDED)
            request_id = outcome.request_id
            _check_subject(subject, subjects.ended(request_id) if own else subjects.outcome(outcome.worker, request_id))
            records.outcomes.append(outcome)
    except PrefixbusError:
        records.unreadable.append(subject)


def _check_subject(subject: str, expected: str) -> None:
    if subject != expected:
        raise BadSubject(f"a record for {expected} is under {subject}.")
