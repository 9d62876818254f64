"""How an engine fails when a test wants it to: in its own words, or with none.

    error    HTTP 500, or an error in the stream: what vLLM says when its core has failed
    full     HTTP 503: what vLLM says when its queue is at its bound (--max-num-queued-requests); before tokens alone
    abort    the stream ends with `finish_reason: abort`: what vLLM says when its core dropped a request
    reset    the connection is reset

Ordered by POST `/sim/fault`; DELETE takes back what has not happened.

Owns: which request fails next, and when.   Must not know: HTTP."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """The next `count` requests fail once `after_tokens` of their answer are out; 0: before anything of it is."""

    kind: Literal["error", "full", "abort", "reset"]
    after_tokens: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=1)] = 1


class Faults:
    """Ordered by `/sim/fault`, had by the requests that come next."""

    def __init__(self) -> None:
        self._ordered: list[Fault] = []

    def order(self, fault: Fault) -> None:
        self._ordered.append(fault)

    def clear(self) -> None:
        self._ordered.clear()

    def next(self) -> Fault | None:
        if not self._ordered:
            return None
        fault = self._ordered[0]
        fault.count -= 1
        if not fault.count:
            del self._ordered[0]
        return fault
