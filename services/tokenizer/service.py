# ruff: noqa: TID251 - the shell: it meets the bus, threads and chance
"""The tokenizer's shell: takes requests in, hands them to the router, and answers for all that go no further.

A message whose reply does not lie in its tenant's inbox gets no answer at all. Every other request gets exactly one
ending frame from here, or goes on to the router, which answers for it from then on.

Owns: subscriptions, work in hand, metrics.   Must not know: how tokens are made."""

import secrets
from collections import OrderedDict
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..bus import blockkeys, frames, identity, ids, namespace, subjects
from ..bus.config import ModelSection
from ..bus.connection import OVERSIZED_HEADERS
from ..bus.errors import (
    BadSubject,
    BusUnavailable,
    ConfigInvalid,
    DeadlineExceeded,
    ForgedReply,
    PrefixbusError,
    Unavailable,
    UnknownModel,
)
from ..bus.messages import FACT, JOB, OUTCOME, ROUTE, VERSION, Fact, Job, MessageInvalid, Route
from ..bus.runtime import Runtime
from ..bus.subjects import InferSubject
from . import intake
from .classify import AnswerLengths, prefix_class
from .memo import Memo
from .model import TokenizerModel
from .work import Workshop

SERVICE = "tokenizer"
# The first keep-alive comes within 1 s of acceptance (DESIGN 2); looked for this often.
KEEPALIVE_AFTER_S = 0.7
TICK_S = 0.2
# The server says within a round trip that nobody listens; after this long it will not.
ROUTED_FOR_S = 5.0
# Bodies and prompts whose parsing and keying cost more than a hop to a thread is worth.
PARSE_INLINE_BYTES = 256 * 1024
KEYS_INLINE_BYTES = 4 * 64 * 1024
MEMO_TENANTS = 16


class Loaded(msgspec.Struct, frozen=True):
    """A model ready for work."""

    name: str
    section: ModelSection
    tokenizer: TokenizerModel
    identity: identity.ModelIdentity
    serves: str


