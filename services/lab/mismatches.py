"""Reuse that was predicted, or could have been had, and was not: how much, and because of what. From records alone.

Two requests' prompts are compared by the keyed digests of their segments, which say where they agree and nothing else.
For each finished request, in this order; the first that holds names the cause:

    fell short of its prediction by at least a block:
        restart             its worker began a new life while it was decided and run
        eviction            its worker removed blocks of its namespace meanwhile
        not-materialised    what is missing was only announced, by a dispatch that was to make it
        unknown
    found less than an earlier request with the same beginning had left behind, and was told so (`foreseen`):
        restart, eviction   of that request's worker, since then
        unknown
        (a blind choice, or one that passed over a worker that held more, is a decision and in no list of causes)
    found less than what it has in common with an earlier request:
        template-change     that one was rendered by another version of the template
        tokenizer-difference  that one was tokenised by another revision
        inserted            the same prompt but for something inserted or changed before its end: what comes after it
                            is the same again, and more than it

Also counted: requests with a long part of an earlier one's prompt at another place and nobody's at the same ("same
document, different prefix"), whatever came of it. A change of tokenizer is found as far as its tokens are the same:
other ids have other digests.

Owns: the causes.   Must not know: where records come from, what a prompt says, clocks.
Units: tokens, Unix seconds.   Source: DESIGN 10."""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ..bus.blockkeys import reusable_blocks
from ..bus.messages import DecisionRecord, Outcome

RESTART = "restart"
EVICTION = "eviction"
NOT_MATERIALISED = "not-materialised"
TEMPLATE_CHANGE = "template-change"
TOKENIZER_DIFFERENCE = "tokenizer-difference"
INSERTED = "inserted"
UNKNOWN = "unknown"
CAUSES = (INSERTED, TEMPLATE_CHANGE, TOKENIZER_DIFFERENCE, EVICTION, RESTART, NOT_MATERIALISED, UNKNOWN)

# Less in common than this is not worth a word (the policy's `min_reuse_tokens`).
LEAST_TOKENS = 64
# A document, for "same document, different prefix".
LONG_TOKENS = 256
# An event is stored a moment before the directory has applied it.
LAG_S = 1.0
# Earlier requests that are compared by a common segment, the latest ones.
_COMPARED = 4
_EXAMPLES = 3


class Removal(NamedTuple):
    """A worker removed blocks of a namespace (hex; empty: all it held)."""

    worker: str
    ns_id: str
    at: float


class Life(NamedTuple):
    """A worker was heard of in this incarnation."""

    worker: str
    incarnation: int
    at: float


class Group(msgspec.Struct):
    """Requests with one cause, and the tokens they did not reuse because of it. `foreseen` were predicted so."""

    requests: int = 0
    tokens: int = 0
    foreseen: int = 0
    examples: list[str] = []

    def add(self, request_id: str, tokens: int, *, foreseen: bool = False) -> None:
        self.requests += 1
        self.tokens += tokens
        self.foreseen += foreseen
        if len(self.examples) < _EXAMPLES:
            self.examples = [*self.examples, request_id]


class Report(msgspec.Struct, frozen=True):
    """`requests` are those whose engine counted its cached tokens; `predicted` and `cached` are sums over them. `more`
    found more than predicted."""

    requests: int
    predicted: int
    cached: int
    causes: dict[str, Group]
    more: Group
    same_document: Group


class _Ended(NamedTuple):
    """A request that ended well."""

    decision: DecisionRecord
    outcome: Outcome
    cached: int
    segments: list[tuple[int, int, str]]

    @property
    def ns_id(self) -> str:
        return self.outcome.ns_id


class _Shared(NamedTuple):
    """What a request's prompt has in common with an earlier one's, in tokens: at its beginning, before the first
    difference; the part that differs; and what is the same behind it. `moved` is the same, at another place."""

    earlier: _Ended
    leading: int
    differing: int
    later: int
    moved: int


