"""Damaged tokenizers beside a good one in one running tokenizer: each says what is wrong with it, and harms nobody."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from support import models
from support.nats import NatsServer, eventually
from support.processes import spawned

from prefixbus.bus import frames, subjects
from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import ROUTE
from prefixbus.cluster import deployment

pytestmark = pytest.mark.timeout(90)

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        description = json.loads(content)
        change(description)
        return json.dumps(description).encode()

    return damage


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    # name: file, what is done to it
    "truncated": ("tokenizer.json", lambda content: content[: len(content) // 2]),
    "empty": ("tokenizer.json", lambda content: b""),
    "not-json": ("tokenizer.json", lambda content: b"\xff\xfe" + content),
    "a-list": ("tokenizer.json", lambda content: b"[]"),
    "deeply-nested": ("tokenizer.json", lambda content: b"[" * 100_000),
    "unknown-kind": ("tokenizer.json", changed(lambda it: it["model"].update(type="Nonsense"))),
    "other-kind": ("tokenizer.json", changed(lambda it: it["model"].update(type="Unigram"))),
    "no-model": ("tokenizer.json", changed(lambda it: it.update(model=None))),
    "a-regex-that-is-none": (
        "tokenizer.json",
        changed(lambda it: it.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}})),
    ),
    # The library panics on this one, which no `except Exception` catches: it ended the process.
    "one-that-panics": (
        "tokenizer.json",
        changed(lambda it: it.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""})),
    ),
    "half-a-config": ("tokenizer_config.json", lambda content: content[: len(content) // 2]),
    "a-template-that-is-none": (
        "tokenizer_config.json",
        changed(lambda it: it.update(chat_template="{% for message in")),
    ),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """With one tokenizer on it, which has been given all damaged models and the good one."""
    async with NatsServer(tmp_path, workers=[]) as running:
        await running.provision()
        await running.callout()
        served = {"good": models.tiny()}
        for name, (file, damage) in DAMAGES.items():
            served[name] = tmp_path / name
            shutil.copytree(models.tiny(), served[name])
            (served[name] / file).write_bytes(damage((served[name] / file).read_bytes()))
        sections = [
            f'[models.{name}]\ntokenizer = "{path}"\nmodel_revision = "sha256:w"\n' for name, path in served.items()
        ]
        (running.state / "config.toml").write_text("\n".join(sections))
        yield running


class Asker:
    """A tenant that asks, and a router that answers each request that gets as far as it, at once and well."""

    def __init__(self, tenant: Bus, router: Bus, name: str) -> None:
        self._tenant = tenant
        self._router = router
        self._name = name
        self.routed: list[str] = []

    async def start(self) -> "Asker":
        await self._router.subscribe(subjects.ALL_ROUTE, self._answer, queue="router")
        await self._router.flush()
        return self

    async def _answer(self, message: Msg) -> None:
        route = ROUTE.decode(message.data)
        self.routed.append(route.model)
        await self._router.publish(route.reply, headers=frames.final_headers(route.client_request_id, seq=0))

    async def ask(self, model: str) -> dict[str, str]:
        """The headers of the one frame that comes."""
        heard: asyncio.Queue[Msg] = asyncio.Queue()
        reply = f"{self._tenant.inbox_prefix}.{model}.{len(self.routed)}"
        subscription = await self._tenant.subscribe(reply, heard.put)
        await self._tenant.publish(subjects.infer(self._name, model), BODY, reply=reply)
        frame = await asyncio.wait_for(heard.get(), 10)
        # All that the tokenizer said before it answered another is here by now.
        if model != "good":
            await self.ask("good")
        await self._tenant.flush()
        await subscription.unsubscribe()
        assert heard.empty(), f"{model}: more than one frame"
        assert frame.data == b""
        return dict(frame.headers or {})


async def test_a_damaged_tokenizer_is_named_to_its_callers_and_the_good_one_serves(server: NatsServer) -> None:
    tenant = await server.tenant_bus(server.demo.tenant, server.demo.token)
    asker = await Asker(tenant, await server.bus("router"), server.demo.tenant).start()
    command = [sys.executable, "-m", "prefixbus", "run", "tokenizer", "--state", str(server.state)]
    environ = {**os.environ, "PREFIXBUS_NATS__URL": server.url}
    with (server.state / "logs" / "tokenizer.log").open("wb") as log, spawned(command, env=environ, stderr=log) as it:
        await eventually(lambda: is_listening(server, it.pid), "the tokenizer serves", 60)

        answers = [await asker.ask(model) for model in DAMAGES for _ in range(2)]
        last = await asker.ask("good")

        assert it.poll() is None, "the tokenizer ended"
    for model, headers in zip([model for model in DAMAGES for _ in range(2)], answers, strict=True):
        sentence = headers["Nats-Service-Error"]
        assert (headers["Pb-Final"], headers["Pb-Error"]) == ("1", "unavailable"), (model, sentence)
        assert headers["Nats-Service-Error-Code"] == "503"
        assert f"'{model}' cannot be loaded" in sentence
        # What to do, and no file of the operator's.
        assert "Use another model" in sentence
        assert str(server.state) not in sentence
    assert "Pb-Error" not in last
    assert set(asker.routed) == {"good"}


async def is_listening(server: NatsServer, pid: int) -> bool:
    """Whether the tokenizer has loaded what it can. It says that it is not ready, and which models it cannot serve."""
    async with deployment.http_session(server.state) as session:
        for file in deployment.run_files(server.state):
            if file.pid == pid:
                reason = await deployment.not_ready_because(session, file)
                return all(f"{name}: " in reason for name in DAMAGES)
    return False
