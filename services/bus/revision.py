"""The revisions of a tokenizer directory, from the bytes of its files and nothing else.

Owns: which files and fields count.   Must not know: transformers, configs.
Source: DESIGN section 3 (a revision is attested by content); transformers reads a template from chat_template.jinja,
additional_chat_templates/*.jinja or tokenizer_config.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from .errors import ConfigInvalid

# What normalising would change in a prompt before it is rendered; part of the template's version.
NORMALISER = "off"
# What a tokenizer is made from where there is no tokenizer.json; the first of each row tells that there is one.
_VOCABULARIES = (
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
_ADDITIONS = ("added_tokens.json", "special_tokens_map.json")
# What a template can print besides the messages: transformers hands it the tokens by these names.
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Revisions(msgspec.Struct, frozen=True):
    """ "sha256:" and 64 hex digits each. `tokenizer` covers tokenizer.json, or the files that stand for it; `template`
    the chat templates, the special tokens they may print, and the normaliser."""

    tokenizer: str
    template: str


def of_directory(directory: Path) -> Revisions:
    """:raises ConfigInvalid: the directory has no tokenizer, or cannot be read."""
    try:
        config = _json(directory / "tokenizer_config.json")
        tokenizer = _tokenizer(directory, config)
        templates = {
            str(path.relative_to(directory)): path.read_text("utf-8")
            for path in sorted(
                [*directory.glob("chat_template.*"), *directory.glob("additional_chat_templates/*.jinja")]
            )
        }
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigInvalid(
            f"cannot be read ({exc}).", field=str(directory), remedy="Give a local Hugging Face tokenizer directory."
        ) from exc
    described = {
        "normaliser": NORMALISER,
        "files": templates,
        "chat_template": config.get("chat_template"),
        "tokens": {role: _content(config.get(role)) for role in _TOKEN_ROLES},
    }
    return Revisions(
        tokenizer=_digest(tokenizer),
        template=_digest(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()),
    )


def _tokenizer(directory: Path, config: dict[str, Any]) -> bytes:
    """What the ids come from: tokenizer.json says it all; a vocabulary alone does with the class that reads it."""
    described = directory / "tokenizer.json"
    names = next((row for row in _VOCABULARIES if (directory / row[0]).exists()), None)
    if names is None or described.exists():
        return described.read_bytes()
    files = {name: _digest((directory / name).read_bytes()) for name in names}
    files |= {name: _digest((directory / name).read_bytes()) for name in _ADDITIONS if (directory / name).exists()}
    settings = {name: value for name, value in config.items() if name != "chat_template"}
    model_type = _json(directory / "config.json").get("model_type")
    return json.dumps([files, settings, model_type], sort_keys=True, separators=(",", ":")).encode()


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as exc:
        raise ConfigInvalid(f"is not JSON ({exc}).", field=str(path)) from exc
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
