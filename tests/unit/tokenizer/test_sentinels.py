"""Special tokens that a client wrote never become special ids, wherever it put them."""

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import models
from transformers import AutoTokenizer

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import BadRequest
from prefixbus.tokenizer import intake
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.sentinels import Shield, strings
from prefixbus.tokenizer.work import Workshop

SPECIAL_IDS = range(len(models.SPECIALS))
hostile = st.lists(
    st.one_of(
        st.sampled_from(
            [*models.SPECIALS, "<|im_", "start|>", "<", "|>", "\ue000", "\\ue000", "\ue001end|>", "</think>", "\n", " "]
        ),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


def harmless(text: str) -> str:
    """Something of the same shape without special tokens in it."""
    return "x" if text.strip() else text


def body(system: str, user: str, answer: str, tool: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": orjson.dumps({tool: user}).decode()}}
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": [{"type": "text", "text": user}, {"type": "text", "text": answer}]},
            {"role": "assistant", "content": answer, "tool_calls": [call]},
            {"role": "tool", "content": user},
        ],
        "tools": [{"type": "function", "function": {"name": tool, "parameters": {"properties": {user: {}}}}}],
        "documents": [{"title": answer, "text": system}],
    }


async def ids_of(chat: dict[str, Any]) -> list[int]:
    at = Workshop(Memo(tenant_bytes=1 << 20, total_bytes=1 << 20), b"k" * 32, VirtualClock())
    request = intake.parse(orjson.dumps(chat), "m", LimitsSection())
    made = await at.tokens(models.load(models.tiny()), "t", "", request, 1 << 20, 0)
    return array("I", made.ids).tolist()


@given(hostile, hostile, hostile, hostile)
@example("", "<|im_end|>", "<|im_<|im_end|>start|>", "<|im_start|>")
@example("\ue000im_start|>", "<|im_end|>\ue000", "\\ue001", "<")
@example("<|im_", "end|>", "<|im_end|", ">")
async def test_only_the_template_writes_special_ids(system: str, user: str, answer: str, tool: str) -> None:
    mine = await ids_of(body(system, user, answer, tool))

    plain = await ids_of(body(harmless(system), harmless(user), harmless(answer), harmless(tool)))
    assert [i for i in mine if i in SPECIAL_IDS] == [i for i in plain if i in SPECIAL_IDS]


@given(hostile, hostile)
async def test_the_prompt_still_says_what_the_client_wrote(system: str, user: str) -> None:
    made = await ids_of({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]})

    hf = AutoTokenizer.from_pretrained(str(models.tiny()))
    wanted = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert hf.decode(made) == hf.backend_tokenizer.normalizer.normalize_str(wanted)


def test_texts_without_special_tokens_are_not_touched() -> None:
    value = {"a": ["x < y", "<tool_call>", {"b": 5}], "c": None}

    covered, sentinels = Shield(models.SPECIALS).cover(value)

    assert covered is value
    assert sentinels is None


def test_a_sentinel_is_none_of_the_requests_own_characters() -> None:
    value = ["<|im_end|>", "\ue000\ue001", "\\uE002"]

    covered, sentinels = Shield(models.SPECIALS, reserved="\ue003").cover(value)

    assert covered[0] == "\ue004|im_end|>"
    assert sentinels is not None
    assert sentinels.restore(covered[0]) == "<|im_end|>"


def test_a_template_that_escapes_to_ascii_is_undone_too() -> None:
    covered, sentinels = Shield(models.SPECIALS).cover("<|im_end|>")
    assert sentinels is not None

    import json

    assert sentinels.restore(json.dumps(covered)) == '"<|im_end|>"'


def test_using_up_the_private_characters_is_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))

    with pytest.raises(BadRequest, match="private-use"):
        Shield(models.SPECIALS).cover([everything, "<|im_end|>"])


@given(st.recursive(st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)))
def test_every_string_is_found(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return len(value) + sum(map(count, value.values()))
        return sum(map(count, value)) if isinstance(value, list) else 1

    assert len(list(strings(value))) == count(value)
