"""The commands of the lab, which need no cluster: `lab replay`, `lab repeats` and `lab import`.

Owns: their arguments, exit statuses and output.   Must not know: how runs are played, how bounds are made."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..bus.errors import ConfigInvalid

if TYPE_CHECKING:
    from rich.table import Table

    from ..lab.figures import Figures
    from ..lab.repeats import Repeated, Report
    from ..lab.setup import Failure, Setup
    from ..lab.spread import Spread
    from ..router.policy import Policy
    from .runs import Played

# Heavy modules are imported by the commands that need them, as in cli.py.

commands = typer.Typer(
    name="lab",
    no_args_is_help=True,
    help="Play recorded traffic in virtual time under any policy, and see whether it is worth it. Needs no cluster.",
)

OURS = "prefix-aware"
ALL = "all"
# Between seeds arrivals are moved by up to this: recorded times are rounded, and who came first of two is chance.
JITTER_S = 0.005
_MOST_LINES_NAMED = 10
_LONGEST_S = 86400.0

Trace = Annotated[
    Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, readable=True, help="A trace: JSON Lines.")
]
TraceBlock = Annotated[int, typer.Option(min=1, max=65536, help="Tokens that an id of the trace stands for.")]
Workers = Annotated[int, typer.Option(min=1, max=4096, help="Workers of the fleet.")]
KvTokens = Annotated[int, typer.Option(min=1, help="Tokens that the KV cache of a worker holds.")]
Profile = Annotated[str, typer.Option(help="Machine and model: h100-8b, a100-8b, h100-70b.")]
First = Annotated[int, typer.Option(min=0, help="Only so many requests, from the start; 0: all.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, as JSON.")]


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """What `lab replay --json` writes. A run's `figures` are null if it never ends."""

    traffic: Any
    setup: Any
    runs: list[dict[str, Any]]


