"""`prefixbus explain`, `replay` and `top` on what a real cluster has recorded."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat, outcome_of

from prefixbus.bus import messages, subjects
from prefixbus.cluster import deployment

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

ASKED = 12
SYSTEM = "You are a helpful assistant who answers questions on caches. " * 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("inquiries"), "--workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def probed_blocks(cluster: Cluster) -> int:
    """What engines hold before any request: blocks of their bridges' probes, in no namespace of ours."""
    return cached_blocks(cluster)


def cached_blocks(cluster: Cluster) -> int:
    return sum(stats["keys_cached"] for stats in cluster.engine_stats().values())


@pytest.fixture(scope="module", autouse=True)
def asked_until(cluster: Cluster, probed_blocks: int) -> str:
    """When some requests, `asked-0` to `asked-11`, had their outcomes in the journal."""
    asyncio.run(_ask_some(cluster))
    return _iso(time.time())


async def _ask_some(cluster: Cluster) -> None:
    operator = await cluster.operator()
    async with await cluster.client() as client:
        await asyncio.gather(*(ask(client, _body(number), request_id=f"asked-{number}") for number in range(ASKED)))
    for number in range(ASKED):
        await outcome_of(operator, f"asked-{number}")
    await operator.close()


def _body(number: int) -> dict[str, Any]:
    return chat(f"Question {number}: which worker is it? " * 30, system=SYSTEM)


