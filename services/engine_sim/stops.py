"""Stop strings in a stream of text pieces: what may be shown already, and whether a stop has been reached.

As vLLM does, it holds back as many characters as the longest stop has, less one, whatever they are, and ends with the
stop that is complete first.

Owns: the text held back.   Must not know: tokens, requests.   Source: vLLM `v1/engine/detokenizer.py`."""

from collections.abc import Sequence


class StopScanner:
    """Feed it pieces; `hit` is the stop string once one is complete, and nothing after its beginning is ever shown."""

    __slots__ = ("_held", "_include", "_keep", "_stops", "_tail", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._keep = 0 if include else max(len(stop) for stop in stops) - 1
        self._held = ""
        self._tail = ""
        """What was shown last, and may begin a stop: only where stops are shown, too."""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now."""
        text = self._tail + self._held + piece
        found = [(at + len(stop), number) for number, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            end, number = min(found)
            self.hit = self._stops[number]
            self._held = ""
            return text[len(self._tail) : end if self._include else end - len(self.hit)]
        shown = text[len(self._tail) : max(len(self._tail), len(text) - self._keep)]
        self._held = text[len(self._tail) + len(shown) :]
        if self._include:
            self._tail = text[max(0, len(text) - max(len(stop) for stop in self._stops) + 1) :]
        return shown

    def flush(self) -> str:
        """What is still held when the stream ends for another reason."""
        held, self._held = self._held, ""
        return held
