"""Text and tokens of an answer in step, so that whoever has some of it knows after which token to go on.

An engine sends a token before its text: bytes of a character that is not complete, and characters that may begin a
stop string, are held back. Here text waits for the next place at which all tokens so far say no more and no less than
all text so far; what is passed on then carries exactly its tokens.

    hold-back   vLLM withholds as many characters as the longest stop has, less one, until the end: when text comes, so
                many more have been said
    a stop      begins after what was shown, so an engine that goes on from there finds it

Owns: what waits, of one answer of one choice.   Must not know: NATS, other forms of answers.   Units: characters.
Source: vLLM `v1/engine/detokenizer.py` (get_next_output_text, check_stop_strings)."""

from collections import deque
from collections.abc import Mapping

from .chunks import Piece


def held_back_chars(params: Mapping[str, object]) -> int:
    """How many characters the engine is always ahead of what it shows."""
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max((len(text) for text in stops if isinstance(text, str)), default=1) - 1


class InStep:
    """Feed it pieces in order; what comes out can be resumed after each of them."""

    def __init__(self, held_back: int) -> None:
        self._held_back = held_back
        self._text = ""
        """What the engine has shown, and is not passed on."""
        self._passed_on = 0
        """How many characters were."""
        self._tokens: list[int] = []
        """What came since the last place."""
        self._places: deque[tuple[int, list[int]]] = deque()
        """How much text there is up to each place, and the tokens since the one before."""

    def __repr__(self) -> str:
        return f"<InStep {len(self._text)} characters, {len(self._places)} places>"

    def feed(self, piece: Piece) -> Piece | None:
        self._tokens += piece.token_ids
        if piece.finish_reason is not None:
            # The end shows all.
            tokens = [token for _, since in self._places for token in since] + self._tokens
            return Piece(
                piece.index,
                self._text + piece.text,
                piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=tokens,
            )
        if not piece.text:
            return None
        self._text += piece.text
        shown = self._passed_on + len(self._text)
        self._places.append((shown + self._held_back, self._tokens))
        self._tokens = []
        return self._up_to(shown, piece.index)

    def _up_to(self, shown: int, index: int) -> Piece | None:
        tokens: list[int] = []
        at = self._passed_on
        while self._places and self._places[0][0] <= shown:
            at, since = self._places.popleft()
            tokens += since
        if not tokens:
            return None
        length = at - self._passed_on
        text, self._text = self._text[:length], self._text[length:]
        self._passed_on = at
        return Piece(index, text, token_ids=tokens)
