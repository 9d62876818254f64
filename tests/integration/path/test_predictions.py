"""What the directory predicts is what the engine then reuses, to the token."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, ask, chat, outcome_of

from prefixbus.bus.connection import Bus
from prefixbus.client import Client

from .conftest import TOOLS_MODEL

BLOCK = 32
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "text"
RUSSIAN = "Кэш ключей и значений хранит вычисленные тензоры внимания для каждого токена запроса. " * 12
CHINESE = "键值缓存保存每个词元的注意力张量,因此重复的前缀不必再次计算。" * 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a worker, in milliseconds, for the last hour or any other time.",
            "parameters": {"type": "object", "properties": {"worker": {"type": "string"}}, "required": ["worker"]},
        },
    }
    for name in ("queue", "prefill", "decode", "memory")
]


@pytest.fixture
def unique() -> str:
    """Text that no other test has sent, so that the first request is cold."""
    return uuid.uuid4().hex


async def warm_repeat(
    client: Client, operator: Bus, body: dict[str, Any], *, model: str = "smollm2"
) -> tuple[int, int]:
    """(predicted, cached) tokens of a body that was sent before; that it was cold the first time is checked."""
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    assert (await ask(client, body, model=model, request_id=first)).cached_tokens == 0
    await outcome_of(operator, first)
    answer = await ask(client, body, model=model, request_id=second)
    outcome = await outcome_of(operator, second)
    assert outcome.cached_tokens == answer.cached_tokens
    return outcome.predicted_tokens, answer.cached_tokens


def expected(prompt_tokens: int) -> int:
    """All full blocks, but at least one token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


async def test_chat_with_a_system_prompt(client: Client, operator: Bus, unique: str) -> None:
    body = chat("Which worker is it?", system=f"{unique} You route requests to workers. " * 20)

    predicted, cached = await warm_repeat(client, operator, body)

    assert predicted == cached > 0
    assert cached % BLOCK == 0


@pytest.mark.parametrize("text", [RUSSIAN, CHINESE], ids=["russian", "chinese"])
async def test_other_scripts(client: Client, operator: Bus, unique: str, text: str) -> None:
    predicted, cached = await warm_repeat(client, operator, chat(f"{unique} {text}"))

    assert predicted == cached > 0


def real_prompts() -> Iterator[Any]:
    """A few real prompts of each kind; one skipped case where the data is not there."""
    if not DATA.exists():
        yield pytest.param(None, marks=pytest.mark.skip(reason=f"no real prompts at {DATA}"), id="no data")
        return
    yield pytest.param((DATA / "ru_tutorial.md").read_text()[:9000], id="ru_tutorial")
    yield pytest.param((DATA / "github-terms-of-service.md").read_text()[:20000], id="terms")
    questions = [json.loads(line) for line in (DATA / "ru_questions.jsonl").read_text().splitlines()[:200]]
    longest = sorted((json.dumps(question, ensure_ascii=False) for question in questions), key=len)[-3:]
    for number, text in enumerate(longest):
        yield pytest.param(text[:6000], id=f"ru_question_{number}")
    for name in ("toolcall_zh.json", "toolcall_en.json"):
        dialog = json.loads((DATA / name).read_text())[0]
        yield pytest.param(json.dumps(dialog, ensure_ascii=False)[:6000], id=name)


@pytest.mark.parametrize("text", list(real_prompts()))
async def test_real_prompts(client: Client, operator: Bus, unique: str, text: str) -> None:
    predicted, cached = await warm_repeat(client, operator, chat(f"{unique} {text}"))

    assert predicted == cached > 0


async def test_each_turn_of_a_session_finds_the_turns_before(
    cluster: Cluster, client: Client, operator: Bus, unique: str
) -> None:
    dialog: list[dict[str, str]] = [{"role": "system", "content": f"{unique} You are brief. " * 10}]
    reused = []
    for turn in range(4):
        dialog.append({"role": "user", "content": f"Question {turn}: what happens to a request in the router? " * 3})
        request_id = uuid.uuid4().hex
        body = {"messages": dialog, "max_tokens": 40, "ignore_eos": True}
        answer = await ask(client, body, request_id=request_id)
        outcome = await outcome_of(operator, request_id)
        dialog.append({"role": "assistant", "content": answer.text})
        assert outcome.predicted_tokens == answer.cached_tokens, outcome
        reused.append(answer.cached_tokens)
        # People read an answer before they go on; the blocks of its last tokens reach the directory in that time.
        await cluster.settles()

    assert reused[0] == 0
    assert reused == sorted(reused)
    assert len(set(reused)) == 4, "each turn adds blocks to what is reused"


async def test_tools_are_part_of_the_prefix(tools_cluster: Cluster, unique: str) -> None:
    operator = await tools_cluster.operator()
    async with await tools_cluster.client() as client:
        body = {**chat(f"{unique} How long is the queue of w1?", system="You have tools."), "tools": TOOLS}
        other = {**body, "tools": TOOLS[:2]}

        predicted, cached = await warm_repeat(client, operator, body, model=TOOLS_MODEL)
        cached_with_other_tools = (await ask(client, other, model=TOOLS_MODEL)).cached_tokens

    await operator.close()
    assert predicted == cached > 4 * BLOCK
    assert cached_with_other_tools < cached


async def test_a_dialog_with_tool_calls_and_their_answers(tools_cluster: Cluster, unique: str) -> None:
    operator = await tools_cluster.operator()
    dialog: list[dict[str, Any]] = [
        {"role": "system", "content": f"{unique} You have tools."},
        {"role": "user", "content": "How long is the queue of w1?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "queue", "arguments": '{"worker": "w1"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"queue_ms": 120}'},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "of w2?"}]},
    ]
    async with await tools_cluster.client() as client:
        body = {"messages": dialog, "tools": TOOLS, "max_tokens": 8, "ignore_eos": True}
        predicted, cached = await warm_repeat(client, operator, body, model=TOOLS_MODEL)

    await operator.close()
    assert predicted == cached > 0


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        ("shorter than one block", BLOCK - 1),
        ("one block", BLOCK),
        ("one block and a token", BLOCK + 1),
        ("n blocks", 4 * BLOCK),
        ("n blocks and a token", 4 * BLOCK + 1),
        ("a token short of n blocks", 4 * BLOCK - 1),
    ],
)
async def test_prompts_at_the_borders_of_blocks(
    client: Client, operator: Bus, unique: str, case: str, tokens: int
) -> None:
    prompt = [1000 + byte for byte in bytes.fromhex(unique)]
    prompt += [2000 + n for n in range(tokens - len(prompt))]
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}

    predicted, cached = await warm_repeat(client, operator, body)

    assert predicted == cached == expected(tokens)


async def test_an_empty_completion_prompt_is_refused_by_name(client: Client) -> None:
    from prefixbus.bus.errors import BadRequest

    with pytest.raises(BadRequest, match="prompt"):
        await ask(client, {"prompt": [], "max_tokens": 4})


async def test_an_empty_question_is_answered(client: Client, operator: Bus) -> None:
    # The template's own tokens are the prompt. What they share with other tests' prompts may be warm already.
    request_id = uuid.uuid4().hex

    answer = await ask(client, chat(""), request_id=request_id)

    outcome = await outcome_of(operator, request_id)
    assert answer.text
    assert outcome.predicted_tokens == answer.cached_tokens <= expected(outcome.prompt_tokens)
