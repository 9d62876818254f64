"""The bus against a real server: what nats-py does not do, and what happens when the server goes away."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from support.nats import NatsServer, eventually

from prefixbus.bus import subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.config import Config
from prefixbus.bus.connection import MALFORMED_HEADERS, OVERSIZED_HEADERS, Bus, NotAdmitted, WrongSequence
from prefixbus.bus.errors import BusPermissionDenied, BusUnavailable, TooLarge
from prefixbus.bus.runtime import Runtime

W1_LOAD = subjects.load("w1")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=["w1"]) as running:
        await running.provision()
        yield running


async def test_a_request_gets_its_reply(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")

    async def echo(message: Msg) -> None:
        await bridge.publish(message.reply, message.data)

    await bridge.subscribe(subjects.work("w1"), echo)
    await bridge.flush()

    replies = await asyncio.gather(
        *(router.request(subjects.work("w1"), str(n).encode(), timeout_s=5) for n in range(50))
    )

    assert [reply.data for reply in replies] == [str(n).encode() for n in range(50)]


async def test_without_echo_a_connection_hears_others_and_not_itself(server: NatsServer) -> None:
    one, other = await server.bus("router", instance="r1", echo=False), await server.bus("router", instance="r2")
    heard: list[bytes] = []
    await one.listen(subjects.DISPATCHED, lambda message: heard.append(message.data))
    await one.flush()

    await one.publish(subjects.DISPATCHED, b"its own")
    await one.flush()
    await other.publish(subjects.DISPATCHED, b"the other's")
    await eventually(lambda: bool(heard), "the other's message")

    assert heard == [b"the other's"]


async def test_a_request_that_nobody_hears_fails_at_once(server: NatsServer) -> None:
    router = await server.bus("router")

    with pytest.raises(BusUnavailable, match="nobody listens"):
        await router.request(subjects.work("w9"), timeout_s=60)


async def test_a_denied_request_says_what_was_denied_instead_of_timing_out(server: NatsServer) -> None:
    directory = await server.bus("directory")

    with pytest.raises(BusPermissionDenied, match=r"pb\.v1\.work\.w1"):
        await directory.request(subjects.work("w1"), timeout_s=60)


async def test_a_denied_subscription_says_so_instead_of_staying_silent(server: NatsServer) -> None:
    directory = await server.bus("directory")

    with pytest.raises(BusPermissionDenied, match=r"pb\.v1\.work\.w1"):
        await directory.subscribe(subjects.work("w1"), ignore)
    with pytest.raises(BusPermissionDenied, match=r"_INBOX\.acme\.>"):
        await directory.listen("_INBOX.acme.>", lambda message: None)


async def test_a_denied_stream_says_so_instead_of_timing_out(server: NatsServer) -> None:
    directory = await server.bus("directory")

    with pytest.raises(BusPermissionDenied, match="audit"):
        await directory.follow(subjects.STREAM_AUDIT, "pb.v1.audit.*.*", ignore, start="all")


async def ignore(message: Msg) -> None:
    pass


async def test_a_payload_over_the_limit_is_refused_before_it_is_sent(server: NatsServer) -> None:
    router = await server.bus("router")

    with pytest.raises(TooLarge, match="8388608"):
        await router.publish(subjects.work("w1"), bytes(8 * 1024 * 1024 + 1))


async def test_a_header_block_over_the_limit_is_not_parsed(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    await bridge.subscribe(subjects.work("w1"), heard.put)
    await bridge.flush()

    await router.publish(subjects.work("w1"), b"", headers={"X-Big": "x" * 20_000})
    await router.publish(subjects.work("w1"), b"", headers={"X-Small": "x"})

    assert list((await heard.get()).headers or {}) == [OVERSIZED_HEADERS]
    assert (await heard.get()).headers == {"X-Small": "x"}


MALFORMED = [
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0",
    b"NATS/1.0 50",
    b"NATS/1.0 503 \xff\xff\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n",
    b"NATS/1.0\r\nnocolon\r\n\r\n",
    b"NATS/1.0\r\n: \r\n\r\n",
    b"X",
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Consumer-Stalled: $JS.API.STREAM.PURGE.JOURNAL\r\n\r\n",
]


@pytest.mark.parametrize("block", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("way", ["subscribe", "listen"])
async def test_a_malformed_header_block_deafens_nobody(server: NatsServer, block: bytes, way: str) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    if way == "subscribe":
        await bridge.subscribe(subjects.work("w1"), hear)
    else:
        await bridge.listen(subjects.work("w1"), lambda message: heard.append(message.data))

    # As a client that is not ours would: nats-py does not write such blocks.
    subject = subjects.work("w1")
    router.client._pending.append(f"HPUB {subject} {len(block)} {len(block) + 3}\r\n".encode() + block + b"bad\r\n")
    await router.publish(subject, b"good")

    await eventually(lambda: b"good" in heard, f"the next message is heard: {heard}")


async def test_no_header_on_the_wire_passes_for_a_mark(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    await bridge.subscribe(subjects.work("w1"), heard.put)

    await router.publish(subjects.work("w1"), b"", headers={OVERSIZED_HEADERS.strip(): "1", MALFORMED_HEADERS: "1"})

    headers = (await heard.get()).headers or {}
    assert OVERSIZED_HEADERS not in headers
    assert MALFORMED_HEADERS not in headers


async def test_a_server_that_stops_answering_counts_as_gone_before_any_lease(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    changes: list[bool] = []
    heard: list[bytes] = []
    bridge.on_connection_change.append(changes.append)

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await router.subscribe(subjects.ALL_LOAD, hear)
    server.pause()
    try:
        await eventually(lambda: changes == [False], "the bridge notices")
        with pytest.raises(BusUnavailable):
            await bridge.publish(W1_LOAD, b"late")
    finally:
        server.resume()

    await eventually(lambda: changes[-1] and bridge.connected and router.connected, f"all is well again: {changes}", 10)
    await router.flush()
    await bridge.publish(W1_LOAD, b"now")
    await eventually(lambda: heard == [b"now"], f"only the new one is heard: {heard}")


async def test_an_acknowledged_publish_is_stored_once_under_its_id(server: NatsServer) -> None:
    router = await server.bus("router")

    first = await router.publish_acked(subjects.journal("r1"), b"{}", msg_id="r1")
    again = await router.publish_acked(subjects.journal("r1"), b"{}", msg_id="r1")

    assert first == again


async def test_the_expected_sequence_decides_between_two_writers(server: NatsServer) -> None:
    bridge = await server.bus("worker_bridge", "w1")
    key = "$KV.WORKERS.w1"
    seq = await bridge.publish_acked(key, b"1", expect_last_seq=0)

    with pytest.raises(WrongSequence):
        await bridge.publish_acked(key, b"2", expect_last_seq=0)

    assert await bridge.publish_acked(key, b"3", expect_last_seq=seq) == seq + 1


async def test_a_follower_hears_all_in_order_through_a_server_restart(server: NatsServer) -> None:
    directory, bridge = await server.bus("directory"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await directory.follow(subjects.STREAM_KV_EVENTS, subjects.kv(0, "*"), hear, start="new")
    for n in range(20):
        await bridge.publish_acked(subjects.kv(0, "w1"), str(n).encode(), msg_id=f"a{n}")
    server.kill()
    server.start_again()
    await eventually(lambda: bridge.connected, "the bridge is connected again")
    for n in range(20, 40):
        await bridge.publish_acked(subjects.kv(0, "w1"), str(n).encode(), msg_id=f"a{n}", attempts=20)

    await eventually(lambda: len(heard) >= 40, "all 40 heard", deadline_s=15)
    assert heard == [str(n).encode() for n in range(40)]


async def test_nothing_published_while_cut_off_is_delivered_later(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await router.subscribe(subjects.ALL_LOAD, hear)
    await router.flush()
    server.kill()
    await eventually(lambda: not bridge.connected, "the bridge notices")

    with pytest.raises(BusUnavailable):
        await bridge.publish(W1_LOAD, b"late")

    server.start_again()
    await eventually(lambda: router.connected and bridge.connected, "both are connected again")
    await router.flush()
    await bridge.publish(W1_LOAD, b"now")
    await eventually(lambda: heard == [b"now"], f"only the new one is heard: {heard}")


async def test_what_waited_to_be_written_when_the_server_died_is_not_delivered_later(server: NatsServer) -> None:
    """nats-py keeps it, and would write it to the next server: a heartbeat that is old by then."""
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await router.subscribe(subjects.ALL_LOAD, hear)
    await router.flush()
    server.pause()

    def stays_here() -> bool:
        """A server that reads nothing: once the sockets are full, what is sent waits with the client."""
        waits = bridge.client._pending_data_size > 0
        bridge.send(W1_LOAD, bytes(1024 * 1024))
        return waits

    await eventually(stays_here, "nothing more is written")
    bridge.send(W1_LOAD, b"late")
    server.kill()
    await eventually(lambda: not bridge.connected, "the bridge notices")

    server.start_again()

    await eventually(lambda: router.connected and bridge.connected, "both are connected again")
    await router.flush()
    await bridge.publish(W1_LOAD, b"now")
    await eventually(lambda: b"now" in heard, "the new one is heard")
    assert heard == [b"now"]


async def test_a_client_that_nats_py_closed_for_good_is_made_anew_with_its_subscriptions(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []
    changes: list[bool] = []
    router.on_connection_change.append(changes.append)

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await router.subscribe(subjects.ALL_LOAD, hear)
    await router.flush()

    # What nats-py does at any -ERR other than a stale connection or a denial (e.g. "User Authentication Expired").
    await router.client._process_err("'user authentication expired'")

    await eventually(lambda: changes[-1:] == [True], "a new client is there")
    await router.flush()
    await bridge.publish(W1_LOAD, b"after")
    await eventually(lambda: heard == [b"after"], "the subscription lives on")


async def test_a_connection_that_the_server_just_dropped_is_closed_all_the_same(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that reads its config again drops those whom it knows otherwise now, whatever they are doing."""
    router = await server.bus("router")
    client = router.client
    transport = client._transport
    assert transport is not None

    # The socket is lost in the middle of closing: something still waits to be written, and nats-py lets its failure
    # through.
    async def flush(**_: float) -> None:
        client._pending, client._pending_data_size = [b"PING\r\n"], 6
        raise nats.errors.ConnectionReconnectingError

    async def drain() -> None:
        transport.close()
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(client, "flush", flush)
    monkeypatch.setattr(transport, "drain", drain)

    await router.close()
    assert not router.connected


