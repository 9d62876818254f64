"""Rules of other routers: each chooses as its authors publish it."""

from collections import Counter
from typing import Any

import pytest
import xxhash

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.lab.inflight import InFlight
from prefixbus.lab.rules import HISTORY_S, RULES, Sight, ruled
from prefixbus.lab.workload import Arrival
from prefixbus.router.cost import PROFILES
from prefixbus.router.policy import Candidate, RequestShape

SIZE = 16


def key(number: int) -> int:
    """Spread as keys are."""
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"))


KEYS = [key(number) for number in range(64)]
PROMPT = SIZE * len(KEYS)


class Truth:
    """As it is told."""

    def __init__(self, queues: dict[str, float], cached: dict[str, int]) -> None:
        self._queues, self._cached = queues, cached

    def queue_ms(self, worker: str) -> float:
        return self._queues.get(worker, 0.0)

    def cached_tokens(self, worker: str, arrival: Arrival) -> int:
        return self._cached.get(worker, 0)


def candidate(worker: str, cached_tokens: int = 0, queue_ms: float = 0.0, announced_blocks: int = 0) -> Candidate:
    return Candidate(
        worker,
        cached_tokens,
        queue_ms,
        0.0,
        0,
        1 << 20,
        PROFILES["h100-8b"],
        held_blocks=cached_tokens // SIZE,
        announced_blocks=announced_blocks,
    )


def sight(*candidates: Candidate, books: InFlight | None = None, **changed: Any) -> Sight:
    shape = RequestShape(PROMPT, 100, SIZE, **{k: v for k, v in changed.items() if k in ("ordinal", "shared_tokens")})
    truth = Truth(changed.get("queues", {}), changed.get("cached", {}))
    keys = changed.get("keys", KEYS)
    arrival = Arrival(0.0, b"", PROMPT, 100)
    return Sight(shape, arrival, keys, list(candidates), books or InFlight(HISTORY_S), changed.get("now", 0.0), truth)


def busy(**requests: int) -> InFlight:
    """So many requests of one block in flight."""
    books = InFlight(HISTORY_S)
    for worker, count in requests.items():
        for number in range(count):
            books.sent(f"{worker}-{number}", worker, [], SIZE, SIZE, SIZE, 10.0, 0.0)
    return books


def test_round_robin_takes_each_in_turn() -> None:
    rule = ruled("round-robin")(0)
    chosen = [rule.choose(sight(candidate("w1"), candidate("w2"), ordinal=number)) for number in range(4)]
    assert chosen == ["w1", "w2", "w1", "w2"]


def test_random_draws_all_and_again_the_same() -> None:
    three = sight(candidate("w1"), candidate("w2"), candidate("w3"))
    one, other = ruled("random")(7), ruled("random")(7)
    chosen = [one.choose(three) for _ in range(300)]
    assert chosen == [other.choose(three) for _ in range(300)]
    assert all(70 <= count <= 130 for count in Counter(chosen).values())


def test_least_loaded_goes_by_queued_work_and_least_requests_by_their_number() -> None:
    two = sight(candidate("w1", queue_ms=50.0), candidate("w2", queue_ms=60.0), books=busy(w1=2, w2=1))
    assert ruled("least-loaded")(0).choose(two) == "w1"
    assert ruled("least-requests")(0).choose(two) == "w2"


def test_of_two_idle_workers_power_of_two_takes_the_first_drawn() -> None:
    idle = sight(*(candidate(f"w{number}") for number in range(4)))
    rule = ruled("power-of-two")(0)
    chosen = Counter(rule.choose(idle) for _ in range(400))
    assert all(70 <= count <= 130 for count in chosen.values()) and len(chosen) == 4


def test_power_of_two_never_takes_the_busiest_and_not_always_the_idlest() -> None:
    three = sight(candidate("w1"), candidate("w2"), candidate("w3"), books=busy(w2=1, w3=2))
    rule = ruled("power-of-two")(0)
    chosen = Counter(rule.choose(three) for _ in range(300))
    assert set(chosen) == {"w1", "w2"}
    assert 170 <= chosen["w1"] <= 230


def test_consistent_hash_keeps_a_prefix_together_and_moves_few_when_a_worker_joins() -> None:
    rule = ruled("consistent-hash")(0)
    few = [candidate(f"w{number}") for number in range(8)]
    before = {first: rule.choose(sight(*few, keys=[key(first), 7])) for first in range(1200)}
    assert {rule.choose(sight(*few, keys=[key(0), other])) for other in range(50)} == {before[0]}
    assert all(75 <= count <= 300 for count in Counter(before.values()).values())

    more = [*few, candidate("w8")]
    after = {first: rule.choose(sight(*more, keys=[key(first), 7])) for first in before}
    moved = {first for first in before if after[first] != before[first]}
    assert {after[first] for first in moved} == {"w8"}
    assert 0.04 < len(moved) / len(before) < 0.2


def test_consistent_hash_looks_beyond_what_all_share() -> None:
    rule = ruled("consistent-hash")(0)
    few = [candidate(f"w{number}") for number in range(8)]
    chosen = {rule.choose(sight(*few, keys=[1, key(other)], shared_tokens=SIZE)) for other in range(200)}
    assert len(chosen) == 8