class Metrics:
    """Labels are bounded: error codes, and names of configured models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "prefixbus_tokenizer_requests",
            "Requests by result (ok, an error code, no_reply).",
            ["code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "prefixbus_tokenizer_seconds",
            "From arrival to the router, waiting included.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.tokens = Counter(
            "prefixbus_tokenizer_tokens", "Prompt tokens by source (memo, encoded).", ["source"], registry=registry
        )
        self.covered = Counter(
            "prefixbus_tokenizer_covered", "Requests whose texts held special tokens, kept as text.", registry=registry
        )
        self.model_state = Gauge(
            "prefixbus_tokenizer_model_state",
            "0 cannot be loaded, 1 prompts are encoded whole (no memo), 2 by special tokens, 3 in pieces.",
            ["model"],
            registry=registry,
        )
        self.clocked_template = Gauge(
            "prefixbus_tokenizer_clocked_template",
            "1 if the model's chat template prints the current time, which spoils reuse.",
            ["model"],
            registry=registry,
        )
        self.in_work = Gauge("prefixbus_tokenizer_in_work", "Requests in work.", registry=registry)
        self.memo_bytes = Gauge("prefixbus_tokenizer_memo_bytes", "Bytes of remembered ids.", registry=registry)


class _InHand:
    """A request from arrival until it is handed on. `label` is the client's id, or ours if it gave none, so that every
    request can be found and cancelled; `created_at` is what all its chunks say; `heard_at` is when its client last
    heard of it."""

    __slots__ = ("arrived_at", "created_at", "heard_at", "kind", "label", "model", "reply")

    def __init__(self, model: str, reply: str, now: float, wall: float) -> None:
        self.model = model
        self.reply = reply
        self.created_at = int(wall)
        self.label = ""
        self.kind = "chat"
        self.arrived_at = self.heard_at = now


class _Routed(msgspec.Struct, frozen=True):
    reply: str
    label: str
    at: float


class Tokenizer:
    """One copy of the service. `models` and `broken` (name: reason) are what loading made of the config."""

    def __init__(self, rt: Runtime, models: dict[str, Loaded], broken: dict[str, str], metrics: Metrics) -> None:
        self._rt = rt
        self._models = models
        self._broken = broken
        self._metrics = metrics
        per_tenant = rt.config.tokenizer.memo_bytes_per_tenant
        self._memo = Memo(tenant_bytes=per_tenant, total_bytes=MEMO_TENANTS * per_tenant)
        # Entries live as long as the process, and so does their key.
        self._workshop = Workshop(self._memo, secrets.token_bytes(32), rt.clock)
        self._lengths = AnswerLengths()
        self._namespace_key = rt.purpose_key("namespace")
        self._no_router = f"{subjects.service_inbox(SERVICE, rt.instance)}.nr"
        self._room = anyio.Semaphore(rt.config.tokenizer.max_in_work)
        self._in_hand: dict[str, _InHand] = {}
        self._routed: OrderedDict[str, _Routed] = OrderedDict()
        self._tasks: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Serves until told to stop, and ends what it has begun."""
        rt = self._rt
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._tend)
            statuses = await rt.bus.subscribe(f"{self._no_router}.*", self._nobody_routes)
            await rt.bus.listen(subjects.ALL_OUTCOME, self._answer_ended)
            async with anyio.create_task_group() as self._tasks:
                requests = await rt.bus.subscribe(subjects.ALL_INFER, self.arrived, queue=SERVICE)
                rt.ready(self.not_ready_because)
                await rt.stopping.wait()
                await requests.drain()
            try:
                # What was routed last may still come back: the server's word precedes its answer to this.
                await rt.bus.flush()
            except BusUnavailable as exc:
                rt.caught(exc, "the last requests may be lost")
            await statuses.drain()
            beside.cancel_scope.cancel()

    def not_ready_because(self) -> str:
        """Models that cannot be served, and why. The others are served all the same."""
        return "; ".join(f"{name}: {reason}" for name, reason in sorted(self._broken.items()))

    async def arrived(self, message: Msg) -> None:
        """Takes one message in; waits, and so holds up those behind it, while there is no room."""
        await self._room.acquire()
        self._tasks.start_soon(self._take, message)

    def __repr__(self) -> str:
        return f"<Tokenizer {self._rt.instance}: {sorted(self._models)}, {len(self._in_hand)} in hand, {self._memo!r}>"

    async def _take(self, message: Msg) -> None:
        try:
            await self._answer(message)
        except Exception as exc:  # the edge: one request's failure is not the service's
            self._rt.caught(exc, "a request was dropped", subject=message.subject[:200])
        finally:
            self._room.release()

    async def _answer(self, message: Msg) -> None:
        if not message.reply:
            self._metrics.requests.labels("no_reply").inc()
            return
        tenant = message.subject.split(".")[3] if message.subject.count(".") >= 3 else ""
        if not subjects.is_token(tenant) or not subjects.is_own_reply(message.reply, tenant):
            await self._record_forgery(message, tenant)
            return
        wall = self._rt.clock.wall()
        request_id = ids.request_id(wall, secrets.token_bytes(ids.ENTROPY_BYTES))
        in_hand = _InHand("", message.reply, self._rt.clock.now(), wall)
        self._in_hand[request_id] = in_hand
        self._metrics.in_work.set(len(self._in_hand))
        try:
            await self._serve(message, request_id, in_hand)
            self._metrics.requests.labels("ok").inc()
        except PrefixbusError as exc:
            self._metrics.requests.labels(exc.code).inc()
            await self._refuse(exc, in_hand.reply, in_hand.label)
        except Exception as exc:  # nobody foresaw it: the client hears that, the log has the rest
            self._rt.caught(exc, "a request failed", request_id=request_id)
            self._metrics.requests.labels(PrefixbusError.code).inc()
            await self._refuse(PrefixbusError(), in_hand.reply, in_hand.label)
        finally:
            del self._in_hand[request_id]
            self._metrics.in_work.set(len(self._in_hand))
            self._metrics.seconds.observe(self._rt.clock.now() - in_hand.arrived_at)

    async def _serve(self, message: Msg, request_id: str, in_hand: _InHand) -> None:
        rt, limits = self._rt, self._rt.config.limits
        headers = message.headers or {}
        # Before anything can go wrong, so that the error says whose it is.
        label = headers.get(subjects.HEADER_REQUEST_ID, "")
        in_hand.label = label if subjects.is_token(label) else request_id
        subject = subjects.parse_infer(message.subject)
        in_hand.model = subject.model
        if OVERSIZED_HEADERS in headers:
            raise intake.headers_too_large(headers[OVERSIZED_HEADERS], limits)
        envelope = intake.envelope(headers, limits, rt.clock.wall())
        route = None
        with anyio.move_on_after(envelope.deadline_at - rt.clock.wall()):
            route = await self._route(message, subject, request_id, in_hand, envelope)
        # A thread is not interrupted: its result may come too late as well.
        if route is None or rt.clock.wall() >= envelope.deadline_at:
            raise DeadlineExceeded("It passed before the prompt was tokenised.")
        # Outside the deadline: what is half handed over would be answered twice. Noted first: the server may say at
        # once that nobody listens.
        self._routed[request_id] = _Routed(message.reply, in_hand.label, rt.clock.now())
        try:
            await rt.bus.publish(
                subjects.route(subject.model), ROUTE.encode(route), reply=f"{self._no_router}.{request_id}"
            )
        except PrefixbusError:
            del self._routed[request_id]
            raise

    async def _route(
        self, message: Msg, subject: InferSubject, request_id: str, in_hand: _InHand, envelope: intake.Envelope
    ) -> Route:
        loaded = self._model(subject.model)
        section, limits = loaded.section, self._rt.config.limits
        body: bytes = message.data
        request = await self._workshop.run(len(body), PARSE_INLINE_BYTES, intake.parse, body, subject.model, limits)
        in_hand.kind = request.kind
        tokens = await self._workshop.tokens(
            loaded.tokenizer, subject.tenant, subject.scope, request, section.max_model_len
        )
        prompt_tokens = len(tokens.ids) // 4
        max_tokens = intake.fit(request, prompt_tokens, section.max_model_len)
        self._metrics.tokens.labels("memo").inc(tokens.memo_tokens)
        self._metrics.tokens.labels("encoded").inc(prompt_tokens - tokens.memo_tokens)
        if tokens.covered:
            self._metrics.covered.inc()
        space = loaded.identity.namespace(subject.tenant, subject.scope, request.client_salt)
        ns_id = namespace.ns_id(self._namespace_key, space)
        kind_of_prefix = prefix_class(request, envelope.prefix_class)
        keys = await self._workshop.run(
            len(tokens.ids), KEYS_INLINE_BYTES, blockkeys.chain, tokens.ids, section.block_size, namespace.seed(ns_id)
        )
        job = Job(
            v=VERSION,
            request_id=request_id,
            client_request_id=in_hand.label,
            reply=message.reply,
            namespace=space,
            tokens=tokens.ids,
            kind=request.kind,
            params=intake.engine_params(request, max_tokens),
            include_usage=request.include_usage,
            created_at=in_hand.created_at,
            deadline_at=envelope.deadline_at,
            traceparent=envelope.traceparent,
            prefix_class=kind_of_prefix,
        )
        return Route(
            v=VERSION,
            request_id=request_id,
            client_request_id=in_hand.label,
            tenant=subject.tenant,
            model=subject.model,
            serves=loaded.serves,
            ns_id=ns_id,
            keys=keys,
            prompt_tokens=prompt_tokens,
            output_tokens=self._lengths.estimate(kind_of_prefix, max_tokens),
            prefix_class=kind_of_prefix,
            reply=message.reply,
            deadline_at=envelope.deadline_at,
            job=JOB.encode(job),
            kind=request.kind,
            created_at=in_hand.created_at,
        )

    def _model(self, name: str) -> Loaded:
        loaded = self._models.get(name)
        if loaded is not None:
            return loaded
        if name in self._broken:
            raise Unavailable(f"The tokenizer of {name!r} cannot be loaded: {self._broken[name]}", field="model")
        known = ", ".join(sorted(self._models)) or "none"
        raise UnknownModel(f"{name[:80]!r} is not served.", field="model", remedy=f"Served are: {known}.")

    async def _refuse(self, error: PrefixbusError, reply: str, label: str) -> None:
        """The one ending frame of a request that goes no further."""
        await self._rt.bus.publish(reply, headers=frames.error_headers(error, label))

    async def _record_forgery(self, message: Msg, tenant: str) -> None:
        """Never writes to the reply; says so on the record instead."""
        self._metrics.requests.labels(ForgedReply.code).inc()
        try:
            scope = subjects.parse_infer(message.subject).scope
        except BadSubject:
            scope = ""
        label = (message.headers or {}).get(subjects.HEADER_REQUEST_ID, "")
        fact = Fact(
            v=VERSION,
            kind="forged_reply",
            at=self._rt.clock.wall(),
            service=SERVICE,
            tenant=tenant if subjects.is_token(tenant) else "",
            scope=scope,
            request_id=label if subjects.is_token(label) else "",
            detail=frames.one_line(message.reply)[:256],
        )
        await self._rt.bus.publish_acked(
            subjects.audit(SERVICE, self._rt.instance), FACT.encode(fact), msg_id=secrets.token_hex(16)
        )

    async def _nobody_routes(self, message: Msg) -> None:
        """The server's word that no router listens: the request comes back here."""
        if (message.headers or {}).get("Status") != "503":
            return
        routed = self._routed.pop(message.subject.rsplit(".", 1)[1], None)
        if routed is None:
            return
        self._metrics.requests.labels(Unavailable.code).inc()
        error = Unavailable("No router listens.", remedy="Try again shortly.")
        try:
            await self._refuse(error, routed.reply, routed.label)
        except PrefixbusError as exc:
            self._rt.caught(exc, "a client could not be told", request_id=routed.label)

    def _answer_ended(self, message: Msg) -> None:
        try:
            outcome = OUTCOME.decode(message.data)
        except MessageInvalid as exc:
            self._rt.caught(exc, "an outcome was ignored", subject=message.subject)
            return
        if outcome.status == "ok" and outcome.prefix_class in intake.PREFIX_CLASSES:
            self._lengths.observe(outcome.prefix_class, outcome.output_tokens)

    async def _tend(self) -> None:
        """Keeps clients of slow requests company, and forgets what is over."""
        rt = self._rt
        while True:
            await anyio.sleep(TICK_S)
            now = rt.clock.now()
            for request_id, in_hand in list(self._in_hand.items()):
                if now - in_hand.heard_at >= KEEPALIVE_AFTER_S:
                    in_hand.heard_at = now
                    await self._keep_alive(request_id, in_hand)
            while self._routed and now - next(iter(self._routed.values())).at > ROUTED_FOR_S:
                self._routed.popitem(last=False)
            self._memo.expire(now)
            self._metrics.memo_bytes.set(self._memo.held_bytes)

    async def _keep_alive(self, request_id: str, in_hand: _InHand) -> None:
        body = frames.keepalive(in_hand.kind, in_hand.model, request_id, in_hand.created_at)
        try:
            await self._rt.bus.publish(in_hand.reply, body, headers=frames.keepalive_headers(in_hand.label))
        except PrefixbusError as exc:
            self._rt.caught(exc, "a keep-alive was not sent", request_id=request_id)


