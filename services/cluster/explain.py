"""`prefixbus explain`: why a request went where it went, and what then happened, out of its records.

Owns: the words and the table.   Must not know: where records come from.   Units: ms, tokens."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import RenderableType
from rich.table import Table

from ..bus.config import asked_name
from ..bus.messages import CandidateRecord, DecisionRecord, Outcome
from . import moments
from .records import Records
from .verdict import DECISIONS

# Columns beside the terms, which are all fields in ms.
_COUNTS = ("cached_tokens", "free_tokens", "pinned_tokens")
_SUMS = ("ttft_ms", "cost_ms")


class Told(msgspec.Struct, frozen=True):
    """A decision joined with what came of it, in the names that people outside use (DESIGN 10). What is null was not
    measured, or is not in the journal."""

    request_id: str
    attempt: int
    model: str
    prefix_key: str
    selected_worker: str
    candidate_workers: list[str]
    predicted_cached_tokens: int
    actual_cached_tokens: int | None
    queue_wait_ms: float | None
    prefill_tokens: int | None
    decision: str


def document(records: Records) -> bytes:
    """One JSON object: the records themselves, and each decision in short with its outcome (`told`)."""
    outcomes = {(one.request_id, one.attempt, one.worker): one for one in records.outcomes}
    told = [_told(one, outcomes.get((one.request_id, one.attempt, one.selected_worker))) for one in records.decisions]
    return msgspec.json.format(msgspec.json.encode({"told": told, **msgspec.to_builtins(records)}))


def _told(decision: DecisionRecord, outcome: Outcome | None) -> Told:
    return Told(
        request_id=decision.request_id,
        attempt=decision.attempt,
        model=decision.model,
        prefix_key=decision.prefix_key,
        selected_worker=decision.selected_worker,
        candidate_workers=[one.worker for one in decision.candidate_workers],
        predicted_cached_tokens=decision.predicted_cached_tokens,
        actual_cached_tokens=outcome.cached_tokens if outcome else None,
        queue_wait_ms=outcome.queue_wait_ms if outcome else None,
        prefill_tokens=outcome.prefill_tokens if outcome else None,
        decision=decision.decision,
    )


def story(records: Records, others: Sequence[str]) -> Iterator[RenderableType]:
    """Everything for people; `others` are requests that had the same client's id."""
    decisions = sorted(records.decisions, key=lambda decision: decision.attempt)
    outcomes = {(outcome.attempt, outcome.worker): outcome for outcome in records.outcomes}
    if decisions:
        yield from _request(decisions[0])
    elif records.outcomes:
        yield from _undecided(records.outcomes[-1])
    if others:
        yield f"Requests before it had the same label: {', '.join(others[-3:])}{' ...' if len(others) > 3 else ''}."
    for position, decision in enumerate(decisions):
        yield ""
        yield from _choice(decision)
        yield candidates(decision.candidate_workers)
        if zeros := _zero_terms(decision.candidate_workers):
            yield f"0 for all: {', '.join(zeros)}."
        if decision.excluded:
            yield f"no candidates: {', '.join(f'{name} ({why})' for name, why in sorted(decision.excluded.items()))}"
        is_last = position == len(decisions) - 1
        outcome = outcomes.get((decision.attempt, decision.selected_worker))
        yield from _happened(decision, outcome, is_last=is_last)


def candidates(workers: Sequence[CandidateRecord]) -> Table:
    """One row a candidate, in the order in which they would be tried; terms that are 0 for all are left out."""
    zeros = set(_zero_terms(workers))
    terms = [name for name in _terms() if name not in _SUMS and _spoken(name) not in zeros]
    columns = [*_COUNTS, *terms, *_SUMS]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("worker")
    for name in columns:
        table.add_column(_spoken(name).replace(" ", "\n"), justify="right", vertical="bottom", no_wrap=True)
    table.add_column("rho", justify="right", vertical="bottom", no_wrap=True)
    for one in workers:
        table.add_row(one.worker, *(_number(getattr(one, name)) for name in columns), f"{one.rho:.2f}")
    return table


def _request(decision: DecisionRecord) -> Iterator[str]:
    label = f", label {decision.client_request_id}" if decision.client_request_id != decision.request_id else ""
    asked = asked_name(decision.model, decision.adapter)
    yield f"request {decision.request_id}{label}, of tenant {decision.tenant}, for {asked}"
    yield (
        f"{decision.prompt_tokens} prompt tokens ({decision.prefix_class}), about {decision.output_tokens} expected "
        f"as answer; decided {moments.show(decision.decided_at)} by {decision.router}"
    )
    if decision.blind:
        yield "The directory did not answer: nothing was known of what workers hold."
    elif decision.held_blocks:
        yield (
            f"An available worker held {decision.held_blocks} of its blocks of {decision.block_size} tokens; "
            f"{decision.shared_blocks} are shared with other traffic."
        )
    else:
        yield "No available worker held any of its blocks."
    if decision.home:
        yield f"Its home was {decision.home}."


