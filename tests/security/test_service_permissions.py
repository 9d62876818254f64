"""Each role may do what its row of the table says, and nothing else: every allowance and every denial is asked of the
server."""

import os
from dataclasses import dataclass
from typing import Any

import nkeys
import pytest
from nats.js.errors import APIError
from nats.micro import add_service
from support.nats import NatsServer, Probe, RunningCallout, eventually

from prefixbus.auditor import tenants
from prefixbus.bus import subjects
from prefixbus.bus.connection import WrongSequence
from prefixbus.cluster import permissions

ROLES = [access.role for access in permissions.service_roles()]
STREAMS = permissions.ALL_STREAMS


def access_of(role: str) -> permissions.Access:
    if role == "worker_bridge":
        return permissions.worker_bridge("w1")
    return next(access for access in permissions.service_roles() if access.role == role)


def concrete(pattern: str) -> str:
    """A subject that the pattern matches."""
    return ".".join("x9" if token in ("*", ">") else token for token in pattern.split("."))


def matches(pattern: str, subject: str) -> bool:
    """Whether everything that `subject` names, itself perhaps a pattern, lies within `pattern`."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or given[position] == ">":
            return False
        if token != "*" and token != given[position]:
            return False
    return len(wanted) == len(given)


def every_publish_subject() -> list[str]:
    """What anybody publishes to, and what nobody may: the worst that each part of the system could be told."""
    found = {
        concrete(pattern)
        for access in (*permissions.service_roles(), permissions.worker_bridge("w1"), permissions.worker_bridge("w2"))
        for pattern in access.all_publish()
    }
    found |= {
        subjects.infer("acme", "m"),
        subjects.cancel("acme", "r1"),
        "_SVC.tokenizer.x9.r1",
        "_SVC.router.x9.r1",
        "_SVC.directory.x9.r1",
        "_SVC.auditor.x9.r1",
        "_SVC.callout.x9.r1",
        "_SVC.deploy.x9.r1",
        "_SVC.worker_bridge.w1.r1",
        "_SVC.worker_bridge.w2.r1",
        "_INBOX.acme.r1",
        "$SYS.REQ.USER.AUTH",
        "$SYS.REQ.SERVER.PING",
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.LIST",
        "$JS.API.STREAM.CREATE.OTHER",
        "$JS.API.STREAM.TEMPLATE.CREATE.T",
        "$KV.WORKERS.w1",
        "$KV.WORKERS.w2",
        "$KV.POLICIES.p",
        "anything",
    }
    for stream in STREAMS:
        found |= {
            f"$JS.API.STREAM.{verb}.{stream}"
            for verb in ("DELETE", "PURGE", "CREATE", "UPDATE", "INFO", "MSG.DELETE", "MSG.GET", "SNAPSHOT", "RESTORE")
        }
        found |= {
            f"$JS.API.CONSUMER.{verb}"
            for verb in (
                f"CREATE.{stream}",
                f"CREATE.{stream}.auditor",
                f"CREATE.{stream}.mine.x9",
                f"DURABLE.CREATE.{stream}.auditor",
                f"DELETE.{stream}.auditor",
                f"INFO.{stream}.auditor",
                f"LIST.{stream}",
                f"NAMES.{stream}",
                f"MSG.NEXT.{stream}.auditor",
                f"PAUSE.{stream}.auditor",
            )
        }
        found |= {f"$JS.ACK.{stream}.auditor.1.1.1.1.1", f"$JS.API.DIRECT.GET.{stream}", f"$JS.FC.{stream}.c.x"}
    return sorted(found)


def every_subscribe_subject() -> list[tuple[str, str]]:
    """(subject, queue) pairs that somebody listens to, and the wide ones that nobody may."""
    found: set[tuple[str, str]] = set()
    for access in (*permissions.service_roles(), permissions.worker_bridge("w1"), permissions.worker_bridge("w2")):
        for entry in access.subscribe:
            pattern, _, queue = entry.partition(" ")
            found |= {(pattern, queue), (pattern, ""), (concrete(pattern), queue), (concrete(pattern), "spy")}
    wide = (
        "> pb.> pb.v1.> pb.v1.infer.> pb.v1.work.* pb.v1.ctl.> pb.v1.*.w1 "
        "pb.v1.audit.> _INBOX.> _INBOX.acme.> _SVC.> _SVC.worker_bridge.> $JS.> $JS.API.> "
        "$JS.ACK.> $KV.> $SYS.> $SYS.REQ.USER.AUTH pb.v1.kv.> pb.v1.dispatched.> *.> "
        "anything "
    )
    found |= {(pattern, queue) for pattern in wide.split() for queue in ("", "spy", "tokenizer", "router")}
    return sorted(found)


@pytest.fixture
async def probes(provisioned: NatsServer) -> dict[str, Probe]:
    found = {role: await provisioned.probe(role) for role in ROLES}
    found["worker_bridge"] = await provisioned.probe("worker_bridge", "w1")
    return found


@pytest.mark.parametrize("role", [*ROLES, "worker_bridge"])
async def test_a_role_publishes_what_its_row_says_and_nothing_else(probes: dict[str, Probe], role: str) -> None:
    allowed = access_of(role).all_publish()
    asked = every_publish_subject()

    for subject in asked:
        await probes[role].client.publish(subject, b"")
    denials = await probes[role].denials()

    denied = {text.split('"')[1] for text in denials}
    assert denied == {subject.lower() for subject in asked if not any(matches(pattern, subject) for pattern in allowed)}


@pytest.mark.parametrize("role", [*ROLES, "worker_bridge"])
async def test_a_role_hears_what_its_row_says_and_nothing_else(probes: dict[str, Probe], role: str) -> None:
    allowed = [entry.partition(" ")[::2] for entry in access_of(role).subscribe]
    probe = probes[role]

    wrong = []
    for subject, queue in every_subscribe_subject():
        expected = any(matches(pattern, subject) and only in ("", queue) for pattern, only in allowed)
        if await probe.may_subscribe(subject, queue) != expected:
            wrong.append((subject, queue, expected))

    assert wrong == []


async def test_a_tenant_reaches_nothing_of_what_services_say_to_each_other(
    provisioned: NatsServer, callout: RunningCallout
) -> None:
    """Every subject of every role, asked with a tenant's credential."""
    grant = tenants.grant(tenants.Credential(tenant="acme", label="", token_hash="", scopes=None))
    tenant = await provisioned.tenant_probe("acme", provisioned.token("acme"))
    asked = every_publish_subject()

    for subject in asked:
        await tenant.client.publish(subject, b"")
    denied = {text.split('"')[1] for text in await tenant.denials()}
    heard = [
        (subject, queue)
        for subject, queue in every_subscribe_subject()
        if await tenant.may_subscribe(subject, queue)
        and not any(matches(pattern, subject) for pattern in grant.subscribe)
    ]

    assert denied == {subject.lower() for subject in asked if not any(matches(own, subject) for own in grant.publish)}
    for made in (subjects.WARM, subjects.DISPATCHED, "pb.v1.claim.x9", "pb.v1.capture.x9.x9", "$O.DIRECTORY.C.x9"):
        assert made.lower() in denied
    assert heard == []


