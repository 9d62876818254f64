"""A fleet on one virtual clock: production routers, directory and admission in front of simulated engines.

    result = run(Setup(routers=4), workload)

Owns: the composition of a run, and its end.   Must not know: what is asked, which policy is good.
Units: seconds on the timeline. Deterministic: equal arguments, equal results."""

import functools
from collections.abc import Callable

from ..bus.errors import PrefixbusError
from ..bus.messages import Outcome
from ..directory.index import Index
from ..directory.placement import PlacementRules
from ..directory.shard import Settings, Shard
from ..engine_sim.profile import PRESETS
from ..engine_sim.request import Request
from .bounds import shared_pool
from .false_index import FalseIndex
from .fetching import Fetch
from .lives import Lives
from .results import Result, Sample, Served, WorkerTotals
from .router import LOST_AFTER_S, Router
from .setup import Setup
from .timeline import Timeline
from .wires import Wires
from .worker import Worker
from .workload import Arrival, Workload

# How often routers and directory look at their leases and at what has expired.
TICK_S = 0.1
# After the last end: what was promised to the directory expires 1 s after its outcome, or after twice as long as it
# takes its worker's events for late.
SETTLE_S = 2.0
# How often it is looked at what workers hold, in the time from the first arrival to the last.
SAMPLES = 20
# What takes longer than this after the last arrival is an overload that no user waits out.
GIVE_UP_S = 2 * 3600.0

Watch = Callable[[float], None]
"""Is told now and then which share of the requests has come."""


class NeverEnds(RuntimeError):
    """Requests are still open two hours after the last one came: the fleet is overloaded beyond sense, or hangs."""


