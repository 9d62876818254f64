# ruff: noqa: TID251 - commands: they wait for what they ask
"""The commands that look at decisions: `explain`, `replay`, `mismatches` and `top`.

Owns: their arguments, exit statuses and output.   Must not know: how decisions are made or records are kept."""

import asyncio
import enum
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_STATE, Label, State, TokenFile, only_with, read_token

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..bus.messages import DecisionRecord
    from ..lab.mismatches import Report
    from ..lab.replay import Replayed, WhatIf
    from .records import Records
    from .resend import Again

# Heavy modules are imported by the commands that need them, as in cli.py.

commands = typer.Typer()


class Speed(enum.Enum):
    """When captured requests are sent again."""

    ORIGINAL = "original"
    AS_SOON_AS_POSSIBLE = "asap"


_MOST_SHOWN = 20
DEMO = "demo"

Since = Annotated[str, typer.Option(help="From then on: 10m, 2h, 1d ago, or 2026-03-01T12:00.")]
Until = Annotated[str, typer.Option(help="Up to then; as --since.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@commands.command()
def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="As `send` or `top` shows it, ours in full, or the client's Pb-Request-Id."
        ),
    ],
    state: State = DEFAULT_STATE,
    as_json: AsJson = False,
) -> None:
    """Show why a request went where it went, with every candidate's price, and what then happened."""
    from . import explain as explain_module
    from . import records

    async def work() -> "tuple[Records, list[str]]":
        async with records.operator(state) as bus:
            return await records.of_request(bus, request_id)

    found, others = asyncio.run(work())
    _say_unreadable(found.unreadable)
    if as_json:
        typer.echo(explain_module.document(found))
    else:
        print_parts(explain_module.story(found, others))


@commands.command()
def replay(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="One request, named as for `explain`; without it, all of the time range."
        ),
    ] = "",
    state: State = DEFAULT_STATE,
    since: Since = "",
    until: Until = "",
    policy: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="What this policy, or the one in this JSON file, would have chosen."),
    ] = "",
    directory_at: Annotated[
        int | None,
        typer.Option(
            "--directory-at", min=1, help="Instead: what each worker held at this sequence of the stream KV_EVENTS."
        ),
    ] = None,
    resend: Annotated[
        bool, typer.Option("--resend", help="Instead: send a tenant's captured requests of the time range again.")
    ] = False,
    speed: Annotated[
        Speed | None, typer.Option(help="--resend: at the original distances in time (the default), or at once.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="--resend: whose requests, and with whose token they are sent; default: demo.")
    ] = None,
    label: Label = "default",
    token_file: TokenFile = None,
) -> None:
    """Make recorded decisions again: the same must come out, to the last bit. Ends with 1 if it does not."""
    if not resend:
        of_resend = {"--speed": speed, "--tenant": tenant, "--token-file": token_file}
        only_with("--resend", [name for name, given in of_resend.items() if given is not None])
    if directory_at is not None:
        if request_id or since or until or policy or resend:
            raise typer.BadParameter("It goes with none of the others; give it alone.", param_hint="--directory-at")
        _print_directory(state, directory_at)
        return
    if resend:
        if request_id or policy:
            raise typer.BadParameter(
                "It sends all of a time range: give --since and --until, no REQUEST_ID and no --policy.",
                param_hint="--resend",
            )
        in_time = speed is not Speed.AS_SOON_AS_POSSIBLE
        _resend(state, _range(since, until), tenant or DEMO, label, read_token(token_file), in_time=in_time)
        return
    from ..lab import replay as replay_module
    from ..router import policy as policy_module
    from . import control

    other = policy_module.parse(control.policy_weights(policy)) if policy else None
    decisions = _decisions(request_id, state, since, until)
    if other is not None:
        _print_what_if(replay_module.what_if(decisions, other))
        return
    replayed = [replay_module.replay(decision) for decision in decisions]
    shadows = [again for decision in decisions if (again := replay_module.replay_shadow(decision)) is not None]
    different = [one for one in (*replayed, *shadows) if not one.same]
    print_parts(line for one in different[:_MOST_SHOWN] for line in _difference_lines(one))
    if request_id:
        if not different:
            typer.echo("same")
    else:
        unmade = sum(bool(one.problem) for one in different)
        also = f", {unmade} could not be made again" if unmade else ""
        beside = f" and {len(shadows)} of a shadow" if shadows else ""
        typer.echo(f"{len(replayed)} decisions{beside}, {len(different) - unmade} differences{also}")
    if different:
        raise typer.Exit(1)


