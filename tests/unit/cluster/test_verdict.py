"""When the demo says ok, what it says in its last line, and what its table holds."""

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from prefixbus.bus import messages
from prefixbus.bus.messages import DecisionRecord, Outcome
from prefixbus.cluster import demo, verdict
from prefixbus.cluster.verdict import Run, Sample
from prefixbus.router import policy

LAST_LINE = (
    r"demo: (ok|failed) round_robin_ttft_p50_ms=\d+\.\d prefix_aware_ttft_p50_ms=\d+\.\d "
    r"cached_token_ratio=\d\.\d{3} wrong_hits=\d+"
)


def outcome(request_id: str, *, prompt: int = 1000, cached: int | None = 0, **changes: Any) -> Outcome:
    made = Outcome(
        v=1,
        request_id=f"i-{request_id}",
        client_request_id=request_id,
        attempt=1,
        worker="w1",
        incarnation=1,
        tenant="demo",
        model="m",
        ns_id="",
        status="ok",
        error="",
        prefix_class="document",
        decision="balanced-cold",
        prompt_tokens=prompt,
        predicted_tokens=cached or 0,
        cached_tokens=cached,
        prefill_tokens=None,
        output_tokens=1,
        queue_wait_ms=0.0,
        ttft_ms=1.0,
        total_ms=1.0,
        ended_at=0.0,
    )
    return msgspec.structs.replace(made, **changes)


def decision(request_id: str, policy: str, name: str = "balanced-cold") -> DecisionRecord:
    return DecisionRecord(
        v=1,
        request_id=f"i-{request_id}",
        client_request_id=request_id,
        attempt=1,
        router="r1",
        model="m",
        tenant="demo",
        prefix_class="document",
        prefix_key="",
        prompt_tokens=1000,
        policy=f"{policy}/1",
        selected_worker="w1",
        predicted_cached_tokens=0,
        decision=name,
        candidate_workers=[],
        excluded={},
        decided_at=0.0,
    )


def a_run(policy: str, ttfts: list[float], *, cached: int = 500) -> Run:
    """A whole pass: one request of 1000 tokens for each TTFT."""
    names = [f"{policy}-{n}" for n in range(len(ttfts))]
    return Run(
        policy,
        samples=[Sample("document", name, ttft) for name, ttft in zip(names, ttfts, strict=True)],
        decisions={name: decision(name, policy) for name in names},
        outcomes={name: outcome(name, cached=cached) for name in names},
    )


def base(ttfts: list[float] | None = None) -> Run:
    return a_run("round-robin", ttfts or [100.0] * 20, cached=100)


def ours(ttfts: list[float] | None = None, cached: int = 500) -> Run:
    return a_run("prefix-aware", ttfts or [50.0] * 20, cached=cached)


def test_faster_with_reuse_and_no_wrong_hit_is_ok() -> None:
    judged = verdict.judge(base(), ours(), 0)

    assert judged.ok
    assert judged.reasons == []


@pytest.mark.parametrize(
    ("case", "run", "wrong_hits", "says"),
    [
        ("an equal p50", ours([100.0] * 20), 0, "p50"),
        ("a higher p50", ours([101.0] * 20), 0, "p50"),
        ("a worse p95 under a better p50", ours([50.0] * 18 + [101.0] * 2), 0, "p95"),
        ("reuse of just 0.3", ours(cached=300), 0, "reused only 0.300"),
        ("one wrong hit", ours(), 1, "1 blocks"),
    ],
)
def test_one_shortcoming_is_enough_to_fail(case: str, run: Run, wrong_hits: int, says: str) -> None:
    judged = verdict.judge(base(), run, wrong_hits)

    assert not judged.ok
    assert any(says in reason for reason in judged.reasons), judged.reasons


def test_an_equal_p95_is_not_worse() -> None:
    assert verdict.judge(base(), ours([50.0] * 18 + [100.0] * 2), 0).ok


@pytest.mark.parametrize("record", ["decisions", "outcomes"])
def test_a_missing_journal_record_is_a_failure_that_names_the_request(record: str) -> None:
    run = ours()
    del getattr(run, record)["prefix-aware-3"]

    judged = verdict.judge(base(), run, 0)

    assert run.unrecorded() == ["prefix-aware-3"]
    assert judged.reasons == [
        "prefix-aware: the journal has no decision or no outcome of 1 requests: prefix-aware-3",
    ]


