"""What could come to a worker from its own host store, or from others, and what is made of such an offer."""

import math

import msgspec
import pytest

from prefixbus.bus.messages import Holdings, Level, Load, Route
from prefixbus.router.cost import PROFILES
from prefixbus.router.fleet import Available, Fleet
from prefixbus.router.learning import Learner
from prefixbus.router.policy import Candidate, Policy, Pull, RequestShape, decide
from prefixbus.router.shortlist import Shortlist, shortlist
from prefixbus.router.transfer import Links

BLOCK = 16
TOKEN_BYTES = 128 * 1024
H100 = PROFILES["h100-8b"]
KEYS = b"".join(key.to_bytes(8, "little") for key in range(1, 10))


def fleet(count: int) -> list[Available]:
    books = Fleet(0.6, 3.0)
    for number in range(count):
        load = Load(
            v=1,
            worker=f"w{number}",
            incarnation=1,
            report=1,
            event_seq=0,
            model="m",
            serves="digest",
            queue_ms=0.0,
            running=0,
            waiting=0,
            slots=8,
            kv_usage=0.0,
            kv_tokens=1_000_000,
            block_size=BLOCK,
            draining=False,
            accepted=[],
        )
        books.heard(load, 0.0)
    return books.survey("m", "digest", 0.0).available


def shortlisted(levels: list[Level], links: Links | None, *, announced: dict[str, int] | None = None) -> Shortlist:
    route = Route(
        v=1,
        request_id="R1",
        client_request_id="c1",
        tenant="acme",
        model="m",
        serves="digest",
        ns_id=bytes(16),
        keys=KEYS,
        prompt_tokens=9 * BLOCK + 5,
        output_tokens=100,
        prefix_class="session",
        reply="",
        deadline_at=1e9,
        job=b"",
    )
    holdings = Holdings(1, levels, announced=announced or {})
    return shortlist(route, fleet(3), holdings, 0, Learner({"m": H100}), Policy(), 0.0, whole_fleet=True, links=links)


def offers(found: Shortlist) -> dict[str, Pull | None]:
    return {one.worker: one.pull for one in found.candidates}


def test_a_worker_is_offered_what_its_own_host_store_has_beyond_its_gpu() -> None:
    links = Links(TOKEN_BYTES, bytes_per_ms=0.0, host_bytes_per_ms=25e6)

    found = shortlisted([Level(8, ["w0"], "host"), Level(3, ["w0"])], links)

    load_ms = 5 * BLOCK * TOKEN_BYTES / 25e6
    assert offers(found) == {"w0": Pull("w0", 5 * BLOCK, load_ms), "w1": None, "w2": None}


def test_from_others_comes_what_the_own_store_has_not() -> None:
    links = Links(TOKEN_BYTES, bytes_per_ms=10e6, host_bytes_per_ms=25e6)

    found = shortlisted([Level(9, ["w1"]), Level(6, ["w0"], "host"), Level(2, ["w0"])], links)

    assert offers(found)["w0"] == Pull("w1", 7 * BLOCK, links.transfer_ms("w1", "w0", 3 * BLOCK))
    assert offers(found)["w1"] is None


def test_what_is_only_announced_cannot_be_given() -> None:
    links = Links(TOKEN_BYTES)

    found = shortlisted([Level(9, ["w1"])], links, announced={"w1": 4})

    assert offers(found)["w0"] == Pull("w1", 5 * BLOCK, links.transfer_ms("w1", "w0", 5 * BLOCK))


def test_a_prefix_that_a_host_store_has_is_not_fresh() -> None:
    levels = [Level(9, ["w1"], "host")]

    assert shortlisted(levels, Links(TOKEN_BYTES, host_bytes_per_ms=25e6)).shape.home == ""
    assert shortlisted(levels, None).shape.home != ""


def test_without_a_link_nothing_ever_comes() -> None:
    links = Links(TOKEN_BYTES, bytes_per_ms=0.0)

    assert (links.transfer_ms("a", "b", 1), links.transfer_ms("a", "a", 1)) == (math.inf, math.inf)
    assert set(offers(shortlisted([Level(9, ["w1"]), Level(9, ["w2"], "host")], links)).values()) == {None}


def test_a_transfer_waits_for_those_before_it_on_either_end_of_its_link() -> None:
    links = Links(TOKEN_BYTES)
    links.begun("a", "b", 1000, 10.0)
    links.begun("a", "c", 1000, 10.0)

    one_ms = links.transfer_ms("a", "b", 1000)
    assert links.wait_ms("a", "d", 10.0) == pytest.approx(2 * one_ms)
    assert links.wait_ms("d", "b", 10.0) == pytest.approx(one_ms)
    assert links.wait_ms("b", "a", 10.0) == links.wait_ms("a", "a", 10.0) == links.wait_ms("a", "d", 11.0) == 0


# --- and what a decision makes of it

SHAPE = RequestShape(prompt_tokens=8_000, output_tokens=100, block_size=BLOCK, fleet_rho=0.9)
WARM = Candidate("warm", 7_984, 150.0, 0.0, 0, 1_000_000, H100)
EMPTY = Candidate("empty", 0, 0.0, 0.0, 0, 1_000_000, H100)


def test_a_load_from_the_own_store_is_no_pull_and_is_done_however_busy_the_fleet_is() -> None:
    loads = msgspec.structs.replace(EMPTY, pull=Pull("empty", 7_984, 42.0))

    decision = decide(SHAPE, [WARM, loads], Policy(), 0.0)

    assert (decision.worker, decision.name) == ("empty", "prefer-warm-worker")
    assert decision.predicted_tokens == 7_984


def test_a_busy_fleet_pulls_nothing_from_others() -> None:
    pulls = msgspec.structs.replace(EMPTY, pull=Pull("warm", 7_984, 10.0))

    busy = decide(SHAPE, [WARM, pulls], Policy(), 0.0)
    calm = decide(msgspec.structs.replace(SHAPE, fleet_rho=0.1), [WARM, pulls], Policy(copy_price=0.0), 0.0)

    assert (busy.worker, busy.pull) == ("warm", None)
    assert (calm.worker, calm.name) == ("empty", "remote-pull")


def test_a_copy_has_a_price_beside_that_of_new_kv_the_busier_the_fleet_the_higher() -> None:
    pulls = msgspec.structs.replace(EMPTY, pull=Pull("warm", 7_984, 10.0))
    calm = msgspec.structs.replace(SHAPE, fleet_rho=0.1)

    free, dear = (decide(calm, [pulls], Policy(copy_price=price), 0.0).ranking[0] for price in (0.0, 0.9))

    assert free.copies
    assert dear.copies
    copied_ms = H100.token_ms * 7_984 + H100.attention_ms * 7_984 * 7_984 / 2
    assert dear.cost_ms - free.cost_ms == pytest.approx(0.9 * 0.1 / 0.9 * copied_ms)
