"""The study in words: tables with their spread, the bars with what was measured, and where others are ahead.

Owns: how figures are said.   Must not know: how they are measured."""

from prefixbus.lab.rules import RULES, ruled
from prefixbus.lab.spread import Spread

from .bars import Bar, bars
from .cells import OURS
from .compare import Known, difference, figure
from .plan import Table


def said(value: Spread | None, name: str) -> str:
    if value is None:
        return "never ends"
    if name in ("reuse", "imbalance"):
        return f"{value.mean:.3f}" if name == "reuse" else f"{value.mean:.2f}"
    half = value.width / 2
    return f"{value.mean:.0f}" if half < 0.5 else f"{value.mean:.0f} ± {half:.0f}"


def table(one: Table, measured: Known) -> str:
    lines = [f"## {one.title}", "", one.question, ""]
    lines.append(f"TTFT in ms ({', '.join(one.shows)}); {one.seeds} seed{'s' if one.seeds > 1 else ''}.")
    for name in one.shows:
        lines += ["", f"| {name} | " + " | ".join(label for label, _ in one.columns) + " |"]
        lines.append("|---" * (1 + len(one.columns)) + "|")
        for label, row in one.rows:
            values = [figure(one, row, column, name, measured) for _, column in one.columns]
            known = [value.mean for value in values if value is not None]
            best = max(known) if name == "reuse" else min(known) if known else 0.0
            cells = [
                f"**{said(value, name)}**" if value is not None and value.mean == best else said(value, name)
                for value in values
            ]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tables(some: list[Table], measured: Known) -> str:
    return "\n".join(table(one, measured) for one in some)


def bar_table(some: list[Bar]) -> str:
    lines = ["| what | bar | measured | |", "|---|---|---|---|"]
    for bar in some:
        value = "never ends" if bar.measured is None else f"{bar.measured:.3f}"
        sign = ">=" if bar.is_floor else "<="
        lines.append(f"| {bar.what} | {sign} {bar.limit:g} | {value} | {'holds' if bar.holds else '**fails**'} |")
    return "\n".join(lines) + "\n"


def lost_cells(some: list[Table], measured: Known) -> list[str]:
    """Where another policy is ahead of ours by more than the spread; ablations of ours are not others."""
    lines = []
    for one in some:
        columns = dict(one.columns)
        if OURS not in columns:
            continue
        for label, row in one.rows:
            for name in ("mean", "p95"):
                ours = figure(one, row, columns[OURS], name, measured)
                for other, column in one.columns:
                    theirs = figure(one, row, column, name, measured)
                    if other == OURS or ours is None or theirs is None or theirs.mean >= ours.mean:
                        continue
                    if (said_difference := difference(ours, theirs)) != "none":
                        lines.append(f"| {one.key} | {label} | {name} | {other} | {said_difference} |")
    return lines


HEAD = """# Acceptance: the policy on recorded traffic, beside every rule people use instead

Written by `make acceptance` and by nothing else; no figure here was typed. A run plays recorded traffic in virtual
time: the production directory, decision, books, learner and admission, in front of simulated engines (services/lab).
Times are TTFT in ms, from a request's arrival to its first token.

**What this can show, and what not.** Engines are simulated by a cost model (`h100-8b`: 8 workers, 1,048,576 tokens of
KV each unless said), so absolute times are those of the model; what is compared is where requests were sent. Recorded
prompts are lengths and chained block ids, so what repeats in them is real. `conv` and `syn` are the Mooncake (FAST'25)
conversation and synthetic traces, `tau` is made from tau-bench's airline dialogs; `xN` means that requests arrive N
times as fast as recorded. Each seed shifts every arrival by up to 5 ms, which reorders those recorded at one instant;
figures are means over the seeds, ± half their range, and a difference no larger than that range is called none.

**Every rule plays on the same ground**: the same hits from the same directory, the same queues as bridges report them,
the same engines. What is ours alone is what belongs to the product: bridges that keep the order of what waits, true
queues in their answers, and announced placements; other routers hand their engine all at once, as they do in life.
"""


def whole(some: list[Table], measured: Known) -> str:
    """docs/acceptance.md."""
    wanted = bars(some, measured)
    held = sum(bar.holds for bar in wanted)
    lost = lost_cells(some, measured)
    parts = [
        HEAD,
        "## The rules\n",
        "| rule | as published |\n|---|---|\n"
        + "\n".join(f"| {ruled(name).label} | {source.description} |" for name, source in RULES.items())
        + "\n",
        f"## The bars: {held} of {len(wanted)} hold\n",
        bar_table(wanted),
        "## Where another rule is ahead\n",
        "Beyond the spread, of all tables below: there ours is not the best choice.\n",
        "| table | row | figure | rule | ours to it |\n|---|---|---|---|---|\n" + "\n".join(lost) + "\n"
        if lost
        else "Nowhere.\n",
        "## Pictures\n",
        "\n".join(
            f"![{words}](acceptance/{name}.png)\n"
            for name, words in (
                ("ttft-cdf", "TTFT: share of requests answered by then"),
                ("ttft-load", "Mean TTFT against load"),
                ("reuse-cache", "Token reuse against cache size"),
                ("ttft-delay", "Mean TTFT against the delay of KV events"),
            )
        ),
        tables(some, measured),
    ]
    return "\n".join(parts)
