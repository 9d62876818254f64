"""Ids are those that transformers' own apply_chat_template gives, whatever is cut, memoised or covered on the way."""

import asyncio
import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import models
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoTokenizer

from prefixbus.bus import blockkeys
from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import BadRequest, ConfigInvalid
from prefixbus.tokenizer import gguf, intake, render
from prefixbus.tokenizer.memo import Memo
from prefixbus.tokenizer.model import TokenizerModel, pack
from prefixbus.tokenizer.segments import PIECE_CHARS
from prefixbus.tokenizer.work import Tokens, Workshop

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Погода / 天气 in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Пермь"}'}}
LONG = "\n".join(models.CORPUS) * 40

CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "Hello, how are you?"}]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "First question?"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFirst answer."},
            {"role": "user", "content": "And  then?\n\n"},
        ]
    },
    "Russian": {"messages": [{"role": "user", "content": models.CORPUS[1] + " ё́\n"}]},
    "Chinese": {"messages": [{"role": "user", "content": models.CORPUS[2] * 3}]},
    "emoji and marks": {"messages": [{"role": "user", "content": "👩‍👩‍👧‍👦🇩🇪☕️ e\u0301 ½ ² \u200b\u00a0x"}]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "long": {"messages": [{"role": "user", "content": LONG}, {"role": "user", "content": LONG + "?"}]},
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": " 12°C ", "tool_call_id": "c1"},
        ],
        "tools": TOOLS,
    },
    "documents": {
        "messages": [{"role": "user", "content": "Which?"}],
        "documents": [{"title": "A", "text": "alpha text"}, {"title": "Б", "text": "текст"}],
    },
    "template argument": {
        "messages": [{"role": "user", "content": "Quick!"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "reasoning": {
        "messages": [
            {"role": "developer", "content": "Be brief.", "tools": None},
            {"role": "user", "content": "Why?", "name": "ann"},
            {"role": "assistant", "content": "So.", "reasoning": "hm"},
        ],
    },
    "all of it as JSON": {
        "messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}],
        "chat_template_kwargs": {"enable_thinking": True, "bos_token": "none"},
    },
    "open answer": {
        "messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}
DIRECTORIES = {
    "tiny": models.tiny,
    "vocab.json": models.tiny_vocabulary,
    "smollm2 with tools": models.smollm2_with_tools,
}


def request_of(body: dict[str, Any]) -> intake.Request:
    import orjson

    return intake.parse(orjson.dumps(body), "m", LimitsSection())


def workshop() -> Workshop:
    return Workshop(Memo(tenant_bytes=1 << 24, total_bytes=1 << 26), b"k" * 32, VirtualClock())


async def tokens(model: TokenizerModel, body: dict[str, Any], at: Workshop | None = None) -> Tokens:
    return await (at or workshop()).tokens(model, "acme", "", request_of(body), 1 << 20, 0)


def reference(directory: Path, body: dict[str, Any]) -> list[int]:
    """What transformers gives for the same chat, with null content and call arguments as vLLM prepares them."""
    chat = request_of(body).chat
    assert chat is not None
    hf: Any = AutoTokenizer.from_pretrained(str(directory))
    ids: list[int] = hf.apply_chat_template(
        render.conversation(chat.messages, models.load(directory).content_format),
        tools=body.get("tools"),
        documents=body.get("documents"),
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        tokenize=True,
        return_dict=False,
        **body.get("chat_template_kwargs", {}),
    )
    return ids


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("which", DIRECTORIES)
async def test_a_chat_has_the_ids_of_transformers(which: str, name: str) -> None:
    directory = DIRECTORIES[which]()

    made = await tokens(models.load(directory), CHATS[name])

    assert array("I", made.ids).tolist() == reference(directory, CHATS[name])
    assert not made.covered


@pytest.mark.parametrize("name", CHATS)
async def test_a_template_is_given_what_transformers_gives_it(name: str) -> None:
    """It is rendered without `apply_chat_template`: fields, their order and names must be the same."""
    template = (
        "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ add_generation_prompt }}"
        "{# content #}{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ enable_thinking is defined }}"
    )
    directory = models.with_template(models.tiny(), "tiny-json", template)
    model = models.load(directory)
    chat = request_of(CHATS[name]).chat
    assert chat is not None
    messages = render.conversation(chat.messages, model.content_format)
    kwargs = model.accepts(chat.template_kwargs)
    hf: Any = AutoTokenizer.from_pretrained(str(directory))

    text = model.render(messages, chat.tools, chat.documents, chat, kwargs)

    assert text == hf.apply_chat_template(
        messages,
        tools=chat.tools,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tokenize=False,
        **kwargs,
    )


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_of_several_templates_the_one_for_tools_is_taken_when_there_are_any(
    tools: list[dict[str, Any]] | None,
) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    model = models.load(models.with_template(models.tiny(), "tiny-two", both))
    chat = request_of(CHATS["one turn"]).chat
    assert chat is not None

    text = model.render([{"role": "user", "content": "x"}], tools, None, chat, {})

    assert text == ("with tools" if tools else "plain")


@pytest.mark.parametrize("name", CHATS)
async def test_a_second_time_all_texts_come_out_of_the_memo_with_the_same_ids(name: str) -> None:
    model, at = models.load(models.tiny()), workshop()
    first = await tokens(model, CHATS[name], at)

    second = await tokens(model, CHATS[name], at)

    marks = sum(1 for i in array("I", second.ids) if i < len(models.SPECIALS))
    assert second.ids == first.ids
    assert second.memo_tokens == len(second.ids) // 4 - marks


async def test_smollm2s_own_template_takes_lists_and_null() -> None:
    directory = models.smollm2()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]}

    made = await tokens(models.load(directory), body)

    text = AutoTokenizer.from_pretrained(str(directory)).decode(array("I", made.ids).tolist())
    assert "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n" in text


async def test_a_template_that_loops_over_parts_gets_them_unjoined() -> None:
    directory = models.with_template(models.tiny(), "tiny-parts", models.CHATML_WITH_PARTS)
    model = models.load(directory)

    made = await tokens(model, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]})

    assert model.content_format == "openai"
    assert "user\nab<|im_end|>" in AutoTokenizer.from_pretrained(str(directory)).decode(array("I", made.ids).tolist())


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["one below", "exactly", "one over"])
async def test_only_full_blocks_have_keys(extra: int) -> None:
    ids = list(range(64 + extra))

    made = await tokens(models.load(models.tiny()), {"prompt": ids})

    assert len(blockkeys.chain(made.ids, 32, 7)) // 8 == (64 + extra) // 32


