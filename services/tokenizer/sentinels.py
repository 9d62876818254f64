"""Special tokens that a client wrote are text, and stay text.

A template writes its special tokens and the client's strings into one text; afterwards nobody can tell whose
`<|im_end|>` is whose. So before rendering, the first character of every special token in the client's strings is
replaced by a sentinel: one private-use character, which no template looks for, no filter strips and no JSON encoder
escapes by default. After rendering and splitting at the special tokens (all of them the template's now), sentinels
become what they stood for.

One character for one: lengths, slices and `split` do what they would have done. A sentinel is chosen per request among
characters that none of its strings contains, so no string can forge one. The start of a special token at the end of a
string is treated as a whole one: two strings side by side cannot make one either. Known limit: a template that deletes
characters *inside* a client's string can still put the halves of one together.

Owns: sentinels.   Must not know: templates, tokenizers.   Units: characters."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..bus.errors import BadRequest

# The private-use area of the basic plane: never assigned, no case, no white space (Unicode 15, section 23.5).
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF
_ESCAPE = re.compile(r"\\u([eEfF][0-9a-fA-F]{3})")


class Sentinels:
    """What stands for what in one request."""

    __slots__ = ("_stands_for",)

    def __init__(self, stands_for: dict[str, str]) -> None:
        self._stands_for = stands_for

    def restore(self, text: str) -> str:
        """`text` with what its sentinels stand for, also where a template JSON-encoded them to ASCII."""
        for sentinel, character in self._stands_for.items():
            text = text.replace(sentinel, character)
            escaped = _escaped(sentinel)
            if escaped in text:
                text = text.replace(escaped, character)
        return text


class Shield:
    """Finds one tokenizer's special tokens in clients' strings. `reserved` is the template: its characters are never
    sentinels."""

    def __init__(self, specials: Iterable[str], reserved: str = "") -> None:
        contents = sorted(specials, key=len, reverse=True)
        self._firsts = "".join(sorted({content[0] for content in contents}))
        self._any_first = re.compile(f"[{re.escape(self._firsts)}]" if self._firsts else r"(?!)")
        self._pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._beginnings = frozenset(content[:end] for content in contents for end in range(1, len(content)))
        self._tail_chars = max((len(content) for content in contents), default=1) - 1
        self._reserved = reserved

    def cover(self, value: Any) -> tuple[Any, Sentinels | None]:
        """`value` (JSON) with sentinels in its strings and keys, and what they stand for; itself and None if it has no
        special tokens.

        :raises BadRequest: it uses up the private-use characters."""
        if not self._is_risky(value):
            return value, None
        characters = self._unused(value)
        table = dict(zip(self._firsts, characters, strict=True))
        return _mapped(value, lambda text: self._cover_text(text, table)), Sentinels(
            {sentinel: character for character, sentinel in table.items()}
        )

    def _is_risky(self, value: Any) -> bool:
        """Whether a string in `value` holds a special token, or may end in the beginning of one."""
        if isinstance(value, str):
            return self._any_first.search(value) is not None and (
                self._pattern.search(value) is not None or self._beginning_at_end(value) is not None
            )
        if isinstance(value, dict):
            return any(map(self._is_risky, value)) or any(map(self._is_risky, value.values()))
        if isinstance(value, list):
            return any(map(self._is_risky, value))
        return False

    def _beginning_at_end(self, text: str) -> int | None:
        """Where the longest start of a special token that `text` ends with begins."""
        for start in range(max(0, len(text) - self._tail_chars), len(text)):
            if text[start] in self._firsts and text[start:] in self._beginnings:
                return start
        return None

    def _cover_text(self, text: str, table: dict[str, str]) -> str:
        found = 1
        while found:  # again for those that overlapped one just covered
            text, found = self._pattern.subn(lambda match: table[match.group()[0]] + match.group()[1:], text)
        while (start := self._beginning_at_end(text)) is not None:
            text = text[:start] + table[text[start]] + text[start + 1 :]
        return text

    def _unused(self, value: Any) -> list[str]:
        used = set()
        for text in (*strings(value), self._reserved):
            used.update(_PRIVATE.findall(text))
            used.update(chr(int(code, 16)) for code in _ESCAPE.findall(text))
        free = [chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(code) not in used]
        if len(free) < len(self._firsts):
            raise BadRequest("The texts use every private-use character.", remedy="Leave out U+E000 to U+F8FF.")
        return free[: len(self._firsts)]


def _escaped(character: str) -> str:
    """As json.dumps(ensure_ascii=True) writes it."""
    return f"\\u{ord(character):04x}"


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value
