"""Among the few that are considered the decision falls as it would among everybody."""

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixbus.bus.messages import Holdings, Level, Load, Outcome, Route
from prefixbus.router.cost import PROFILES
from prefixbus.router.fleet import Available, Fleet, Surroundings, WorkerClass
from prefixbus.router.learning import Learner
from prefixbus.router.policy import Decision, Policy, decide
from prefixbus.router.shortlist import Shortlist, shortlist

BLOCK = 16
NOW = 20.0
CLASSES = ("", "old", "new")

# 8,000 tokens were computed, and nothing waited.
OUTCOME = Outcome(
    v=1,
    request_id="R1",
    client_request_id="c1",
    attempt=1,
    worker="",
    incarnation=1,
    tenant="acme",
    model="m",
    ns_id="",
    status="ok",
    error="",
    prefix_class="session",
    decision="balanced-cold",
    prompt_tokens=8_000,
    predicted_tokens=0,
    cached_tokens=0,
    prefill_tokens=8_000,
    output_tokens=1,
    queue_wait_ms=0.0,
    ttft_ms=200.0,
    total_ms=200.0,
    ended_at=0.0,
)


def around(label: str) -> Surroundings:
    return Surroundings(WorkerClass("m", "digest", label), 0, 0.0)


def idle(name: str, *, queue_ms: float, label: str = "") -> Load:
    return Load(
        v=1,
        worker=name,
        incarnation=1,
        report=1,
        event_seq=0,
        model="m",
        serves="digest",
        queue_ms=queue_ms,
        running=0,
        waiting=0,
        slots=8,
        kv_usage=0.0,
        kv_tokens=100_000,
        block_size=BLOCK,
        draining=False,
        accepted=[],
        worker_class=label,
    )


def route(blocks: int) -> Route:
    return Route(
        v=1,
        request_id="R1",
        client_request_id="c1",
        tenant="acme",
        model="m",
        serves="digest",
        ns_id=bytes(16),
        keys=random.Random(1).randbytes(8 * blocks),
        prompt_tokens=blocks * BLOCK + 5,
        output_tokens=100,
        prefix_class="session",
        reply="_INBOX.acme.1",
        deadline_at=1e9,
        job=b"",
    )


class Scene:
    """A fleet nobody else will ever see, a request to it, and what a directory says of it.

    Figures are few, so that ties are many; queues lie around the caps."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.names = [f"w{number:02d}" for number in range(rng.choice([1, 2, 5, 12, 40]))]
        self.blocks = rng.choice([1, 8, 64])
        self.learner = Learner({"m": rng.choice([PROFILES["h100-8b"], PROFILES["instant"]])})
        self.fleet = Fleet(60.0, 90.0)
        for name in self.names:
            self.fleet.heard(self._load(name), NOW)
            for number in range(rng.choice([0, 0, 1, 3])):
                self.fleet.book(f"{name}-{number}", 1, name, 1, rng.choice([20.0, 900.0, 9_000.0]), 15.0, 99.0)
        if rng.random() < 0.5:
            self._learn()
        self.policy = Policy(
            margin_ms=rng.choice([None, None, 0.0, 50.0]),
            least_loaded=rng.choice([1, 2, 4]),
            suspect_trust=rng.random(),
            new_kv_price=rng.random(),
            decode_price=4 * rng.random(),
            max_warm_wait_ms=rng.choice([100.0, 2000.0]),
        )
        self.holdings = self._holdings() if rng.random() < 0.9 else None
        self.shared_blocks = rng.randrange(self.blocks + 1)
        self.has_waited = rng.random() < 0.2

    def _load(self, name: str) -> Load:
        rng = self.rng
        return msgspec.structs.replace(
            idle(name, queue_ms=rng.choice([0.0, 0.0, 5.0, 90.0, 300.0, 2500.0, rng.random() * 100])),
            running=rng.randrange(4),
            kv_usage=rng.choice([0.0, 0.1, 0.99, rng.random()]),
            kv_tokens=rng.choice([2_000, 100_000]),
            worker_class=rng.choice(CLASSES),
            reserved_slots=rng.choice([0, 0, 8]),
        )

    def _learn(self) -> None:
        """Some are two times slower or faster than their class."""
        for name in self.names:
            beside = around(self.rng.choice(CLASSES))
            took_ms = self.rng.choice([100.0, 200.0, 400.0])
            for _ in range(20):
                self.learner.hear(msgspec.structs.replace(OUTCOME, worker=name, ttft_ms=took_ms), beside, NOW)

    def _holdings(self) -> Holdings:
        rng = self.rng
        held: dict[int, list[str]] = {}
        depths = [0, *(rng.randrange(1, self.blocks + 1) for _ in range(rng.choice([1, 2, 9])))]
        announced, trust = {}, {}
        for name in self.names:
            depth = rng.choice(depths)
            if depth:
                held.setdefault(depth, []).append(name)
                if rng.random() < 0.3:
                    announced[name] = rng.randrange(1, depth + 1)
            if rng.random() < 0.1:
                trust[name] = rng.random()
        levels = [Level(depth, held[depth]) for depth in sorted(held, reverse=True)]
        doubted = [name for name in self.names if rng.random() < 0.1]
        return Holdings(1, levels, doubted, trust, announced=announced)

    @property
    def available(self) -> list[Available]:
        return self.fleet.survey("m", "digest", NOW).available

    def candidates(self, *, whole_fleet: bool) -> Shortlist:
        return shortlist(
            route(self.blocks),
            self.available,
            self.holdings,
            self.shared_blocks,
            self.learner,
            self.policy,
            NOW,
            whole_fleet=whole_fleet,
            has_waited=self.has_waited,
        )

    def decision(self, *, whole_fleet: bool) -> Decision:
        found = self.candidates(whole_fleet=whole_fleet)
        return decide(found.shape, found.candidates, self.policy, 5.0)


def told(decision: Decision) -> dict[str, Any]:
    """All that a decision says but who else there was."""
    said = {name: getattr(decision, name) for name in decision.__struct_fields__}
    ranking = said.pop("ranking")
    return said | {"chosen": ranking[0], "next": ranking[1:2]}


@settings(max_examples=500)
@given(st.integers(0, 2**32))
def test_the_decision_among_few_is_the_decision_among_all(seed: int) -> None:
    scene = Scene(seed)
    if not scene.available:
        return

    among_all = scene.decision(whole_fleet=True)
    among_few = scene.decision(whole_fleet=False)

    assert told(among_few) == told(among_all)


def test_one_faster_worker_is_found_behind_many_idle_ones() -> None:
    """Four idle workers of an old machine used to hide from the decision the fifth, of a new one, that has a little to
    do."""
    fleet = Fleet(60.0, 90.0)
    learner = Learner({"m": PROFILES["h100-8b"]})
    for number in range(9):
        name = f"w{number}"
        fleet.heard(idle(name, queue_ms=5.0 if number == 8 else 0.0, label="new" if number == 8 else "old"), 0.0)
    for _ in range(60):
        learner.hear(msgspec.structs.replace(OUTCOME, worker="w0", ttft_ms=400.0), around("old"), 0.0)

    found = shortlist(
        route(512), fleet.survey("m", "digest", 0.0).available, Holdings(1, []), 0, learner, Policy(), 0.0
    )

    assert decide(found.shape, found.candidates, Policy(), 0.0).worker == "w8"