async def test_a_new_client_whose_subscriptions_fail_is_given_up_and_tried_again(server: NatsServer) -> None:
    router, bridge = await server.bus("router"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def note(message: Msg) -> None:
        heard.append(message.data)

    subscription = await router.subscribe(subjects.ALL_LOAD, note)
    whole = subscription._open
    failures: list[Exception] = [nats.errors.ConnectionClosedError(), BusUnavailable("no stream yet")]

    async def fails_twice() -> NatsSubscription:
        if failures:
            raise failures.pop(0)
        return await whole()

    subscription._open = fails_twice
    await router.client._process_err("'user authentication expired'")

    await eventually(lambda: router.connected and not failures and router._reviving is None, "the third client stands")
    await router.flush()
    await bridge.publish(W1_LOAD, b"after")
    await eventually(lambda: heard == [b"after"], f"heard once: {heard}")


async def test_messages_of_a_stream_come_once(server: NatsServer) -> None:
    directory, bridge = await server.bus("directory"), await server.bus("worker_bridge", "w1")
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await directory.follow(subjects.STREAM_KV_EVENTS, subjects.kv(0, "*"), hear, start="new")
    before = directory.client.stats["in_msgs"]
    for n in range(50):
        await bridge.publish_acked(subjects.kv(0, "w1"), str(n).encode())
    await eventually(lambda: len(heard) == 50, "all are heard")

    assert directory.client.stats["in_msgs"] - before < 60, "beside them only heartbeats of the consumer"


@pytest.mark.timeout(90)
async def test_messages_dropped_for_a_slow_callback_are_counted_and_the_next_ones_heard(
    server: NatsServer, tmp_path: Path
) -> None:
    """nats-py keeps 65,536 messages for a callback that is behind; more are dropped, which only its error callback
    says."""
    rt = Runtime("directory", "d1", tmp_path, Config(), RealClock())
    bus = await Bus.connect(
        server.url,
        name="d1",
        inbox_prefix=subjects.service_inbox("directory", "d1"),
        nkey_seed=server.seed("directory"),
        on_event=rt.bus_event,
    )
    bridge = await server.bus("worker_bridge", "w1")
    wake = asyncio.Event()
    heard: list[bytes] = []

    async def sleep_first(message: Msg) -> None:
        await wake.wait()
        heard.append(message.data)

    def dropped() -> float:
        return rt.registry.get_sample_value("prefixbus_bus_events_total", {"kind": "slow_consumer"}) or 0.0

    try:
        await bus.subscribe(W1_LOAD, sleep_first)
        await bus.flush()
        for _ in range(68):
            for _ in range(1000):
                bridge.send(W1_LOAD, b"early")
            await bridge.flush(30)
        await eventually(lambda: dropped() > 0, "a slow_consumer event", 30)
        await bus.flush(30)
        lost = dropped()
        wake.set()
        await eventually(lambda: len(heard) == 68_000 - lost, f"all but the {lost:g} dropped are heard", 30)
        bridge.send(W1_LOAD, b"late")
        await eventually(lambda: heard[-1] == b"late", "the next one is heard", 30)
    finally:
        await bus.close()


async def test_a_first_connection_that_cannot_be_made_says_why(server: NatsServer) -> None:
    with pytest.raises(NotAdmitted, match=r"(?i)authorization"):
        await Bus.connect(server.url, name="x", inbox_prefix="_INBOX.x", connect_timeout_s=3)


async def test_refused_credentials_are_shown_once_and_not_until_the_time_is_over(server: NatsServer) -> None:
    errors_before = server.log().count("authentication error")

    with pytest.raises(NotAdmitted):
        await Bus.connect(server.url, name="x", inbox_prefix="_INBOX.x", connect_timeout_s=15)

    assert server.log().count("authentication error") == errors_before + 1, server.log()


async def test_no_server_is_said_within_the_timeout() -> None:
    with pytest.raises(BusUnavailable, match="cannot connect"):
        await Bus.connect("nats://127.0.0.1:1", name="x", inbox_prefix="_INBOX.x", connect_timeout_s=0.3)
