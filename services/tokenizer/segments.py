"""Where a rendered prompt can be cut so that its pieces, encoded one by one, give the ids of the whole.

Two kinds of cut. At special tokens: a tokenizer takes them out before it looks at the text around them. And, in a long
text, after a letter and before a space, newline or East Asian stop: pre-tokenizers of the GPT-2 family (GPT-2,
cl100k, o200k, Llama 3, Qwen, SmolLM) end a run of letters there whatever comes next, and BPE does not merge across what
they cut. Whether a given tokenizer is of that family is for `model.py` to establish; nothing here assumes it.

Cuts of a text depend on what lies before them alone, so texts with a common beginning have common pieces: a document
asked another question costs its last piece.

Owns: the cuts.   Must not know: ids of anything but special tokens, templates, tenants.   Units: characters."""

import re
from collections.abc import Iterable

import msgspec

# About 120 tokens, 0.1 ms to encode: what a changed last piece costs, against 3 us to hash and look up each piece.
# Where most prompts end pieces are finer: half of that for a short one, and a long one hardly has more of them.
PIECE_CHARS = 512
FINE_PIECE_CHARS = 256
FINE_UNTIL_CHARS = 2048

# Letters are what \p{L} is in those patterns, and the numerals that \d is not: a run of either ends here.
_CUT = re.compile(r"(?<=[^\W\d_])[ \n。，、]")


class Special(msgspec.Struct, frozen=True):
    """A special token: `lstrip` and `rstrip` take the white space beside it in; `single_word` needs none but word
    boundaries."""

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Segmenter:
    """Finds the special tokens of one tokenizer, and the cuts between them."""

    def __init__(self, specials: Iterable[Special], *, cuttable: bool) -> None:
        self._ids: dict[str, int] = {}
        patterns = []
        # The longest first, as tokenizers does (leftmost, longest).
        for special in sorted(specials, key=lambda special: len(special.content), reverse=True):
            self._ids[special.content] = special.id
            pattern = re.escape(special.content)
            if special.single_word:
                pattern = rf"(?<!\w){pattern}(?!\w)"
            before, after = (r"\s*" if strips else "" for strips in (special.lstrip, special.rstrip))
            patterns.append(before + pattern + after)
        self._pattern = re.compile("|".join(patterns) or r"(?!)")
        self.cuttable = cuttable

    def split(self, text: str) -> list[int | str]:
        """Ids of special tokens and the texts between them, in order; no empty text."""
        parts: list[int | str] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            found = match.group()
            token = self._ids.get(found)
            parts.append(self._ids[found.strip()] if token is None else token)
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    def cut(self, text: str, piece_chars: int = 0) -> list[str]:
        """The pieces of a text without special tokens, each at least `piece_chars` long but the last (0: as long as
        pays at its place)."""
        least = piece_chars or FINE_PIECE_CHARS
        if not self.cuttable or len(text) <= least:
            return [text]
        pieces = []
        start = 0
        while len(text) - start > least:
            match = _CUT.search(text, start + least)
            if match is None:
                break
            pieces.append(text[start : match.start()])
            start = match.start()
            if not piece_chars and start >= FINE_UNTIL_CHARS:
                least = PIECE_CHARS
        pieces.append(text[start:])
        return pieces


def has_cut(text: str) -> bool:
    """Whether a cut could fall inside `text` (an added token that contains one cannot be cut around)."""
    return _CUT.search(text) is not None
