"""The study in words: tables with their spread, the bars with what was measured, and where others are ahead.

Owns: how figures are said.   Must not know: how they are measured."""

from prefixbus.lab.figures import Figures
from prefixbus.lab.results import Times
from prefixbus.lab.rules import RULES, ruled
from prefixbus.lab.spread import Spread

from .bars import AMBITION, Bar, Closed, bars, gap_closed
from .cells import OURS
from .compare import Known, difference, figure
from .holdout import held_out
from .plan import Table

# What no router can do, or know.
BOUNDS = ("oracle", "pooled-lru", "infinite")
FIGURES = {
    "mean": "Mean TTFT, ms",
    "p50": "Median TTFT, ms",
    "p95": "p95 TTFT, ms",
    "reuse": "Token reuse, share of prompt tokens",
    "lost": "Requests that did not end well",
}


def said(value: Spread | None, name: str) -> str:
    if value is None:
        return "never ends"
    if name == "reuse":
        return f"{value.mean:.3f}"
    half = value.width / 2
    return f"{value.mean:.0f}" if half < 0.5 else f"{value.mean:.0f} ± {half:.0f}"


def table(one: Table, measured: Known) -> str:
    lines = [f"## {one.title}", "", one.question, ""]
    for name in one.shows:
        lines += [f"{FIGURES[name]}, {one.seeds} seed{'s' if one.seeds > 1 else ''}:", ""]
        lines.append("| | " + " | ".join(label for label, _ in one.columns) + " |")
        lines.append("|---" * (1 + len(one.columns)) + "|")
        for label, row in one.rows:
            values = [figure(one, row, column, name, measured) for _, column in one.columns]
            possible = [
                value.mean
                for (of, _), value in zip(one.columns, values, strict=True)
                if value is not None and of not in BOUNDS
            ]
            best = (max if name == "reuse" else min)(possible, default=None)
            cells = [
                f"**{said(value, name)}**" if value is not None and value.mean == best else said(value, name)
                for value in values
            ]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines) + "\n"


def tables(some: list[Table], measured: Known) -> str:
    return "\n".join(table(one, measured) for one in some)


def bar_table(some: list[Bar]) -> str:
    lines = ["| what | bar | measured | pooled LRU | |", "|---|---|---|---|---|"]
    for bar in some:
        value = "never ends" if bar.measured is None else f"{bar.measured:.3f}"
        if bar.chance:
            value += f" ± {bar.chance:.3f}"
        pooled = "" if bar.pooled is None else f"{bar.pooled:.3f}"
        sign = ">=" if bar.is_floor else "<="
        lines.append(f"| {bar.what} | {sign} {bar.limit:g} | {value} | {pooled} | {_verdict(bar)} |")
    return "\n".join(lines) + "\n"


def _verdict(bar: Bar) -> str:
    if bar.holds:
        return "holds"
    if bar.pooled is not None and bar.pooled > bar.limit:
        return "**fails**, as the pooled LRU would"
    if bar.measured is not None and abs(bar.measured - bar.limit) <= bar.chance:
        return "**fails**, by less than seeds move it"
    return "**fails**"


def lost_cells(some: list[Table], measured: Known) -> list[str]:
    """Where another policy is ahead of ours in the same circumstances by more than the spread, with what tells why."""
    lines = []
    for one in some:
        columns = dict(one.columns)
        for other, column in one.columns:
            rule, comma, circumstances = other.partition(",")
            mine = columns.get(f"{OURS}{comma}{circumstances}")
            if mine is None or rule == OURS or rule in BOUNDS:
                continue
            for label, row in one.rows:
                for name in ("mean", "p95"):
                    ours = figure(one, row, mine, name, measured)
                    theirs = figure(one, row, column, name, measured)
                    if theirs is None or (ours is not None and theirs.mean >= ours.mean):
                        continue
                    by = "never ends" if ours is None else difference(ours, theirs)
                    if by == "none":
                        continue
                    why = (
                        f"{said(figure(one, row, mine, of, measured), of)} / "
                        f"{said(figure(one, row, column, of, measured), of)}"
                        for of in ("reuse", "queue")
                    )
                    lines.append(f"| {one.key} | {label} | {name} | {other} | {by} | {' | '.join(why)} |")
    return lines


def closed_table(some: list[Closed]) -> str:
    lines = ["| row | overlap at its best | pooled LRU | ours with pulls | closed |", "|---" * 5 + "|"]
    lines += [f"| {one.row} | {one.tuned:.0f} | {one.pooled:.0f} | {one.ours:.0f} | {one.share:.0%} |" for one in some]
    return "\n".join(lines) + "\n"


def everything(published: Table, measured: Known, label: str) -> str:
    """All figures of a row, of the first seed and of the rules that ended."""
    row = dict(published.rows)[label]
    shown = []
    for policy, column in published.columns:
        one = measured[published.cells_of(row, column)[0].key].figures
        if one is not None:
            shown.append((policy, _figures_of(one)))
    lines = [f"{label}:", "", "| | " + " | ".join(policy for policy, _ in shown) + " |"]
    lines.append("|---" * (1 + len(shown)) + "|")
    names = shown[0][1] if shown else {}
    lines += [f"| {name} | " + " | ".join(values[name] for _, values in shown) + " |" for name in names]
    return "\n".join(lines) + "\n"


