"""Whatever happened to a bridge, it knows every block that its engine has."""

import asyncio
import signal
from pathlib import Path

import pytest
from support.cluster import TEST_TIMEOUT_S, Cluster, ask, chat
from support.nats import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2 * TEST_TIMEOUT_S)]

WHOLE_S = 60.0


async def test_a_bridge_that_was_killed_in_the_middle_of_streams_accounts_for_all_its_engine_has(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, "--workers", "1") as cluster:
        async with await cluster.client() as client:
            streams = [
                asyncio.create_task(ask(client, chat(f"{number} " + "one thing and another " * 40, max_tokens=200)))
                for number in range(8)
            ]
            await eventually(lambda: cluster.engine_busy() == len(streams), "all are at work", WHOLE_S)
            bridge = cluster.signal("bridge-w1", signal.SIGKILL)
            # Those that were at work may end in an error; what they leave in the engine is what counts.
            await asyncio.gather(*streams, return_exceptions=True)
            await cluster.is_whole_again("bridge-w1", bridge, WHOLE_S)
            await ask(client, chat("after all that " * 30, max_tokens=4))
        await cluster.settles(WHOLE_S)

        def unaccounted_for() -> float:
            told = cluster.metrics("worker_bridge")
            known = told["prefixbus_bridge_held_blocks"] + told["prefixbus_bridge_foreign_blocks"]
            return float(cluster.engine_stats()["w1"]["keys_cached"]) - known

        await eventually(lambda: unaccounted_for() == 0, "every block is accounted for", WHOLE_S)
        told = cluster.metrics("worker_bridge")
        assert told["prefixbus_bridge_held_blocks"] > 8
        assert told["prefixbus_bridge_story_complete"] == 1
        assert told["prefixbus_bridge_blocks_of_unknown_parents_total"] == 0
