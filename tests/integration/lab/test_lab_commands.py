"""`prefixbus lab` as people call it: in processes of its own, without a cluster."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny
from support.processes import spawned

pytestmark = pytest.mark.timeout(120)

LINES = 60
PNG = b"\x89PNG\r\n"


def lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefixbus", "lab", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "80"},
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six documents of 20 blocks of 64 tokens, asked about in turn."""
    file = tmp_path_factory.mktemp("lab") / "trace.jsonl"
    with file.open("w") as lines:
        for number in range(LINES):
            document = [100 * (number % 6) + block for block in range(20)]
            line = {
                "timestamp": 40 * number,
                "input_length": 64 * 21,
                "output_length": 20,
                "hash_ids": [*document, 10_000 + number],
            }
            lines.write(json.dumps(line) + "\n")
    return file


def replay(trace: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return lab("replay", trace, "--trace-block", "64", "--workers", "3", "--kv-tokens", "65536", *arguments)


def figures(file: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"]
    return runs


def test_policies_are_compared_in_their_order_whoever_ends_first(trace: Path, tmp_path: Path) -> None:
    asked = ("--policies", "prefix-aware,random,overlap:64", "--seeds", "2", "--event-loss", "0.2")
    side_by_side, one_by_one = tmp_path / "side.json", tmp_path / "one.json"

    done = replay(trace, *asked, "--jobs", "2", "--json", side_by_side, "--plot", tmp_path / "ttft.png")
    again = replay(trace, *asked, "--jobs", "1", "--json", one_by_one)

    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    assert side_by_side.read_bytes() == one_by_one.read_bytes()
    assert done.stdout == again.stdout
    runs = figures(side_by_side)
    assert [(run["policy"], run["seed"]) for run in runs] == [
        (name, seed) for name in ("prefix-aware", "random", "overlap:64") for seed in (0, 1)
    ]
    assert all(run["figures"]["ended"] == {"ok": LINES} for run in runs)
    assert runs[0]["figures"]["token_reuse"] > runs[2]["figures"]["token_reuse"]
    rows = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert rows[:4] == ["policy", "prefix-aware", "random", "overlap:64"]
    assert "6/6: overlap:64 (seed 1) done" in done.stderr
    assert (tmp_path / "ttft.png").read_bytes().startswith(PNG)


def test_all_has_our_policy_first_and_every_rule(trace: Path, tmp_path: Path) -> None:
    done = replay(trace, "--policies", "all", "--json", tmp_path / "all.json", "--speed", "2")

    assert done.returncode == 0, done.stderr
    reuse = {run["policy"]: run["figures"]["token_reuse"] for run in figures(tmp_path / "all.json")}
    assert next(iter(reuse)) == "prefix-aware"
    assert {"round-robin", "oracle", "pooled-lru", "infinite"} < reuse.keys()
    assert max(reuse.values()) <= reuse["infinite"]


def test_faults_and_wrong_estimates_are_played(trace: Path, tmp_path: Path) -> None:
    done = replay(
        trace, "--fail", "w1@0.5+0.5", "--estimate", "2", "--routers", "2", "--json", tmp_path / "faults.json"
    )

    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "faults.json").read_text())
    assert document["setup"]["failures"] == [{"at": 0.5, "worker": "w1", "back_after_s": 0.5}]
    assert document["setup"]["learns"] is False
    assert sum(document["runs"][0]["figures"]["ended"].values()) == LINES


def test_a_host_store_and_links_between_workers_are_played(trace: Path, tmp_path: Path) -> None:
    """Of a cache of 16 blocks a worker no document survives; a host store keeps all of them."""
    tiny = ("--kv-tokens", "2048", "--json")

    without = replay(trace, *tiny, tmp_path / "without.json")
    tiered = replay(
        trace, *tiny, tmp_path / "with.json", "--host-tokens", "65536", "--transfer-bandwidth", "100", "--speed", "0.5"
    )

    assert (without.returncode, tiered.returncode) == (0, 0), without.stderr + tiered.stderr
    plain, fetched = figures(tmp_path / "without.json")[0]["figures"], figures(tmp_path / "with.json")[0]["figures"]
    assert plain["loaded_tokens"] == plain["transferred_bytes"] == 0
    assert fetched["loaded_tokens"] > 0
    assert fetched["transferred_bytes"] == 131072 * fetched["pulled_tokens"]
    assert fetched["token_reuse"] > plain["token_reuse"]


