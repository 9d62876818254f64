"""A request's attempts: the table, and the two rules under every interleaving of messages."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixbus.bus.errors import Cancelled, DeadlineExceeded, NoWorkers, Overloaded, StaleNamespace, WorkerLost
from prefixbus.router.attempts import (
    CROWD_S,
    MAX_ASKED,
    TABLE,
    Attempts,
    Effect,
    Effects,
    Event,
    State,
    Unexpected,
    pause_s,
)


def offered(max_attempts: int = 4) -> Attempts:
    attempts = Attempts(max_attempts)
    attempts.decided("w1", 1)
    return attempts


def accepted(max_attempts: int = 4) -> Attempts:
    attempts = offered(max_attempts)
    attempts.accepted(1)
    return attempts


def streaming() -> Attempts:
    attempts = accepted()
    attempts.started(1)
    return attempts


def test_the_plain_way_ends_with_the_bridges_outcome() -> None:
    attempts = streaming()

    assert attempts.outcome(1) == (Effect.RELEASE,)
    assert attempts.ended


def test_every_state_but_the_last_can_end_and_the_last_stays() -> None:
    for state in State:
        following = {after for (before, _), (after, _) in TABLE.items() if before is state}
        assert (following == {State.ENDED}) == (state is State.ENDED)
        assert State.ENDED in following


def test_the_router_answers_only_on_the_way_into_the_end() -> None:
    answering = [(before, after) for (before, _), (after, effects) in TABLE.items() if Effect.ANSWER in effects]

    assert answering
    assert all(before is not State.ENDED and after is State.ENDED for before, after in answering)


def test_a_pair_that_is_not_in_the_table_raises() -> None:
    with pytest.raises(Unexpected, match="decided while offered"):
        offered().decided("w2", 1)


def test_after_a_full_queue_it_is_chosen_anew_in_a_moment_without_avoiding_the_worker() -> None:
    attempts = offered()

    assert attempts.refused(1, "queue_too_long") == (Effect.TAKE_BACK, Effect.PAUSE)
    assert attempts.resume() == (Effect.CHOOSE,)
    assert attempts.avoid == {}


def test_a_pause_that_is_over_once_is_over() -> None:
    attempts = offered()
    attempts.refused(1, "queue_too_long")
    attempts.resume()
    attempts.decided("w2", 1)

    assert attempts.resume() == ()
    assert attempts.state is State.OFFERED


def test_who_is_cancelled_in_a_pause_is_answered_then() -> None:
    attempts = offered()
    attempts.refused(1, "queue_too_long")

    assert attempts.cancel() == (Effect.ANSWER,)
    assert attempts.resume() == ()


def test_pauses_are_short_and_spread_over_their_whole_length() -> None:
    pauses = [pause_s(f"request {number}", attempt) for number in range(500) for attempt in (1, 2, 3)]

    assert 0 <= min(pauses) < 0.1 * CROWD_S
    assert 0.9 * CROWD_S < max(pauses) < CROWD_S
    assert sum(pauses) / len(pauses) == pytest.approx(CROWD_S / 2, rel=0.1)


def test_who_has_waited_for_long_is_chosen_anew_and_that_is_known() -> None:
    attempts = offered()
    attempts.accepted(1)
    before = attempts.has_waited

    assert attempts.refused(1, "waited") == (Effect.TAKE_BACK, Effect.CHOOSE)
    assert (before, attempts.has_waited) == (False, True)
    assert attempts.avoid == {}


def test_after_three_workers_that_were_not_as_expected_the_next_one_takes_it_as_it_is() -> None:
    attempts = Attempts(8)
    may_rechoose = []
    for number, reason in enumerate(["queue_too_long", "no_slot", "stale_hit", "stale_hit", "draining"], 1):
        attempts.decided(f"w{number}", 1)
        may_rechoose.append(attempts.may_rechoose)
        attempts.refused(number, reason)
    attempts.decided("w6", 1)

    assert may_rechoose == [True] * 4 + [False]
    assert not attempts.may_rechoose and not attempts.is_last
    assert attempts.failovers == ["queue", "refused", "stale", "stale", "refused"]


def test_a_worker_that_holds_less_may_still_be_the_best() -> None:
    attempts = offered()

    assert attempts.refused(1, "stale_hit") == (Effect.TAKE_BACK, Effect.CHOOSE)
    assert attempts.avoid == {}


@pytest.mark.parametrize("reason", ["no_slot", "draining", "wrong_incarnation", "engine_failed", "overloaded"])
def test_a_worker_that_cannot_is_not_asked_again(reason: str) -> None:
    attempts = offered()

    assert attempts.refused(1, reason) == (Effect.TAKE_BACK, Effect.CHOOSE)
    assert list(attempts.avoid) == [("w1", 1)]


def test_a_refusal_of_the_request_itself_ends_it() -> None:
    attempts = offered()

    assert attempts.refused(1, "stale_namespace") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(attempts.error, StaleNamespace)


def test_the_last_attempt_is_known_as_such_and_ends_with_its_failure() -> None:
    attempts = offered(max_attempts=2)
    attempts.refused(1, "no_slot")
    attempts.decided("w2", 1)

    assert attempts.is_last
    assert attempts.refused(2, "no_slot") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(attempts.error, Overloaded)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("unavailable", "unavailable"),
        ("engine_failed", "engine_failed"),
        ("worker_lost", "worker_lost"),
        ("no_slot", "overloaded"),
        ("queue_too_long", "overloaded"),
        ("waited", "overloaded"),
        ("too_late", "overloaded"),
        ("draining", "unavailable"),
    ],
)
def test_what_the_last_worker_refused_for_is_what_the_client_hears(reason: str, code: str) -> None:
    """A record that did not acknowledge was told as `overloaded: Every worker is full.`"""
    attempts = offered(max_attempts=1)

    attempts.refused(1, reason)

    assert attempts.error is not None
    assert attempts.error.code == code


def test_a_reason_that_is_no_code_is_named() -> None:
    attempts = offered(max_attempts=1)

    attempts.refused(1, "draining")

    assert attempts.error is not None
    assert "draining" in attempts.error.message


def test_without_candidates_the_reason_is_told() -> None:
    attempts = Attempts(4)

    assert attempts.nobody(NoWorkers()) == (Effect.ANSWER,)
    assert isinstance(attempts.error, NoWorkers)


def test_a_worker_that_is_only_late_is_waited_for_within_bounds() -> None:
    """Heartbeats that came 0.6 s late on a loaded machine failed requests with `no_workers`."""
    attempts = Attempts(4, patience_s=3.0)

    assert attempts.nobody_now(NoWorkers(), 100.0) == (Effect.WAIT,)
    assert attempts.look() == (Effect.CHOOSE,)
    assert attempts.nobody_now(NoWorkers(), 102.9) == (Effect.WAIT,)
    assert attempts.waits_until == 103.0
    assert attempts.look() == (Effect.CHOOSE,)
    assert attempts.nobody_now(NoWorkers(), 103.0) == (Effect.ANSWER,)
    assert isinstance(attempts.error, NoWorkers)


def test_whoever_waited_for_a_worker_that_came_back_has_it_and_waits_anew_for_the_next() -> None:
    attempts = Attempts(4, patience_s=3.0)
    attempts.nobody_now(NoWorkers(), 100.0)
    attempts.look()
    attempts.decided("w1", 1)
    attempts.refused(1, "no_slot")

    assert attempts.nobody_now(NoWorkers(), 110.0) == (Effect.WAIT,)
    assert attempts.waits_until == 113.0


def test_a_look_around_that_comes_late_changes_nothing() -> None:
    attempts = offered()

    assert attempts.look() == ()


def test_a_request_that_waits_for_a_late_worker_can_be_cancelled() -> None:
    attempts = Attempts(4, patience_s=3.0)
    attempts.nobody_now(NoWorkers(), 100.0)

    assert attempts.cancel() == (Effect.ANSWER,)
    assert attempts.look() == ()


def test_after_a_loss_without_further_candidates_the_loss_is_told() -> None:
    attempts = accepted()
    attempts.lost("w1", 1)

    attempts.nobody(NoWorkers())

    assert isinstance(attempts.error, WorkerLost)


def test_a_silent_worker_is_withdrawn_from_before_another_is_asked() -> None:
    attempts = offered()

    assert attempts.silent(1) == (Effect.WITHDRAW,)
    assert attempts.silent(1) == (Effect.WITHDRAW,)
    assert attempts.withdrawn(1, "") == (Effect.TAKE_BACK, Effect.CHOOSE)


def test_a_withdrawal_that_comes_too_late_ends_the_answer() -> None:
    attempts = offered()
    attempts.silent(1)

    assert attempts.withdrawn(1, "started") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(attempts.error, WorkerLost)


def test_a_withdrawal_of_what_had_ended_is_its_end() -> None:
    attempts = offered()
    attempts.silent(1)

    assert attempts.withdrawn(1, "ended") == (Effect.RELEASE,)


def test_that_nobody_listens_is_believed_the_second_time() -> None:
    """A bridge that the server dropped for its slowness is back a moment later."""
    attempts = offered()

    assert attempts.unreachable(1) == (Effect.SEND_AGAIN,)
    assert attempts.state is State.OFFERED
    assert attempts.unreachable(1) == (Effect.TAKE_BACK, Effect.CHOOSE)
    assert list(attempts.avoid) == [("w1", 1)]


def test_a_dispatch_that_nobody_heard_is_not_sent_again_to_where_a_withdrawal_was_not_heard() -> None:
    attempts = offered()
    attempts.silent(1)

    assert attempts.unreachable(1) == (Effect.TAKE_BACK, Effect.CHOOSE)


def test_a_request_that_nobody_wants_any_more_is_not_sent_again() -> None:
    attempts = offered()
    attempts.cancel()

    assert attempts.unreachable(1) == (Effect.TAKE_BACK, Effect.ANSWER)


def test_each_worker_is_sent_to_again() -> None:
    attempts = offered()
    attempts.unreachable(1)
    attempts.unreachable(1)
    attempts.decided("w2", 1)

    assert attempts.unreachable(2) == (Effect.SEND_AGAIN,)


def test_a_worker_lost_before_its_first_frame_is_replaced() -> None:
    attempts = accepted()

    assert attempts.lost("w1", 1) == (Effect.ABORT, Effect.TAKE_BACK, Effect.CHOOSE)
    assert attempts.decided("w2", 1) == (Effect.SEND,)
    assert attempts.attempt == 2


def test_a_worker_lost_after_its_first_frame_is_asked_whether_it_is_dead_before_the_answer_is_ended() -> None:
    attempts = streaming()

    assert attempts.lost("w1", 1) == (Effect.ABORT, Effect.TAKE_BACK, Effect.ASK)
    assert attempts.unreachable(1) == (Effect.ANSWER,)
    assert isinstance(attempts.error, WorkerLost)
    assert attempts.published


def given_up(max_attempts: int = 1) -> Attempts:
    """Its only worker may be alive: no more than heartbeats was missed."""
    attempts = accepted(max_attempts)
    attempts.lost("w1", 1)
    return attempts


def asking() -> Attempts:
    attempts = given_up()
    attempts.claimed(False)
    return attempts


def test_an_end_beside_an_attempt_that_may_be_running_is_claimed_first() -> None:
    attempts = given_up()

    assert attempts.state is State.CLAIMING
    assert attempts.claimed(True) == (Effect.ANSWER,)
    assert attempts.claimed(True) == ()


def test_where_a_bridge_was_first_to_claim_it_is_asked_how_far_it_is() -> None:
    attempts = given_up()

    assert attempts.claimed(False) == (Effect.ASK,)
    assert attempts.doubtful == {1: "w1"}
    assert attempts.published


@pytest.mark.parametrize(
    "end",
    [
        lambda attempts: attempts.nobody(NoWorkers()),
        lambda attempts: attempts.cancel(),
        lambda attempts: attempts.deadline(),
        lambda attempts: attempts.sent_again(),
        lambda attempts: attempts.client_gone(),
    ],
    ids=["nobody", "cancel", "deadline", "sent again", "client gone"],
)
def test_what_ends_a_request_between_attempts_is_claimed_if_an_earlier_one_may_be_running(
    end: Callable[[Attempts], Effects],
) -> None:
    assert end(given_up(4)) == (Effect.CLAIM,)


def test_whose_last_worker_refused_it_is_claimed_if_an_earlier_attempt_may_be_running() -> None:
    attempts = given_up(2)
    attempts.decided("w2", 1)

    assert attempts.refused(2, "no_slot") == (Effect.TAKE_BACK, Effect.CLAIM)


def test_of_an_attempt_that_was_superseded_the_earlier_ones_are_asked() -> None:
    attempts = given_up(4)
    attempts.decided("w2", 1)
    attempts.accepted(2)

    assert attempts.refused(2, "already_streaming") == (Effect.TAKE_BACK, Effect.ASK)
    assert attempts.doubtful == {1: "w1"}


def test_a_worker_that_was_silent_and_is_not_there_any_more_may_have_begun() -> None:
    attempts = offered(1)
    attempts.silent(1)

    assert attempts.unreachable(1) == (Effect.TAKE_BACK, Effect.CLAIM)


def test_the_word_of_an_attempt_that_is_not_in_doubt_ends_nothing() -> None:
    attempts = given_up(2)
    attempts.decided("w2", 1)
    attempts.refused(2, "no_slot")
    attempts.claimed(False)

    assert attempts.withdrawn(2, "ended") == ()
    assert attempts.state is State.ASKING


def test_what_the_last_attempt_says_while_another_worker_is_chosen_is_answered_with_an_abort() -> None:
    attempts = given_up(4)

    assert attempts.state is State.CHOOSING
    assert attempts.accepted(1) == (Effect.ABORT_STALE,)


def test_a_full_queue_that_is_found_after_the_accept_is_a_giving_back_like_any_other() -> None:
    attempts = accepted()

    assert attempts.refused(1, "queue_too_long") == (Effect.TAKE_BACK, Effect.CHOOSE)


def test_only_the_worker_that_has_an_attempt_may_speak_of_its_end() -> None:
    attempts = given_up(4)
    attempts.decided("w2", 1)

    assert [attempts.was_sent(2, "w2"), attempts.was_sent(2, "w1"), attempts.was_sent(1, "w1")] == [True, False, True]


def test_only_the_attempt_that_has_begun_is_asked() -> None:
    attempts = given_up(4)
    attempts.decided("w2", 1)
    attempts.started(2)
    attempts.lost("w2", 1)

    assert attempts.doubtful == {2: "w2"}


def test_who_stopped_by_its_own_word_leaves_no_doubt() -> None:
    attempts = streaming()
    attempts.deadline()

    assert attempts.withdrawn(1, "started") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert attempts.doubtful == {}


@pytest.mark.parametrize(
    "word",
    [
        lambda attempts: attempts.withdrawn(1, ""),
        lambda attempts: attempts.withdrawn(1, "started"),
        lambda attempts: attempts.refused(1, "worker_lost"),
        lambda attempts: attempts.unreachable(1),
        lambda attempts: attempts.of_another_life(1, "w1", 2),
    ],
    ids=["given back", "broken off", "handed over", "nobody there", "a later life"],
)
def test_a_request_whose_bridge_will_not_end_it_is_ended_by_the_router(word: Callable[[Attempts], Effects]) -> None:
    assert word(asking()) == (Effect.ANSWER,)


@pytest.mark.parametrize(
    "word",
    [lambda attempts: attempts.withdrawn(1, "ended"), lambda attempts: attempts.outcome(1)],
    ids=["asked", "told"],
)
def test_a_request_that_its_bridge_has_ended_is_not_ended_again(word: Callable[[Attempts], Effects]) -> None:
    attempts = asking()

    assert word(attempts) == ()
    assert attempts.ended


def test_a_request_two_workers_may_be_running_is_ended_when_both_have_said_that_they_do_not() -> None:
    attempts = given_up(2)
    attempts.decided("w2", 1)
    attempts.lost("w2", 1)
    attempts.claimed(False)

    assert attempts.withdrawn(2, "") == ()
    assert attempts.withdrawn(2, "") == ()
    assert attempts.withdrawn(1, "started") == (Effect.ANSWER,)


def test_of_whom_nothing_is_heard_however_often_he_is_asked_is_dead() -> None:
    attempts = asking()

    for _ in range(MAX_ASKED - 1):
        assert attempts.silent(1) == (Effect.ASK,)
    assert attempts.silent(1) == (Effect.ANSWER,)


def test_a_lost_end_is_made_up_for_by_asking() -> None:
    """An outcome that was dropped on its way stayed on the books until the deadline, 300 s later."""
    attempts = streaming()

    assert attempts.found(1, "running") == ()
    assert attempts.found(1, "ended") == (Effect.RELEASE,)


def test_what_was_given_back_unheard_is_given_to_another_worker() -> None:
    attempts = accepted()

    assert attempts.found(1, "given_back") == (Effect.TAKE_BACK, Effect.CHOOSE)


@pytest.mark.parametrize("where", ["", "started"], ids=["forgotten", "broken off"])
def test_what_may_have_been_answered_is_given_to_nobody_else(where: str) -> None:
    attempts = accepted()

    assert attempts.found(1, where) == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(attempts.error, WorkerLost)


def test_where_an_attempt_was_is_old_news_once_it_is_not_under_way() -> None:
    attempts = accepted()
    attempts.refused(1, "draining")

    assert attempts.found(1, "") == ()
    attempts.decided("w2", 1)
    assert attempts.found(1, "given_back") == ()
    assert attempts.found(2, "") == ()


def test_the_loss_of_another_worker_or_of_an_earlier_life_is_none_of_ours() -> None:
    attempts = Attempts(4)
    attempts.decided("w1", 5)

    assert attempts.lost("w2", 9) == ()
    assert attempts.lost("w1", 4) == ()


@pytest.mark.parametrize("word", [("w1", 4), ("w1", 0), ("w2", 5)], ids=["an older life", "no life", "another worker"])
def test_the_word_of_another_life_is_no_answer(word: tuple[str, int]) -> None:
    """A second bridge, started while the first was paused, refused every dispatch that the first one took; each
    request was answered by two workers."""
    attempts = Attempts(4)
    attempts.decided("w1", 5)

    assert attempts.of_another_life(1, *word) == ()
    assert attempts.state is State.OFFERED


def test_the_word_of_a_later_life_says_that_the_addressed_one_is_over() -> None:
    attempts = Attempts(4)
    attempts.decided("w1", 5)

    assert attempts.of_another_life(1, "w1", 6) == (Effect.ABORT, Effect.TAKE_BACK, Effect.CHOOSE)
    assert list(attempts.avoid) == [("w1", 5)]


def test_the_word_of_the_addressed_life_and_of_earlier_attempts_is_heard_as_it_is() -> None:
    attempts = accepted()
    attempts.lost("w1", 1)
    attempts.decided("w2", 7)

    assert attempts.of_another_life(2, "w2", 7) is None
    assert attempts.of_another_life(1, "w1", 1) is None


def test_what_an_abandoned_attempt_says_is_answered_with_an_abort() -> None:
    attempts = accepted()
    attempts.lost("w1", 1)
    attempts.decided("w2", 1)

    assert attempts.accepted(1) == (Effect.ABORT_STALE,)
    assert attempts.started(1) == (Effect.ABORT_STALE,)
    assert attempts.state is State.OFFERED


@pytest.mark.parametrize("state", [State.CHOOSING, State.OFFERED, State.WITHDRAWING, State.ACCEPTED])
def test_the_end_by_an_attempt_that_was_given_up_ends_the_request(state: State) -> None:
    """Its worker was taken for lost and was not: it claimed the request, answered, and said so."""
    attempts = Attempts(4, patience_s=3.0)
    attempts.decided("w1", 1)
    attempts.lost("w1", 1)
    if state is State.CHOOSING:
        attempts.nobody_now(NoWorkers(), 100.0)
    else:
        attempts.decided("w2", 1)
    if state is State.WITHDRAWING:
        attempts.silent(2)
    elif state is State.ACCEPTED:
        attempts.accepted(2)
    assert attempts.state is state

    effects = attempts.outcome(1)

    assert effects == (() if state is State.CHOOSING else (Effect.ABORT, Effect.TAKE_BACK))
    assert attempts.ended and attempts.error is None


def test_an_outcome_of_an_attempt_that_was_never_made_says_nothing() -> None:
    attempts = accepted()

    assert attempts.outcome(2) == ()
    assert attempts.state is State.ACCEPTED


def test_a_request_that_is_being_answered_by_an_attempt_taken_for_dead_gets_no_second_answer() -> None:
    attempts = offered()

    assert attempts.refused(1, "already_streaming") == (Effect.TAKE_BACK, Effect.ANSWER)


def test_a_cancel_before_the_dispatch_is_answered_here_and_after_it_by_the_bridge() -> None:
    early, late = Attempts(4), accepted()

    assert early.cancel() == (Effect.ANSWER,)
    assert late.cancel() == ()
    assert late.outcome(1) == (Effect.RELEASE,)


def test_a_cancelled_request_is_not_given_to_another_worker() -> None:
    attempts = accepted()
    attempts.cancel()

    assert attempts.lost("w1", 1) == (Effect.ABORT, Effect.TAKE_BACK, Effect.CLAIM)
    assert attempts.claimed(True) == (Effect.ANSWER,)
    assert isinstance(attempts.error, Cancelled)


def test_a_request_that_was_sent_again_is_withdrawn_and_given_to_nobody_else() -> None:
    waiting, running = Attempts(4), accepted()

    assert waiting.sent_again() == (Effect.ANSWER,)
    assert running.sent_again() == (Effect.WITHDRAW,)
    assert running.withdrawn(1, "") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(running.error, Cancelled)


def test_a_request_whose_client_has_gone_is_given_to_nobody() -> None:
    waiting, asked = Attempts(4, patience_s=3.0), offered()
    waiting.nobody_now(NoWorkers(), 100.0)

    assert waiting.client_gone() == (Effect.ANSWER,)
    assert waiting.look() == ()
    assert asked.client_gone() == (Effect.WITHDRAW,)
    assert asked.withdrawn(1, "") == (Effect.TAKE_BACK, Effect.ANSWER)
    assert isinstance(asked.error, Cancelled)


def test_whoever_has_accepted_finds_out_itself_that_the_client_has_gone() -> None:
    running = accepted()

    assert running.client_gone() == ()
    assert running.error is None


def test_past_the_deadline_a_worker_that_says_nothing_is_not_waited_for() -> None:
    attempts = accepted()

    assert attempts.deadline() == (Effect.WITHDRAW,)
    assert attempts.silent(1) == (Effect.TAKE_BACK, Effect.CLAIM)
    assert attempts.claimed(True) == (Effect.ANSWER,)
    assert isinstance(attempts.error, DeadlineExceeded)


class Bridge:
    """A worker as the protocol promises it to be; an attempt's stage is accepted, streaming, ended, aborted or
    refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 1
        self.stages: dict[int, str] = {}