async def test_a_completions_prompt_is_read_as_vllm_reads_it() -> None:
    model = models.load(models.smollm2())
    prompt = "<|im_start|>user\nhi there<|im_end|>\n"

    made = await tokens(model, {"prompt": prompt})

    assert array("I", made.ids).tolist() == AutoTokenizer.from_pretrained(str(models.smollm2())).encode(prompt)


async def test_ids_outside_the_vocabulary_are_refused() -> None:
    model = models.load(models.tiny())

    with pytest.raises(BadRequest, match="outside 0 to"):
        await tokens(model, {"prompt": [1, model.vocab_size]})
    with pytest.raises(BadRequest, match="outside 0 to"):
        await tokens(model, {"prompt": [1, -1]})


async def test_a_template_that_refuses_says_so() -> None:
    template = "{{ raise_exception('Roles must alternate') }}"
    model = models.load(models.with_template(models.tiny(), "tiny-refusing", template))

    with pytest.raises(BadRequest, match="Roles must alternate"):
        await tokens(model, CHATS["one turn"])


async def test_half_a_surrogate_in_call_arguments_is_refused() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}

    with pytest.raises(BadRequest, match="surrogate"):
        await tokens(models.load(models.tiny()), body)


def test_a_template_that_prints_the_time_is_reported() -> None:
    template = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    timed = models.load(models.with_template(models.tiny(), "tiny-timed", template))

    assert timed.uses_clock
    assert not models.load(models.tiny()).uses_clock


