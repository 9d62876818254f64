"""KV that comes from a host store or from another worker: what it takes, what it spares, and that nothing is lost."""

import pytest

from prefixbus.lab import synthetic
from prefixbus.lab.bounds import token_reuse
from prefixbus.lab.fetching import Fetch, Fetching, Line, Reply
from prefixbus.lab.harness import World, run
from prefixbus.lab.host import HostStore
from prefixbus.lab.rules import ruled
from prefixbus.lab.setup import Failure, Setup
from prefixbus.lab.timeline import Timeline
from prefixbus.lab.workload import Arrival, Segment, Workload, keys_of, seed_of
from prefixbus.router.transfer import SETUP_MS

# Whole runs of a fleet: seconds of computing each, more on a machine that does other things.
pytestmark = pytest.mark.timeout(90)

BLOCK = 32
NS = bytes(16)
KV_TOKENS = 16_000
TOKEN_BYTES = 128 * 1024
PLAIN = Setup(workers=4, kv_tokens=KV_TOKENS)
WITH_HOST = Setup(workers=4, kv_tokens=KV_TOKENS, host_tokens=4 * KV_TOKENS)
WITH_PULLS = Setup(workers=4, kv_tokens=KV_TOKENS, transfer_bandwidth=50e9)
WITH_BOTH = Setup(workers=4, kv_tokens=KV_TOKENS, host_tokens=4 * KV_TOKENS, transfer_bandwidth=50e9, routers=2)
FEATURES = {"plain": PLAIN, "host": WITH_HOST, "pulls": WITH_PULLS, "both": WITH_BOTH}


@pytest.fixture(scope="module")
def load() -> Workload:
    return synthetic.zipf_prefixes(rate=18, count=250, prefixes=60, exponent=0.8, prefix_tokens=2000, seed=3)


# --- a worker's store and links


def test_a_store_drops_what_was_used_longest_ago_and_of_a_chain_its_tail() -> None:
    store = HostStore(4)

    assert store.store(NS, [1, 2, 3])
    assert store.store(NS, [11, 12])
    assert store.removed == [(NS, 3)]
    assert not store.store(NS, [1, 2])
    assert store.store(NS, [21])
    assert store.removed == [(NS, 3), (NS, 12)]
    assert (store.depth([1, 2, 3], 0, 3), store.depth([9, 2], 1, 2), store.depth([9, 2], 0, 2)) == (2, 2, 0)


def source_of(blocks: int, out: Line) -> tuple[list[tuple[str, int, int]], Fetching, Timeline]:
    """A worker of blocks of 32 tokens whose others have so many blocks of whatever is asked."""
    timeline, asked = Timeline(), []

    def ask(source: str, keys: object, first: int, upto: int, reply: Reply) -> None:
        asked.append((source, first, upto))
        reply(min(blocks, upto - first), out)

    setup = Setup(host_tokens=64 * BLOCK, host_bandwidth=10e9, transfer_bandwidth=5e9)
    return asked, Fetching(timeline, ask, setup, BLOCK), timeline


def fetched(fetching: Fetching, timeline: Timeline, keys: list[int], held: int, source: str, upto: int) -> Fetch:
    ended: list[float] = []
    fetch = fetching.begin(keys, held, len(keys), source, upto, lambda: ended.append(timeline.now))
    assert fetch is not None
    timeline.run(lambda: not ended)
    assert ended == [fetch.ended_at]
    return fetch


def test_the_own_store_is_loaded_first_and_the_rest_is_pulled() -> None:
    asked, fetching, timeline = source_of(100, Line())
    fetching.host.store(NS, [1, 2, 3, 4])

    fetch = fetched(fetching, timeline, [1, 2, 3, 4, 5, 6], 2, "w1", 6)

    assert asked == [("w1", 4, 6)]
    assert (fetch.first, fetch.loaded_blocks, fetch.pulled_blocks, fetch.upto) == (2, 2, 2, 6)
    assert fetch.ended_at == pytest.approx(2 * BLOCK * TOKEN_BYTES / 5e9 + SETUP_MS / 1000)


def test_a_source_that_has_lost_them_gives_less() -> None:
    _, fetching, timeline = source_of(1, Line())

    fetch = fetched(fetching, timeline, [1, 2, 3], 0, "w1", 3)

    assert (fetch.pulled_blocks, fetch.upto) == (1, 1)


def test_loads_of_a_worker_and_pulls_over_a_link_go_one_after_the_other() -> None:
    out = Line()
    _, fetching, timeline = source_of(8, out)
    fetching.host.store(NS, list(range(1, 17)))
    keys, ended = list(range(1, 17)), list[float]()

    for _ in range(2):
        fetching.begin(keys, 0, 16, "", 0, lambda: ended.append(timeline.now))
        fetching.begin([99] * 8, 0, 8, "w1", 8, lambda: ended.append(timeline.now))
    timeline.run(lambda: len(ended) < 4)

    load_s, pull_s, setup_s = 16 * BLOCK * TOKEN_BYTES / 10e9, 8 * BLOCK * TOKEN_BYTES / 5e9, SETUP_MS / 1000
    assert sorted(ended) == pytest.approx(sorted([load_s, 2 * load_s, pull_s + setup_s, 2 * pull_s + setup_s]))
    assert out.free_at == pytest.approx(2 * pull_s)


