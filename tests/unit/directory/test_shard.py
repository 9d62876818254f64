"""A whole shard, by the messages it gets and the answers it gives."""

import gc
import tracemalloc
from array import array

import msgspec
import pytest

from prefixbus.bus.messages import (
    HOST,
    VERSION,
    Cleared,
    Dispatched,
    Holdings,
    KvDump,
    KvEvents,
    Level,
    Load,
    Lookup,
    Outcome,
    Removed,
    Stored,
    WarmOrder,
)
from prefixbus.directory.ledger import AskDump, Rules
from prefixbus.directory.placement import REWARM
from prefixbus.directory.shard import Settings, Shard
from prefixbus.directory.shedding import Bounds
from prefixbus.directory.trust import TrustRules

NS = bytes(16)
OTHER_NS = b"other-namespace!"
WALL = 1_700_000_000.0
BLOCK = 32


def run(first: int, count: int) -> bytes:
    return array("Q", range(first, first + count)).tobytes()


def load(worker: str, incarnation: int = 1, report: int = 0) -> Load:
    """An idle worker."""
    return Load(
        v=VERSION,
        worker=worker,
        incarnation=incarnation,
        report=report,
        event_seq=0,
        model="m",
        serves="m",
        queue_ms=0.0,
        running=0,
        waiting=0,
        slots=64,
        kv_usage=0.0,
        kv_tokens=1 << 20,
        block_size=BLOCK,
        draining=False,
        accepted=[],
    )


