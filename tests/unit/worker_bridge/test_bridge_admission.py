"""The bridge's table of requests: who is let in, once; how much work that is; and nothing left when all is over."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixbus.bus.cancels import REMEMBER_PER_TENANT, REMEMBER_S
from prefixbus.bus.clock import VirtualClock
from prefixbus.worker_bridge import admission
from prefixbus.worker_bridge.admission import LIFE, Admission, Event, Left, Offer, Phase, Ticket

WALL = 1_700_000_000.0


def offer(request_id: str = "r1", attempt: int = 1, **changes: Any) -> Offer:
    fields: dict[str, Any] = {
        "tenant": "acme",
        "client_request_id": f"c-{request_id}",
        "incarnation": 7,
        "prefill_ms": 100.0,
        "prompt_tokens": 64,
        "held_blocks": 1,
        "max_queue_ms": math.inf,
        "accept_by_at": WALL + 1,
        "deadline_at": WALL + 60,
    }
    return Offer(request_id=request_id, attempt=attempt, **fields | changes)


def table(slots: int = 4, window_tokens: int = 1000, reserved_slots: int = 0) -> Admission:
    made = Admission(slots, window_tokens, reserved_slots)
    made.incarnation = 7
    return made


def let_in(made: Admission, asked: Offer, now: float = 0.0) -> Ticket:
    ticket = made.offer(asked, now, WALL).start
    assert ticket is not None
    return ticket


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 6}, admission.WRONG_INCARNATION),
        ({"accept_by_at": WALL - 0.001}, admission.TOO_LATE),
        ({"deadline_at": WALL - 0.001}, admission.DEADLINE_EXCEEDED),
        ({"max_queue_ms": -1.0}, admission.QUEUE_TOO_LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dispatch_that_means_something_else_is_refused(changes: dict[str, Any], reason: str) -> None:
    made = table()

    verdict = made.offer(offer(**changes), 0.0, WALL)

    assert (verdict.refused, verdict.start) == (reason, None)
    assert made.waiting == 0


def test_an_attempt_is_stopped_by_an_abort_of_a_later_one() -> None:
    made = table()
    running = let_in(made, offer())

    assert made.stop_attempt("r1", 2, 0.0) is running


def test_an_abort_of_what_has_ended_does_not_make_it_forgotten() -> None:
    made = table()
    made.end(let_in(made, offer()), 0.0)

    assert made.stop_attempt("r1", 1, 0.0) is None
    assert made.how_left("r1", 1) is Left.ENDED


def test_the_late_word_of_an_earlier_attempt_does_not_stand_for_a_later_one() -> None:
    made = table()
    earlier = let_in(made, offer())
    later = let_in(made, offer(attempt=2))
    made.end(later, 0.0)

    made.amend(earlier, Left.BROKEN, 0.0)

    assert made.how_left("r1", 2) is Left.ENDED


def test_a_request_that_runs_for_longer_than_answers_are_kept_is_not_started_again() -> None:
    made = table()
    let_in(made, offer())

    repeated = made.offer(offer(), admission.ANSWERS_KEPT_S + 1, WALL)

    assert (repeated.refused, repeated.start, repeated.stop) == ("", None, None)


def test_without_an_incarnation_nothing_is_taken() -> None:
    made = Admission(4)

    assert made.offer(offer(incarnation=0), 0.0, WALL).refused == admission.WRONG_INCARNATION


def test_a_draining_worker_takes_nothing_new() -> None:
    made = table()
    running = let_in(made, offer())
    made.draining = True

    assert made.offer(offer("r2"), 0.0, WALL).refused == admission.DRAINING
    assert made.tickets() == [running]


def test_the_true_queue_decides_and_is_told() -> None:
    made = table()
    let_in(made, offer("r1", prefill_ms=100.0))
    let_in(made, offer("r2", prefill_ms=50.0))

    verdict = made.offer(offer("r3", max_queue_ms=149.0), 0.0, WALL)

    assert (verdict.refused, verdict.queue_ms) == (admission.QUEUE_TOO_LONG, 150.0)
    assert not made.offer(offer("r3", attempt=2, max_queue_ms=149.0), 0.001, WALL).refused


def test_a_worker_that_lost_what_it_was_chosen_for_refuses_and_says_what_it_has() -> None:
    made = table()

    stale = made.offer(offer("r1", held_blocks=3, expected_blocks=5, min_held_blocks=6), 0.0, WALL)
    soon = made.offer(offer("r2", held_blocks=3, expected_blocks=6, min_held_blocks=6), 0.0, WALL)

    assert (stale.refused, stale.held_blocks, stale.start) == (admission.STALE_HIT, 5, None)
    assert (soon.refused, soon.held_blocks) == ("", 3)


@pytest.mark.parametrize(
    ("foreseen", "expected", "share"),
    [
        pytest.param(0, 992, 8 / 1000, id="a sibling computes the rest"),
        pytest.param(992, 992, 1.0, id="the router knew it"),
        pytest.param(500, 750, 0.5, id="more is there than the router knew"),
        pytest.param(992, 0, 1.0, id="less is there"),
        pytest.param(0, 0, 1.0, id="nothing is there"),
        pytest.param(2000, 2000, 1.0, id="absurd"),
    ],
)
def test_what_is_computed_once_is_charged_once(foreseen: int, expected: int, share: float) -> None:
    assert admission.charged_ms(100.0, 1000, foreseen, expected) == pytest.approx(100.0 * share)


def test_no_more_than_slots() -> None:
    made = table(slots=1)
    ticket = let_in(made, offer("r1"))

    assert made.offer(offer("r2"), 0.0, WALL).refused == admission.NO_SLOT

    made.end(ticket, 0.0)
    assert not made.offer(offer("r3"), 0.0, WALL).refused


def test_slots_kept_for_cold_requests_are_not_taken_by_warm_ones() -> None:
    made = table(slots=4, reserved_slots=2)
    first = let_in(made, offer("r1", is_warm=True, prefill_ms=30.0))
    let_in(made, offer("r2"))

    refusal = made.offer(offer("r3", is_warm=True), 0.0, WALL)

    assert (refusal.refused, refusal.queue_ms) == (admission.NO_SLOT, 130.0)
    assert not made.offer(offer("r4"), 0.0, WALL).refused
    assert not made.offer(offer("r5"), 0.0, WALL).refused
    assert made.offer(offer("r6"), 0.0, WALL).refused == admission.NO_SLOT
    made.end(first, 0.0)
    assert made.offer(offer("r7", is_warm=True), 0.0, WALL).refused == admission.NO_SLOT


def test_a_warm_request_waits_for_its_turn_as_long_as_its_hit_is_worth() -> None:
    clock = VirtualClock()
    made = table(window_tokens=1)
    first = let_in(made, offer("r1"), clock.now())
    bounded = let_in(made, offer("r2", max_wait_ms=2000.0), clock.now())
    patient = let_in(made, offer("r3"), clock.now())

    clock.advance(1.5)
    assert (bounded.patience_s(clock.now()), patient.patience_s(clock.now())) == (0.5, math.inf)
    clock.advance(0.5)
    assert bounded.patience_s(clock.now()) <= 0

    made.end(first, clock.now())
    assert made.give_turn(1, clock.now()) and bounded.has_turn
    clock.advance(99.0)
    assert bounded.patience_s(clock.now()) == math.inf


def test_what_the_engine_has_shrinks_together_as_time_passes() -> None:
    """It computes several prefills in one step."""
    made = table()
    first = let_in(made, offer("r1", prefill_ms=100.0))
    let_in(made, offer("r2", prefill_ms=60.0))
    made.submitted(first)

    assert made.queue_ms(0.0) == 160.0
    assert made.queue_ms(0.04) == 120.0
    assert made.queue_ms(0.12) == 40.0
    assert made.queue_ms(9.0) == 0.0

    made.first_token(first, 9.0)
    assert made.queue_ms(9.0) == 60.0
    assert made.queue_ms(9.05) == 10.0
    assert made.queue_ms(99.0) == 0.0


def test_what_waits_for_its_turn_is_queued_all_the_same_and_stands_still() -> None:
    made = table(window_tokens=100)
    first = let_in(made, offer("r1", prefill_ms=100.0, uncached_tokens=100))
    second = let_in(made, offer("r2", prefill_ms=60.0, uncached_tokens=100))

    assert (first.has_turn, second.has_turn) == (True, False)
    assert (made.waiting, made.held_back) == (2, 1)
    assert (made.queue_ms(0.0), made.queue_ms(9.0)) == (160.0, 60.0)
    assert made.next_up() is second and not made.give_turn(100, 9.0)

    made.end(first, 9.0)
    assert made.queue_ms(9.0) == 60.0
    assert made.give_turn(100, 9.0) and second.has_turn
    assert (made.queue_ms(9.0), made.queue_ms(9.05)) == (60.0, 10.0)


def test_who_ends_while_it_waits_leaves_nothing() -> None:
    made = table(window_tokens=1)
    first, second = let_in(made, offer("r1")), let_in(made, offer("r2"))

    made.end(second, 1.0, Left.GIVEN_BACK)
    made.end(first, 1.0)

    assert (made.held_back, made.waiting, made.queue_ms(1.0), made.next_up()) == (0, 0, 0.0, None)


def test_the_wait_for_others_prefills_is_told_apart() -> None:
    made = table()
    first, second = let_in(made, offer("r1"), 1.0), let_in(made, offer("r2"), 2.0)
    for ticket, at in ((first, 3.0), (second, 4.0)):
        made.submitted(ticket)
        assert ticket.queue_wait_ms() is None
        made.first_token(ticket, at)

    assert first.queue_wait_ms() == 0.0
    assert second.queue_wait_ms() == 1000.0


@pytest.mark.parametrize("estimate", [math.nan, -5.0, math.inf, 1e300])
def test_an_absurd_estimate_does_not_poison_the_queue(estimate: float) -> None:
    made = table()
    ticket = let_in(made, offer(prefill_ms=estimate))

    assert 0.0 <= made.queue_ms(0.0) <= 3_600_000.0

    made.end(ticket, 1.0)
    assert made.queue_ms(1.0) == 0.0


def test_a_repeated_dispatch_gets_the_same_answer_and_starts_nothing() -> None:
    made = table()
    let_in(made, offer())

    again = made.offer(offer(), 0.5, WALL + 99)

    assert (again.refused, again.start, again.held_blocks) == ("", None, 1)


def test_a_repeated_refusal_stays_one() -> None:
    made = table(slots=1)
    ticket = let_in(made, offer("r1"))
    made.offer(offer("r2"), 0.0, WALL)
    made.end(ticket, 0.0)

    again = made.offer(offer("r2"), 0.1, WALL)

    assert (again.refused, again.start) == (admission.NO_SLOT, None)


def test_an_answer_outlives_the_request_for_a_while() -> None:
    made = table()
    made.end(let_in(made, offer()), 1.0)

    soon, late = made.offer(offer(), 2.0, WALL), made.offer(offer(), 2.0 + admission.ANSWERS_KEPT_S, WALL)

    assert soon.start is None
    assert late.start is not None


def test_a_newer_attempt_replaces_one_that_has_said_nothing() -> None:
    made = table()
    first = let_in(made, offer())
    made.submitted(first)

    verdict = made.offer(offer(attempt=2), 0.5, WALL)

    assert verdict.stop is first
    assert first.phase is Phase.ENDED
    assert made.waiting == 1 and made.tickets() == [verdict.start]


def test_a_newer_attempt_is_refused_once_frames_are_on_their_way() -> None:
    made = table()
    first = let_in(made, offer())
    made.submitted(first)
    made.first_token(first, 0.1)

    verdict = made.offer(offer(attempt=2), 0.5, WALL)

    assert (verdict.refused, verdict.stop) == (admission.ALREADY_STREAMING, None)
    assert made.running == 1


def test_an_older_attempt_comes_too_late() -> None:
    made = table()
    let_in(made, offer(attempt=3))

    assert made.offer(offer(attempt=2), 0.0, WALL).refused == admission.SUPERSEDED


def test_a_cancel_finds_its_tenants_request_only() -> None:
    made = table()
    mine = let_in(made, offer("r1", client_request_id="same"))
    let_in(made, offer("r2", tenant="other", client_request_id="same"))

    assert made.cancel("acme", "same", 0.0) == [mine]
    assert made.cancel("nobody", "same", 0.0) == []


def test_a_cancel_may_overtake_its_request() -> None:
    made = table()
    made.cancel("acme", "c-r1", 0.0)

    assert made.offer(offer("r1"), 1.0, WALL).refused == admission.CANCELLED
    assert not made.offer(offer("r2", tenant="other", client_request_id="c-r1"), 1.0, WALL).refused
    assert not made.offer(offer("r1", attempt=2), 1.0 + REMEMBER_S, WALL).refused


def test_memory_is_bounded() -> None:
    made = table(slots=1)
    for number in range(REMEMBER_PER_TENANT + 10):
        made.cancel("acme", f"c{number}", 0.0)
    for number in range(admission.ANSWERS_KEPT + 10):
        made.offer(offer(f"r{number}", incarnation=1), 0.0, WALL)

    assert len(made.cancels) == REMEMBER_PER_TENANT
    assert len(made._answers) == admission.ANSWERS_KEPT


def test_an_attempt_stopped_before_it_came_is_refused() -> None:
    made = table()

    assert made.stop_attempt("r1", 1, 0.0) is None
    assert made.offer(offer(), 0.1, WALL).refused == admission.SUPERSEDED
    assert not made.offer(offer(attempt=2), 0.1, WALL).refused


def test_how_far_an_attempt_was_is_known_afterwards() -> None:
    made = table()
    tickets = {left: let_in(made, offer(left.name)) for left in Left}
    for left, ticket in tickets.items():
        made.end(ticket, 1.0, left)

    for left in Left:
        assert made.how_left(left.name, 1) is left
        assert made.how_left(left.name, 2) is None
    assert made.how_left("unknown", 1) is None


def test_a_router_that_heard_nothing_for_long_is_told_where_its_attempt_is() -> None:
    made = table()
    let_in(made, offer("running"))
    for left in Left:
        made.end(let_in(made, offer(left.name)), 1.0, left)

    assert made.whereabouts("running", 1) == "running"
    assert {left: made.whereabouts(left.name, 1) for left in Left} == {
        Left.ENDED: "ended",
        Left.GIVEN_BACK: "given_back",
        Left.BROKEN: "started",
    }
    assert (made.whereabouts("running", 2), made.whereabouts("unknown", 1)) == ("", "")


def test_what_is_left_to_the_router_is_not_taken_again() -> None:
    """A repeat must not look like one that nothing was published of, nor like one that runs."""
    made = table()
    made.end(let_in(made, offer()), 1.0, Left.BROKEN)

    assert made.offer(offer(), 1.1, WALL).refused == admission.ALREADY_STREAMING


def test_an_answer_may_break_after_it_left() -> None:
    made = table()
    ticket = let_in(made, offer())
    made.end(ticket, 1.0)

    made.amend(ticket, Left.BROKEN, 2.0)

    assert made.how_left("r1", 1) is Left.BROKEN


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_only_what_the_table_allows_can_happen(phase: Phase, event: Event) -> None:
    made = table()
    ticket = let_in(made, offer())
    steps: dict[Phase, list[Any]] = {
        Phase.ACCEPTED: [],
        Phase.PREFILLING: [lambda: made.submitted(ticket)],
        Phase.STREAMING: [lambda: made.submitted(ticket), lambda: made.first_token(ticket, 0.0)],
        Phase.ENDED: [lambda: made.end(ticket, 0.0)],
    }
    for step in steps[phase]:
        step()
    act: Callable[[], None] = {
        Event.SUBMIT: lambda: made.submitted(ticket),
        Event.FIRST_TOKEN: lambda: made.first_token(ticket, 0.0),
        Event.END: lambda: made.end(ticket, 0.0),
    }[event]

    if (phase, event) in LIFE:
        act()
        assert ticket.phase is LIFE[phase, event]
    else:
        with pytest.raises(KeyError):
            act()


class LoadNeverDrifts(RuleBasedStateMachine):
    """Whatever comes and goes, the counts are those of the requests that are there, and zero when none is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table(slots=5, window_tokens=100, reserved_slots=2)
        self.here: dict[str, Ticket] = {}
        self.now = 0.0

    @rule(
        request=st.sampled_from("abcdefg"),
        attempt=st.integers(1, 4),
        prefill_ms=st.floats(0, 500),
        max_queue_ms=st.sampled_from([0.0, 300.0, math.inf]),
        tokens=st.integers(1, 120),
        is_warm=st.booleans(),
        passed=st.floats(0, 30),
    )
    def dispatch_comes(
        self,
        request: str,
        attempt: int,
        prefill_ms: float,
        max_queue_ms: float,
        tokens: int,
        is_warm: bool,
        passed: float,
    ) -> None:
        self.now += passed
        asked = offer(
            request,
            attempt,
            tenant="acme" if request < "d" else "umbrella",
            prefill_ms=prefill_ms,
            max_queue_ms=max_queue_ms,
            uncached_tokens=tokens,
            is_warm=is_warm,
        )
        verdict = self.table.offer(asked, self.now, WALL)
        if verdict.stop is not None:
            assert self.here.pop(request) is verdict.stop
        if verdict.start is not None:
            assert request not in self.here
            assert not is_warm or len(self.here) < self.table.slots - self.table.reserved_slots
            self.here[request] = verdict.start

    @precondition(lambda self: self.here)
    @rule(data=st.data(), left=st.sampled_from(Left))
    def request_moves_on(self, data: st.DataObject, left: Left) -> None:
        ticket = self.here[data.draw(st.sampled_from(sorted(self.here)))]
        may_be = [event for event in Event if (ticket.phase, event) in LIFE]
        if not ticket.has_turn:
            may_be.remove(Event.SUBMIT)
        event = data.draw(st.sampled_from(may_be))
        match event:
            case Event.SUBMIT:
                self.table.submitted(ticket)
            case Event.FIRST_TOKEN:
                self.table.first_token(ticket, self.now)
            case Event.END:
                self.table.end(ticket, self.now, left)
                del self.here[ticket.request_id]

    @precondition(lambda self: self.table.next_up())
    @rule(tokens=st.integers(1, 120))
    def turn_comes(self, tokens: int) -> None:
        ticket = self.table.next_up()
        assert ticket is not None and not ticket.has_turn
        assert self.table.give_turn(tokens, self.now) == ticket.has_turn

    @rule(request=st.sampled_from("abcdefg"), attempt=st.integers(1, 4))
    def router_stops(self, request: str, attempt: int) -> None:
        ticket = self.table.stop_attempt(request, attempt, self.now)
        assert ticket is None or ticket is self.here[request]

    @invariant()
    def counts_agree(self) -> None:
        streaming = [ticket for ticket in self.here.values() if ticket.phase is Phase.STREAMING]
        assert self.table.running == len(streaming)
        assert self.table.waiting == len(self.here) - len(streaming)
        assert self.table.held_back == sum(not ticket.has_turn for ticket in self.here.values())
        assert (self.table.next_up() is None) == (self.table.held_back == 0)
        assert self.table.prompt_tokens == sum(ticket.prompt_tokens for ticket in self.here.values())
        waiting_us = sum(ticket.prefill_us for ticket in self.here.values() if ticket.phase is not Phase.STREAMING)
        assert 0.0 <= self.table.queue_ms(self.now) <= waiting_us / 1000
        assert len(self.here) <= self.table.slots


TestLoadNeverDrifts = LoadNeverDrifts.TestCase
