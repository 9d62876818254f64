"""What a tenant gets through the real callout, and what it does not."""

import json
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from support.nats import NatsServer, Probe, RunningCallout, eventually

from prefixbus.bus import subjects
from prefixbus.bus.config import NatsSection
from prefixbus.cluster import natsconf, state

REFUSED = "Authorization Violation"


@pytest.fixture
async def acme(server: NatsServer, callout: RunningCallout) -> Probe:
    """A tenant with every scope, connected."""
    return await server.tenant_probe("acme", server.token("acme"))


async def test_the_right_token_gets_in_and_a_request_gets_its_answer(server: NatsServer, acme: Probe) -> None:
    tokenizer = await server.probe("tokenizer")

    async def answer(message: Any) -> None:
        await tokenizer.client.publish(message.reply, b"frame:" + message.data)

    await tokenizer.client.subscribe(subjects.ALL_INFER, queue="tokenizer", cb=answer)
    await tokenizer.denials()
    reply = await acme.client.request(subjects.infer("acme", "m"), b"hello", timeout=2)

    assert reply.data == b"frame:hello"
    assert reply.subject.startswith("_INBOX.acme.")
    assert await acme.denials() == []


async def test_a_token_made_while_the_callout_runs_works_at_once(server: NatsServer, callout: RunningCallout) -> None:
    new = state.add_tenant(server.state, "newcomer")

    probe = await server.tenant_probe("newcomer", new.token)

    assert await probe.may_publish(subjects.infer("newcomer", "m"))


@pytest.mark.parametrize(
    ("story", "user", "password"),
    [
        ("a wrong token", "demo", "A" * 43),
        ("another tenant's token", "demo", "TOKEN OF acme"),
        ("an unknown tenant", "nobody", "A" * 43),
        ("a right token under an unknown name", "nobody", "TOKEN OF acme"),
        ("a right token under no name", "", "TOKEN OF acme"),
        ("no token", "demo", ""),
        ("the token's hash", "acme", "HASH OF acme"),
        ("a token with more behind it", "acme", "TOKEN OF acme" + "x"),
        ("a very long token", "acme", "A" * 3000),
        ("a wildcard for a name", "*", "TOKEN OF acme"),
        ("bytes that are not ASCII", "dé-mo-文", "文" * 20),
    ],
    ids=lambda value: value if " " in str(value) and "TOKEN" not in str(value) else "",
)
async def test_it_is_refused(server: NatsServer, callout: RunningCallout, story: str, user: str, password: str) -> None:
    token = server.token("acme")
    password = password.replace("TOKEN OF acme", token).replace("HASH OF acme", _hash_of(server, "acme"))

    with pytest.raises(nats.errors.Error, match=REFUSED):
        await server.connect(user=user, password=password)

    assert callout.service.counts == {"allowed": 0, "denied": 1, "failed": 0}


async def test_anonymous_clients_and_bare_tokens_are_refused(server: NatsServer, callout: RunningCallout) -> None:
    with pytest.raises(nats.errors.Error, match=REFUSED):
        await server.connect()
    with pytest.raises(nats.errors.Error, match=REFUSED):
        await server.connect(token=server.token("acme"))


FORBIDDEN_PUBLISH = [
    subjects.infer("other", "m"),
    subjects.infer("other", "m", "s"),
    subjects.cancel("other", "r1"),
    "pb.v1.infer.acm.m",
    "pb.v1.infer.acme2.m",
    "pb.v1.cancel.acme.r1.more",
    subjects.cancelled("acme", "r1"),
    subjects.cancelled("other", "r1"),
    subjects.route("m"),
    subjects.lookup(0),
    subjects.work("w1"),
    subjects.control("w1", "reset"),
    subjects.load("w1"),
    subjects.kv(0, "w1"),
    subjects.DISPATCHED,
    subjects.outcome("w1", "r1"),
    subjects.journal("r1"),
    subjects.ended("r1"),
    subjects.audit("worker_bridge", "w1"),
    "$KV.WORKERS.w1",
    "$KV.POLICIES.p",
    "$JS.API.INFO",
    "$JS.API.STREAM.INFO.AUDIT",
    "$JS.API.STREAM.DELETE.AUDIT",
    "$JS.API.CONSUMER.CREATE.JOURNAL",
    "$JS.API.DIRECT.GET.JOURNAL.pb.v1.journal.r1",
    "$JS.ACK.AUDIT.auditor.1.1.1.1.1",
    "$SRV.PING",
    "$SYS.REQ.USER.AUTH",
    "$SYS.REQ.USER.INFO",
    "$SYS.REQ.SERVER.PING",
    "_INBOX.other.r1",
    "_INBOX.acme.r1",
    "_SVC.router.x.r1",
    "_SVC.operator.x.r1",
    "anything",
]