@dataclass(frozen=True)
class Denial:
    """One thing that matters enough to be named."""

    story: str
    role: str
    subject: str
    subscribe: bool = False


DENIALS = [
    Denial("a bridge cannot send another worker's heartbeat", "worker_bridge", "pb.v1.load.w2"),
    Denial("a bridge cannot report another worker's blocks", "worker_bridge", "pb.v1.kv.0.w2"),
    Denial("a bridge cannot report another worker's outcome", "worker_bridge", "pb.v1.outcome.w2.r1"),
    Denial("a bridge cannot register another worker", "worker_bridge", "$KV.WORKERS.w2"),
    Denial("a bridge cannot state facts as another", "worker_bridge", "pb.v1.audit.worker_bridge.w2"),
    Denial("a bridge cannot dispatch", "worker_bridge", "pb.v1.work.w2"),
    Denial("a bridge cannot take back a claim", "worker_bridge", "$JS.API.STREAM.PURGE.CLAIMS"),
    Denial("a bridge cannot read who answers", "worker_bridge", "$JS.API.STREAM.MSG.GET.CLAIMS"),
    Denial("a router cannot take back a claim", "router", "$JS.API.STREAM.PURGE.CLAIMS"),
    Denial("a router cannot read who answers", "router", "$JS.API.STREAM.MSG.GET.CLAIMS"),
    Denial("a tokenizer cannot keep a request from being answered", "tokenizer", "pb.v1.claim.r1"),
    Denial("a bridge cannot order a worker to be warmed", "worker_bridge", "pb.v1.warm"),
    Denial("a router cannot order a worker to be warmed", "router", "pb.v1.warm"),
    Denial("a tokenizer cannot order a worker to be warmed", "tokenizer", "pb.v1.warm"),
    Denial("a bridge cannot announce dispatches", "worker_bridge", "pb.v1.dispatched"),
    Denial("a directory cannot announce dispatches", "directory", "pb.v1.dispatched"),
    Denial("a tokenizer cannot announce dispatches", "tokenizer", "pb.v1.dispatched"),
    Denial("a bridge cannot hear announcements", "worker_bridge", "pb.v1.dispatched", subscribe=True),
    Denial("a bridge cannot hear how others' requests ended", "worker_bridge", "pb.v1.outcome.*.*", subscribe=True),
    Denial("a bridge cannot hear whose heartbeats come", "worker_bridge", "pb.v1.load.*", subscribe=True),
    Denial("a bridge cannot write snapshots", "worker_bridge", "$O.DIRECTORY.C.x"),
    Denial("a router cannot write snapshots", "router", "$O.DIRECTORY.M.x"),
    Denial("a directory cannot keep a request from being answered", "directory", "pb.v1.claim.r1"),
    Denial("a router cannot read captured prompts", "router", "$JS.API.DIRECT.GET.CAPTURE"),
    Denial("a tokenizer cannot read captured prompts", "tokenizer", "$JS.API.DIRECT.GET.CAPTURE"),
    Denial("a bridge cannot read captured prompts", "worker_bridge", "$JS.API.STREAM.MSG.GET.CAPTURE"),
    Denial("a bridge cannot hear what is captured", "worker_bridge", "pb.v1.capture.*.*", subscribe=True),
    Denial("an operator cannot hear what is captured live", "operator", "pb.v1.capture.*.*", subscribe=True),
    Denial("a bridge cannot capture", "worker_bridge", "pb.v1.capture.acme.r1"),
    Denial("a bridge cannot control another", "worker_bridge", "pb.v1.ctl.w2.reset"),
    Denial("a bridge cannot reset itself by message", "worker_bridge", "pb.v1.ctl.w1.reset"),
    Denial("a bridge cannot write a decision", "worker_bridge", "pb.v1.journal.r1"),
    Denial("a bridge cannot say that a router ended a request", "worker_bridge", "pb.v1.ended.r1"),
    Denial("a tokenizer cannot say that a router ended a request", "tokenizer", "pb.v1.ended.r1"),
    Denial("an operator cannot say that a router ended a request", "operator", "pb.v1.ended.r1"),
    Denial("a bridge cannot write into the tokenizer's inbox", "worker_bridge", "_SVC.tokenizer.x.r1"),
    Denial("a bridge cannot write into another bridge's inbox", "worker_bridge", "_SVC.worker_bridge.w2.r1"),
    Denial("a bridge cannot hear another's work", "worker_bridge", "pb.v1.work.w2", subscribe=True),
    Denial("a bridge cannot hear requests", "worker_bridge", "pb.v1.infer.>", subscribe=True),
    Denial("a bridge cannot hear what tenants send to cancel", "worker_bridge", "pb.v1.cancel.*.*", subscribe=True),
    Denial("a bridge cannot cancel requests", "worker_bridge", "pb.v1.cancelled.acme.r1"),
    Denial("a router cannot hear what tenants send to cancel", "router", "pb.v1.cancel.*.*", subscribe=True),
    Denial("a router cannot cancel requests", "router", "pb.v1.cancelled.acme.r1"),
    Denial("a bridge cannot read the router's inbox", "worker_bridge", "_SVC.router.>", subscribe=True),
    Denial("a bridge cannot read a tenant's inbox", "worker_bridge", "_INBOX.acme.>", subscribe=True),
    Denial("a bridge cannot change policies", "worker_bridge", "$KV.POLICIES.p"),
    Denial("a router cannot change policies", "router", "$KV.POLICIES.p"),
    Denial("a router cannot state facts", "router", "pb.v1.audit.router.x"),
    Denial("a router cannot forge block events", "router", "pb.v1.kv.0.w1"),
    Denial("a router cannot forge outcomes", "router", "pb.v1.outcome.w1.r1"),
    Denial("a router cannot reset workers", "router", "pb.v1.ctl.w1.reset"),
    Denial("a tokenizer cannot dispatch past the router", "tokenizer", "pb.v1.work.w1"),
    Denial("a tokenizer cannot make requests", "tokenizer", "pb.v1.infer.acme.m"),
    Denial("a directory cannot answer tenants", "directory", "_INBOX.acme.r1"),
    Denial("a directory cannot write events", "directory", "pb.v1.kv.0.w1"),
    Denial("a directory cannot delete its stream", "directory", "$JS.API.STREAM.DELETE.KV_EVENTS"),
    Denial("an auditor cannot delete the record", "auditor", "$JS.API.STREAM.DELETE.AUDIT"),
    Denial("an auditor cannot purge the record", "auditor", "$JS.API.STREAM.PURGE.AUDIT"),
    Denial("an auditor cannot state facts as a bridge", "auditor", "pb.v1.audit.worker_bridge.w1"),
    Denial("an operator cannot delete the record", "operator", "$JS.API.STREAM.DELETE.AUDIT"),
    Denial("an operator cannot move the auditor's place in it", "operator", "$JS.API.CONSUMER.CREATE.AUDIT.auditor"),
    Denial("an operator cannot state facts", "operator", "pb.v1.audit.operator.x"),
    Denial("an operator cannot read tenants' answers", "operator", "_INBOX.>", subscribe=True),
    Denial("an operator cannot read prompts", "operator", "pb.v1.infer.>", subscribe=True),
    Denial("a deployer cannot delete the record", "deploy", "$JS.API.STREAM.DELETE.AUDIT"),
    Denial("a deployer cannot purge the record", "deploy", "$JS.API.STREAM.PURGE.AUDIT"),
    Denial("a deployer cannot make other streams", "deploy", "$JS.API.STREAM.CREATE.OTHER"),
    Denial("a deployer cannot read the record", "deploy", "$JS.API.CONSUMER.CREATE.AUDIT"),
    Denial("a callout cannot publish", "callout", "pb.v1.infer.acme.m"),
    Denial("a callout cannot hear more than authentications", "callout", ">", subscribe=True),
    Denial("a tokenizer cannot hear authentications", "tokenizer", "$SYS.REQ.USER.AUTH", subscribe=True),
    Denial("the system user cannot reload or stop the server", "sys", "$SYS.REQ.SERVER.x.RELOAD"),
]