def _undecided(outcome: Outcome) -> Iterator[str]:
    label = f", label {outcome.client_request_id}" if outcome.client_request_id != outcome.request_id else ""
    why = "its decisions are not in the journal" if outcome.worker else "no worker was chosen"
    asked = asked_name(outcome.model, outcome.adapter)
    yield f"request {outcome.request_id}{label}, of tenant {outcome.tenant}, for {asked}"
    yield f"{outcome.prompt_tokens} prompt tokens ({outcome.prefix_class}); {why}"
    yield (
        f"then: {outcome.status} ({outcome.error}), said by the router {moments.show(outcome.ended_at)}, "
        f"{_ms(outcome.total_ms)} after it came"
    )


def _choice(decision: DecisionRecord) -> Iterator[str]:
    meaning = DECISIONS.get(decision.decision, "")
    yield (
        f"attempt {decision.attempt}: {decision.selected_worker}, {decision.decision}"
        f"{f' ({meaning})' if meaning else ''}, by policy {decision.policy}"
    )
    if not decision.candidate_workers:
        yield "Its record names no candidates."
        return
    chosen, *rest = decision.candidate_workers
    if rest:
        lead_ms = rest[0].cost_ms - chosen.cost_ms
        yield (
            f"Its cost was {abs(lead_ms):.1f} ms {'below' if lead_ms >= 0 else 'above'} that of {rest[0].worker}, "
            "the next to be tried."
        )
    if chosen.transfer_ms:
        yield f"{chosen.pull_tokens} tokens were to come from {chosen.pull_source} in {chosen.transfer_ms:.1f} ms."
    if chosen.announced_blocks or chosen.trust < 1:
        yield (
            f"It was said to hold {chosen.held_blocks} blocks, {chosen.announced_blocks} of them announced and not "
            f"there yet; {chosen.trust:.0%} of that was believed."
        )
    if (shadow := decision.shadow) is not None:
        yield f"In shadow, policy {shadow.policy} would have chosen {shadow.selected_worker}, {shadow.decision}."


def _happened(decision: DecisionRecord, outcome: Outcome | None, *, is_last: bool) -> Iterator[str]:
    if outcome is None:
        if is_last:
            yield "then: no outcome is in the journal (yet): it runs, or the record was lost with its worker."
        else:
            yield f"then: failed, {decision.selected_worker} refused it, gave it back or was lost; it was tried again."
        return
    why = f" ({outcome.error})" if outcome.error else ""
    yield f"then: {outcome.status}{why} on {outcome.worker}, {_ms(outcome.total_ms)} in all"
    if outcome.queue_wait_ms is None and outcome.ttft_ms is None and outcome.cached_tokens is None:
        yield "  nothing of it was measured: its worker did not report, or the router ended it"
        return
    yield f"  waited {_ms(outcome.queue_wait_ms)}, first token after {_ms(outcome.ttft_ms)}"
    if outcome.ahead_own_tokens or outcome.ahead_others_tokens:
        yield (
            f"  before its turn came, the engine was given {outcome.ahead_own_tokens} tokens of its own tenant and "
            f"{outcome.ahead_others_tokens} of others"
        )
    predicted = decision.predicted_cached_tokens
    if outcome.cached_tokens is None:
        yield f"  cached tokens: {predicted} predicted; the engine did not say how many"
        return
    yield (
        f"  cached tokens: {outcome.cached_tokens} ({_beside(predicted, outcome.cached_tokens)}); "
        f"{outcome.prefill_tokens} computed, {outcome.output_tokens} answered"
    )


def _beside(predicted: int, actual: int) -> str:
    if actual == predicted:
        return "as predicted"
    return f"{predicted} predicted, {abs(actual - predicted)} {'more' if actual > predicted else 'fewer'}"


def _terms() -> list[str]:
    return [field for field in CandidateRecord.__struct_fields__ if field.endswith("_ms")]


def _zero_terms(workers: Sequence[CandidateRecord]) -> list[str]:
    return [_spoken(name) for name in _terms() if name not in _SUMS and not any(getattr(one, name) for one in workers)]


def _spoken(field: str) -> str:
    return field.removesuffix("_ms").removesuffix("_tokens").replace("_", " ")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return "an unknown time" if value is None else f"{value:.1f} ms"
