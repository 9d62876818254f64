"""The router's books: leases, queues, bookings, and that nothing is left in them."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry

from prefixbus.bus.listening import MAX_STEP_S
from prefixbus.bus.messages import Load
from prefixbus.router.fleet import PREFILL_MAX_MS, SURELY_REPORTED_S, Fleet, Lost, Surroundings, Survey, WorkerClass
from prefixbus.router.metrics import WorkerGauges

MODEL, SERVES = "m", "digest"


def load(worker: str = "w1", **changed: Any) -> Load:
    values: dict[str, Any] = {
        "v": 1,
        "worker": worker,
        "incarnation": 1,
        "report": 1,
        "event_seq": 0,
        "model": MODEL,
        "serves": SERVES,
        "queue_ms": 0.0,
        "running": 0,
        "waiting": 0,
        "slots": 8,
        "kv_usage": 0.25,
        "kv_tokens": 1000,
        "block_size": 16,
        "draining": False,
        "accepted": [],
    }
    return Load(**(values | changed))


def fleet(*loads: Load, now: float = 0.0) -> Fleet:
    made = Fleet(suspect_after_s=0.6, lost_after_s=3.0)
    for report in loads:
        made.heard(report, now)
    return made


def survey(of: Fleet, now: float) -> Survey:
    return of.survey(MODEL, SERVES, now)


def queue_ms(of: Fleet, now: float, worker: str = "w1") -> float:
    return {one.name: one.queue_ms for one in survey(of, now).available}[worker]


def pass_time(of: Fleet, start: float, seconds: float) -> list[Lost]:
    """Sweeps ten times a second, as the service does; returns who was lost."""
    lost = []
    for step in range(1, round(seconds * 10) + 1):
        lost += of.sweep(start + step / 10)
    return lost


# --- queues


def test_a_reported_queue_shrinks_with_time_and_not_below_nothing() -> None:
    books = fleet(load(queue_ms=100.0))

    assert queue_ms(books, 0.0) == 100.0
    assert queue_ms(books, 0.04) == pytest.approx(60.0)
    assert queue_ms(books, 0.2) == 0.0


def test_what_a_bridge_says_of_its_queue_stands_for_all_that_was_sent_before() -> None:
    books = fleet(load())
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)

    books.correct("w1", 1, 70.0, 0.0)

    assert queue_ms(books, 0.0) == 70.0


def test_a_dispatch_that_is_sent_again_is_not_queued_again() -> None:
    books = fleet(load())
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    books.heard(load(report=2, accepted=["r1"]), 0.1)

    assert not books.book("r1", 1, "w1", 1, 50.0, 0.2, 60.0)
    assert queue_ms(books, 0.2) == 0.0


def test_the_end_of_a_later_attempt_is_the_end_of_earlier_ones() -> None:
    """What announced the later one was lost."""
    books = fleet(load())
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)

    books.settle("r1", 2, 0.1)

    assert books.idle() == []


def test_the_late_end_of_an_earlier_attempt_does_not_let_a_later_one_in_again() -> None:
    books = fleet(load())
    books.settle("r1", 2, 0.0)

    books.settle("r1", 1, 0.1)

    assert not books.book("r1", 2, "w1", 1, 50.0, 0.2, 60.0)


def test_a_heartbeat_that_comes_twice_renews_no_lease() -> None:
    books = fleet(load())

    pass_time(books, 0.0, 0.5)
    books.heard(load(), 0.5)
    pass_time(books, 0.5, 0.2)

    assert survey(books, 0.7).excluded == {"w1": "suspect"}


def test_an_announcement_that_no_report_lists_is_not_believed_for_long() -> None:
    """Its router was killed before it could take it back, or its end was not heard."""
    books = fleet(load())

    books.book("refused", 1, "w1", 1, 50.0, 0.0, 60.0, unlisted_until=2.0)
    books.book("accepted", 1, "w1", 1, 50.0, 0.0, 60.0, unlisted_until=2.0)
    books.heard(load(report=2, accepted=["accepted", "early"]), 0.5)
    books.book("early", 1, "w1", 1, 50.0, 0.6, 60.0, unlisted_until=2.0)
    books.sweep(2.0)

    assert books.in_flight() == {"w1": 2}
    assert not any("refused" in left for left in books.idle())


def test_an_announcement_that_a_report_lists_expires_when_it_said() -> None:
    books = fleet(load())

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 2.8, unlisted_until=2.0)
    books.heard(load(report=2, accepted=["r1"]), 0.5)
    books.sweep(2.7)
    before = books.in_flight()
    books.sweep(2.8)

    assert (before, books.in_flight()) == ({"w1": 1}, {"w1": 0})


def test_a_dispatch_counts_until_the_report_that_contains_it() -> None:
    books = fleet(load(queue_ms=10.0))

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    before = queue_ms(books, 0.0)
    books.heard(load(report=2, queue_ms=55.0, accepted=["r1"]), 0.0)

    assert before == 60.0
    assert queue_ms(books, 0.0) == 55.0
    assert books.in_flight() == {"w1": 1}


def test_a_report_from_before_the_acceptance_does_not_swallow_the_dispatch() -> None:
    books = fleet(load())

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    books.heard(load(report=2, queue_ms=0.0), 0.01)

    assert queue_ms(books, 0.01) == 50.0


def test_what_a_worker_did_besides_a_request_is_what_came_before_its_first_token() -> None:
    books = fleet(load(kv_usage=0.5, worker_class="h100"), load("w2"))
    books.book("before", 1, "w1", 1, 40.0, 0.0, 60.0)
    books.book("asked", 1, "w1", 1, 50.0, 0.1, 60.0)
    books.book("during", 1, "w1", 1, 7.0, 0.15, 60.0)
    books.book("taken back", 1, "w1", 1, 3.0, 0.15, 60.0)
    books.settle("taken back", 1, 0.16, never_ran=True)
    books.book("elsewhere", 1, "w2", 1, 100.0, 0.15, 60.0)
    books.book("after", 1, "w1", 1, 500.0, 0.21, 60.0)

    around = books.surroundings("asked", 1, "w1", 100.0)

    assert around == Surroundings(WorkerClass(MODEL, SERVES, "h100"), 500, 7.0)


def test_nothing_is_known_of_what_went_on_beside_another_attempt() -> None:
    books = fleet(load(), load("w2"))
    books.book("r1", 2, "w1", 1, 50.0, 0.0, 60.0)

    assert books.surroundings("r1", 1, "w1", 1.0) is None
    assert books.surroundings("r1", 2, "w2", 1.0) is None
    assert books.surroundings("r2", 1, "w1", 1.0) is None


def test_workers_outside_the_pools_of_a_request_are_no_candidates() -> None:
    books = fleet(load("w1", pool="a"), load("w2", pool="b"), load("w3"))

    def names(pools: list[str] | None) -> list[str]:
        return [one.name for one in books.survey(MODEL, SERVES, 0.0, pools).available]

    assert names(None) == ["w1", "w2", "w3"]
    assert names(["b", ""]) == ["w2", "w3"]
    assert books.survey(MODEL, SERVES, 0.0, ["b"]).excluded == {"w1": "pool", "w3": "pool"}


@pytest.mark.parametrize(("running", "only_reserved"), [(5, False), (6, True), (7, True)])
def test_the_last_slots_are_kept_for_cold_requests(running: int, only_reserved: bool) -> None:
    books = fleet(load(running=running, reserved_slots=2))

    assert [one.only_reserved for one in survey(books, 0.0).available] == [only_reserved]


def test_when_the_report_that_lists_it_is_lost_a_much_later_one_contains_it() -> None:
    books = fleet(load())

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 600.0)
    books.heard(load(report=7, queue_ms=40.0), SURELY_REPORTED_S + 0.1)

    assert queue_ms(books, SURELY_REPORTED_S + 0.1) == 40.0


def test_an_announcement_that_comes_after_the_report_is_not_counted_twice() -> None:
    books = fleet(load(report=1, queue_ms=50.0, accepted=["r1"]))

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)

    assert queue_ms(books, 0.0) == 50.0
    assert books.in_flight() == {"w1": 1}


def test_a_report_that_overtakes_the_end_of_an_earlier_attempt_is_not_forgotten() -> None:
    """w1 refused it and w2 took it: the other routers hear of that from w2's report before they hear of it from the
    router, whose announcements take a little longer. Counted twice, w2 would look busy for as long as it has it."""
    books = fleet(load("w1"), load("w2", report=1))

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    books.heard(load("w2", report=2, queue_ms=50.0, accepted=["r1"]), 0.0)
    books.settle("r1", 1, 0.0, never_ran=True)
    books.book("r1", 2, "w2", 1, 50.0, 0.0, 60.0)

    assert queue_ms(books, 0.0, "w2") == 50.0
    assert books.in_flight() == {"w1": 0, "w2": 1}


def test_a_report_that_overtakes_all_that_was_announced_is_not_forgotten() -> None:
    books = fleet(load("w1"), load("w2", report=1))

    books.heard(load("w2", report=2, queue_ms=50.0, accepted=["r1"]), 0.0)
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    books.settle("r1", 1, 0.0, never_ran=True)
    books.book("r1", 2, "w2", 1, 50.0, 0.0, 60.0)

    assert queue_ms(books, 0.0, "w2") == 50.0


def test_an_announcement_that_comes_after_the_outcome_books_nothing() -> None:
    books = fleet(load())

    books.settle("r1", 1, 0.0)

    assert not books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    assert books.idle() == []


def test_a_refusal_corrects_the_queue() -> None:
    books = fleet(load(queue_ms=5.0))
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)

    books.correct("w1", 1, 400.0, 0.0)
    books.settle("r1", 1, 0.0, never_ran=True)

    assert queue_ms(books, 0.0) == 400.0
    assert books.idle() == []


def test_thousands_of_bookings_come_and_go_and_leave_exactly_nothing() -> None:
    """Floats added and subtracted would leave a rest."""
    books = fleet(load(slots=10_000))

    for n in range(3_000):
        books.book(f"r{n}", 1, "w1", 1, 0.1 * (n % 7), 0.0, 60.0)
    for n in range(0, 3_000, 2):
        books.settle(f"r{n}", 1, 0.0)
    for n in range(1, 3_000, 2):
        books.settle(f"r{n}", 1, 0.0)

    assert queue_ms(books, 0.0) == 0.0
    assert books.idle() == []


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -5.0])
def test_an_absurd_announcement_does_not_poison_the_queue(ms: float) -> None:
    books = fleet(load())

    books.book("r1", 1, "w1", 1, ms, 0.0, 60.0)
    booked = queue_ms(books, 0.0)
    books.settle("r1", 1, 0.0)

    assert 0.0 <= booked <= PREFILL_MAX_MS
    assert queue_ms(books, 0.0) == 0.0


def test_a_second_attempt_moves_the_booking() -> None:
    books = fleet(load("w1"), load("w2"))

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)
    books.book("r1", 2, "w2", 1, 30.0, 0.0, 60.0)
    late = books.book("r1", 1, "w1", 1, 50.0, 0.0, 60.0)

    assert not late
    assert books.in_flight() == {"w1": 0, "w2": 1}
    assert queue_ms(books, 0.0, "w1") == 0.0


def test_bookings_expire() -> None:
    books = fleet(load())

    books.book("r1", 1, "w1", 1, 50.0, 0.0, 0.3)
    pass_time(books, 0.0, 0.4)

    assert books.idle() == []


def test_rho_is_the_share_of_time_that_dispatched_prefill_takes() -> None:
    books = fleet(load())
    for n in range(50):
        books.book(f"r{n}", 1, "w1", 1, 100.0, n / 10, 60.0)
        books.settle(f"r{n}", 1, n / 10)

    worker = books._workers["w1"]

    assert worker.rho(9.9) == pytest.approx(0.5)
    assert worker.rho(14.9) == pytest.approx(0.5 * 0.51)
    assert worker.rho(40.0) == 0.0


# --- leases


def test_a_silent_worker_is_suspect_then_lost_then_taken_back() -> None:
    books = fleet(load())
    books.book("r1", 1, "w1", 1, 50.0, 0.0, 600.0)

    early = pass_time(books, 0.0, 0.7)
    suspect = survey(books, 0.7)
    lost = pass_time(books, 0.7, 2.4)
    gone = survey(books, 3.1)
    books.heard(load(report=2), 3.2)

    assert early == []
    assert (suspect.available, suspect.excluded) == ([], {"w1": "suspect"})
    assert lost == [Lost("w1", 1)]
    assert gone.excluded == {"w1": "lost"}
    assert books.idle() == []
    assert [one.name for one in survey(books, 3.2).available] == ["w1"]


def test_each_silence_of_a_worker_is_told_of_once() -> None:
    books = fleet(load())

    pass_time(books, 0.0, 0.7)
    first, again = books.newly_suspect(0.7), books.newly_suspect(0.7)
    books.heard(load(report=2), 0.8)
    heard = books.newly_suspect(0.9)
    pass_time(books, 0.9, 0.7)

    assert (first, again, heard, books.newly_suspect(1.6)) == (["w1"], [], [], ["w1"])


def test_the_lease_clock_stands_still_while_the_router_is_cut_off() -> None:
    books = fleet(load())

    books.cut_off(0.1)
    lost = pass_time(books, 0.1, 10.0)
    books.back(10.1)

    assert lost == []
    assert [one.name for one in survey(books, 10.2).available] == ["w1"]


def test_a_router_that_was_stopped_does_not_take_its_fleet_for_dead() -> None:
    """SIGSTOP for 10 s: on waking, the sweep runs before the heartbeats that wait in the socket are read."""
    books = fleet(load())
    pass_time(books, 0.0, 0.2)

    lost = books.sweep(10.2)

    assert lost == []
    assert survey(books, 10.2 + MAX_STEP_S / 2).excluded == {}


def test_a_new_incarnation_voids_the_old_one() -> None:
    books = fleet(load(incarnation=7, report=90))
    books.book("r1", 1, "w1", 7, 50.0, 0.0, 60.0)

    lost = books.heard(load(incarnation=9, report=1), 0.1)
    late = books.heard(load(incarnation=7, report=91, draining=True), 0.2)

    assert lost == Lost("w1", 7)
    assert late is None
    assert books.idle() == []
    assert survey(books, 0.2).excluded == {}
    assert not books.book("r2", 1, "w1", 7, 50.0, 0.2, 60.0)


def test_a_late_report_changes_nothing() -> None:
    books = fleet(load(report=5, queue_ms=10.0))

    books.heard(load(report=4, queue_ms=999.0), 0.0)

    assert queue_ms(books, 0.0) == 10.0


def test_every_worker_left_out_has_a_reason() -> None:
    books = fleet(
        load("good"),
        load("other-model", model="other"),
        load("other-revision", serves="else"),
        load("draining", draining=True),
        load("full", running=5, waiting=3),
        load("filling", running=7),
    )
    books.book("r1", 1, "filling", 1, 1.0, 0.0, 60.0)

    found = survey(books, 0.0)

    assert [one.name for one in found.available] == ["good"]
    assert found.excluded == {
        "other-model": "model",
        "other-revision": "model",
        "draining": "draining",
        "full": "busy",
        "filling": "busy",
    }


class BooksBalance(RuleBasedStateMachine):
    """However announcements, reports, outcomes and losses are ordered, repeated or missing: what is booked is what was
    dispatched and is not over, the queue never counts an ended dispatch, and in the end all is back to zero."""

    WORKERS = ("w1", "w2", "w3")

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.books = Fleet(0.6, 3.0)
        self.reports = dict.fromkeys(self.WORKERS, 0)
        self.incarnations = dict.fromkeys(self.WORKERS, 1)
        self.over: dict[str, int] = {}

    workers = st.sampled_from(WORKERS)
    requests = st.integers(0, 5).map(lambda n: f"r{n}")
    attempts = st.integers(1, 3)

    @rule(worker=workers, queue=st.floats(0, 1000), accepted=st.lists(requests, max_size=3), skipped=st.integers(0, 2))
    def worker_reports(self, worker: str, queue: float, accepted: list[str], skipped: int) -> None:
        self.reports[worker] += 1 + skipped
        report = load(
            worker,
            incarnation=self.incarnations[worker],
            report=self.reports[worker],
            queue_ms=queue,
            accepted=accepted,
        )
        self.books.heard(report, self.now)

    @rule(worker=workers)
    def worker_restarts(self, worker: str) -> None:
        self.incarnations[worker] += 1
        self.reports[worker] = 0

    @rule(request=requests, attempt=attempts, worker=workers, ms=st.floats(0, 1e4), lasts=st.floats(0.01, 5))
    def dispatch_is_heard_of(self, request: str, attempt: int, worker: str, ms: float, lasts: float) -> None:
        booked = self.books.book(request, attempt, worker, self.incarnations[worker], ms, self.now, self.now + lasts)

        assert not (booked and self.over.get(request, 0) >= attempt)

    @rule(request=requests, attempt=attempts, never_ran=st.booleans())
    def attempt_is_over(self, request: str, attempt: int, never_ran: bool) -> None:
        self.books.settle(request, attempt, self.now, never_ran=never_ran)
        self.over[request] = max(attempt, self.over.get(request, 0))

    @rule(worker=workers, queue=st.floats(0, 1000))
    def refusal_says_the_queue(self, worker: str, queue: float) -> None:
        self.books.correct(worker, self.incarnations[worker], queue, self.now)

    @rule(seconds=st.floats(0.01, 2))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.books.sweep(self.now)

    @rule(cut=st.booleans())
    def connection_changes(self, cut: bool) -> None:
        (self.books.cut_off if cut else self.books.back)(self.now)

    @invariant()
    def queues_are_sums_of_what_is_booked(self) -> None:
        for worker in self.books._workers.values():
            assert worker.queued.keys() <= worker.bookings.keys()
            assert worker.queued_us == sum(one.prefill_us for one in worker.queued.values())
            assert 0 <= worker.rho(self.now)
        booked = sum(self.books.in_flight().values())
        assert booked == len(self.books._bookings)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.books.sweep(self.now + 10.0)
            assert self.books.idle() == []


TestBooksBalance = BooksBalance.TestCase


def test_each_worker_that_is_not_lost_shows_what_is_believed_of_it() -> None:
    books = fleet()
    registry = CollectorRegistry()
    now = 0.0
    registry.register(WorkerGauges(books, lambda: now))
    books.heard(load("w1", queue_ms=100.0, running=2, waiting=1), now)
    books.heard(load("w2", queue_ms=0.0), now)
    books.book("r1", 1, "w1", 1, 50.0, now, 60.0)

    def shown(what: str, worker: str) -> float | None:
        return registry.get_sample_value(f"prefixbus_router_worker_{what}", {"worker": worker})

    assert [shown(what, "w1") for what in ("in_flight", "reported", "queue_ms")] == [1, 3, 150.0]
    assert [shown(what, "w2") for what in ("in_flight", "reported", "queue_ms")] == [0, 0, 0.0]

    pass_time(books, now, 4.0)

    assert shown("in_flight", "w1") is None
