"""The chat endpoint of real vLLM through the whole path: our token ids are its prompt, its parsers read the answer."""

import json
import re
import secrets
from typing import Any

import pytest
from support import models
from support.cluster import ask, chat, outcome_of
from support.vllm import BLOCK, VllmCluster
from tokenizers import Tokenizer

from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import PrefixbusError
from prefixbus.client import Client

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            # Without it vLLM forces the call alone, and not its arguments.
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"hours": {"enum": [1, 2]}},
                "required": ["hours"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("queue", "prefill")
]


async def choices_of(client: Client, body: dict[str, Any], request_id: str = "") -> tuple[list[Any], dict[str, Any]]:
    """The choices of all chunks, and the usage."""
    found: list[Any] = []
    usage: dict[str, Any] = {}
    async for frame in client.stream("smollm2", body, request_id=request_id or secrets.token_hex(8)):
        found += frame.chunk["choices"]
        usage = frame.chunk.get("usage") or usage
    return found, usage


def long_chat(**more: Any) -> dict[str, Any]:
    """What no other test has asked."""
    text = " ".join(secrets.token_hex(3) for _ in range(200))
    return {**chat(text, max_tokens=60), "temperature": 0, **more}


async def test_a_forced_call_is_made_of_our_own_prompt(client: Client, operator: Bus, cluster: VllmCluster) -> None:
    """Byte for byte: what the engine reuses of the prompt is what was predicted, and it says that it was ours."""
    body = long_chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "prefill"}})
    first, second = secrets.token_hex(8), secrets.token_hex(8)

    await choices_of(client, body, first)
    await outcome_of(operator, first)
    await cluster.settles()
    choices, usage = await choices_of(client, body, second)

    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "prefill" and calls[0]["type"] == "function"
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    # Random weights may fill it up with blanks, which its grammar allows, until there are no tokens left.
    assert arguments.startswith("{")
    assert choices[-1]["finish_reason"] in ("stop", "length")
    if choices[-1]["finish_reason"] == "stop":
        assert json.loads(arguments)["hours"] in (1, 2)
    outcome = await outcome_of(operator, second)
    assert outcome.engine_differs_at is None
    assert outcome.cached_tokens == outcome.predicted_tokens == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK > 0
    assert cluster.total("worker_bridge", "prefixbus_bridge_engine_prompts_total", verdict="same") >= 2
    assert cluster.total("worker_bridge", "prefixbus_bridge_engine_prompts_total", verdict="differs") == 0
    assert cluster.total("worker_bridge", "prefixbus_bridge_engine_prompts_total", verdict="untold") == 0


async def test_a_call_that_must_be_one_of_them_ends_as_openai_says(client: Client) -> None:
    choices, _ = await choices_of(client, long_chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))

    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] in ("queue", "prefill")
    assert {call["index"] for call in calls} == {0}
    assert choices[-1]["finish_reason"] in ("tool_calls", "length")


async def test_choices_and_log_probabilities_have_a_chats_form_by_token_ids(client: Client) -> None:
    several, usage = await choices_of(client, {**long_chat(), "temperature": 1.0, "n": 2, "max_tokens": 4})
    probable, _ = await choices_of(client, long_chat(max_tokens=3, logprobs=True, top_logprobs=2))

    assert {choice["index"] for choice in several} == {0, 1}
    assert usage["completion_tokens"] <= 8
    entries = [entry for choice in probable for entry in (choice["logprobs"] or {}).get("content", [])]
    assert entries and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    # At temperature 0 what is said is what is most probable.
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


