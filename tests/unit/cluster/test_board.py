"""What `prefixbus top` shows."""

import io
import random
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.decisions import record

from prefixbus.bus.messages import DecisionRecord, Load, Outcome
from prefixbus.cluster import board
from prefixbus.cluster.board import WINDOW_S, Board, View

WALL = 1_700_000_000.0


def decided(request_id: str, *, at: float = WALL, **changed: Any) -> DecisionRecord:
    fields = {
        "request_id": request_id,
        "decided_at": at,
        "block_size": 32,
        "selected_worker": "w1",
        "decision": "partial-hit",
        **changed,
    }
    return record(random.Random(1), **fields)


def ended(request_id: str, cached: int | None, ttft_ms: float | None, *, prompt: int = 320, **changed: Any) -> Outcome:
    made = Outcome(
        v=1,
        request_id=request_id,
        client_request_id="",
        attempt=1,
        worker="w1",
        incarnation=1,
        tenant="acme",
        model="m",
        ns_id="",
        status="ok",
        error="",
        prefix_class="session",
        decision="partial-hit",
        prompt_tokens=prompt,
        predicted_tokens=0,
        cached_tokens=cached,
        prefill_tokens=None,
        output_tokens=1,
        queue_wait_ms=0.0,
        ttft_ms=ttft_ms,
        total_ms=1.0,
        ended_at=WALL,
    )
    return msgspec.structs.replace(made, **changed)


def load(worker: str, **changed: Any) -> Load:
    made = Load(1, worker, 1, 1, 0, "m", "", 12.0, 3, 1, 256, 0.25, 1000, 32, False, [])
    return msgspec.structs.replace(made, **changed)


def viewed(*heard: DecisionRecord | Outcome, wall: float = WALL) -> View:
    made = Board(0.6, 3.0)
    for one in heard:
        if isinstance(one, DecisionRecord):
            made.decision(one)
        else:
            made.outcome(one)
    return made.view(0.0, wall)


def test_first_tokens_are_told_by_what_was_cached() -> None:
    view = viewed(
        *(decided(name) for name in ("warm", "part-1", "part-2", "cold", "running")),
        ended("warm", 288, 10.0),
        ended("part-1", 32, 20.0),
        ended("part-2", 64, 40.0),
        ended("cold", 0, 90.0),
    )

    found = {kind: (spread.count, spread.p50_ms, spread.p95_ms) for kind, spread in view.ttft.items()}
    assert found == {"warm": (1, 10.0, 10.0), "partial": (2, 30.0, 40.0), "cold": (1, 90.0, 90.0)}
    assert (view.requests, view.cached_tokens, view.prompt_tokens) == (5, 384, 1280)
    assert view.hit_token_ratio == 384 / 1280


def test_an_engine_that_does_not_count_is_in_no_ratio() -> None:
    view = viewed(decided("a"), decided("b"), ended("a", None, 10.0), ended("b", 32, 10.0, prompt=64))

    assert (view.cached_tokens, view.prompt_tokens) == (32, 64)


def test_decisions_are_counted_by_reason_and_the_last_stands_first() -> None:
    view = viewed(decided("a"), decided("b", decision="blind"), decided("c"), ended("a", 0, None, status="error"))

    assert view.decisions == [("partial-hit", 2), ("blind", 1)]
    assert [one.request_id for one in view.latest] == ["c", "b", "a"]
    assert view.failed == 1


def refused(request_id: str, error: str, **changed: Any) -> Outcome:
    """What a router ended before it had chosen a worker."""
    status = "cancelled" if error == "cancelled" else "error"
    fields: dict[str, Any] = {
        "status": status,
        "error": error,
        "worker": "",
        "incarnation": 0,
        "attempt": 0,
        "decision": "",
    }
    return ended(request_id, None, None, **(fields | changed))


def test_requests_that_were_never_decided_are_shown_with_why() -> None:
    view = viewed(
        decided("a"),
        ended("a", 32, 10.0),
        refused("b", "overloaded"),
        decided("c", predicted_cached_tokens=64),
        refused("d", "cancelled"),
        refused("e", "overloaded"),
        refused("old", "overloaded", ended_at=WALL - WINDOW_S - 1),
    )

    assert (view.requests, view.failed) == (5, 3)
    assert view.undecided == [("overloaded", 2), ("cancelled", 1)]
    assert view.decisions == [("partial-hit", 2)]
    text = framed(view)
    assert "not decided: overloaded 2, cancelled 1" in text
    last = [line.split() for line in text.partition("last ")[2].splitlines()[-5:]]
    assert [(row[0], row[-1]) for row in last] == [
        ("e", "overloaded"),
        ("d", "cancelled"),
        ("c", "64"),
        ("b", "overloaded"),
        ("a", "ok"),
    ]