def test_many_missing_records_are_counted_and_a_few_are_named() -> None:
    run = msgspec.structs.replace(ours(), outcomes={})

    reason = verdict.judge(base(), run, 0).reasons[0]

    assert "of 20 requests: prefix-aware-0," in reason
    assert reason.endswith("...")
    assert reason.count("prefix-aware-") == 5


def test_a_failed_request_of_either_pass_is_a_failure() -> None:
    for which in (base(), ours()):
        which.failures.append("r-1: overloaded: full")
        runs = (which, ours()) if which.policy == "round-robin" else (base(), which)

        assert verdict.judge(*runs, 0).reasons == [f"{which.policy}: r-1: overloaded: full"]


def test_a_request_that_another_policy_decided_is_a_failure() -> None:
    run = ours()
    run.decisions["prefix-aware-0"] = decision("prefix-aware-0", "round-robin")

    assert verdict.judge(base(), run, 0).reasons == ["prefix-aware: 1 requests were decided by another policy"]


def test_a_record_that_cannot_be_read_is_named_and_spoils_no_other() -> None:
    run = msgspec.structs.replace(ours(), decisions={}, outcomes={})
    journal = [
        ("pb.v1.outcome.w1.i-1", b"rubbish"),
        ("pb.v1.outcome.w1.i-2", messages.OUTCOME.encode(outcome("prefix-aware-0"))),
        *((f"pb.v1.journal.i-{name}", messages.DECISION.encode(one)) for name, one in ours().decisions.items()),
        *((f"pb.v1.outcome.w1.i-{name}", messages.OUTCOME.encode(one)) for name, one in ours().outcomes.items()),
        ("pb.v1.journal.i-round-robin-0", messages.DECISION.encode(decision("round-robin-0", "round-robin"))),
    ]

    for subject, data in journal:
        demo.take(run, subject, data)

    assert (run.decisions, run.outcomes) == (ours().decisions, ours().outcomes)
    assert verdict.judge(base(), run, 0).reasons == [
        "prefix-aware: 2 records of the journal cannot be read, such as under pb.v1.outcome.w1.i-1"
    ]


def test_a_pass_without_answers_is_never_ok() -> None:
    assert not verdict.judge(Run("round-robin"), Run("prefix-aware"), 0).ok
    assert not verdict.judge(base(), Run("prefix-aware"), 0).ok


def test_the_last_line_to_the_letter() -> None:
    assert verdict.last_line(base(), ours(), 0) == (
        "demo: ok round_robin_ttft_p50_ms=100.0 prefix_aware_ttft_p50_ms=50.0 cached_token_ratio=0.500 wrong_hits=0"
    )
    assert verdict.last_line(base(), ours([200.25] * 20, cached=0), 3) == (
        "demo: failed round_robin_ttft_p50_ms=100.0 prefix_aware_ttft_p50_ms=200.2 cached_token_ratio=0.000 "
        "wrong_hits=3"
    )


def test_the_last_line_has_its_form_also_when_nothing_was_measured() -> None:
    line = verdict.last_line(Run("round-robin"), Run("prefix-aware"), 0)

    assert re.fullmatch(LAST_LINE, line)
    assert line.startswith("demo: failed ")


def test_a_row_says_what_happened_to_its_class() -> None:
    run = a_run("prefix-aware", [10.0, 20.0, 30.0])
    run.outcomes["prefix-aware-0"] = outcome("prefix-aware-0", cached=992)
    run.outcomes["prefix-aware-1"] = outcome("prefix-aware-1", cached=320)
    run.outcomes["prefix-aware-2"] = outcome("prefix-aware-2", cached=0)
    run.decisions["prefix-aware-0"] = decision("prefix-aware-0", "prefix-aware", "prefer-warm-worker")

    found = verdict.rows(run, ["document", "unique"])

    assert found == [
        ("document", "3", "1312", "1312", "10/10", "20/20", "30/30", "20/30"),
        ("unique", "0", "0", "0", "-", "-", "-", "-"),
        ("all", "3", "1312", "1312", "10/10", "20/20", "30/30", "20/30"),
    ]
    assert verdict.decisions(run, ["document", "unique"]) == ["  document  balanced-cold 2, prefer-warm-worker 1"]


