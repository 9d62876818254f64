"""Nothing that is shown commands the terminal or the table it stands in."""

import io
import random

import msgspec
import pytest
from rich.console import RenderableType
from rich.table import Table
from support.decisions import record

from prefixbus.bus.messages import Load, Outcome
from prefixbus.cluster import board, explain, resend, status
from prefixbus.cluster.records import Records
from prefixbus.cluster.resend import Again
from prefixbus.cluster.terminal import MOST_SHOWN, Terminal

HOSTILE = {
    "title": "\x1b]0;mine\x07",
    "colour": "\x1b[31mred",
    "eight bits": "\x9b31mred",
    "overwrites": "good\rbad",
    "erases": "good\b\b\b\bbad",
    "turns": "\u202egnp.exe",
    "markup": "[red]bold[/]",
    "markup that ends nothing": "[/x]",
    "emoji": ":skull:",
    "long": "x" * 1_000_000,
}
COMMANDS = set("\x1b\x07\x9b\r\b\u202e")


def shown(*parts: RenderableType) -> str:
    console = Terminal(width=120, file=io.StringIO())
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def load(text: str) -> Load:
    return Load(1, "w1", 1, 1, 0, text, "", 12.0, 3, 1, 256, 0.25, 1000, 32, False, [])


def outcome(text: str) -> Outcome:
    made = Outcome(
        1, "R1", text, 1, text, 1, "t", "m", "", "ok", text, "rag", text, 320, 0, 32, None, 1, 0.0, 9.0, 1, 0
    )
    return msgspec.structs.replace(made, ended_at=1.0)


def all_views(text: str) -> list[RenderableType]:
    decision = record(
        random.Random(1), request_id="R1", client_request_id=text, model=text, decision=text, block_size=32
    )
    decision = msgspec.structs.replace(decision, decided_at=1.0, excluded={text: text}, policy=text)
    top = board.Board(0.6, 3.0)
    top.load(load(text), 0.0)
    top.decision(decision)
    top.outcome(outcome(text))
    return [
        board.frame(top.view(0.0, 1.0), 40),
        *explain.story(Records([decision], [outcome(text)]), [text]),
        resend.table([Again("R1", outcome(text), outcome(text), text)]),
        status.worker_table(["w1"], {"w1": load(text)}),
    ]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_view_lets_a_name_command_the_terminal(text: str) -> None:
    views = all_views(text)

    written = shown(*views)

    assert not COMMANDS & set(written)
    assert len(written) < 100 * MOST_SHOWN


def test_markup_is_shown_as_it_is_written() -> None:
    table = Table("worker")
    table.add_row("[red]w1[/red] :skull:")

    written = shown(table)

    assert "[red]w1[/red] :skull:" in written


def test_what_is_longer_than_any_line_of_ours_is_cut() -> None:
    written = shown("x" * 1_000_000)

    assert written.replace("\n", "").endswith("x...")
    assert len(written.replace("\n", "")) == MOST_SHOWN
