"""One tenant's namespaces do not push out another's, however many its clients' salts make."""

from typing import Any

from prefixbus.bus.messages import VERSION, KvEvents, Load, Outcome, Stored
from prefixbus.directory.quota import Quota
from prefixbus.directory.shard import Settings, Shard
from prefixbus.directory.shedding import Bounds

KEYS = (7).to_bytes(8, "little")


def ns(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_an_owner_has_too_many_only_by_those_that_are_held() -> None:
    quota = Quota(each_max=2, remembered_max=100)
    for number in range(5):
        quota.named(ns(number), "globex")
    quota.named(ns(9), "acme")

    assert quota.beyond({ns(0), ns(1), ns(9)}) == []
    assert quota.beyond({ns(0), ns(1), ns(4), ns(9)}) == [ns(0), ns(1), ns(4)]


def test_a_namespace_has_the_owner_that_was_named_last() -> None:
    quota = Quota(each_max=1, remembered_max=100)
    for number in (1, 2):
        quota.named(ns(number), "globex")
    quota.named(ns(2), "acme")

    assert quota.beyond({ns(1), ns(2)}) == []
    assert len(quota) == 2


def test_owners_of_a_bounded_number_are_remembered() -> None:
    quota = Quota(each_max=1, remembered_max=3)
    for number in range(10):
        quota.named(ns(number), "globex")
    quota.named(ns(7), "globex")
    quota.named(ns(10), "globex")

    assert len(quota) == 3
    assert quota.beyond({ns(number) for number in range(11)}) == [ns(9), ns(7), ns(10)]


def outcome(number: int, tenant: str) -> Outcome:
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "client_request_id": "",
        "attempt": 1,
        "worker": "w1",
        "incarnation": 1,
        "tenant": tenant,
        "model": "m",
        "ns_id": ns(number).hex(),
        "status": "ok",
        "error": "",
        "prefix_class": "",
        "decision": "",
        "prompt_tokens": 32,
        "predicted_tokens": 0,
        "cached_tokens": 0,
        "prefill_tokens": 32,
        "output_tokens": 1,
        "queue_wait_ms": None,
        "ttft_ms": None,
        "total_ms": 1.0,
        "ended_at": 0.0,
    }
    return Outcome(v=VERSION, **fields)


def test_a_flood_of_one_tenants_namespaces_costs_that_tenant_alone() -> None:
    """Those of acme are never asked for: they would be the first to go by use."""
    shard = Shard(Settings(bounds=Bounds(namespaces_per_tenant=50)))
    shard.heartbeat(Load(VERSION, "w1", 1, 1, 0, "m", "s", 0.0, 0, 0, 8, 0.0, 1 << 20, 16, False, []), 0, 0.0)
    for number in range(400):
        tenant = "acme" if number < 40 else "globex"
        shard.events(KvEvents(VERSION, "w1", 1, number + 1, [Stored(ns(number), 0, KEYS)]), 0.0)
        shard.outcome(outcome(number, tenant), 0.0)
        if tenant == "globex":
            shard.shedding.looked_up(ns(number), 1, float(number > 390))
    slices = 0
    while shard.do_slice(1.0):
        slices += 1

    held = {int.from_bytes(ns_id, "little") for ns_id in shard.index.namespace_ids}
    assert set(range(40)) < held
    assert len(held) == 40 + 50
    # Of equal use but for their time: the youngest stay.
    assert set(range(391, 400)) < held
    assert 1 < slices < 20
    assert shard.shedding.shed_pairs == 310
