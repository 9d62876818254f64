# ruff: noqa: TID251 - a shell
"""The auditor: reads every fact of the record once, whichever copy gets it, and makes its counts visible.

Sealing, queries and receipts build on this stream later; today it says how much was recorded of which kind, and that
every record is one that can be read. A record that cannot is counted and left in the stream, where it stands for ever.

Owns: its place in the stream (shared by copies through one durable consumer).   Must not know: prompts."""

import anyio
import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError

from ..bus import labels, messages, subjects
from ..bus.errors import BadSubject
from ..bus.runtime import Runtime
from .metrics import AuditMetrics

CONSUMER = "auditor"
_BATCH = 256
_WAIT_S = 2.0
_FILL_EVERY_S = 10.0
# A full stream refuses new facts, and with them every request that would reuse: said long before.
FILL_ALARM = 0.8


async def run(rt: Runtime) -> None:
    """Runs until `rt.stopping`."""
    reader = _Reader()
    metrics = AuditMetrics(rt.registry, lambda: reader.fill)
    rt.ready(reader.not_ready_because)
    rt.task_group.start_soon(_watch_fill, rt, reader)
    while not rt.stopping.is_set():
        try:
            subscription = await rt.bus.jetstream.pull_subscribe_bind(CONSUMER, subjects.STREAM_AUDIT)
            await subscription.consumer_info()
            reader.is_bound = True
            while not rt.stopping.is_set():
                for message in await _fetch(subscription):
                    try:
                        fact = messages.FACT.decode(message.data)
                        _check_sender(fact, message.subject)
                        metrics.facts.labels(labels.fact(fact.kind)).inc()
                    except (messages.MessageInvalid, BadSubject) as exc:
                        metrics.unreadable.inc()
                        rt.caught(exc, "a record cannot be read", subject=message.subject)
                    # Acknowledged after it is counted: a copy that dies in between leaves it to another.
                    await message.ack()
        except (nats.errors.Error, APIError, OSError) as exc:
            # The bus reconnects by itself; what was not acknowledged comes again.
            reader.is_bound = False
            rt.log.warning("reading the record: %s", exc or type(exc).__name__)
            with anyio.move_on_after(_WAIT_S):
                await rt.stopping.wait()


class _Reader:
    """How the reading stands."""

    def __init__(self) -> None:
        self.is_bound = False
        self.fill = 0.0

    def not_ready_because(self) -> str:
        if not self.is_bound:
            return "the record is not being read"
        if self.fill >= FILL_ALARM:
            return f"the record is {self.fill:.0%} full; when it is full, nothing warm is served"
        return ""


def _check_sender(fact: messages.Fact, subject: str) -> None:
    """The server's permissions vouch for the subject alone. :raises BadSubject: the fact speaks for somebody else."""
    service, instance = subject.split(".")[-2:]
    if fact.service != service or (fact.worker and fact.worker != instance):
        raise BadSubject(f"a fact of {fact.service} {fact.worker} is under {subject}.")


async def _watch_fill(rt: Runtime, reader: _Reader) -> None:
    while True:
        try:
            info = await rt.bus.jetstream.stream_info(subjects.STREAM_AUDIT)
            if info.config.max_bytes:
                reader.fill = info.state.bytes / info.config.max_bytes
        except (nats.errors.Error, APIError, OSError, TimeoutError) as exc:
            rt.log.warning("the record's size is not known: %s", exc or type(exc).__name__)
        await anyio.sleep(_FILL_EVERY_S)


async def _fetch(subscription: object) -> list[Msg]:
    try:
        batch: list[Msg] = await subscription.fetch(_BATCH, timeout=_WAIT_S)  # type: ignore[attr-defined]
        return batch
    except nats.errors.TimeoutError:
        return []