FORBIDDEN_SUBSCRIBE = [
    "_INBOX.other.>",
    "_INBOX.>",
    "_INBOX.*.r1",
    "_INBOX.acme",
    "_SVC.>",
    "_SVC.router.>",
    "_SVC.operator.>",
    ">",
    "*.>",
    "pb.>",
    "pb.v1.>",
    "pb.v1.infer.>",
    "pb.v1.infer.acme.>",
    "pb.v1.cancel.acme.>",
    "pb.v1.cancelled.acme.*",
    "pb.v1.cancelled.*.*",
    "pb.v1.journal.*",
    "pb.v1.audit.*.*",
    "pb.v1.outcome.*.*",
    "pb.v1.load.*",
    "$JS.>",
    "$JS.API.>",
    "$KV.>",
    "$SYS.>",
    "$SYS.REQ.USER.AUTH",
    "$SRV.>",
]


@pytest.mark.parametrize("subject", FORBIDDEN_PUBLISH)
async def test_a_tenant_cannot_publish_to(acme: Probe, subject: str) -> None:
    assert not await acme.may_publish(subject)


@pytest.mark.parametrize("subject", FORBIDDEN_SUBSCRIBE)
async def test_a_tenant_cannot_listen_to(acme: Probe, subject: str) -> None:
    assert not await acme.may_subscribe(subject)
    assert not await acme.may_subscribe(subject, "tokenizer")


async def test_a_tenant_may_use_its_own_subjects(acme: Probe) -> None:
    assert await acme.may_publish(subjects.infer("acme", "m"))
    assert await acme.may_publish(subjects.infer("acme", "meta/llama", "user-42"))
    assert await acme.may_publish(subjects.cancel("acme", "r1"))
    assert await acme.may_subscribe("_INBOX.acme.>")
    assert await acme.may_subscribe("_INBOX.acme.r1.*")


async def test_a_credential_may_name_only_the_scopes_that_it_lists(server: NatsServer, callout: RunningCallout) -> None:
    token = server.token("scoped", ["user-42", "team-legal"], label="alice")

    alice = await server.tenant_probe("scoped", token, inbox="_INBOX.scoped.alice")

    assert await alice.may_publish(subjects.infer("scoped", "m", "user-42"))
    assert await alice.may_publish(subjects.infer("scoped", "n", "team-legal"))
    assert not await alice.may_publish(subjects.infer("scoped", "m", "user-43"))
    assert not await alice.may_publish(subjects.infer("scoped", "m"))
    assert not await alice.may_publish("pb.v1.infer.scoped.m.user-42.more")


async def test_the_empty_scope_is_the_tenant_wide_subject(server: NatsServer, callout: RunningCallout) -> None:
    token = server.token("scoped", ["", "user-42"], label="carol")

    carol = await server.tenant_probe("scoped", token, inbox="_INBOX.scoped.carol")

    assert await carol.may_publish(subjects.infer("scoped", "m"))
    assert await carol.may_publish(subjects.infer("scoped", "m", "user-42"))
    assert not await carol.may_publish(subjects.infer("scoped", "m", "user-43"))


async def test_a_scoped_credential_cannot_read_the_answers_of_other_scopes(
    server: NatsServer, callout: RunningCallout
) -> None:
    token = server.token("scoped", ["user-42", "team-legal"], label="alice")

    alice = await server.tenant_probe("scoped", token, inbox="_INBOX.scoped.alice")

    assert await alice.may_subscribe("_INBOX.scoped.alice.>")
    assert not await alice.may_subscribe("_INBOX.scoped.>")
    assert not await alice.may_subscribe("_INBOX.scoped.carol.>")
    assert not await alice.may_subscribe("_INBOX.scoped.*.>")


async def test_a_credential_that_has_run_out_is_refused(server: NatsServer, callout: RunningCallout) -> None:
    past = state.add_tenant(server.state, "late", expires_at=1_000_000_000.0)

    with pytest.raises(nats.errors.Error, match=REFUSED):
        await server.tenant_probe("late", past.token)


async def test_a_connection_ends_when_its_time_does(server: NatsServer) -> None:
    await server.callout(user_ttl_s=2.0)
    probe = await server.tenant_probe("acme", server.token("acme"))

    await eventually(lambda: probe.client.is_closed, "the end of the connection", deadline_s=5)


