"""Which workers live, in which life and under which revision of the model: their failures, their returns, an upgrade.

Owns: all lives of all workers, the revision that requests are of.   Must not know: routers, what a worker does.
Units: seconds on the timeline."""

from collections import Counter
from collections.abc import Callable

from ..engine_sim.request import Request
from .setup import Failure, Setup
from .timeline import Timeline
from .wires import Wires
from .worker import Worker

Begin = Callable[[str, int, int], Worker]
"""A new life of the worker of this name: its incarnation, and the model's revision."""


class Lives:
    def __init__(
        self, timeline: Timeline, wires: Wires, setup: Setup, begin: Begin, on_broken: Callable[[Request], None]
    ) -> None:
        """`on_broken` sees each request whose answer had begun at a worker that fell silent."""
        width = len(str(setup.workers - 1))
        self.of: dict[str, list[Worker]] = {
            name: [begin(name, 1, 0)] for name in (f"w{number:0{width}d}" for number in range(setup.workers))
        }
        self._timeline = timeline
        self._wires = wires
        self._setup = setup
        self._begin = begin
        self._on_broken = on_broken
        # The revision that each worker's next life has.
        self._next_revision = dict.fromkeys(self.of, 0)
        wires.workers.update((worker.name, worker) for worker in self.last)

    def __repr__(self) -> str:
        return f"<Lives {len(self._wires.workers)} of {len(self.of)} workers>"

    @property
    def last(self) -> list[Worker]:
        """Of each worker its present life, or the last one."""
        return [lives[-1] for lives in self.of.values()]

    @property
    def revision(self) -> int:
        """That most workers serve that take requests, of two equals the newer; if none does, what most served last."""
        alive = [worker for worker in self.last if not worker.is_silent]
        counts = Counter(worker.revision for worker in alive if not worker.admission.draining)
        counts = counts or Counter(worker.revision for worker in self.last)
        return max(counts, key=lambda revision: (counts[revision], revision))

    def start(self, at: float) -> None:
        """Put on the timeline what the setup has in store, counted from `at`; and each worker's first report."""
        for worker in self.last:
            worker.report()
        for failure in self._setup.failures:
            self._timeline.at(at + failure.at, self._fail, failure)
        for reset_at, name in self._setup.resets:
            self._timeline.at(at + reset_at, self._reset, name)
        upgrade = self._setup.upgrade
        if upgrade is not None:
            for number, name in enumerate(self.of):
                self._timeline.at(at + upgrade.at + number * upgrade.gap_s, self._replace, name)

    def tick(self) -> None:
        """Call it several times a second: who has ended all that it had in hand, and takes no more, goes."""
        upgrade = self._setup.upgrade
        for worker in self.last:
            if upgrade is not None and worker.admission.draining and not worker.admission.busy and not worker.is_silent:
                self._end(worker)
                self._timeline.after(upgrade.away_s, self._return, worker.name)

    def _fail(self, failure: Failure) -> None:
        worker = self.of[failure.worker][-1]
        if worker.is_silent:
            return
        for request in worker.answering():
            self._on_broken(request)
        self._end(worker)
        if failure.back_after_s is not None:
            self._timeline.after(failure.back_after_s, self._return, worker.name)

    def _reset(self, name: str) -> None:
        worker = self.of[name][-1]
        if not worker.is_silent:
            worker.reset()

    def _replace(self, name: str) -> None:
        self._next_revision[name] += 1
        worker = self.of[name][-1]
        if not worker.is_silent:
            worker.drain()

    def _end(self, worker: Worker) -> None:
        worker.die()
        del self._wires.workers[worker.name]

    def _return(self, name: str) -> None:
        lives = self.of[name]
        worker = self._begin(name, lives[-1].incarnation + 1, self._next_revision[name])
        lives.append(worker)
        self._wires.workers[name] = worker
        worker.report()
