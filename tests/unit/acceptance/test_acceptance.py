"""The acceptance study says what was measured: spreads, differences, bars."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from acceptance import bars, compare, holdout, plan, plots, report
from acceptance.cells import OURS, SCENARIOS, TRACES, Cell, Measured, measure, setup_of

from prefixbus.lab.figures import Figures
from prefixbus.lab.spread import spread
from prefixbus.router.policy import Policy

ALL = {cell.key: cell for table in plan.TABLES for cell in table.cells()}


def measured(mean: Callable[[Cell], float]) -> compare.Known:
    """Every cell of the plan, with this mean TTFT, and twice that as p95."""
    example = measure(Cell(traffic="local hit", setup={"workers": 2}), data=Path())
    assert example.figures is not None and example.figures.ttft_ms is not None

    def figures(cell: Cell) -> Figures:
        assert example.figures is not None and example.figures.ttft_ms is not None
        times = msgspec.structs.replace(example.figures.ttft_ms, mean=mean(cell), p95=2 * mean(cell))
        return msgspec.structs.replace(example.figures, ttft_ms=times)

    return {key: Measured(cell=cell, figures=figures(cell), ttft_ms=example.ttft_ms) for key, cell in ALL.items()}


def test_every_cell_is_one_that_can_be_run() -> None:
    for cell in ALL.values():
        assert cell.traffic in TRACES or cell.traffic in SCENARIOS
        setup = setup_of(cell)
        assert (setup.seed, isinstance(setup.policy, Policy)) == (cell.seed, cell.policy == OURS)


def test_a_cell_that_is_asked_for_again_has_the_same_name_and_another_seed_another() -> None:
    one = Cell(traffic="conv", setup={"workers": 4, "routers": 2})
    assert one.key == Cell(traffic="conv", setup={"routers": 2, "workers": 4}).key
    assert one.key != msgspec.structs.replace(one, seed=1).key


@pytest.mark.parametrize(
    ("ours", "other", "said"),
    [
        ([100.0, 102.0], [103.0, 105.0], "-2.9 %"),
        ([100.0, 102.0], [101.5, 103.5], "none"),
        ([100.0], [80.0], "+25.0 %, of one seed"),
    ],
)
def test_a_difference_within_the_spread_is_none(ours: list[float], other: list[float], said: str) -> None:
    assert compare.difference(spread(ours), spread(other)) == said


def test_bars_hold_by_what_was_measured() -> None:
    """Ours 100 ms everywhere; every rule 120, but overlap at weight 16 only 101."""
    known = measured(lambda cell: 100.0 if cell.policy == OURS else 101.0 if cell.policy == "overlap:16" else 120.0)

    some = {bar.what: bar for bar in bars.bars(plan.TABLES, known)}

    assert some["conv x1, mean TTFT to round-robin"].measured == pytest.approx(100 / 120)
    assert some["conv x1, mean TTFT to round-robin"].holds
    tuned = some["conv x1, mean TTFT to overlap at its best weight"]
    assert tuned.measured == pytest.approx(100 / 101) and not tuned.holds
    assert some["conv x3, mean TTFT to overlap at its best weight"].holds
    assert some["conv x1, routers 8: mean TTFT to 1"].measured == 1.0


def test_the_report_names_where_another_rule_is_ahead() -> None:
    known = measured(lambda cell: 90.0 if cell.policy == "threshold" and cell.traffic == "syn" else 100.0)

    text = report.whole(plan.TABLES, known)

    assert "| published | syn x6 | mean | threshold | +11.1 % | " in text
    assert "| published | conv x1 | mean | threshold |" not in text
    assert "**90**" in text


def test_a_run_that_never_ends_is_said_and_is_beaten() -> None:
    known = measured(lambda cell: 100.0)
    for key, cell in ALL.items():
        if cell.policy == "round-robin":
            known[key] = Measured(cell=cell, figures=None, ttft_ms=[])

    some = {bar.what: bar for bar in bars.bars(plan.TABLES, known)}

    assert some["conv x1, mean TTFT to round-robin"].measured == 0.0
    assert "never ends" in report.tables(plan.TABLES, known)


def test_if_ours_never_ends_no_bar_of_its_holds() -> None:
    known = measured(lambda cell: 100.0)
    for key, cell in ALL.items():
        if cell.policy == OURS:
            known[key] = Measured(cell=cell, figures=None, ttft_ms=[])

    assert not any(bar.holds for bar in bars.bars(plan.TABLES, known))
    assert report.whole(plan.TABLES, known)


@pytest.mark.timeout(90)
def test_the_pictures_are_drawn_also_where_a_run_never_ended(tmp_path: Path) -> None:
    known = measured(lambda cell: 100.0 * cell.speed)
    for key, cell in ALL.items():
        if cell.policy == "longest-hit":
            known[key] = Measured(cell=cell, figures=None, ttft_ms=[])

    plots.draw(known, tmp_path)

    drawn = {file.name: file.read_bytes()[:4] for file in tmp_path.iterdir()}
    assert drawn == dict.fromkeys(("ttft-cdf.png", "ttft-load.png", "reuse-cache.png", "ttft-delay.png"), b"\x89PNG")


def test_a_rule_with_a_host_tier_is_compared_with_ours_with_one() -> None:
    def mean(cell: Cell) -> float:
        return (150.0 if cell.policy == OURS else 160.0) - (50.0 if "host_tokens" in cell.setup else 0.0)

    tiers = {table.key: table for table in plan.TABLES}["tiers"]

    assert report.lost_cells([tiers], measured(mean)) == []


def test_how_much_of_the_gap_to_one_pooled_cache_is_closed_with_pulls() -> None:
    def mean(cell: Cell) -> float:
        if cell.policy == "pooled-lru":
            return 80.0
        return 85.0 if cell.setup == {"transfer_bandwidth": 25e9} else 100.0

    closed = bars.gap_closed(plan.TABLES, measured(mean))

    assert [one.row for one in closed] == list(bars.AMBITION_ROWS)
    assert {one.share for one in closed} == {0.75}
    assert "| 100 | 80 | 85 | 75% |" in report.closed_table(closed)


def test_a_wrong_estimate_is_learned_better_only_where_that_is_asked_for() -> None:
    assert not setup_of(Cell(traffic="conv", estimate=2.0)).learns
    assert setup_of(Cell(traffic="conv", estimate=2.0, setup={"learns": True})).learns
    assert setup_of(Cell(traffic="conv")).learns


def test_a_setting_is_chosen_by_the_traces_that_it_is_not_shown_on() -> None:
    """Siblings apart are best on tau alone, no externality on conv and syn."""

    def mean(cell: Cell) -> float:
        if cell.weights == {"sibling_bonus_ms": 0.0}:
            return 50.0 if cell.traffic == "tau" else 110.0
        return 90.0 if cell.weights == {"externality_cap": 0.0} and cell.traffic != "tau" else 100.0

    terms = {table.key: table for table in plan.TABLES}["terms"]
    shown = {one.row: one for one in holdout.held_out(terms, measured(mean))}

    assert (shown["tau x20"].chosen, shown["syn x6"].chosen) == ("no externality", "siblings apart")
    last = shown["tau x20"]
    assert last.by_others and last.shipped and last.best
    assert (last.by_others.mean, last.shipped.mean, last.best.mean) == (100.0, 100.0, 50.0)


def test_the_knee_is_the_last_load_before_ttft_doubles() -> None:
    load = {table.key: table for table in plan.TABLES}["load"]
    known = measured(lambda cell: 100.0 * max(1.0, cell.speed - 4 if cell.policy == OURS else cell.speed))

    ours, turns = report.knees(load, known).splitlines()[2].split("|")[2:4]

    assert (ours.strip(), turns.strip()) == ("x6", "x2")


@pytest.mark.parametrize(
    ("bar", "said"),
    [
        (bars.Bar("", 0.9, 0.89), "| holds |"),
        (bars.Bar("", 0.9, 0.95, chance=0.01), "| **fails** |"),
        (bars.Bar("", 0.9, 0.905, chance=0.01), "by less than seeds move it"),
        (bars.Bar("", 0.9, 0.95, pooled=0.93), "as the pooled LRU would"),
        (bars.Bar("", 0.9, None), "never ends"),
    ],
)
def test_a_bar_that_fails_is_said_to_fail(bar: bars.Bar, said: str) -> None:
    assert said in report.bar_table([bar])
    assert bar.holds == (said == "| holds |")
