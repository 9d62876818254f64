"""The core's laws, as properties over random workloads, and vLLM's behaviour, case by case."""

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.engine_sim.core import DoesNotFit, EngineCore, StepResult
from prefixbus.engine_sim.lifetimes import WatchedPool
from prefixbus.engine_sim.profile import H100_8B
from prefixbus.engine_sim.request import Event, Request, State
from prefixbus.engine_sim.sequence import EngineNamespace, TokenSequence, VirtualSequence, Vocabulary

BLOCK = 4
Plan = tuple[list[int], int, EngineNamespace, int, int | None, bool]
WORDS = Vocabulary(spoken=tuple(range(100, 200)), eos=7, eos_one_in=5)


def make_core(
    num_blocks: int = 12, step_tokens: int = 16, max_num_seqs: int = 3, max_model_len: int = 40
) -> EngineCore:
    profile = msgspec.structs.replace(H100_8B, step_tokens=step_tokens, max_num_seqs=max_num_seqs)
    return EngineCore(profile, block_size=BLOCK, num_blocks=num_blocks, max_model_len=max_model_len)


def make_request(
    ids: Iterable[int],
    max_tokens: int = 1,
    *,
    name: str = "r",
    namespace: EngineNamespace | None = None,
    ignore_eos: bool = True,
    ignore_salt: bool = False,
) -> Request:
    namespace = namespace or EngineNamespace()
    sequence = TokenSequence(ids, WORDS, BLOCK, namespace, ignore_salt=ignore_salt)
    return Request(name, sequence, max_tokens, ignore_eos=ignore_eos, namespace=namespace)


def finish_all(core: EngineCore) -> list[StepResult]:
    results = []
    while core.has_work:
        results.append(core.step())
        assert len(results) < 5000, f"no progress: {core!r}"
    return results


def run_alone(core: EngineCore, request: Request) -> list[StepResult]:
    core.add_request(request)
    return finish_all(core)


def tokens_of(results: Iterable[StepResult], request: Request) -> list[int]:
    return [token for result in results for who, token in result.emitted if who is request]