class World:
    """A shard, workers that send it events, and routers that announce; `now` moves when told to."""

    def __init__(self, *workers: str, settings: Settings | None = None) -> None:
        self.shard = Shard(settings)
        self.now = 0.0
        self.seqs = dict.fromkeys(workers, 0)
        self.reports = 0
        self.orders: list[WarmOrder] = []
        for worker in workers:
            self.shard.heartbeat(load(worker), 0, 0.0)

    def tell(self, worker: str, *ops: Stored | Removed | Cleared) -> None:
        self.seqs[worker] += 1
        self.shard.events(KvEvents(VERSION, worker, 1, self.seqs[worker], list(ops)), self.now)

    def stores(self, worker: str, first: int, count: int, ns_id: bytes = NS) -> None:
        self.tell(worker, Stored(ns_id, 0, run(first, count)))

    def asks(self, first: int = 1, count: int = 64, ns_id: bytes = NS) -> Holdings:
        return self.shard.lookup(Lookup(VERSION, ns_id, run(first, count)), self.now)

    def dispatches(self, request_id: str, worker: str, keys: bytes, *, attempt: int = 1, for_s: float = 5.0) -> None:
        """To no worker: taken back."""
        expires_at = WALL + self.now + for_s
        sent = Dispatched(VERSION, request_id, attempt, "router", worker, 1, 40.0, NS, keys, expires_at)
        self.shard.dispatched(sent, self.now, WALL + self.now)

    def ends(
        self, request_id: str, worker: str, status: str = "ok", *, attempt: int = 1, predicted: int = 0, cached: int = 0
    ) -> list[object]:
        outcome = Outcome(
            v=VERSION,
            request_id=request_id,
            client_request_id="",
            attempt=attempt,
            worker=worker,
            incarnation=1,
            tenant="acme",
            model="m",
            ns_id=NS.hex(),
            status=status,
            error="" if status == "ok" else "overloaded",
            prefix_class="",
            decision="balanced-cold",
            prompt_tokens=5000,
            predicted_tokens=predicted,
            cached_tokens=cached,
            prefill_tokens=5000 - cached,
            output_tokens=8,
            queue_wait_ms=1.0,
            ttft_ms=50.0,
            total_ms=90.0,
            ended_at=WALL + self.now,
        )
        return list(self.shard.outcome(outcome, self.now))

    def passes(self, seconds: float) -> None:
        """Time, with all workers alive and everything done that is due."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.2)
            for worker, seq in self.seqs.items():
                self.reports += 1
                self.shard.heartbeat(load(worker, report=self.reports), seq, self.now)
            self.shard.tick(self.now)
            self.orders += self.shard.orders(self.now)
            while self.shard.do_slice(self.now):
                pass

    def leaps(self, seconds: float) -> None:
        """A long time in which all workers live on and nothing else happens."""
        self.now += seconds
        self.passes(5.0)

    @property
    def announced(self) -> int:
        return len(self.shard.predictions)


# Answers


def test_a_look_up_names_workers_by_depth_and_tier() -> None:
    world = World("w", "v")
    world.tell("w", Stored(NS, 0, run(1, 8)), Stored(NS, 0, run(1, 20), HOST))
    world.stores("v", 1, 8)

    holdings = world.asks()

    assert holdings.levels == [Level(20, ["w"], "host"), Level(8, ["w", "v"], "gpu")]
    assert (holdings.incomplete, holdings.trust, holdings.announced) == ([], {}, {})


def test_unknown_and_foreign_namespaces_get_the_same_answer() -> None:
    world = World("w")
    world.stores("w", 1, 8)
    world.dispatches("r", "w", run(1, 20))

    assert world.asks(ns_id=OTHER_NS) == world.asks(first=5000) == Holdings(VERSION, [])


# Announcements


def test_announced_blocks_count_as_held_and_the_answer_says_how_many_they_are() -> None:
    world = World("w", "v")
    world.stores("w", 1, 8)
    world.stores("v", 1, 8)

    world.dispatches("r", "w", run(1, 30))
    holdings = world.asks()

    assert holdings.levels == [Level(30, ["w"]), Level(8, ["v"])]
    assert holdings.announced == {"w": 22}


@pytest.mark.parametrize("ends_first", [False, True])
def test_what_was_announced_and_stored_is_gone_as_soon_as_it_is_evicted(ends_first: bool) -> None:
    """The announcement would say for another second that it is there."""
    world = World("w")
    world.dispatches("r", "w", run(1, 30))
    world.dispatches("sibling", "w", run(1, 30))
    world.dispatches("longer", "w", run(1, 40))
    if ends_first:
        world.ends("r", "w")

    world.stores("w", 1, 32)
    before = world.announced
    world.tell("w", Removed(NS, run(20, 13)))

    assert before == 1
    assert world.asks(count=30).announced == {"w": 11}
    world.ends("longer", "w", "cancelled")
    assert world.asks().levels == [Level(19, ["w"])]


def test_an_announcement_of_what_a_hole_in_the_story_holds_up_stands() -> None:
    world = World("w")
    world.dispatches("r", "w", run(1, 30))
    world.seqs["w"] += 1

    world.stores("w", 1, 30)

    assert world.announced == 1
    assert world.asks().levels == [Level(30, ["w"])]


@pytest.mark.parametrize("status", ["error", "cancelled"])
def test_a_request_that_was_shed_failed_or_cancelled_leaves_no_placement(status: str) -> None:
    world = World("w")
    world.dispatches("r", "w", run(1, 30))

    world.ends("r", "w", status)

    assert world.asks().levels == []
    assert world.announced == 0


def test_a_dispatch_that_was_refused_or_taken_back_leaves_no_placement() -> None:
    world = World("w")
    world.dispatches("r", "w", run(1, 30))

    world.dispatches("r", "", b"")

    assert world.asks().levels == []


def test_a_superseded_attempt_leaves_no_placement_even_if_nobody_took_it_back() -> None:
    world = World("w", "v")
    world.dispatches("r", "w", run(1, 30))

    world.dispatches("r", "v", run(1, 30), attempt=2)
    superseded = world.asks().levels
    world.dispatches("r", "", b"", attempt=1)
    world.dispatches("r", "w", run(1, 30), attempt=1)
    world.ends("r", "w", "error", attempt=1)

    assert superseded == [Level(30, ["v"])]
    assert world.asks().levels == [Level(30, ["v"])]


def test_a_late_outcome_of_a_later_attempt_ends_the_earlier_ones_placement() -> None:
    world = World("w", "v")
    world.dispatches("r", "w", run(1, 30))

    world.ends("r", "v", attempt=2)

    assert world.announced == 0


@pytest.mark.parametrize("status", ["ok", "error"])
def test_an_end_that_overtakes_its_announcement_still_ends_it(status: str) -> None:
    """They come from a worker and from a router, by ways of their own."""
    world = World("w")

    world.ends("r", "w", status)
    world.dispatches("r", "w", run(1, 30))

    assert world.announced == 0


def test_a_placement_is_renewed_while_its_request_is_queued() -> None:
    world = World("w")
    world.dispatches("r", "w", run(1, 30), for_s=2.0)

    world.passes(1.5)
    world.dispatches("r", "w", run(1, 30), for_s=2.0)
    world.passes(1.5)
    renewed = world.asks().levels
    world.passes(1.0)

    assert renewed == [Level(30, ["w"])]
    assert world.asks().levels == []


def test_a_placement_is_replaced_by_the_workers_own_events() -> None:
    world = World("w")
    world.dispatches("r", "w", run(1, 30))
    world.stores("w", 1, 25)
    while_running = world.asks()

    world.ends("r", "w")
    just_ended = world.asks().levels
    world.passes(1.5)

    assert (while_running.levels, while_running.announced) == ([Level(30, ["w"])], {"w": 5})
    assert just_ended == [Level(30, ["w"])]
    assert world.asks() == Holdings(VERSION, [Level(25, ["w"])])
    assert world.announced == 0


def test_an_announcement_is_not_believed_for_ever_whatever_it_says() -> None:
    world = World("w")

    world.dispatches("r", "w", run(1, 30), for_s=1e9)
    world.leaps(700.0)

    assert world.announced == 0


def test_a_dispatch_to_another_life_of_the_worker_is_no_placement() -> None:
    world = World("w")
    world.shard.heartbeat(load("w", 2), 0, 0.0)

    world.dispatches("r", "w", run(1, 30))

    assert world.announced == 0


# Trust


def test_answers_that_fall_short_lower_trust_in_that_worker_and_namespace_alone() -> None:
    world = World("w", "v")
    for worker in ("w", "v"):
        world.stores(worker, 1, 40)
        world.stores(worker, 1, 40, OTHER_NS)

    world.ends("r", "w", predicted=1000, cached=0)

    assert world.asks().trust == {"w": pytest.approx(0.25)}
    assert world.asks(ns_id=OTHER_NS).trust == {}


def test_repeated_misses_ask_for_a_dump_once_in_a_while() -> None:
    """The engine lost blocks 11 to 40 and never said so: the dump tells the truth."""
    world = World("w")
    world.stores("w", 1, 40)

    effects = [world.ends(f"r{number}", "w", predicted=1280, cached=320) for number in range(9)]
    doubted = world.asks()
    world.shard.events(KvDump(VERSION, "w", 1, 1, 1, 0, 1, [Stored(NS, 0, run(1, 10))]), world.now)

    assert [each for each in effects if each] == [[AskDump("w", 1, "misses")]]
    assert effects[2]
    assert doubted.incomplete == ["w"]
    assert doubted.trust["w"] == pytest.approx(0.1)
    assert world.asks().levels == [Level(10, ["w"])]
    assert world.asks().incomplete == []


def test_a_cancelled_or_uncounted_answer_says_nothing_about_the_prediction() -> None:
    world = World("w")
    world.stores("w", 1, 40)

    world.ends("a", "w", "cancelled", predicted=1000)
    world.ends("b", "w", "error", predicted=1000)

    assert world.asks().trust == {}


def test_outcomes_in_a_namespace_of_which_nothing_is_held_leave_no_trace() -> None:
    world = World("w")

    world.ends("r", "w", predicted=1000, cached=0)

    assert len(world.shard.trust) == 0


def test_a_restarted_worker_is_trusted_anew() -> None:
    world = World("w")
    world.stores("w", 1, 40)
    world.ends("r", "w", predicted=1000, cached=0)

    world.shard.events(KvEvents(VERSION, "w", 2, 1, [Stored(NS, 0, run(1, 40))]), 1.0)

    assert world.asks().levels == [Level(40, ["w"])]
    assert world.asks().trust == {}


@pytest.mark.parametrize("how", ["a gap", "a heartbeat that names what never came"])
def test_a_worker_whose_story_has_holes_is_trusted_less_until_they_are_mended(how: str) -> None:
    world = World("w", "v")
    world.stores("w", 1, 40)
    world.stores("v", 1, 40)
    lost = KvEvents(VERSION, "w", 1, 2, [Removed(NS, run(30, 11))])

    if how == "a gap":
        world.seqs["w"] = 2
        world.stores("w", 500, 4)
    else:
        world.seqs["w"] = 2
        world.passes(2.0)
    doubted = world.asks()
    world.shard.events(lost, world.now)

    assert doubted.levels == [Level(40, ["w", "v"])]
    assert (doubted.trust, doubted.incomplete) == ({"w": 0.5}, ["w"])
    assert world.asks().levels == [Level(40, ["v"]), Level(29, ["w"])]
    assert world.asks().trust == {}


def test_reasons_for_doubt_multiply_down_to_the_floor() -> None:
    world = World("w")
    world.stores("w", 1, 40)
    world.ends("r", "w", predicted=1000, cached=0)
    world.seqs["w"] = 2
    world.stores("w", 500, 4)

    once = world.asks().trust
    world.ends("s", "w", predicted=1000, cached=0)

    assert once == {"w": pytest.approx(0.125)}
    assert world.asks().trust == {"w": pytest.approx(0.1)}


def test_only_workers_that_the_answer_names_are_in_its_trust() -> None:
    world = World("w", "v")
    world.stores("w", 1, 40)
    world.seqs["v"] = 1
    world.stores("v", 500, 4)

    holdings = world.asks()

    assert (holdings.trust, holdings.incomplete) == ({}, ["v"])


HOUR = 3600.0


def test_an_idle_live_worker_keeps_its_entries_and_loses_a_little_trust_after_long() -> None:
    world = World("w", "v")
    world.stores("w", 1, 40)
    world.stores("v", 1, 20)

    trust = []
    for _ in range(4):
        world.leaps(HOUR - 100)
        trust.append(world.asks().trust.get("w", 1.0))
        world.now += 95
    world.leaps(100 * HOUR)

    assert world.asks().levels == [Level(40, ["w"]), Level(20, ["v"])]
    assert trust == pytest.approx([1.0, 0.76, 0.63, 0.565], abs=0.02)
    assert world.asks().trust == pytest.approx({"w": 0.5, "v": 0.5})


@pytest.mark.parametrize("how", ["an event", "an answer that reused what was predicted"])
def test_what_touches_entries_makes_them_fresh(how: str) -> None:
    world = World("w")
    world.stores("w", 1, 40)
    world.leaps(3 * HOUR)
    aged = world.asks().trust["w"]

    if how == "an event":
        world.stores("w", 41, 1)
    else:
        world.ends("r", "w", predicted=1000, cached=1280)

    assert aged < 0.7
    assert world.asks().trust == {}
    assert len(world.shard.ages) == 0


def test_a_dead_worker_loses_its_entries_by_its_lease() -> None:
    world = World("w", "v")
    world.stores("w", 1, 40)
    world.stores("v", 1, 20)
    world.seqs = {"v": 1}

    world.passes(2.5)
    silent = world.asks().levels
    world.passes(1.0)

    assert silent == [Level(40, ["w"]), Level(20, ["v"])]
    assert world.asks().levels == [Level(20, ["v"])]


# Memory


def test_events_beyond_the_memory_bound_shed_the_least_useful_and_nothing_that_is_said_is_wrong() -> None:
    bounds = Bounds(memory_bytes=400_000)
    world = World("w", settings=Settings(bounds=bounds))
    world.stores("w", 1, 40)
    world.asks()

    for number in range(1, 200):
        ns_id = number.to_bytes(16, "little")
        world.stores("w", 1, 64, ns_id)
        world.stores("w", 1000, 64, ns_id)
        assert world.shard.index.estimated_bytes < bounds.memory_bytes + 20_000
    world.passes(0.2)

    assert world.shard.index.estimated_bytes <= bounds.memory_bytes * 0.95
    assert world.asks().levels == [Level(40, ["w"])]
    assert world.asks().incomplete == []
    last = world.asks(ns_id=(1).to_bytes(16, "little")), world.asks(ns_id=(199).to_bytes(16, "little"))
    assert [[level.depth for level in holdings.levels] for holdings in last] != [[64], [64]]
    assert world.shard.shedding.shed_pairs > 10_000


def test_what_was_shed_comes_back_by_later_events_only_and_from_its_beginning() -> None:
    world = World("w", settings=Settings(bounds=Bounds(memory_bytes=100_000)))
    world.stores("w", 1, 4, OTHER_NS)
    world.stores("w", 1, 400)
    while world.shard.index.shed(NS, 1):
        pass

    world.tell("w", Stored(NS, 400, run(401, 10)))
    orphan = world.asks(first=401).levels
    world.tell("w", Removed(NS, run(1, 410)))
    world.tell("w", Stored(NS, 0, run(1, 12)), Stored(NS, 12, run(13, 3)))

    assert orphan == []
    assert world.asks().levels == [Level(15, ["w"])]


def popular(world: World, *, is_warming: bool = False) -> Dispatched:
    """One of many dispatches of a prefix that its worker holds."""
    return Dispatched(
        v=VERSION,
        request_id="popular",
        attempt=1,
        router="router",
        worker="w",
        incarnation=1,
        prefill_ms=40.0,
        ns_id=NS,
        keys=run(1, 32),
        expires_at=WALL + world.now + 5.0,
        held_blocks=32,
        is_warming=is_warming,
    )


def test_a_worker_that_lost_its_cache_is_ordered_what_it_served() -> None:
    world = World("w")
    world.stores("w", 1, 32)
    for _ in range(10):
        world.shard.dispatched(popular(world), world.now, WALL + world.now)
    world.passes(10.0)
    assert world.orders == []

    world.tell("w", Cleared())
    world.passes(1.0)

    assert [(order.worker, order.kind, order.key) for order in world.orders] == [("w", REWARM, 32)]


def test_an_order_that_is_being_carried_out_is_announced_to_no_request() -> None:
    world = World("w")

    world.shard.dispatched(popular(world, is_warming=True), world.now, WALL + world.now)

    assert world.asks().levels == []
    assert world.announced == 0


def test_what_its_router_renews_is_believed_for_longer() -> None:
    world = World("w")
    sent = popular(world)
    world.shard.dispatched(sent, world.now, WALL + world.now)

    world.passes(4.0)
    renewal = msgspec.structs.replace(sent, expires_at=WALL + world.now + 5.0, renews=True)
    world.shard.dispatched(renewal, world.now, WALL + world.now)
    world.passes(4.0)
    believed = world.announced
    world.passes(2.0)

    assert (believed, world.announced) == (1, 0)


def test_a_renewal_comes_too_late_for_what_has_ended() -> None:
    world = World("w")
    sent = popular(world)
    world.shard.dispatched(sent, world.now, WALL + world.now)
    world.ends(sent.request_id, "w", "error")

    world.shard.dispatched(msgspec.structs.replace(sent, renews=True), world.now, WALL + world.now)

    assert world.announced == 0


def test_a_renewal_is_no_further_request_for_its_prefix() -> None:
    """One dispatch is not reason enough to have a prefix computed again after its worker's cache went."""
    world = World("w")
    world.stores("w", 1, 32)
    sent = popular(world)
    world.shard.dispatched(sent, world.now, WALL + world.now)
    for _ in range(10):
        world.shard.dispatched(msgspec.structs.replace(sent, renews=True), world.now, WALL + world.now)

    world.tell("w", Cleared())
    world.passes(1.0)

    assert world.orders == []