def prefixbus(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefixbus", *arguments, "--state", str(cluster.state)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )


def explained(cluster: Cluster, name: str) -> dict[str, Any]:
    done = prefixbus(cluster, "explain", name, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_request_is_explained_by_its_clients_id_and_by_ours(cluster: Cluster) -> None:
    document = explained(cluster, "asked-3")
    (decision,), (outcome,) = document["decisions"], document["outcomes"]

    by_ours = prefixbus(cluster, "explain", decision["request_id"])

    assert by_ours.returncode == 0, by_ours.stderr
    assert f"attempt 1: {decision['selected_worker']}, {decision['decision']}" in by_ours.stdout
    for candidate in decision["candidate_workers"]:
        assert re.search(rf"^{candidate['worker']} .*{candidate['cost_ms']:.1f}", by_ours.stdout, re.MULTILINE)
    assert f"then: ok on {outcome['worker']}" in by_ours.stdout
    assert f"cached tokens: {outcome['cached_tokens']}" in by_ours.stdout
    assert by_ours.stdout == prefixbus(cluster, "explain", "asked-3").stdout


def test_a_request_that_nobody_knows_is_said_to_be_unknown(cluster: Cluster) -> None:
    done = prefixbus(cluster, "explain", "nobody-asked-this")

    assert done.returncode == 1
    assert "nothing of nobody-asked-this is in the journal, which begins at 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_recorded_decision_replays_the_same(cluster: Cluster) -> None:
    done = prefixbus(cluster, "replay", "asked-1")

    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def test_all_decisions_of_a_run_replay_with_0_differences(cluster: Cluster, asked_until: str) -> None:
    done = prefixbus(cluster, "replay", "--since", "1h", "--until", asked_until)

    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) decisions, 0 differences\n", done.stdout)
    assert found and int(found[1]) >= ASKED


async def test_what_a_shadow_would_have_decided_replays_the_same(cluster: Cluster) -> None:
    shadow = await asyncio.to_thread(prefixbus, cluster, "policy", "round-robin", "--shadow")
    assert shadow.returncode == 0, shadow.stderr
    operator = await cluster.operator()
    async with await cluster.client() as client:

        async def shadowed(number: int) -> bool:
            await ask(client, _body(number), request_id=f"shadowed-{number}")
            await outcome_of(operator, f"shadowed-{number}")
            (made,) = (await asyncio.to_thread(explained, cluster, f"shadowed-{number}"))["decisions"]
            return bool(made["shadow"])

        # A router hears of the policy a moment after it is stored.
        last = 0
        while not await shadowed(last):
            last += 1
            assert last < 20, "no router has heard of the shadow"
    await operator.close()

    one = await asyncio.to_thread(prefixbus, cluster, "replay", f"shadowed-{last}")
    every = await asyncio.to_thread(prefixbus, cluster, "replay", "--since", "1h")
    cleared = await asyncio.to_thread(prefixbus, cluster, "policy", "--clear", "shadow")

    assert (one.returncode, one.stdout) == (0, "same\n"), one.stderr
    assert re.search(r"^\d+ decisions and [1-9]\d* of a shadow, 0 differences$", every.stdout, re.MULTILINE)
    assert cleared.returncode == 0


def test_a_time_range_takes_in_what_was_decided_in_it_alone(cluster: Cluster) -> None:
    at = [explained(cluster, f"asked-{number}")["decisions"][0]["decided_at"] for number in (0, 5)]

    before = prefixbus(cluster, "replay", "--until", "2020-01-01")
    after = prefixbus(cluster, "replay", "--since", "2100-01-01")
    of_one_second = prefixbus(cluster, "replay", "--since", _iso(min(at) - 1), "--until", _iso(max(at) + 1))

    assert before.stdout == after.stdout == "0 decisions, 0 differences\n"
    assert int(of_one_second.stdout.split()[0]) >= 2


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def test_another_policy_is_compared_and_ends_with_what_it_would_change(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"name": "round-robin", "version": "mine"}')

    done = prefixbus(cluster, "replay", "--since", "1h", "--policy", str(file))

    assert done.returncode == 0, done.stderr
    assert "round-robin/mine" in done.stdout
    assert re.search(r"^\d+ decisions, \d+ would have gone to another worker$", done.stdout, re.MULTILINE)
    assert re.search(r"^predicted TTFT: sum \d+ -> \d+ ms, mean", done.stdout, re.MULTILINE)


def test_another_policy_is_compared_by_its_name_alone(cluster: Cluster) -> None:
    done = prefixbus(cluster, "replay", "asked-1", "--policy", "round-robin")

    assert done.returncode == 0, done.stderr
    assert "round-robin/default" in done.stdout


async def test_a_record_that_was_tampered_with_is_told_field_by_field(cluster: Cluster) -> None:
    operator = await cluster.operator()
    last = await operator.jetstream.get_last_msg(subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.journal.*")
    await operator.close()
    decision = json.loads(last.data or b"")
    forged = {**decision, "request_id": "FORGED", "client_request_id": "forged", "max_queue_ms": 1.5}
    router = await deployment.connect(cluster.state, "router", cluster.url)
    await router.publish_acked(subjects.journal("FORGED"), json.dumps(forged).encode())
    await router.close()

    done = await asyncio.to_thread(prefixbus, cluster, "replay", "forged")

    assert done.returncode == 1
    assert done.stdout == f"FORGED attempt 1: max_queue_ms: recorded 1.5, replayed {decision['max_queue_ms']}\n"
    assert messages.DECISION.decode(json.dumps(forged).encode()).max_queue_ms == 1.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "--since", "yesterday"], "is no moment"),
        (["replay", "asked-1", "--since", "1h"], "request has its own time"),
        (["replay", "--policy", "nowhere.json"], "'nowhere.json' is no policy, and no file"),
        (["explain", "a.b"], "cannot stand in a subject"),
    ],
)
def test_mistakes_are_told_in_a_sentence(cluster: Cluster, arguments: list[str], says: str) -> None:
    done = prefixbus(cluster, *arguments)

    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


async def test_what_workers_held_at_a_past_sequence_is_counted(cluster: Cluster, probed_blocks: int) -> None:
    operator = await cluster.operator()
    last = (await operator.jetstream.stream_info(subjects.STREAM_KV_EVENTS)).state.last_seq
    await operator.close()

    earlier = await asyncio.to_thread(prefixbus, cluster, "replay", "--directory-at", "1")
    now = await asyncio.to_thread(prefixbus, cluster, "replay", "--directory-at", str(last))

    assert (earlier.returncode, now.returncode) == (0, 0), now.stderr
    blocks = [int(done.stdout.splitlines()[-1].split()[0]) for done in (earlier, now)]
    assert 0 < blocks[0] < blocks[1]
    assert re.search(r"^w1 +0 +\d+ +\d+ +\d+ +0 +whole", now.stdout, re.MULTILINE)
    assert blocks[1] == cached_blocks(cluster) - probed_blocks