@pytest.mark.parametrize("case", DENIALS, ids=lambda case: case.story)
async def test_it_is_denied_that(probes: dict[str, Probe], case: Denial) -> None:
    probe = probes[case.role]

    allowed = await (probe.may_subscribe(case.subject) if case.subscribe else probe.may_publish(case.subject))

    assert not allowed


async def test_a_tokenizer_cannot_read_along_outside_the_queue(probes: dict[str, Probe]) -> None:
    assert not await probes["tokenizer"].may_subscribe(subjects.ALL_INFER)
    assert not await probes["tokenizer"].may_subscribe(subjects.ALL_INFER, "another")
    assert await probes["tokenizer"].may_subscribe(subjects.ALL_INFER, "tokenizer")
    assert not await probes["tokenizer"].may_subscribe(subjects.ALL_CANCEL)
    assert not await probes["tokenizer"].may_subscribe(subjects.ALL_CANCEL, "another")
    assert await probes["tokenizer"].may_subscribe(subjects.ALL_CANCEL, "tokenizer")


async def test_a_directory_follows_the_events_of_every_bridge(provisioned: NatsServer) -> None:
    directory, bridge = await provisioned.bus("directory"), await provisioned.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data)

    await directory.follow(subjects.STREAM_KV_EVENTS, "pb.v1.kv.0.*", hear, start="new")
    await bridge.publish_acked(subjects.kv(0, "w1"), b"blocks", msg_id="events-1")

    await eventually(lambda: heard == [b"blocks"], "the event at the directory")


