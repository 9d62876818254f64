# ruff: noqa: TID251 - the shell: it meets the bus, threads and chance
"""The tokenizer's shell: takes requests in, hands them to the router, and answers for all that go no further.

A message whose reply does not lie in its tenant's inbox gets no answer at all. Every other request gets exactly one
ending frame from here, or goes on to the router, which answers for it from then on.

Owns: subscriptions, work in hand.   Must not know: how tokens are made."""

import functools
import gc
import secrets
import sys
from collections import OrderedDict
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from nats.aio.msg import Msg

from ..bus import blockkeys, frames, identity, ids, namespace, subjects
from ..bus.config import LimitsSection, ModelSection, asked_name
from ..bus.connection import MALFORMED_HEADERS, OVERSIZED_HEADERS
from ..bus.errors import (
    BadRequest,
    BadSubject,
    BusUnavailable,
    Cancelled,
    ConfigInvalid,
    DeadlineExceeded,
    ForgedReply,
    Overloaded,
    PrefixbusError,
    Unavailable,
    UnknownModel,
)
from ..bus.messages import CAPTURED, FACT, JOB, OUTCOME, ROUTE, VERSION, Captured, Fact, Job, Outcome, Route
from ..bus.runtime import Runtime
from ..bus.subjects import InferSubject
from . import digests, intake, media
from .cancels import Turnstile
from .classify import AnswerLengths, prefix_class
from .memo import Memo
from .metrics import Metrics
from .model import TokenizerModel
from .work import ENCODE_INLINE_CHARS, SMALL_BYTES, Draft, Tokens, Workshop, is_small

SERVICE = "tokenizer"
# The first keep-alive comes within 1 s of acceptance (DESIGN 2); looked for this often.
KEEPALIVE_AFTER_S = 0.7
TICK_S = 0.2
# The server says within a round trip that nobody listens; after this long it will not.
ROUTED_FOR_S = 5.0
# What may wait or be worked on in one copy; beyond it requests are refused at once, for another copy or another time.
MAX_IN_HAND = 2048
MAX_BYTES_IN_HAND = 512 * 1024 * 1024
# Seconds, in the header of that refusal.
RETRY_AFTER_S = "1"
# Subjects and namespaces of callers seen before are not worked out again.
KNOWN_CALLERS = 4096
# Forged replies waiting to be put on the record; beyond it they are only counted.
FACTS_WAITING = 256
# Bodies on their way into CAPTURE; beyond it requests are not captured.
MAX_BYTES_CAPTURED = 64 * 1024 * 1024
MEMO_TENANTS = 16
SWITCH_S = 0.0005


class Loaded(msgspec.Struct, frozen=True):
    """A model ready for work, or an adapter of one; `name` is the model's."""

    name: str
    section: ModelSection
    tokenizer: TokenizerModel
    identity: identity.ModelIdentity
    serves: str
    route_subject: str
    adapter: str = ""
    parsers: intake.Parsers = intake.NO_PARSERS
    image_token: int | None = None
    """What stands for an image in a prompt; None for a model that takes none."""

    def parse(self, body: bytes, model: str, limits: LimitsSection) -> intake.Request:
        """:raises PrefixbusError: see `intake.parse`."""
        return intake.parse(body, model, limits, self.parsers, self.image_token is not None)


class _Prompt(msgspec.Struct, frozen=True):
    """A prompt in its namespace. `ids` u32 LE; `media` as `blockkeys.Placed`; `family` is the key of its segments'
    digests."""

    ids: bytes
    media: list[blockkeys.Placed]
    space: namespace.Namespace
    ns_id: bytes
    family: bytes
    uncacheable: bool


class _InHand:
    """A request from arrival until it is handed on. `label` is the client's id, or ours if it gave none, so that every
    request can be found and cancelled; `created_at` is what all its chunks say; `heard_at` is when its client last
    heard of it; `work` is all that is not done at once."""

    __slots__ = (
        "arrived_at",
        "cancelled",
        "created_at",
        "heard_at",
        "kind",
        "label",
        "message",
        "model",
        "request_id",
        "work",
    )

    def __init__(self, message: Msg, request_id: str, now: float, wall: float) -> None:
        self.message = message
        self.request_id = request_id
        label = (message.headers or {}).get(subjects.HEADER_REQUEST_ID, "")
        self.label = label if subjects.is_token(label) else request_id
        self.created_at = int(wall)
        self.model = ""
        self.kind = "chat"
        self.arrived_at = self.heard_at = now
        self.cancelled = False
        self.work = anyio.CancelScope()

    def cancel(self) -> None:
        self.cancelled = True
        self.work.cancel()


