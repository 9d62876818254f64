"""What the bridge makes of a real engine's block events: exactly what the engine holds, whatever happens in between.

The judge is `story`, the engine's own replay read by other code than the bridge's."""

import asyncio
import base64
import json
import re
import secrets
import signal
import time
import urllib.request
from typing import Any

import pytest
from nats.aio.msg import Msg
from support.cluster import chat
from support.nats import eventually
from support.vllm import BLOCK

from prefixbus.bus import messages, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import WorkerLost
from prefixbus.bus.namespace import NS_ID_BYTES
from prefixbus.client import Client
from prefixbus.cluster import deployment

from .narrow import (
    DEADLINE_S,
    HITS,
    KV_BLOCKS,
    MODEL,
    STEP_TOKENS,
    TEST_TIMEOUT_S,
    WORKER,
    Narrow,
    answered,
    reusable,
)

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


def ids(blocks: int) -> list[int]:
    """A prompt of full blocks and one token more, like no other."""
    return [1000 + secrets.randbelow(40000) for _ in range(blocks * BLOCK + 1)]


def past_the_bridge(cluster: Narrow, prompt: list[int], salt: str = "", max_tokens: int = 1) -> dict[str, Any]:
    """What the engine answers to a request that the bridge knows nothing of."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    if salt:
        body["cache_salt"] = salt
    request = urllib.request.Request(
        f"{cluster.engine_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=2 * DEADLINE_S) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def reset_past_the_bridge(cluster: Narrow) -> None:
    request = urllib.request.Request(f"{cluster.engine_url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=2 * DEADLINE_S) as reply:
        assert reply.status == 200


async def test_foreign_blocks_are_counted_and_not_advertised(narrow: Narrow, narrow_client: Client) -> None:
    await asyncio.to_thread(reset_past_the_bridge, narrow)
    await asyncio.to_thread(past_the_bridge, narrow, ids(1))
    before = await narrow.in_step()
    foreign, held = narrow.of_bridge("foreign_blocks"), narrow.of_bridge("held_blocks")

    await asyncio.to_thread(past_the_bridge, narrow, ids(10), "a salt of somebody else")
    await asyncio.to_thread(past_the_bridge, narrow, ids(7))
    story = await narrow.in_step()

    assert before.removed == story.removed
    assert narrow.of_bridge("foreign_blocks") - foreign == 17
    assert narrow.of_bridge("held_blocks") == held
    assert narrow.total("directory", "prefixbus_directory_entries") == held


async def test_a_prompt_of_several_steps_is_told_of_before_its_first_token(
    narrow: Narrow, narrow_client: Client
) -> None:
    directory = await deployment.connect(narrow.state, "directory", narrow.url)
    told_at: list[float] = []

    async def hear(message: Msg) -> None:
        event = messages.KV.decode(message.data)
        if isinstance(event, messages.KvEvents) and any(isinstance(op, messages.Stored) for op in event.ops):
            told_at.append(message.metadata.timestamp.timestamp())

    try:
        await directory.follow(subjects.STREAM_KV_EVENTS, subjects.kv(0, "*"), hear, start="new")
        body = {"prompt": ids(3 * STEP_TOKENS // BLOCK), "max_tokens": 1, "ignore_eos": True}
        async for frame in narrow_client.stream(MODEL, body):
            if frame.seq == 0:
                first_token_at = time.time()
        await eventually(lambda: len(told_at) >= 2, "what the last step computed", DEADLINE_S)
    finally:
        await directory.close()

    assert told_at[0] < first_token_at
    await narrow.in_step()


async def test_salts_are_known_by_the_bridge_and_passed_on_to_nobody(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    """The engine says them as they are."""
    directory = await deployment.connect(narrow.state, "directory", narrow.url)
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    try:
        await directory.follow(subjects.STREAM_KV_EVENTS, subjects.kv(0, "*"), hear, start="new")
        salts, foreign = narrow.story().salts, narrow.of_bridge("foreign_blocks")
        body = {"prompt": ids(3), "max_tokens": 1, "ignore_eos": True}
        await answered(narrow_client, narrow_operator, body, scope=f"s{secrets.token_hex(4)}")
        story = await narrow.in_step()
        await eventually(lambda: bool(heard), "its blocks are told", DEADLINE_S)
    finally:
        await directory.close()

    (salt,) = story.salts - salts
    assert narrow.of_bridge("foreign_blocks") == foreign, "its blocks are known for ours"
    # Whatever is written down here: logs, streams, snapshots.
    written = [file.read_bytes() for file in narrow.state.rglob("*") if file.is_file()]
    assert len(written) > 10
    proof = base64.b32decode(salt.upper() + "=")[NS_ID_BYTES:]
    assert not any(salt.encode() in text or proof in text for text in (*heard, *written))


async def test_reuse_is_told_by_class_in_tokens(narrow: Narrow, narrow_client: Client, narrow_operator: Bus) -> None:
    body = {"prompt": ids(4), "max_tokens": 1, "ignore_eos": True}
    cached = narrow.of_bridge("input_tokens_total", source="cached")
    computed = narrow.of_bridge("input_tokens_total", source="uncached")

    for _ in range(2):
        await answered(narrow_client, narrow_operator, body)
        await narrow.in_step()

    assert narrow.of_bridge("input_tokens_total", source="cached") - cached == 4 * BLOCK
    assert narrow.of_bridge("input_tokens_total", source="uncached") - computed == 4 * BLOCK + 1 + 1
    series = [
        name for name in narrow.metrics("worker_bridge") if name.startswith("prefixbus_bridge_input_tokens_total")
    ]
    assert all(re.search(r'prefix_class="\w+"', name) for name in series)


async def test_blocks_stored_twice_are_held_until_both_copies_went(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    before = narrow.story()
    # Of a prompt of full blocks alone the last one is computed each time, and each copy of it is stored.
    body = {"prompt": ids(20)[:-1], "max_tokens": 1, "ignore_eos": True}

    for _ in range(3):
        await answered(narrow_client, narrow_operator, body)
    twice = await narrow.in_step()
    for _ in range(3):
        await answered(narrow_client, narrow_operator, {"prompt": ids(45), "max_tokens": 1, "ignore_eos": True})
    story = await narrow.in_step()

    assert twice.twice == before.twice + 2
    assert twice.removed < story.removed, "the copies went one by one"


async def test_evictions_come_tail_first_and_leave_no_block_behind(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    before, aged = narrow.story(), narrow.of_bridge("evicted_block_age_seconds_count")
    for blocks in (50, 40, 70, 30, 90):
        await answered(narrow_client, narrow_operator, {"prompt": ids(blocks), "max_tokens": 1, "ignore_eos": True})
    story = await narrow.in_step()

    assert story.removed - before.removed >= 280 - KV_BLOCKS
    assert story.orphaned == 0, "children go before their parents"
    assert narrow.of_bridge("blocks_of_unknown_parents_total") == 0
    assert narrow.of_bridge("blocks_malformed_total") == 0
    assert narrow.of_bridge("engine_events_unknown_total") == 0
    assert narrow.of_bridge("kv_occupancy_ratio") > 0.9
    assert 0 < narrow.of_bridge("evicted_block_age_seconds_count") - aged <= story.removed - before.removed


async def test_a_reset_through_the_bridge_is_known_at_once_though_the_engine_tells_it_later(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    body = chat(f"{secrets.token_hex(8)} what is forgotten " * 20, max_tokens=2)
    await answered(narrow_client, narrow_operator, body)
    await narrow.in_step()

    reply = await narrow_operator.request(subjects.control(WORKER, "reset"), b"", timeout_s=DEADLINE_S)

    assert messages.CONTROL_REPLY.decode(reply.data).error == ""
    assert narrow.of_bridge("held_blocks") == 0
    assert narrow.story().copies, "the engine has not said so yet"
    await eventually(
        lambda: narrow.total("directory", "prefixbus_directory_entries") == 0, "the directory forgets", DEADLINE_S
    )
    answer, outcome = await answered(narrow_client, narrow_operator, body)
    assert outcome.predicted_tokens == answer.cached_tokens == 0
    await narrow.in_step()
    answer, outcome = await answered(narrow_client, narrow_operator, body)
    assert outcome.predicted_tokens == answer.cached_tokens == reusable(outcome.prompt_tokens)


async def test_a_reset_past_the_bridge_is_known_with_the_engines_next_step(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    body = chat(f"{secrets.token_hex(8)} what somebody else made it forget " * 20, max_tokens=2)
    # A scope of its own: what was predicted in vain costs its namespace trust, and later predictions are less than all.
    scope = f"s{secrets.token_hex(4)}"
    await answered(narrow_client, narrow_operator, body, scope=scope)
    await narrow.in_step()
    clears = narrow.of_bridge("cache_clears_total")

    await asyncio.to_thread(reset_past_the_bridge, narrow)
    missed, outcome = await answered(narrow_client, narrow_operator, body, scope=scope)
    await narrow.in_step()
    again, corrected = await answered(narrow_client, narrow_operator, body, scope=scope)

    assert (outcome.predicted_tokens, missed.cached_tokens) == (reusable(outcome.prompt_tokens), 0)
    assert narrow.of_bridge("cache_clears_total") == clears + 1
    assert again.cached_tokens == reusable(outcome.prompt_tokens)
    assert 0 < corrected.predicted_tokens <= again.cached_tokens


async def test_a_killed_bridge_accounts_for_every_block_when_it_is_back(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    body = chat(f"{secrets.token_hex(8)} what was there before " * 20, max_tokens=2)
    await answered(narrow_client, narrow_operator, body)
    await narrow.in_step()

    has_begun = asyncio.Event()

    async def long_answer() -> None:
        with pytest.raises(WorkerLost):
            async for frame in narrow_client.stream(MODEL, chat("Go on", max_tokens=2000, ignore_eos=True)):
                if frame.seq == 20:
                    has_begun.set()

    streaming = asyncio.create_task(long_answer())
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    old = narrow.signal("bridge-w1", signal.SIGKILL)
    # Nobody hears these but in the replay: some that stay, and evictions.
    for blocks in (30, 40):
        await asyncio.to_thread(past_the_bridge, narrow, ids(blocks))
    await narrow.is_whole_again("bridge-w1", old, 2 * DEADLINE_S)
    story = await narrow.in_step()

    assert narrow.of_bridge("foreign_blocks") >= 70
    assert story.batches > 0
    await asyncio.wait_for(streaming, 2 * DEADLINE_S)
    await narrow.settles(DEADLINE_S)
    hits = narrow.of_engine(HITS)
    answer, outcome = await answered(narrow_client, narrow_operator, body)
    assert outcome.predicted_tokens == answer.cached_tokens == narrow.of_engine(HITS) - hits