def _resend(
    state: Path,
    bounds: tuple[float | None, float | None],
    tenant: str,
    label: str,
    token: str,
    *,
    in_time: bool,
) -> None:
    from ..bus import subjects
    from . import deployment, records
    from . import resend as resend_module

    subjects.token(tenant, "--tenant")
    credential = resend_module.Credential(tenant, token, label, deployment.read_cluster(state).nats_url)

    async def work() -> "list[Again]":
        async with records.operator(state) as bus:
            requests, unreadable = await resend_module.captured(bus, tenant, *bounds)
            _say_unreadable(unreadable, "captured request")
            if not requests:
                return []
            tls = deployment.tls_of(state)
            sent, unreadable = await resend_module.resend(bus, credential, requests, tls, in_time=in_time)
            _say_unreadable(unreadable)
            return sent

    sent = asyncio.run(work())
    if not sent:
        typer.echo(f"nothing of tenant {tenant} is captured in this time; [capture] in config.toml says whose is")
        return
    print_parts([resend_module.table(sent), resend_module.sums(sent)])
    if any(again.error for again in sent):
        raise typer.Exit(1)


@commands.command()
def mismatches(
    state: State = DEFAULT_STATE,
    since: Since = "",
    until: Until = "",
    as_json: AsJson = False,
) -> None:
    """Group reuse that was predicted or possible, and was not had, by its cause. Knows no text."""
    import msgspec

    from ..lab import mismatches as mismatches_module
    from . import past, records

    first, last = _range(since, until)

    async def work() -> "tuple[Records, past.Told]":
        async with records.operator(state) as bus:
            found = await records.between(bus, first, last)
            told = await past.told(bus, first, last)
        return found, told

    found, told = asyncio.run(work())
    _say_unreadable(found.unreadable)
    _say_unreadable(told.unreadable, "event")
    report = mismatches_module.report(found.decisions, found.outcomes, told.removals, told.lives)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        _print_mismatches(report, told.kept_since)


