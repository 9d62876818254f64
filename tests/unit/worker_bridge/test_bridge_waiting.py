"""Whose turn it is with the engine: fair between tenants by tokens, in order within one, and never more than fits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixbus.worker_bridge.waiting import Ahead, Waiting


def order(line: Waiting, tokens: dict[str, int]) -> list[str]:
    """In which order those who wait go to the engine, one at a time."""
    went = []
    while (request_id := line.next_up()) is not None:
        assert line.begin_next(tokens[request_id])
        went.append(request_id)
        line.left(request_id)
    return went


def test_while_there_is_room_and_nobody_waits_requests_go_at_once() -> None:
    line = Waiting(1000)

    assert line.come("a", "t", False, 600)
    assert line.come("b", "t", False, 400)
    assert not line.come("c", "t", False, 1)
    assert len(line) == 1


def test_a_request_larger_than_the_window_goes_alone() -> None:
    line = Waiting(1000)

    assert line.come("large", "t", False, 5000)
    assert not line.come("next", "t", False, 1)

    line.left("large")
    assert line.begin_next(1)


def test_nobody_overtakes_a_large_request_that_waits_for_room() -> None:
    line = Waiting(1000)
    line.come("first", "t", False, 500)
    line.come("large", "t", False, 900)

    assert not line.come("small", "u", False, 10) and line.next_up() == "small"
    assert line.begin_next(10)
    assert line.next_up() == "large" and not line.begin_next(900)
    assert not line.come("another", "t", False, 10)
    line.left("first")
    assert line.begin_next(900)


def test_a_tenants_requests_go_in_the_order_in_which_they_came() -> None:
    line = Waiting(1)
    line.come("busy", "t", False, 1)
    tokens = {f"r{number}": 100 - number for number in range(5)}
    for request_id, count in tokens.items():
        line.come(request_id, "t", False, count)
    line.left("busy")

    assert order(line, tokens) == list(tokens)


def test_a_tenant_with_one_request_does_not_wait_for_anothers_hundred() -> None:
    line = Waiting(1)
    line.come("busy", "crowd", False, 1)
    tokens = {f"crowd-{number}": 1000 for number in range(100)} | {"lone": 1000}
    for request_id, count in tokens.items():
        line.come(request_id, request_id.split("-")[0], False, count)
    line.left("busy")

    assert order(line, tokens).index("lone") <= 1


def test_a_unique_request_does_not_wait_for_its_tenants_hot_queue() -> None:
    line = Waiting(1)
    line.come("busy", "t", True, 1)
    tokens = {f"hot{number}": 100 for number in range(50)} | {"unique": 1000}
    for request_id, count in tokens.items():
        line.come(request_id, "t", request_id != "unique", count)
    line.left("busy")

    # Before it go as many tokens of hot ones as it has itself; of the last of these it is the one that waited longer.
    assert order(line, tokens).index("unique") == 9


def test_two_flows_of_one_tenant_get_no_more_than_anothers_one() -> None:
    line = Waiting(1)
    line.come("busy", "t", False, 1)
    tokens = {f"{who}{number}": 100 for number in range(30) for who in ("two-warm-", "two-cold-", "one-cold-")}
    for request_id, count in tokens.items():
        line.come(request_id, request_id[:3], "warm" in request_id, count)
    line.left("busy")

    went = Counter(request_id[:3] for request_id in order(line, tokens)[:30])
    assert went == {"two": 15, "one": 15}


def test_who_has_nothing_waiting_saves_nothing_up() -> None:
    line = Waiting(1)
    line.come("busy", "t", False, 1)
    tokens = {f"t{number}": 100 for number in range(20)}
    for request_id, count in tokens.items():
        line.come(request_id, "t", False, count)
    line.come("u-early", "u", False, 100)
    line.left("busy")
    for _ in range(10):
        served = line.next_up()
        assert served is not None and line.begin_next(100)
        line.left(served)
    for number in range(10):
        tokens[f"u{number}"] = 100
        line.come(f"u{number}", "u", False, 100)

    assert Counter(request_id[0] for request_id in order(line, tokens)[:10]) == {"t": 5, "u": 5}


def test_what_others_computed_meanwhile_is_not_counted_again() -> None:
    line = Waiting(8192)
    for number in range(4):
        line.come(f"sibling{number}", "t", False, 8192)
    line.left("sibling0")

    assert all(line.begin_next(32) for _ in range(3))


def test_what_went_before_a_request_is_told_by_whose_it_was() -> None:
    """Where it stood in the fair queue, in tokens: what was with the engine when it came is not in it."""
    line = Waiting(1)
    line.come("busy", "x", False, 700)
    for number, tenant in enumerate("aaab"):
        line.come(f"{tenant}{number}", tenant, False, 100)
    line.left("busy")

    ahead = {}
    while (request_id := line.next_up()) is not None:
        ahead[request_id] = line.begin_next(100)
        line.left(request_id)

    assert ahead == {"a0": Ahead(0, 0), "b3": Ahead(0, 100), "a1": Ahead(100, 100), "a2": Ahead(200, 100)}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 500)), min_size=1, max_size=80),
    st.integers(1, 40),
)
def test_what_tenants_that_wait_are_given_differs_by_one_request_at_most(
    requests: list[tuple[str, bool, int]], count: int
) -> None:
    line = Waiting(1)
    line.come("busy", "x", False, 1)
    tokens: dict[str, int] = {}
    of: dict[str, str] = {}
    for number, (tenant, warm, size) in enumerate(requests):
        tokens[str(number)], of[str(number)] = size, tenant
        line.come(str(number), tenant, warm, size)
    line.left("busy")
    left = Counter(of.values())
    given: Counter[str] = Counter()

    for _ in range(count):
        served = line.next_up()
        if served is None or not all(left.values()):
            break  # from here on somebody does not wait any more
        assert line.begin_next(tokens[served])
        line.left(served)
        given[of[served]] += tokens[served]
        left[of[served]] -= 1
        if all(left.values()):
            amounts = [given[tenant] for tenant in left]
            assert max(amounts) - min(amounts) <= max(tokens.values())


@pytest.mark.parametrize("request_id", ["waits", "with the engine"])
def test_who_has_left_is_unknown(request_id: str) -> None:
    line = Waiting(1)
    line.come("with the engine", "t", False, 1)
    line.come("waits", "t", False, 1)
    line.left(request_id)

    with pytest.raises(KeyError):
        line.left(request_id)


class NobodyIsForgotten(RuleBasedStateMachine):
    """Whoever comes goes to the engine or leaves, and the engine never has more than the window, or one."""

    tokens = st.integers(1, 900)

    def __init__(self) -> None:
        super().__init__()
        self.line = Waiting(1000)
        self.number = 0
        self.waiting: dict[str, tuple[str, bool]] = {}
        self.begun: dict[str, int] = {}
        # Tenants' tokens in the order in which they went to the engine, and how many there were when each came.
        self.given: list[tuple[str, int]] = []
        self.came_after: dict[str, int] = {}

    @rule(tenant=st.sampled_from("abc"), warm=st.booleans(), tokens=tokens)
    def comes(self, tenant: str, warm: bool, tokens: int) -> None:
        self.number += 1
        request_id = f"r{self.number}"
        if self.line.come(request_id, tenant, warm, tokens):
            assert not self.waiting
            self.begun[request_id] = tokens
            self.given.append((tenant, tokens))
        else:
            self.waiting[request_id] = tenant, warm
            self.came_after[request_id] = len(self.given)

    @precondition(lambda self: self.waiting)
    @rule(tokens=tokens)
    def next_one_goes(self, tokens: int) -> None:
        request_id = self.line.next_up()
        assert request_id is not None
        flow = self.waiting[request_id]
        assert request_id == next(one for one, its in self.waiting.items() if its == flow)
        ahead = self.line.begin_next(tokens)
        if ahead is not None:
            tenant, _ = self.waiting.pop(request_id)
            meanwhile = self.given[self.came_after[request_id] :]
            assert ahead.own_tokens == sum(given for whose, given in meanwhile if whose == tenant)
            assert ahead.others_tokens == sum(given for whose, given in meanwhile if whose != tenant)
            self.begun[request_id] = tokens
            self.given.append((tenant, tokens))
        else:
            assert self.begun and sum(self.begun.values()) + tokens > 1000

    @precondition(lambda self: self.waiting or self.begun)
    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted([*self.waiting, *self.begun])))
        self.line.left(request_id)
        self.waiting.pop(request_id, None)
        self.begun.pop(request_id, None)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert (self.line.next_up() is None) == (not self.waiting)
        assert sum(self.begun.values()) <= 1000 or len(self.begun) == 1
        assert repr(self.line) == f"<Waiting {len(self.waiting)}, {sum(self.begun.values())} tokens with the engine>"


TestNobodyIsForgotten = NobodyIsForgotten.TestCase