def test_a_tokenizer_that_marks_only_the_first_text_is_not_segmented() -> None:
    tokenizer = Tokenizer.from_file(str(models.tiny() / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    assert isinstance(tokenizer.model, kinds.BPE)

    model = TokenizerModel.load(models.write(tokenizer, "tiny-metaspace", models.CHATML_WITH_TOOLS))

    assert not model.segmenter.cuttable


async def test_a_tokenizer_that_cannot_be_segmented_is_right_and_remembers_nothing() -> None:
    tokenizer = Tokenizer.from_file(str(models.tiny() / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("z")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    directory = models.write(tokenizer, "tiny-whole", models.CHATML_WITH_TOOLS)
    model, at = await asyncio.to_thread(TokenizerModel.load, directory), workshop()
    assert not model.segmented

    await tokens(model, CHATS["system and turns"], at)
    made = await tokens(model, CHATS["system and turns"], at)

    assert array("I", made.ids).tolist() == reference(directory, CHATS["system and turns"])
    assert made.memo_tokens == 0


text = st.text(
    alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n.,。，'aбж中1")), max_size=200
)


@given(st.lists(text, min_size=1, max_size=30))
def test_pieces_of_any_text_have_the_ids_of_the_whole(texts: list[str]) -> None:
    model = models.load(models.tiny())
    whole = "".join(texts)

    pieces = model.segmenter.cut(whole, 1) if whole else []

    assert "".join(pieces) == whole
    assert b"".join(model.encode(pieces)) == model.encode([whole])[0]


def test_pieces_of_real_texts_have_the_ids_of_the_whole() -> None:
    model = models.load(models.smollm2())

    for sample in (*models.CORPUS, LONG):
        assert b"".join(model.encode(model.segmenter.cut(sample, 1))) == model.encode([sample])[0]


def test_texts_with_a_common_beginning_have_common_pieces() -> None:
    cut = models.load(models.tiny()).segmenter.cut
    document = LONG[: 5 * PIECE_CHARS]

    one, other = cut(document + " What is it?"), cut(document + " Who wrote it, and why?")

    assert len(one) >= 4
    assert one[:-1] == other[: len(one) - 1]


def test_a_vocabulary_whose_reader_is_not_named_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(models.tiny_vocabulary() / name, tmp_path)

    with pytest.raises(ConfigInvalid, match=r"cannot be loaded.*tokenizer_class"):
        TokenizerModel.load(tmp_path)


def test_a_gguf_gives_the_tokenizer_it_holds(tmp_path: Path) -> None:
    directory = models.smollm2()

    again = gguf.convert(gguf.bundled_smollm2() or Path(), tmp_path / "again")

    assert again.context_length == 8192
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]
    # The ids that the model's own tokenizer gives: digits one by one, specials as such, no NFC.
    hf = AutoTokenizer.from_pretrained(str(directory))
    assert hf.encode("<|im_start|>") == [1]
    assert len(hf.encode("2026")) == 4
    assert hf.encode("e\u0301") != hf.encode("é")


def test_ids_are_packed_little_endian() -> None:
    assert pack([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_tools_are_shown_to_a_template_with_what_vllm_shows_it() -> None:
    """Fields it does not know, and nulls beyond the three that it always writes, would be other tokens."""
    tools = [
        {"function": {"name": "a", "nonsense": 1, "strict": None, "parameters": {"type": "object"}}, "extra": 2},
        {"type": "function", "function": {"strict": True, "description": "d", "name": "b"}, "defer_loading": False},
    ]

    assert json.dumps(render.tool_schemas(tools)) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "a", "description": None, "parameters": {"type": "object"}},
            },
            {
                "type": "function",
                "function": {
                    "name": "b",
                    "description": "d",
                    "parameters": None,
                    "strict": True,
                    "defer_loading": False,
                },
                "defer_loading": False,
            },
        ]
    )
    assert render.tool_schemas(None) is None
