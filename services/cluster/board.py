"""What `prefixbus top` shows: the fleet now, and what became of requests in the last minutes.

Owns: the window, the sums and the frame.   Must not know: NATS, clocks, where the frame is drawn.
Units: ms, tokens; `now` in monotonic seconds, `wall` in Unix seconds."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Group
from rich.table import Table

from ..bus import ids
from ..bus.blockkeys import warmth
from ..bus.messages import DecisionRecord, Load, Outcome
from .verdict import percentile

WINDOW_S = 300.0
# What is kept of the window at most: some minutes at 300 requests/s.
MOST_KEPT = 50_000
KINDS = ("warm", "partial", "cold")
_FRAME_MIN_ROWS = 3
_SUBJECT_SHOWN = 30


class Worker(msgspec.Struct, frozen=True):
    """A worker's last heartbeat, and what its age makes of its lease: `alive`, `suspect` or `lost`."""

    load: Load
    silent_s: float
    lease: str


class Spread(msgspec.Struct, frozen=True):
    """Times to first token of one kind of request."""

    count: int
    p50_ms: float
    p95_ms: float


class Latest(msgspec.Struct, frozen=True):
    """A decision, with its outcome once there is one; or the outcome of a request that was never decided."""

    decision: DecisionRecord | None
    outcome: Outcome | None

    @property
    def request_id(self) -> str:
        either = self.decision or self.outcome
        return either.request_id if either is not None else ""


