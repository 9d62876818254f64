"""How often a directory that does not answer is asked."""

from prefixbus.router.patience import MISSES, PROBE_S, Patience


def out_of_patience(now: float = 0.0) -> Patience:
    patience = Patience()
    for _ in range(MISSES):
        patience.missed(now)
    return patience


def test_a_few_misses_change_nothing() -> None:
    patience = Patience()

    for _ in range(MISSES - 1):
        patience.missed(0.0)

    assert patience.may_ask(0.0)


def test_after_many_misses_in_a_row_only_a_probe_asks() -> None:
    patience = out_of_patience()

    asked = [now / 100 for now in range(1, 200) if patience.may_ask(now / 100)]

    assert asked == [0.5, 1.0, 1.5]


def test_a_probe_without_an_answer_is_followed_by_the_next_in_its_time() -> None:
    patience = out_of_patience()

    first = patience.may_ask(PROBE_S)
    patience.missed(PROBE_S + 0.1)

    assert first
    assert not patience.may_ask(PROBE_S + 0.2)
    assert patience.may_ask(2 * PROBE_S)


def test_one_answer_ends_it() -> None:
    patience = out_of_patience()

    patience.answered()

    assert all(patience.may_ask(0.0) for _ in range(10))