class CacheSeenFromOutside:
    """What a subscriber of the events believes, with one reference for each physical copy."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()

    def apply(self, result: StepResult) -> None:
        if result.cleared:
            self.copies.clear()
        for key in result.removed:
            self.copies[key] -= 1
            assert self.copies[key] >= 0, "removed more often than stored"
        for stored in result.stored:
            assert stored.parent is None or self.copies[stored.parent] > 0, "a block came without its parent"
            self.copies.update(stored.keys)


# -- properties over random workloads

prompts = st.builds(
    # Few starts and few continuations: the same prefixes come back.
    lambda start, shared, tail, own: [1000 + start] * shared + [2000 + tail] * own,
    st.integers(0, 1),
    st.integers(0, 20),
    st.integers(0, 2),
    st.integers(1, 12),
)
namespaces = st.builds(
    EngineNamespace, st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a"]), st.sampled_from(["", "v2"])
)
arrivals = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 8),  # max_tokens
        namespaces,
        st.integers(0, 12),  # arrives before this step
        st.one_of(st.none(), st.integers(0, 15)),  # is aborted before this step
        st.booleans(),  # ignore_eos
    ),
    min_size=1,
    max_size=10,
)
resets = st.sets(st.integers(0, 20), max_size=2)


class Played:
    """A workload run to its end, checked after every step."""

    def __init__(
        self,
        core: EngineCore,
        plan: list[Plan],
        reset_at: Iterable[int] = (),
    ) -> None:
        self.core = core
        self.outside = CacheSeenFromOutside()
        self.results: list[StepResult] = []
        self.requests: list[Request] = []
        todo = sorted(enumerate(plan), key=lambda item: (item[1][3], item[0]))
        doomed: list[tuple[int, Request]] = []
        step = 0
        while todo or core.has_work:
            while todo and todo[0][1][3] <= step:
                number, (ids, max_tokens, namespace, _, aborted_at, ignore_eos) = todo.pop(0)
                request = make_request(ids, max_tokens, name=str(number), namespace=namespace, ignore_eos=ignore_eos)
                core.add_request(request)
                self.requests.append(request)
                if aborted_at is not None:
                    doomed.append((aborted_at, request))
            for at, request in doomed:
                if at == step:
                    core.abort(request)
            if step in reset_at:
                core.reset_prefix_cache(reset_running_requests=True)
            result = core.step(float(step))
            self.results.append(result)
            self.outside.apply(result)
            self.check(result)
            step += 1
            assert step < 5000, f"no progress: {core!r}"

    def check(self, result: StepResult) -> None:
        core = self.core
        holders = Counter(block for request in core.running for block in request.blocks)
        assert all(core.pool.references(block) == count for block, count in holders.items())
        assert core.pool.used_count == len(holders) <= core.pool.capacity
        assert result.prefill_tokens + result.decode_tokens <= core.profile.step_tokens
        assert len(core.running) <= core.profile.max_num_seqs
        for request in core.running:
            assert request.computed <= request.sequence.length
            assert len(request.blocks) * BLOCK >= request.computed
        if not core._cleared:
            assert all(core.pool.copies(key) == count for key, count in self.outside.copies.items() if count)
            assert core.pool.cached_keys == sum(1 for count in self.outside.copies.values() if count)


@given(arrivals, resets)
def test_every_request_ends_exactly_once_and_leaves_no_block_behind(plan: list[Plan], reset_at: set[int]) -> None:
    played = Played(make_core(), plan, reset_at)

    ended = Counter(request for result in played.results for request in result.finished)
    for request in played.requests:
        assert request.state is State.FINISHED
        assert ended[request] == (0 if request.finish_reason == "abort" else 1)
        assert request.outputs <= request.max_tokens
        assert len(tokens_of(played.results, request)) == request.outputs
        if request.finish_reason == "length":
            assert request.outputs == request.max_tokens
        if request.finish_reason == "stop":
            assert tokens_of(played.results, request)[-1] == WORDS.eos and not request.ignore_eos
    assert played.core.pool.used_count == 0
    assert sum(played.core.totals.finished.values()) == len(played.requests)


@given(arrivals, resets)
def test_reused_and_computed_tokens_are_the_tokens_asked_for(plan: list[Plan], reset_at: set[int]) -> None:
    played = Played(make_core(), plan, reset_at)

    totals = played.core.totals
    assert totals.reused_tokens + totals.computed_tokens - totals.lost_tokens == sum(
        request.computed for request in played.requests
    )
    for request in played.requests:
        if request.finish_reason != "abort":
            assert request.computed == request.sequence.length - 1, "all but the last token emitted has KV"
        if request.cached_tokens is not None:
            assert 0 <= request.cached_tokens < request.prompt_tokens
            assert request.cached_tokens % BLOCK == 0


@given(arrivals, resets)
def test_nothing_is_reused_across_salts_adapters_revisions_or_tokens(plan: list[Plan], reset_at: set[int]) -> None:
    played = Played(make_core(), plan, reset_at)

    assert played.core.totals.wrong_hits == 0
    for request in played.requests:
        matches = [
            _common(request, other)
            for other in played.requests
            if other is not request and other.namespace == request.namespace
        ]
        # A request keeps the number of its first admission, so its own blocks never count.
        assert (request.cached_tokens or 0) <= max(matches, default=0)


def _common(request: Request, other: Request) -> int:
    assert isinstance(request.sequence, TokenSequence) and isinstance(other.sequence, TokenSequence)
    count = 0
    for mine, theirs in zip(request.sequence.ids, other.sequence.ids, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@given(arrivals)
def test_output_depends_on_nothing_but_tokens_revision_and_adapter(plan: list[Plan]) -> None:
    crowded = Played(make_core(), [(*entry[:4], None, entry[5]) for entry in plan])

    for request in crowded.requests:
        assert isinstance(request.sequence, TokenSequence)
        ids = request.sequence.ids[: request.prompt_tokens]
        namespace = EngineNamespace("another salt", request.namespace.adapter, request.namespace.revision)
        alone = make_request(ids, request.max_tokens, namespace=namespace, ignore_eos=request.ignore_eos)
        results = run_alone(make_core(num_blocks=40, step_tokens=64), alone)
        assert tokens_of(results, alone) == tokens_of(crowded.results, request)


virtual_plans = st.lists(
    st.tuples(
        st.integers(0, 2),  # group: shares its keys
        st.integers(1, 24),  # prompt tokens
        st.integers(1, 14),  # max_tokens
        st.integers(0, 400),  # arrives, ms
    ),
    min_size=1,
    max_size=8,
)


@given(virtual_plans, st.integers(10, 30), st.integers(1, 4))
@example([(0, 12, 12, 0), (1, 12, 12, 0), (2, 4, 5, 30)], 10, 4)
@example([(0, 1, 1, 1), (0, 1, 5, 0), (1, 1, 4, 0), (1, 2, 4, 0), (1, 8, 14, 0)], 10, 3)  # copies are ordered alike
@example([(0, 13, 8, 0), (0, 21, 1, 0)], 6, 4)  # what the first decodes lets the second in
def test_advancing_in_runs_equals_stepping_one_by_one(
    plan: list[tuple[int, int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    def play(in_runs: bool) -> tuple[list[object], Counter[int]]:
        core = make_core(num_blocks, max_num_seqs=max_num_seqs)
        outside = CacheSeenFromOutside()
        todo = sorted(
            (float(at), number, Request(str(number), _virtual(group, length, number), max_tokens, now_ms=at))
            for number, (group, length, max_tokens, at) in enumerate(plan)
        )
        every = [request for _, _, request in todo]
        now = 0.0
        while todo or core.has_work:
            while todo and todo[0][0] <= now:
                core.add_request(todo.pop(0)[2])
            until = todo[0][0] if todo else float("inf")
            if not core.has_work:
                now = until
                continue
            result = core.advance(now, until) if in_runs else core.step(now)
            outside.apply(result)
            now += result.duration_ms
        seen: list[object] = [
            (r.cached_tokens, r.preemptions, r.outputs, pytest.approx(r.first_token_ms), pytest.approx(r.finished_ms))
            for r in every
        ]
        totals = core.totals
        seen.append((totals.steps, totals.computed_tokens, totals.evictions, pytest.approx(totals.busy_ms)))
        return seen, outside.copies

    assert play(in_runs=True) == play(in_runs=False)


def _virtual(group: int, length: int, number: int) -> VirtualSequence:
    """A sequence whose output is named too, as in a trace of conversations: a later prompt may contain it."""
    return VirtualSequence(length, [group * 1000 + i for i in range(12)], nonce=number)


# -- the cache, case by case


def test_a_repeat_reuses_every_full_block_but_computes_at_least_one_token() -> None:
    cases = {
        "shorter than a block": (3, 0),
        "one token over": (9, 8),
        "exactly two blocks": (8, 4),
        "one block": (4, 0),
    }
    for name, (length, expected) in cases.items():
        core = make_core()
        run_alone(core, make_request(range(length)))
        repeat = make_request(range(length))
        run_alone(core, repeat)
        assert repeat.cached_tokens == expected, name


def test_a_fully_cached_prompt_stores_its_last_block_a_second_time() -> None:
    core = make_core()
    first, again = make_request(range(8)), make_request(range(8))
    run_alone(core, first)

    stored = [stored for result in run_alone(core, again) for stored in result.stored]

    last = first.sequence.keys[1]
    assert [(s.first_block, s.keys, s.parent) for s in stored] == [(1, [last], first.sequence.keys[0])]
    assert core.pool.copies(last) == 2


def test_each_copy_of_a_key_is_removed_by_an_event_of_its_own() -> None:
    core = make_core(num_blocks=5)
    first = make_request(range(8))
    run_alone(core, first)
    run_alone(core, make_request(range(8)))

    removed = [key for result in run_alone(core, make_request(range(50, 69))) for key in result.removed]

    assert Counter(removed) == {first.sequence.keys[0]: 1, first.sequence.keys[1]: 2}


def test_a_prompt_admitted_in_the_same_step_reuses_what_that_step_computes() -> None:
    core = make_core(step_tokens=32, num_blocks=20)
    one, two = make_request(range(12)), make_request(range(12))
    core.add_request(one)
    core.add_request(two)

    (result,) = finish_all(core)

    assert (one.cached_tokens, two.cached_tokens) == (0, 8)
    assert result.prefill_tokens == 12 + 4
    assert core.pool.copies(one.sequence.keys[2]) == 2


def test_outputs_decoded_side_by_side_become_two_copies() -> None:
    core = make_core(step_tokens=32, num_blocks=20)
    one, two = make_request(range(7), max_tokens=3), make_request(range(7), max_tokens=3)
    core.add_request(one)
    core.add_request(two)

    finish_all(core)

    assert [core.pool.copies(key) for key in one.sequence.keys] == [1, 2]


def test_eviction_takes_the_tail_of_the_oldest_request_first() -> None:
    core = make_core(num_blocks=6)
    old, young = make_request(range(12)), make_request(range(50, 62))
    run_alone(core, old)
    run_alone(core, young)

    removed = [key for result in run_alone(core, make_request(range(80, 88))) for key in result.removed]

    assert removed == [old.sequence.keys[2], old.sequence.keys[1]]


def test_a_hit_makes_a_prefix_young_again() -> None:
    core = make_core(num_blocks=6)
    old, young = make_request(range(8)), make_request(range(50, 58))
    run_alone(core, old)
    run_alone(core, young)
    run_alone(core, make_request([*range(8), 9]))

    removed = [key for result in run_alone(core, make_request(range(80, 96))) for key in result.removed]

    assert removed[:2] == [young.sequence.keys[1], young.sequence.keys[0]]


def test_blocks_are_reported_with_the_step_that_computed_them_and_only_when_full() -> None:
    core = make_core(step_tokens=6, num_blocks=20)
    request = make_request(range(14), max_tokens=3)
    core.add_request(request)

    stored = [[(s.first_block, len(s.keys)) for s in result.stored] for result in finish_all(core)]

    # 6 tokens, 12, 14; then decode: the output's first token fills nothing, its second completes block 3.
    assert stored == [[(0, 1)], [(1, 2)], [], [], [(3, 1)]]


def test_reuse_under_another_salt_is_counted_when_the_engine_ignores_salts() -> None:
    core = make_core()
    run_alone(core, make_request(range(9), namespace=EngineNamespace("a"), ignore_salt=True))
    thief = make_request(range(9), namespace=EngineNamespace("b"), ignore_salt=True)

    run_alone(core, thief)

    assert thief.cached_tokens == 8
    assert core.totals.wrong_hits == 2


@pytest.mark.parametrize(
    ("ids", "namespace"),
    [
        (range(9), EngineNamespace("a", "other adapter", "r1")),
        (range(9), EngineNamespace("a", "adapter", "r2")),
        (range(9), EngineNamespace("b", "adapter", "r1")),
        (range(100, 109), EngineNamespace("a", "adapter", "r1")),
        ([0, 1, 2, 3, 4, 5, 6, 99, 8], EngineNamespace("a", "adapter", "r1")),
    ],
    ids=["another adapter", "another revision", "another salt", "other tokens", "one other token"],
)
def test_reuse_of_anything_else_under_the_same_key_is_counted(ids: Iterable[int], namespace: EngineNamespace) -> None:
    """As if keys collided, or the engine left something out of them."""
    core = make_core()
    owner = make_request(range(9), namespace=EngineNamespace("a", "adapter", "r1"))
    run_alone(core, owner)
    thief = make_request(ids, namespace=namespace)
    thief.sequence.ensure_keys(2)
    right = sum(own == other for own, other in zip(owner.sequence.keys[:2], thief.sequence.keys, strict=True))
    thief.sequence.keys[:] = owner.sequence.keys[:2]

    run_alone(core, thief)

    assert thief.cached_tokens == 8
    assert core.totals.wrong_hits == 2 - right


def test_a_request_that_skips_the_cache_reads_nothing_and_leaves_its_blocks() -> None:
    core = make_core()
    run_alone(core, make_request(range(9)))
    skipping = make_request(range(9))
    skipping.skips_cache = True

    run_alone(core, skipping)
    again = make_request(range(9))
    run_alone(core, again)

    assert (skipping.cached_tokens, again.cached_tokens) == (0, 8)
    assert core.pool.copies(again.sequence.keys[0]) == 2


def test_a_watched_pool_tells_how_long_evicted_blocks_lived() -> None:
    times = [0.0]
    seen: list[tuple[float, float, list[float]]] = []
    pool = WatchedPool(2, lambda: times[-1], lambda lived, idle, gaps: seen.append((lived, idle, list(gaps))))
    (block,) = pool.allocate(1)
    pool.register(block, 7, 7)
    for at in (1.0, 3.0):
        times.append(at)
        pool.release([block])
        pool.hold([block])
    pool.release([block])

    times.append(10.0)
    pool.allocate(2)

    assert seen == [(10.0, 7.0, [1.0, 2.0])]


def test_the_own_salt_is_no_wrong_hit_even_when_the_engine_ignores_salts() -> None:
    core = make_core()
    for _ in range(2):
        run_alone(core, make_request(range(9), namespace=EngineNamespace("a"), ignore_salt=True))

    assert core.totals.prefix_hits == 8
    assert core.totals.wrong_hits == 0


def test_a_salt_that_equals_an_adapters_name_shares_nothing_with_it() -> None:
    core = make_core()
    run_alone(core, make_request(range(9), namespace=EngineNamespace(salt="x")))
    other = make_request(range(9), namespace=EngineNamespace(adapter="x"))

    run_alone(core, other)

    assert other.cached_tokens == 0


# -- scheduling, case by case


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    core = make_core(step_tokens=6, num_blocks=20)

    results = run_alone(core, make_request(range(14)))

    assert [result.prefill_tokens for result in results] == [6, 6, 2]
    assert [len(result.emitted) for result in results] == [0, 0, 1]


def test_decode_goes_on_beside_a_prefill() -> None:
    core = make_core(num_blocks=20)
    early = make_request(range(5), max_tokens=6)
    core.add_request(early)
    core.step()
    core.add_request(make_request(range(30, 40)))

    result = core.step()

    assert (result.decode_tokens, result.prefill_tokens) == (1, 10)


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    core = make_core(num_blocks=6, step_tokens=8)
    core.add_request(make_request(range(13), max_tokens=2))
    late = make_request(range(50, 62))
    core.add_request(late)

    first = core.step()
    assert late.state is State.WAITING and len(first.admitted) == 1
    finish_all(core)
    assert late.finish_reason == "length"


def test_a_waiting_request_is_let_in_by_a_block_that_another_decodes() -> None:
    core = make_core(num_blocks=6)
    first = Request("first", _virtual(0, 13, 1), 8)
    second = Request("second", _virtual(0, 21, 2), 1)
    core.add_request(first)
    core.add_request(second)

    admitted = [core.step().admitted for _ in range(4)]

    assert admitted == [[first], [], [], [second]], "the fourth block is full after its tokens 13, 14, 15 and 16"
    assert second.cached_tokens == 16


def test_the_youngest_is_preempted_when_blocks_run_out_and_still_ends_with_the_same_tokens() -> None:
    core = make_core(num_blocks=4)
    old, young = make_request(range(7), max_tokens=8), make_request(range(50, 57), max_tokens=8)
    core.add_request(old)
    core.add_request(young)

    results = finish_all(core)

    alone = make_request(range(50, 57), max_tokens=8)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert tokens_of(results, young) == tokens_of(run_alone(make_core(), alone), alone)
    assert young.cached_tokens == 0, "a preemption does not turn the request's own blocks into cached tokens"


def test_a_resumed_request_continues_exactly() -> None:
    whole = make_request(range(9), max_tokens=8)
    tokens = tokens_of(run_alone(make_core(), whole), whole)
    resumed = make_request([*range(9), *tokens[:3]], max_tokens=5, namespace=EngineNamespace("other salt"))

    rest = tokens_of(run_alone(make_core(), resumed), resumed)

    assert rest == tokens[3:]


def test_another_revision_or_adapter_says_something_else() -> None:
    said = set()
    for namespace in (EngineNamespace(), EngineNamespace(revision="2"), EngineNamespace(adapter="2")):
        request = make_request(range(9), max_tokens=8, namespace=namespace)
        said.add(tuple(tokens_of(run_alone(make_core(), request), request)))

    assert len(said) == 3


def test_an_output_does_not_end_by_itself_before_min_tokens() -> None:
    ids = next([n] for n in range(1000) if make_request([n]).sequence.append_next(True) == WORDS.eos)
    short, longer = make_request(ids, 30, ignore_eos=False), make_request(ids, 30, ignore_eos=False)
    longer.min_tokens = 10

    run_alone(make_core(), short)
    run_alone(make_core(), longer)

    assert short.outputs == 1
    assert longer.outputs >= 10


def test_an_aborted_request_frees_its_blocks_wherever_it_is() -> None:
    core = make_core(num_blocks=5)
    running, waiting = make_request(range(12), max_tokens=5), make_request(range(50, 62))
    core.add_request(running)
    core.add_request(waiting)
    core.step()

    assert core.abort(running) and core.abort(waiting)

    assert not core.abort(running), "it had already ended"
    assert not core.has_work and core.pool.used_count == 0
    assert core.step().steps == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        (40, 1, "maximum context length is 40"),
        (39, 2, "too large: 2"),
        (24, 1, "KV cache holds 24"),
        (0, 1, "at least"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_limit(prompt: int, max_tokens: int, says: str) -> None:
    core = make_core(num_blocks=6)

    with pytest.raises(DoesNotFit, match=says):
        core.add_request(make_request(range(prompt), max_tokens))


def test_an_event_that_cannot_happen_in_a_state_is_an_error() -> None:
    request = make_request(range(4))

    with pytest.raises(KeyError):
        request.move(Event.PREEMPT)


# -- reset_prefix_cache


def test_a_reset_is_refused_while_requests_hold_blocks() -> None:
    core = make_core()
    core.add_request(make_request(range(9), max_tokens=4))
    core.step()

    assert core.reset_prefix_cache() is False
    assert not any(result.cleared for result in finish_all(core))


def test_a_reset_of_an_idle_engine_is_reported_only_by_the_next_step() -> None:
    core = make_core()
    run_alone(core, make_request(range(9)))

    assert core.reset_prefix_cache() is True
    assert core.step().cleared is False, "an idle engine takes no step and reports nothing"
    repeat = make_request(range(9))
    results = run_alone(core, repeat)

    assert repeat.cached_tokens == 0
    assert [result.cleared for result in results] == [True]
    assert results[0].stored and not results[0].removed


def test_a_reset_with_running_requests_preempts_them_and_they_still_complete() -> None:
    core = make_core(num_blocks=20)
    one, two = make_request(range(9), max_tokens=6), make_request(range(50, 59), max_tokens=6)
    core.add_request(one)
    core.add_request(two)
    before = [core.step(), core.step()]

    assert core.reset_prefix_cache(reset_running_requests=True) is True
    after = finish_all(core)

    assert after[0].cleared and after[0].admitted == [one, two], "in their old order"
    for request, start in ((one, 0), (two, 50)):
        alone = make_request(range(start, start + 9), max_tokens=6)
        expected = tokens_of(run_alone(make_core(), alone), alone)
        assert tokens_of(before + after, request) == expected


# -- time


def test_a_step_costs_what_the_formula_says() -> None:
    core = EngineCore(H100_8B, block_size=32, num_blocks=1000, max_model_len=30_000)
    core.add_request(Request("r", VirtualSequence(10_000, range(312)), 3))

    durations = [core.step().duration_ms for _ in range(4)]

    n, rest = 8192, 10_000 - 8192
    assert durations == pytest.approx(
        [
            5.74 + 16 + 0.0172 * n + 4e-8 * n * (n / 2),
            5.74 + 16 + 0.0172 * rest + 4e-8 * rest * (n + rest / 2),
            5.74 + 5.2e-5 * 10_001,
            5.74 + 5.2e-5 * 10_002,
        ]
    )


def test_a_run_stops_where_the_next_request_arrives() -> None:
    core = EngineCore(H100_8B, block_size=32, num_blocks=1000, max_model_len=30_000)
    core.add_request(Request("r", VirtualSequence(100, range(3)), 1000))
    now = core.step().duration_ms

    result = core.advance(now, now + 60.0)

    assert result.steps == 11, "ten steps of 5.745 ms end before 60 ms; the eleventh starts before it"
    assert result.duration_ms > 60.0
    assert core.advance(now, float("inf")).steps == 1000 - 1 - 11


# --- KV from outside


def delivered(first: int, upto: int, tokens: int = 18) -> Request:
    request = make_request(range(tokens))
    request.delivered = range(first, upto)
    return request


def test_delivered_blocks_are_reused_as_if_they_had_been_here() -> None:
    core = make_core()
    request = delivered(0, 3)

    results = run_alone(core, request)

    assert request.cached_tokens == 3 * BLOCK
    assert core.totals.computed_tokens == 18 - 3 * BLOCK
    assert [key for result in results for stored in result.stored for key in stored.keys] == request.sequence.keys
    assert core.pool.cached_keys == 4


def test_of_delivered_blocks_those_follow_that_the_cache_has_not() -> None:
    core = make_core()
    run_alone(core, make_request(range(8)))

    follows, is_too_long = delivered(1, 3), delivered(0, 9, tokens=16)
    for request in (follows, is_too_long):
        run_alone(core, request)

    assert follows.cached_tokens == 3 * BLOCK
    # At least one token is computed.
    assert is_too_long.cached_tokens == 3 * BLOCK


def test_delivered_blocks_behind_a_gap_are_of_no_use() -> None:
    core = make_core()
    request = delivered(2, 4)

    run_alone(core, request)

    assert request.cached_tokens == 0


def test_delivered_blocks_evict_as_much_as_computed_ones() -> None:
    core = make_core(num_blocks=6)
    run_alone(core, make_request(range(100, 120)))

    results = run_alone(core, delivered(0, 4))

    assert sum(len(result.removed) for result in results) == 4


def test_what_was_delivered_is_gone_with_a_preemption() -> None:
    core = make_core(num_blocks=6, step_tokens=64)
    elder, younger = make_request(range(100, 110), 12), delivered(0, 2, tokens=10)
    core.add_request(elder)
    core.add_request(younger)

    finish_all(core)

    assert younger.cached_tokens == 2 * BLOCK
    assert core.totals.reused_tokens + core.totals.computed_tokens - core.totals.lost_tokens == 10 + 11 + 10
