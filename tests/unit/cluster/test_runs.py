"""Runs of the lab, played where they are asked for, and what is shown of them."""

import json
from pathlib import Path

import pytest

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.cluster import lab, runs
from prefixbus.lab import harness
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Setup


@pytest.fixture
def traffic(tmp_path: Path) -> runs.Traffic:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 600, "output_length": 200, "hash_ids": [number % 3]}
        for number in range(30)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return runs.Traffic(file=str(file), trace_block=512)


def job(name: str, seed: int = 0) -> runs.Job:
    return runs.Job(label=name, setup=Setup(policy=ruled(name), workers=2, seed=seed))


def test_a_run_that_never_ends_says_so_and_the_others_go_on(
    traffic: runs.Traffic, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    playing = runs.play(traffic, [job("random"), job("round-robin")], 1, said.append)

    # An answer of 200 tokens takes longer than that.
    monkeypatch.setattr(harness, "GIVE_UP_S", 0.1)
    endless = next(playing)
    monkeypatch.undo()
    played = [endless, *playing]
    lab._print_comparison(played)

    assert (endless.figures, endless.ttft_ms) == (None, [])
    assert "of 30 requests are open" in endless.never_ends
    assert played[1].figures is not None and played[1].figures.ended == {"ok": 30}
    assert said == ["1/2: random (seed 0) never ends", "2/2: round-robin (seed 0) done"]
    shown = capsys.readouterr().out
    assert f"random never ends: {endless.never_ends}" in shown
    assert shown.splitlines()[1].split() == ["random", "never", "ends"]


def test_a_difference_that_chance_makes_is_shown_as_none(
    traffic: runs.Traffic, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [job(name, seed) for name in ("random", "round-robin") for seed in (0, 1, 2)]
    played = list(runs.play(traffic, asked, 1, lambda _: None))
    same = [runs.Played(label="again", seed=one.seed, figures=one.figures) for one in played[:3]]

    lab._print_comparison([*played, *same])

    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:4]}
    assert " ~ " in rows["again"]
    assert "±" in rows["random"] and "~" not in rows["random"]


def test_speed_and_a_part_of_a_trace_are_as_asked(traffic: runs.Traffic) -> None:
    half = runs.Traffic(file=traffic.file, trace_block=512, first=15, speed=2.0)

    assert [arrival.at for arrival in runs.load(half).arrivals] == pytest.approx([0.05 * n for n in range(15)])


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")

    with pytest.raises(ConfigInvalid, match="holds no requests"):
        runs.load(runs.Traffic(file=str(empty), trace_block=512))