async def test_both_endpoints_give_a_chats_log_probabilities_alike(client: Client) -> None:
    """The one makes them of what completions have; the other passes vLLM's own."""
    body = long_chat(max_tokens=4, logprobs=True, top_logprobs=3)

    by_ids, _ = await choices_of(client, body)
    by_chat, _ = await choices_of(client, {**body, "tools": TOOLS})
    again, _ = await choices_of(client, {**body, "tools": TOOLS, "tool_choice": "none"})

    def told(choices: list[Any]) -> list[Any]:
        return [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]

    # SmolLM2's template does not show tools: all three have one prompt.
    assert [entry["token"] for entry in told(by_ids)] == [entry["token"] for entry in told(again)]
    assert [set(entry) for entry in told(by_chat)] == [set(entry) for entry in told(by_ids)]
    assert [entry["token"] for entry in told(by_chat)] == [entry["token"] for entry in told(by_ids)]


async def test_frames_of_a_resumable_answer_have_exactly_the_tokens_of_their_text(client: Client) -> None:
    """Tokens of random weights are parts of characters as often as not, and may always begin a stop string."""
    read = Tokenizer.from_file(str(models.smollm2() / "tokenizer.json"))
    body = long_chat(max_tokens=40, ignore_eos=True, temperature=1.0, stop=["\n\n\n\n"], resume={})

    choices, usage = await choices_of(client, body)

    tokens: list[int] = []
    text = ""
    for choice in choices:
        tokens += choice["token_ids"]
        text += choice["delta"].get("content", "")
        assert choice["finish_reason"] is not None or read.decode(tokens) == text
    assert len(tokens) == usage["completion_tokens"] == 40
    rest, counted = await choices_of(client, {**body, "resume": {"token_ids": tokens[:30]}})
    assert sum(len(choice["token_ids"]) for choice in rest) == 10
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (usage["prompt_tokens"], 40)


# What each asks for, and how the text shows that the engine has heard it.
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "a choice": ({"structured_outputs": {"choice": ["warm", "cold"]}}, "warm|cold"),
    "a regular expression": ({"structured_outputs": {"regex": "w[0-9]{3}"}}, "w[0-9]{3}"),
    "a schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "hours", "schema": {"enum": ["one hour", "two hours"]}},
            }
        },
        '"(one hour|two hours)"',
    ),
}


@pytest.mark.parametrize(("asked", "pattern"), FORMATS.values(), ids=FORMATS.keys())
async def test_a_format_that_was_asked_for_is_kept(client: Client, asked: dict[str, Any], pattern: str) -> None:
    answer = await ask(client, long_chat(ignore_eos=False, **asked))

    assert re.fullmatch(pattern, answer.text)
    assert answer.finish_reason == "stop"


async def test_parameters_of_sampling_reach_the_engine(client: Client) -> None:
    """Of random weights nearly every token is as probable as any other."""
    hot = long_chat(max_tokens=12, temperature=1.0, ignore_eos=True)

    seeded = [(await ask(client, {**hot, "seed": 7})).text for _ in range(2)]
    free = [(await ask(client, hot)).text for _ in range(2)]
    greedy = [(await ask(client, {**hot, "top_k": 1})).text for _ in range(2)]
    biased = await ask(client, {**hot, "logit_bias": {"100": 100.0}, "temperature": 0})
    stop = greedy[0][len(greedy[0]) // 2 :][:4]
    stopped = await ask(client, {**hot, "top_k": 1, "stop": [stop]})

    assert seeded[0] == seeded[1]
    assert free[0] != free[1]
    assert greedy[0] == greedy[1]
    read = Tokenizer.from_file(str(models.smollm2() / "tokenizer.json"))
    assert biased.text == read.decode([100] * 12)
    assert stopped.finish_reason == "stop"
    assert stopped.text == greedy[0][: greedy[0].find(stop)]


@pytest.mark.parametrize("field", ["best_of", "guided_json", "prompt_logprobs", "echo"])
async def test_what_cannot_pass_is_refused_by_name(client: Client, field: str) -> None:
    with pytest.raises(PrefixbusError, match=field) as refused:
        await ask(client, {"prompt": "Hello", "max_tokens": 1, field: 3})

    assert refused.value.status == 400
