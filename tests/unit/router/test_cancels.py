"""Cancels that overtake their request."""

from prefixbus.router.cancels import REMEMBER_MAX, REMEMBER_S, Cancels


def test_a_cancel_covers_its_tenants_request_for_a_while() -> None:
    cancels = Cancels()

    cancels.heard("acme", "c1", 0.0)

    assert cancels.covers("acme", "c1", REMEMBER_S - 1)
    assert not cancels.covers("acme", "c1", REMEMBER_S + 1)
    assert not cancels.covers("other", "c1", 0.0)
    assert not cancels.covers("acme", "c2", 0.0)


def test_a_flood_of_cancels_is_bounded_and_forgets_the_oldest() -> None:
    cancels = Cancels()

    for n in range(REMEMBER_MAX + 1):
        cancels.heard("acme", f"c{n}", 0.0)

    assert not cancels.covers("acme", "c0", 0.0)
    assert cancels.covers("acme", f"c{REMEMBER_MAX}", 0.0)
