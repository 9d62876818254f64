"""Seconds that an operator waits: until all is whole again after kill -9 of each process, and until the request of a
client that vanished is off the engine and the books. And how long /healthz takes while eight prompts of 100,000 tokens
come in.

The bounds are 5 s, 1 s and 100 ms; tests hold four times that as deadlines, these are the figures."""

import asyncio
import json
import signal
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import nats
from support.cluster import MODEL, Cluster, ask, chat
from support.nats import eventually
from support.storm import Storm

VICTIMS = (
    *("tokenizer-1", "directory-1", "router-1", "auditor-1", "callout-1"),
    *("bridge-w1", "engine-w1", "nats-server"),
)
STAGES = ("queued", "prefill", "streaming")
# Times a line of some 25 tokens: as much of the model's 8192 as leaves room for the answer.
_LONG = 250
_SCALE = ("--workers", "2", "--scale", "tokenizer=2,router=2,directory=2,auditor=2")


def bench_recovery() -> dict[str, Any]:
    """Seconds from the kill to the first time that every process is ready and a request is answered."""
    with tempfile.TemporaryDirectory(prefix="prefixbus-bench-") as folder:
        cluster = Cluster(Path(folder), *_SCALE)
        cluster.start()
        try:
            return {"bench": "recovery", "seconds": asyncio.run(_recovery(cluster))}
        finally:
            cluster.stop()


async def _recovery(cluster: Cluster) -> dict[str, float]:
    seconds = {}
    async with await cluster.client() as client:
        for victim in VICTIMS:
            async with Storm(client, 10.0) as storm:
                await eventually(lambda storm=storm: storm.ended_ok >= 5, "requests are answered", 30)  # type: ignore[misc]
                killed, started = cluster.signal(victim, signal.SIGKILL), time.monotonic()
                await cluster.is_whole_again(victim, killed, 60)
                await ask(client, chat("Is all well again?", max_tokens=1))
                seconds[victim] = round(time.monotonic() - started, 2)
            await cluster.settles(30)
    return seconds


def bench_vanish() -> dict[str, Any]:
    """Seconds from the end of a client's connection until nothing of its request is in any engine or on any book, by
    how far it was."""
    with tempfile.TemporaryDirectory(prefix="prefixbus-bench-") as folder:
        cluster = Cluster(Path(folder), "--workers", "1")
        cluster.start()
        try:
            return {"bench": "vanish", "seconds": {stage: asyncio.run(_vanish(cluster, stage)) for stage in STAGES}}
        finally:
            cluster.stop()


async def _vanish(cluster: Cluster, stage: str) -> float:
    """A queued request is one at an engine that takes no step; one in prefill has thousands of tokens to go."""
    connection = await nats.connect(
        cluster.url, user="demo", password=cluster.token, inbox_prefix=b"_INBOX.demo", allow_reconnect=False
    )
    inbox = connection.new_inbox()
    frames = await connection.subscribe(inbox)
    if stage == "queued":
        await asyncio.to_thread(_tell_engines, cluster, "pause")
    question = f"{time.time()} words to read before the answer " * (_LONG if stage == "prefill" else 1)
    body = json.dumps(chat(question, max_tokens=7000 if stage == "streaming" else 500)).encode()
    await connection.publish(f"pb.v1.infer.demo.{MODEL}", body, reply=inbox)
    if stage == "streaming":
        await frames.next_msg(timeout=10)
    else:
        await eventually(lambda: cluster.engine_busy() > 0, "the engine has it", 10)
        assert not frames.pending_msgs, f"the answer has begun: this was not {stage}"
    await connection.close()
    closed = time.monotonic()
    # The engine, and every book of every service.
    await cluster.settles(30)
    seconds = round(time.monotonic() - closed, 2)
    if stage == "queued":
        await asyncio.to_thread(_tell_engines, cluster, "resume")
    return seconds


def _tell_engines(cluster: Cluster, verb: str) -> None:
    for engine in cluster.file.engines.values():
        with urllib.request.urlopen(f"{engine.url}/sim/{verb}", data=b"", timeout=5):
            pass


def bench_long_prompts() -> dict[str, Any]:
    """The p99 of /healthz in ms, by service, while eight prompts of some 100,000 tokens are tokenised and routed."""
    from chaos.test_long_prompts import PROMPTS, long_texts, watch

    environ = {"PREFIXBUS_MODELS__SMOLLM2__MAX_MODEL_LEN": "131072", "PREFIXBUS_MODELS__SMOLLM2__PROFILE": "instant"}
    with tempfile.TemporaryDirectory(prefix="prefixbus-bench-") as folder:
        cluster = Cluster(Path(folder), "--workers", "2", environ=environ)
        cluster.start()
        try:

            async def work() -> tuple[dict[str, list[float]], int]:
                done = asyncio.Event()
                watching = asyncio.create_task(asyncio.to_thread(watch, cluster, done.is_set))
                async with await cluster.client() as client:
                    bodies = [chat(text, max_tokens=2) for text in long_texts()]
                    answers = await asyncio.gather(
                        *(ask(client, body, deadline_s=120, resend_after_s=60) for body in bodies)
                    )
                done.set()
                return await watching, min(answer.usage["prompt_tokens"] for answer in answers)

            waits, tokens = asyncio.run(work())
        finally:
            cluster.stop()
    p99 = {name: round(1000 * sorted(each)[int(0.99 * len(each))], 1) for name, each in sorted(waits.items())}
    return {"bench": "long_prompts", "prompts": PROMPTS, "tokens": tokens, "healthz_p99_ms": p99}