def test_the_end_of_a_request_that_had_been_decided_is_not_one_that_was_never() -> None:
    """Its decision may have left the window."""
    view = viewed(ended("a", None, None, status="error", error="worker_lost", attempt=2))

    assert view.undecided == []


def test_what_could_not_be_read_is_counted_and_named() -> None:
    made = Board(0.6, 3.0)
    made.left_out("pb.v1.load.w0", WALL - WINDOW_S - 1)
    made.left_out("pb.v1.outcome.evil.R1", WALL - 1)
    made.left_out("pb.v1.load.evil", WALL)

    view = made.view(0.0, WALL)

    assert view.left_out == ["pb.v1.outcome.evil.R1", "pb.v1.load.evil"]
    assert "2 messages could not be read, the last under pb.v1.load.evil" in framed(view)
    assert "could not be read" not in framed(viewed())


def test_a_record_from_the_future_keeps_nothing_in_the_window() -> None:
    """It stood in front of all others, and none of them was ever forgotten."""
    view = viewed(decided("future", at=WALL * 5), decided("old", at=WALL - WINDOW_S - 1), decided("new"))

    assert [one.request_id for one in view.latest] == ["new"]


def framed(view: View, height: int = 40) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(board.frame(view, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    view = viewed(
        decided("old", at=WALL - WINDOW_S - 1),
        ended("old", 32, 1.0, ended_at=WALL - WINDOW_S - 1),
        decided("new"),
        ended("new", 32, 1.0),
    )

    assert [one.request_id for one in view.latest] == ["new"]
    assert view.prompt_tokens == 320


@pytest.mark.parametrize(("silent_s", "lease"), [(0.1, "alive"), (0.7, "suspect"), (3.0, "lost")])
def test_a_silent_worker_loses_its_lease(silent_s: float, lease: str) -> None:
    made = Board(0.6, 3.0)
    made.load(load("w1"), 10.0)

    (worker,) = made.view(10.0 + silent_s, WALL).workers

    assert worker.lease == lease


@pytest.mark.parametrize("height", [24, 50])
def test_a_frame_fits_the_terminal(height: int) -> None:
    made = Board(0.6, 3.0)
    for worker in ("w1", "w2", "w3"):
        made.load(load(worker, queue_ms=123456.0, model="Qwen/Qwen2.5-0.5B-Instruct-GGUF"), 0.0)
    for number in range(100):
        made.decision(decided(f"01HXXXXXXXXXXXXXXXXXXX{number:04d}", decision="prefer-warm-worker"))
        made.outcome(ended(f"01HXXXXXXXXXXXXXXXXXXX{number:04d}", 288, 12345.0, error="deadline_exceeded"))
    made.outcome(refused("01HXXXXXXXXXXXXXXXXXXXXXXX", "overloaded"))
    made.left_out("pb.v1.outcome.w1." + "x" * 100, WALL)
    console = Console(width=80, file=io.StringIO())

    console.print(board.frame(made.view(0.0, WALL), height))

    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert height - 2 <= len(lines) <= height
    assert max(len(line) for line in lines) <= 80
    assert any(line.startswith("w3") and "123456" in line for line in lines)
    assert "prefer-warm-worker 100" in "\n".join(lines)


def test_a_frame_of_nothing_is_whole() -> None:
    console = Console(width=80, file=io.StringIO())

    console.print(board.frame(viewed(), 24, cut_off=True))

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "cut off from the bus" in text
    assert "0 requests, 0 failed; 0 of 0 prompt tokens from caches (0%)" in text
    assert "decisions: none" in text


def test_an_outcome_of_a_worker_that_was_not_chosen_is_not_the_requests() -> None:
    view = viewed(
        decided("mine"), ended("mine", 288, 10.0), ended("mine", 0, 9e9, worker="evil", status="error", error="forged")
    )

    assert (view.requests, view.failed, view.cached_tokens) == (1, 0, 288)


def test_a_record_without_a_block_size_is_no_kind_of_first_token() -> None:
    view = viewed(decided("old", block_size=0), ended("old", 288, 10.0))

    assert (view.requests, [spread.count for spread in view.ttft.values()]) == (1, [0, 0, 0])