async def load_models(rt: Runtime, metrics: Metrics) -> tuple[dict[str, Loaded], dict[str, str]]:
    """Every configured model that can be loaded, and why the others cannot."""
    models: dict[str, Loaded] = {}
    broken: dict[str, str] = {}
    for name, section in sorted(rt.config.models.items()):
        try:
            loaded = await anyio.to_thread.run_sync(load_model, name, section, rt.state)
        except ConfigInvalid as exc:
            broken[name] = exc.sentence()
            metrics.model_state.labels(name).set(0)
            rt.caught(exc, "a model cannot be served", model=name)
            continue
        models[name] = loaded
        tokenizer = loaded.tokenizer
        metrics.model_state.labels(name).set(3 if tokenizer.segmenter.cuttable else 2 if tokenizer.segmented else 1)
        metrics.clocked_template.labels(name).set(tokenizer.uses_clock)
        rt.log.info("model %s: %r", name, tokenizer)
        if not tokenizer.segmented:
            rt.log.warning("model %s: its tokenizer cannot be segmented, so nothing is memoised", name)
        if tokenizer.uses_clock:
            rt.log.warning("model %s: its chat template prints the current time, which spoils reuse", name)
    return models, broken


def load_model(name: str, section: ModelSection, base: Path) -> Loaded:
    """:raises ConfigInvalid: it cannot be loaded, or its files are not the revisions that the config names."""
    tokenizer = TokenizerModel.load(base / section.tokenizer)
    found = tokenizer.revisions
    for field, wanted, is_ in (
        ("tokenizer_revision", section.tokenizer_revision, found.tokenizer),
        ("template_version", section.template_version, found.template),
    ):
        if wanted and wanted != is_:
            raise ConfigInvalid(
                f"is {wanted}, but the files are {is_}.",
                field=f"models.{name}.{field}",
                remedy="Restore the files, or name the new revision on every service.",
            )
    made = identity.of_model(name, section, found)
    return Loaded(name, section, tokenizer, made, made.digest())


async def run(rt: Runtime) -> None:
    metrics = Metrics(rt.registry)
    models, broken = await load_models(rt, metrics)
    await Tokenizer(rt, models, broken, metrics).run()
