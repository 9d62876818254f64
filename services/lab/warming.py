"""Orders of the directory in virtual time: a worker computes a prefix that it should have.

Owns: the order in work.   Must not know: who chose it and why, when the engine steps.   Units: seconds."""

from typing import Protocol

from ..bus.messages import VERSION, WARM, Dispatched, Outcome, WarmOrder
from ..directory.placement import PlacementRules
from ..engine_sim.core import EngineCore
from ..engine_sim.request import Request
from ..engine_sim.sequence import EngineNamespace, VirtualSequence
from ..worker_bridge.admission import Admission
from .setup import MODEL, Setup
from .wires import Prefix, Wires


class Host(Protocol):
    """The worker that computes it."""

    name: str
    incarnation: int
    core: EngineCore
    admission: Admission

    @property
    def now(self) -> float: ...

    @property
    def wires(self) -> Wires: ...

    @property
    def block_size(self) -> int: ...

    def start(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...

    def go_on(self) -> None: ...


class Warming:
    """What worker_bridge/warming.py does live: one order at a time, in steps, given up for any request."""

    def __init__(self, worker: Host, setup: Setup) -> None:
        rules = setup.placement or PlacementRules()
        self.request: Request | None = None
        self.done_count = 0
        self.given_up_count = 0
        self._worker = worker
        self._running_max = int(rules.idle_share * setup.slots)
        self._step_blocks = max(1, setup.warm_step_tokens // worker.block_size)
        self._tenant = ""
        self._keys: list[int] = []
        self._ns_id = b""
        self._upto = 0
        self._number = 0

    def offer(self, order: WarmOrder, prefix: Prefix) -> None:
        worker = self._worker
        keys = memoryview(prefix.keys).cast("Q").tolist()
        held_blocks = len(worker.core.pool.lookup(keys, len(keys)))
        admission = worker.admission
        if self.request is not None or held_blocks >= len(keys):
            return
        if admission.waiting or admission.running > self._running_max:
            return
        self._number += 1
        self._tenant, self._keys, self._ns_id = prefix.tenant, keys, order.ns_id
        self._upto = held_blocks
        announced = Dispatched(
            v=VERSION,
            request_id=self._name,
            attempt=1,
            router="",
            worker=worker.name,
            incarnation=worker.incarnation,
            prefill_ms=0.0,
            ns_id=order.ns_id,
            keys=prefix.keys,
            expires_at=worker.now + 60.0,
            is_warming=True,
        )
        worker.wires.order_taken(announced)
        self._next()
        worker.go_on()

    def step_ended(self) -> None:
        self.request = None
        if self._upto < len(self._keys):
            self._next()
        else:
            self.done_count += 1
            self._end("ok")

    def give_up(self) -> None:
        if self.request is not None:
            self._worker.abort(self.request)
            self.request = None
            self.given_up_count += 1
            self._end("cancelled")

    @property
    def _name(self) -> str:
        return f"warm-{self._worker.name}-{self._number}"

    def _next(self) -> None:
        worker = self._worker
        self._upto = min(self._upto + self._step_blocks, len(self._keys))
        self.request = Request(
            f"{self._name}-{self._upto}",
            VirtualSequence(self._upto * worker.block_size, self._keys[: self._upto], self._number),
            1,
            ignore_eos=True,
            namespace=EngineNamespace(salt=self._tenant),
            now_ms=worker.now * 1000,
        )
        worker.start(self.request)

    def _end(self, status: str) -> None:
        worker = self._worker
        tokens = len(self._keys) * worker.block_size
        outcome = Outcome(
            v=VERSION,
            request_id=self._name,
            client_request_id="",
            attempt=1,
            worker=worker.name,
            incarnation=worker.incarnation,
            tenant=self._tenant,
            model=MODEL,
            ns_id=self._ns_id.hex(),
            status=status,
            error="" if status == "ok" else status,
            prefix_class="",
            decision=WARM,
            prompt_tokens=tokens,
            predicted_tokens=0,
            cached_tokens=None,
            prefill_tokens=None,
            output_tokens=0,
            queue_wait_ms=None,
            ttft_ms=None,
            total_ms=0.0,
            ended_at=worker.now,
        )
        worker.wires.order_ended(outcome)
