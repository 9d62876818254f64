"""`prefixbus mismatches` on a real cluster with a small cache: what was evicted, and what was inserted in a prompt."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TEST_TIMEOUT_S, ask, chat, outcome_of

from prefixbus.client import Client
from prefixbus.cluster import deployment
from prefixbus.cluster import state as state_module

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

# Three prompts of the tests' length do not fit.
KV_TOKENS = 8192
WORDS = "cache worker prefix token block queue router engine tenant scope event stream lease model answer time".split()


def text(seed: int, words: int = 2_400) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice([",", ".", "", "", "s"]) for _ in range(words))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    """A state directory on which a cluster of one worker runs, and the demo tenant's token."""
    directory = tmp_path / "state"
    options = deployment.Options(workers=1, kv_tokens=KV_TOKENS)
    with state_module.lock(directory):
        made = deployment.Deployment(directory, options, lambda line: None)
        report = await asyncio.to_thread(deployment.prepare, directory, made.workers)
        assert report.demo is not None
        async with made:
            yield directory, report.demo.token


async def test_an_eviction_and_an_insertion_are_told_apart(running: tuple[Path, str]) -> None:
    directory, token = running
    url = deployment.read_cluster(directory).nats_url
    operator = await deployment.connect(directory, "operator", url)
    prompts = {
        "first": chat("What is it?", system=text(1)),
        "inserted": chat("What is it?", system=f"It is now seven past nine. {text(1)}"),
        "other": chat("What is it?", system=text(2)),
        "another": chat("What is it?", system=text(3)),
        "first-again": chat("And what is this?", system=text(1)),
        "first-once-more": chat("And that?", system=text(1)),
    }
    async with await Client.connect(url, tenant="demo", token=token) as client:
        cached = {}
        for name, body in prompts.items():
            cached[name] = (await ask(client, body, request_id=name)).cached_tokens
            await outcome_of(operator, name)
    await operator.close()
    assert [name for name, tokens in cached.items() if tokens > 1000] == ["first-once-more"]

    found = json.loads(await asyncio.to_thread(_mismatches, directory, "--json"))
    shown = await asyncio.to_thread(_mismatches, directory)

    ids = {name: await asyncio.to_thread(_our_id, directory, name) for name in ("inserted", "first-again")}
    assert _causes(found) == {"inserted": [ids["inserted"]], "eviction": [ids["first-again"]]}
    assert all(found["causes"][cause]["tokens"] > 1000 for cause in ("inserted", "eviction"))
    assert found["same_document"]["examples"] == [ids["inserted"]]
    assert found["requests"] == len(prompts)
    # Whether the directory had heard of the eviction when the request came is chance.
    for cause, name in (("inserted", "inserted"), ("eviction", "first-again")):
        assert re.search(rf"^{cause} +1 +[01] +\d+ +{ids[name]} *$", shown, re.MULTILINE)
    assert not any(word in shown for word in ("scope", "answer", "seven past"))


def _causes(found: dict[str, Any]) -> dict[str, list[str]]:
    return {name: group["examples"] for name, group in found["causes"].items() if group["requests"]}


def _mismatches(directory: Path, *arguments: str) -> str:
    return _prefixbus(directory, "mismatches", "--since", "1h", *arguments)


def _our_id(directory: Path, name: str) -> str:
    decisions = json.loads(_prefixbus(directory, "explain", name, "--json"))["decisions"]
    request_id: str = decisions[0]["request_id"]
    return request_id


def _prefixbus(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "prefixbus", *arguments, "--state", str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
