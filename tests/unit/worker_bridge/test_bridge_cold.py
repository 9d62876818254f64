"""A request is cold only if nothing of its namespace can have been in the engine's cache while it ran."""

from test_bridge_blocks import NS_A, NS_B, SALT_A, X, index, removed, stored

from prefixbus.worker_bridge.cold import LAG_S, ColdRequests


def test_the_first_of_a_namespace_is_cold_and_the_next_is_not() -> None:
    blocks = index()
    cold = ColdRequests(blocks)

    cold.begins(NS_A, "one", 0.0)
    assert cold.is_cold(NS_A, "one")
    blocks.apply([stored(SALT_A, (X,))])
    cold.ends(NS_A, "one", 0.1)
    cold.begins(NS_A, "two", 10.0)

    assert not cold.is_cold(NS_A, "two")


def test_another_that_comes_while_it_runs_makes_both_warm() -> None:
    """Whose blocks are there first is the engine's to decide."""
    cold = ColdRequests(index())
    cold.begins(NS_A, "one", 0.0)

    cold.begins(NS_A, "two", 0.1)
    cold.begins(NS_B, "other", 0.1)

    assert (cold.is_cold(NS_A, "one"), cold.is_cold(NS_A, "two"), cold.is_cold(NS_B, "other")) == (False, False, True)
    cold.ends(NS_A, "two", 0.2)
    assert not cold.is_cold(NS_A, "one")


def test_a_namespace_that_was_just_left_may_have_blocks_that_are_not_told_of() -> None:
    cold = ColdRequests(index())
    cold.begins(NS_A, "one", 0.0)
    cold.ends(NS_A, "one", 1.0)

    cold.begins(NS_A, "soon", 1.0 + LAG_S)
    assert not cold.is_cold(NS_A, "soon")

    cold.ends(NS_A, "soon", 4.0)
    cold.begins(NS_A, "later", 4.1 + LAG_S)
    assert cold.is_cold(NS_A, "later")


def test_an_index_with_holes_proves_nothing() -> None:
    blocks = index()
    blocks.lose_story()
    cold = ColdRequests(blocks)

    cold.begins(NS_A, "one", 0.0)

    assert not cold.is_cold(NS_A, "one")


def test_a_namespace_whose_last_block_went_is_cold_again() -> None:
    blocks = index()
    blocks.apply([stored(SALT_A, (X,)), removed(SALT_A, (X,))])
    cold = ColdRequests(blocks)

    cold.begins(NS_A, "one", 0.0)

    assert cold.is_cold(NS_A, "one")


def test_nothing_is_kept_of_what_left_long_ago() -> None:
    cold = ColdRequests(index())
    for number in range(100):
        ns_id = number.to_bytes(16, "big")
        cold.begins(ns_id, "r", float(number))
        cold.ends(ns_id, "r", float(number))

    assert repr(cold) == "<ColdRequests in 0 namespaces, 3 just left>"