async def test_a_router_follows_the_policies_that_an_operator_sets(provisioned: NatsServer) -> None:
    router, operator = await provisioned.bus("router"), await provisioned.bus("operator")
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data)

    await operator.publish_acked("$KV.POLICIES.current", b"round-robin")
    await router.follow(subjects.STREAM_POLICIES, "$KV.POLICIES.current", hear, start="last")
    await operator.publish_acked("$KV.POLICIES.current", b"prefix-aware")

    await eventually(lambda: heard == [b"round-robin", b"prefix-aware"], "both policies at the router")
    bucket = await operator.jetstream.key_value(subjects.BUCKET_POLICIES)
    assert (await bucket.get("current")).value == b"prefix-aware"


async def test_an_auditor_takes_facts_from_its_place_in_the_record(provisioned: NatsServer) -> None:
    bridge, auditor = await provisioned.bus("worker_bridge", "w1"), await provisioned.probe("auditor")
    await bridge.publish_acked(subjects.audit("worker_bridge", "w1"), b"fact", msg_id="fact-1")

    pull = await auditor.jetstream.pull_subscribe_bind(
        consumer=permissions.AUDITOR_CONSUMER, stream=subjects.STREAM_AUDIT
    )
    messages = await pull.fetch(100, timeout=2)
    for message in messages:
        await message.ack_sync(timeout=2)

    assert b"fact" in [message.data for message in messages]
    info = await pull.consumer_info()
    assert (info.num_ack_pending, info.num_pending) == (0, 0)
    assert await auditor.denials() == []


