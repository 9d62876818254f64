"""What is predicted is what a real engine says it took from its cache, and what its counters say: to the token."""

import secrets
from typing import Any

import pytest
from support.cluster import chat
from support.vllm import BLOCK

from prefixbus.bus.connection import Bus
from prefixbus.client import Client

from .narrow import HITS, TEST_TIMEOUT_S, Narrow, answered, reusable

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

RUSSIAN = "Кэш ключей и значений хранит вычисленные тензоры внимания для каждого токена запроса. " * 6
CHINESE = "键值缓存保存每个词元的注意力张量,因此重复的前缀不必再次计算。" * 6
ENGLISH = "You route requests to the workers that hold their prefixes, unless another one is faster. " * 6
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
DIALOG_WITH_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "How long is the queue of w1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "queue", "arguments": '{"worker": "w1"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"queue_ms": 120, "рабочий": "номер один"}'},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "of w2?"}]},
]
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def unique() -> str:
    """Text that nobody has sent before, so that the first request is cold."""
    return secrets.token_hex(8)


async def repeat(cluster: Narrow, client: Client, operator: Bus, body: dict[str, Any]) -> tuple[int, int]:
    """Predicted and reused tokens of a body that is sent for the second time; of the first time nothing is found."""
    first, _ = await answered(client, operator, body)
    await cluster.in_step()
    hits = cluster.of_engine(HITS)
    answer, outcome = await answered(client, operator, body)
    assert first.cached_tokens == 0
    assert outcome.cached_tokens == answer.cached_tokens == cluster.of_engine(HITS) - hits
    assert answer.cached_tokens == reusable(answer.usage["prompt_tokens"])
    return outcome.predicted_tokens, answer.cached_tokens


@pytest.mark.parametrize("text", [ENGLISH, RUSSIAN, CHINESE], ids=["english", "russian", "chinese"])
async def test_a_system_prompt_and_a_question(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus, unique: str, text: str
) -> None:
    body = chat(f"{text[:60]}?", system=f"{unique} {text}", max_tokens=2)

    predicted, cached = await repeat(narrow, narrow_client, narrow_operator, body)

    assert predicted == cached > 2 * BLOCK


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
async def test_prompts_at_the_borders_of_blocks(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus, unique: str, tokens: int
) -> None:
    prompt = [1000 + byte for byte in bytes.fromhex(unique)]
    prompt += [2000 + number for number in range(tokens - len(prompt))]

    predicted, cached = await repeat(
        narrow, narrow_client, narrow_operator, {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    )

    assert predicted == cached == reusable(tokens)


@pytest.mark.parametrize(
    "choice", ["none", "auto", {"type": "function", "function": {"name": "prefill"}}], ids=["none", "auto", "forced"]
)
async def test_tools_by_the_engines_text_and_chat_routes(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus, unique: str, choice: Any
) -> None:
    dialog = [{"role": "system", "content": f"{unique} You have tools."}, *DIALOG_WITH_CALLS]
    body = {"messages": dialog, "tools": TOOLS, "tool_choice": choice, "max_tokens": 40}
    same = narrow.of_bridge("engine_prompts_total", verdict="same")

    predicted, cached = await repeat(narrow, narrow_client, narrow_operator, body)

    assert predicted == cached > 4 * BLOCK
    # Those whose answers only the engine's parser can read are chats to it; of each it said what it made of it.
    compared = narrow.of_bridge("engine_prompts_total", verdict="same") - same
    assert compared == (0 if choice == "none" else 2)
    assert narrow.of_bridge("engine_prompts_total", verdict="differs") == 0
    assert narrow.of_bridge("engine_prompts_total", verdict="untold") == 0


@pytest.mark.parametrize(
    "thinks", [{}, THINKING_OFF], ids=["plain", "a generation prompt that the next turn does not repeat"]
)
async def test_each_of_six_turns_finds_what_the_turns_before_left(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus, unique: str, thinks: dict[str, Any]
) -> None:
    dialog: list[dict[str, str]] = [{"role": "system", "content": f"{unique} You are brief. " * 6}]
    reused = []
    for turn in range(6):
        dialog.append({"role": "user", "content": f"Question {turn}: what becomes of a request in the router? " * 3})
        hits = narrow.of_engine(HITS)
        answer, outcome = await answered(
            narrow_client, narrow_operator, {"messages": dialog, "max_tokens": BLOCK + 2, "ignore_eos": True, **thinks}
        )
        dialog.append({"role": "assistant", "content": answer.text})
        assert outcome.predicted_tokens == answer.cached_tokens == narrow.of_engine(HITS) - hits, outcome
        reused.append(answer.cached_tokens)
        # People read an answer before they go on; the blocks of its last tokens are known by then.
        await narrow.in_step()

    assert reused[0] == 0
    assert sorted(set(reused)) == reused, "each turn adds blocks to what is reused"


async def test_after_evictions_what_is_left_is_predicted(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    def prompt(blocks: int) -> dict[str, Any]:
        ids = [1000 + secrets.randbelow(40000) for _ in range(blocks * BLOCK + 1)]
        return {"prompt": ids, "max_tokens": 1, "ignore_eos": True}

    first, second, third = prompt(60), prompt(60), prompt(40)
    for body in (first, second, third):
        assert (await answered(narrow_client, narrow_operator, body))[0].cached_tokens == 0
    # The events that say so, and no more, is what the next prediction waits for.
    story = await narrow.in_step()

    answer, outcome = await answered(narrow_client, narrow_operator, first)

    assert story.removed > 0
    assert outcome.predicted_tokens == answer.cached_tokens
    assert 0 < answer.cached_tokens < 60 * BLOCK, "the end of the first prompt was evicted, its beginning was not"
    await narrow.in_step()
    again, outcome = await answered(narrow_client, narrow_operator, first)
    assert outcome.predicted_tokens == again.cached_tokens == 60 * BLOCK
    assert narrow.of_bridge("blocks_of_unknown_parents_total") == 0
    assert narrow.total("worker_bridge", "prefixbus_wrong_hits_total") == 0
