"""Made-up log probabilities, in the forms that vLLM gives them.

The token that was chosen is the most probable one; the alternatives are the words that follow it in the vocabulary.

Owns: the numbers, both forms.   Must not know: requests, HTTP.   Source: vLLM `_create_completion_logprobs`,
`_create_chat_logprobs` (a chosen token that is among the most probable is told once)."""

from collections.abc import Callable, Sequence
from typing import Any

MOST = 20
"""vLLM's `--max-logprobs`."""
_CHOSEN = -0.25


def step(token: int, spoken: Sequence[int], alternatives: int) -> list[tuple[int, float]]:
    """Tokens with their log probabilities, the chosen one first: as many as asked for, and at least that one."""
    at = token % len(spoken)
    others = [spoken[(at + number) % len(spoken)] for number in range(alternatives + 1)]
    others = [other for other in others if other != token][: max(0, alternatives - 1)]
    return [(token, _CHOSEN), *((other, _CHOSEN - 1 - number) for number, other in enumerate(others))]


def of_completions(
    tokens: Sequence[int], steps: Sequence[list[tuple[int, float]]], text: Callable[[int], str], offset: int
) -> dict[str, Any]:
    """`offset`: characters of the tokens before."""
    names = [text(token) for token in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": [ranked[0][1] for ranked in steps],
        "tokens": names,
        "top_logprobs": [{text(token): logprob for token, logprob in ranked} for ranked in steps],
    }


def of_chat(
    tokens: Sequence[int], steps: Sequence[list[tuple[int, float]]], text: Callable[[int], str], alternatives: int
) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = text(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    content = [
        entry(token, ranked[0][1]) | {"top_logprobs": [entry(*one) for one in ranked[:alternatives]]}
        for token, ranked in zip(tokens, steps, strict=True)
    ]
    return {"content": content}