def test_a_row_counts_a_request_without_records_as_answered_and_no_more() -> None:
    run = a_run("prefix-aware", [10.0, 20.0])
    run.outcomes.clear()
    run.decisions.clear()

    assert verdict.rows(run, ["document"])[0] == ("document", "2", "0", "0", "-", "-", "-", "15/20")
    assert verdict.decisions(run, ["document"]) == []


def written(*things: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(*things, sep="\n")
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("ttft_ms", [5.0, 9999.0, 123456.0])
def test_the_table_fits_80_columns_with_no_cell_broken(ttft_ms: float) -> None:
    # The most that figures may grow to: minutes on a slow machine, and many millions of tokens.
    run = a_run("prefix-aware", [ttft_ms] * 2)
    run.outcomes["prefix-aware-0"] = outcome("prefix-aware-0", prompt=99_000_000, cached=98_999_968)
    run.outcomes["prefix-aware-1"] = outcome("prefix-aware-1", prompt=99_000_000, cached=3_200)

    shown = written(verdict.table(run, ["document", "template"]))

    assert shown[0] == "prefix-aware"
    assert tuple(shown[1].split()) == verdict.COLUMNS
    assert [tuple(line.split()) for line in shown[2:]] == verdict.rows(run, ["document", "template"])
    assert max(len(line) for line in shown) <= 80


def test_the_comparison_shows_what_the_verdict_looks_at() -> None:
    shown = written(verdict.comparison(base([100.0] * 19 + [300.0]), ours()))

    assert shown[1].split() == ["round-robin", "100.0", "100.0", "110.0", "10%"]
    assert shown[2].split() == ["prefix-aware", "50.0", "50.0", "50.0", "50%"]


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            ours(),
            "prefix-aware: first token 2.0x sooner at the median (50 ms, not 100), 2.0x sooner at p95 "
            "(50 ms, not 100); 50% of prompt tokens came from caches, not 10%",
        ),
        (
            ours([50.0] * 10 + [200.0] * 10, cached=0),
            "prefix-aware: first token 1.2x later at the median (125 ms, not 100), 2.0x later at p95 "
            "(200 ms, not 100); 0% of prompt tokens came from caches, not 10%",
        ),
        (
            Run("prefix-aware"),
            "prefix-aware: first token not measured at the median, not measured at p95; "
            "0% of prompt tokens came from caches, not 10%",
        ),
    ],
)
def test_the_outcome_is_a_sentence(run: Run, sentence: str) -> None:
    assert verdict.sentence(base(), run) == sentence


def test_every_decision_that_the_router_names_is_explained_within_80_columns() -> None:
    named = re.findall(r"^    ([a-z]+(?:-[a-z]+)*)  +\S", policy.__doc__ or "", re.MULTILINE)
    run = ours()
    for number, name in enumerate(named):
        run.decisions[f"prefix-aware-{number}"] = decision(f"prefix-aware-{number}", "prefix-aware", name)

    assert set(named) == set(verdict.DECISIONS)
    shown = [*verdict.decision_legend(run), *verdict.LEGEND.splitlines()]
    assert max(len(line) for line in shown) <= 80


def test_only_decisions_that_occurred_are_explained() -> None:
    assert [line.split()[0] for line in verdict.decision_legend(base(), ours())] == ["balanced-cold"]


def test_net_saving_is_prefill_avoided_less_waiting() -> None:
    waited = ours()
    waited.outcomes["prefix-aware-0"] = outcome("prefix-aware-0", cached=500, queue_wait_ms=7.0)

    saved, saved_less = verdict.net_saved_ms(base(), ours()), verdict.net_saved_ms(base(), waited)

    assert saved > 0
    assert saved - saved_less == pytest.approx(7.0)
    assert verdict.net_saved_ms(ours(), ours()) == 0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([3.0], 0.95, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([float(n) for n in range(1, 101)], 0.95, 95.0),
        ([float(n) for n in range(1, 21)], 0.95, 19.0),
    ],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert verdict.percentile(values, share) == expected
