"""What is entered for a dispatch is taken back whole, whoever sent it."""

import struct

import pytest

from prefixbus.bus.messages import VERSION, Dispatched, Holdings, Load
from prefixbus.router.books import Books
from prefixbus.router.fleet import Fleet

NS, KEYS = bytes(16), struct.pack("<2Q", 1, 2)


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(suspect_after_s=0.6, lost_after_s=3.0)
    made.heard(Load(VERSION, "w1", 1, 1, 0, "m", "serves", 0.0, 0, 0, 8, 0.0, 1000, 16, False, []), 0.0)
    return made


def announced(worker: str, attempt: int = 1, request_id: str = "r1") -> Dispatched:
    return Dispatched(VERSION, request_id, attempt, "router-2", worker, 1, 50.0, NS, KEYS, 1000.0)


def queue_ms(fleet: Fleet) -> float:
    return fleet.survey("m", "serves", 0.0).available[0].queue_ms


def depths(books: Books) -> dict[str, int]:
    known = books.recent.complete(Holdings(VERSION, []), NS, KEYS, asked_at=0.0, now=0.0)
    return {worker: level.depth for level in known.levels for worker in level.workers}


@pytest.mark.parametrize("by_another", [False, True])
def test_a_dispatch_is_queued_work_and_blocks_to_come_until_it_is_taken_back(fleet: Fleet, by_another: bool) -> None:
    books = Books(fleet)
    if by_another:
        books.announced(announced("w1"), 0.0, 60.0, 60.0)
    else:
        books.sent("r1", 1, "w1", 1, 50.0, NS, KEYS, 0.0, 60.0)
    assert queue_ms(fleet) == 50.0
    assert depths(books) == {"w1": 2}

    if by_another:
        books.announced(announced(""), 0.0, 60.0, 60.0)
    else:
        books.taken_back("r1", 1, 0.0)
    assert queue_ms(fleet) == 0.0
    assert depths(books) == {}
    assert fleet.idle() == []


def test_a_worker_is_not_busy_with_what_was_taken_back(fleet: Fleet) -> None:
    books = Books(fleet)
    books.sent("r1", 1, "w1", 1, 50.0, NS, KEYS, 0.0, 60.0)
    worker = fleet.living()["w1"]
    assert worker.rho(0.0) > 0.0

    books.taken_back("r1", 1, 0.0)

    assert worker.rho(0.0) == 0.0


def test_a_request_is_traffic_once_however_often_it_is_dispatched(fleet: Fleet) -> None:
    books = Books(fleet)
    for number in range(3):
        for attempt in (1, 2):
            books.sent(f"r{number}", attempt, "w1", 1, 50.0, NS, KEYS, 0.0, 60.0)
    assert books.traffic.shared_blocks(NS, KEYS) == 0
    books.announced(announced("w1", request_id="r4"), 0.0, 60.0, 60.0)
    assert books.traffic.shared_blocks(NS, KEYS) == 2
