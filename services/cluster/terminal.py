"""What is printed for people: text as it is, whatever stands in it.

Labels, names and errors come out of records and heartbeats, where a client, an engine or a bridge has put them. To a
terminal an escape character begins a command, a brackets' word is markup to rich, and a mark that turns the direction
of reading hides what stands behind it. None of them means anything here.

Owns: the console of all commands.   Must not know: what is shown."""

import re
from typing import Any

from rich.console import Console
from rich.text import Text

# Longer than any line of ours.
MOST_SHOWN = 8192
# C0 and C1 but for the line feed, which our own texts have; separators and what turns the direction of reading.
_NOT_TEXT = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text with `\ufffd` for what is not to be shown, cut where it is absurdly long."""
    return _NOT_TEXT.sub("\ufffd", text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}...")


class Terminal(Console):
    """A console to which each string is plain text, alone or in a table's cell. `Text` is shown as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)
