"""Made-up traffic, one function a shape. Arrivals are Poisson unless said.

Owns: the shapes.   Must not know: workers, policies.   Units: as workload.py; rates in requests a second."""

from bisect import bisect_right
from collections.abc import Callable, Iterator

from .chance import Chance
from .workload import Arrival, Segment, Workload, keys_of, seed_of

TENANT = "acme"
_SEED = seed_of(TENANT)


class _Names:
    """Names of texts that are used nowhere else in a workload."""

    def __init__(self) -> None:
        self._next = 1 << 32

    def new(self) -> int:
        self._next += 1
        return self._next


def _arrival(at: float, segments: list[Segment], output_tokens: int, block_size: int, prefix_class: str) -> Arrival:
    return Arrival(
        at,
        keys_of(segments, block_size, _SEED),
        sum(segment.tokens for segment in segments),
        output_tokens,
        TENANT,
        prefix_class,
    )


def _poisson(chance: Chance, rate: float, count: int) -> Iterator[float]:
    at = 0.0
    for _ in range(count):
        at += chance.exponential(1.0 / rate)
        yield at


def _mixed(*parts: list[Arrival], block_size: int) -> Workload:
    return Workload(sorted((one for part in parts for one in part), key=lambda one: one.at), block_size)


def never_repeating(
    *, rate: float, count: int, prompt_tokens: int = 4000, output_tokens: int = 100, block_size: int = 32, seed: int = 0
) -> Workload:
    """No prompt has anything of another. Lengths are spread evenly from half to one and a half times the mean."""
    chance, names = Chance(seed, "never repeating"), _Names()
    arrivals = [
        _arrival(
            at,
            [Segment(names.new(), _around(chance, prompt_tokens))],
            _around(chance, output_tokens),
            block_size,
            "document",
        )
        for at in _poisson(chance, rate, count)
    ]
    return _mixed(arrivals, block_size=block_size)


