"""Everything at once: kills, pauses, cancels, clients that vanish and bad input, while three tenants ask. Afterwards
nothing is left anywhere, and no hit was wrong.

What is done, to whom and when is drawn from CHAOS_SEED before it begins, so the same seed makes the same storm; how
processes interleave within it is the machine's."""

import asyncio
import contextlib
import json
import os
import random
import signal
import uuid
from collections import Counter
from typing import Any, NamedTuple

import nats.errors
import pytest
from nats.aio.client import Client as Nats
from support.cluster import MODEL, Cluster, ask, chat
from support.storm import HANGS_AFTER_S
from support.watch import Watch

from prefixbus.bus.errors import PrefixbusError
from prefixbus.client import Client
from prefixbus.cluster import state

# nats-py leaves a connection open that a server refused while it was coming back.
refused_connections = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
pytestmark = [refused_connections, pytest.mark.chaos, pytest.mark.timeout(150)]

SEED = int(os.environ.get("CHAOS_SEED", "1"))
STORM_S = 14.0
TENANTS = 3
REQUESTS_PER_S = 12.0
KILL_EVERY_S = 2.5
PAUSE_EVERY_S = 2.0
PAUSE_S = 1.0
SETTLES_WITHIN_S = 30.0

VICTIMS = (
    *("tokenizer-1", "tokenizer-2", "router-1", "router-2", "directory-1", "directory-2", "auditor-1", "auditor-2"),
    *("callout-1", "bridge-w1", "bridge-w2", "engine-w1", "engine-w2", "nats-server"),
)
# How a request may end because of what was killed or paused; never: hang, short, internal, unexpected_event.
OUTAGE = {
    *("worker_lost", "engine_failed", "unavailable", "overloaded"),
    *("silence", "stream_gap", "nobody_listens", "bus_unavailable"),
}
# name: (model, fields that replace those of a good body, code)
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty messages": (MODEL, {"messages": []}, "bad_request"),
    "a role of a wrong type": (MODEL, {"messages": [{"role": 7, "content": "x"}]}, "bad_request"),
    "a temperature out of range": (MODEL, {"temperature": -1}, "bad_request"),
    "another model in the body": (MODEL, {"model": "another"}, "model_mismatch"),
    "a prompt over the model's length": (
        MODEL,
        {"messages": [{"role": "user", "content": "a b " * 9000}]},
        "context_too_long",
    ),
    "an unknown model": ("nobody", {}, "unknown_model"),
}
# What becomes of a request, and how often of ten.
KINDS = {"answered": 5, "cancelled": 1, "cancelled ahead": 1, "vanishing": 2, "bad": 1}


class Blow(NamedTuple):
    """`at_s` after the beginning, a process is killed, or paused for PAUSE_S."""

    at_s: float
    is_kill: bool
    victim: str


class Plan(NamedTuple):
    """One request. `patience_s`: until it is cancelled, or its client vanishes; `bad`: a key of BAD."""

    at_s: float
    tenant: int
    kind: str
    name: str
    body: dict[str, Any]
    patience_s: float
    bad: str