def _figures_of(one: Figures) -> dict[str, str]:
    def ms(times: Times | None, name: str = "mean") -> str:
        return "" if times is None else f"{getattr(times, name):.0f}"

    left = ", ".join(f"{reason} {share:.1%}" for reason, share in sorted(one.left_warm_worker.items()))
    return {
        "requests that hit, share": f"{one.request_hit_rate:.3f}",
        "token reuse": f"{one.token_reuse:.3f}",
        "prefill tokens avoided, million": f"{one.prefill_tokens_avoided / 1e6:.1f}",
        "prefill saved less queue, s": f"{one.prefill_ms_saved_net / 1000:.0f}",
        "queue, mean ms": ms(one.queue_ms),
        "TTFT mean": ms(one.ttft_ms),
        "TTFT p50": ms(one.ttft_ms, "p50"),
        "TTFT p95": ms(one.ttft_ms, "p95"),
        "TTFT p99": ms(one.ttft_ms, "p99"),
        **{f"TTFT mean, {warmth}": ms(times) for warmth, times in one.ttft_ms_by_warmth.items()},
        "TPOT, mean ms": "" if one.tpot_ms is None else f"{one.tpot_ms.mean:.1f}",
        "end to end, mean ms": ms(one.e2e_ms),
        "transferred, GB": f"{one.transferred_bytes / 1e9:.0f}",
        "copies of a block": f"{one.copies_per_block:.2f}",
        "KV in use, share": f"{one.kv_in_use:.3f}",
        "busiest worker to mean": f"{one.imbalance_requests:.2f}",
        "left their warm worker": left,
        "wrong hits": str(one.wrong_hits),
    }


def knees(load: Table, measured: Known) -> str:
    """The last measured load at which a policy's mean is no more than twice that of the lightest."""
    lines = ["| | " + " | ".join(label for label, _ in load.columns) + " |"]
    lines.append("|---" * (1 + len(load.columns)) + "|")
    for traffic in dict.fromkeys(row["traffic"] for _, row in load.rows):
        rows = [row for _, row in load.rows if row["traffic"] == traffic]
        cells = []
        for _, column in load.columns:
            means = [(row["speed"], figure(load, row, column, "mean", measured)) for row in rows]
            first = means[0][1]
            before = [speed for speed, value in means if first and value and value.mean <= 2 * first.mean]
            cells.append(f"x{max(before):g}" if before else "none")
        lines.append(f"| {traffic} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def holdout_table(terms: Table, measured: Known) -> str:
    lines = ["| held out | setting chosen on the others | its mean | as shipped | best of all settings |"]
    lines.append("|---" * 5 + "|")
    for one in held_out(terms, measured):
        values = (said(value, "mean") for value in (one.by_others, one.shipped, one.best))
        lines.append(f"| {one.row} | {one.chosen} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


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


BARS = """Ratios of TTFT unless said; ± is how far the seeds move the ratio. "Pooled LRU" is where one cache of all
workers' memory with free transfer would be, in place of ours.
"""
LOST = """Beyond the spread, where there are seeds to tell it, of all tables below: there ours is not the best choice.
The last columns tell why: less reuse, or as much and a longer queue. Which weight of `overlap` suits a row best is
known only afterwards.
"""
WHY = """Why, rule by rule:

- `overlap` with a heavy weight, p95 at light load: it waits less, ours reuses more. A request of ours waits a little
  for a hit, since KV that is made twice evicts what others need; the mean gains, and the longest prompts pay.
- Any rule past the knee (conv x6): queues grow as long as the traffic lasts, for all. Who gathers prefixes on few
  workers computes less and is through sooner; our price for what others wait spreads them. Such a fleet should
  refuse.
- All but ours, 200 siblings of one document at once: they let every worker compute the document, which is soonest if
  nothing else is wanted. Ours keeps siblings together, where the document is computed once or twice; the memory and
  work it saves are for traffic that this scenario does not have.
- Rules by load, "hot worker": documents small enough for every worker to hold all of them. Nothing is gained by
  affinity then, and a queue is lost.
- Least-loaded, a directory that is false throughout: whoever does not ask is not misled. Ours soon believes it less.
"""
CLOSED = f"""How much of the way from overlap at its best weight to one pooled LRU is gone with pulls at 25 GB/s; the
ambition is {AMBITION:.0%}. Mean TTFT in ms.
"""
KNEE = """The last measured load at which the mean TTFT is no more than twice that of the lightest load.
"""
HELD_OUT = """Each trace is held out once: of the settings in the table of terms, the one with the lowest TTFT on the
other traces (geometric mean) is chosen, and shown on the trace that had no say in it.
"""


def whole(some: list[Table], measured: Known) -> str:
    """docs/acceptance.md."""
    wanted = bars(some, measured)
    held = sum(bar.holds for bar in wanted)
    lost = lost_cells(some, measured)
    by_key = {one.key: one for one in some}
    parts = [
        HEAD,
        "## The rules\n",
        "| rule | as published |\n|---|---|\n"
        + "\n".join(f"| {ruled(name).label} | {source.description} |" for name, source in RULES.items())
        + "\n",
        f"## The bars: {held} of {len(wanted)} hold\n",
        BARS,
        bar_table(wanted),
        "## Where another rule is ahead\n",
        LOST,
        "| table | row | figure | rule | ours to it | reuse, ours / its | mean wait in queue, ours / its |\n"
        + "|---" * 7 + "|\n" + "\n".join(lost) + "\n"
        if lost
        else "Nowhere.\n",
        WHY,
        "## The way to one pooled cache\n",
        CLOSED,
        closed_table(gap_closed(some, measured)),
        "## The knee\n",
        KNEE,
        knees(by_key["load"], measured),
        "## One setting for all traffic\n",
        HELD_OUT,
        holdout_table(by_key["terms"], measured),
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
        "## Every figure\n",
        *(everything(by_key["published"], measured, label) for label in ("conv x1", "conv x5", "syn x6", "tau x20")),
    ]  # fmt: skip
    return "\n".join(parts)
