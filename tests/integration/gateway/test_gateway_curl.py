"""Plain curl against a deployment: the lines that people are shown, and what they type by hand."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import MODEL, Cluster

from prefixbus.cluster import guidance

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


async def shell(cluster: Cluster, command: str) -> str:
    environ = {"PREFIXBUS_TOKEN": cluster.token, "API": cluster.api, "PATH": "/usr/bin:/bin"}
    process = await asyncio.create_subprocess_shell(
        command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, errors = await process.communicate()
    assert process.returncode == 0, errors
    return said.decode()


README = Path(__file__).resolve().parents[3] / "README.md"


def of_the_demo(url: str) -> str:
    return guidance.curl_command(MODEL, url, "demo.$PREFIXBUS_TOKEN")


def of_the_readme(url: str) -> str:
    found = re.search(r"^    (curl .*(?:(?<=\\)\n.*)*)", README.read_text(), re.MULTILINE)
    assert found
    assert "http://127.0.0.1:8000/" in found[1]
    return found[1].replace("http://127.0.0.1:8000", url)


@pytest.mark.parametrize("shown", [of_the_demo, of_the_readme])
async def test_the_lines_that_people_are_shown_work_against_a_deployment(
    cluster: Cluster, shown: Callable[[str], str]
) -> None:
    said = await shell(cluster, shown(cluster.api.removesuffix("/v1")))

    events = re.findall(r"^data: (.*)$", said, re.MULTILINE)
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("options", "status", "found"),
    [
        ("$API/models", 200, '"id":"smollm2"'),
        ("$API/models/smollm2", 200, '"owned_by":"prefixbus"'),
        ("""$API/completions -d '{"model":"smollm2","prompt":["One","Two"],"max_tokens":2}'""", 200, '"index":1'),
        ("$API/chat/completions -d @/etc/hostname", 400, '"code":"invalid_json"'),
        ("$API/chat/completions -F file=@/etc/hostname", 400, '"code":"invalid_json"'),
        ("""--http1.0 $API/completions -d '{"model":"smollm2","prompt":"One","max_tokens":2}'""", 200, '"usage":'),
        ("$API/embeddings -d '{}'", 404, '"code":"unknown_url"'),
        ("-X PUT $API/models", 405, '"code":"method_not_allowed"'),
        ("-H 'Authorization: Bearer demo.wrong' $API/models", 401, '"code":"invalid_api_key"'),
    ],
)
async def test_what_people_type_is_answered(cluster: Cluster, options: str, status: int, found: str) -> None:
    key = "" if "Authorization" in options else '-H "Authorization: Bearer demo.$PREFIXBUS_TOKEN"'

    said = await shell(cluster, f"curl -sS -w '\\n%{{http_code}}' {key} {options}")

    content, code = said.rsplit("\n", 1)
    assert (int(code), found in content) == (status, True), said


async def test_a_long_body_that_asks_first_is_sent_and_served(cluster: Cluster) -> None:
    """Over a megabyte curl asks before it sends (Expect: 100-continue)."""
    body = """printf '{"model":"smollm2","prompt":"x","max_tokens":2,"user":"%02000000d"}' 0"""
    ask = """curl -sS -w '\\n%{http_code}' -H "Authorization: Bearer demo.$PREFIXBUS_TOKEN" $API/completions"""
    command = f"{body} | {ask} -H 'Expect: 100-continue' -d @-"

    content, code = (await shell(cluster, command)).rsplit("\n", 1)

    assert (code, json.loads(content)["usage"]["completion_tokens"]) == ("200", 2)
