"""The pure parts of the front end: stop strings, texts of tokens, bodies, event shapes, flags."""

import json
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from prefixbus.engine_sim import api, vocabulary
from prefixbus.engine_sim.__main__ import parse
from prefixbus.engine_sim.chat import flatten
from prefixbus.engine_sim.core import EngineCore, StepResult
from prefixbus.engine_sim.events import binds
from prefixbus.engine_sim.profile import H100_8B, INSTANT, PRESETS
from prefixbus.engine_sim.request import Request
from prefixbus.engine_sim.sequence import EngineNamespace, TokenSequence, Vocabulary
from prefixbus.engine_sim.stops import StopScanner
from prefixbus.engine_sim.wire import EventBatch, events_of


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with two special tokens, trained on the spot, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("model")
    words = [f"{a}{b}{c}" for a in "bdfglm" for b in "aeiou" for c in "nrst"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


# -- stop strings


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stream_shows_the_text_up_to_the_first_stop_and_nothing_after(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    read = ""
    for piece in pieces:
        shown += scanner.push(piece)
        read += piece
        if scanner.hit is not None:
            break
    else:
        shown += scanner.flush()

    if scanner.hit is None:
        assert shown == read and not any(stop in read for stop in stops)
    else:
        first = min((read.find(stop) + len(stop), number) for number, stop in enumerate(stops) if stop in read)
        assert scanner.hit == stops[first[1]]
        assert shown == read[: first[0] - len(scanner.hit)]


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_until_the_end_so_much_is_held_back_as_the_longest_stop_has_less_one(
    pieces: list[str], stops: list[str]
) -> None:
    scanner = StopScanner(stops)
    shown = read = ""
    for piece in pieces:
        shown += scanner.push(piece)
        read += piece
        if scanner.hit is not None:
            return
        assert shown == read[: max(0, len(read) - max(map(len, stops)) + 1)]


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_where_a_stop_is_shown_nothing_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops, include=True)
    shown = read = ""
    for piece in pieces:
        shown += scanner.push(piece)
        read += piece
        if scanner.hit is not None:
            assert shown == read[: min(read.find(stop) + len(stop) for stop in stops if stop in read)]
            return
        assert shown == read


def test_the_stop_itself_is_shown_when_asked_for() -> None:
    scanner = StopScanner(["lo"], include=True)

    assert scanner.push("hel") + scanner.push("lo you") == "hello"
    assert scanner.hit == "lo"


# -- vocabulary


def test_generated_text_encodes_back_to_the_generated_tokens(model_dir: Path) -> None:
    texts = vocabulary.load(model_dir)
    words = Vocabulary(spoken=texts.vocabulary.spoken)
    sequence = TokenSequence([1], words, 4, EngineNamespace())

    tokens = [sequence.append_next(False) for _ in range(200)]

    assert texts.encode("".join(map(texts.text, tokens)), False) == tokens


def test_end_of_sequence_is_the_models_and_has_no_text(model_dir: Path) -> None:
    texts = vocabulary.load(model_dir)

    assert texts.vocabulary.eos == 1
    assert texts.text(1) == ""


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        vocabulary.load(tmp_path)


# -- bodies


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_a_salt_outside_vllms_limits_is_refused(salt: str) -> None:
    with pytest.raises(api.BadRequest):
        api.check_salt(salt)


def test_a_salt_of_128_characters_is_fine() -> None:
    api.check_salt("x" * 128)


@pytest.mark.parametrize(
    "field",
    [
        {"best_of": 2},
        {"echo": True},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"stop": [""]},
        {"min_tokens": -1},
        {"stream_options": {"include_usage": True}},
        {"suffix": "x"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_is_not_simulated_or_out_of_range_is_refused_by_name(field: dict[str, Any]) -> None:
    body = api.decode_completion(orjson.dumps({"prompt": "x"} | field))

    with pytest.raises(api.BadRequest) as refused:
        body.check()
    assert next(iter(field)) in (refused.value.param, *refused.value.message.split())


@pytest.mark.parametrize(
    ("asked", "room", "limit"),
    [(5, 9, 5), (9, 5, 5), (None, 5, 5)],
    ids=["what is asked for", "what there is room for", "all there is room for"],
)
def test_an_answer_has_its_limit_in_the_request_or_in_the_models_length(
    asked: int | None, room: int, limit: int
) -> None:
    assert api.output_limit(asked, room, 0) == limit


@pytest.mark.parametrize(("asked", "room", "least"), [(0, 9, 0), (9, 0, 0), (3, 9, 4)])
def test_an_answer_of_nothing_or_of_less_than_it_must_have_is_refused(asked: int, room: int, least: int) -> None:
    with pytest.raises(api.BadRequest, match=r"max_tokens"):
        api.output_limit(asked, room, least)


def test_more_log_probabilities_than_an_engine_gives_are_refused() -> None:
    api.check_logprobs(20, vocabulary=1000)
    for asked in (21, -1):
        with pytest.raises(api.EngineRefuses, match="greater than max allowed: 20"):
            api.check_logprobs(asked, vocabulary=1000)


def test_unknown_and_null_fields_are_ignored() -> None:
    body = api.decode_completion(b'{"prompt":[1,2],"temperature":0,"nonsense":{},"stop":null,"cache_salt":null}')

    body.check()
    assert body.single_prompt() == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("x", "x"), ([1], [1]), (["x"], "x"), ([[1, 2]], [1, 2])],
    ids=["text", "ids", "texts", "lists"],
)
def test_a_prompt_may_come_in_four_forms(prompt: object, single: object) -> None:
    assert api.decode_completion(orjson.dumps({"prompt": prompt})).single_prompt() == single


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1], [2]]])
def test_no_prompt_and_several_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(api.BadRequest):
        api.decode_completion(orjson.dumps({"prompt": prompt})).single_prompt()


