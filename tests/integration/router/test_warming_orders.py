"""Orders of the directory: carried out by whoever has the tokens, once, and nobody's request is the later for it."""

from typing import Any

from support.nats import eventually

from prefixbus.bus import messages, subjects
from prefixbus.bus.messages import DISPATCHED, JOB, VERSION, Dispatch, Dispatched, Level, WarmOrder

from .fakes import BLOCK, MODEL, NS_ID, TENANT, FakeBridge
from .test_router import CLOCK, RunningRouter, World, is_idle
from .test_router import world as here

__all__ = ["here"]

KEYS = b"k" * 48
HELD = 4
"""Of its six blocks; the rest is the question."""


def order(**changes: Any) -> WarmOrder:
    fields: dict[str, Any] = {
        "v": VERSION,
        "ns_id": NS_ID,
        "key": int.from_bytes(KEYS[8 * HELD - 8 : 8 * HELD], "little"),
        "blocks": HELD,
        "worker": "w2",
        "incarnation": 1,
        "kind": "rewarm",
        "benefit": 1.0,
    }
    return WarmOrder(**(fields | changes))


async def give(at: World, wanted: WarmOrder) -> None:
    """As a directory gives it; each instance has a connection of its own."""
    directory = await at.server.bus("directory", instance=f"d{id(wanted)}")
    await directory.publish(subjects.WARM, messages.WARM_ORDER.encode(wanted))
    await directory.flush()
    await directory.close()


async def ask(at: World, times: int = 2) -> None:
    for _ in range(times):
        await at.ended(await at.client.send(CLOCK.wall(), keys=KEYS))


def orders(router: RunningRouter, result: str) -> float:
    return router.value("prefixbus_router_warm_orders_total", kind="rewarm", result=result)


async def heard(router: RunningRouter, result: str) -> None:
    await eventually(lambda: orders(router, result) == 1, f"the order: {result}")


def warm(bridge: FakeBridge) -> list[Dispatch]:
    return [dispatch for dispatch in bridge.dispatches if dispatch.decision == "warm"]


async def two_workers(at: World, **router: Any) -> tuple[FakeBridge, FakeBridge, RunningRouter]:
    """The first holds the prefix, the second waits for it without a word."""
    holder, idle = await at.bridge("w1"), await at.bridge("w2")
    idle.streams = False
    at.directory.levels = [Level(HELD, ["w1"])]
    running = await at.router(**router)
    await eventually(lambda: running.knows("w1", "w2"), "both workers are known")
    return holder, idle, running


async def announcements(at: World) -> list[Dispatched]:
    found: list[Dispatched] = []
    listening = await at.server.bus("router", instance="listener")

    async def hear(message: Any) -> None:
        found.append(DISPATCHED.decode(message.data))

    await listening.subscribe(subjects.DISPATCHED, hear)
    await listening.flush()
    return found


async def test_a_worker_is_given_the_prefix_alone_and_all_are_told_so(here: World) -> None:
    announced = await announcements(here)
    _, idle, router = await two_workers(here)
    await ask(here)

    await give(here, order())
    await heard(router, "taken")

    [dispatch] = warm(idle)
    job = JOB.decode(dispatch.job)
    assert (job.reply, job.client_request_id, job.params) == ("", "", b"")
    assert (job.namespace.tenant, dispatch.ns_id) == (TENANT, NS_ID)
    assert job.request_id == dispatch.request_id and len(job.tokens) <= 4 * HELD * BLOCK
    await eventually(lambda: any(one.is_warming for one in announced), "the announcement")
    [told] = [one for one in announced if one.is_warming]
    assert (told.worker, told.keys, told.prefill_ms) == ("w2", KEYS[: 8 * HELD], 0.0)
    requests = [one for one in announced if not one.is_warming]
    assert [(one.held_blocks, one.prefix_class) for one in requests] == [(HELD, "session")] * 2


async def test_an_order_is_in_nobodys_books_and_no_other_is_given_to_its_worker(here: World) -> None:
    _, idle, router = await two_workers(here)
    second = await here.router("router-2")
    await eventually(lambda: second.knows("w1", "w2"), "both know both workers")
    await ask(here, 6)

    def counted(result: str) -> float:
        return orders(router, result) + orders(second, result)

    await give(here, order())
    await eventually(lambda: counted("taken") == 1, "one of them acts")
    known = [len(one.desk.warming.prefixes) for one in here.routers]
    await give(here, order(round=1))
    await eventually(lambda: counted("not_idle") == sum(known), "neither does")

    assert len(warm(idle)) == 1
    assert all(is_idle(one) for one in here.routers)
    for one in here.routers:
        available = one.desk.fleet.survey(MODEL, "digest", CLOCK.now()).available
        assert [each.queue_ms for each in available] == [0.0, 0.0]


async def test_only_the_router_that_sent_the_prefix_last_acts_at_first(here: World) -> None:
    """The other one has its tokens, too."""
    _, idle, router = await two_workers(here)
    await ask(here)
    other = await here.server.bus("router", instance="other")
    theirs = Dispatched(VERSION, "X", 1, "other", "w1", 1, 1.0, NS_ID, KEYS, CLOCK.wall() + 9, held_blocks=HELD)
    await other.publish(subjects.DISPATCHED, DISPATCHED.encode(theirs))
    await other.flush()

    await give(here, order())
    await heard(router, "no_tokens")
    assert not warm(idle)
    await give(here, order(round=1))
    await heard(router, "taken")

    assert len(warm(idle)) == 1


async def test_nothing_is_sent_to_a_worker_that_is_busy_gone_or_not_for_this_tenant(here: World) -> None:
    pooled = await here.bridge("w1", pool="acme's")
    idle = await here.bridge("w2", pool="others")
    here.directory.levels = [Level(HELD, ["w1"])]
    router = await here.router(pools={TENANT: ["acme's"]})
    await eventually(lambda: router.knows("w1", "w2"), "both workers are known")
    await ask(here)

    await give(here, order())
    await heard(router, "not_idle")
    await give(here, order(worker="w1", incarnation=7))
    await eventually(lambda: orders(router, "not_idle") == 2, "another life")
    pooled.queue_ms = 500.0
    await eventually(
        lambda: router.desk.fleet.survey(MODEL, "digest", CLOCK.now()).available[0].queue_ms > 0, "it is busy"
    )
    await give(here, order(worker="w1"))
    await eventually(lambda: orders(router, "not_idle") == 3, "busy")

    assert not warm(idle) + warm(pooled)


async def test_a_namespace_that_a_bridge_refuses_is_forgotten(here: World) -> None:
    _, idle, router = await two_workers(here)
    await ask(here)
    idle.answer = lambda dispatch: "stale_namespace"

    await give(here, order())
    await heard(router, "refused")
    await give(here, order())
    await heard(router, "no_tokens")

    assert (len(warm(idle)), len(router.desk.warming.prefixes)) == (1, 0)


async def test_a_worker_whose_order_was_refused_may_be_given_another(here: World) -> None:
    _, idle, router = await two_workers(here)
    await ask(here)
    idle.answer = lambda dispatch: "busy"
    await give(here, order())
    await heard(router, "refused")

    idle.answer = lambda dispatch: ""
    await give(here, order())
    await heard(router, "taken")

    assert len(warm(idle)) == 2


async def test_what_was_asked_for_once_is_remembered_by_nobody(here: World) -> None:
    _, idle, router = await two_workers(here)
    await ask(here, 1)

    await give(here, order())
    await heard(router, "no_tokens")

    assert not warm(idle)
    assert len(router.desk.warming.prefixes) == 0
    await here.books_balance()
