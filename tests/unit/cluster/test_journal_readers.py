"""Whatever stands in JOURNAL, its readers go on: what they cannot use is counted and named."""

import contextlib
import io
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.decisions import record

from prefixbus.bus import messages, subjects
from prefixbus.bus.messages import Outcome
from prefixbus.cluster import board, explain, inquiries, records
from prefixbus.cluster.board import Board
from prefixbus.cluster.records import Records
from prefixbus.cluster.terminal import Terminal
from prefixbus.lab import mismatches, replay
from prefixbus.router.policy import Policy

WALL = 1.7e9
DECISION = json.loads(messages.DECISION.encode(record(random.Random(8), request_id="R1", decided_at=WALL)))
OUTCOME = json.loads(
    messages.OUTCOME.encode(
        Outcome(
            v=1,
            request_id="R1",
            client_request_id="mine",
            attempt=1,
            worker=DECISION["selected_worker"],
            incarnation=1,
            tenant="t",
            model="m",
            ns_id="",
            status="ok",
            error="",
            prefix_class="rag",
            decision="blind",
            prompt_tokens=320,
            predicted_tokens=0,
            cached_tokens=32,
            prefill_tokens=288,
            output_tokens=1,
            queue_wait_ms=0.0,
            ttft_ms=9.0,
            total_ms=11.0,
            ended_at=WALL,
        )
    )
)

numbers = st.sampled_from([0, -1, 10**400, 2**64, -(2**70), 1e300, -1e300, 5e-324, 1e9, 253402300800.0, float("nan")])
scalars = st.none() | st.booleans() | numbers | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, bytes]:
    """A record with some fields of any value, or any JSON at all, under the subject of a record."""
    base = draw(st.sampled_from([DECISION, OUTCOME]))
    document: Any = json.loads(json.dumps(base))
    of_candidates = [one for one in document.get("candidate_workers", ()) if draw(st.booleans())]
    if document.get("shadow"):
        of_candidates += [document["shadow"], *document["shadow"]["candidate_workers"]]
    for place in (document, *of_candidates):
        names = draw(st.lists(st.sampled_from(sorted(place)), max_size=2))
        for name in names:
            kept = place.get(name)
            place[name] = draw(numbers if isinstance(kept, int | float) and draw(st.booleans()) else values)
    if draw(st.integers(0, 9)) == 0:
        document = draw(values)
    subject = subjects.journal("R1") if base is DECISION else subjects.outcome(OUTCOME["worker"], "R1")
    return subject, json.dumps(document).encode()


def shown(written: list[tuple[str, bytes]]) -> tuple[Records, str]:
    """What all commands that read the journal make of it, and print."""
    found = Records([], [])
    top = Board(0.6, 3.0)
    for subject, data in written:
        records.add(found, subject, data)
    for decision in found.decisions:
        top.decision(decision)
    for outcome in found.outcomes:
        top.outcome(outcome)
    printed = io.StringIO()
    console = Terminal(width=200, file=printed)
    with contextlib.redirect_stdout(printed):
        for part in explain.story(found, []):
            console.print(part)
        console.print(explain.document(found).decode())
        console.print(board.frame(top.view(0.0, WALL), 24))
        for one in found.decisions:
            for again in (replay.replay(one), replay.replay_shadow(one)):
                console.print(*inquiries._difference_lines(again) if again is not None else ())
        for name in ("prefix-aware", "round-robin"):
            inquiries._print_what_if(replay.what_if(found.decisions, Policy(name=name)))
        inquiries._print_mismatches(mismatches.report(found.decisions, found.outcomes), None)
        inquiries._say_unreadable(found.unreadable)
    return found, printed.getvalue()


@given(st.lists(spoiled(), max_size=4))
@example([(subjects.journal("R1"), json.dumps({**DECISION, "decided_at": 1e300}).encode())])
@example([(subjects.journal("R1"), json.dumps({**DECISION, "prompt_tokens": 10**400}).encode())])
def test_any_json_is_a_record_or_is_counted(written: list[tuple[str, bytes]]) -> None:
    found, _ = shown(written)

    assert len(found.decisions) + len(found.outcomes) + len(found.unreadable) == len(written)


@pytest.mark.parametrize("at", ["1e300", "-1", "NaN", "null", "253402300800", "1e999"])
@pytest.mark.parametrize("kind", ["decision", "outcome"])
def test_a_record_of_no_time_is_named_and_the_others_are_read(kind: str, at: str) -> None:
    subject, document, field = {
        "decision": (subjects.journal("R1"), DECISION, "decided_at"),
        "outcome": (subjects.outcome(OUTCOME["worker"], "R1"), OUTCOME, "ended_at"),
    }[kind]
    bad = json.dumps({**document, field: "AT"}).replace('"AT"', at).encode()

    found, text = shown(
        [
            (subjects.journal("R1"), json.dumps(DECISION).encode()),
            (subjects.outcome(OUTCOME["worker"], "R1"), json.dumps(OUTCOME).encode()),
            (subject, bad),
        ]
    )

    assert (len(found.decisions), len(found.outcomes), found.unreadable) == (1, 1, [subject])
    assert "1 requests: " in text and "then: ok" in text


def test_what_is_left_out_is_said_in_numbers_and_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A bridge names its records' subjects as it likes."""
    inquiries._say_unreadable([])
    inquiries._say_unreadable(["pb.v1.outcome.w1.\x1b[2J"])
    inquiries._say_unreadable(["a", "b"], "event")

    one, two = capsys.readouterr().err.splitlines()
    assert one.startswith("1 record is left out (") and one.endswith("such as under pb.v1.outcome.w1.\ufffd[2J")
    assert two.startswith("2 events are left out (") and two.endswith("such as under a")


def test_what_the_router_and_the_bridge_write_is_read() -> None:
    rng = random.Random(4)
    for number in range(200):
        made = record(rng, number)
        found = Records([], [])
        records.add(found, subjects.journal(made.request_id), messages.DECISION.encode(made))
        assert found.decisions == [made] and not found.unreadable
    assert msgspec.convert(OUTCOME, Outcome) == messages.OUTCOME.decode(json.dumps(OUTCOME).encode())