@commands.command()
def top(
    state: State = DEFAULT_STATE,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch workers, reuse, times to first token and the last decisions, until Ctrl-C."""
    from . import top as top_module

    asyncio.run(top_module.show(state, once=once))


def _print_directory(state: Path, seq: int) -> None:
    from rich.table import Table

    from ..bus import config
    from . import past, records

    async def work() -> past.State:
        async with records.operator(state) as bus:
            shards = config.load(state / "config.toml", os.environ).directory.shards
            return await past.directory_at(bus, seq, shards)

    rebuild, unreadable = asyncio.run(work())
    _say_unreadable(unreadable, "event")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("worker", "shard", "incarnation", "last event", "blocks", "on the host", "story"):
        table.add_column(column, justify="left" if column in ("worker", "story") else "right", no_wrap=True)
    for held in rebuild.held():
        numbers = (held.shard, held.incarnation, held.last_event, held.gpu_blocks, held.host_blocks)
        table.add_row(held.worker, *map(str, numbers), "whole" if held.complete else "has holes")
    blocks = sum(held.gpu_blocks + held.host_blocks for held in rebuild.held())
    print_parts([table, f"{blocks} blocks of {rebuild.namespaces} namespaces after message {seq} of KV_EVENTS"])


def _decisions(request_id: str, state: Path, since: str, until: str) -> "list[DecisionRecord]":
    from . import records

    if request_id and (since or until):
        raise typer.BadParameter("A request has its own time: leave it out beside a REQUEST_ID.", param_hint="--since")
    first, last = _range(since, until)

    async def work() -> "Records":
        async with records.operator(state) as bus:
            if request_id:
                return (await records.of_request(bus, request_id))[0]
            return await records.between(bus, first, last)

    found = asyncio.run(work())
    _say_unreadable(found.unreadable)
    return found.decisions


def _say_unreadable(subjects: Sequence[str], what: str = "record") -> None:
    """`subjects` are those under which there was something that is left out."""
    from .terminal import plain

    if subjects:
        count = f"1 {what} is" if len(subjects) == 1 else f"{len(subjects)} {what}s are"
        why = "cannot be read, or not about its subject"
        typer.echo(f"{count} left out ({why}), such as under {plain(subjects[0])}", err=True)


def _range(since: str, until: str) -> tuple[float | None, float | None]:
    from . import moments

    now = time.time()
    first = moments.parse(since, now, "--since") if since else None
    last = moments.parse(until, now, "--until") if until else None
    if last is not None and first is not None and last <= first:
        raise typer.BadParameter("It is not after --since: 2h is earlier than 1h.", param_hint="--until")
    return first, last


def _print_mismatches(report: "Report", events_since: float | None) -> None:
    from rich.table import Table

    from . import moments

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("cause", "requests", "foreseen", "tokens", "such as"):
        table.add_column(column, justify="left" if column in ("cause", "such as") else "right", no_wrap=True)
    for cause, group in report.causes.items():
        figures = (group.requests, group.foreseen, group.tokens)
        table.add_row(cause, *map(str, figures), ", ".join(group.examples[:1]))
    kept = f"begins at {moments.show(events_since)}" if events_since is not None else "is empty"
    same = report.same_document
    print_parts(
        [
            table,
            f"{report.requests} requests: {report.predicted} cached tokens predicted, {report.cached} found",
            f"more than predicted: {report.more.requests} requests, {report.more.tokens} tokens",
            f"same document, different prefix: {same.requests} requests, {same.tokens} tokens",
            "foreseen: the prediction said so already; tokens: what was not reused, though it could have been",
            f"KV_EVENTS {kept}: an eviction before that is told as unknown",
        ]
    )


def _difference_lines(one: "Replayed") -> list[str]:
    name = f"{one.request_id} attempt {one.attempt}"
    if one.problem:
        return [f"{name}: could not be made again: {one.problem}"]
    return [f"{name}: {each.field}: recorded {each.recorded}, replayed {each.replayed}" for each in one.differences]


def _print_what_if(report: "WhatIf") -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recorded", report.policy):
        table.add_column(column, no_wrap=True)
    for column in ("count", "moved", "ttft ms", "would be", "reused", "would be"):
        table.add_column(column, justify="right", no_wrap=True)
    for effect in report.effects:
        table.add_row(
            effect.recorded,
            effect.replayed,
            str(effect.count),
            str(effect.moved),
            f"{effect.recorded_ttft_ms / effect.count:.1f}",
            f"{effect.replayed_ttft_ms / effect.count:.1f}",
            str(effect.recorded_cached_tokens),
            str(effect.replayed_cached_tokens),
        )
    count = max(report.decisions, 1)
    if report.effects:
        print_parts([table, ""])
    print_parts(
        [
            f"{report.decisions} decisions, {report.moved} would have gone to another worker",
            f"predicted TTFT: sum {report.recorded_ttft_ms:.0f} -> {report.replayed_ttft_ms:.0f} ms, "
            f"mean {report.recorded_ttft_ms / count:.1f} -> {report.replayed_ttft_ms / count:.1f} ms",
            f"predicted reuse: {report.recorded_cached_tokens} -> {report.replayed_cached_tokens} "
            f"of {report.prompt_tokens} prompt tokens",
            "Each decision by itself, among its recorded candidates: queues and caches that other choices would have",
            "led to are not in it.",
            *(line for one in report.problems[:_MOST_SHOWN] for line in _difference_lines(one)),
        ]
    )


def print_parts(parts: "Iterable[RenderableType]") -> None:
    """Tables, and text as it is. Wide tables are not cut, wherever they go."""
    from rich.console import Group

    from .status import terminal
    from .terminal import Terminal

    made = list(parts)
    console = terminal()
    needed = Terminal(width=10_000).measure(Group(*made)).maximum if made else 0
    # A table that is cut says nothing; a terminal wraps what is too long for it.
    wide = Terminal(width=max(console.width, needed)) if any(not isinstance(part, str) for part in made) else console
    for part in made:
        if isinstance(part, str):
            console.print(part, soft_wrap=True)
        else:
            wide.print(part)
