"""What to ask an engine so that its prefill times can be told beforehand, and what its answers say.

    prefill_ms(n uncached of L) = fixed_ms + token_ms*n + attention_ms*n*(L - n/2)

Noise only adds: of several measurements of one point the least is taken. No coefficient can be below 0; of all that
hold, those with the least relative error are chosen, so that short prompts count as much as long ones.

Owns: the plan, the fit, the words.   Must not know: HTTP, clocks.   Units: ms, tokens.   Source: DESIGN 6."""

import itertools
from collections.abc import Sequence

import msgspec

from ..bus.config import MeasuredSection
from ..bus.errors import ConfigInvalid

REPEATS = 3
# Shares of the longest prompt, as divisors.
_LENGTHS = (16, 8, 4, 2, 1)
# The rest of a prompt whose beginning is cached: long enough to be measured, short enough to tell attention apart.
_REST = 8
DECODED = 33
"""Tokens of the answers by which decoding is measured; their first one is the prefill's."""
_LEAST_MS = 1e-3
# Below this there is nothing to be told beforehand, and what is learned starts from nowhere.
_LEAST_FIXED_MS = 0.01


class Probe(msgspec.Struct, frozen=True):
    """A prompt of so many tokens; `after`: that many of its first ones were computed before, under the same salt."""

    prompt_tokens: int
    after: int = 0
    answer_tokens: int = 1


class Sample(msgspec.Struct, frozen=True):
    """What one probe took: its prefill of `computed` tokens, and each further token of its answer (0: it had none)."""

    prompt_tokens: int
    computed: int
    prefill_ms: float
    step_ms: float = 0.0


def plan(block_size: int, max_model_len: int, most_tokens: int) -> list[Probe]:
    """Which probes, in order; each with a salt of its own, but for those that come `after` another: they follow it.

    About 7 times `most_tokens` are computed in all.

    :raises ConfigInvalid: the prompts would be too short to tell anything."""
    longest = min(most_tokens, max_model_len - DECODED - 1) // block_size * block_size + 1
    if longest < _LENGTHS[0] * block_size:
        raise ConfigInvalid(
            f"prompts of {longest} tokens are too short to tell lengths apart in blocks of {block_size}.",
            field="--most-tokens",
            remedy=f"Allow at least {_LENGTHS[0] * block_size}.",
        )
    probes: list[Probe] = []
    for _ in range(REPEATS):
        for divisor in _LENGTHS:
            answer = DECODED if divisor in (_LENGTHS[0], _LENGTHS[-1]) else 1
            probes.append(Probe(longest // divisor, answer_tokens=answer))
        # The longest has just been computed.
        probes.append(Probe(longest, after=longest - longest // _REST))
    return probes


class Measured(msgspec.Struct, frozen=True):
    """What the config gets, and what a step takes that decodes one answer (0: not measured)."""

    section: MeasuredSection
    decode_step_ms: float


def fit(samples: Sequence[Sample], *, block_size: int, kv_tokens: int) -> Measured:
    """:raises ConfigInvalid: nothing was measured that could be told beforehand."""
    least: dict[tuple[int, int], float] = {}
    for sample in samples:
        at = sample.prompt_tokens, sample.computed
        least[at] = min(sample.prefill_ms, least.get(at, sample.prefill_ms))
    points = [(prompt, computed, max(_LEAST_MS, ms)) for (prompt, computed), ms in sorted(least.items())]
    if len(points) < 3 or max(ms for _, _, ms in points) <= _LEAST_MS:
        raise ConfigInvalid("The engine computes in no time: there is nothing to be measured.")
    fixed_ms, token_ms, attention_ms = _least_error(points)
    step_ms, context_token_ms = _decode(samples)
    section = MeasuredSection(
        fixed_ms=max(_LEAST_FIXED_MS, fixed_ms),
        token_ms=token_ms,
        attention_ms=attention_ms,
        decode_context_token_ms=context_token_ms,
        block_size=block_size,
        kv_tokens=kv_tokens,
    )
    return Measured(section, step_ms)


def _decode(samples: Sequence[Sample]) -> tuple[float, float]:
    """What a step takes that decodes one answer, and what each token of its context adds."""
    least: dict[int, float] = {}
    for sample in samples:
        if sample.step_ms > 0.0:
            least[sample.prompt_tokens] = min(sample.step_ms, least.get(sample.prompt_tokens, sample.step_ms))
    if not least:
        return 0.0, 0.0
    short, long = min(least), max(least)
    added = max(0.0, (least[long] - least[short]) / (long - short)) if long > short else 0.0
    return max(0.0, least[short] - added * short), added


def _least_error(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """The coefficients, none below 0: of all subsets of the terms the one that fits best with such."""
    longest = max(prompt for prompt, _, _ in points)
    # Features near 1, weighed by what was measured: the error that counts is the relative one.
    rows = [
        (1.0 / ms, computed / longest / ms, computed * (prompt - computed / 2) / longest**2 / ms)
        for prompt, computed, ms in points
    ]
    best: tuple[float, list[float]] | None = None
    for count in (3, 2, 1):
        for terms in itertools.combinations(range(3), count):
            found = _solved([[row[term] for term in terms] for row in rows])
            if found is None or min(found) < 0.0:
                continue
            full = [0.0, 0.0, 0.0]
            for term, value in zip(terms, found, strict=True):
                full[term] = value
            error = sum((sum(f * x for f, x in zip(full, row, strict=True)) - 1.0) ** 2 for row in rows)
            if best is None or error < best[0] - 1e-12:
                best = error, full
    assert best is not None, "one term alone is never below 0"
    fixed_ms, token_ms, attention_ms = best[1]
    return fixed_ms, token_ms / longest, attention_ms / longest**2


def _solved(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The least squares of `rows` times the unknowns being 1; None if they do not tell the unknowns apart."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] for row in rows) for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-15 * abs(matrix[0][0] or 1.0):
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        right[column], right[pivot] = right[pivot], right[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            right[row] -= factor * right[column]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(matrix[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (right[row] - rest) / matrix[row][row]
    return found


def sentence(measured: Measured) -> str:
    """What was learned, for people."""
    section = measured.section
    return (
        f"prefill of n tokens of a prompt of L: {section.fixed_ms:.2f} ms + {section.token_ms:.4g}*n + "
        f"{section.attention_ms:.3g}*n*(L - n/2); a decode step {measured.decode_step_ms:.2f} ms; "
        f"{section.kv_tokens or 'unknown'} tokens of KV in blocks of {section.block_size}"
    )


_NOTE = "# A step that decodes one answer takes "


def written_into(text: str, model: str, measured: Measured) -> str:
    """The config's text with what was measured, in place of what was before; all else stays as it is."""
    header = f"[models.{_key(model)}.measured]"
    kept: list[str] = []
    is_ours = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            is_ours = line.strip() == header
        # Somebody's comment below ours may be meant for what follows.
        is_others = line.lstrip().startswith("#") and not line.startswith(_NOTE)
        if not is_ours or is_others:
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    lines = [f"{name} = {value!r}" for name, value in msgspec.structs.asdict(measured.section).items()]
    return "\n".join([*kept, "", header, f"{_NOTE}{measured.decode_step_ms:.2f} ms.", *lines]) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else msgspec.json.encode(name).decode()
