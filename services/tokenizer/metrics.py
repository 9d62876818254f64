"""What a tokenizer tells Prometheus. Labels are bounded: error codes, names of configured models, and words of ours.

Owns: names, labels, buckets.   Must not know: how anything is counted.   Source: DESIGN 11."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "prefixbus_tokenizer_requests",
            "Requests by result (ok, an error code, no_reply).",
            ["code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "prefixbus_tokenizer_seconds",
            "From arrival to the router, waiting included.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.tokens = Counter(
            "prefixbus_tokenizer_tokens", "Prompt tokens by source (memo, encoded).", ["source"], registry=registry
        )
        self.covered = Counter(
            "prefixbus_tokenizer_covered", "Requests whose texts held special tokens, kept as text.", registry=registry
        )
        self.uncacheable = Counter(
            "prefixbus_tokenizer_uncacheable",
            "Requests with media that nobody can name: they share nothing.",
            registry=registry,
        )
        self.model_state = Gauge(
            "prefixbus_tokenizer_model_state",
            "0 cannot be loaded, 1 prompts are encoded whole (no memo), 2 by special tokens, 3 in pieces.",
            ["model"],
            registry=registry,
        )
        self.clocked_template = Gauge(
            "prefixbus_tokenizer_clocked_template",
            "1 if the model's chat template prints the current time, which spoils reuse.",
            ["model"],
            registry=registry,
        )
        self.in_work = Gauge("prefixbus_tokenizer_in_work", "Requests in work.", registry=registry)
        self.facts_lost = Counter(
            "prefixbus_tokenizer_facts_lost", "Forged replies that are not on the record.", registry=registry
        )
        self.cancels = Counter(
            "prefixbus_tokenizer_cancels",
            "Tenants' cancels (passed, malformed, lost: too many of one tenant, or no bus).",
            ["result"],
            registry=registry,
        )
        self.captures_lost = Counter(
            "prefixbus_tokenizer_captures_lost",
            "Requests that should have been captured and were not.",
            registry=registry,
        )
        self.ok = self.requests.labels("ok")
        self.from_memo = self.tokens.labels("memo")
        self.encoded = self.tokens.labels("encoded")
        self.memo_bytes = Gauge("prefixbus_tokenizer_memo_bytes", "Bytes of remembered ids.", registry=registry)