class Ending(NamedTuple):
    plan: Plan
    code: str
    detail: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether a request of this kind may end so."""
        match self.plan.kind:
            case "answered":
                return self.code in {"ok", *OUTAGE}
            case "bad":
                return self.code in {BAD[self.plan.bad][2], *OUTAGE}
            case _:
                return self.code in {"ok", "cancelled", *OUTAGE}


def blows(chance: random.Random) -> list[Blow]:
    """Kills and pauses go on beside each other: what was killed may be paused as soon as it is back."""
    drawn = []
    for is_kill, every_s in ((True, KILL_EVERY_S), (False, PAUSE_EVERY_S)):
        drawn += [
            Blow(every_s * (number + chance.random()), is_kill, chance.choice(VICTIMS))
            for number in range(int(STORM_S / every_s))
        ]
    return sorted(drawn)


def requests(chance: random.Random) -> list[Plan]:
    """Of three topics, whose documents the tenants have in common: what they must not share would be there to hit."""
    documents = [f"Document {topic}: " + "why do requests wait? " * 120 for topic in range(3)]
    drawn = []
    for number in range(int(STORM_S * REQUESTS_PER_S)):
        question = f"{chance.getrandbits(64):x} " + "and then? " * chance.choice((1, 20, 300))
        body = chat(question, system=chance.choice(documents), max_tokens=chance.choice((1, 20, 200)))
        if chance.random() < 0.3:
            body["stream"] = False
        drawn.append(
            Plan(
                at_s=(number + chance.random()) / REQUESTS_PER_S,
                tenant=chance.randrange(TENANTS),
                kind=chance.choices(list(KINDS), list(KINDS.values()))[0],
                name=f"storm-{SEED}-{number}-{uuid.uuid4().hex[:8]}",
                body=body,
                patience_s=chance.uniform(0, 0.6),
                bad=chance.choice(list(BAD)),
            )
        )
    return drawn


class Tenant(NamedTuple):
    name: str
    token: str
    client: Client


async def carry_out(plan: Plan, cluster: Cluster, tenant: Tenant) -> Ending:
    """A request, lived to its end."""
    await asyncio.sleep(plan.at_s)
    if plan.kind == "vanishing":
        await vanish(plan, cluster, tenant)
        return Ending(plan, "ok")
    model, changes, _ = BAD[plan.bad] if plan.kind == "bad" else (MODEL, {}, "")
    if plan.kind == "cancelled ahead":
        with contextlib.suppress(PrefixbusError):
            await tenant.client.cancel(plan.name)
    asked = asyncio.create_task(
        ask(tenant.client, {**plan.body, **changes}, model=model, request_id=plan.name, deadline_s=2 * HANGS_AFTER_S)
    )
    if plan.kind == "cancelled":
        await asyncio.sleep(plan.patience_s)
        with contextlib.suppress(PrefixbusError):
            await tenant.client.cancel(plan.name)
    try:
        async with asyncio.timeout(HANGS_AFTER_S):
            answer = await asked
    except TimeoutError:
        return Ending(plan, "hang")
    except PrefixbusError as exc:
        return Ending(plan, exc.code, exc.sentence())
    if answer.usage["completion_tokens"] != plan.body["max_tokens"]:
        return Ending(plan, "short", str(answer.usage))
    return Ending(plan, "ok")


async def vanish(plan: Plan, cluster: Cluster, tenant: Tenant) -> None:
    """A client of its own asks, and its connection ends; where there is no bus to ask over it is gone before."""
    connection = Nats()
    with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
        try:
            await connection.connect(
                cluster.url,
                user=tenant.name,
                password=tenant.token,
                inbox_prefix=f"_INBOX.{tenant.name}".encode(),
                allow_reconnect=False,
            )
            inbox = connection.new_inbox()
            await connection.subscribe(inbox)
            await connection.publish(
                f"pb.v1.infer.{tenant.name}.{MODEL}",
                json.dumps(plan.body).encode(),
                reply=inbox,
                headers={"Pb-Request-Id": plan.name},
            )
            await connection.flush()
            await asyncio.sleep(plan.patience_s)
        finally:
            await connection.close()


async def strike(blow: Blow, cluster: Cluster) -> None:
    await asyncio.sleep(blow.at_s)
    # One that was killed a moment ago and is not back cannot be struck again.
    with contextlib.suppress(ProcessLookupError):
        pid = cluster.signal(blow.victim, signal.SIGKILL if blow.is_kill else signal.SIGSTOP)
        if not blow.is_kill:
            await asyncio.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)


async def test_after_a_storm_of_everything_nothing_is_left(cluster: Cluster) -> None:
    chance = random.Random(SEED)
    struck, asked = blows(chance), requests(chance)
    named = [state.add_tenant(cluster.state, f"t{uuid.uuid4().hex[:8]}") for _ in range(TENANTS)]
    async with contextlib.AsyncExitStack() as stack:
        tenants = []
        for each in named:
            client = await stack.enter_async_context(await cluster.client(each.tenant, each.token))
            await stack.enter_async_context(await Watch.beside(client))
            tenants.append(Tenant(each.tenant, each.token, client))

        async with asyncio.TaskGroup() as tasks:
            endings = [tasks.create_task(carry_out(plan, cluster, tenants[plan.tenant])) for plan in asked]
            for blow in struck:
                tasks.create_task(strike(blow, cluster))

        ended = [task.result() for task in endings]
        counts = Counter((each.plan.kind, each.code) for each in ended)
        unclear = [each for each in ended if not each.is_clear]
        story = f"seed {SEED}: {counts}\n{struck}"
        assert not unclear, f"{unclear[:5]}\n{story}"
        assert counts["answered", "ok"] > len(asked) / 5, story
        assert counts["cancelled", "cancelled"] and counts["cancelled ahead", "cancelled"], story
        await cluster.all_ready(SETTLES_WITHIN_S)
        await cluster.settles(SETTLES_WITHIN_S)
        for tenant in tenants:
            await ask(tenant.client, chat("Is all well again?", max_tokens=1))
        await cluster.settles()