class World:
    """One run's parts; `run` plays it once. Tests look into the parts."""

    def __init__(self, setup: Setup, workload: Workload, watch: Watch | None = None) -> None:
        self.setup = setup
        self.timeline = Timeline()
        make_index = functools.partial(FalseIndex, seed=setup.seed) if setup.false_directory else Index
        self.directory = Shard(Settings(placement=setup.placement or PlacementRules()), make_index)
        self.wires = Wires(self.timeline, setup, self.directory)
        self._block_size = workload.block_size
        self._pool = shared_pool(setup, workload)
        self.lives = Lives(self.timeline, self.wires, setup, self._begin, self._broken)
        self.routers = [
            Router(f"r{number}", self.timeline, self.wires, setup, self, self._answered)
            for number in range(setup.routers)
        ]
        self.wires.routers.extend(self.routers)
        self.served: list[Served] = []
        self._by_id: dict[str, Served] = {}
        self._arrivals = workload.arrivals
        self._open = len(workload.arrivals)
        self._samples: list[Sample] = []
        self._watch = watch

    def __repr__(self) -> str:
        return f"<World {self.timeline!r} open={self._open}>"

    def run(self) -> Result:
        """:raises NeverEnds: requests are left, two hours after the last one came."""
        timeline = self.timeline
        started_at = self.setup.hop_s
        self.lives.start(started_at)
        timeline.run_until(started_at)
        timeline.after(TICK_S, self._tick)
        if self._arrivals:
            timeline.at(started_at + self._arrivals[0].at, self._arrive, started_at, 0)
            first_at, last_at = started_at + self._arrivals[0].at, started_at + self._arrivals[-1].at
            for number in range(1, SAMPLES + 1):
                timeline.at(first_at + (last_at - first_at) * number / SAMPLES, self._sample)
            timeline.run(lambda: self._open > 0 and timeline.now < last_at + GIVE_UP_S)
        if self._open:
            raise NeverEnds(f"{self._open} of {len(self._arrivals)} requests are open")
        ended_at = timeline.now
        setup = self.setup
        delays_s = setup.event_delay_s + (setup.announce_delay_s or 0.0) + (setup.predict_delay_s or 0.0)
        latest_s = max(self.directory.ledger.lag_s(name) for name in self.lives.of)
        failed_s = LOST_AFTER_S if setup.failures else 0.0
        timeline.run_until(ended_at + SETTLE_S + delays_s + 2 * latest_s + failed_s)
        return Result(
            served=self.served,
            workers=[self._totals(name) for name in self.lives.of],
            leftovers=self._leftovers(),
            ended_at=ended_at - started_at,
            dumps_asked=self.wires.dumps_asked,
            lost_events=self.wires.lost_events,
            samples=self._samples,
        )

    def queue_ms(self, worker: str) -> float:
        return self.lives.of[worker][-1].true_queue_ms()

    def cached_tokens(self, worker: str, arrival: Arrival) -> int:
        return self.lives.of[worker][-1].true_cached_tokens(arrival)

    def _arrive(self, started_at: float, number: int) -> None:
        arrival = self._arrivals[number]
        request_id = f"{number:08d}"
        router = self.routers[number % len(self.routers)]
        served = Served(
            request_id=request_id,
            at=self.timeline.now,
            tenant=arrival.tenant,
            prefix_class=arrival.prefix_class,
            router=router.name,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            revision=self.lives.revision if self.setup.upgrade is not None else 0,
        )
        self.served.append(served)
        self._by_id[request_id] = served
        router.serve(request_id, arrival, served.revision)
        if arrival.cancel_after_s is not None:
            self.timeline.after(arrival.cancel_after_s, self.wires.cancel, arrival.tenant, request_id)
        if number + 1 < len(self._arrivals):
            next_at = started_at + self._arrivals[number + 1].at
            self.timeline.at(max(next_at, self.timeline.now), self._arrive, started_at, number + 1)

    def _ended(self, outcome: Outcome, request: Request, fetch: Fetch | None) -> None:
        """A worker ended an attempt."""
        served = self._close(outcome.request_id, outcome.status, outcome.error)
        served.worker = outcome.worker
        served.decision = outcome.decision
        served.attempts = outcome.attempt
        served.predicted_tokens = outcome.predicted_tokens
        served.cached_tokens = outcome.cached_tokens
        served.prefill_tokens = outcome.prefill_tokens
        if fetch is not None:
            served.loaded_tokens = fetch.loaded_blocks * self._block_size
            served.pulled_tokens = fetch.pulled_blocks * self._block_size
            served.transferred_bytes = served.pulled_tokens * PRESETS[self.setup.profile].kv_token_bytes
        at_ms = served.at * 1000
        if request.scheduled_ms is not None:
            served.queue_ms = request.scheduled_ms - at_ms
        if request.first_token_ms is not None:
            served.ttft_ms = request.first_token_ms - at_ms
        served.e2e_ms = self.timeline.now * 1000 - at_ms

    def _answered(self, request_id: str, error: PrefixbusError) -> None:
        """A router ended a request."""
        status = {"cancelled": "cancelled", "worker_lost": "error"}.get(error.code, "shed")
        self._close(request_id, status, error.code)

    def _begin(self, name: str, incarnation: int, revision: int) -> Worker:
        return Worker(
            name,
            self.timeline,
            self.wires,
            self.setup,
            self._block_size,
            self._ended,
            incarnation,
            revision,
            self._pool,
        )

    def _broken(self, request: Request) -> None:
        """Its client has a first token, and waits for the next."""
        served = self._by_id[request.request_id]
        if request.scheduled_ms is not None and request.first_token_ms is not None:
            served.queue_ms = request.scheduled_ms - served.at * 1000
            served.ttft_ms = request.first_token_ms - served.at * 1000

    def _close(self, request_id: str, status: str, error: str) -> Served:
        served = self._by_id[request_id]
        if served.status:
            raise AssertionError(f"{request_id} ended twice: {served.status}, {status}")
        served.status = status
        served.error = error
        self._open -= 1
        return served

    def _tick(self) -> None:
        self.lives.tick()
        for router in self.routers:
            router.tick()
        now = self.timeline.now
        self.wires.perform(self.directory.tick(now))
        while self.directory.do_slice(now):
            pass
        if self.setup.orders is not None:
            self.wires.order(self.directory.orders(now))
        self.timeline.after(TICK_S, self._tick)

    def _sample(self) -> None:
        # Under a bound all workers have one pool.
        pools = list({id(worker.core.pool): worker.core.pool for worker in self.lives.last}.values())
        capacity = sum(pool.capacity for pool in pools)
        held_by_any = set[int]().union(*(pool.keys() for pool in pools))
        self._samples.append(
            Sample(
                at=self.timeline.now,
                kv_in_use=sum(pool.used_count for pool in pools) / capacity,
                kv_cached=sum(pool.cached_count for pool in pools) / capacity,
                copies=sum(pool.cached_keys for pool in pools) / max(1, len(held_by_any)),
            )
        )
        if self._watch is not None:
            self._watch(len(self.served) / len(self._arrivals))

    def _totals(self, name: str) -> WorkerTotals:
        """Of all its lives."""
        mine = [one for one in self.served if one.worker == name]
        lives = self.lives.of[name]
        totals = [life.core.totals for life in lives]
        return WorkerTotals(
            worker=name,
            requests=len(mine),
            prompt_tokens=sum(one.prompt_tokens for one in mine),
            computed_tokens=sum(one.computed_tokens for one in totals),
            busy_ms=sum(one.busy_ms for one in totals),
            refused=sum(life.refused_count for life in lives),
            given_back=sum(life.given_back_count for life in lives),
            preemptions=sum(one.preemptions for one in totals),
            orders_done=sum(life.warming.done_count for life in lives),
            orders_given_up=sum(life.warming.given_up_count for life in lives),
            wrong_hits=sum(one.wrong_hits for one in totals),
        )

    def _leftovers(self) -> list[str]:
        left = [f"{router.name}: {entry}" for router in self.routers for entry in router.fleet.idle()]
        left += [f"{router.name}: {request_id} in hand" for router in self.routers for request_id in router.in_hand]
        if len(self.directory.predictions):
            left.append(f"directory: {self.directory.predictions!r}")
        living = [worker for worker in self.lives.last if not worker.is_silent]
        left += [f"{worker.name}: {worker.admission!r}" for worker in living if worker.admission.busy]
        left += [f"{worker.name}: an order" for worker in living if worker.warming.request is not None]
        return left


def run(setup: Setup, workload: Workload, watch: Watch | None = None) -> Result:
    """:raises NeverEnds: see `World.run`."""
    return World(setup, workload, watch).run()
