"""What is compared with what: the tables of the study.

Owns: which runs there are and what question each table answers.   Must not know: how they are run or drawn."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .cells import OURS, Cell

Fields = dict[str, Any]
Axis = list[tuple[str, Fields]]


class Table(NamedTuple):
    """Rows are circumstances, columns what is compared; both are fields of `Cell`, `setup` and `weights` are merged."""

    key: str
    title: str
    question: str
    rows: Axis
    columns: Axis
    seeds: int = 1
    shows: tuple[str, ...] = ("mean", "p95")

    def cells_of(self, row: Fields, column: Fields) -> list[Cell]:
        return [Cell(**_merged(row, column), seed=seed) for seed in range(self.seeds)]

    def cells(self) -> Iterator[Cell]:
        for _, row in self.rows:
            for _, column in self.columns:
                yield from self.cells_of(row, column)


def _merged(one: Fields, other: Fields) -> Fields:
    merged = {**one, **other}
    for name in ("setup", "weights"):
        if name in one and name in other:
            merged[name] = {**one[name], **other[name]}
    return merged


def _traffic(name: str, *speeds: float) -> Axis:
    return [(f"{name} x{speed:g}", {"traffic": name, "speed": float(speed)}) for speed in speeds]


def _policies(*names: str) -> Axis:
    return [(name, {"policy": name}) for name in names]


OURS_ALONE = _policies(OURS)
PUBLISHED = (
    "round-robin",
    "random",
    "least-loaded",
    "power-of-two",
    "consistent-hash",
    "longest-hit",
    "threshold",
    "overlap",
    "exploit-explore",
)
OVERLAP = tuple(f"overlap:{weight}" for weight in (1, 4, 16, 64))
OTHER_TUNINGS = (
    *(f"consistent-hash:{blocks}" for blocks in (2, 4, 8)),
    *(f"threshold:{share}" for share in (0.1, 0.5, 0.7)),
    *(f"exploit-explore:{imbalance}" for imbalance in (1.25, 1.5, 4)),
)
# Where a bar is set: from light load to the last load that is no collapse.
REAL = [*_traffic("conv", 1, 3, 5), *_traffic("syn", 1, 6, 7), *_traffic("tau", 1, 20)]
APART = [*_traffic("conv", 1, 5), *_traffic("syn", 6, 7), *_traffic("tau", 20)]
# Where the weight of overlap is tuned for each row.
BETWEEN = [*_traffic("conv", 1, 2, 3, 4, 5), *_traffic("syn", 1, 3, 5, 6, 7), *_traffic("tau", 1, 20)]
# One row of each trace: what is asked of each rule's parameters, and of each term of ours.
EACH = [*_traffic("conv", 1), *_traffic("syn", 6), *_traffic("tau", 20)]
CACHE_SIZES = (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22)

# Weights of the policy that could have been shipped.
SETTINGS: list[tuple[str, Fields]] = [
    ("as shipped", {}),
    ("no price of new KV", {"new_kv_price": 0.0}),
    ("price of new KV 0.6", {"new_kv_price": 0.6}),
    ("price of new KV 1", {"new_kv_price": 1.0}),
    ("no price of decode", {"decode_price": 0.0}),
    ("decode price 1", {"decode_price": 1.0}),
    ("no externality", {"externality_cap": 0.0}),
    ("siblings apart", {"sibling_bonus_ms": 0.0}),
    ("sibling bonus 200 ms", {"sibling_bonus_ms": 200.0}),
    ("queue as counted", {"queue_share": 1.0}),
    ("queue share 0.5", {"queue_share": 0.5}),
    ("margin 20 ms", {"margin_ms": 20.0}),
    ("no wait for memory", {"kv_turnover_ms": 0.0}),
]
WITHOUT: Axis = [
    ("nothing announced", {"setup": {"predict_delay_s": None}}),
    ("nothing learned", {"setup": {"learns": False}}),
    ("no bounded start", {"setup": {"bounded_start": False}}),
]

_HOST = {"host_tokens": 4 << 20}
_PULL = {"transfer_bandwidth": 25e9}

TABLES = [
    Table(
        "published",
        "Against rules as they are published",
        "One setting of ours for all traffic, against each rule at its published default. The last three no router"
        " can be: `oracle` knows true queues and caches, `pooled-lru` and `infinite` are one cache for all workers.",
        REAL,
        _policies(OURS, *PUBLISHED, "oracle", "pooled-lru", "infinite"),
        seeds=2,
    ),
    Table(
        "overlap",
        "Against overlap-minus-load, tuned for each row",
        "The weight that suits a row best is known only afterwards; here it is. The last columns are given our"
        " announced placements, too, which no published router of this rule has.",
        BETWEEN,
        [*_policies(OURS, *OVERLAP), *_policies("overlap-announced:1", "overlap-announced:64")],
        seeds=3,
    ),
    Table(
        "tuned",
        "Other rules, tuned",
        "What their parameters can do.",
        EACH,
        _policies(OURS, *OTHER_TUNINGS),
    ),
    Table(
        "load",
        "Load",
        "From idle to collapse: where is the knee?",
        [*_traffic("conv", 0.5, 1, 2, 3, 5, 6), *_traffic("syn", 0.5, 1, 2, 3, 6, 7), *_traffic("tau", 1, 20, 40, 80)],
        _policies(OURS, *PUBLISHED, "overlap:64", "oracle"),
    ),
    Table(
        "cache",
        "Cache size",
        "From a quarter to four times the KV of each worker.",
        [
            (f"{name} x1, {tokens >> 10}k tokens", {"traffic": name, "setup": {"kv_tokens": tokens}})
            for name in ("conv", "syn")
            for tokens in CACHE_SIZES
        ],
        _policies(OURS, "round-robin", "threshold", "overlap:64", "pooled-lru", "infinite"),
        shows=("reuse", "mean"),
    ),
    Table(
        "tight",
        "Where memory is short",
        "Prompts that nearly fill a worker (the longest of conv has 126,195 tokens), and small caches under load.",
        [
            ("conv x1, 128k tokens", {"traffic": "conv", "setup": {"kv_tokens": 1 << 17}}),
            ("conv x2, 256k tokens", {"traffic": "conv", "speed": 2.0, "setup": {"kv_tokens": 1 << 18}}),
            ("syn x4, 256k tokens", {"traffic": "syn", "speed": 4.0, "setup": {"kv_tokens": 1 << 18}}),
        ],
        _policies(OURS, "round-robin", "least-loaded", "threshold", "overlap", "overlap:64", "exploit-explore"),
        shows=("mean", "p50", "p95"),
    ),
    Table(
        "tiers",
        "A host tier, and pulls between workers",
        "A host store of four times the KV of each worker, 50 GB/s to its GPU, given to every rule; and KV pulled from"
        " other workers at 25 GB/s.",
        APART,
        [
            *_policies(OURS),
            (f"{OURS}, host tier of 4x", {"setup": _HOST}),
            (f"{OURS}, pulls", {"setup": _PULL}),
            (f"{OURS}, both", {"setup": {**_HOST, **_PULL}}),
            *((f"{name}, host tier of 4x", {"policy": name, "setup": _HOST})
              for name in ("least-loaded", "threshold", "overlap:64")),
            *_policies("pooled-lru"),
        ],
        shows=("mean", "p95", "reuse"),
    ),
    Table(
        "events",
        "A directory that hears late",
        "KV events arrive later, or 5 % of them never.",
        APART,
        [
            *((f"{s:g} s late", {"setup": {"event_delay_s": s}}) for s in (0.0, 0.1, 1.0, 10.0)),
            ("5 % lost", {"setup": {"event_loss": 0.05}}),
            ("10 s late, nothing announced", {"setup": {"event_delay_s": 10.0, "predict_delay_s": None}}),
        ],
        seeds=2,
    ),
    Table(
        "routers",
        "Several routers",
        "Each with its own view. The deaf hear nothing of each other, and bridges do not correct them.",
        [*_traffic("conv", 1, 3), *_traffic("syn", 6), *_traffic("tau", 20)],
        [
            *((f"{n}", {"setup": {"routers": n}}) for n in (1, 2, 4, 8)),
            ("8, deaf", {"setup": {"routers": 8, "announce_delay_s": None, "bounded_start": False}}),
            ("8, reports every 1 s", {"setup": {"routers": 8, "report_gap_s": 1.0, "report_every_s": 1.0}}),
        ],
    ),
    Table(
        "estimate",
        "A wrong estimate of prefill",
        "Routers are told that a prefill takes half or twice as long: as shipped, they learn better; or they never do.",
        APART,
        [
            ("right", {}),
            *((f"x{factor:g}", {"estimate": factor, "setup": {"learns": True}}) for factor in (0.5, 2.0)),
            *((f"x{factor:g} for ever", {"estimate": factor}) for factor in (0.5, 2.0)),
        ],
        seeds=2,
    ),
    Table(
        "faults",
        "Faults in the middle of a run",
        "A worker dies at 600 s and is back, empty, 60 s later; all workers are replaced one after the other from 600 s"
        " on, by a new revision whose cache is its own; the directory's every answer is false. Requests without a first"
        " token are in no TTFT.",
        [
            *((f"{name} x1, {what}", {"traffic": name, "setup": changes})
              for what, changes in (
                  ("no fault", {}),
                  ("a worker dies", {"failures": [{"at": 600.0, "worker": "w3", "back_after_s": 60.0}]}),
                  ("upgrade", {"upgrade": {"at": 600.0}}),
                  ("false directory", {"false_directory": True}),
              )
              for name in ("conv", "syn")),
        ],
        _policies(OURS, "round-robin", "least-loaded", "overlap:64"),
        shows=("mean", "p95", "reuse", "lost"),
    ),
    Table(
        "fleet",
        "Fleet size",
        "The same traffic a worker: arrivals are as much faster as the fleet is larger.",
        [
            (f"{n} workers, conv x{n / 8 * 2:g}", {"traffic": "conv", "speed": n / 8 * 2, "setup": {"workers": n}})
            for n in (2, 4, 8, 16, 32, 64)
        ],
        _policies(OURS, "least-loaded", "threshold", "overlap:64"),
    ),
    Table(
        "scenarios",
        "Made-up traffic",
        "Each isolates one thing that goes wrong in life. Four workers, eight for hot prefix and sessions.",
        [
            ("one hot prefix, near saturation", {"traffic": "one hot prefix, near saturation"}),
            ("sessions, one system prompt", {"traffic": "sessions, one system prompt"}),
            *((name, {"traffic": name, "setup": {"workers": 4}})
              for name in (
                  "never repeats", "200 siblings at once", "one long document, then several", "hot worker", "local hit",
                  "remote hit", "hot documents and rare cold requests")),
        ],
        _policies(OURS, "round-robin", "least-loaded", "longest-hit", "threshold", "overlap", "overlap:64",
                  "exploit-explore"),
        seeds=2,
        shows=("mean", "p95", "reuse"),
    ),
    Table(
        "terms",
        "Which terms earn their place",
        "Each term of the price taken away, made less or more of; and what the policy lives on, taken away.",
        [
            *_traffic("conv", 1, 5), *_traffic("syn", 6), *_traffic("tau", 20),
            ("conv x2, 256k tokens", {"traffic": "conv", "speed": 2.0, "setup": {"kv_tokens": 1 << 18}}),
            ("sessions, one system prompt", {"traffic": "sessions, one system prompt"}),
        ],
        [*((label, {"weights": weights}) for label, weights in SETTINGS), *WITHOUT],
        seeds=2,
    ),
]  # fmt: skip

QUICK = [
    Table(
        "quick",
        "A part of the study",
        "One row of each trace.",
        [*_traffic("conv", 1), *_traffic("syn", 6), *_traffic("tau", 20)],
        _policies(OURS, "round-robin", "least-loaded", "threshold", "overlap:64"),
    )
]