@commands.command()
def replay(
    trace: Trace,
    workers: Workers = 8,
    kv_tokens: KvTokens = 1 << 20,
    profile: Profile = "h100-8b",
    policies: Annotated[
        str,
        typer.Option(help="Names of policies and rules, or files with weights: a,b:parameter,FILE; all: one of each."),
    ] = OURS,
    speed: Annotated[float, typer.Option(help="Arrivals so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="For all that is chance.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of so many seeds, told with their spread.")] = 1,
    jitter: Annotated[
        float | None,
        typer.Option(min=0, help=f"Move arrivals by up to this many seconds; default 0, and {JITTER_S} with --seeds."),
    ] = None,
    trace_block: TraceBlock = 512,
    block_size: Annotated[int, typer.Option(min=0, help="Tokens of an engine's block; 0: as the trace's.")] = 0,
    first: First = 0,
    routers: Annotated[int, typer.Option(min=1, max=256, help="Routers, each with its own view.")] = 1,
    event_delay: Annotated[
        float, typer.Option(min=0, help="Seconds from an engine's step to the directory's index.")
    ] = 0.005,
    event_loss: Annotated[float, typer.Option(min=0, max=1, help="Share of the KV events that are lost.")] = 0.0,
    report_every: Annotated[
        float, typer.Option(min=0.001, help="Seconds between two load reports of a worker, at most.")
    ] = 0.2,
    report_gap: Annotated[
        float, typer.Option(min=0.001, help="The same at least: a change is reported this long after the last one.")
    ] = 0.005,
    estimate: Annotated[
        float,
        typer.Option(help="Routers take prefill for so many times as long as it is, and do not learn better."),
    ] = 1.0,
    host_tokens: Annotated[
        int, typer.Option(min=0, help="Each worker's host store, in tokens of KV; 0: it has none.")
    ] = 0,
    transfer_bandwidth: Annotated[
        float, typer.Option(min=0, help="GB/s from a worker to another, for KV that is pulled; 0: nothing is.")
    ] = 0.0,
    fail: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER@S[+S]", help="A worker is lost then, and back so much later; repeat for more."),
    ] = None,
    upgrade: Annotated[
        float | None, typer.Option(min=0, help="From then on workers change to a new model, one after the other.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: as many as there are cores.")] = 0,
    as_json: Json = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the TTFT of each policy there.")] = None,
) -> None:
    """Play a trace on a virtual clock under one or several policies, and compare what becomes of it.

    The router's decision, the directory and the bridges' admission are those that run live; engines are simulated."""
    from ..lab.setup import Setup, Upgrade, misjudged
    from . import charts, runs

    _profile(profile)
    for option, seconds in (
        ("--jitter", jitter),
        ("--event-delay", event_delay),
        ("--report-every", report_every),
        ("--report-gap", report_gap),
        ("--upgrade", upgrade),
    ):
        if seconds is not None and not seconds <= _LONGEST_S:
            raise ConfigInvalid(f"{seconds:g} s is no time of a run.", field=option, remedy="Give less than a day.")
    if not 0.0 < speed <= 1e6:
        raise ConfigInvalid(
            f"{speed:g} is no speed.", field="--speed", remedy="Give a number over 0; 1 is as recorded."
        )
    if not 0.0 < estimate <= 1000.0:
        raise ConfigInvalid(f"{estimate:g} is no factor.", field="--estimate", remedy="Give 0.5, 1 or 2, say.")
    if kv_tokens < (block_size or trace_block):
        raise ConfigInvalid(
            f"{kv_tokens} tokens are less than a block of {block_size or trace_block}.",
            field="--kv-tokens",
            remedy="Give more, or smaller blocks (--block-size).",
        )
    if not transfer_bandwidth <= 1e6:
        raise ConfigInvalid(
            f"{transfer_bandwidth:g} GB/s is no bandwidth.", field="--transfer-bandwidth", remedy="Give 25, say."
        )
    if report_gap > report_every:
        raise ConfigInvalid("is longer than --report-every.", field="--report-gap", remedy="Give less.")
    _writable(as_json, "--json", trace)
    _writable(plot, "--plot", trace)
    if plot is not None:
        charts.require()
    failures = tuple(_failure(text, workers) for text in fail or ())
    traffic = runs.Traffic(
        file=str(trace),
        trace_block=trace_block,
        block_size=block_size,
        first=first,
        speed=speed,
        jitter_s=(JITTER_S if seeds > 1 else 0.0) if jitter is None else jitter,
    )
    setup = Setup(
        workers=workers,
        routers=routers,
        kv_tokens=kv_tokens,
        profile=profile,
        model=None if estimate == 1.0 else misjudged(profile, estimate),
        learns=estimate == 1.0,
        report_gap_s=report_gap,
        report_every_s=report_every,
        event_delay_s=event_delay,
        event_loss=event_loss,
        host_tokens=host_tokens,
        transfer_bandwidth=transfer_bandwidth * 1e9 or None,
        failures=failures,
        upgrade=None if upgrade is None else Upgrade(at=upgrade),
        seed=seed,
    )
    asked = [
        runs.Job(label=label, setup=msgspec.structs.replace(setup, policy=policy, seed=seed + number))
        for label, policy in _policies(policies, has_faults=bool(failures) or upgrade is not None)
        for number in range(seeds)
    ]
    requests = len(runs.load(traffic).arrivals)
    _say(f"{requests} requests of {trace.name} on {workers} workers: {len(asked)} runs")
    played = list(runs.play(traffic, asked, jobs or runs.cores(), _say))
    if as_json is not None:
        _write(as_json, msgspec.json.format(msgspec.json.encode(_outcomes(traffic, setup, played))) + b"\n", "--json")
    if plot is not None:
        curves: dict[str, list[float]] = {}
        for one in played:
            curves.setdefault(one.label, []).extend(one.ttft_ms)
        title = f"{trace.name} x{speed:g}, {workers} workers"
        try:
            charts.ttft_curves({label: sorted(some) for label, some in curves.items() if some}, title, plot)
        except OSError as exc:
            raise ConfigInvalid(str(exc), field="--plot", remedy="Name a file that can be written.") from exc
    _print_comparison(played)


@commands.command()
def repeats(
    trace: Trace,
    first: First = 0,
    workers: Workers = 8,
    kv_tokens: KvTokens = 1 << 20,
    profile: Profile = "h100-8b",
    trace_block: TraceBlock = 512,
    as_json: Json = None,
) -> None:
    """How much of the beginning of prompts repeats, what caches could make of it, and whether routing is worth it.

    Reads a trace; `lab import` makes one of a log of requests."""
    from ..lab import repeats as repeats_module
    from ..lab import traces

    machine = _profile(profile)
    _writable(as_json, "--json", trace)
    try:
        with trace.open("rb") as lines:
            prompts = repeats_module.prompts(traces.read(lines, trace_block, first), trace_block)
    except OSError as exc:
        raise ConfigInvalid(str(exc), field=str(trace), remedy="Name a file that can be read.") from exc
    if not prompts:
        raise ConfigInvalid("holds no requests.", field=str(trace), remedy="Name a trace: JSON Lines, one a request.")
    if kv_tokens < trace_block:
        raise ConfigInvalid(
            f"{kv_tokens} tokens are less than a block of {trace_block}.", field="--kv-tokens", remedy="Give more."
        )
    report = repeats_module.report(prompts, trace_block, workers, kv_tokens, machine)
    if as_json is not None:
        _write(as_json, msgspec.json.format(msgspec.json.encode(report)) + b"\n", "--json")
    _print_report(report)


@commands.command("import")
def import_(
    log: Annotated[
        Path,
        typer.Argument(metavar="LOG", exists=True, dir_okay=False, readable=True, help="Requests: JSON Lines."),
    ],
    model: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, help="Directory of the model's tokenizer and chat template."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="TRACE", help="The trace to write.")],
    block_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens that an id shall stand for.")] = 16,
    tenant_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field that says who may share with whom, such as user.")
    ] = "tenant",
) -> None:
    """Make a trace of a log of OpenAI-style requests, tokenised as they would be served. No text goes into it."""
    from . import importing

    _writable(output, "--output", log)
    imported = importing.read(log, model, block_size, tenant_field, _say)
    for problem in imported.problems:
        some = ", ".join(map(str, problem.lines[:_MOST_LINES_NAMED]))
        more = f" and {len(problem.lines) - _MOST_LINES_NAMED} more" if len(problem.lines) > _MOST_LINES_NAMED else ""
        _say(f"left out, line {some}{more}: {problem.sentence}")
    trace = imported.trace
    lines = trace.lines()
    if not lines:
        raise ConfigInvalid(
            f"holds no request that can be read, in {imported.line_count} lines.",
            field=str(log),
            remedy="Name a file with one OpenAI-style request body a line.",
        )
    _write(output, b"".join(msgspec.json.encode(line) + b"\n" for line in lines), "--output")
    left_out = imported.line_count - len(lines)
    typer.echo(
        f"{len(lines)} of {imported.line_count} requests, {sum(line.input_length for line in lines)} prompt tokens, in"
        f" blocks of {block_size}{f'; {left_out} lines left out' if left_out else ''}"
    )
    if trace.estimated_count:
        typer.echo(
            f"{trace.estimated_count} answers of unknown length are taken to be as long as others of their class"
        )
    if trace.untimed_count == len(lines):
        typer.echo("no request has a timestamp: they come one a second")
    elif trace.untimed_count:
        typer.echo(f"{trace.untimed_count} requests without a timestamp come with the one before them")
    typer.echo(f"next: prefixbus lab repeats {output} --trace-block {block_size}")