def test_with_nothing_to_fetch_there_is_nothing_to_wait_for() -> None:
    _, fetching, _ = source_of(8, Line())

    assert fetching.begin([1, 2], 0, 2, "", 0, lambda: None) is None
    assert fetching.begin([1, 2], 2, 2, "w1", 2, lambda: None) is None


# --- in the harness


@pytest.mark.parametrize("setup", FEATURES.values(), ids=FEATURES)
def test_tokens_computed_and_reused_are_those_that_were_asked(load: Workload, setup: Setup) -> None:
    world = World(setup, load)

    result = world.run()

    totals = [worker.core.totals for worker in world.lives.last]
    asked = sum(one.prompt_tokens + one.output_tokens - 1 for one in result.served)
    assert [one.status for one in result.served] == ["ok"] * len(load.arrivals)
    assert sum(one.reused_tokens + one.computed_tokens - one.lost_tokens for one in totals) == asked
    assert result.leftovers == []


@pytest.mark.parametrize("setup", FEATURES.values(), ids=FEATURES)
def test_more_memory_and_pulls_never_reuse_more_than_an_endless_cache(load: Workload, setup: Setup) -> None:
    assert run(setup, load).token_reuse <= token_reuse(load, None)


def test_equal_setups_give_equal_runs_to_the_last_bit(load: Workload) -> None:
    assert run(WITH_BOTH, load) == run(WITH_BOTH, load)


def test_a_host_store_keeps_what_the_gpu_evicts(load: Workload) -> None:
    plain, world = run(PLAIN, load), World(WITH_HOST, load)

    result = world.run()

    assert result.token_reuse > plain.token_reuse + 0.1
    assert result.ttft().mean < plain.ttft().mean
    assert sum(one.loaded_tokens for one in result.served) > 0
    assert all(one.loaded_tokens < one.prompt_tokens and not one.pulled_tokens for one in result.served)
    for worker in world.lives.last:
        assert 0 < len(worker.fetching.host) <= 4 * KV_TOKENS // BLOCK


@pytest.mark.parametrize("rule", ["overlap:64", "threshold", "exploit-explore"])
def test_rules_have_the_host_store_too(load: Workload, rule: str) -> None:
    plain, host = (
        run(Setup(policy=ruled(rule), workers=4, kv_tokens=KV_TOKENS, host_tokens=tokens), load)
        for tokens in (0, 4 * KV_TOKENS)
    )

    assert host.token_reuse > plain.token_reuse + 0.05


def test_what_is_pulled_is_recorded_and_not_computed(load: Workload) -> None:
    # With room for it until its turn comes.
    result = run(Setup(workers=4, kv_tokens=2 * KV_TOKENS, transfer_bandwidth=50e9), load)

    pulled = [one for one in result.served if one.pulled_tokens]
    assert len(pulled) > 10
    assert {one.decision for one in pulled} == {"remote-pull"}
    assert all(one.transferred_bytes == one.pulled_tokens * TOKEN_BYTES for one in pulled)
    assert all((one.cached_tokens or 0) >= one.pulled_tokens for one in pulled)


def test_over_a_link_of_no_speed_nothing_is_pulled(load: Workload) -> None:
    result = run(Setup(workers=4, kv_tokens=KV_TOKENS, transfer_bandwidth=1.0), load)

    assert "remote-pull" not in result.decisions
    assert sum(one.transferred_bytes for one in result.served) == 0


def test_a_load_keeps_nobody_waiting_but_its_own_request() -> None:
    """A document is loaded from the host store for seconds; what comes meanwhile is computed at once."""
    document, filler = Segment(1, 8000), Segment(2, 16_000)

    def asks(at: float, *segments: Segment) -> Arrival:
        keys = keys_of(segments, BLOCK, seed_of("acme"))
        return Arrival(at, keys, sum(one.tokens for one in segments), 1)

    load = Workload(
        [asks(0, document), asks(3, filler), asks(6, document, Segment(3, 40)), asks(6.1, Segment(4, 200))], BLOCK
    )
    setup = Setup(workers=1, kv_tokens=20_000, host_tokens=40_000, host_bandwidth=0.5e9)

    served = run(setup, load).served

    loads, bystander = served[2], served[3]
    assert loads.loaded_tokens > 0
    assert loads.ttft_ms is not None
    assert loads.ttft_ms > loads.loaded_tokens * TOKEN_BYTES / 0.5e9 * 1000
    assert bystander.ttft_ms is not None
    assert bystander.ttft_ms < 100


def test_a_reset_empties_the_host_store_too(load: Workload) -> None:
    last_at = load.arrivals[-1].at
    result = run(Setup(workers=2, kv_tokens=KV_TOKENS, host_tokens=4 * KV_TOKENS, resets=((last_at / 2, "w0"),)), load)
    undisturbed = run(Setup(workers=2, kv_tokens=KV_TOKENS, host_tokens=4 * KV_TOKENS), load)

    assert [one.status for one in result.served] == ["ok"] * len(load.arrivals)
    assert result.token_reuse < undisturbed.token_reuse
    assert result.leftovers == []


def test_pulls_from_a_worker_that_fails_are_computed(load: Workload) -> None:
    setup = Setup(workers=4, kv_tokens=KV_TOKENS, transfer_bandwidth=5e9, failures=(Failure(3.0, "w1", 2.0),))

    result = run(setup, load)

    assert sum(one.pulled_tokens for one in result.served) > 0
    assert {one.status for one in result.served} <= {"ok", "error"}
    assert result.leftovers == []
