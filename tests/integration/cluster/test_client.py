"""The client against a real server and callout: what it is refused is said at once, and by name."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from nats.micro import add_service
from support.nats import NatsServer, eventually

from prefixbus import client as client_module
from prefixbus.bus.connection import NotAdmitted
from prefixbus.bus.errors import BusPermissionDenied
from prefixbus.client import Client, Silence, StreamGap

README = Path(__file__).resolve().parents[3] / "README.md"
BODY = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=[]) as running:
        await running.provision()
        await running.callout()
        yield running


@pytest.mark.parametrize(("scope", "named"), [("Hr", "scope Hr of tenant acme"), ("", "tenant acme as a whole")])
async def test_a_scope_that_the_token_may_not_name_is_said_and_not_waited_for(
    server: NatsServer, scope: str, named: str
) -> None:
    token = server.token("acme", ["sales"], label="alice")

    async with await Client.connect(server.url, tenant="acme", token=token, scope=scope, label="alice") as client:
        with pytest.raises(BusPermissionDenied, match=named):
            # Longer than the test may run: waiting for the silence to end would fail it.
            async for _ in client.stream("smollm2", BODY, resend_after_s=60):
                pass


async def test_a_wrong_token_is_said_with_the_tenants_name(server: NatsServer) -> None:
    with pytest.raises(NotAdmitted, match="token not accepted for tenant demo"):
        await Client.connect(server.url, tenant="demo", token="wrong")


async def test_the_readmes_program_does_not_call_it_done_when_nobody_answers(server: NatsServer) -> None:
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program[1]),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NATS_URL": server.url, "PREFIXBUS_TOKEN": server.demo.token},
    )
    said, _ = await process.communicate()

    assert said.decode().split("\n")[-2] == "nobody answers"


async def test_the_readmes_credentials_find_the_services_on_the_bus(server: NatsServer) -> None:
    command = re.search(r"--nkey \.prefixbus/(\S+) --inbox-prefix (\S+) micro ls", README.read_text())
    assert command
    router = await server.bus("router")
    await add_service(router.client, name="prefixbus-router", version="0.1.0")

    client = await nats.connect(server.url, nkeys_seed=str(server.state / command[1]), inbox_prefix=command[2])
    try:
        reply = await client.request("$SRV.PING", b"", timeout=5)
    finally:
        await client.close()

    assert b'"prefixbus-router"' in reply.data


async def test_what_nobody_took_is_sent_again_when_somebody_could(server: NatsServer) -> None:
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        asked = asyncio.create_task(collect(client))
        # The first sending has reached the server, which says that nobody listens.
        await eventually(lambda: bool(client._streams), "it is sent")
        await client._bus.flush()

        tokenizer = await server.bus("tokenizer")

        async def answer(message: Msg) -> None:
            await tokenizer.publish(message.reply, b"", headers={"Pb-Final": "1", "Pb-Seq": "0"})

        await tokenizer.subscribe("pb.v1.infer.>", answer, queue="tokenizer")

        assert await asked == 0


# nats-py leaves a connection open that a server refused while it was coming back.
@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
async def test_a_request_waits_for_a_server_that_restarts(server: NatsServer) -> None:
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        server.kill()
        await eventually(lambda: not client._bus.connected, "the client notices")
        asked = asyncio.create_task(collect(client))
        server.start_again()
        tokenizer = await server.bus("tokenizer")

        async def answer(message: Msg) -> None:
            await tokenizer.publish(message.reply, b"", headers={"Pb-Final": "1", "Pb-Seq": "0"})

        await tokenizer.subscribe("pb.v1.infer.>", answer, queue="tokenizer")

        assert await asked == 0


async def collect(client: Client) -> int:
    return len([frame async for frame in client.stream("smollm2", BODY)])


async def test_a_sending_that_was_swallowed_is_sent_again_under_the_same_id(server: NatsServer) -> None:
    tokenizer = await server.bus("tokenizer")
    heard: list[tuple[str, str]] = []

    async def answer_the_second(message: Msg) -> None:
        headers = message.headers or {}
        heard.append((headers["Pb-Request-Id"], headers["Pb-Sending"]))
        if len(heard) == 2:
            await tokenizer.publish(message.reply, b"", headers={"Pb-Final": "1", "Pb-Seq": "0"})

    await tokenizer.subscribe("pb.v1.infer.>", answer_the_second, queue="tokenizer")
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        async for _ in client.stream("smollm2", BODY, request_id="r1", resend_after_s=0.2):
            pass

    assert heard == [("r1", "1"), ("r1", "2")]


async def test_a_sending_that_was_heard_of_is_not_sent_again(server: NatsServer) -> None:
    tokenizer = await server.bus("tokenizer")
    heard: list[str] = []

    async def keep_alive_and_die(message: Msg) -> None:
        heard.append(message.reply)
        await tokenizer.publish(message.reply, b'{"choices":[]}')

    await tokenizer.subscribe("pb.v1.infer.>", keep_alive_and_die, queue="tokenizer")
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        with pytest.raises(Silence):
            async for _ in client.stream("smollm2", BODY, resend_after_s=0.2):
                pass

    assert len(heard) == 1


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([(0, 1), (2, 1)], "Frame 1 is missing"),
        ([(1, 1)], "Frame 0 is missing"),
        ([(0, 1)], "The answer has 3 frames; 1 came"),
        ([(0, 1), (1, 2)], "Attempt 2 came into the answer of attempt 1"),
    ],
)
async def test_an_answer_with_a_hole_in_it_is_not_taken_for_whole(
    server: NatsServer, sent: list[tuple[int, int]], said: str
) -> None:
    """The server drops what a slow reader does not take; the numbers tell."""
    tokenizer = await server.bus("tokenizer")

    async def answer(message: Msg) -> None:
        for seq, attempt in sent:
            headers = {"Pb-Seq": str(seq), "Pb-Attempt": str(attempt)}
            await tokenizer.publish(message.reply, b'{"choices":[]}', headers=headers)
        await tokenizer.publish(message.reply, headers={"Pb-Final": "1", "Pb-Seq": "3"})

    await tokenizer.subscribe("pb.v1.infer.>", answer, queue="tokenizer")
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        with pytest.raises(StreamGap, match=said):
            await collect(client)


async def test_a_cancel_that_was_swallowed_is_sent_again_while_frames_still_come(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the tokenizer that took it may have been killed."""
    monkeypatch.setattr(client_module, "CANCEL_AGAIN_S", 0.1)
    tokenizer = await server.bus("tokenizer")
    cancels: list[str] = []

    async def cancelled(message: Msg) -> None:
        cancels.append(message.subject)

    async def answer(message: Msg) -> None:
        headers = {"Pb-Request-Id": (message.headers or {})["Pb-Request-Id"]}
        while len(cancels) < 2:
            await tokenizer.publish(message.reply, b'{"choices":[]}', headers=headers)
            await asyncio.sleep(0.02)
        await tokenizer.publish(message.reply, headers={**headers, "Pb-Final": "1", "Pb-Error": "cancelled"})

    await tokenizer.subscribe("pb.v1.cancel.*.*", cancelled, queue="tokenizer")
    await tokenizer.subscribe("pb.v1.infer.>", answer, queue="tokenizer")
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        async for _ in client.stream("smollm2", BODY, request_id="r1"):
            break

        await eventually(lambda: len(cancels) > 1 and not client._cancelled_at, "its end is heard")

    assert set(cancels) == {"pb.v1.cancel.demo.r1"}


async def test_a_client_that_did_not_run_for_a_while_takes_nothing_for_silence(server: NatsServer) -> None:
    """Its timers are due before it has read what came meanwhile."""
    tokenizer = await server.bus("tokenizer")

    async def answer(message: Msg) -> None:
        await tokenizer.publish(message.reply, b'{"choices":[]}', headers={"Pb-Seq": "0", "Pb-Attempt": "1"})
        await tokenizer.flush()
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)
        await tokenizer.publish(message.reply, headers={"Pb-Final": "1", "Pb-Seq": "1"})

    await tokenizer.subscribe("pb.v1.infer.>", answer, queue="tokenizer")
    async with await Client.connect(server.url, tenant="demo", token=server.demo.token) as client:
        frames = [frame async for frame in client.stream("smollm2", BODY, resend_after_s=0.3)]

    assert len(frames) == 1
