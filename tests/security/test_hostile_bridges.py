"""A bridge that was taken over: what it can make others believe of requests and workers that are not its own.

Its key lets it publish into routers', directories' and operators' inboxes, where it answers, so an answer is only as
good as its address is secret."""

import asyncio
import itertools

import pytest
from nats.aio.msg import Msg
from support.nats import NatsServer, eventually

from prefixbus.bus import subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import BusUnavailable


async def test_nobody_answers_a_request_that_was_not_put_to_him(provisioned: NatsServer) -> None:
    """Else any bridge could say, in the directory's place, who holds what; or, in JetStream's, what a snapshot is."""
    router, bridge = await provisioned.bus("router"), await provisioned.bus("worker_bridge", "w1")
    directory = await provisioned.bus("directory")
    asked: list[Msg] = []

    async def hear(message: Msg) -> None:
        asked.append(message)

    await directory.subscribe(subjects.lookup(0), hear, queue="directory")
    await directory.flush()
    asking = asyncio.create_task(router.request(subjects.lookup(0), timeout_s=2))
    await eventually(lambda: bool(asked), "the question at the directory")

    for number in range(256):
        for guess in (f"{number}", f"{number:x}", f"{number:016x}"):
            await bridge.publish(f"{router.inbox_prefix}.r.{guess}", b"forged")
    await bridge.flush()

    await directory.publish(asked[0].reply, b"the directory's")
    assert (await asking).data == b"the directory's"


async def test_who_was_asked_once_cannot_tell_where_the_next_answer_is_expected(provisioned: NatsServer) -> None:
    operator, bridge = await provisioned.bus("operator"), await provisioned.bus("worker_bridge", "w1")
    addresses = [await address_of_a_reply(operator, bridge) for _ in range(32)]

    tokens = [int(address.rsplit(".", 1)[1], 16) for address in addresses]
    assert len({after - before for before, after in itertools.pairwise(tokens)}) == 31
    assert max(tokens) > 1 << 48


async def address_of_a_reply(asker: Bus, bridge: Bus) -> str:
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.reply)

    listening = await bridge.subscribe(subjects.control("w1", "ping"), hear)
    await bridge.flush()
    with pytest.raises(BusUnavailable):
        await asker.request(subjects.control("w1", "ping"), timeout_s=0.05)
    await eventually(lambda: bool(heard), "the question")
    await listening.unsubscribe()
    return heard[0]
