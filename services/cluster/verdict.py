"""What two passes of one workload say: whether prefix-aware routing was better than round-robin, and by how much.

Owns: the rule, the figures, the table and the last line.   Must not know: how requests are sent, clocks, terminals.
Units: TTFT in ms, on the client's clock; tokens."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
from rich.table import Table

from ..bus import blockkeys, messages
from ..router.cost import PROFILES, prefill_ms

# Token reuse that the workload allows for easily; less means that routing does not do its work.
ENOUGH_REUSE = 0.3
# Of the demo's model.
BLOCK_SIZE = 32
COLUMNS = ("class", "requests", "predicted", "cached", "warm p50/p95", "partial p50/p95", "cold p50/p95", "decisions")
_SHOWN_IDS = 5


class Sample(msgspec.Struct, frozen=True):
    """One answered request, as its client saw it."""

    request_class: str
    request_id: str
    ttft_ms: float


class Run(msgspec.Struct, frozen=True):
    """One pass of the workload under one policy: what clients saw, and the journal by client request id."""

    policy: str
    samples: list[Sample] = []
    decisions: dict[str, messages.DecisionRecord] = {}
    outcomes: dict[str, messages.Outcome] = {}
    failures: list[str] = []

    def percentile(self, share: float) -> float:
        return percentile([sample.ttft_ms for sample in self.samples], share)

    def cached_ratio(self) -> float:
        """Token reuse: cached over all prompt tokens."""
        asked = sum(outcome.prompt_tokens for outcome in self.outcomes.values())
        return sum(outcome.cached_tokens or 0 for outcome in self.outcomes.values()) / max(asked, 1)

    def unrecorded(self) -> list[str]:
        """The answered requests whose decision or outcome is not in the journal."""
        ids = [sample.request_id for sample in self.samples]
        return [name for name in ids if name not in self.decisions or name not in self.outcomes]


class Verdict(msgspec.Struct, frozen=True):
    """`reasons` says in sentences what speaks against it; none: prefix-aware routing won."""

    reasons: list[str]

    @property
    def ok(self) -> bool:
        return not self.reasons


def judge(base: Run, ours: Run, wrong_hits: int) -> Verdict:
    """Better means: a lower median TTFT, a 95th percentile that is not worse, real reuse, and not one wrong hit. Runs
    that are not whole say nothing."""
    reasons = [reason for run in (base, ours) for reason in _incomplete(run)]
    if not ours.percentile(0.5) < base.percentile(0.5):
        reasons.append(f"the TTFT p50 of {ours.policy} is not lower")
    if not ours.percentile(0.95) <= base.percentile(0.95):
        reasons.append(
            f"the TTFT p95 of {ours.policy} is worse: {ours.percentile(0.95):.1f} ms, not {base.percentile(0.95):.1f}"
        )
    if not ours.cached_ratio() > ENOUGH_REUSE:
        reasons.append(f"{ours.policy} reused only {ours.cached_ratio():.3f} of all tokens")
    if wrong_hits:
        reasons.append(f"{wrong_hits} blocks were reused for something else than they were computed from")
    return Verdict(reasons)


def last_line(base: Run, ours: Run, wrong_hits: int) -> str:
    """The line that programs read."""
    return (
        f"demo: {'ok' if judge(base, ours, wrong_hits).ok else 'failed'} "
        f"round_robin_ttft_p50_ms={base.percentile(0.5):.1f} prefix_aware_ttft_p50_ms={ours.percentile(0.5):.1f} "
        f"cached_token_ratio={ours.cached_ratio():.3f} wrong_hits={wrong_hits}"
    )


def rows(run: Run, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """One row a class, in the order of COLUMNS; requests without records count as answered and nothing more."""
    by_class: dict[str, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        by_class[sample.request_class].append(sample)
    made = []
    for request_class in classes:
        samples = by_class[request_class]
        recorded = [
            (sample, run.outcomes[sample.request_id]) for sample in samples if sample.request_id in run.outcomes
        ]
        times: dict[str, list[float]] = defaultdict(list)
        for sample, outcome in recorded:
            kind = blockkeys.warmth(outcome.prompt_tokens, outcome.cached_tokens or 0, BLOCK_SIZE)
            times[kind].append(sample.ttft_ms)
        chosen = Counter(
            run.decisions[sample.request_id].decision for sample in samples if sample.request_id in run.decisions
        )
        made.append(
            (
                request_class,
                str(len(samples)),
                str(sum(outcome.predicted_tokens for _, outcome in recorded)),
                str(sum(outcome.cached_tokens or 0 for _, outcome in recorded)),
                *(_spread(times[kind]) for kind in ("warm", "partial", "cold")),
                ", ".join(f"{name} {count}" for name, count in chosen.most_common()),
            )
        )
    return made


def table(run: Run, classes: Sequence[str]) -> Table:
    made = Table(title=run.policy, title_justify="left")
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("class", "decisions") else "right")
    for row in rows(run, classes):
        made.add_row(*row)
    return made


def net_saved_ms(base: Run, ours: Run, profile: str = "h100-8b") -> float:
    """Prefill that cache hits made needless, less the time that requests waited in queues for it: `base` less `ours`.
    Prefill is priced by the profile that the engines simulate."""

    def spent(run: Run) -> float:
        return sum(
            prefill_ms(PROFILES[profile], outcome.prompt_tokens - (outcome.cached_tokens or 0), outcome.prompt_tokens)
            + (outcome.queue_wait_ms or 0.0)
            for outcome in run.outcomes.values()
        )

    return spent(base) - spent(ours)


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile, the median for 0.5; 0 for no values."""
    if not values:
        return 0.0
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _incomplete(run: Run) -> list[str]:
    reasons = [f"{run.policy}: {failure}" for failure in run.failures]
    if not run.samples:
        reasons.append(f"{run.policy}: nothing was answered")
    if missing := run.unrecorded():
        shown = ", ".join(missing[:_SHOWN_IDS]) + (" ..." if len(missing) > _SHOWN_IDS else "")
        reasons.append(f"{run.policy}: the journal has no decision or no outcome of {len(missing)} requests: {shown}")
    strays = [name for name, record in run.decisions.items() if record.policy.split("/")[0] != run.policy]
    if strays:
        reasons.append(f"{run.policy}: {len(strays)} requests were decided by another policy")
    return reasons


def _spread(values: list[float]) -> str:
    return f"{percentile(values, 0.5):.0f}/{percentile(values, 0.95):.0f}" if values else "-"