async def test_an_operator_reads_journal_record_and_registrations(provisioned: NatsServer) -> None:
    bridge, router, operator = (
        await provisioned.bus("worker_bridge", "w1"),
        await provisioned.bus("router"),
        await provisioned.bus("operator"),
    )
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    await operator.follow(subjects.STREAM_JOURNAL, "pb.v1.journal.read-1", hear, start="all")
    await operator.follow(subjects.STREAM_JOURNAL, "pb.v1.outcome.*.read-1", hear, start="all")
    await operator.follow(subjects.STREAM_AUDIT, "pb.v1.audit.*.*", hear, start="new")
    await operator.follow(subjects.STREAM_WORKERS, "$KV.WORKERS.w1", hear, start="new")
    await router.publish_acked(subjects.journal("read-1"), b"{}")
    await bridge.publish_acked(subjects.outcome("w1", "read-1"), b"{}")
    await bridge.publish_acked(subjects.audit("worker_bridge", "w1"), b"{}")
    await bridge.publish_acked("$KV.WORKERS.w1", b"{}")

    await eventually(lambda: len(heard) == 4, "four messages at the operator")
    last = await operator.jetstream.get_last_msg(subjects.STREAM_JOURNAL, subjects.journal("read-1"))
    assert last.data == b"{}"


async def test_an_operator_reads_the_journal_with_a_consumer_of_any_tool(provisioned: NatsServer) -> None:
    router, operator = await provisioned.bus("router"), await provisioned.probe("operator")
    await router.publish_acked(subjects.journal("tool-1"), b"{}")

    pull = await operator.jetstream.pull_subscribe(subjects.journal("tool-1"), stream=subjects.STREAM_JOURNAL)
    (message,) = await pull.fetch(1, timeout=2)
    await message.ack_sync(timeout=2)

    assert message.data == b"{}"
    assert await operator.denials() == []


