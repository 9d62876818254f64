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
COLUMNS = ("class", "requests", "predicted", "cached", "warm", "partial", "cold", "all")
LEGEND = """\
warm, partial, cold, all: time to first token in ms, p50/p95, of requests that
  found all of their prompt cached (but at most the last block), some, or none.
predicted, cached: prompt tokens, by the router beforehand, by the engine after.
  Predicted is higher where announced blocks were evicted before their use."""
# What the names that occur mean; in full: services/router/policy.py.
DECISIONS = {
    "prefer-warm-worker": "to a worker that holds all that can be reused",
    "partial-hit": "to a worker that holds a part",
    "remote-pull": "what it lacks comes sooner than it would be computed",
    "home-worker": "nobody holds more than all traffic shares: to its home",
    "cold-reserve": "nothing of use there, and a slot kept for such requests",
    "balanced-cold": "nobody holds anything of use: by load",
    "blind": "the directory did not answer: by load",
    "round-robin": "to the next in turn",
    "spill-max-wait": "the holder's queue is too long: to another",
    "spill-margin": "the holder is later by more than the hit is worth",
    "spill-memory": "the holder would wait for KV memory: to another",
}
_SHOWN_IDS = 5
_KINDS = ("warm", "partial", "cold")


class Sample(msgspec.Struct, frozen=True):
    """One answered request, as its client saw it."""

    request_class: str
    request_id: str
    ttft_ms: float
    answer: str = ""


class Run(msgspec.Struct, frozen=True):
    """One pass of the workload under one policy: what clients saw, and the journal by client request id.

    `unreadable` are subjects under which there was something else than their record."""

    policy: str
    samples: list[Sample] = []
    decisions: dict[str, messages.DecisionRecord] = {}
    outcomes: dict[str, messages.Outcome] = {}
    failures: list[str] = []
    unreadable: list[str] = []

    def percentile(self, share: float) -> float:
        return percentile([sample.ttft_ms for sample in self.samples], share)

    def mean(self) -> float:
        return statistics.fmean(sample.ttft_ms for sample in self.samples) if self.samples else 0.0

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
    """One row a class, in the order of COLUMNS, and one for all of them; requests without records count as answered and
    nothing more."""
    by_class = {name: [sample for sample in run.samples if sample.request_class == name] for name in classes}
    totals = [sample for samples in by_class.values() for sample in samples]
    return [_row(run, name, samples) for name, samples in (*by_class.items(), ("all", totals))]


def _row(run: Run, name: str, samples: Sequence[Sample]) -> tuple[str, ...]:
    recorded = [(sample, run.outcomes[sample.request_id]) for sample in samples if sample.request_id in run.outcomes]
    times = _by_warmth(run, samples)
    return (
        name,
        str(len(samples)),
        str(sum(outcome.predicted_tokens for _, outcome in recorded)),
        str(sum(outcome.cached_tokens or 0 for _, outcome in recorded)),
        *(_spread(times[kind]) for kind in _KINDS),
        _spread([sample.ttft_ms for sample in samples]),
    )


def _by_warmth(run: Run, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """TTFTs of those that have an outcome, by how much of their prompt was cached."""
    times: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        outcome = run.outcomes.get(sample.request_id)
        if outcome is not None:
            kind = blockkeys.warmth(outcome.prompt_tokens, outcome.cached_tokens or 0, BLOCK_SIZE)
            times[kind].append(sample.ttft_ms)
    return times


def warm_and_cold(*runs: Run) -> str:
    """How much sooner a first token comes where the prompt was cached, whatever sent it there."""
    times: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for kind, found in _by_warmth(run, run.samples).items():
            times[kind] += found
    return "first token at the median: " + ", ".join(
        f"{percentile(times[kind], 0.5):.0f} ms {kind} ({len(times[kind])} requests)" for kind in _KINDS
    )


def table(run: Run, classes: Sequence[str]) -> Table:
    """Fits 80 columns, whatever the figures."""
    made = _bare_table(COLUMNS, title=run.policy)
    for row in rows(run, classes):
        made.add_row(*row)
    return made


def decisions(run: Run, classes: Sequence[str]) -> list[str]:
    """How the requests of each class were decided, one line a class."""
    lines = []
    for name in classes:
        ids = [sample.request_id for sample in run.samples if sample.request_class == name]
        chosen = Counter(run.decisions[each].decision for each in ids if each in run.decisions)
        if chosen:
            counts = ", ".join(f"{decision} {count}" for decision, count in chosen.most_common())
            lines.append(f"  {name:<10}{counts}")
    return lines


def decision_legend(*runs: Run) -> list[str]:
    """What the decisions that occurred mean, one line each, in the order of DECISIONS."""
    occurred = {record.decision for run in runs for record in run.decisions.values()}
    return [f"  {name:<20}{meaning}" for name, meaning in DECISIONS.items() if name in occurred]


def comparison(*runs: Run) -> Table:
    """What the verdict looks at, side by side."""
    made = _bare_table(("first token, ms", "p50", "p95", "mean", "cached"), title="")
    for run in runs:
        figures = (run.percentile(0.5), run.percentile(0.95), run.mean())
        made.add_row(run.policy, *(f"{figure:.1f}" for figure in figures), f"{run.cached_ratio():.0%}")
    return made


def sentence(base: Run, ours: Run) -> str:
    """The outcome for people: how much sooner, and from how much reuse."""
    median = _sooner(base.percentile(0.5), ours.percentile(0.5), "at the median")
    tail = _sooner(base.percentile(0.95), ours.percentile(0.95), "at p95")
    return (
        f"{ours.policy}: first token {median}, {tail}; "
        f"{ours.cached_ratio():.0%} of prompt tokens came from caches, not {base.cached_ratio():.0%}"
    )


def _sooner(before: float, now: float, where: str) -> str:
    if before <= 0 or now <= 0:
        return f"not measured {where}"
    if now <= before:
        return f"{before / now:.1f}x sooner {where} ({now:.0f} ms, not {before:.0f})"
    return f"{now / before:.1f}x later {where} ({now:.0f} ms, not {before:.0f})"


def _bare_table(columns: Sequence[str], *, title: str) -> Table:
    made = Table(title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
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
    if run.unreadable:
        count, first = len(run.unreadable), run.unreadable[0]
        reasons.append(f"{run.policy}: {count} records of the journal cannot be read, such as under {first}")
    strays = [name for name, record in run.decisions.items() if record.policy.split("/")[0] != run.policy]
    if strays:
        reasons.append(f"{run.policy}: {len(strays)} requests were decided by another policy")
    return reasons


def _spread(values: list[float]) -> str:
    return f"{_short(percentile(values, 0.5))}/{_short(percentile(values, 0.95))}" if values else "-"


def _short(ms: float) -> str:
    """At most four characters up to a quarter of an hour: eight columns have to fit."""
    return f"{ms:.0f}" if ms < 9999.5 else f"{ms / 1000:.0f}s"
