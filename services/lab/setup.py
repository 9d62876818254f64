"""What a run of the lab is made of: the fleet, its faults, the policy.

Owns: the defaults.   Must not know: how any of it is simulated.   Units: seconds, tokens."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ..directory.placement import PlacementRules
from ..router.cost import PROFILES, PrefillModel
from ..router.policy import Policy
from .rules import MakeRule

MODEL = "lab"

_Seconds = Annotated[float, Meta(ge=0)]


def serves(revision: int) -> str:
    """What workers say they serve, by the model's revision; a run begins with 0."""
    return f"{MODEL}-{revision}"


def misjudged(profile: str, factor: float) -> PrefillModel:
    """What routers take prefill for that believe it to take `factor` times as long. What decoding adds to a step is no
    part of that estimate."""
    model = PROFILES[profile]
    return msgspec.structs.replace(
        model,
        fixed_ms=model.fixed_ms * factor,
        token_ms=model.token_ms * factor,
        attention_ms=model.attention_ms * factor,
    )


class Failure(msgspec.Struct, frozen=True):
    """A worker falls silent, with all that it has in hand and all that it holds. `back_after_s` later it begins a new
    life; None: never. One that is silent already does not fail again."""

    at: _Seconds
    worker: str
    back_after_s: _Seconds | None = None


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on the next worker, by name, is taken out every `gap_s`: it takes nothing new, ends what it has in hand
    (live for DRAIN_S at most), and is back `away_s` after that with the next revision of the model."""

    at: _Seconds
    gap_s: _Seconds = 30.0
    away_s: _Seconds = 10.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One run's circumstances. Two runs of equal setups and workloads end alike, to the last bit."""

    # Ours, or a rule to compare with.
    policy: Policy | MakeRule = Policy()
    workers: int = 8
    routers: int = 1
    # 8 x 1.05M tokens: what facts/policy.md is about.
    kv_tokens: int = 1 << 20
    # Of workers whose cache has another size.
    kv_tokens_of: dict[str, int] = {}
    # Of each worker's host store, which begins with what is computed (0: it has none), and the link from there to its
    # GPU, in bytes a second: PCIe 5 x16 in practice, which an H100 has.
    host_tokens: Annotated[int, Meta(ge=0)] = 0
    host_bandwidth: Annotated[float, Meta(gt=0)] = 50e9
    # From one worker to another, in bytes a second each way; None: nothing is pulled.
    transfer_bandwidth: Annotated[float, Meta(gt=0)] | None = None
    # What an engine's steps cost (engine_sim.profile.PRESETS), and what routers take that for; None: the same profile.
    profile: str = "h100-8b"
    model: PrefillModel | None = None
    # Whether routers learn from outcomes what prefills really take.
    learns: bool = True
    # Requests that a bridge lets in at once, as the config's default.
    slots: int = 256
    # Of these the share that warm requests leave to others, and the uncached tokens an engine is given at once.
    cold_reserve: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    prefill_window_tokens: int = 16384
    # From one process to another over the bus.
    hop_s: _Seconds = 0.0005
    # Between two load reports of a worker, at least and at most.
    report_gap_s: _Seconds = 0.005
    report_every_s: _Seconds = 0.2
    # From an engine's step to the directory's index, and the share of event messages that never get there.
    event_delay_s: _Seconds = 0.005
    event_loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # Whether the directory's index is wholly wrong: each answer names a worker that has nothing as having all.
    false_directory: bool = False
    # Until the other routers hear of a dispatch; None: never.
    announce_delay_s: _Seconds | None = 0.005
    # Until the directory does; None: never, so that blocks count when they are there.
    predict_delay_s: _Seconds | None = 0.0005
    # Whether a bridge refuses what its true queue is too long for.
    bounded_start: bool = True
    # A dispatch and three re-choices.
    max_attempts: int = 4
    # What idle workers compute before a request asks for it, as the config's default; None: nothing, as under a rule.
    placement: PlacementRules | None = PlacementRules()
    # Of an order's tokens, how many an engine is given at once.
    warm_step_tokens: int = 1024
    # (seconds, worker): all of its cache goes then, as at a restart; what it has in hand is computed again.
    resets: tuple[tuple[float, str], ...] = ()
    failures: tuple[Failure, ...] = ()
    # Of all workers to the next revision of the model, one after the other. Requests are of the revision that most
    # workers serve that take any, of two equals the newer: a deployment moves its tokenizers half-way.
    upgrade: Upgrade | None = None
    seed: int = 0

    @property
    def orders(self) -> PlacementRules | None:
        """What is ordered of idle workers: nothing by a router that is not ours."""
        return self.placement if isinstance(self.policy, Policy) else None