class _Begun(msgspec.Struct):
    """What is known of a request when its headers are read; `request` and `draft` if its body is small."""

    subject: InferSubject
    envelope: intake.Envelope
    loaded: Loaded
    request: intake.Request | None = None
    draft: Draft | None = None


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
        self._journal_key = rt.purpose_key("journal")
        self._space_of = functools.lru_cache(KNOWN_CALLERS)(self._new_space)
        self._parse_subject = functools.lru_cache(KNOWN_CALLERS)(subjects.parse_infer)
        self._no_router = f"{subjects.service_inbox(SERVICE, rt.instance)}.nr"
        self._room = anyio.Semaphore(rt.config.tokenizer.max_in_work)
        # Requests that are not done at once, in work or waiting for room, and the bytes of their bodies.
        self._in_hand: dict[str, _InHand] = {}
        self._bytes_in_hand = 0
        # The same requests by (tenant, label), which is what a cancel names.
        self._labelled: dict[tuple[str, str], dict[str, _InHand]] = {}
        self._turnstile = Turnstile()
        self._capturing = frozenset(rt.config.capture.tenants)
        self._bytes_captured = 0
        metrics.in_work.set_function(lambda: len(self._in_hand))
        self._routed: OrderedDict[str, _Routed] = OrderedDict()
        self._facts, self._facts_to_record = anyio.create_memory_object_stream[Fact](FACTS_WAITING)
        self._tasks: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Serves until told to stop, and ends what it has begun."""
        rt = self._rt
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._tend)
            statuses = await rt.bus.subscribe(f"{self._no_router}.*", self._nobody_routes)
            await rt.listen(subjects.ALL_OUTCOME, OUTCOME, self._answer_ended)
            await rt.listen_plain(subjects.ALL_CANCELLED, self._cancelled_elsewhere)
            cancels = await rt.listen_plain(subjects.ALL_CANCEL, self._cancel, queue=SERVICE)
            async with anyio.create_task_group() as recording:
                recording.start_soon(self._record)
                async with self._facts, anyio.create_task_group() as self._tasks:
                    requests = await rt.bus.subscribe(subjects.ALL_INFER, self.arrived, queue=SERVICE)
                    rt.ready(self.not_ready_because)
                    await rt.stopping.wait()
                    await requests.drain()
            # Not before the last request here has ended: until then it may be cancelled.
            await cancels.drain()
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

    def __repr__(self) -> str:
        return f"<Tokenizer {self._rt.instance}: {sorted(self._models)}, {len(self._in_hand)} in hand, {self._memo!r}>"

    async def arrived(self, message: Msg) -> None:
        """Takes one message in. What costs less than a task is done at once; the rest waits for room beside the others,
        with keep-alives, and is refused when too much waits already."""
        in_hand = self._admitted(message)
        if in_hand is None:
            return
        try:
            begun = self._begin(in_hand)
        except Exception as exc:  # the edge: one request's failure is not the service's
            self._fail(in_hand, exc)
            return
        if begun is None:
            return
        size = len(message.data)
        if len(self._in_hand) >= MAX_IN_HAND or self._bytes_in_hand + size > MAX_BYTES_IN_HAND:
            self._fail(in_hand, Overloaded("The tokenizer has too much in hand.", remedy="Try again in a second."))
            return
        self._in_hand[in_hand.request_id] = in_hand
        self._bytes_in_hand += size
        self._labelled.setdefault((begun.subject.tenant, in_hand.label), {})[in_hand.request_id] = in_hand
        self._tasks.start_soon(self._take, in_hand, begun)

    def _admitted(self, message: Msg) -> _InHand | None:
        """None if it gets no answer: it has no reply, or a forged one."""
        if not message.reply:
            self._metrics.requests.labels("no_reply").inc()
            return None
        # `pb.v1.infer.>` has a fourth part.
        tenant = message.subject.split(".", 4)[3]
        if not subjects.is_token(tenant) or not subjects.is_own_reply(message.reply, tenant):
            self._note_forgery(message, tenant)
            return None
        wall = self._rt.clock.wall()
        request_id = ids.request_id(wall, secrets.token_bytes(ids.ENTROPY_BYTES))
        return _InHand(message, request_id, self._rt.clock.now(), wall)

    def _begin(self, in_hand: _InHand) -> _Begun | None:
        """Reads the headers, and does the whole work if it is small; else what is left to do."""
        rt, limits = self._rt, self._rt.config.limits
        message = in_hand.message
        headers = message.headers or {}
        subject = self._parse_subject(message.subject)
        in_hand.model = subject.model
        if OVERSIZED_HEADERS in headers:
            raise intake.headers_too_large(headers[OVERSIZED_HEADERS], limits)
        if MALFORMED_HEADERS in headers:
            raise BadRequest(
                "the header block cannot be read.", field="headers", remedy="Send UTF-8 lines of NAME: VALUE."
            )
        envelope = intake.envelope(headers, limits, rt.clock.wall())
        loaded = self._model(subject.model)
        begun = _Begun(subject, envelope, loaded)
        if not is_small(message.data):
            return begun
        request = begun.request = loaded.parse(message.data, subject.model, limits)
        in_hand.kind = request.kind
        draft = begun.draft = self._workshop.begin(
            loaded.tokenizer, subject.tenant, subject.scope, request, loaded.section.max_model_len
        )
        if draft.missing_chars > ENCODE_INLINE_CHARS:
            return begun
        tokens = self._workshop.finish_at_once(loaded.tokenizer, subject.tenant, draft)
        self._hand_over(in_hand, begun, self._route(in_hand, begun, request, tokens))
        return None

    async def _take(self, in_hand: _InHand, begun: _Begun) -> None:
        """Does what is left, in threads, when there is room."""
        try:
            route = None
            in_hand.work.deadline = anyio.current_time() + begun.envelope.deadline_at - self._rt.clock.wall()
            with in_hand.work:
                async with self._room:
                    route = await self._tokenised(in_hand, begun)
            self._hand_over(in_hand, begun, route)
        except Exception as exc:  # the edge, as above
            self._fail(in_hand, exc)
        finally:
            del self._in_hand[in_hand.request_id]
            self._bytes_in_hand -= len(in_hand.message.data)
            label = (begun.subject.tenant, in_hand.label)
            del self._labelled[label][in_hand.request_id]
            if not self._labelled[label]:
                del self._labelled[label]

    async def _tokenised(self, in_hand: _InHand, begun: _Begun) -> bytes:
        loaded, subject, at = begun.loaded, begun.subject, self._workshop
        body: bytes = in_hand.message.data
        request = begun.request
        if request is None:
            limits = self._rt.config.limits
            request = await at.run(len(body), loaded.parse, body, subject.model, limits)
            in_hand.kind = request.kind
        tokens = await at.tokens(
            loaded.tokenizer,
            subject.tenant,
            subject.scope,
            request,
            loaded.section.max_model_len,
            len(body),
            begun.draft,
        )
        size = max(len(body), len(tokens.ids))
        if size <= SMALL_BYTES:
            return self._route(in_hand, begun, request, tokens)
        return await at.run(size, self._route, in_hand, begun, request, tokens)

    def _route(self, in_hand: _InHand, begun: _Begun, request: intake.Request, tokens: Tokens) -> bytes:
        """The message for the router; reads only, so that it may run in a thread.

        :raises BadRequest, ContextTooLong: see `intake.fit`."""
        loaded, subject, envelope = begun.loaded, begun.subject, begun.envelope
        section = loaded.section
        prompt = self._placed(begun, request, tokens.ids)
        prompt_tokens = len(prompt.ids) // 4
        max_tokens = intake.fit(request, prompt_tokens, section.max_model_len)
        self._metrics.from_memo.inc(tokens.memo_tokens)
        self._metrics.encoded.inc(len(tokens.ids) // 4 - tokens.memo_tokens)
        if tokens.covered:
            self._metrics.covered.inc()
        space, ns_id = prompt.space, prompt.ns_id
        kind_of_prefix = prefix_class(request, envelope.prefix_class)
        job = Job(
            v=VERSION,
            request_id=in_hand.request_id,
            client_request_id=in_hand.label,
            reply=in_hand.message.reply,
            namespace=space,
            tokens=prompt.ids,
            kind=request.kind,
            params=intake.engine_params(request, max_tokens),
            include_usage=request.include_usage,
            created_at=in_hand.created_at,
            deadline_at=envelope.deadline_at,
            traceparent=envelope.traceparent,
            prefix_class=kind_of_prefix,
            chat=intake.engine_chat(request, b"" if prompt.uncacheable else ns_id),
            resumable=request.resumable,
            said_tokens=len(request.said),
            media=prompt.media,
            uncacheable=prompt.uncacheable,
        )
        seed = namespace.seed(ns_id)
        keys = b"" if prompt.uncacheable else blockkeys.chain(prompt.ids, section.block_size, seed, prompt.media)
        route = Route(
            v=VERSION,
            request_id=in_hand.request_id,
            client_request_id=in_hand.label,
            tenant=subject.tenant,
            model=loaded.name,
            serves=loaded.serves,
            ns_id=ns_id,
            keys=keys,
            prompt_tokens=prompt_tokens,
            output_tokens=self._lengths.estimate(kind_of_prefix, max_tokens),
            prefix_class=kind_of_prefix,
            reply=in_hand.message.reply,
            deadline_at=envelope.deadline_at,
            job=JOB.encode(job),
            kind=request.kind,
            created_at=in_hand.created_at,
            template_version=space.template_version,
            tokenizer_revision=space.tokenizer_revision,
            segments=digests.segments(prompt.family, prompt.ids),
            sending=envelope.sending,
            adapter=loaded.adapter,
            resumable=request.resumable,
        )
        return ROUTE.encode(route)

    def _placed(self, begun: _Begun, request: intake.Request, ids: bytes) -> _Prompt:
        """The prompt as the engine will have it, if that can be said; else it shares a namespace with nobody."""
        loaded, subject = begun.loaded, begun.subject
        salt = request.client_salt
        found: tuple[bytes, list[blockkeys.Placed]] | None = ids, []
        space, ns_id, family = self._space_of(loaded.identity, loaded.adapter, subject.tenant, subject.scope, salt)
        if request.media and loaded.image_token is not None:
            found = None
            if all(medium.digest for medium in request.media):
                names = [media.name(ns_id, medium.digest) for medium in request.media]
                found = media.placed(ids, loaded.image_token, loaded.section.image_tokens, names)
        if found is not None:
            return _Prompt(*found, space, ns_id, family, uncacheable=False)
        self._metrics.uncacheable.inc()
        alone = loaded.identity.namespace(subject.tenant, subject.scope, secrets.token_hex(16), adapter=loaded.adapter)
        return _Prompt(ids, [], alone, namespace.ns_id(self._namespace_key, alone), family, uncacheable=True)

    def _new_space(
        self, model: identity.ModelIdentity, adapter: str, tenant: str, scope: str, client_salt: str
    ) -> tuple[namespace.Namespace, bytes, bytes]:
        """It, its id, and the key of its segments' digests."""
        space = model.namespace(tenant, scope, client_salt, adapter=adapter)
        return space, namespace.ns_id(self._namespace_key, space), digests.family(self._journal_key, space)

    def _hand_over(self, in_hand: _InHand, begun: _Begun, route: bytes | None) -> None:
        """:raises Cancelled: it was, while it was worked on.
        :raises DeadlineExceeded: there is no route, or it comes too late (a thread is not interrupted).
        :raises PrefixbusError: it could not be sent; nobody has it."""
        rt, request_id = self._rt, in_hand.request_id
        if in_hand.cancelled:
            raise Cancelled()
        if route is None or rt.clock.wall() >= begun.envelope.deadline_at:
            raise DeadlineExceeded("It passed before the prompt was tokenised.")
        # Noted first: the server may say at once that nobody listens.
        self._routed[request_id] = _Routed(in_hand.message.reply, in_hand.label, rt.clock.now())
        try:
            rt.bus.send(begun.loaded.route_subject, route, reply=f"{self._no_router}.{request_id}")
        except PrefixbusError:
            del self._routed[request_id]
            raise
        self._metrics.ok.inc()
        self._metrics.seconds.observe(rt.clock.now() - in_hand.arrived_at)
        if begun.subject.tenant in self._capturing:
            self._capture(in_hand, begun)

    def _capture(self, in_hand: _InHand, begun: _Begun) -> None:
        """Keeps a request that went on, as it came: its tenant asked for this. Nobody waits for it."""
        body: bytes = in_hand.message.data
        if self._bytes_captured + len(body) > MAX_BYTES_CAPTURED:
            self._metrics.captures_lost.inc()
            return
        captured = Captured(
            v=VERSION,
            request_id=in_hand.request_id,
            client_request_id=in_hand.label,
            tenant=begun.subject.tenant,
            scope=begun.subject.scope,
            model=begun.subject.model,
            prefix_class=begun.envelope.prefix_class,
            body=msgspec.Raw(body),
        )
        self._bytes_captured += len(body)
        self._tasks.start_soon(self._keep, captured, len(body))

    async def _keep(self, captured: Captured, size: int) -> None:
        subject = subjects.capture(captured.tenant, captured.request_id)
        try:
            await self._rt.bus.publish_acked(subject, CAPTURED.encode(captured), msg_id=captured.request_id)
        except PrefixbusError as exc:
            self._metrics.captures_lost.inc()
            self._rt.caught(exc, "a request was not captured", request_id=captured.request_id)
        finally:
            self._bytes_captured -= size

    def _fail(self, in_hand: _InHand, exc: Exception) -> None:
        """The one ending frame of a request that goes no further."""
        if isinstance(exc, PrefixbusError):
            error = exc
        else:  # nobody foresaw it: the client hears that, the log has the rest
            self._rt.caught(exc, "a request failed", request_id=in_hand.request_id)
            error = PrefixbusError()
        self._metrics.requests.labels(error.code).inc()
        self._metrics.seconds.observe(self._rt.clock.now() - in_hand.arrived_at)
        self._refuse(error, in_hand.message.reply, in_hand.label)

    def _refuse(self, error: PrefixbusError, reply: str, label: str) -> None:
        headers = frames.error_headers(error, label)
        if isinstance(error, Overloaded):
            headers["Retry-After"] = RETRY_AFTER_S
        try:
            self._rt.bus.send(reply, headers=headers)
        except PrefixbusError as exc:
            self._rt.caught(exc, "a client could not be told", request_id=label)

    def _model(self, name: str) -> Loaded:
        loaded = self._models.get(name)
        if loaded is not None:
            return loaded
        if name in self._broken:
            # Why not names files of ours, which is no tenant's business.
            raise Unavailable(
                f"The tokenizer of {name!r} cannot be loaded.",
                field="model",
                remedy="Use another model until the operator has mended it; the tokenizer's /readyz says what is "
                "wrong.",
            )
        known = ", ".join(sorted(self._models)) or "none"
        raise UnknownModel(f"{name[:80]!r} is not served.", field="model", remedy=f"Served are: {known}.")

    def _note_forgery(self, message: Msg, tenant: str) -> None:
        """Never writes to the reply; leaves a fact for the record instead, beside the requests: whoever forges must not
        slow the others."""
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
        try:
            self._facts.send_nowait(fact)
        except anyio.WouldBlock:
            self._metrics.facts_lost.inc()

    async def _record(self) -> None:
        """Puts facts on the record, one after the other, until there will be no more."""
        subject = subjects.audit(SERVICE, self._rt.instance)
        async with self._facts_to_record:
            async for fact in self._facts_to_record:
                try:
                    await self._rt.bus.publish_acked(subject, FACT.encode(fact), msg_id=secrets.token_hex(16))
                except PrefixbusError as exc:
                    self._metrics.facts_lost.inc()
                    self._rt.caught(exc, "a fact was not recorded", tenant=fact.tenant)

    async def _nobody_routes(self, message: Msg) -> None:
        """The server's word that no router listens: the request comes back here."""
        if (message.headers or {}).get("Status") != "503":
            return
        routed = self._routed.pop(message.subject.rsplit(".", 1)[1], None)
        if routed is None:
            return
        self._metrics.requests.labels(Unavailable.code).inc()
        self._refuse(Unavailable("No router listens.", remedy="Try again shortly."), routed.reply, routed.label)

    def _cancel(self, message: Msg) -> None:
        """A tenant's cancel, of whatever size: its subject alone is read and passed on."""
        try:
            tenant, label = subjects.parse_cancel(message.subject)
        except BadSubject:
            # It names no request. Counted only: a line each would be the tenant's to flood.
            self._metrics.cancels.labels("malformed").inc()
            return
        lost = self._turnstile.lost
        if self._turnstile.passes(tenant, label):
            self._pass_on(tenant, label)
        self._metrics.cancels.labels("lost").inc(self._turnstile.lost - lost)

    def _pass_on(self, tenant: str, label: str) -> None:
        self._drop(tenant, label)
        try:
            self._rt.bus.send(subjects.cancelled(tenant, label))
        except BusUnavailable:
            # The bus went while it waited for its turn; a cancel is at most once.
            self._metrics.cancels.labels("lost").inc()
        else:
            self._metrics.cancels.labels("passed").inc()

    def _cancelled_elsewhere(self, message: Msg) -> None:
        """Another copy has taken the cancel."""
        self._drop(*subjects.parse_cancelled(message.subject))

    def _drop(self, tenant: str, label: str) -> None:
        for in_hand in self._labelled.get((tenant, label), {}).values():
            in_hand.cancel()

    def _answer_ended(self, outcome: Outcome, _: Msg) -> None:
        if outcome.status == "ok" and outcome.prefix_class in intake.PREFIX_CLASSES:
            self._lengths.observe(outcome.prefix_class, outcome.output_tokens)

    async def _tend(self) -> None:
        """Keeps clients of slow requests company, and forgets what is over."""
        rt = self._rt
        while True:
            await anyio.sleep(TICK_S)
            now = rt.clock.now()
            for in_hand in list(self._in_hand.values()):
                if now - in_hand.heard_at >= KEEPALIVE_AFTER_S:
                    in_hand.heard_at = now
                    self._keep_alive(in_hand)
            while self._routed and now - next(iter(self._routed.values())).at > ROUTED_FOR_S:
                self._routed.popitem(last=False)
            for tenant, label in self._turnstile.turn():
                self._pass_on(tenant, label)
            self._memo.expire(now)
            self._metrics.memo_bytes.set(self._memo.held_bytes)

    def _keep_alive(self, in_hand: _InHand) -> None:
        body = frames.keepalive(in_hand.kind, in_hand.model, in_hand.request_id, in_hand.created_at)
        try:
            self._rt.bus.send(in_hand.message.reply, body, headers=frames.keepalive_headers(in_hand.label))
        except PrefixbusError as exc:
            self._rt.caught(exc, "a keep-alive was not sent", request_id=in_hand.request_id)