def test_one_frame_of_top_has_workers_reuse_and_the_last_decisions(cluster: Cluster) -> None:
    done = prefixbus(cluster, "top", "--once")

    assert done.returncode == 0, done.stderr
    for worker in ("w1", "w2"):
        assert re.search(rf"^{worker} +alive +\d+ +0 +0 +\d+% +smollm2", done.stdout, re.MULTILINE)
    sums = re.search(r"^(\d+) requests, 0 failed; (\d+) of (\d+) prompt tokens from caches", done.stdout, re.MULTILINE)
    assert sums and int(sums[1]) >= ASKED and 0 < int(sums[2]) < int(sums[3])
    assert re.search(r"^cold +[1-9]", done.stdout, re.MULTILINE)
    assert "decisions: " in done.stdout
    assert re.search(r"^[0-9A-Z]{8} +w[12] +[a-z-]+ +\d+ +\d+ +\d+ +ok", done.stdout, re.MULTILINE)


async def test_top_shows_who_was_never_decided_and_what_it_could_not_read(cluster: Cluster) -> None:
    """A record of 1e300 ended it, and a request refused for overload was nowhere."""
    operator = await cluster.operator()
    true = await outcome_of(operator, "asked-0")
    await operator.close()
    router = await deployment.connect(cluster.state, "router", cluster.url)
    refused = msgspec.structs.replace(
        true, request_id="REFUSED1", worker="", attempt=0, status="error", error="overloaded", ended_at=time.time()
    )
    await router.publish_acked(subjects.ended("REFUSED1"), messages.OUTCOME.encode(refused))
    timeless = msgspec.structs.replace(refused, request_id="TIMELESS", ended_at=1e300)
    await router.publish_acked(subjects.ended("TIMELESS"), messages.OUTCOME.encode(timeless))
    await router.close()

    done = await asyncio.to_thread(prefixbus, cluster, "top", "--once")
    replayed = await asyncio.to_thread(prefixbus, cluster, "replay", "--since", "1h")
    explained = await asyncio.to_thread(prefixbus, cluster, "explain", "REFUSED1")

    assert done.returncode == 0, done.stderr
    assert re.search(r"^not decided: overloaded 1$", done.stdout, re.MULTILINE)
    assert re.search(r"^REFUSED1 .* overloaded", done.stdout, re.MULTILINE)
    assert "1 message could not be read, under pb.v1.ended.TIMELESS" in done.stdout
    assert "1 record is left out" in replayed.stderr and "pb.v1.ended.TIMELESS" in replayed.stderr
    assert explained.returncode == 0 and "no worker was chosen" in explained.stdout


def test_top_redraws_until_ctrl_c_and_leaves_the_terminal_as_it_was(cluster: Cluster) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "prefixbus", "top", "--state", str(cluster.state)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    try:
        shown = _read_until(ours, lambda text: text.count("prefixbus top: last 5 minutes") >= 2, 60)
        process.send_signal(signal.SIGINT)
        rest = _read_until(ours, lambda text: False, 60)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)

    assert "\x1b[?1049h" in shown
    assert "\x1b[?1049l" in rest and "\x1b[?25h" in rest
    assert "Traceback" not in shown + rest


def _read_until(descriptor: int, enough: Callable[[str], bool], deadline_s: float) -> str:
    """What a terminal shows until it is enough, or its program has ended."""
    end = time.monotonic() + deadline_s
    text = ""
    while not enough(text) and time.monotonic() < end:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                text += os.read(descriptor, 65536).decode("utf-8", "replace")
            except OSError:  # the other end is closed
                break
    return text