class OneStreamOneEnd(RuleBasedStateMachine):
    """Router and three bridges; every message may be late, overtaken or lost.

    The bridges keep their promises: an attempt aborted before it came is refused when it comes; a bridge whose lease
    ran out, or which was cut off, gives up what it has not started, and restarts forget everything."""

    picks = st.integers(0, 7)
    answers = st.sampled_from(["", "", "", "", "queue_too_long", "no_slot", "stale_namespace"])

    def __init__(self) -> None:
        super().__init__()
        self.attempts = Attempts(4, patience_s=3.0)
        self.all_are_late = False
        self.bridges = {name: Bridge(name) for name in ("w1", "w2", "w3")}
        # (kind, worker, attempt) on their way to bridges, and (kind, worker, attempt, detail) on their way back.
        self.down: list[tuple[str, str, int]] = []
        self.up: list[tuple[str, str, int, str]] = []
        self.booked: set[int] = set()
        self.final_frames: list[str] = []
        self.published: list[tuple[str, int]] = []
        # Who has it: "router", or a worker.
        self.claim = ""
        self.gave_up_waiting = False
        self.impatient = self.lossy = False
        self.act((Effect.CHOOSE,))

    def act(self, effects: Effects) -> None:
        attempts = self.attempts
        for effect in effects:
            match effect:
                case Effect.CHOOSE:
                    free = [one for one in self.bridges.values() if (one.name, one.incarnation) not in attempts.avoid]
                    if free and self.all_are_late:
                        self.act(attempts.nobody_now(NoWorkers(), 0.0))
                    elif free:
                        self.act(attempts.decided(free[0].name, free[0].incarnation))
                    else:
                        self.act(attempts.nobody(NoWorkers()))
                case Effect.SEND:
                    self.booked.add(attempts.attempt)
                    self.down.append(("dispatch", attempts.worker, attempts.attempt))
                case Effect.SEND_AGAIN:
                    self.down.append(("dispatch", attempts.worker, attempts.attempt))
                case Effect.WITHDRAW | Effect.ABORT:
                    self.down.append(("abort", attempts.worker, attempts.attempt))
                case Effect.TAKE_BACK | Effect.RELEASE:
                    self.booked.discard(attempts.attempt)
                case Effect.CLAIM:
                    self.claim = self.claim or "router"
                    self.act(attempts.claimed(self.claim == "router"))
                case Effect.ASK:
                    self.down += [("abort", worker, attempt) for attempt, worker in attempts.doubtful.items()]
                case Effect.ANSWER:
                    self.final_frames.append("router")

    def heard(self, effects: Effects, worker: str, attempt: int) -> None:
        if Effect.ABORT_STALE in effects:
            self.down.append(("abort", worker, attempt))
        self.act(effects)

    # --- messages

    @initialize(impatient=st.booleans(), lossy=st.booleans())
    def the_run_is(self, impatient: bool, lossy: bool) -> None:
        """In half of the runs neither a cancel nor the deadline cuts the story short; in half nothing is lost."""
        self.impatient = impatient
        self.lossy = lossy

    @precondition(lambda self: self.down)
    @rule(pick=picks, answer=answers)
    def bridge_reads(self, pick: int, answer: str) -> None:
        kind, worker, attempt = self.down.pop(pick % len(self.down))
        stages = self.bridges[worker].stages
        stage = stages.get(attempt, "")
        if kind == "dispatch" and not stage:
            stages[attempt] = "refused" if answer else "accepted"
            self.up.append(("accept", worker, attempt, answer))
        elif kind == "dispatch" and stage == "aborted":
            self.up.append(("accept", worker, attempt, "superseded"))
        elif kind == "status":
            broken = "started" if (worker, attempt) in self.published else "given_back"
            where = {"accepted": "running", "streaming": "running", "ended": "ended", "": ""}.get(stage, broken)
            self.up.append(("status", worker, attempt, where))
        elif kind == "abort":
            reply = {"streaming": "started", "ended": "ended"}.get(stage, "")
            if stage != "ended":
                stages[attempt] = "aborted"
            self.up.append(("aborted", worker, attempt, reply))

    @precondition(lambda self: self.up)
    @rule(pick=picks)
    def router_reads(self, pick: int) -> None:
        kind, worker, attempt, detail = self.up.pop(pick % len(self.up))
        match kind:
            case "accept" if detail:
                effects = self.attempts.refused(attempt, detail)
            case "accept":
                effects = self.attempts.accepted(attempt)
            case "started":
                effects = self.attempts.started(attempt)
            case "outcome":
                effects = self.attempts.outcome(attempt)
            case "status":
                effects = self.attempts.found(attempt, detail)
            case _:
                effects = self.attempts.withdrawn(attempt, detail)
        self.heard(effects, worker, attempt)

    @precondition(lambda self: self.lossy and self.down)
    @rule(pick=picks)
    def dispatch_or_abort_is_lost(self, pick: int) -> None:
        self.down.pop(pick % len(self.down))

    @precondition(lambda self: self.lossy and any(kind in ("accept", "aborted") for kind, *_ in self.up))
    @rule(pick=picks)
    def answer_is_lost(self, pick: int) -> None:
        loseable = [n for n, (kind, *_) in enumerate(self.up) if kind in ("accept", "aborted")]
        self.up.pop(loseable[pick % len(loseable)])

    # --- bridges

    def in_stage(self, stage: str) -> list[tuple[str, int]]:
        return [(one.name, n) for one in self.bridges.values() for n, at in one.stages.items() if at == stage]

    @precondition(lambda self: self.in_stage("accepted"))
    @rule(pick=picks)
    def bridge_starts(self, pick: int) -> None:
        accepted = self.in_stage("accepted")
        worker, attempt = accepted[pick % len(accepted)]
        if self.claim:
            self.bridges[worker].stages[attempt] = "refused"
            self.up.append(("accept", worker, attempt, "already_streaming"))
            return
        self.claim = worker
        self.bridges[worker].stages[attempt] = "streaming"
        self.published.append((worker, attempt))
        self.up.append(("started", worker, attempt, ""))

    @precondition(lambda self: self.in_stage("accepted"))
    @rule(pick=picks)
    def bridge_gives_back(self, pick: int) -> None:
        accepted = self.in_stage("accepted")
        worker, attempt = accepted[pick % len(accepted)]
        self.bridges[worker].stages[attempt] = "refused"
        self.up.append(("accept", worker, attempt, "draining"))

    @precondition(lambda self: self.in_stage("streaming"))
    @rule(pick=picks)
    def bridge_ends(self, pick: int) -> None:
        streaming = self.in_stage("streaming")
        worker, attempt = streaming[pick % len(streaming)]
        self.bridges[worker].stages[attempt] = "ended"
        self.final_frames.append("bridge")
        self.up.append(("outcome", worker, attempt, ""))

    # --- what else happens

    def router_reads_all_of(self, worker: str) -> None:
        arrived = [one for one in self.up if one[1] == worker and one[0] in ("started", "outcome")]
        self.up = [one for one in self.up if one[1] != worker]
        for kind, _, attempt, _ in arrived:
            hear = self.attempts.started if kind == "started" else self.attempts.outcome
            self.heard(hear(attempt), worker, attempt)

    def give_up(self, worker: str) -> None:
        stages = self.bridges[worker].stages
        stages.update((n, "aborted") for n, stage in list(stages.items()) if stage in ("accepted", "streaming"))

    @rule(worker=st.sampled_from(("w1", "w2", "w3")), restarts=st.booleans())
    def lease_runs_out(self, worker: str, restarts: bool) -> None:
        """What the worker had sent before has arrived by then: 3 s later, on a connection that keeps its order."""
        bridge = self.bridges[worker]
        self.router_reads_all_of(worker)
        lived = bridge.incarnation
        self.give_up(worker)
        # Dispatches that name the old life are refused by the new one, or by a lease that ran out.
        self.down = [one for one in self.down if one[1] != worker]
        if restarts:
            bridge.incarnation += 1
        self.act(self.attempts.lost(worker, lived))

    @precondition(lambda self: self.down)
    @rule(pick=picks)
    def bridge_is_cut_off(self, pick: int) -> None:
        """Nobody listens where this message goes: the bridge is without its connection, and gives up what it has."""
        _, worker, attempt = self.down[pick % len(self.down)]
        # What was sent before is lost with the connection, or read too late to be accepted (`accept_by_at`).
        self.down = [one for one in self.down if one[1] != worker]
        self.router_reads_all_of(worker)
        self.give_up(worker)
        self.act(self.attempts.unreachable(attempt))

    @precondition(lambda self: self.attempts.state in (State.OFFERED, State.WITHDRAWING, State.ASKING))
    @rule()
    def answer_is_late(self) -> None:
        effects = self.attempts.silent(self.attempts.attempt)
        # One that began, and answered no question, may yet end its answer.
        self.gave_up_waiting = self.gave_up_waiting or Effect.ANSWER in effects
        self.act(effects)

    @precondition(lambda self: self.attempts.state in (State.ACCEPTED, State.STREAMING))
    @rule()
    def nothing_was_heard_for_long(self) -> None:
        self.down.append(("status", self.attempts.worker, self.attempts.attempt))

    @rule(late=st.booleans())
    def heartbeats_are(self, late: bool) -> None:
        self.all_are_late = late
        self.act(self.attempts.look())

    @rule()
    def pause_is_over(self) -> None:
        self.act(self.attempts.resume())

    @precondition(lambda self: self.impatient)
    @rule()
    def client_cancels(self) -> None:
        self.act(self.attempts.cancel())

    @precondition(lambda self: self.impatient)
    @rule()
    def deadline_passes(self) -> None:
        self.act(self.attempts.deadline())

    # --- the rules

    @invariant()
    def at_most_one_attempt_is_ever_published(self) -> None:
        assert len(self.published) <= 1

    @invariant()
    def no_attempt_is_asked_while_another_may_publish(self) -> None:
        alive = self.in_stage("accepted") + self.in_stage("streaming")
        if self.attempts.error is None:
            assert len(alive) <= 1

    @invariant()
    def it_is_answered_once(self) -> None:
        if not self.gave_up_waiting:
            assert len(self.final_frames) <= 1
        assert self.final_frames.count("router") <= 1
        if self.attempts.ended:
            assert self.final_frames

    @invariant()
    def nothing_stays_booked(self) -> None:
        is_free = self.attempts.state in (State.CHOOSING, State.CLAIMING, State.ASKING, State.ENDED)
        expected = set() if is_free else {self.attempts.attempt}
        assert self.booked == expected


TestOneStreamOneEnd = OneStreamOneEnd.TestCase


def test_the_tables_events_are_all_reachable() -> None:
    assert {event for _, event in TABLE} == set(Event)