def zipf_prefixes(
    *,
    rate: float,
    count: int,
    prefixes: int = 100,
    exponent: float = 1.2,
    prefix_tokens: int = 8000,
    question_tokens: int = 200,
    output_tokens: int = 100,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """Documents, the n-th most wanted 1/n**exponent as often as the first, each request with a question of its own."""
    chance, names = Chance(seed, "zipf"), _Names()
    pick = _weighted(chance, [1.0 / n**exponent for n in range(1, prefixes + 1)])
    arrivals = [
        _arrival(
            at,
            [Segment(1 + pick(), prefix_tokens), Segment(names.new(), _around(chance, question_tokens))],
            _around(chance, output_tokens),
            block_size,
            "document",
        )
        for at in _poisson(chance, rate, count)
    ]
    return _mixed(arrivals, block_size=block_size)


def hot_and_cold(
    *,
    hot_rate: float,
    cold_rate: float,
    seconds: float,
    hot_prefixes: int = 1,
    hot_tokens: int = 8000,
    question_tokens: int = 200,
    cold_tokens: int = 4000,
    output_tokens: int = 100,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """A steady stream of questions to a few documents (class `document`), and rarely something nobody ever asked
    (class `cold`)."""
    chance, rare, names = Chance(seed, "hot"), Chance(seed, "cold"), _Names()
    hot = [
        _arrival(
            at,
            [
                Segment(1 + chance.below(hot_prefixes), hot_tokens),
                Segment(names.new(), _around(chance, question_tokens)),
            ],
            _around(chance, output_tokens),
            block_size,
            "document",
        )
        for at in _poisson(chance, hot_rate, int(hot_rate * seconds))
    ]
    cold = [
        _arrival(at, [Segment(names.new(), cold_tokens)], _around(rare, output_tokens), block_size, "cold")
        for at in _poisson(rare, cold_rate, int(cold_rate * seconds))
    ]
    return _mixed(hot, cold, block_size=block_size)


def sessions(
    *,
    sessions: int,
    turns: int,
    seconds: float,
    think_s: float = 10.0,
    system_tokens: int = 2000,
    turn_tokens: int = 300,
    output_tokens: int = 150,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """Conversations that all start with one system prompt and come back with all that was said before. They begin
    evenly spread over `seconds`."""
    chance, names = Chance(seed, "sessions"), _Names()
    arrivals = []
    for _ in range(sessions):
        at = chance.uniform() * seconds
        said = [Segment(1, system_tokens)]
        for _ in range(turns):
            said.append(Segment(names.new(), _around(chance, turn_tokens)))
            output = _around(chance, output_tokens)
            arrivals.append(_arrival(at, said, output, block_size, "session"))
            # What the engine said is rendered anew, so its KV is computed again with the next turn.
            said = [*said, Segment(names.new(), output)]
            at += 1.0 + chance.exponential(think_s)
    return _mixed(arrivals, block_size=block_size)


def burst(
    *,
    count: int,
    prompt_tokens: int = 8000,
    output_tokens: int = 50,
    spread_s: float = 0.0,
    at: float = 0.0,
    block_size: int = 32,
) -> Workload:
    """The same prompt `count` times, at once or evenly over `spread_s`."""
    segments = [Segment(1, prompt_tokens)]
    return Workload(
        [
            _arrival(at + spread_s * number / count, segments, output_tokens, block_size, "document")
            for number in range(count)
        ],
        block_size,
    )


def long_documents(
    *,
    rate: float,
    count: int = 200,
    documents: int = 4,
    document_tokens: int = 40_000,
    question_tokens: int = 200,
    output_tokens: int = 100,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """`count` questions to one long document (class `first`), then as many to `documents` others, evenly drawn (class
    `others`)."""
    chance, names = Chance(seed, "long documents"), _Names()
    arrivals = []
    for number, at in enumerate(_poisson(chance, rate, 2 * count)):
        is_first = number < count
        asked = [
            Segment(1 if is_first else 2 + chance.below(documents), document_tokens),
            Segment(names.new(), _around(chance, question_tokens)),
        ]
        output = _around(chance, output_tokens)
        arrivals.append(_arrival(at, asked, output, block_size, "first" if is_first else "others"))
    return _mixed(arrivals, block_size=block_size)


def hot_worker(
    *,
    rate: float,
    seconds: float,
    documents: int = 6,
    root_tokens: int = 12_000,
    document_tokens: int = 4000,
    question_tokens: int = 200,
    output_tokens: int = 100,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """Documents with one long beginning, which gather on the worker that has it while they are asked for one by one
    (class `gathering`), and then are all wanted at once (class `hot`)."""
    chance, names = Chance(seed, "hot worker"), _Names()

    def asked(at: float, document: int, prefix_class: str) -> Arrival:
        said = [
            Segment(1, root_tokens),
            Segment(2 + document, document_tokens),
            Segment(names.new(), _around(chance, question_tokens)),
        ]
        return _arrival(at, said, _around(chance, output_tokens), block_size, prefix_class)

    gathering = [asked(2.0 * document, document, "gathering") for document in range(documents)]
    begins_at = 2.0 * documents + 5.0
    hot = [asked(begins_at + at, chance.below(documents), "hot") for at in _poisson(chance, rate, int(rate * seconds))]
    return _mixed(gathering, hot, block_size=block_size)


def asked_again(
    *,
    documents: int,
    gap_s: float = 10.0,
    document_tokens: int = 16_000,
    busy_tokens: int = 0,
    question_tokens: int = 200,
    output_tokens: int = 50,
    block_size: int = 32,
    seed: int = 0,
) -> Workload:
    """A document every `gap_s` (class `first`), and 5 s later a question to it (class `again`): a local hit. With
    `busy_tokens` its holder is busy just then with so much new text after the same document (class `busy`): what is
    held is held elsewhere, to be waited for, computed again, or pulled (a remote hit)."""
    chance, names = Chance(seed, "asked again"), _Names()
    arrivals = []
    for number in range(documents):
        at, document = number * gap_s, Segment(names.new(), document_tokens)
        arrivals.append(_arrival(at, [document], output_tokens, block_size, "first"))
        if busy_tokens:
            long_one = [document, Segment(names.new(), busy_tokens)]
            arrivals.append(_arrival(at + 5.0, long_one, output_tokens, block_size, "busy"))
        question = Segment(names.new(), _around(chance, question_tokens))
        arrivals.append(_arrival(at + 5.05, [document, question], output_tokens, block_size, "again"))
    return _mixed(arrivals, block_size=block_size)


def _around(chance: Chance, mean: int) -> int:
    """Evenly from half of it to one and a half times it."""
    return max(1, mean // 2 + chance.below(mean + 1))


def _weighted(chance: Chance, weights: list[float]) -> Callable[[], int]:
    """Draws a place in `weights`, each as often as its weight says."""
    total = sum(weights)
    sums, so_far = [], 0.0
    for weight in weights:
        so_far += weight / total
        sums.append(so_far)

    def draw() -> int:
        return min(bisect_right(sums, chance.uniform()), len(sums) - 1)

    return draw
