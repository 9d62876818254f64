"""Events that are late are not lost: what is known is believed, and what was announced is, until they are here."""

import struct

from prefixbus.bus.messages import VERSION, Dispatched, KvEvents, Load, Lookup, Outcome, Stored
from prefixbus.directory.ledger import AskDump, Effect
from prefixbus.directory.shard import EVENTS_FOLLOW_S, Shard

NS = bytes(16)
BEAT_S = 0.2


def load(report: int, event_seq: int) -> Load:
    return Load(
        v=VERSION,
        worker="w1",
        incarnation=1,
        report=report,
        event_seq=event_seq,
        model="m",
        serves="s",
        queue_ms=0.0,
        running=0,
        waiting=0,
        slots=8,
        kv_usage=0.0,
        kv_tokens=1 << 20,
        block_size=32,
        draining=False,
        accepted=[],
    )


def beats(shard: Shard, seconds: float, lag_s: float, *, lost: int = 0) -> list[AskDump]:
    """An event with each heartbeat, which comes that much later; returns the dumps that were asked for, and leaves the
    worker's last events on their way. `lost` is the seq of one that never comes."""
    effects: list[Effect] = []
    due: list[tuple[float, int]] = []
    for number in range(1, int(seconds / BEAT_S)):
        now = number * BEAT_S
        while due and due[0][0] <= now:
            seq = due.pop(0)[1]
            if seq != lost:
                stored = Stored(NS, 0, struct.pack("<Q", 1000 + seq))
                effects += shard.events(KvEvents(VERSION, "w1", 1, seq, [stored]), now)
        due.append((now + lag_s, number))
        effects += shard.heartbeat(load(number, number), number, now)
        effects += shard.tick(now)
    return [effect for effect in effects if isinstance(effect, AskDump)]


def test_a_stream_that_is_late_is_not_taken_for_one_with_a_hole() -> None:
    shard = Shard()

    asked = beats(shard, seconds=60, lag_s=4.0)

    # At first nobody knows that they are only late, and no dump comes here.
    steady = Shard()
    assert beats(steady, seconds=60, lag_s=0.3) == []
    assert 1 <= len(asked) <= 6
    assert 3.8 <= shard.ledger.lag_s("w1") <= 4.5


def test_a_hole_in_a_late_stream_is_found() -> None:
    asked = beats(Shard(), seconds=30, lag_s=0.3, lost=50)

    assert asked and {one.reason for one in asked} == {"gap"}


def test_what_was_announced_outlives_its_outcome_until_late_events_are_here() -> None:
    shard = Shard()
    beats(shard, seconds=30, lag_s=4.0)
    now, keys = 30.0, struct.pack("<2Q", 1, 2)
    announced = Dispatched(
        v=VERSION,
        request_id="r",
        attempt=1,
        router="r1",
        worker="w1",
        incarnation=1,
        prefill_ms=10.0,
        ns_id=NS,
        keys=keys,
        expires_at=now + 20,
    )
    shard.dispatched(announced, now, wall=now)

    shard.outcome(outcome(), now + 1)
    while shard.do_slice(now + 1 + EVENTS_FOLLOW_S + 2):
        pass

    (level,) = shard.lookup(Lookup(VERSION, NS, keys), now + 4).levels
    assert (level.depth, level.workers) == (2, ["w1"])


def outcome() -> Outcome:
    return Outcome(
        v=VERSION,
        request_id="r",
        client_request_id="r",
        attempt=1,
        worker="w1",
        incarnation=1,
        tenant="acme",
        model="m",
        ns_id=NS.hex(),
        status="ok",
        error="",
        prefix_class="session",
        decision="balanced-cold",
        prompt_tokens=64,
        predicted_tokens=0,
        cached_tokens=0,
        prefill_tokens=64,
        output_tokens=1,
        queue_wait_ms=0.0,
        ttft_ms=1.0,
        total_ms=2.0,
        ended_at=0.0,
    )
