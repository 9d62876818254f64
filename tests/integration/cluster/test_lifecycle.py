"""`prefixbus up` and the commands beside it, as a person types them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat
from support.nats import eventually
from support.ports import free_port
from support.processes import spawned

from prefixbus.cluster import deployment

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("lifecycle"), "--workers", "1") as cluster:
        yield cluster


def prefixbus(*arguments: str, state: Path, token: str = "", timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefixbus", *arguments, "--state", str(state)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PREFIXBUS_TOKEN": token},
    )


def test_a_second_up_on_the_same_state_is_refused_and_names_the_first(running: Cluster) -> None:
    done = prefixbus("up", state=running.state)

    assert done.returncode == 1
    assert f"pid {running.process.pid}" in done.stderr
    assert "prefixbus down" in done.stderr


def test_send_streams_an_answer(running: Cluster) -> None:
    done = prefixbus("send", "What is a block?", "--max-tokens", "5", state=running.state, token=running.token)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "5 tokens answered" in done.stderr
    (request_id,) = re.findall(r"request (\w+):", done.stderr)
    assert "ok on w" in prefixbus("explain", request_id, state=running.state).stdout
    assert "random words" in done.stderr


@pytest.mark.parametrize(
    ("case", "arguments", "token", "says"),
    [
        ("no token", ["send", "x"], "", "PREFIXBUS_TOKEN"),
        ("a wrong token", ["send", "x"], "wrong", "token not accepted for tenant demo"),
        ("an unknown model", ["send", "x", "--model", "other"], None, "other"),
        ("an unknown service", ["run", "rooter"], None, "tokenizer"),
        ("an unknown policy", ["policy", "best"], None, "prefix-aware"),
        ("a share over one", ["policy", "round-robin", "--canary", "2"], None, "equal to 1"),
        ("two ways at once", ["policy", "round-robin", "--canary", "1", "--shadow"], None, "exclude"),
        ("a canary of an unknown class", ["policy", "round-robin", "--canary", "1", "--class", "x"], None, "class"),
        ("nothing to be cleared", ["policy", "--clear", "it"], None, "active, canary, shadow"),
        ("no policy to be a shadow", ["policy", "--shadow"], None, "NAME"),
        ("a port that cannot be", ["up", "--port", "99999"], None, "65535"),
        ("a port below all", ["up", "--port", "-5"], None, "greater than or equal to 0"),
        ("a token file that is not there", ["send", "x", "--token-file", "/nope"], None, "does not exist"),
        ("a model that is not there", ["up", "--model", "nope"], None, "it has smollm2"),
        ("a label that is taken", ["tenant", "demo"], None, "--replace"),
        ("a name that cannot be", ["tenant", "a.b"], None, "A-Z"),
        ("a label that is not there", ["tenant", "demo", "--label", "x", "--remove"], None, "it has default"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    running: Cluster, case: str, arguments: list[str], token: str | None, says: str
) -> None:
    done = prefixbus(*arguments, state=running.state, token=running.token if token is None else token)

    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Correct the file" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(["down"], ["status"], ["policy"], ["tenant", "x"], ["run", "router"], ["provision"], ["send", "x"]),
        *(["explain", "x"], ["replay"], ["replay", "--directory-at", "1"], ["replay", "--resend"]),
        *(["mismatches"], ["top", "--once"]),
    ],
)
def test_where_no_deployment_was_made_every_command_says_so(tmp_path: Path, arguments: list[str]) -> None:
    done = prefixbus(*arguments, state=tmp_path / "nowhere", token="x")

    assert done.returncode == 1
    assert "no deployment was made here" in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_up_says_what_to_type_once_it_can_be_typed(running: Cluster) -> None:
    said = running.said

    order = [
        *("starting nats-server", "made keys, config and tenant demo in", "up: nats://", "policy: prefix-aware"),
        *(f"export PREFIXBUS_TOKEN={running.token}", f"export NATS_URL={running.url}", "send --state"),
        *(f"nats --server {running.url}", "random words", "Ctrl-C"),
    ]
    assert [said.find(each) for each in order] == sorted(said.find(each) for each in order)
    assert -1 not in [said.find(each) for each in order]
    assert "KV_EVENTS" not in said


def test_status_shows_processes_and_workers(running: Cluster) -> None:
    done = prefixbus("status", state=running.state)

    assert done.returncode == 0, done.stderr
    names = (
        "nats-server",
        "engine-w1",
        "bridge-w1",
        "tokenizer-1",
        "directory-1",
        "router-1",
        "auditor-1",
        "callout-1",
        "gateway-1",
    )
    for name in names:
        assert re.search(rf"^{name} +\d+ +\S+:\d+ +ready *$", done.stdout, re.MULTILINE), name
    assert "policy: prefix-aware" in done.stdout
    assert re.search(r"^w1 +smollm2 .*serving *$", done.stdout, re.MULTILINE)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_the_policy_changes_without_a_restart(running: Cluster) -> None:
    router = running.pid("router-1")

    done = prefixbus("policy", "round-robin", state=running.state)

    assert done.returncode == 0, done.stderr
    assert running.pid("router-1") == router
    shown = prefixbus("policy", state=running.state).stdout
    assert re.fullmatch(r"round-robin \(revision \d+\)\n", shown)


def test_a_cleared_policy_is_not_told_as_one_that_was_never_set(running: Cluster) -> None:
    assert prefixbus("policy", "round-robin", state=running.state).returncode == 0

    done = prefixbus("policy", "--clear", "active", state=running.state)
    shown = prefixbus("policy", state=running.state).stdout
    status = prefixbus("status", state=running.state).stdout

    cleared = re.fullmatch(r"active is cleared: policy revision (\d+)\n", done.stderr)
    assert cleared, done.stderr
    assert shown == f"prefix-aware (the config's, since revision {cleared[1]} cleared any other)\n"
    assert shown in status


def test_a_policy_is_tried_beside_the_active_one(running: Cluster, tmp_path: Path) -> None:
    weights = tmp_path / "cautious.json"
    weights.write_text('{"version": "cautious", "new_kv_price": 0.5}')

    canary = prefixbus("policy", "round-robin", "--canary", "0.25", "--class", "rag", state=running.state)
    shadow = prefixbus("policy", str(weights), "--shadow", state=running.state)
    shown = prefixbus("policy", state=running.state).stdout.splitlines()
    status = prefixbus("status", state=running.state).stdout
    cleared = [prefixbus("policy", "--clear", role, state=running.state).returncode for role in ("canary", "shadow")]

    assert (canary.returncode, shadow.returncode) == (0, 0), canary.stderr + shadow.stderr
    assert shown[0].startswith("prefix-aware (")
    assert re.fullmatch(r"canary: round-robin/default for 25 % of rag requests \(revision \d+\)", shown[1])
    assert re.fullmatch(r"shadow: prefix-aware/cautious \(revision \d+\)", shown[2])
    assert "\n".join(shown) in status
    assert cleared == [0, 0]
    assert len(prefixbus("policy", state=running.state).stdout.splitlines()) == 1


def test_init_on_a_complete_state_changes_nothing(running: Cluster) -> None:
    before = {path: path.stat().st_mtime_ns for path in (running.state / "creds").iterdir()}

    done = prefixbus("init", state=running.state)

    assert done.returncode == 0
    assert "Nothing to do" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in (running.state / "creds").iterdir()} == before


def test_provision_on_a_running_cluster_changes_nothing(running: Cluster) -> None:
    done = prefixbus("provision", state=running.state)

    assert done.returncode == 0, done.stderr
    assert "Nothing to do" in done.stderr


def test_a_new_tenants_token_is_printed_once_and_stored_hashed(running: Cluster) -> None:
    done = prefixbus("tenant", "acme", "--scope", "team-legal", state=running.state)

    token = re.search(r"PREFIXBUS_TOKEN=(\S+)", done.stdout)
    assert token, done.stderr
    assert token[1] not in (running.state / "creds" / "tenants.json").read_text()
    assert "export OPENAI_API_KEY=acme.$PREFIXBUS_TOKEN\n" in done.stdout
    assert f"export OPENAI_BASE_URL={running.file.gateway_url}/scopes/team-legal/v1\n" in done.stdout
    sent = prefixbus(
        *("send", "x", "--tenant", "acme", "--scope", "team-legal", "--max-tokens", "3"),
        state=running.state,
        token=token[1],
    )
    assert sent.returncode == 0, sent.stderr


async def test_one_more_copy_of_a_service_shares_the_work_and_leaves_in_order(running: Cluster) -> None:
    def file() -> deployment.RunFile | None:
        return next((file for file in deployment.run_files(running.state) if file.pid == extra.pid), None)

    with spawned([sys.executable, "-m", "prefixbus", "run", "router", "--state", str(running.state)]) as extra:
        await eventually(lambda: file() is not None and running.is_ready(extra.pid), "the copy is ready", 60)
        async with await running.client() as client:
            for _ in range(20):
                await asyncio.gather(*(ask(client, chat(f"question {n}", max_tokens=1)) for n in range(10)))
                found = file()
                assert found is not None
                metrics = running.metrics_of(found)
                if any(key.startswith("prefixbus_router_requests_total") and value for key, value in metrics.items()):
                    break
            else:
                pytest.fail("the copy got no work in 200 requests")
            extra.terminate()
            await ask(client, chat("after", max_tokens=1))
        assert await asyncio.to_thread(extra.wait, 60) == 0


async def test_one_more_worker_joins_a_running_cluster(running: Cluster) -> None:
    ports = [free_port() for _ in range(3)]
    place = deployment.Engine(
        url=f"http://127.0.0.1:{ports[0]}",
        events=f"tcp://127.0.0.1:{ports[1]}",
        replay=f"tcp://127.0.0.1:{ports[2]}",
    )
    plan = deployment.Deployment(running.state, deployment.Options(workers=1), say=lambda line: None)
    bridge_command = [
        *(sys.executable, "-m", "prefixbus", "run", "worker_bridge", "--state", str(running.state)),
        *("--worker", "w9", "--engine-url", place.url, "--kv-events", place.events, "--kv-replay", place.replay),
    ]
    with spawned(plan.engine_command("w9", place)) as engine, spawned(bridge_command) as extra:
        await eventually(lambda: running.is_ready(extra.pid), "the bridge of w9 is ready", 60)
        async with await running.client() as client:
            for n in range(50):
                await ask(client, chat(f"{n} something else every time " * 20, max_tokens=1))
        bridge = next(file for file in deployment.run_files(running.state) if file.pid == extra.pid)
        served = [key for key in running.metrics_of(bridge) if key.startswith("prefixbus_bridge_requests_total")]
        extra.terminate()
        assert await asyncio.to_thread(extra.wait, 60) == 0
        engine.terminate()
        assert await asyncio.to_thread(engine.wait, 60) == 0
    assert served, "the new worker got none of 50 requests"
    assert (running.state / "creds" / "worker_bridge-w9.nk").exists()


async def test_a_crashed_service_is_started_again_and_said_so(running: Cluster) -> None:
    pid = running.signal("tokenizer-1", signal.SIGKILL)

    line = await asyncio.to_thread(running.wait_for_line, "tokenizer-1 ended (SIGKILL)", 60)

    assert "started again in" in line
    await eventually(lambda: running.is_ready_again("tokenizer-1", pid), "the tokenizer is back", 60)
    async with await running.client() as client:
        assert (await ask(client, chat("x", max_tokens=2))).text


@pytest.mark.parametrize("command", ["up", "demo"])
def test_ctrl_c_ends_a_start_at_once(tmp_path: Path, command: str) -> None:
    arguments = [command, "--state", str(tmp_path / "s"), "--port", "0"] if command == "up" else [command]
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixbus", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    with process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while "waiting until" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], said

        process.send_signal(signal.SIGINT)

        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert rest.splitlines() == ["stopping"]
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("way", ["SIGINT", "down"])
def test_the_end_takes_every_process_along(tmp_path: Path, way: str) -> None:
    with Cluster(tmp_path, "--workers", "1") as cluster:
        pids = list(cluster.file.processes.values())
        assert len(pids) == 9

        if way == "down":
            assert prefixbus("down", state=cluster.state).returncode == 0
        else:
            cluster.process.send_signal(signal.SIGINT)

        assert cluster.process.wait(timeout=60) == 0
    assert not [pid for pid in pids if is_running(pid)]
    assert not list((cluster.state / "run").iterdir()), "a service was killed, not stopped"
    assert not (cluster.state / "cluster.json").exists()
    assert prefixbus("status", state=cluster.state).returncode == 1


def test_killing_up_leaves_no_process_behind_and_the_state_usable(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--workers", "1") as cluster:
        pids = list(cluster.file.processes.values())

        cluster.process.kill()

    asyncio.run(eventually(lambda: not [pid for pid in pids if is_running(pid)], "all are gone", 30))
    with Cluster(tmp_path, "--workers", "1") as again:
        assert "tenant demo --replace" in again.said, "the token was shown to the first one"
        assert f"export NATS_URL={again.url}" in again.said
        assert again.stop() == 0


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_cluster_json_tells_what_runs(running: Cluster) -> None:
    content = json.loads((running.state / "cluster.json").read_text())

    assert content["pid"] == running.process.pid
    assert content["nats_url"].startswith("nats://127.0.0.1:")
    assert set(content["processes"]) == {
        *(
            "nats-server",
            "engine-w1",
            "bridge-w1",
            "tokenizer-1",
            "directory-1",
            "router-1",
            "auditor-1",
            "callout-1",
            "gateway-1",
        )
    }


def test_help_shows_examples() -> None:
    done = subprocess.run([sys.executable, "-m", "prefixbus", "--help"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    for command in ("prefixbus up", "prefixbus send", "prefixbus run router", "prefixbus demo"):
        assert command in done.stdout
