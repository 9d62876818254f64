"""The shell: each request gets one answer, from here or from where it was routed; a forged reply gets none."""

import asyncio
import base64
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from support import models
from support.nats import eventually

from prefixbus.bus import blockkeys, namespace, subjects
from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import AdapterSection, CaptureSection, Config, LimitsSection, ModelSection, TokenizerSection
from prefixbus.bus.connection import OVERSIZED_HEADERS
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.bus.messages import CAPTURED, FACT, JOB, OUTCOME, ROUTE, VERSION, Fact, Job, Outcome, Route
from prefixbus.bus.runtime import Runtime
from prefixbus.tokenizer import digests, intake, render, service
from prefixbus.tokenizer.cancels import PASSED_PER_TURN
from prefixbus.tokenizer.metrics import Metrics
from prefixbus.tokenizer.model import TokenizerModel
from prefixbus.tokenizer.segments import Segmenter
from prefixbus.tokenizer.sentinels import Shield
from prefixbus.tokenizer.service import Tokenizer

SUBJECT = subjects.infer("acme", "tiny/1", "team-a")
# Too long to be encoded in place.
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 60
REPLY = "_INBOX.acme.c1.r1"
BODY = {"messages": [{"role": "user", "content": "The quick brown fox. " * 30}], "max_tokens": 8}


class Sent:
    """One published message."""

    def __init__(self, subject: str, payload: bytes, reply: str, headers: dict[str, str]) -> None:
        self.subject = subject
        self.payload = payload
        self.reply = reply
        self.headers = headers


class FakeSubscription:
    async def drain(self) -> None:
        pass


