"""Stop strings in a stream of text pieces: what may be shown already, and whether a stop has been reached.

Owns: the text held back because it might be the beginning of a stop.   Must not know: tokens, requests.
Difference from vLLM: it holds back as many characters as the longest stop has, less one; here only what really could
begin one. The whole text is the same."""

from collections.abc import Sequence


class StopScanner:
    """Feed it pieces; `hit` is the stop string once one is complete, and nothing after its beginning is ever shown."""

    __slots__ = ("_held", "_include", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now."""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[: at + len(self.hit)] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held when the stream ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
