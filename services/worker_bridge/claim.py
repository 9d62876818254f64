# ruff: noqa: TID251 - a shell: it waits on the event loop
"""Which attempt of a request answers it: the one whose claim is the first in the stream CLAIMS.

The router gives a request to another worker once it believes that the last one will not answer. It may be wrong: what
it hears of a worker and what that worker says are not the same while messages are late or lost. So an attempt claims
its request just before whatever the client gets first, a frame or an end with an error, and the stream takes one claim
a request. Not earlier: an attempt that claims and then dies silently leaves a request that nobody else may answer.

What an attempt may do:

    the claim is stored     answer
    there is another one    end without a word to the client: it is, or was, answered by somebody else, be it the
                            router, which claims a request that it ends when it cannot know whether we run it
    nobody knows            JetStream does not answer, or is full. Attempt 1, under a lease that never broke, answers:
                            nobody was asked before it, and nobody is asked after it as long as routers hear its
                            heartbeats. For two answers a router would have to miss those, and JetStream to be back
                            before the next attempt's first token; refusing would end all service with JetStream.
                            A later attempt gives its request back: somebody was asked before, and may have begun
                            unclaimed for this very reason.
    nobody knows any more   the request is older than claims are kept (CLAIMS_KEPT_S): the same, for later attempts

Owns: one attempt's claim.   Must not know: what is claimed for, who chose this worker.
Source: DESIGN 6 (Failover); make bench: 0.8 to 1 ms of a request's time to first token."""

import asyncio

from ..bus import subjects
from ..bus.clock import Clock
from ..bus.errors import BusUnavailable, PrefixbusError, Unavailable
from ..bus.messages import Job
from .acks import Acks, AlreadyThere

# Of CLAIMS_KEPT_S: clocks differ, and `created_at` is in whole seconds.
_SLACK_S = 60.0


class Superseded(PrefixbusError):
    """Another attempt answers this request."""

    code = "already_begun"
    status = 409


def is_held(attempt: int, failure: BusUnavailable | None) -> bool:
    """What an attempt may do whose claim was acknowledged, or not: see `Claim.hold`."""
    if isinstance(failure, AlreadyThere):
        raise Superseded
    if failure is not None and attempt > 1:
        raise Unavailable("Nobody knows whether an earlier attempt has begun.") from failure
    return failure is None


class Claim:
    """`hold` it before anything of the answer goes out."""

    def __init__(self, acks: Acks, clock: Clock, job: Job, attempt: int, worker: str) -> None:
        self._acks = acks
        self._clock = clock
        self._job = job
        self._attempt = attempt
        self._worker = worker
        self._settled: asyncio.Event | None = None
        self._failure: BusUnavailable | None = None

    def __repr__(self) -> str:
        return f"<Claim of {self._job.request_id} by attempt {self._attempt}>"

    async def hold(self) -> bool:
        """Whether it is stored; False: it is not, and the attempt may answer all the same. May be asked again.

        :raises Superseded: another attempt answers.   :raises Unavailable: nobody knows whether one does."""
        job = self._job
        if self._attempt > 1 and self._clock.wall() > job.created_at + subjects.CLAIMS_KEPT_S - _SLACK_S:
            raise Unavailable("The request is too old to be begun a second time.")
        if self._settled is None:
            self._settled = asyncio.Event()
            payload = f"{self._worker} {self._attempt}".encode()
            name = f"claim-{job.request_id}-{self._attempt}"
            self._acks.put(subjects.claim(job.request_id), name, payload, self._clock.now(), self._hear)
        await self._settled.wait()
        return is_held(self._attempt, self._failure)

    def _hear(self, failure: BusUnavailable | None) -> None:
        self._failure = failure
        if self._settled is not None:
            self._settled.set()
