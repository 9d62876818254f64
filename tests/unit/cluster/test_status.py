"""The tables of `prefixbus status` at 80 columns: a cell is whole, or is the one that may give way."""

import io

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from prefixbus.bus import messages
from prefixbus.cluster import status


def lines(table: Table) -> list[str]:
    console = Console(width=status.MIN_WIDTH, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def load(model: str) -> messages.Load:
    return messages.Load(
        v=1,
        worker="w1",
        incarnation=123456,
        report=1,
        event_seq=0,
        model=model,
        serves="",
        queue_ms=123456.0,
        running=1024,
        waiting=9999,
        slots=0,
        kv_usage=1.0,
        kv_tokens=0,
        block_size=32,
        draining=False,
        accepted=[],
    )


def test_a_process_is_one_line_while_it_is_well() -> None:
    found = [
        status.Process("nats-server", 4194304, "nats://127.0.0.1:65535"),
        status.Process("tokenizer-1a2b3c4d", 4194304, "https://127.0.0.1:65535"),
    ]

    shown = lines(status.process_table(found))

    assert [line.split() for line in shown[-2:]] == [
        ["nats-server", "4194304", "nats://127.0.0.1:65535", "ready"],
        ["tokenizer-1a2b3c4d", "4194304", "https://127.0.0.1:65535", "ready"],
    ]


def test_why_a_process_is_not_ready_wraps_and_moves_nothing_else() -> None:
    reason = "cut off from the bus because " * 5
    shown = lines(status.process_table([status.Process("router-1", 1, "http://127.0.0.1:65535", reason)]))

    assert max(len(line) for line in shown) <= status.MIN_WIDTH
    assert any(line.startswith("router-1") and "http://127.0.0.1:65535" in line for line in shown)


def test_replicas_are_shown_by_shard_and_one_that_does_not_answer_last() -> None:
    found = [
        status.Replica("directory-s1-1", 1, 30_000_000, 1_000_000, 86_400.0),
        status.Replica("directory-s0-2"),
        status.Replica("directory-s0-1", 0, 0, 0, -1.0),
    ]

    shown = lines(status.replica_table(found))

    assert [line.split() for line in shown[-3:]] == [
        ["directory-s0-1", "0", "0", "0", "none"],
        ["directory-s1-1", "1", "30000000", "1000000", "86400", "s", "old"],
        ["directory-s0-2", "silent"],
    ]
    assert max(len(line) for line in shown) <= status.MIN_WIDTH


def test_a_worker_of_which_not_all_is_known_says_so() -> None:
    partly = msgspec.structs.replace(load("smollm2"), incomplete=True)

    shown = lines(status.worker_table(["w1"], {"w1": partly}))

    assert max(len(line) for line in shown) <= status.MIN_WIDTH
    assert shown[-1].split()[-1] == "incomplete"


@pytest.mark.parametrize("model", ["smollm2", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"])
def test_a_worker_fits_whatever_its_model_is_called(model: str) -> None:
    shown = lines(status.worker_table(["w1", "w2"], {"w1": load(model)}))

    assert max(len(line) for line in shown) <= status.MIN_WIDTH
    first = next(line for line in shown if line.startswith("w1"))
    for cell in ("123456", "1024", "9999", "100%", "serving"):
        assert cell in first
    assert any(line.startswith("w2") and "silent" in line for line in shown)
