"""What can be asked for, all the way: tools, choices, log probabilities, formats, and answers taken up elsewhere."""

import asyncio
import contextlib
import json
import signal
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from support.cluster import Cluster, chat, outcome_of

from prefixbus.bus.connection import Bus

from .conftest import TOOLS_MODEL

SUBJECT = "pb.v1.infer.demo.smollm2"
TOOLS_SUBJECT = f"pb.v1.infer.demo.{TOOLS_MODEL}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"worker": {"type": "string"}, "hours": {"type": "integer", "minimum": 2}},
                "required": ["worker", "hours"],
            },
        },
    }
    for name in ("queue", "prefill")
]


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Nats]:
    connection = await nats.connect(cluster.url, user="demo", password=cluster.token, inbox_prefix=b"_INBOX.demo")
    yield connection
    await connection.close()


@pytest.fixture
async def plain(cluster: Cluster) -> AsyncIterator[Nats]:
    async with connected(cluster) as connection:
        yield connection


class Heard:
    """What came of one request."""

    def __init__(self, messages: list[Msg]) -> None:
        *chunks, end = messages
        self.headers = [chunk.headers or {} for chunk in chunks if "Pb-Seq" in (chunk.headers or {})]
        self.chunks = [json.loads(chunk.data) for chunk in chunks if "Pb-Seq" in (chunk.headers or {})]
        self.end = end.headers or {}

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content", "") for choice in self.choices)

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice["token_ids"]]

    @property
    def calls(self) -> dict[int, dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        for choice in self.choices:
            for delta in choice["delta"].get("tool_calls", []):
                call = found.setdefault(delta["index"], {"name": "", "arguments": ""})
                call["name"] += delta["function"].get("name", "")
                call["arguments"] += delta["function"].get("arguments", "")
        return found


async def asked(
    connection: Nats,
    body: dict[str, Any],
    *,
    subject: str = SUBJECT,
    label: str = "",
    began: asyncio.Event | None = None,
) -> Heard:
    """A whole answer; `began` is set when three chunks of it are there."""
    inbox = connection.new_inbox()
    answer = await connection.subscribe(inbox)
    headers = {"Pb-Request-Id": label or uuid.uuid4().hex}
    await connection.publish(subject, json.dumps(body).encode(), reply=inbox, headers=headers)
    messages = [await answer.next_msg(timeout=10)]
    while messages[-1].data:
        if began is not None and sum("Pb-Seq" in (message.headers or {}) for message in messages) >= 3:
            began.set()
        messages.append(await answer.next_msg(timeout=15))
    await answer.unsubscribe()
    return Heard(messages)


async def test_a_forced_call_comes_back_and_its_prompt_is_reused_as_predicted(tools_cluster: Cluster) -> None:
    unique = uuid.uuid4().hex
    body = {
        **chat(f"{unique} How long is the queue of w1? " * 20, max_tokens=60),
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "prefill"}},
    }
    operator = await tools_cluster.operator()
    async with connected(tools_cluster) as connection:
        outcomes = []
        for label in (uuid.uuid4().hex, uuid.uuid4().hex):
            answer = await asked(connection, body, subject=TOOLS_SUBJECT, label=label)
            outcomes.append(await outcome_of(operator, label))

        assert answer.calls.keys() == {0} and answer.calls[0]["name"] == "prefill"
        assert json.loads(answer.calls[0]["arguments"]) == {"worker": "made up", "hours": 2}
        assert answer.choices[-1]["finish_reason"] == "stop"
        assert [outcome.engine_differs_at for outcome in outcomes] == [None, None]
        assert outcomes[1].cached_tokens == outcomes[1].predicted_tokens > 128
        assert answer.headers[0]["Pb-Predicted-Tokens"] == str(outcomes[1].predicted_tokens)
        required = await asked(connection, {**body, "tool_choice": "required"}, subject=TOOLS_SUBJECT)
        assert [call["name"] for call in required.calls.values()] == ["queue", "prefill"]
        assert required.choices[-1]["finish_reason"] == "tool_calls"
    await operator.close()