def test_messages_are_flattened_as_vllm_does() -> None:
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "text stays": ({"content": "a"}, "a"),
        "null is empty": ({"content": None}, ""),
        "absent is empty": ({}, ""),
        "parts are joined": ({"content": [{"type": "text", "text": "a"}, "b"]}, "a\nb"),
    }
    for name, (message, content) in cases.items():
        assert flatten({"role": "user"} | message)["content"] == content, name


def test_tool_arguments_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}

    flat = flatten({"role": "assistant", "content": None, "tool_calls": [call]})

    assert flat["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_a_part_that_is_not_text_is_refused() -> None:
    with pytest.raises(api.BadRequest, match="image_url"):
        flatten({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


# -- events on the wire


def _two_steps(namespace: EngineNamespace) -> list[StepResult]:
    core = EngineCore(INSTANT, block_size=2, num_blocks=8, max_model_len=16)
    sequence = TokenSequence(range(5), Vocabulary(spoken=(9,)), 2, namespace)
    core.add_request(Request("r", sequence, 2, ignore_eos=True, namespace=namespace))
    return [core.step(), core.step()]


def test_a_stored_event_has_vllms_fields_and_the_salt_raw_in_the_first_block_only() -> None:
    steps = _two_steps(EngineNamespace("pepper"))

    decoded = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, events_of(step, 2, {})))) for step in steps
    ]

    keys = steps[0].stored[0].keys
    shared = {
        "type": "BlockStored",
        "block_size": 2,
        "lora_id": None,
        "lora_name": None,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    first = {
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "extra_keys": [["pepper"], None],
    }
    second = {
        "block_hashes": steps[1].stored[0].keys,
        "parent_block_hash": keys[1],
        "token_ids": [4, 9],
        "extra_keys": [None],
    }
    assert decoded == [[1.5, [shared | first], 0], [1.5, [shared | second], 0]]


def test_an_adapter_is_named_in_its_events() -> None:
    (event,) = events_of(_two_steps(EngineNamespace(adapter="tuned"))[0], 2, {"tuned": 3})

    assert msgspec.to_builtins(event) | {"block_hashes": 0} == {
        "type": "BlockStored",
        "block_hashes": 0,
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "block_size": 2,
        "lora_id": 3,
        "lora_name": "tuned",
        "medium": "GPU",
        "extra_keys": [["tuned"], ["tuned"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_a_batch_tells_the_clearing_then_removals_then_what_was_stored() -> None:
    step = _two_steps(EngineNamespace())[0]
    step.cleared, step.removed = True, [11, 11]

    kinds = [msgspec.to_builtins(event)["type"] for event in events_of(step, 2, {})]

    assert kinds == ["AllBlocksCleared", "BlockRemoved", "BlockRemoved", "BlockStored"]


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://*:5557", True),
        ("tcp://[::]:1", True),
        ("ipc:///x", True),
        ("inproc://x", True),
    ],
)
def test_a_plain_tcp_endpoint_is_connected_to_and_others_are_bound(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound


# -- configuration


def test_presets_get_slower_from_h100_to_a100_and_to_the_larger_model() -> None:
    for name in ("a100-8b", "h100-70b"):
        slower = PRESETS[name]
        assert slower.prefill_ms(2000, 4000) > H100_8B.prefill_ms(2000, 4000)
        assert slower.step_ms + slower.decode_ms(8, 20_000) > H100_8B.step_ms + H100_8B.decode_ms(8, 20_000)
    assert INSTANT.step_ms + INSTANT.prefill_ms(2000, 4000) + INSTANT.decode_ms(8, 20_000) == 0


def test_flags_reach_the_configuration() -> None:
    flags = "--model-dir D --served-model-name N --adapter a --adapter b --ignore-salt --profile instant --port 5"

    config = parse(flags.split())

    assert (config.model_dir, config.served_model_name, config.port) == (Path("D"), "N", 5)
    assert (config.adapters, config.ignore_salt, config.profile) == (("a", "b"), True, "instant")


def test_vllms_own_variable_switches_dev_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")

    assert parse(["--model-dir", "D", "--served-model-name", "N"]).dev_mode