def test_churn_of_everything_leaves_no_memory_behind() -> None:
    """Workers come and go, requests are announced and end well or badly, namespaces are doubted and forgotten."""
    settings = Settings(
        leases=Rules(suspect_after_s=0.1, lost_after_s=0.2, lost_max=20),
        bounds=Bounds(memory_bytes=2_000_000),
        trust=TrustRules(doubts_max=200, old_max=200, fresh_s=2.0),
    )
    world = World(settings=settings)

    def live_and_die(first: int, last: int) -> None:
        for number in range(first, last):
            worker = f"w{number}"
            world.now = number * 5.0
            world.seqs = {worker: 0}
            world.shard.heartbeat(load(worker), 0, world.now)
            world.stores(worker, 1, 64)
            world.stores(worker, 1, 16, number.to_bytes(16, "big"))
            for request in range(6):
                request_id = f"{worker}-{request}"
                world.asks(count=32)
                world.dispatches(request_id, worker, run(100 * number, 32))
                status = ("ok", "error", "cancelled")[request % 3]
                world.ends(request_id, worker, status, predicted=2048, cached=0)
            world.passes(0.4)

    live_and_die(0, 300)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        live_and_die(300, 700)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # 400 workers' blocks alone would be 3 MB. What may grow still is what is remembered of ended requests, 300 KB.
    assert after - before < 500_000, after - before
    assert len(world.shard.trust) < 3
    assert world.shard.index.slots.width < 10
