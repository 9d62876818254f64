"""Tenants' cancels are passed on at a bounded rate, each tenant for itself."""

from prefixbus.tokenizer.cancels import PASSED_PER_TURN, WAITING_PER_TENANT, Turnstile


def flood(turnstile: Turnstile, count: int, tenant: str = "flooder") -> int:
    """How many of so many cancels of different requests are passed on at once."""
    return sum(turnstile.passes(tenant, f"c{n}") for n in range(count))


def test_a_cancel_is_passed_on_at_once() -> None:
    assert Turnstile().passes("acme", "c1")


def test_a_repeat_is_passed_on_in_another_turn_only() -> None:
    turnstile = Turnstile()
    turnstile.passes("acme", "c1")

    assert not turnstile.passes("acme", "c1")
    assert turnstile.turn() == []
    assert turnstile.passes("acme", "c1")


def test_one_request_id_of_two_tenants_is_two_cancels() -> None:
    turnstile = Turnstile()

    assert turnstile.passes("acme", "c1")
    assert turnstile.passes("other", "c1")


def test_a_flood_waits_for_its_turns_in_order_and_loses_nothing_while_it_is_bounded() -> None:
    turnstile = Turnstile()
    count = 2 * PASSED_PER_TURN + 1

    assert flood(turnstile, count) == PASSED_PER_TURN
    assert turnstile.turn() == [("flooder", f"c{n}") for n in range(PASSED_PER_TURN, 2 * PASSED_PER_TURN)]
    assert turnstile.turn() == [("flooder", f"c{count - 1}")]
    assert turnstile.turn() == []
    assert turnstile.lost == 0


def test_a_flood_neither_delays_nor_loses_anothers_cancel() -> None:
    turnstile = Turnstile()

    flood(turnstile, PASSED_PER_TURN + WAITING_PER_TENANT + 7)

    assert turnstile.lost == 7
    assert turnstile.passes("acme", "c1")
    assert len(turnstile.turn()) == PASSED_PER_TURN
    assert turnstile.passes("acme", "c2")


def test_a_repeat_of_what_waits_is_not_lost_when_no_more_may_wait() -> None:
    turnstile = Turnstile()
    flood(turnstile, PASSED_PER_TURN + WAITING_PER_TENANT)

    turnstile.passes("flooder", f"c{PASSED_PER_TURN}")

    assert turnstile.lost == 0