def test_longest_hit_goes_there_whatever_the_queue() -> None:
    two = sight(candidate("w1", 64, queue_ms=9_000.0), candidate("w2", 48), books=busy(w1=50))
    assert ruled("longest-hit")(0).choose(two) == "w1"


def test_threshold_takes_a_long_hit_else_the_fewer_of_two_else_balances() -> None:
    rule = ruled("threshold:0.5")(0)
    books = busy(w1=1)
    assert rule.choose(sight(candidate("w1", PROMPT * 3 // 4), candidate("w2"), books=books)) == "w1"
    assert rule.choose(sight(candidate("w1", PROMPT // 4), candidate("w2"), books=books)) == "w2"

    assert rule.choose(sight(candidate("w1", PROMPT * 3 // 4), candidate("w2"), books=busy(w1=64))) == "w1"
    assert rule.choose(sight(candidate("w1", PROMPT * 3 // 4), candidate("w2"), books=busy(w1=65))) == "w2"
    # By 65 more, and not by half as many again.
    assert rule.choose(sight(candidate("w1", PROMPT * 3 // 4), candidate("w2"), books=busy(w1=265, w2=200))) == "w1"


def test_overlap_weighs_prefill_against_blocks_in_use() -> None:
    books = InFlight(HISTORY_S)
    # 40 blocks in use at w1, computed already; it holds 32 of our 64.
    books.sent("r", "w1", list(range(1000, 1040)), 40 * SIZE, 40 * SIZE, SIZE, 1.0, 0.0)
    books.first_token("r")
    two = sight(candidate("w1", 32 * SIZE), candidate("w2"), books=books)
    # w1: 32 + 104, w2: 64 + 64, and with weight 2: 64 + 104 against 128 + 64.
    assert ruled("overlap:1")(0).choose(two) == "w2"
    assert ruled("overlap:2")(0).choose(two) == "w1"


def test_overlap_believes_engines_alone_unless_it_is_given_announcements() -> None:
    two = sight(candidate("w2", 32 * SIZE, announced_blocks=32), candidate("w1"))
    assert ruled("overlap")(0).choose(two) == "w1"
    assert ruled("overlap-announced")(0).choose(two) == "w2"


def test_exploit_goes_to_the_hit_until_it_is_out_of_balance_and_explore_does_not() -> None:
    def of(cached: int, w1_ms: float) -> Sight:
        books = InFlight(HISTORY_S)
        books.sent("a", "w1", [], SIZE, SIZE, SIZE, w1_ms, 0.0)
        books.sent("b", "w2", [], SIZE, SIZE, SIZE, 100.0, 0.0)
        return sight(candidate("w1", cached), candidate("w2"), books=books)

    assert ruled("exploit-explore:2")(0).choose(of(PROMPT * 3 // 4, 199.0)) == "w1"
    assert ruled("exploit-explore:2")(0).choose(of(PROMPT * 3 // 4, 201.0)) == "w2"
    # Less than half is cached, 4 ms of prefill: not worth 99 ms of load.
    assert ruled("exploit-explore:2")(0).choose(of(PROMPT // 4, 199.0)) == "w2"


def test_load_older_than_three_minutes_is_no_load() -> None:
    books = InFlight(HISTORY_S)
    books.sent("a", "w1", [], SIZE, SIZE, SIZE, 500.0, 0.0)
    assert books.recent_ms("w1", 179.0) == 500.0
    assert books.recent_ms("w1", 181.0) == 0.0


def test_the_oracle_goes_by_what_is() -> None:
    two = [candidate("w1", PROMPT // 2, queue_ms=900.0), candidate("w2")]
    rule = ruled("oracle")(0)
    assert rule.choose(sight(*two, queues={"w2": 30.0})) == "w1"
    assert rule.choose(sight(*two, cached={"w2": PROMPT // 2})) == "w2"


def test_books_count_a_shared_block_once_and_end_with_nothing() -> None:
    books = InFlight(HISTORY_S)
    books.sent("a", "w1", KEYS[:10], 11 * SIZE, 11 * SIZE, SIZE, 1.0, 0.0)
    books.sent("b", "w1", KEYS[:20], 20 * SIZE, 10 * SIZE, SIZE, 1.0, 0.0)
    assert books.requests("w1") == 2
    assert books.prefill_tokens("w1") == 21 * SIZE
    # 20 blocks of b, which are also those of a, and a's last, which is not full.
    assert books.blocks_with("w1", KEYS, PROMPT, SIZE) == 21 + len(KEYS) - 20
    assert books.blocks_with("w2", KEYS, PROMPT, SIZE) == len(KEYS)

    books.first_token("b")
    assert books.prefill_tokens("w1") == 11 * SIZE
    for request_id in ("a", "b", "b"):
        books.ended(request_id)
    assert books.requests("w1") == books.prefill_tokens("w1") == 0
    assert books.blocks_with("w1", [], SIZE, SIZE) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("best", "is no rule"),
        ("round-robin:2", "takes no parameter"),
        ("overlap:much", "not a weight"),
        ("overlap:-1", "not a weight"),
        ("overlap:nan", "not a weight"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        ruled(text)


def test_every_rule_says_what_it_is_called_by() -> None:
    assert [ruled(ruled(name).label).label for name in RULES] == [ruled(name).label for name in RULES]