async def test_services_answer_an_operator_who_asks_who_is_there(provisioned: NatsServer) -> None:
    probes = {role: await provisioned.probe(role) for role in ("tokenizer", "router", "directory", "auditor")}
    probes["worker_bridge"] = await provisioned.probe("worker_bridge", "w1")
    for role, probe in probes.items():
        await add_service(probe.client, name=role.replace("_", "-"), version="1.0.0")
        await probe.denials()
    operator = await provisioned.probe("operator")
    answers: list[bytes] = []

    async def hear(message: Any) -> None:
        answers.append(message.data)

    await operator.client.subscribe("_SVC.operator.i1.ping", cb=hear)
    await operator.client.publish("$SRV.PING", b"", reply="_SVC.operator.i1.ping")

    await eventually(lambda: len(answers) == len(probes), "an answer of each service")
    for probe in (*probes.values(), operator):
        assert await probe.denials() == []


async def test_a_registration_is_written_once_for_an_incarnation(provisioned: NatsServer) -> None:
    bridge = await provisioned.bus("worker_bridge", "w2")
    first = await bridge.publish_acked("$KV.WORKERS.w2", b"one", expect_last_seq=0)

    with pytest.raises(WrongSequence):
        await bridge.publish_acked("$KV.WORKERS.w2", b"two", expect_last_seq=0)

    assert await bridge.publish_acked("$KV.WORKERS.w2", b"two", expect_last_seq=first) > first


async def test_a_bridge_cannot_wipe_the_bucket_with_a_roll_up_of_its_own_key(provisioned: NatsServer) -> None:
    """A bucket made by the client library allows roll-ups: then `Nats-Rollup: all` on one's own key deletes every
    other worker's registration."""
    bridge, other = await provisioned.bus("worker_bridge", "w1"), await provisioned.bus("worker_bridge", "w2")
    await other.publish_acked("$KV.WORKERS.w2", b"here")
    before = await (await provisioned.probe("operator")).jetstream.stream_info(subjects.STREAM_WORKERS)

    reply = await bridge.request("$KV.WORKERS.w1", b"", timeout_s=2, headers={"Nats-Rollup": "all"})

    assert b"rollup" in reply.data
    after = await (await provisioned.probe("operator")).jetstream.stream_info(subjects.STREAM_WORKERS)
    assert after.state.messages == before.state.messages


async def test_a_service_that_answers_blindly_cannot_be_made_to_delete_the_record(probes: dict[str, Probe]) -> None:
    """The server does not check reply subjects, so a request may name any. With `allow_responses` the answer would go
    there."""
    victim = probes["worker_bridge"]

    async def answer(message: Any) -> None:
        await message.respond(b"{}")

    await victim.client.subscribe(subjects.work("w1"), cb=answer)
    await victim.denials()
    await probes["router"].client.publish(subjects.work("w1"), b"", reply="$JS.API.STREAM.DELETE.AUDIT")
    await probes["router"].denials()

    async def was_denied() -> bool:
        return any("$js.api.stream.delete.audit" in text for text in await victim.denials())

    await eventually(was_denied, "the denial of the answer")
    info = await probes["auditor"].jetstream.stream_info(subjects.STREAM_AUDIT)
    assert info.config.deny_delete


async def test_the_record_refuses_deletion_even_from_who_may_ask(provisioned: NatsServer) -> None:
    deploy = await provisioned.probe("deploy")
    info = await deploy.jetstream.stream_info(subjects.STREAM_AUDIT)

    weakened = info.config.evolve(deny_delete=False, deny_purge=False)
    with pytest.raises(APIError):
        await deploy.jetstream.update_stream(weakened)


async def test_an_unknown_key_is_refused(server: NatsServer, callout: object) -> None:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()

    with pytest.raises(Exception, match="Authorization Violation"):
        await server.connect(nkeys_seed_str=seed)