async def load_models(rt: Runtime, metrics: Metrics) -> tuple[dict[str, Loaded], dict[str, str]]:
    """Every configured model that can be loaded, with its adapters, and why the others cannot."""
    models: dict[str, Loaded] = {}
    broken: dict[str, str] = {}
    for name, section in sorted(rt.config.models.items()):
        try:
            loaded = await anyio.to_thread.run_sync(load_model, name, section, rt.state)
        except ConfigInvalid as exc:
            broken |= {asked_name(name, adapter): exc.sentence() for adapter in ("", *section.adapters)}
            metrics.model_state.labels(name).set(0)
            rt.caught(exc, "a model cannot be served", model=name)
            continue
        models |= with_adapters(loaded)
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
    parsers = intake.Parsers(tools=bool(section.tool_parser), reasoning=bool(section.reasoning_parser))
    return Loaded(
        name,
        section,
        tokenizer,
        made,
        made.digest(),
        subjects.route(name),
        parsers=parsers,
        image_token=_image_token(name, section, tokenizer),
    )


def _image_token(name: str, section: ModelSection, tokenizer: TokenizerModel) -> int | None:
    """:raises ConfigInvalid: the model takes images, and its tokenizer has no token for them."""
    if not section.media_revision:
        return None
    found = tokenizer.token_id(section.image_token)
    if found is None:
        raise ConfigInvalid(
            f"{section.image_token!r} is no token of its tokenizer.",
            field=f"models.{name}.image_token",
            remedy="Name what its chat template prints for an image.",
        )
    return found


def with_adapters(loaded: Loaded) -> dict[str, Loaded]:
    """The model and its adapters, by what clients call them."""
    return {
        asked_name(loaded.name, adapter): msgspec.structs.replace(loaded, adapter=adapter)
        for adapter in ("", *loaded.section.adapters)
    }


def _make_way_for_the_loop() -> None:
    """What threads must not do to the loop of this process, said once all models are loaded."""
    # A thread that renders or hashes gives way after this long (5 ms is Python's default).
    sys.setswitchinterval(SWITCH_S)
    # The collector would go through all that the models brought with it, 100 ms, for every large body's objects.
    gc.collect()
    gc.freeze()


async def run(rt: Runtime) -> None:
    metrics = Metrics(rt.registry)
    models, broken = await load_models(rt, metrics)
    _make_way_for_the_loop()
    await Tokenizer(rt, models, broken, metrics).run()