def report(
    decisions: Iterable[DecisionRecord],
    outcomes: Iterable[Outcome],
    removals: Iterable[Removal] = (),
    lives: Iterable[Life] = (),
) -> Report:
    """The causes of all mismatches among these records."""
    ended = _joined(decisions, outcomes)
    known = [*lives, *(Life(one.outcome.worker, one.outcome.incarnation, one.outcome.ended_at) for one in ended)]
    history = _History(removals, known)
    past = _Past()
    found = Report(
        requests=len(ended),
        predicted=sum(one.decision.predicted_cached_tokens for one in ended),
        cached=sum(one.cached for one in ended),
        causes={cause: Group() for cause in CAUSES},
        more=Group(),
        same_document=Group(),
    )
    for one in ended:
        compared = past.compare(one)
        _judge(one, compared, history, found)
        past.add(one)
    return found


def _joined(decisions: Iterable[DecisionRecord], outcomes: Iterable[Outcome]) -> list[_Ended]:
    by_attempt = {(decision.request_id, decision.attempt): decision for decision in decisions}
    ended = []
    for outcome in outcomes:
        decision = by_attempt.get((outcome.request_id, outcome.attempt))
        if decision is None or outcome.worker != decision.selected_worker:
            continue
        if outcome.status == "ok" and outcome.cached_tokens is not None:
            starts = [0, *(end for end, _ in decision.segments)]
            segments = [(start, end, name) for start, (end, name) in zip(starts, decision.segments, strict=False)]
            ended.append(_Ended(decision, outcome, outcome.cached_tokens, segments))
    return sorted(ended, key=_by_decision)


def _by_decision(one: _Ended) -> tuple[float, str]:
    return one.decision.decided_at, one.decision.request_id


def _judge(one: _Ended, compared: list[_Shared], history: "_History", found: Report) -> None:
    request_id, block_size = one.decision.request_id, one.decision.block_size
    short = one.decision.predicted_cached_tokens - one.cached
    if short < 0:
        found.more.add(request_id, -short)
    within = [shared for shared in compared if shared.earlier.ns_id == one.ns_id]
    moved = max((shared.moved for shared in within), default=0)
    # What another request had at the same place needs no second place.
    if moved - max((shared.leading for shared in within), default=0) >= LONG_TOKENS:
        found.same_document.add(request_id, moved)
    if short >= block_size:
        found.causes[_why_short(one, short, history)].add(request_id, short)
        return
    for shared in sorted(compared, key=_by_leading, reverse=True):
        lost = _reusable(one, shared.leading) - one.cached
        if shared.earlier.ns_id == one.ns_id and lost >= max(block_size, LEAST_TOKENS):
            if not _was_chosen(one):
                found.causes[history.since(shared.earlier, one)].add(request_id, lost, foreseen=True)
            return
    for shared in sorted(compared, key=_by_all, reverse=True):
        lost = _reusable(one, shared.leading + shared.later) - one.cached
        cause = _why_changed(one, shared)
        if cause is not None and lost >= LEAST_TOKENS:
            found.causes[cause].add(request_id, lost, foreseen=True)
            return


def _why_short(one: _Ended, short: int, history: "_History") -> str:
    begin, end = one.decision.decided_at - LAG_S, one.outcome.ended_at
    worker = one.outcome.worker
    if history.began(worker, begin, end):
        return RESTART
    if history.removed(worker, one.ns_id, begin, end):
        return EVICTION
    announced = next((c.announced_blocks for c in one.decision.candidate_workers if c.worker == worker), 0)
    if announced and short <= announced * one.decision.block_size:
        return NOT_MATERIALISED
    return UNKNOWN


def _why_changed(one: _Ended, shared: _Shared) -> str | None:
    now, then = one.decision, shared.earlier.decision
    if shared.earlier.ns_id == one.ns_id:
        return INSERTED if shared.later > shared.differing else None
    if then.template_version != now.template_version:
        return TEMPLATE_CHANGE
    if then.tokenizer_revision != now.tokenizer_revision:
        return TOKENIZER_DIFFERENCE
    # Another model, epoch or salt: that nothing is shared is what was asked for.
    return None


