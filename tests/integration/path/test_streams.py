"""The wire as a client without anything of ours sees it: subjects, frames, ends, errors."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from support.cluster import Cluster, chat

ROOT = Path(__file__).resolve().parents[3]
SUBJECT = "pb.v1.infer.demo.smollm2"


@pytest.fixture
async def plain(cluster: Cluster) -> AsyncIterator[Nats]:
    connection = await nats.connect(cluster.url, user="demo", password=cluster.token, inbox_prefix=b"_INBOX.demo")
    yield connection
    await connection.close()


async def frames(
    connection: Nats, body: Any, *, headers: dict[str, str] | None = None, subject: str = SUBJECT
) -> list[Msg]:
    """All messages up to the empty one, as `nats request --wait-for-empty` collects them."""
    inbox = connection.new_inbox()
    answer = await connection.subscribe(inbox)
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    await connection.publish(subject, payload, reply=inbox, headers=headers)
    collected = [await answer.next_msg(timeout=10)]
    while collected[-1].data:
        collected.append(await answer.next_msg(timeout=10))
    await answer.unsubscribe()
    return collected


async def test_a_stream_is_numbered_carries_usage_and_ends_with_an_empty_message(plain: Nats) -> None:
    collected = await frames(plain, chat("Hello", max_tokens=5))

    *chunks, end = collected
    numbered = [chunk for chunk in chunks if "Pb-Seq" in (chunk.headers or {})]
    bodies = [json.loads(chunk.data) for chunk in numbered]
    assert [int((chunk.headers or {})["Pb-Seq"]) for chunk in numbered] == list(range(len(numbered)))
    assert {(chunk.headers or {})["Pb-Attempt"] for chunk in numbered} == {"1"}
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert bodies[0]["choices"][0]["delta"]["role"] == "assistant"
    assert bodies[-1]["usage"]["completion_tokens"] == 5
    assert end.data == b""
    assert (end.headers or {})["Pb-Final"] == "1"
    assert int((end.headers or {})["Pb-Seq"]) == len(numbered)
    assert "Pb-Error" not in (end.headers or {})


async def test_completions_chunks_have_the_completions_form(plain: Nats) -> None:
    *chunks, _ = await frames(plain, {"prompt": "The router", "max_tokens": 3, "ignore_eos": True})

    bodies = [json.loads(chunk.data) for chunk in chunks]
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert "".join(choice["text"] for body in bodies for choice in body["choices"])


async def test_an_error_is_one_ending_frame_with_a_stable_code(plain: Nats) -> None:
    collected = await frames(plain, b"{not json")

    headers = collected[0].headers or {}
    assert len(collected) == 1
    assert headers["Pb-Final"] == "1"
    assert headers["Pb-Error"] == "invalid_json"
    assert headers["Nats-Service-Error-Code"] == "400"
    assert headers["Nats-Service-Error"]


@pytest.mark.parametrize(
    ("case", "subject", "body", "headers", "code"),
    [
        ("unknown model", "pb.v1.infer.demo.nobody", chat("x"), {}, "unknown_model"),
        ("another model in the body", SUBJECT, {**chat("x"), "model": "other"}, {}, "model_mismatch"),
        ("no messages", SUBJECT, {"messages": []}, {}, "bad_request"),
        ("too long for the model", SUBJECT, {"prompt": [5] * 9000, "max_tokens": 1}, {}, "context_too_long"),
        ("a deadline that has passed", SUBJECT, chat("x"), {"Pb-Deadline": "1000.0"}, "deadline_exceeded"),
    ],
)
async def test_what_cannot_be_answered_says_why(
    plain: Nats, case: str, subject: str, body: Any, headers: dict[str, str], code: str
) -> None:
    collected = await frames(plain, body, headers=headers or None, subject=subject)

    assert len(collected) == 1
    assert (collected[0].headers or {})["Pb-Error"] == code


async def test_a_cancelled_request_ends_with_that_error(cluster: Cluster, plain: Nats) -> None:
    request_id = uuid.uuid4().hex
    inbox = plain.new_inbox()
    answer = await plain.subscribe(inbox)
    body = json.dumps(chat("Count to a thousand", max_tokens=2000)).encode()
    await plain.publish(SUBJECT, body, reply=inbox, headers={"Pb-Request-Id": request_id})
    first = await answer.next_msg(timeout=10)
    assert first.data

    await plain.publish(f"pb.v1.cancel.demo.{request_id}", b"")

    last = first
    while last.data:
        last = await answer.next_msg(timeout=10)
    assert (last.headers or {})["Pb-Error"] == "cancelled"
    await cluster.settles()


async def test_a_cancel_that_overtakes_its_request_works(cluster: Cluster, plain: Nats) -> None:
    request_id = uuid.uuid4().hex
    await plain.publish(f"pb.v1.cancel.demo.{request_id}", b"")
    await plain.flush()

    collected = await frames(plain, chat("Too late", max_tokens=2000), headers={"Pb-Request-Id": request_id})

    assert (collected[-1].headers or {})["Pb-Error"] == "cancelled"
    await cluster.settles()


async def test_a_deadline_ends_a_request_that_runs(cluster: Cluster, plain: Nats) -> None:
    headers = {"Pb-Deadline": f"{time.time() + 1.0:.3f}"}

    collected = await frames(plain, chat("Count to a thousand", max_tokens=4000), headers=headers)

    assert len(collected) > 1
    assert (collected[-1].headers or {})["Pb-Error"] == "deadline_exceeded"
    await cluster.settles()


def readme_block() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_readmes_program_is_fifteen_lines_and_works(cluster: Cluster) -> None:
    program = readme_block()
    statements = [line for line in program.splitlines() if line.strip() and not line.startswith("import ")]

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=15,
        env={**os.environ, "NATS_URL": cluster.url, "PREFIXBUS_TOKEN": cluster.token},
    )

    assert len(statements) <= 15
    assert done.returncode == 0, done.stderr
    text, end = done.stdout.rsplit("\n", 2)[:2]
    assert text.strip()
    assert end == "done"


def test_the_program_with_our_client_that_the_documentation_shows_runs(cluster: Cluster) -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "prefixbus.client" in each)
    environ = {**os.environ, "NATS_URL": cluster.url, "PREFIXBUS_TOKEN": cluster.token}

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=15, env=environ)

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()


async def test_keepalives_break_a_silent_wait(cluster: Cluster, plain: Nats) -> None:
    # One engine paused: whichever request waits there hears keep-alives until it goes on.
    worker = next(iter(cluster.file.engines))
    engine = cluster.file.engines[worker]
    await post(f"{engine.url}/sim/pause")
    try:
        asked = [asyncio.create_task(frames(plain, chat(f"{uuid.uuid4().hex} {n}"))) for n in range(6)]
        inbox = plain.new_inbox()
        answer = await plain.subscribe(inbox)
        quiet: list[Msg] = []
        while not quiet or not quiet[-1].data or "Pb-Seq" in (quiet[-1].headers or {}):
            await plain.publish(SUBJECT, json.dumps(chat(uuid.uuid4().hex, max_tokens=1)).encode(), reply=inbox)
            quiet.append(await answer.next_msg(timeout=10))
    finally:
        await post(f"{engine.url}/sim/resume")
    await asyncio.gather(*asked)

    assert json.loads(quiet[-1].data)["choices"] == []
    await cluster.settles()


async def post(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert response.status == 200, await response.text()