class View(msgspec.Struct, frozen=True):
    """One moment. `latest` begins with the last decision. `undecided` are the requests that a router ended before it
    had chosen a worker, by their errors; `left_out` the subjects of messages that could not be read, in their order."""

    workers: list[Worker]
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    ttft: dict[str, Spread]
    decisions: list[tuple[str, int]]
    undecided: list[tuple[str, int]]
    latest: list[Latest]
    left_out: list[str]

    @property
    def hit_token_ratio(self) -> float:
        """Token reuse: cached over all prompt tokens of requests whose engine counted them."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Heard(NamedTuple):
    load: Load
    at: float


class _LeftOut(NamedTuple):
    subject: str
    at: float


class Board:
    """Takes heartbeats, decisions and outcomes in, in the order in which they come; `view` says what they amount to."""

    def __init__(self, suspect_after_s: float, lost_after_s: float) -> None:
        self._suspect_after_s = suspect_after_s
        self._lost_after_s = lost_after_s
        self._heard: dict[str, _Heard] = {}
        # Decisions, and the outcomes of requests that were never decided.
        self._rows: deque[DecisionRecord | Outcome] = deque(maxlen=MOST_KEPT)
        self._outcomes: dict[tuple[str, int, str], Outcome] = {}
        self._left_out: deque[_LeftOut] = deque(maxlen=MOST_KEPT)

    def load(self, load: Load, now: float) -> None:
        self._heard[load.worker] = _Heard(load, now)

    def decision(self, decision: DecisionRecord) -> None:
        self._rows.append(decision)

    def outcome(self, outcome: Outcome) -> None:
        if not outcome.worker:
            self._rows.append(outcome)
            return
        self._outcomes[outcome.request_id, outcome.attempt, outcome.worker] = outcome
        if len(self._outcomes) > MOST_KEPT:
            del self._outcomes[next(iter(self._outcomes))]

    def left_out(self, subject: str, wall: float) -> None:
        """A heartbeat or a record that came under this subject could not be read, or was not about it."""
        self._left_out.append(_LeftOut(subject, wall))

    def view(self, now: float, wall: float) -> View:
        """What was decided in the last WINDOW_S, and how that went on."""
        self._forget(wall)
        rows = [self._row(one) for one in self._rows]
        undecided = [one.outcome for one in rows if one.outcome is not None and one.decision is None]
        decisions = [one.decision for one in rows if one.decision is not None]
        ended = [(one.decision, one.outcome) for one in rows if one.decision is not None and one.outcome is not None]
        counted = [outcome for _, outcome in ended if outcome.cached_tokens is not None]
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for decision, outcome in ended:
            # Records of older versions have no block size.
            if outcome.ttft_ms is not None and outcome.cached_tokens is not None and decision.block_size > 0:
                kind = warmth(outcome.prompt_tokens, outcome.cached_tokens, decision.block_size)
                times[kind].append(outcome.ttft_ms)
        return View(
            workers=[self._worker(heard, now) for _, heard in sorted(self._heard.items())],
            requests=len({one.request_id for one in rows}),
            failed=len(undecided) + sum(outcome.status != "ok" for _, outcome in ended),
            prompt_tokens=sum(outcome.prompt_tokens for outcome in counted),
            cached_tokens=sum(outcome.cached_tokens or 0 for outcome in counted),
            ttft={kind: _spread(values) for kind, values in times.items()},
            decisions=Counter(decision.decision for decision in decisions).most_common(),
            undecided=Counter(outcome.error for outcome in undecided).most_common(),
            latest=rows[::-1],
            left_out=[one.subject for one in self._left_out],
        )

    def _row(self, one: DecisionRecord | Outcome) -> Latest:
        if isinstance(one, Outcome):
            return Latest(None, one)
        return Latest(one, self._outcomes.get((one.request_id, one.attempt, one.selected_worker)))

    def _forget(self, wall: float) -> None:
        """All that is not of the last WINDOW_S by its own word, in whatever order it came."""

        def is_of_now(at: float) -> bool:
            return abs(wall - at) <= WINDOW_S

        self._rows = deque((one for one in self._rows if is_of_now(_at(one))), maxlen=MOST_KEPT)
        self._left_out = deque((one for one in self._left_out if is_of_now(one.at)), maxlen=MOST_KEPT)
        for key in [key for key, outcome in self._outcomes.items() if not is_of_now(outcome.ended_at)]:
            del self._outcomes[key]

    def _worker(self, heard: _Heard, now: float) -> Worker:
        silent_s = now - heard.at
        lease = "alive"
        if silent_s >= self._suspect_after_s:
            lease = "lost" if silent_s >= self._lost_after_s else "suspect"
        return Worker(heard.load, silent_s, lease)


def frame(view: View, height: int, *, cut_off: bool = False) -> Group:
    """The view in 80 columns and, as far as its workers allow, `height` lines: the last decisions get what is left."""
    workers, decisions = _workers(view.workers), _decisions(view)
    state = "cut off from the bus; as last heard" if cut_off else f"last {WINDOW_S / 60:.0f} minutes"
    sums = (
        f"{view.requests} requests, {view.failed} failed; {view.cached_tokens} of {view.prompt_tokens} prompt tokens "
        f"from caches ({view.hit_token_ratio:.0%})"
    )
    # Three tables' heads, a line between parts, and the lines of text.
    rows = height - len(view.workers) - len(KINDS) - 9 - len(decisions)
    return Group(
        f"prefixbus top: {state}",
        workers,
        "",
        sums,
        _ttft(view.ttft),
        "",
        *decisions,
        "",
        _latest(view.latest[: max(_FRAME_MIN_ROWS, rows)]),
    )


def _workers(workers: Sequence[Worker]) -> Table:
    numbers = ("queue ms", "running", "waiting", "kv use")
    table = _table(("worker", "lease", *numbers, "model"), right=numbers)
    for one in workers:
        load = one.load
        lease = "draining" if load.draining and one.lease == "alive" else one.lease
        cells = (f"{load.queue_ms:.0f}", str(load.running), str(load.waiting), f"{load.kv_usage:.0%}")
        table.add_row(load.worker, lease, *cells, load.model)
    return table


def _ttft(times: dict[str, Spread]) -> Table:
    numbers = ("requests", "p50 ms", "p95 ms")
    table = _table(("first token", *numbers), right=numbers)
    for kind, spread in times.items():
        figures = (f"{spread.p50_ms:.0f}", f"{spread.p95_ms:.0f}") if spread.count else ("-", "-")
        table.add_row(kind, str(spread.count), *figures)
    return table


def _decisions(view: View) -> list[str]:
    lines = ["decisions: " + (_counts(view.decisions) or "none")]
    if view.undecided:
        lines.append(f"not decided: {_counts(view.undecided)}")
    if (count := len(view.left_out)) == 1:
        lines.append(f"1 message could not be read, under {view.left_out[-1][:_SUBJECT_SHOWN]}")
    elif count:
        lines.append(f"{count} messages could not be read, the last under {view.left_out[-1][:_SUBJECT_SHOWN]}")
    return lines


def _counts(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)


def _latest(latest: Sequence[Latest]) -> Table:
    numbers = ("predicted", "cached", "ttft ms")
    table = _table(("last", "worker", "decision", *numbers, "status"), right=numbers)
    for one in latest:
        decision, outcome = one.decision, one.outcome
        cached = "" if outcome is None or outcome.cached_tokens is None else str(outcome.cached_tokens)
        ttft = "" if outcome is None or outcome.ttft_ms is None else f"{outcome.ttft_ms:.0f}"
        status = "" if outcome is None else outcome.error or outcome.status
        chosen = ("", "", "")
        if decision is not None:
            chosen = (decision.selected_worker, decision.decision, str(decision.predicted_cached_tokens))
        table.add_row(one.request_id[-ids.SHOWN :], *chosen, cached, ttft, status)
    return table


def _at(one: DecisionRecord | Outcome) -> float:
    return one.ended_at if isinstance(one, Outcome) else one.decided_at


def _table(columns: Sequence[str], *, right: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _spread(values: list[float]) -> Spread:
    return Spread(len(values), percentile(values, 0.5), percentile(values, 0.95))
