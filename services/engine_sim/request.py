"""One request inside the engine: its tokens, its blocks, its limits, and where it is in its life.

Owns: the life table.   Must not know: queues, the pool, time's source.   Units: tokens, blocks, milliseconds."""

from enum import Enum

from .sequence import EngineNamespace, KvSequence


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Event(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"


# (state, event) -> next state; a pair that is not here is a defect and raises.
LIFE = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.ABORT): State.FINISHED,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.ABORT): State.FINISHED,
    (State.PREEMPTED, Event.ADMIT): State.RUNNING,
    (State.PREEMPTED, Event.ABORT): State.FINISHED,
}


class Request:
    """`computed` tokens of `sequence` have KV in `blocks`; the first `registered` blocks can be found by key. One that
    `skips_cache` reads no block of others and leaves its own."""

    __slots__ = (
        "arrived_ms",
        "blocks",
        "cached_tokens",
        "computed",
        "delivered",
        "finish_reason",
        "finished_ms",
        "first_token_ms",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "namespace",
        "outputs",
        "preemptions",
        "prefilling",
        "prompt_tokens",
        "registered",
        "request_id",
        "scheduled_ms",
        "sequence",
        "skips_cache",
        "state",
    )

    def __init__(
        self,
        request_id: str,
        sequence: KvSequence,
        max_tokens: int,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        skips_cache: bool = False,
        namespace: EngineNamespace | None = None,
        now_ms: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.prompt_tokens = sequence.length
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos or sequence.virtual
        self.skips_cache = skips_cache
        self.namespace = namespace or EngineNamespace()
        self.state = State.WAITING
        self.blocks: list[int] = []
        self.registered = 0
        self.computed = 0
        self.outputs = 0
        self.prefilling = True
        self.cached_tokens: int | None = None
        """Prompt tokens served from cache when first admitted; None before that, and never changed by a preemption."""
        self.delivered = range(0)
        """Blocks of the prompt that come from outside (a host store, another engine), for its first admission."""
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.arrived_ms = now_ms
        self.scheduled_ms: float | None = None
        self.first_token_ms: float | None = None
        self.finished_ms: float | None = None

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.state.value} {self.computed}/{self.sequence.length} tokens computed,"
            f" {self.outputs}/{self.max_tokens} emitted>"
        )

    def move(self, event: Event) -> None:
        """:raises KeyError: the event cannot happen in this state."""
        self.state = LIFE[self.state, event]