# --- what is asked


def _policies(text: str, *, has_faults: bool) -> "list[tuple[str, Any]]":
    """Labels, and what a setup takes. :raises ConfigInvalid: there is no such policy, rule or file."""
    from ..lab import rules
    from ..router import policy as policy_module
    from . import control

    found: dict[str, Any] = {}
    for name in (part.strip() for part in text.split(",")):
        if name == ALL:
            found.setdefault(OURS, policy_module.Policy())
            for rule in map(rules.ruled, rules.RULES):
                # One cache of all cannot lose the part of one worker.
                if not has_faults or rules.cache_of(rule) is rules.Cache.OWN:
                    found.setdefault(rule.label, rule)
        elif name.partition(":")[0] in rules.RULES:
            rule = rules.ruled(name)
            found[rule.label] = rule
        elif name == OURS or Path(name).is_file():
            weights: Policy = policy_module.parse(control.policy_weights(name))
            found[OURS if name == OURS else weights.label] = weights
        else:
            raise ConfigInvalid(
                f"{name[:80]!r} is neither a policy, nor a rule, nor a file.",
                field="--policies",
                remedy=f"Use {ALL}, {OURS}, a JSON file with weights, or of: {', '.join(rules.RULES)}.",
            )
    return list(found.items())


def _profile(name: str) -> Any:
    """:raises ConfigInvalid: there is none of this name."""
    from ..engine_sim.profile import PRESETS

    if name not in PRESETS:
        raise ConfigInvalid(
            f"{name[:80]!r} is not a profile.", field="--profile", remedy=f"Use one of: {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def _failure(text: str, workers: int) -> "Failure":
    """`w3@60+30`, or `w3@60` for good. :raises ConfigInvalid: it is none, or there is no such worker."""
    from ..lab.setup import Failure

    worker, _, when = text.partition("@")
    at, _, back = when.partition("+")
    names = [f"w{number:0{len(str(workers - 1))}d}" for number in range(workers)]
    try:
        failure = msgspec.convert(
            {"at": float(at), "worker": worker, "back_after_s": float(back) if back else None}, Failure
        )
    except (ValueError, msgspec.ValidationError):
        failure = None
    if failure is None or worker not in names or not failure.at + (failure.back_after_s or 0.0) <= _LONGEST_S:
        raise ConfigInvalid(
            f"{text[:80]!r} is no failure of a worker.",
            field="--fail",
            remedy=f"Write WORKER@SECONDS or WORKER@SECONDS+SECONDS, with a worker of {names[0]} to {names[-1]}.",
        )
    return failure


def _writable(path: Path | None, option: str, source: Path) -> None:
    """Before minutes are spent on what cannot be kept. :raises ConfigInvalid: there is no such directory, or what is
    read stands there."""
    if path is not None and path.resolve() == source.resolve():
        raise ConfigInvalid(f"{str(path)!r} is what is read.", field=option, remedy="Name another file.")
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigInvalid(
            f"{str(path)!r} is not a file in a directory that exists.",
            field=option,
            remedy="Name one that can be made.",
        )


def _write(path: Path, data: bytes, option: str) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigInvalid(str(exc), field=option, remedy="Name a file that can be written.") from exc


# --- what is shown


def _say(line: str) -> None:
    from .terminal import plain

    typer.echo(plain(line), err=True)


def _outcomes(traffic: Any, setup: "Setup", played: Sequence["Played"]) -> Outcomes:
    return Outcomes(
        traffic=traffic,
        # The policy and the seed are each run's own.
        setup={field: getattr(setup, field) for field in setup.__struct_fields__ if field not in ("policy", "seed")},
        runs=[
            {"policy": one.label, "seed": one.seed, "figures": one.figures, "never_ends": one.never_ends}
            for one in played
        ],
    )


def _print_comparison(played: Sequence["Played"]) -> None:
    """A row a policy; with several seeds a mean and half of the runs' distance, `~`: no difference to the first."""
    from ..lab.spread import spread
    from .inquiries import print_parts

    by_label: dict[str, list[Played]] = {}
    for one in played:
        by_label.setdefault(one.label, []).append(one)
    times, state = _comparison_tables()
    base: Spread | None = None
    notes = []
    for label, some in by_label.items():
        never = [one.never_ends for one in some if one.never_ends]
        known = [one.figures for one in some if one.figures is not None]
        if never or not known:
            times.add_row(label, "never ends")
            notes.append(f"{label} never ends: {never[0]}, two hours after the last one came")
            continue
        means = [figures.ttft_ms.mean for figures in known if figures.ttft_ms is not None]
        if not means:
            times.add_row(label, "-")
            notes += _problems(label, known)
            continue
        ttft = spread(means)
        base = base or ttft
        times.add_row(label, *_times_of(known, ttft, base))
        state.add_row(label, *_state_of(known))
        notes += _problems(label, known)
    seeds = max(len(some) for some in by_label.values())
    parts: list[Any] = [times, "", state, ""]
    if seeds > 1:
        parts.append(f"Means of {seeds} seeds and half of the distance between the highest and the lowest;")
        parts.append("~: no difference that is larger than that distance.")
    print_parts(
        [
            *parts,
            *notes,
            "ttft to e2e in ms; avoided: prefill tokens; net s: prefill saved, less what was waited for; kv: findable.",
        ]
    )


def _comparison_tables() -> "tuple[Table, Table]":
    from rich.table import Table

    times = Table(box=None, padding=(0, 2, 0, 0))
    for column in (
        "policy",
        "ttft",
        "to first",
        "p50",
        "p95",
        "p99",
        "warm",
        "partial",
        "cold",
        "queue",
        "tpot",
        "e2e",
    ):
        times.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    state = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("policy", "reuse", "hits", "avoided", "net s", "moved GB", "copies", "kv", "busiest", "left warm"):
        state.add_column(column, justify="left" if column in ("policy", "left warm") else "right", no_wrap=True)
    return times, state


def _times_of(known: Sequence["Figures"], ttft: "Spread", base: "Spread") -> list[str]:
    def times(pick: Any, digits: int = 1) -> str:
        found = [value for value in map(pick, known) if value is not None]
        return _number([float(value) for value in found], digits) if found else "-"

    difference = None if ttft is base or base.mean == 0 else ttft.against(base)
    to_first = "" if ttft is base else "~" if difference is None else f"{difference:+.1%}"

    def mean_of(times_of: Any) -> Any:
        return lambda figures: None if times_of(figures) is None else times_of(figures).mean

    by_warmth = [
        times(mean_of(lambda figures, name=name: figures.ttft_ms_by_warmth[name]))
        for name in ("warm", "partial", "cold")
    ]
    return [
        times(mean_of(lambda figures: figures.ttft_ms)),
        to_first,
        times(lambda figures: figures.ttft_ms.p50),
        times(lambda figures: figures.ttft_ms.p95),
        times(lambda figures: figures.ttft_ms.p99),
        *by_warmth,
        times(mean_of(lambda figures: figures.queue_ms)),
        times(mean_of(lambda figures: figures.tpot_ms), 2),
        times(mean_of(lambda figures: figures.e2e_ms)),
    ]


def _state_of(known: Sequence["Figures"]) -> list[str]:
    reasons = sorted({reason for figures in known for reason in figures.left_warm_worker})
    left = [
        f"{reason} {_number([figures.left_warm_worker.get(reason, 0.0) for figures in known], 3)}" for reason in reasons
    ]
    return [
        _number([figures.token_reuse for figures in known], 3),
        _number([figures.request_hit_rate for figures in known], 3),
        f"{sum(figures.prefill_tokens_avoided for figures in known) / len(known):.0f}",
        _number([figures.prefill_ms_saved_net / 1000 for figures in known], 1),
        _number([figures.transferred_bytes / 1e9 for figures in known], 1),
        _number([figures.copies_per_block for figures in known], 2),
        _number([figures.kv_cached for figures in known], 2),
        _number([figures.imbalance_requests for figures in known], 2),
        ", ".join(left),
    ]


def _number(values: Sequence[float], digits: int) -> str:
    from ..lab.spread import spread

    one = spread(values)
    return f"{one.mean:.{digits}f}" + (f" ±{one.width / 2:.{digits}f}" if one.count > 1 else "")


def _problems(label: str, known: Sequence["Figures"]) -> list[str]:
    """What must not be read over."""
    notes = []
    for figures in known:
        if figures.errors:
            kinds = ", ".join(f"{count} {code}" for code, count in figures.errors.items())
            notes.append(f"{label}: of {figures.requests} requests not answered: {kinds}")
        if figures.wrong_hits:
            notes.append(f"{label}: {figures.wrong_hits} wrong hits")
    return list(dict.fromkeys(notes))


def _print_report(report: "Report") -> None:
    from rich.table import Table

    from .inquiries import print_parts

    classes = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("prefix class", "requests", "repeating", "tokens", "reusable", "share", "p50", "p90", "p99", "max"):
        classes.add_column(column, justify="left" if column == "prefix class" else "right", no_wrap=True)
    for name, one in {"all": report.all, **report.by_class}.items():
        classes.add_row(name, *_repeated(one))
    lengths = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("common prefix", "requests", "share"):
        lengths.add_column(column, justify="left" if column == "common prefix" else "right", no_wrap=True)
    for low, high, count in report.all.histogram:
        span = "none" if low == 0 else f"{low} tokens or more" if high is None else f"{low} to {high - 1} tokens"
        lengths.add_row(span, str(count), f"{count / report.all.requests:.1%}")
    bounds = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("cache", "token reuse", "prefill saved, s", "of all"):
        bounds.add_column(column, justify="left" if column == "cache" else "right", no_wrap=True)
    size = f"{report.kv_tokens} tokens"
    for name, bound in (
        ("without end", report.infinite),
        (f"one of {report.workers} x {size} that knows the future", report.ceiling),
        (f"one LRU of {report.workers} x {size}", report.pooled),
        (f"{report.workers} of {size}, dealt in turn", report.in_turn),
    ):
        share = bound.prefill_ms_saved / report.prefill_ms if report.prefill_ms else 0.0
        bounds.add_row(name, f"{bound.token_reuse:.2%}", f"{bound.prefill_ms_saved / 1000:.1f}", f"{share:.1%}")
    print_parts([classes, "", lengths, "", bounds, "", report.verdict])


def _repeated(one: "Repeated") -> list[str]:
    spread = one.prefix_tokens
    return [
        str(one.requests),
        str(one.repeating),
        str(one.prompt_tokens),
        str(one.reusable_tokens),
        f"{one.share:.2%}",
        *map(str, (spread.p50, spread.p90, spread.p99, spread.longest)),
    ]
