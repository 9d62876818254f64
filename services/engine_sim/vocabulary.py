"""What tokens look like as text, and which of them the simulated model speaks.

A spoken token is a space and letters, whole in the vocabulary and re-encoded to itself: the text of an output, sent
back in the next turn of a chat, becomes the same tokens again, as a real model's words nearly always do. A tokenizer
with too few such tokens falls back to every token whose text alone is valid.

Owns: the tokenizer, the table of spoken texts.   Must not know: HTTP, chat templates."""

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from .sequence import Vocabulary

MANY_ENOUGH = 64
CANDIDATES = 16_384  # the most frequent tokens come first in a BPE vocabulary; the rest would only slow the start
_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are not UTF-8 by themselves


class TokenTexts:
    """A model directory's tokenizer with the texts of the tokens that can be generated."""

    def __init__(self, tokenizer: Tokenizer, eos: int | None, eos_one_in: int = 0) -> None:
        if eos_one_in < 0:
            raise ValueError(f"eos_one_in is a count of tokens, not {eos_one_in}")
        self.tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        texts = _texts(tokenizer)
        spoken = _stable_words(tokenizer, texts)
        if len(spoken) < MANY_ENOUGH:
            spoken = list(texts)
        if not spoken:
            raise ValueError("the tokenizer has no token whose text alone is valid")
        self.vocabulary = Vocabulary(spoken=tuple(spoken), eos=eos, eos_one_in=eos_one_in)
        self._texts = {token: texts[token] for token in spoken}

    def text(self, token: int) -> str:
        """Text of a generated token; end-of-sequence has none."""
        return self._texts.get(token, "")

    def name(self, token: int) -> str:
        """What a token is called where tokens are told one by one: its text, or that of a special token."""
        return self._texts.get(token) or self.tokenizer.id_to_token(token) or ""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def load(model_dir: Path, eos_one_in: int = 0) -> TokenTexts:
    """Read a local Hugging Face tokenizer directory.

    :raises FileNotFoundError: there is neither `tokenizer.json` nor a vocabulary that transformers can read."""
    path = model_dir / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else _made_by_transformers(model_dir)
    return TokenTexts(tokenizer, _eos(tokenizer, model_dir / "tokenizer_config.json"), eos_one_in)


def _made_by_transformers(model_dir: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds; only a vocabulary without tokenizer.json needs it

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True).backend_tokenizer
    except (ValueError, OSError, ImportError) as error:
        raise FileNotFoundError(f"no tokenizer.json in {model_dir}, nor a vocabulary to make one of") from error
    return tokenizer


def _eos(tokenizer: Tokenizer, config_path: Path) -> int | None:
    if not config_path.is_file():
        return None
    name = msgspec.json.decode(config_path.read_bytes()).get("eos_token")
    if isinstance(name, dict):  # an AddedToken written out
        name = name.get("content")
    return tokenizer.token_to_id(name) if isinstance(name, str) else None


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Text of each ordinary token that is valid alone. It is decoded behind another token, since some decoders strip a
    leading space from the first."""
    special = set(tokenizer.get_added_tokens_decoder())
    ids = [i for i in range(min(tokenizer.get_vocab_size(with_added_tokens=False), CANDIDATES)) if i not in special]
    decoded = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    anchor = next((i for i, text in zip(ids, decoded, strict=True) if text.isascii() and text.isalpha()), None)
    if anchor is None:
        return {i: text for i, text in zip(ids, decoded, strict=True) if text and _REPLACEMENT not in text}
    head = tokenizer.decode([anchor], skip_special_tokens=False)
    pairs = tokenizer.decode_batch([[anchor, i] for i in ids], skip_special_tokens=False)
    return {
        i: pair[len(head) :]
        for i, pair in zip(ids, pairs, strict=True)
        if len(pair) > len(head) and pair.startswith(head) and _REPLACEMENT not in pair
    }


def _stable_words(tokenizer: Tokenizer, texts: dict[int, str]) -> list[int]:
    words = [i for i, text in texts.items() if text[0] == " " and text[1:].isalpha()]
    encodings = tokenizer.encode_batch([texts[i] for i in words], add_special_tokens=False)
    return [i for i, encoding in zip(words, encodings, strict=True) if encoding.ids == [i]]
