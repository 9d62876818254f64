"""Cancels that overtake their request."""

from prefixbus.bus.cancels import REMEMBER_PER_TENANT, REMEMBER_S, Cancels


def test_a_cancel_covers_its_tenants_request_for_a_while() -> None:
    cancels = Cancels()

    cancels.heard("acme", "c1", 0.0)

    assert cancels.covers("acme", "c1", REMEMBER_S - 1)
    assert not cancels.covers("acme", "c1", REMEMBER_S + 1)
    assert not cancels.covers("other", "c1", 0.0)
    assert not cancels.covers("acme", "c2", 0.0)


def test_a_flood_of_cancels_is_bounded_and_forgets_the_oldest() -> None:
    cancels = Cancels()

    for n in range(REMEMBER_PER_TENANT + 1):
        cancels.heard("acme", f"c{n}", 0.0)

    assert len(cancels) == REMEMBER_PER_TENANT
    assert not cancels.covers("acme", "c0", 0.0)
    assert cancels.covers("acme", f"c{REMEMBER_PER_TENANT}", 0.0)


def test_one_tenants_flood_does_not_push_out_anothers_cancel() -> None:
    cancels = Cancels()
    cancels.heard("acme", "c1", 0.0)

    for n in range(20 * REMEMBER_PER_TENANT):
        cancels.heard("flooder", f"c{n}", 1.0)

    assert cancels.covers("acme", "c1", 1.0)
    assert len(cancels) == REMEMBER_PER_TENANT + 1


def test_a_cancel_heard_again_is_remembered_from_then_on_and_outlives_older_ones() -> None:
    cancels = Cancels()
    for n in range(REMEMBER_PER_TENANT):
        cancels.heard("acme", f"c{n}", 0.0)

    cancels.heard("acme", "c0", REMEMBER_S - 1)
    cancels.heard("acme", "newest", REMEMBER_S - 1)

    assert cancels.covers("acme", "c0", REMEMBER_S + 1)
    assert not cancels.covers("acme", "c1", REMEMBER_S - 1)


def test_a_tenant_that_cancels_nothing_for_long_leaves_nothing_behind() -> None:
    cancels = Cancels()
    for n in range(100):
        cancels.heard("gone", f"c{n}", 0.0)
        cancels.heard("acme", f"c{n}", 1.0)

    cancels.heard("new", "c1", REMEMBER_S)

    assert len(cancels) == 101
    assert cancels.covers("acme", "c1", REMEMBER_S)