def test_ctrl_c_ends_all_runs_at_once(trace: Path) -> None:
    command = [sys.executable, "-m", "prefixbus", "lab", "replay", trace, "--trace-block", "64", "--seeds", "100"]
    # A terminal's Ctrl-C reaches the whole group; ignored it would be, were it so where these tests were started.
    own_group = (
        "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with spawned(
        [sys.executable, "-c", own_group, *map(str, command), "--jobs", "2"],
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()

        assert b"100 runs" in first
        assert process.wait() == 130
        assert b"Traceback" not in rest, rest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policies", "best"), "--policies: 'best' is neither a policy, nor a rule, nor a file."),
        (("--policies", "overlap:much"), "policies: 'much' is not a weight."),
        (("--profile", "cray-1"), "--profile: 'cray-1' is not a profile. Use one of: h100-8b"),
        (("--speed", "0"), "--speed: 0 is no speed."),
        (("--estimate", "-1"), "--estimate: -1 is no factor."),
        (("--kv-tokens", "10"), "--kv-tokens: 10 tokens are less than a block of 64."),
        (("--block-size", "48"), "block_size: blocks of 48 tokens do not divide the trace's 64."),
        (("--trace-block", "16"), "line 1: 21 ids are not those of 1344 tokens in blocks of 16. Say how many"),
        (("--event-delay", "inf"), "--event-delay: inf s is no time of a run."),
        (("--fail", "w1@inf"), "--fail: 'w1@inf' is no failure of a worker."),
        (("--fail", "w9@1"), "--fail: 'w9@1' is no failure of a worker. Write WORKER@SECONDS"),
        (
            ("--json", "/nowhere/at/all.json"),
            "--json: '/nowhere/at/all.json' is not a file in a directory that exists.",
        ),
        (("--report-gap", "5"), "--report-gap: is longer than --report-every."),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_said_before_anything_is_played(
    trace: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = replay(trace, *arguments)

    assert done.returncode == 1
    assert done.stderr.startswith(f"prefixbus: {said}"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_becomes_a_trace_without_its_text_and_its_repeats_are_told(tmp_path: Path) -> None:
    log, made = tmp_path / "log.jsonl", tmp_path / "made.jsonl"
    system = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 20}
    with log.open("w") as lines:
        for number in range(10):
            question = {"role": "user", "content": f"Question {number}: зачем кэш хранит ключи?"}
            body = {"messages": [system, question], "user": "ann@example.org", "max_tokens": 9}
            lines.write(json.dumps({**body, "timestamp": 1_700_000_000 + number}) + "\n")
        lines.write('{"messages": [], "functions": [{"name": "f"}]}\n\n{"mess\n')

    done = lab("import", log, "--model", tiny(), "-o", made, "--tenant-field", "user")
    repeats = lab("repeats", made, "--trace-block", "16", "--workers", "2", "--json", tmp_path / "repeats.json")

    assert done.returncode == 0, done.stderr
    assert "10 of 12 requests" in done.stdout and "2 lines left out" in done.stdout
    assert "left out, line 11: functions: " in done.stderr
    assert "left out, line 13: line: is not JSON" in done.stderr
    text = made.read_text()
    assert not [word for word in ("fox", "Question", "ann", "ключи") if word in text]
    assert repeats.returncode == 0, repeats.stderr
    report = json.loads((tmp_path / "repeats.json").read_text())
    assert report["all"]["requests"] == 10 and report["all"]["repeating"] == 9
    # All but the questions.
    assert report["infinite"]["token_reuse"] > 0.7
    assert repeats.stdout.rstrip().splitlines()[-1].startswith(("go: ", "no-go: "))


def test_a_log_of_which_nothing_can_be_read_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"a": 1}\n')

    done = lab("import", log, "--model", tiny(), "-o", tmp_path / "made.jsonl")

    assert done.returncode == 1
    assert "holds no request that can be read, in 1 lines." in done.stderr
    assert not (tmp_path / "made.jsonl").exists()


def test_pictures_without_matplotlib_name_the_extra(trace: Path, tmp_path: Path) -> None:
    """As after an installation without the extra: the module cannot be found."""
    hidden = (
        "import importlib.util as util, sys; find = util.find_spec;"
        "util.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more);"
        "from prefixbus.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "lab", "replay", trace, "--plot", tmp_path / "no.png"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("prefixbus: --plot: needs matplotlib, which is not installed."), done.stderr
    assert "prefixbus[dev]" in done.stderr


def test_what_is_read_is_never_written_over(trace: Path) -> None:
    before = trace.read_bytes()

    told = [replay(trace, "--json", trace), lab("repeats", trace, "--trace-block", "64", "--json", trace)]
    told.append(lab("import", trace, "--output", trace, "--model", trace.parent))

    assert [one.returncode for one in told] == [1, 1, 1], [one.stderr for one in told]
    assert all("is what is read" in one.stderr for one in told)
    assert trace.read_bytes() == before
