"""What became of a run: one record a request, and the sums that are compared.

Owns: the figures and how they are made.   Must not know: how requests are run.
Units: milliseconds from a request's arrival, tokens. A quantile is the value at rank ceil(q*n)."""

from collections import Counter

import msgspec


class Served(msgspec.Struct, kw_only=True):
    """One request. `queue_ms`: from its arrival to the engine's first step for it; None where it never got so far.

    `status`: ok, error, cancelled, or shed (the router ended it). `worker_lost`, too, is a router's word: its
    worker fell silent after the first token, or the last of several did before."""

    request_id: str
    at: float
    tenant: str
    prefix_class: str
    router: str
    prompt_tokens: int
    output_tokens: int
    worker: str = ""
    decision: str = ""
    attempts: int = 0
    predicted_tokens: int = 0
    cached_tokens: int | None = None
    prefill_tokens: int | None = None
    # Of the last attempt: fetched from its worker's host store, and from another worker. They count as cached unless
    # the engine found as much by then.
    loaded_tokens: int = 0
    pulled_tokens: int = 0
    transferred_bytes: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    status: str = ""
    error: str = ""
    # Of the model, that it was asked of.
    revision: int = 0


class WorkerTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's whole run. `prompt_tokens` are those of requests it served, `computed_tokens` with those of outputs
    and of orders; `orders_given_up` are those that a request ended."""

    worker: str
    requests: int
    prompt_tokens: int
    computed_tokens: int
    busy_ms: float
    refused: int
    given_back: int
    preemptions: int
    orders_done: int = 0
    orders_given_up: int = 0
    # Blocks that an engine served from other tokens or another tenant's: must stay 0.
    wrong_hits: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers held at an instant of the run. `kv_in_use` is the share of the fleet's KV that requests hold,
    `kv_cached` the share that can be found again; `copies` of a block are the workers where it can, on average over the
    blocks that can be found anywhere (0: there are none)."""

    at: float
    kv_in_use: float
    kv_cached: float
    copies: float


class Times(msgspec.Struct, frozen=True):
    """Of some requests' milliseconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    highest: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `leftovers`: what is still booked, predicted or in hand when all is over; empty, or a defect."""

    served: list[Served]
    workers: list[WorkerTotals]
    leftovers: list[str]
    ended_at: float
    dumps_asked: int
    lost_events: int
    # At even distances from the first arrival to the last.
    samples: list[Sample] = []

    def ttft(self, *, prefix_class: str = "") -> Times:
        """Of all requests that had a first token, or of a class of them."""
        return times(
            [
                one.ttft_ms
                for one in self.served
                if one.ttft_ms is not None and (not prefix_class or one.prefix_class == prefix_class)
            ]
        )

    def queue(self, *, prefix_class: str = "") -> Times:
        return times(
            [
                one.queue_ms
                for one in self.served
                if one.queue_ms is not None and (not prefix_class or one.prefix_class == prefix_class)
            ]
        )

    @property
    def token_reuse(self) -> float:
        """Reused / prompt tokens, of the requests that an engine began."""
        begun = [one for one in self.served if one.cached_tokens is not None]
        return sum(one.cached_tokens or 0 for one in begun) / max(1, sum(one.prompt_tokens for one in begun))

    @property
    def busiest_to_mean(self) -> float:
        """The busiest worker's requests, to the mean of all workers."""
        counts = [worker.requests for worker in self.workers]
        return max(counts) * len(counts) / max(1, sum(counts))

    @property
    def busiest_prefill_to_mean(self) -> float:
        """The same in tokens computed."""
        counts = [worker.computed_tokens for worker in self.workers]
        return max(counts) * len(counts) / max(1, sum(counts))

    @property
    def decisions(self) -> dict[str, int]:
        return dict(Counter(one.decision for one in self.served).most_common())

    def __str__(self) -> str:
        ttft = self.ttft()
        return (
            f"{len(self.served)} requests: ttft mean {ttft.mean:.1f} p50 {ttft.p50:.1f} p95 {ttft.p95:.1f} ms,"
            f" reuse {self.token_reuse:.3f}, busiest/mean {self.busiest_to_mean:.2f},"
            f" refused {sum(worker.refused for worker in self.workers)}, {self.decisions}"
        )


def times(milliseconds: list[float]) -> Times:
    """:raises ValueError: of none."""
    if not milliseconds:
        raise ValueError("no request has this time")
    ordered = sorted(milliseconds)
    count = len(ordered)

    def quantile(thousandths: int) -> float:
        return ordered[-(-thousandths * count // 1000) - 1]

    return Times(count, sum(ordered) / count, quantile(500), quantile(950), quantile(990), ordered[-1])