class FakeBus:
    """A bus that keeps what is published, and hands in what a test says."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.callbacks: dict[str, Callable[[Msg], Awaitable[None]]] = {}
        self.connected = True
        self.stream_answers = asyncio.Event()
        self.stream_answers.set()
        self._changed = asyncio.Event()

    def send(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.sent.append(Sent(subject, payload, reply, headers or {}))
        self._changed.set()

    async def publish_acked(self, subject: str, payload: bytes, *, msg_id: str = "") -> int:
        await self.stream_answers.wait()
        self.send(subject, payload)
        return len(self.sent)

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> FakeSubscription:
        self.callbacks[subject] = callback
        self._changed.set()
        return FakeSubscription()

    async def listen(self, subject: str, listener: Callable[[Msg], None], *, queue: str = "") -> FakeSubscription:
        async def callback(message: Msg) -> None:
            listener(message)

        return await self.subscribe(subject, callback, queue=queue)

    async def flush(self) -> None:
        pass

    async def until(self, true: Callable[[], Any]) -> Any:
        while not (result := true()):
            self._changed.clear()
            await self._changed.wait()
        return result

    async def sent_to(self, subject: str, count: int = 1) -> list[Sent]:
        """The first `count` messages on a subject, once there are so many."""
        found: list[Sent] = await self.until(
            lambda: len(on := [one for one in self.sent if one.subject == subject]) >= count and on
        )
        return found


class HeldModel(TokenizerModel):
    """A tokenizer that encodes when it is let go."""

    def __init__(self, model: TokenizerModel) -> None:
        self.__dict__.update(model.__dict__)
        self.go = threading.Event()

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        self.go.wait(10)
        return super().encode(texts)


class FailingModel(HeldModel):
    def encode(self, texts: Sequence[str]) -> list[bytes]:
        raise ZeroDivisionError("nobody foresaw this")


class Stage:
    """A running service on a fake bus."""

    def __init__(self, rt: Runtime, bus: FakeBus, clock: VirtualClock, served: Tokenizer) -> None:
        self.rt = rt
        self.bus = bus
        self.clock = clock
        self.service = served

    async def send(
        self, body: Any = BODY, *, subject: str = SUBJECT, reply: str = REPLY, headers: dict[str, str] | None = None
    ) -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        message = Msg(_client=Client(), subject=subject, reply=reply, data=data, headers=headers)
        await self.bus.callbacks[subjects.ALL_INFER](message)

    async def cancel(self, tenant: str, label: str, body: bytes = b"") -> None:
        subject = subjects.cancel(tenant, label)
        await self.bus.callbacks[subjects.ALL_CANCEL](Msg(_client=Client(), subject=subject, data=body))

    def passed_on(self) -> list[Sent]:
        return [one for one in self.bus.sent if one.subject.startswith("pb.v1.cancelled.")]

    async def routed(self, model: str = "tiny/1", count: int = 1) -> tuple[Route, Job, Sent]:
        sent = (await self.bus.sent_to(subjects.route(model), count))[-1]
        route = ROUTE.decode(sent.payload)
        return route, JOB.decode(route.job), sent

    async def refused(self) -> dict[str, str]:
        return (await self.bus.sent_to(REPLY))[0].headers

    def metric(self, name: str, **labels: str) -> float:
        return self.rt.registry.get_sample_value(f"prefixbus_tokenizer_{name}", labels) or 0.0


@asynccontextmanager
async def running(
    tmp_path: Path,
    tokenizer: TokenizerModel | None = None,
    limits: LimitsSection | None = None,
    max_in_work: int = 256,
    max_model_len: int = 2048,
    captured: tuple[str, ...] = (),
    adapters: dict[str, AdapterSection] | None = None,
    directory: Path | None = None,
    **more: Any,
) -> AsyncIterator[Stage]:
    (tmp_path / "creds").mkdir()
    for purpose in ("namespace", "journal"):
        key = tmp_path / "creds" / f"{purpose}.key"
        key.write_text("07" * 32)
        key.chmod(0o600)
    settings: dict[str, Any] = {
        "tokenizer": str(directory or models.tiny()),
        "model_revision": "sha256:w",
        "block_size": 16,
        "max_model_len": max_model_len,
        "adapters": adapters or {},
    }
    section = ModelSection(**(settings | more))
    config = Config(
        limits=limits or LimitsSection(),
        models={"tiny/1": section, "broken": section},
        tokenizer=TokenizerSection(max_in_work=max_in_work),
        capture=CaptureSection(tenants=captured),
    )
    clock, bus = VirtualClock(), FakeBus()
    rt = Runtime("tokenizer", "t1", tmp_path, config, clock)
    rt.bus = bus  # type: ignore[assignment]  # the part of a bus that this service uses
    loaded = await asyncio.to_thread(service.load_model, "tiny/1", section, tmp_path)
    if tokenizer is not None:
        loaded = msgspec.structs.replace(loaded, tokenizer=tokenizer)
    served = Tokenizer(rt, service.with_adapters(loaded), {"broken": "its files are gone"}, Metrics(rt.registry))
    task = asyncio.create_task(served.run())
    await bus.until(lambda: subjects.ALL_INFER in bus.callbacks)
    try:
        yield Stage(rt, bus, clock, served)
    finally:
        rt.stopping.set()
        await task


def image(content: bytes, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": url}, **more}


def about(*parts: Any, then: str = "What is it?") -> dict[str, Any]:
    text = "Look closely at what I send you, please. " * 4
    content = [{"type": "text", "text": text}, *parts, {"type": "text", "text": then}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8}


IMAGES: dict[str, Any] = {"directory": models.tiny_with_images(), "media_revision": "sha256:p", "image_tokens": 40}


async def test_an_images_content_is_in_the_keys_of_the_blocks_that_it_stands_in(tmp_path: Path) -> None:
    async with running(tmp_path, **IMAGES) as stage:
        routes = []
        for number, body in enumerate((about(image(b"cat")), about(image(b"cat"), then="And?"), about(image(b"dog")))):
            await stage.send(body)
            routes.append(await stage.routed(count=number + 1))

        (cat, job, _), (cat_again, _, _), (dog, other, _) = routes
        (first, tokens, named) = job.media[0]
        ids = memoryview(job.tokens).cast("I")
        assert tokens == 40 and len(set(ids[first : first + 40])) == 1
        assert cat.prompt_tokens == len(ids)
        assert blockkeys.common_blocks(cat.keys, dog.keys) == first // 16
        assert blockkeys.common_blocks(cat.keys, cat_again.keys) >= (first + 40) // 16
        assert (job.tokens, other.media[0][:2]) == (other.tokens, (first, 40))
        assert job.namespace.media_revision == "sha256:p"
        assert not job.uncacheable
        asked = orjson.loads(job.chat)["messages"][0]["content"]
        assert asked[1] == image(b"cat", uuid=named.hex())


async def test_an_image_has_another_name_in_another_scope(tmp_path: Path) -> None:
    async with running(tmp_path, **IMAGES) as stage:
        await stage.send(about(image(b"cat")))
        _, one, _ = await stage.routed()
        await stage.send(about(image(b"cat")), subject=subjects.infer("acme", "tiny/1", "team-b"))
        _, other, _ = await stage.routed(count=2)

        assert one.media[0][:2] == other.media[0][:2]
        assert one.media[0][2] != other.media[0][2]


async def test_behind_an_image_of_unknown_size_nothing_has_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, **(IMAGES | {"image_tokens": 0})) as stage:
        await stage.send(about(image(b"cat"), then="What is it? " * 20))

        route, job, _ = await stage.routed()
        first, tokens, _ = job.media[0]
        assert tokens == 0
        assert len(route.keys) // 8 == first // 16 < route.prompt_tokens // 16


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("a URL to fetch", [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]),
        ("no base64", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}]),
        ("no content", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
        ("a text", [{"type": "image_url", "image_url": {"url": "data:text/plain;base64,Y2F0"}}]),
        ("no URL", [{"type": "image_url", "image_url": None, "uuid": "somebody-elses"}]),
        ("a number", [{"type": "image_url", "image_url": {"url": 7}}]),
        ("audio", [{"type": "input_audio", "input_audio": {"data": "Y2F0", "format": "wav"}}]),
        ("what nobody knows", [{"type": "smell", "smell": "of fish"}]),
        ("one of two", [image(b"cat"), {"type": "video_url", "video_url": {"url": "x"}}]),
    ],
)
async def test_what_nobody_can_name_shares_nothing_and_is_no_error(tmp_path: Path, case: str, parts: list[Any]) -> None:
    async with running(tmp_path, **IMAGES) as stage:
        await stage.send(about(*parts))
        route, job, _ = await stage.routed()
        await stage.send(about(*parts))
        again, _, _ = await stage.routed(count=2)

        assert job.uncacheable and not job.media
        assert (route.keys, again.keys) == (b"", b"")
        assert route.ns_id != again.ns_id
        assert route.prompt_tokens > 40
        assert b"uuid" not in job.chat
        assert stage.metric("uncacheable_total") == 2


async def test_an_image_that_the_template_does_not_print_shares_nothing(tmp_path: Path) -> None:
    """Templates that want one text have no place for it."""
    directory = models.with_template(models.tiny_with_images(), "images-as-text", models.CHATML_WITH_TOOLS)
    async with running(tmp_path, **(IMAGES | {"directory": directory})) as stage:
        await stage.send(about(image(b"cat")))

        _, job, _ = await stage.routed()
        assert job.uncacheable


async def test_a_model_that_takes_no_images_says_which_part_it_does_not_take(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send(about(image(b"cat")))

        headers = await stage.refused()
        assert headers["Pb-Error"] == "unsupported"
        assert headers["Nats-Service-Error"].startswith("messages[0].content[1].type: 'image_url' parts are not taken")


async def test_a_model_whose_tokenizer_has_no_token_for_an_image_cannot_be_loaded(tmp_path: Path) -> None:
    section = ModelSection(tokenizer=str(models.tiny()), model_revision="sha256:w", media_revision="sha256:p")

    with pytest.raises(ConfigInvalid, match=r"models\.m\.image_token: '<image>' is no token"):
        await asyncio.to_thread(service.load_model, "m", section, tmp_path)


async def test_an_adapter_is_routed_as_its_model_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    adapters = {"french": AdapterSection(revision="sha256:f1")}
    async with running(tmp_path, adapters=adapters) as stage:
        await stage.send()
        base, base_job, _ = await stage.routed()

        await stage.send({**BODY, "model": "tiny/1:french"}, subject=subjects.infer("acme", "tiny/1:french", "team-a"))

        route, job, _ = await stage.routed(count=2)
        assert (route.model, route.adapter, route.serves) == ("tiny/1", "french", base.serves)
        assert (base.adapter, base_job.namespace.adapter_revision) == ("", "")
        assert job.namespace == msgspec.structs.replace(
            base_job.namespace, adapter="french", adapter_revision="sha256:f1"
        )
        assert job.tokens == base_job.tokens
        assert route.ns_id != base.ns_id
        assert route.keys != base.keys


async def test_an_adapter_that_is_not_served_is_no_model(tmp_path: Path) -> None:
    async with running(tmp_path, adapters={"french": AdapterSection(revision="sha256:f1")}) as stage:
        await stage.send(subject=subjects.infer("acme", "tiny/1:german"))

        headers = await stage.refused()
        assert headers["Pb-Error"] == "unknown_model"
        assert "Served are: tiny/1, tiny/1:french" in headers["Nats-Service-Error"]


async def test_a_request_goes_to_the_router_with_all_that_is_needed(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        headers = {"Pb-Request-Id": "mine", "Pb-Prefix-Class": "rag", "Pb-Deadline": str(stage.clock.wall() + 9)}

        await stage.send({**BODY, "cache_salt": "pepper"}, headers=headers)

        route, job, sent = await stage.routed()
        space = job.namespace
        ns_id = namespace.ns_id(bytes([7] * 32), space)
        assert (space.tenant, space.scope, space.model, space.client_salt) == ("acme", "team-a", "tiny/1", "pepper")
        assert route.ns_id == ns_id
        assert route.keys == blockkeys.chain(job.tokens, 16, namespace.seed(ns_id))
        assert route.prompt_tokens == len(job.tokens) // 4 > 64
        assert route.segments == digests.segments(digests.family(bytes([7] * 32), space), job.tokens)
        assert (route.template_version, route.tokenizer_revision) == (space.template_version, space.tokenizer_revision)
        assert (route.client_request_id, route.tenant, route.model, route.prefix_class) == (
            "mine",
            "acme",
            "tiny/1",
            "rag",
        )
        assert route.output_tokens == 8
        assert (route.reply, job.reply) == (REPLY, REPLY)
        assert (route.kind, route.created_at) == (job.kind, job.created_at) == ("chat", int(stage.clock.wall()))
        assert (job.kind, orjson.loads(job.params), job.include_usage) == ("chat", {"max_tokens": 8}, True)
        assert job.deadline_at == stage.clock.wall() + 9 + stage.rt.config.limits.clock_skew_s
        assert sent.reply == f"_SVC.tokenizer.t1.nr.{route.request_id}"
        assert len(stage.bus.sent) == 1
        await stage.bus.until(lambda: stage.metric("requests_total", code="ok"))


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("text", ["hi", LONG_TEXT], ids=["at once", "in a thread"])
async def test_tools_that_the_engine_finds_go_with_the_chat_and_the_same_tokens(tmp_path: Path, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "tools": [TOOL], "max_tokens": 8}
    async with running(tmp_path, tool_parser="hermes") as stage:
        await stage.send({**body, "tool_choice": "required", "resume": {}})
        route, read, _ = await stage.routed()
        await stage.send({**body, "tool_choice": "none"})
        _, plain, _ = await stage.routed(count=2)

        chat = orjson.loads(read.chat)
        assert chat == {
            "messages": body["messages"],
            "tools": [TOOL],
            "tool_choice": "required",
            "add_generation_prompt": True,
        }
        assert (plain.chat, plain.tokens) == (b"", read.tokens)
        assert (route.resumable, read.resumable) == (False, False)


async def test_without_a_parser_tools_are_shown_to_the_model_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send({**BODY, "tools": [TOOL]})

        _, job, _ = await stage.routed()
        assert job.chat == b""


@pytest.mark.parametrize("text", ["hi", LONG_TEXT], ids=["at once", "in a thread"])
async def test_a_resumed_answer_is_its_prompt_with_what_was_said(tmp_path: Path, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    async with running(tmp_path) as stage:
        await stage.send({**body, "resume": {}})
        first, begun, _ = await stage.routed()
        await stage.send({**body, "resume": {"token_ids": [7, 300, 9]}})
        route, resumed, _ = await stage.routed(count=2)

        assert (first.resumable, begun.resumable, begun.said_tokens) == (True, True, 0)
        assert (route.resumable, resumed.resumable, resumed.said_tokens) == (True, True, 3)
        assert resumed.tokens == begun.tokens + array("I", [7, 300, 9]).tobytes()
        assert route.prompt_tokens == first.prompt_tokens + 3
        assert route.keys == blockkeys.chain(resumed.tokens, 16, namespace.seed(route.ns_id))
        assert [orjson.loads(job.params)["max_tokens"] for job in (begun, resumed)] == [8, 5]


async def test_what_was_said_is_in_the_models_vocabulary(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send({**BODY, "resume": {"token_ids": [10**6]}})

        headers = await stage.refused()
        assert headers["Pb-Error"] == "bad_request"
        assert headers["Nats-Service-Error"].startswith("resume.token_ids: holds a token id outside")


async def test_a_request_without_an_id_is_known_by_ours(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send()

        route, job, _ = await stage.routed()
        assert route.client_request_id == job.client_request_id == route.request_id


@pytest.mark.parametrize(
    "reply",
    [
        "_INBOX.other.r1",
        "_INBOX.acme",
        "_INBOX.acme.*",
        "_SVC.router.x",
        "$JS.API.STREAM.DELETE.AUDIT",
        "pb.v1.route.x",
    ],
)
async def test_a_forged_reply_gets_no_message_and_is_recorded(tmp_path: Path, reply: str) -> None:
    async with running(tmp_path) as stage:
        await stage.send(reply=reply)

        (sent,) = await stage.bus.sent_to("pb.v1.audit.tokenizer.t1")
        fact: Fact = FACT.decode(sent.payload)
        assert (fact.kind, fact.tenant, fact.scope, fact.detail) == ("forged_reply", "acme", "team-a", reply)
        assert [one.subject for one in stage.bus.sent] == ["pb.v1.audit.tokenizer.t1"]
        assert stage.metric("requests_total", code="forged_reply") == 1


async def test_forgers_do_not_hold_up_others_while_the_record_is_slow(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_work=1) as stage:
        stage.bus.stream_answers.clear()
        for number in range(service.FACTS_WAITING + 3):
            await stage.send(reply=f"_INBOX.other.r{number}")

        await stage.send()
        await stage.send({"prompt": LONG_TEXT})
        await stage.routed(count=2)

        # One is being written while the others wait; what does not fit is counted.
        assert stage.metric("facts_lost_total") in (2, 3)
        stage.bus.stream_answers.set()
        stage.rt.stopping.set()
        await stage.bus.sent_to("pb.v1.audit.tokenizer.t1", service.FACTS_WAITING)


async def test_a_request_without_a_reply_is_only_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send(reply="")
        await stage.send()

        await stage.routed()
        assert stage.metric("requests_total", code="no_reply") == 1
        assert len(stage.bus.sent) == 1


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "not JSON": ({"body": b"{"}, "invalid_json", "400"),
    "unknown model": ({"subject": subjects.infer("acme", "other")}, "unknown_model", "404"),
    "a model that cannot be loaded": ({"subject": subjects.infer("acme", "broken")}, "unavailable", "503"),
    "a malformed subject": ({"subject": "pb.v1.infer.acme.tiny.a.b"}, "bad_subject", "400"),
    "too long a prompt": ({"body": {"prompt": list(range(100)) * 21}}, "context_too_long", "400"),
    "a large body": ({"body": b" " * 2001}, "too_large", "413"),
    "large headers": ({"headers": {OVERSIZED_HEADERS: "1000000"}}, "headers_too_large", "431"),
    "an expired deadline": ({"headers": {"Pb-Deadline": "5"}}, "deadline_exceeded", "504"),
    "an image": (
        {"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
        "unsupported",
        "400",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_request_that_goes_no_further_gets_one_ending_frame(tmp_path: Path, name: str) -> None:
    what, code, status = REFUSALS[name]
    limits = LimitsSection(max_body_bytes=2000 if name == "a large body" else 1 << 20)
    async with running(tmp_path, limits=limits) as stage:
        await stage.send(**{**what, "headers": {"Pb-Request-Id": "mine", **what.get("headers", {})}})

        headers = await stage.refused()
        assert (headers["Pb-Error"], headers["Nats-Service-Error-Code"]) == (code, status)
        assert (headers["Pb-Final"], headers["Pb-Seq"], headers["Pb-Request-Id"]) == ("1", "0", "mine")
        assert len(headers["Nats-Service-Error"]) > 20
        assert stage.bus.sent[0].payload == b""
        assert len(stage.bus.sent) == 1

        await stage.send()

        await stage.routed()


async def test_a_broken_model_is_told_by_readiness(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        assert stage.rt.not_ready_because() == "broken: its files are gone"


async def test_a_failure_nobody_foresaw_ends_that_request_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FailingModel(models.load(models.tiny()))) as stage:
        await stage.send()

        assert (await stage.refused())["Pb-Error"] == "internal"
        await stage.send({"prompt": [1, 2, 3]})
        await stage.routed()


async def test_when_no_router_listens_the_client_hears_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.send(headers={"Pb-Request-Id": "mine"})
        _, _, sent = await stage.routed()
        status = Msg(_client=Client(), subject=sent.reply, headers={"Status": "503"})

        await stage.bus.callbacks["_SVC.tokenizer.t1.nr.*"](status)
        await stage.bus.callbacks["_SVC.tokenizer.t1.nr.*"](status)

        (frame,) = await stage.bus.sent_to(REPLY)
        assert (frame.headers["Pb-Error"], frame.headers["Pb-Request-Id"]) == ("unavailable", "mine")


async def test_a_slow_request_is_kept_company(tmp_path: Path) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held) as stage:
        await stage.send({**BODY, "messages": [{"role": "user", "content": LONG_TEXT}]})
        await asyncio.sleep(0)

        stage.clock.advance(1)

        frame = (await stage.bus.sent_to(REPLY))[0]
        assert orjson.loads(frame.payload)["choices"] == []
        assert "Pb-Seq" not in frame.headers
        held.go.set()
        await stage.routed()


async def test_what_waits_for_room_is_taken_in_order_and_ended_before_stopping(tmp_path: Path) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held, max_in_work=1) as stage:
        await stage.send({"prompt": LONG_TEXT})
        second = asyncio.create_task(stage.send({"prompt": LONG_TEXT + "2"}))
        third = asyncio.create_task(stage.send({"prompt": LONG_TEXT + "33"}))
        await asyncio.sleep(0)
        assert not stage.bus.sent

        held.go.set()
        await asyncio.gather(second, third)
        stage.rt.stopping.set()

        await stage.routed(count=3)
        lengths = [ROUTE.decode(one.payload).prompt_tokens for one in stage.bus.sent]
        assert lengths == sorted(set(lengths))


async def test_what_is_too_much_is_refused_at_once_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldModel(models.load(models.tiny()))
    monkeypatch.setattr(service, "MAX_IN_HAND", 2)
    async with running(tmp_path, held, max_in_work=1) as stage:
        for number in range(3):
            await stage.send({"prompt": LONG_TEXT + "1" * number})
        await stage.send({"prompt": [1, 2]})

        (refusal,) = [one for one in await stage.bus.sent_to(REPLY) if "Pb-Error" in one.headers]
        assert refusal.headers["Pb-Error"] == "overloaded"
        assert refusal.headers["Retry-After"] == "1"
        assert (await stage.routed())[0].prompt_tokens == 2
        held.go.set()
        await stage.routed(count=3)


async def test_a_cancel_is_passed_on_empty_whatever_came_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.cancel("acme", "mine", b"x" * 1_000_000)

        (sent,) = stage.passed_on()
        assert (sent.subject, sent.payload, sent.reply, sent.headers) == ("pb.v1.cancelled.acme.mine", b"", "", {})


async def test_a_flood_of_cancels_is_passed_on_at_a_bounded_rate_and_holds_up_no_other_tenants(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        for number in range(3 * PASSED_PER_TURN):
            await stage.cancel("flooder", f"r{number}")
            await stage.cancel("flooder", "again")
        flooded = len(stage.passed_on())
        await stage.cancel("acme", "mine")

        assert flooded < 3 * PASSED_PER_TURN
        assert stage.passed_on()[-1].subject == "pb.v1.cancelled.acme.mine"
        await stage.bus.sent_to(f"pb.v1.cancelled.flooder.r{3 * PASSED_PER_TURN - 1}")
        assert stage.metric("cancels_total", result="passed") == 3 * PASSED_PER_TURN + 2
        assert stage.metric("cancels_total", result="lost") == 0


async def test_a_cancel_that_names_no_request_is_only_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        heard = stage.bus.callbacks[subjects.ALL_CANCEL]
        for request_id in ("*", "a%b", "x" * 65):
            await heard(Msg(_client=Client(), subject=f"pb.v1.cancel.acme.{request_id}"))

        assert stage.passed_on() == []
        assert stage.metric("cancels_total", result="malformed") == 3


@pytest.mark.parametrize("taken_by", ["this copy", "another copy"])
async def test_a_cancel_ends_what_waits_for_room_and_what_is_tokenised(tmp_path: Path, taken_by: str) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held, max_in_work=1) as stage:

        async def cancel(label: str) -> None:
            if taken_by == "this copy":
                await stage.cancel("acme", label)
            else:
                message = Msg(_client=Client(), subject=subjects.cancelled("acme", label))
                await stage.bus.callbacks[subjects.ALL_CANCELLED](message)

        for label in ("in-work", "waiting", "other", "waiting-too"):
            await stage.send({"prompt": LONG_TEXT}, headers={"Pb-Request-Id": label}, reply=f"{REPLY}.{label}")

        await cancel("waiting")
        (waiting,) = await stage.bus.sent_to(f"{REPLY}.waiting")
        assert (waiting.headers["Pb-Error"], waiting.headers["Pb-Request-Id"]) == ("cancelled", "waiting")
        await cancel("in-work")
        await cancel("waiting-too")
        held.go.set()

        route, _, _ = await stage.routed()
        assert route.client_request_id == "other"
        for label in ("in-work", "waiting-too"):
            ends = [one.headers["Pb-Error"] for one in await stage.bus.sent_to(f"{REPLY}.{label}")]
            assert ends == ["cancelled"]
        await eventually(lambda: stage.metric("in_work") == 0, "nothing is in hand")
        assert stage.metric("requests_total", code="cancelled") == 3
        assert stage.service._labelled == {}


async def test_a_cancel_ends_no_other_tenants_request(tmp_path: Path) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held) as stage:
        await stage.send({"prompt": LONG_TEXT}, headers={"Pb-Request-Id": "mine"})

        await stage.cancel("other", "mine")
        held.go.set()

        assert (await stage.routed())[0].client_request_id == "mine"


async def test_what_is_small_waits_for_nobody(tmp_path: Path) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held, max_in_work=1) as stage:
        await stage.send({"prompt": LONG_TEXT})

        await stage.send({"prompt": [1, 2]})

        route, _, _ = await stage.routed()
        assert route.prompt_tokens == 2
        held.go.set()


async def test_a_deadline_that_passes_while_tokenising_is_one_error(tmp_path: Path) -> None:
    held = HeldModel(models.load(models.tiny()))
    async with running(tmp_path, held, limits=LimitsSection(clock_skew_s=0)) as stage:
        await stage.send({"prompt": LONG_TEXT}, headers={"Pb-Deadline": str(stage.clock.wall() + 9)})
        await asyncio.sleep(0)

        stage.clock.advance(10)
        held.go.set()

        await stage.bus.until(lambda: any("Pb-Final" in one.headers for one in stage.bus.sent))
        ends = [one.headers for one in stage.bus.sent if "Pb-Seq" in one.headers]
        assert [headers["Pb-Error"] for headers in ends] == ["deadline_exceeded"]
        assert {one.subject for one in stage.bus.sent} == {REPLY}


TEXT = LONG_TEXT * 24
HELLO = [{"role": "user", "content": "Hello?"}]
CALL = {"function": {"name": "f", "arguments": {"text": TEXT}}}
HEAVY: dict[str, dict[str, Any]] = {
    "many tiny messages": {"messages": [{"role": "user", "content": "a"}] * 2048},
    "tool calls": {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    "tools": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "description": TEXT}}]},
    "documents": {"messages": HELLO, "documents": [{"title": "t", "text": TEXT}]},
    "one message": {"messages": [{"role": "user", "content": TEXT}]},
    "a text": {"prompt": TEXT},
    "token ids": {"prompt": [1, 2, 3] * 10_000},
    "sampling": {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(6000)}},
}


@pytest.mark.parametrize("name", HEAVY)
async def test_heavy_work_is_never_done_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its size may be in any part of the body, and its length is not the characters of its messages alone."""
    on_the_loop: list[str] = []

    def watch(owner: Any, function: str) -> None:
        original = getattr(owner, function)

        def watched(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                on_the_loop.append(function)
            return original(*args)

        monkeypatch.setattr(owner, function, watched)

    for owner, function in (
        (intake, "parse"),
        (render, "conversation"),
        (TokenizerModel, "render"),
        (Shield, "cover"),
        (Segmenter, "split"),
        (intake, "engine_params"),
        (blockkeys, "chain"),
    ):
        watch(owner, function)
    async with running(tmp_path, max_model_len=1 << 20) as stage:
        on_the_loop.clear()  # what loading did

        await stage.send(HEAVY[name])

        await stage.routed()

    assert on_the_loop == []


async def test_the_loop_turns_while_tools_are_rendered(tmp_path: Path) -> None:
    """Tools once were not counted: the template rendered megabytes of them in place."""

    class HeldTemplate(HeldModel):
        def render(self, *args: Any) -> str:
            assert self.go.wait(10), "the loop stood still"
            return super().render(*args)

    held = HeldTemplate(models.load(models.tiny()))
    async with running(tmp_path, held, max_model_len=1 << 20) as stage:
        await stage.send(HEAVY["tools"])

        for _ in range(100):
            await asyncio.sleep(0)
        assert not stage.bus.sent
        held.go.set()

        await stage.routed()


@pytest.mark.parametrize("name", ["many tiny messages", "tool calls", "tools", "documents", "one message", "a text"])
async def test_a_hopeless_prompt_is_not_tokenised_whatever_part_is_long(tmp_path: Path, name: str) -> None:
    class NeverEncodes(HeldModel):
        def encode(self, texts: Sequence[str]) -> list[bytes]:
            raise AssertionError("tokenised in vain")

    async with running(tmp_path, NeverEncodes(models.load(models.tiny()))) as stage:
        await stage.send(HEAVY[name])

        assert (await stage.refused())["Pb-Error"] == "context_too_long"


async def test_answers_teach_the_length_of_answers(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        outcome = Outcome(
            v=VERSION,
            request_id="r",
            client_request_id="r",
            attempt=1,
            worker="w",
            incarnation=1,
            tenant="acme",
            model="tiny/1",
            ns_id="",
            status="ok",
            error="",
            prefix_class="system",
            decision="",
            prompt_tokens=1,
            predicted_tokens=0,
            cached_tokens=0,
            prefill_tokens=1,
            output_tokens=40,
            queue_wait_ms=0,
            ttft_ms=0,
            total_ms=0,
            ended_at=0,
        )
        for _ in range(600):
            await stage.bus.callbacks[subjects.ALL_OUTCOME](
                Msg(_client=Client(), subject="pb.v1.outcome.w.r", data=OUTCOME.encode(outcome))
            )
        await stage.bus.callbacks[subjects.ALL_OUTCOME](Msg(_client=Client(), subject="x", data=b"junk"))

        await stage.send({"prompt": [1, 2], "max_tokens": 1000})

        route, _, _ = await stage.routed()
        assert 40 <= route.output_tokens <= 60


@pytest.mark.parametrize("field", ["tokenizer_revision", "template_version"])
def test_files_of_another_revision_are_not_served(tmp_path: Path, field: str) -> None:
    section = ModelSection(tokenizer=str(models.tiny()), model_revision="w")
    section = msgspec.structs.replace(section, **{field: "sha256:other"})

    with pytest.raises(ConfigInvalid, match=rf"models.m.{field}: is sha256:other, but the files are sha256:"):
        service.load_model("m", section, tmp_path)


def test_a_directory_without_a_tokenizer_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigInvalid, match="cannot be loaded"):
        service.load_model("m", ModelSection(tokenizer=".", model_revision="w"), tmp_path)


def on_capture(stage: Stage) -> list[Sent]:
    return [one for one in stage.bus.sent if one.subject.startswith("pb.v1.capture.")]


async def test_a_tenant_that_asked_has_its_requests_kept_as_they_came(tmp_path: Path) -> None:
    async with running(tmp_path, captured=("acme",)) as stage:
        raw = orjson.dumps(BODY).replace(b"{", b"{ ", 1)

        await stage.send(raw, headers={"Pb-Request-Id": "mine", "Pb-Prefix-Class": "rag"})

        route, _, _ = await stage.routed()
        (kept,) = await stage.bus.sent_to(f"pb.v1.capture.acme.{route.request_id}")
        captured = CAPTURED.decode(kept.payload)
        assert bytes(captured.body) == raw
        assert (captured.request_id, captured.client_request_id) == (route.request_id, "mine")
        assert (captured.tenant, captured.scope, captured.model) == ("acme", "team-a", "tiny/1")
        assert captured.prefix_class == "rag"


@pytest.mark.parametrize("captured", [(), ("acme-2", "other")], ids=["by default", "others did"])
async def test_nothing_is_kept_of_a_tenant_that_did_not_ask(tmp_path: Path, captured: tuple[str, ...]) -> None:
    async with running(tmp_path, captured=captured) as stage:
        await stage.send()
        await stage.routed()
        await stage.send()
        await stage.routed(count=2)

        assert on_capture(stage) == []


async def test_a_request_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    async with running(tmp_path, captured=("acme",)) as stage:
        await stage.send({**BODY, "n": 0})
        await stage.refused()
        await stage.send()
        await stage.routed()

        await stage.bus.until(lambda: on_capture(stage))
        assert len(on_capture(stage)) == 1


async def test_a_stream_that_does_not_answer_holds_up_no_request_and_is_given_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_BYTES_CAPTURED", 3 * len(orjson.dumps(BODY)))
    async with running(tmp_path, captured=("acme",)) as stage:
        stage.bus.stream_answers.clear()

        for count in range(1, 6):
            await stage.send()
            await stage.routed(count=count)

        assert stage.metric("captures_lost_total") == 2
        stage.bus.stream_answers.set()
        await stage.bus.until(lambda: len(on_capture(stage)) == 3)
        await stage.send()
        await stage.bus.until(lambda: len(on_capture(stage)) == 4)
