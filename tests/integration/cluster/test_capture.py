"""Requests of a tenant that asked to have them kept, sent again as that tenant."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat, outcome_of

from prefixbus.bus import subjects
from prefixbus.cluster import resend, streams
from prefixbus.cluster import state as state_module

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

# In no log and no record.
SECRET = "Xylophonist"


@pytest.fixture(scope="module")
def other_token(cluster: Cluster) -> str:
    """The token of a tenant whose requests are not kept."""
    return state_module.add_tenant(cluster.state, "other", None).token


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Keeps what the demo tenant sends, for ten minutes."""
    running = Cluster(tmp_path_factory.mktemp("capture"), "--workers", "1")
    running.init()
    config = running.state / "config.toml"
    config.write_text(config.read_text() + '\n[capture]\ntenants = ["demo"]\nttl_s = 600\n')
    with running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def asked(cluster: Cluster, other_token: str) -> None:
    """Three requests of the demo tenant, two of them in a scope, and one of another tenant."""

    async def work() -> None:
        operator = await cluster.operator()
        async with await cluster.client(scope="hr") as scoped, await cluster.client() as whole:
            for client, name in ((scoped, "scope-0"), (scoped, "scope-1"), (whole, "whole-0")):
                await ask(client, _body(name), request_id=name, prefix_class="document")
                await outcome_of(operator, name)
        async with await cluster.client(tenant="other", token=other_token) as other:
            await ask(other, _body("other"), request_id="other")
        await operator.close()

    asyncio.run(work())


def _body(name: str) -> dict[str, Any]:
    return chat(f"What is {name}?", system=f"{SECRET} answers questions on caches. " * 40)


def again(cluster: Cluster, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixbus", "replay", "--resend", *arguments, "--state", str(cluster.state)]
    environ = {**os.environ, "COLUMNS": "80", "PREFIXBUS_TOKEN": cluster.token if token is None else token}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ)


async def test_what_is_kept_is_what_was_sent_of_that_tenant_alone(cluster: Cluster) -> None:
    operator = await cluster.operator()
    state = await operator.jetstream.stream_info(subjects.STREAM_CAPTURE)
    kept = [one async for one in streams.read(operator, subjects.STREAM_CAPTURE, "pb.v1.capture.*.*")]
    requests = (await resend.captured(operator, "demo", None, None)).requests
    await operator.close()

    assert state.config.max_age == 600
    assert {one.subject.split(".")[3] for one in kept} == {"demo"}
    assert [(one.client_request_id, one.scope) for one in requests] == [
        ("scope-0", "hr"),
        ("scope-1", "hr"),
        ("whole-0", ""),
    ]
    assert {one.prefix_class for one in requests} == {"document"}
    assert all(SECRET.encode() in bytes(one.body) for one in requests)


@pytest.mark.parametrize("speed", ["asap", "original"])
async def test_they_are_sent_again_in_their_scopes_and_told_beside_the_first_time(cluster: Cluster, speed: str) -> None:
    operator = await cluster.operator()
    requests = (await resend.captured(operator, "demo", None, None)).requests

    done = await asyncio.to_thread(again, cluster, "--speed", speed, "--since", "1h")

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^3 sent again, 3 ended well both times: cached tokens \d+ -> [1-9]\d*, mean TTFT", done.stdout, re.M
    )
    for request in requests:
        assert re.search(rf"^{request.request_id} +w1 +w1 +\d+ +\d+ +\d+ +\d+ +ok +ok", done.stdout, re.MULTILINE)
        first = await outcome_of(operator, request.client_request_id)
        second = await outcome_of(operator, f"again-{request.request_id}")
        assert (second.ns_id, second.prefix_class) == (first.ns_id, "document")
        assert second.prompt_tokens == first.prompt_tokens
    # What was sent again is kept, too, and is not sent a third time.
    assert [one.request_id for one in (await resend.captured(operator, "demo", None, None)).requests] == [
        one.request_id for one in requests
    ]
    await operator.close()


async def test_no_prompt_is_in_the_journal_or_in_a_log(cluster: Cluster) -> None:
    operator = await cluster.operator()
    records = [kept.data async for kept in streams.read(operator, subjects.STREAM_JOURNAL, "pb.v1.>")]
    await operator.close()

    assert records and not any(SECRET.encode() in record for record in records)
    logs = list((cluster.state / "logs").glob("*.log"))
    assert logs and not [log for log in logs if SECRET in log.read_text("utf-8", "replace")]


@pytest.mark.parametrize(
    ("arguments", "token", "says"),
    [
        pytest.param(["--tenant", "other"], "other", "nothing of tenant other is captured", id="not captured"),
        pytest.param(["--until", "2020-01-01"], None, "nothing of tenant demo is captured", id="not in this time"),
    ],
)
def test_where_there_is_nothing_to_send_it_says_so(
    cluster: Cluster, other_token: str, arguments: list[str], token: str | None, says: str
) -> None:
    done = again(cluster, *arguments, token=other_token if token else None)

    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    ("arguments", "token", "says"),
    [
        pytest.param([], "wrong", "token not accepted for tenant demo", id="a wrong token"),
        pytest.param([], "", "PREFIXBUS_TOKEN", id="no token"),
        pytest.param(["asked-1"], None, "sends all of a time range", id="one request"),
    ],
)
def test_mistakes_are_told_in_a_sentence(cluster: Cluster, arguments: list[str], token: str | None, says: str) -> None:
    done = again(cluster, *arguments, token=token)

    assert done.returncode != 0
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