def _was_chosen(one: _Ended) -> bool:
    """Whether little reuse was the router's choice: nobody was asked who holds what, or one that holds more was passed
    over."""
    predicted = one.decision.predicted_cached_tokens
    return one.decision.blind or any(c.cached_tokens > predicted for c in one.decision.candidate_workers)


def _reusable(one: _Ended, tokens: int) -> int:
    """What an engine can serve of so many tokens in common."""
    block_size = one.decision.block_size
    return min(tokens // block_size, reusable_blocks(one.decision.prompt_tokens, block_size)) * block_size


def _by_leading(shared: _Shared) -> tuple[int, float]:
    return shared.leading, shared.earlier.decision.decided_at


def _by_all(shared: _Shared) -> tuple[int, float]:
    return shared.leading + shared.later, shared.earlier.decision.decided_at


class _Past:
    """Earlier requests by their segments."""

    def __init__(self) -> None:
        self._ended: list[_Ended] = []
        self._by_segment: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_COMPARED))

    def add(self, one: _Ended) -> None:
        for _, _, name in one.segments:
            self._by_segment[name].append(len(self._ended))
        self._ended.append(one)

    def compare(self, one: _Ended) -> list[_Shared]:
        """With those that have most in common with it and had ended when it was decided."""
        common: Counter[int] = Counter()
        for start, end, name in one.segments:
            for number in set(self._by_segment.get(name, ())):
                if self._ended[number].outcome.ended_at <= one.decision.decided_at:
                    common[number] += end - start
        most = sorted(common, key=lambda number: (-common[number], -number))[:_COMPARED]
        return [_shared(self._ended[number], one) for number in most]


def _shared(earlier: _Ended, one: _Ended) -> _Shared:
    before, now = earlier.segments, one.segments
    equal = 0
    while equal < min(len(before), len(now)) and before[equal] == now[equal]:
        equal += 1
    leading = now[equal - 1][1] if equal else 0
    # Only what stands behind the first difference there can be behind it here.
    starts = {name: start for start, _, name in before[equal:]}
    differing = later = moved = 0
    for start, end, name in now[equal:]:
        if name in starts:
            later += end - start
            moved += (end - start) if starts[name] != start else 0
        elif not later:
            differing += end - start
    return _Shared(earlier, leading, differing, later, moved)


class _History:
    """What workers did when."""

    def __init__(self, removals: Iterable[Removal], lives: Iterable[Life]) -> None:
        self._removals: dict[tuple[str, str], list[float]] = defaultdict(list)
        for removal in sorted(removals, key=attrgetter("at")):
            self._removals[removal.worker, removal.ns_id].append(removal.at)
        began: dict[str, dict[int, float]] = defaultdict(dict)
        for life in lives:
            ats = began[life.worker]
            ats[life.incarnation] = min(life.at, ats.get(life.incarnation, life.at))
        # The first life of each that is known of is no restart.
        self._restarts: dict[str, Sequence[tuple[int, float]]] = {
            worker: sorted(ats.items())[1:] for worker, ats in began.items()
        }

    def began(self, worker: str, begin: float, end: float) -> bool:
        return any(begin <= at <= end for _, at in self._restarts.get(worker, ()))

    def removed(self, worker: str, ns_id: str, begin: float, end: float) -> bool:
        for name in ("", ns_id):
            ats = self._removals.get((worker, name), [])
            at = bisect.bisect_left(ats, begin)
            if at < len(ats) and ats[at] <= end:
                return True
        return False

    def since(self, earlier: _Ended, one: _Ended) -> str:
        """What became of the blocks that a request left behind."""
        worker, incarnation = earlier.outcome.worker, earlier.outcome.incarnation
        until = one.outcome.ended_at
        if any(life > incarnation and at <= until for life, at in self._restarts.get(worker, ())):
            return RESTART
        if self.removed(worker, earlier.ns_id, earlier.decision.decided_at, until):
            return EVICTION
        return UNKNOWN
