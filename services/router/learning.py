"""What prefills really take, learned from how requests ended: a model for each class of workers, a speed for each one.

    measured_ms = ttft_ms - queue_wait_ms - what decodes beside it should have cost
                = speed of the worker * (a + b*n + c*n*(L - n/2))    for n computed tokens of a prompt of L

A class of workers (one model, one revision, one label) shares one model, which starts as the deployment's profile: were
each candidate of a decision priced by an estimate of its own, their noise would decide (facts/policy.md: +4 to 14 %). A
worker is taken to differ from its class only if it clearly and steadily does: its speed is 1 until it is off by
`STANDS_OUT` for `STEADY_SAMPLES`, then it is kept until the worker is nearly as the others are.

A sample tells nothing of prefill if its request failed, was cancelled, or computed beside other prefills.

Owns: the models and the speeds; bounded in number.   Must not know: NATS, clocks, queues, what is decided with it.
Units: ms, tokens, `now` in seconds.   Arithmetic only, like all that decisions are made from."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

import msgspec

from ..bus.messages import Outcome
from . import cost
from .cost import PrefillModel
from .fleet import Surroundings, WorkerClass
from .regression import Regression

# A neighbour's prefill or a queue may take this share of one's own time before a sample counts as contended.
CONTENDED = 0.2
STEADY_SAMPLES = 16
# A worker's speed is spoken of from this factor on, and until it is back within the lesser one.
STANDS_OUT = 1.4
_BLENDS_IN = 1.2
# While it is spoken of, it is moved in steps: a price that trembles is noise among candidates.
_STEP = 1.15
SPEED_BOUND = 4.0
_SPEED_MEMORY = 32
# One sample moves the mean by at most this share of its weight.
_SPEED_CLIP = 0.5
# Who is avoided is not measured: after this time without a sample it is taken to be like the others again.
FORGET_AFTER_S = 600.0
MAX_CLASSES = 256
MAX_WORKERS = 4096

Verdict = Literal["learned", "useless", "contended"]


class _Mean:
    """A mean of ratios that starts at 1; of recent ones, once there are many; no single one moves it far."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 1.0

    def add(self, ratio: float) -> None:
        self.count += 1
        off = min(_SPEED_CLIP, max(-_SPEED_CLIP, ratio / self.value - 1.0))
        moved = self.value * (1.0 + off / min(self.count + 1, _SPEED_MEMORY))
        self.value = min(SPEED_BOUND, max(1.0 / SPEED_BOUND, moved))


class _Class:
    """`common` is how measurements of this class lately compare with its model, which follows them more slowly."""

    __slots__ = ("_regression", "common", "model")

    def __init__(self, profile: PrefillModel) -> None:
        self.model = profile
        self.common = _Mean()
        self._regression = Regression((profile.fixed_ms, profile.token_ms, profile.attention_ms))

    def learn(self, computed: int, prompt: int, own_ms: float) -> bool:
        if not self._regression.learn((1.0, computed, computed * (prompt - computed / 2)), own_ms):
            return False
        fixed_ms, token_ms, attention_ms = self._regression.coefficients
        self.model = msgspec.structs.replace(
            self.model, fixed_ms=fixed_ms, token_ms=token_ms, attention_ms=attention_ms
        )
        return True


class _Worker:
    __slots__ = ("heard_at", "incarnation", "mean", "speed")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.mean = _Mean()
        self.speed = 1.0
        self.heard_at = 0.0

    def learn(self, ratio: float, now: float) -> None:
        self.heard_at = now
        self.mean.add(ratio)
        if self.mean.count < STEADY_SAMPLES:
            return
        off = self.mean.value
        if self.speed == 1.0:
            if not _is_within(off, STANDS_OUT):
                self.speed = off
        elif _is_within(off, _BLENDS_IN):
            self.speed = 1.0
        elif not _is_within(off / self.speed, _STEP):
            self.speed = off


class Learner:
    """`profiles` are the prefill models by name of model, until and unless workers turn out otherwise."""

    def __init__(self, profiles: Mapping[str, PrefillModel]) -> None:
        self._profiles = profiles
        self._classes: OrderedDict[WorkerClass, _Class] = OrderedDict()
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    def model_of(self, worker_class: WorkerClass) -> PrefillModel:
        """:raises KeyError: there is no profile for this model."""
        known = self._classes.get(worker_class)
        return known.model if known is not None else self._profiles[worker_class.model]

    def speed_of(self, worker: str, incarnation: int, now: float) -> float:
        """The factor of its class's prefill time; over 1 it is slow."""
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation or now - known.heard_at > FORGET_AFTER_S:
            return 1.0
        return known.speed

    def odd_speeds(self) -> dict[str, float]:
        """By worker, those that are not 1; of some of them `speed_of` says 1 all the same."""
        return {worker: known.speed for worker, known in self._workers.items() if known.speed != 1.0}

    def hear(self, outcome: Outcome, around: Surroundings, now: float) -> Verdict:
        """An attempt ended there; what was learned from it."""
        computed, prompt, waited_ms = outcome.prefill_tokens, outcome.prompt_tokens, outcome.queue_wait_ms
        if outcome.status != "ok" or outcome.ttft_ms is None or waited_ms is None or computed is None:
            return "useless"
        if not 0 < computed <= prompt or waited_ms < 0.0 or around.worker_class.model not in self._profiles:
            return "useless"
        model = self.model_of(around.worker_class)
        speed = self.speed_of(outcome.worker, outcome.incarnation, now)
        own_ms = outcome.ttft_ms - waited_ms - speed * cost.interference_ms(model, computed, around.pinned_tokens)
        expected_ms = cost.prefill_ms(model, computed, prompt)
        # Also true of NaN; and a profile that expects nothing has nothing to be corrected.
        if not (own_ms > 0.0 and expected_ms > 0.0):
            return "useless"
        if waited_ms > CONTENDED * own_ms or around.neighbours_ms > CONTENDED * speed * expected_ms:
            return "contended"
        of_class = self._class(around.worker_class)
        if not of_class.learn(computed, prompt, own_ms / speed):
            return "useless"
        of_class.common.add(own_ms / speed / expected_ms)
        self._worker(outcome.worker, outcome.incarnation, now).learn(own_ms / expected_ms / of_class.common.value, now)
        return "learned"

    def _class(self, worker_class: WorkerClass) -> _Class:
        known = self._classes.get(worker_class)
        if known is None:
            known = self._classes[worker_class] = _Class(self._profiles[worker_class.model])
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(worker_class)
        return known

    def _worker(self, worker: str, incarnation: int, now: float) -> _Worker:
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation or now - known.heard_at > FORGET_AFTER_S:
            known = self._workers[worker] = _Worker(incarnation)
            if len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)
        self._workers.move_to_end(worker)
        return known

    def __repr__(self) -> str:
        return f"<Learner classes={len(self._classes)} workers={len(self._workers)}>"


def _is_within(ratio: float, factor: float) -> bool:
    return 1.0 <= ratio * factor and ratio <= factor