async def test_a_connection_with_too_many_subscriptions_is_cut(acme: Probe) -> None:
    for number in range(natsconf.MAX_SUBSCRIPTIONS + 1):
        await acme.client.subscribe(f"_INBOX.acme.{number}")

    await eventually(lambda: acme.client.is_closed, "the end of the connection")


async def test_a_payload_over_the_servers_limit_never_leaves_the_client(acme: Probe) -> None:
    with pytest.raises(nats.errors.MaxPayloadError):
        await acme.client.publish(subjects.infer("acme", "m"), bytes(NatsSection().max_payload + 1))


async def test_a_body_over_our_own_limit_still_reaches_the_service_that_says_so(
    server: NatsServer, acme: Probe
) -> None:
    """4 MiB is the limit that a service explains; a user limit at the same size would cut the connection instead."""
    tokenizer = await server.probe("tokenizer")
    sizes: list[int] = []

    async def hear(message: Any) -> None:
        sizes.append(len(message.data))

    await tokenizer.client.subscribe(subjects.ALL_INFER, queue="tokenizer", cb=hear)
    await tokenizer.denials()
    await acme.client.publish(subjects.infer("acme", "m"), bytes(4 * 1024 * 1024 + 1))

    await eventually(lambda: sizes == [4 * 1024 * 1024 + 1], "the large body at the tokenizer")


async def test_without_a_callout_new_tenants_are_refused_and_everybody_else_lives_on(server: NatsServer) -> None:
    running = await server.callout()
    token = server.token("acme")
    tenant, tokenizer = await server.tenant_probe("acme", token), await server.probe("tokenizer")
    await running.bus.close()

    with pytest.raises((nats.errors.Error, TimeoutError)):
        await server.tenant_probe("acme", token)

    assert await tenant.may_publish(subjects.infer("acme", "m"))
    assert await tokenizer.may_publish(subjects.route("m"))
    router = await server.probe("router")
    assert await router.may_publish(subjects.DISPATCHED)
    await server.callout()
    assert await (await server.tenant_probe("acme", token)).may_publish(subjects.infer("acme", "m"))


async def test_two_callouts_share_the_work(server: NatsServer) -> None:
    first, second = await server.callout(), await server.callout()

    for _ in range(20):
        await (await server.tenant_probe("acme", server.token("acme"))).close()

    allowed = [running.service.counts["allowed"] for running in (first, second)]
    assert sum(allowed) == 20
    assert min(allowed) > 0


async def test_a_damaged_tenants_file_refuses_everybody_until_it_is_mended(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        running = await server.callout()
        path = state.tenants_path(server.state)
        good = path.read_bytes()

        path.write_bytes(b"{")
        with pytest.raises(nats.errors.Error, match=REFUSED):
            await server.tenant_probe("demo", server.demo.token)
        assert "tenants" in running.service.not_ready_because()
        path.write_bytes(good)

        assert await (await server.tenant_probe("demo", server.demo.token)).may_publish(subjects.infer("demo", "m"))
        assert running.service.counts == {"allowed": 1, "denied": 0, "failed": 1}


async def test_a_removed_credential_does_not_connect_again(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, []) as server:
        await server.callout()
        await server.tenant_probe("demo", server.demo.token)

        state.write_atomically(state.tenants_path(server.state), b'{"version": 1, "credentials": []}')

        with pytest.raises(nats.errors.Error, match=REFUSED):
            await server.tenant_probe("demo", server.demo.token)


async def test_no_token_is_logged_or_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with NatsServer(tmp_path, []) as server:
        running = await server.callout()
        await server.tenant_probe("demo", server.demo.token)
        for user in ("demo", server.demo.token):
            with pytest.raises(nats.errors.Error):
                await server.connect(user=user, password="a-wrong-token")

        stored = b"".join(
            path.read_bytes() for path in server.state.rglob("*") if path.is_file() and "nats" not in path.parts
        )

        assert server.demo.token.encode() not in stored.replace(server.log().encode(), b"")
        assert server.demo.token not in caplog.text
        assert "a-wrong-token" not in caplog.text + server.log()
        assert server.demo.token not in repr(running.service) + repr(server.demo)


def _hash_of(server: NatsServer, tenant: str) -> str:
    file = json.loads(state.tenants_path(server.state).read_bytes())
    return next(str(entry["token_hash"]) for entry in file["credentials"] if entry["tenant"] == tenant)
