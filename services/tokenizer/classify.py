"""What kind of prefix a request has, and how long its answer will probably be.

    rag        documents are attached to it
    session    an assistant has spoken before
    document   a single turn around one long text
    system     all others: what they share is their system prompt or their template

Owns: that rule and the history of answer lengths.   Must not know: tenants, models' names, clocks.
Units: tokens, characters.   Source: DESIGN section 4.3."""

from .intake import Request

# About 500 tokens: longer than most system prompts' questions, shorter than most documents.
LONG_TEXT_CHARS = 2000
# A class's estimate before anything is known of it, and how many answers that is worth.
PRIOR_TOKENS = 256.0
PRIOR_WEIGHT = 8
# Answers beyond this many only move the mean as the last of this many do.
MEMORY = 256


def prefix_class(request: Request, hint: str = "") -> str:
    """`system`, `document`, `session` or `rag`; the caller's hint wins."""
    if hint:
        return hint
    if request.chat is None:
        return "document" if len(request.prompt) > LONG_TEXT_CHARS else "system"
    if request.chat.documents:
        return "rag"
    if any(message.role == "assistant" for message in request.chat.messages):
        return "session"
    parts = (part for message in request.chat.messages for part in message.parts)
    longest = max((len(part) for part in parts if isinstance(part, str)), default=0)
    return "document" if longest > LONG_TEXT_CHARS else "system"


class AnswerLengths:
    """Mean answer length per class, of the answers seen so far; the same answers in the same order give the same
    estimates."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def observe(self, prefix_class: str, output_tokens: int) -> None:
        """An answer of this class ended by itself or by its limit after `output_tokens`."""
        seen = min(self._seen.get(prefix_class, PRIOR_WEIGHT) + 1, MEMORY)
        mean = self._mean.get(prefix_class, PRIOR_TOKENS)
        self._seen[prefix_class] = seen
        self._mean[prefix_class] = mean + (output_tokens - mean) / seen

    def estimate(self, prefix_class: str, max_tokens: int) -> int:
        """Tokens of the next answer of this class: 1 to `max_tokens`."""
        return max(1, min(max_tokens, round(self._mean.get(prefix_class, PRIOR_TOKENS))))