async def test_choices_log_probabilities_and_formats_pass(plain: Nats) -> None:
    several = await asked(plain, {**chat("Hello", max_tokens=4), "n": 2, "seed": 1, "temperature": 0.7})
    probable = await asked(plain, {**chat("Hello", max_tokens=3), "logprobs": True, "top_logprobs": 2})
    formatted = await asked(plain, {**chat("Hello", max_tokens=3), "response_format": {"type": "json_object"}})

    assert {choice["index"] for choice in several.choices} == {0, 1}
    assert several.chunks[-1]["usage"]["completion_tokens"] == 8
    entries = [entry for choice in probable.choices for entry in choice["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == probable.text
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert formatted.text and "Pb-Error" not in formatted.end


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"echo": True}, "echo"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_pass_is_refused_by_name(plain: Nats, body: dict[str, Any], field: str) -> None:
    answer = await asked(plain, {**chat("Hello"), **body})

    assert (answer.chunks, answer.end["Pb-Error"]) == ([], "unsupported")
    assert answer.end["Nats-Service-Error"].startswith(f"{field}: ")


async def test_an_answer_of_several_choices_cannot_be_resumed(plain: Nats) -> None:
    answer = await asked(plain, {**chat("Hello"), "n": 2, "resume": {"token_ids": [1]}})

    assert answer.end["Pb-Error"] == "not_resumable"


@pytest.fixture
def silent_engine(cluster: Cluster) -> Iterator[list[str]]:
    """Whoever is stopped by a test goes on after it."""
    stopped: list[str] = []
    yield stopped
    for name in stopped:
        cluster.signal(name, signal.SIGCONT)


async def test_an_answer_whose_engine_hangs_is_taken_up_by_another_one(
    cluster: Cluster, plain: Nats, silent_engine: list[str]
) -> None:
    body = {**chat(f"{uuid.uuid4().hex} Tell me all.", max_tokens=400), "stop": ["?!"], "resume": {}}
    whole = await asked(plain, body)
    began = asyncio.Event()
    asking = asyncio.create_task(asked(plain, body, began=began))
    await began.wait()
    stats = await asyncio.to_thread(cluster.engine_stats)
    (worker,) = (worker for worker, told in stats.items() if told["running"])
    silent_engine.append(f"engine-{worker}")
    cluster.signal(f"engine-{worker}", signal.SIGSTOP)

    broken = await asking
    resumed = await asked(plain, {**body, "resume": {"token_ids": broken.tokens}})

    assert (broken.end["Pb-Error"], broken.end["Pb-Resume"]) == ("worker_lost", "resumable")
    assert "Pb-Seq" not in broken.end  # its bridge alone knew how many there were, and its lease is over
    assert 0 < len(broken.tokens) < 400
    assert broken.tokens + resumed.tokens == whole.tokens
    assert broken.text + resumed.text == whole.text
    assert resumed.chunks[-1]["usage"]["completion_tokens"] == whole.chunks[-1]["usage"]["completion_tokens"] == 400
    assert resumed.chunks[-1]["usage"]["prompt_tokens"] == whole.chunks[-1]["usage"]["prompt_tokens"]
    cluster.signal(silent_engine.pop(), signal.SIGCONT)
    await cluster.settles()


@contextlib.asynccontextmanager
async def failing(cluster: Cluster, fault: bytes, *workers: str) -> AsyncIterator[None]:
    """The next request fails so, wherever it comes first among these."""
    urls = [cluster.file.engines[worker].url for worker in workers]
    for url in urls:
        await asyncio.to_thread(_order, url, "POST", fault)
    try:
        yield
    finally:
        for url in urls:
            await asyncio.to_thread(_order, url, "DELETE", b"")


@pytest.mark.parametrize("kind", ["error", "full", "reset"])
async def test_an_engine_that_fails_before_its_first_token_is_replaced_unnoticed(
    cluster: Cluster, plain: Nats, operator: Bus, kind: str
) -> None:
    body = chat(f"{uuid.uuid4().hex} Which worker is it? " * 20, max_tokens=4)
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    whole = await asked(plain, body, label=first)
    # The one that has its prefix is asked first.
    warm = (await outcome_of(operator, first)).worker

    async with failing(cluster, b'{"kind":"%s"}' % kind.encode(), warm):
        answer = await asked(plain, body, label=second)

    assert (answer.text, answer.end.get("Pb-Error")) == (whole.text, None)
    outcome = await outcome_of(operator, second)
    assert (outcome.attempt, outcome.worker != warm) == (2, True)
    assert {headers["Pb-Attempt"] for headers in answer.headers} == {"2"}
    await cluster.settles()


async def test_a_request_that_fails_at_every_engine_ends_with_their_error(cluster: Cluster, plain: Nats) -> None:
    body = chat(f"{uuid.uuid4().hex} Hello", max_tokens=4)

    async with failing(cluster, b'{"kind":"error"}', *cluster.file.engines):
        answer = await asked(plain, body)

    assert (answer.chunks, answer.end["Pb-Error"]) == ([], "engine_failed")
    assert (await asked(plain, body)).text
    await cluster.settles()


def _order(url: str, method: str, body: bytes) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/sim/fault", body, method=method), timeout=5).close()
