# ruff: noqa: TID251 - a shell: it waits on the event loop, and takes what the bus hands over
"""The bridge of one worker: its parts put together, and what comes in handed to them.

Owns: subscriptions, what is said about this worker's load.
Must not know: how vLLM is spoken to (engine, vllm_events), who may run (vetting, admission), how a request runs
(stream).   Source: DESIGN 7."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from nats.aio.msg import Msg

from ..bus import blockkeys, identity, messages, namespace, revision, secretfile, subjects
from ..bus.config import ModelSection
from ..bus.connection import Subscription
from ..bus.errors import BusUnavailable, Cancelled, ConfigInvalid, PrefixbusError, WorkerLost
from ..bus.messages import VERSION, WARM, Abort, Accept, Dispatch, DumpRequest, Fact, Job, Load
from ..bus.outbox import Outbox
from ..bus.runtime import DRAIN_S, Runtime
from .adapters import Adapters
from .admission import Admission, Left, Offer, Verdict, charged_ms
from .blocks import BlockIndex
from .engine import Engine, VllmHttp
from .heartbeat import Heartbeat, is_urgent
from .kv_feed import KvFeeds
from .life import Life, WorkerRecord, reply_of
from .metrics import BridgeMetrics
from .stream import SERVICE, Started, Streams, Told, held_of_prompt
from .vetting import Refusal, vet
from .vllm_events import Endpoints
from .warming import Warming

# A lapsed lease is noticed here before anyone else may act on it: the slack covers a report's way to its listeners.
_LEASE_SLACK_S = 0.5
# Of the runtime's bound, kept for telling clients of what did not end, and for the last outcomes.
_DRAIN_TAIL_S = 5.0
_ACCEPTED_MAX = 4096


class BridgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker this is, and where its engine is; `kv_events` and `kv_replay` are the engine's own settings
    (--kv-events-config). `engine_key_file` holds the key that the engine asks for, if it does (--api-key)."""

    worker: str
    model: str
    engine_url: str
    kv_events: str
    kv_replay: str = ""
    engine_key_file: str = ""


async def run(rt: Runtime, options: BridgeOptions) -> None:
    """Serves until `rt.stopping`. :raises WorkerRefused: another bridge has this name.

    :raises ConfigInvalid: the model is not in the config, or the engine's key cannot be read or is not its owner's
    alone; :raises BadSubject: the name cannot stand in a subject."""
    subjects.token(options.worker, "worker")
    if options.model not in rt.config.models:
        raise ConfigInvalid(f"{options.model} is not in config.toml.", field="models")
    key = secretfile.read(Path(options.engine_key_file)).decode() if options.engine_key_file else ""
    engine = VllmHttp(options.engine_url, options.model, key)
    try:
        await Bridge(rt, options, engine).run()
    finally:
        await engine.close()


class Bridge:
    """One worker's bridge. Make it within the runtime's task group."""

    def __init__(self, rt: Runtime, options: BridgeOptions, engine: Engine) -> None:
        config = rt.config
        section = config.models[options.model]
        self._rt = rt
        self._worker = options.worker
        self._section = section
        self._identity = identity.of_model(options.model, section, _revisions(rt.state, section))
        self._namespace_key = rt.purpose_key("namespace")
        self._engine = engine
        self._report = 0
        self._accepted: list[str] = []
        self._accepted_reported = 0
        self._told_busy = False
        self._told_queue_ms = 0.0
        self._refused_facts = 0
        self._work: Subscription | None = None

        adapters = Adapters(rt.purpose_key("salt"), section.engine_names())
        self.index = BlockIndex(section.block_size, adapters.owner)
        slots = config.bridge.slots
        reserved_slots = int(slots * config.bridge.cold_reserve)
        self.admission = Admission(slots, config.bridge.prefill_window_tokens, reserved_slots)
        self._feed = KvFeeds(rt.bus, self._worker, self.index, config.directory.shards)
        record = WorkerRecord(
            v=VERSION,
            worker=self._worker,
            model=options.model,
            serves=self._identity.digest(),
            engine=options.engine_url,
            block_size=section.block_size,
            slots=self.admission.slots,
            kv_tokens=section.measured.kv_tokens if section.measured is not None else 0,
            boot=secrets.token_hex(8),
            registered_at=0.0,
            adapters=dict(self._identity.adapters),
            model_revision=section.model_revision,
        )
        host = urlsplit(options.engine_url).hostname or "127.0.0.1"
        endpoints = Endpoints(options.kv_events, options.kv_replay, host)
        self.life = Life(rt, record, engine, endpoints, self.index, self._feed, self, adapters.engine_names)
        lost_after_s = config.router.lost_after_s
        self._heartbeat = Heartbeat(
            rt.bus,
            rt.clock,
            subjects.load(self._worker),
            period_s=config.bridge.heartbeat_s,
            lapse_s=max(lost_after_s - _LEASE_SLACK_S, lost_after_s / 2),
            report=self._load,
            on_sent=self._load_sent,
            on_lapse=self._lapsed,
        )
        self.metrics = BridgeMetrics(
            rt.registry,
            section.block_size,
            model=options.model,
            pool=config.bridge.pool,
            template=self._identity.template_version,
        )
        self._outbox = Outbox(rt.bus, lambda exc, subject: rt.caught(exc, "not recorded", subject=subject))
        self.streams = Streams(
            worker=self._worker,
            model=options.model,
            bus=rt.bus,
            clock=rt.clock,
            engine=engine,
            index=self.index,
            admission=self.admission,
            heartbeat=self._heartbeat,
            load_changed=self._load_changed,
            metrics=self.metrics,
            outbox=self._outbox,
            tasks=rt.task_group,
            adapters=adapters,
            keepalive_s=config.bridge.keepalive_s,
            caught=rt.caught,
            engine_doubted=self.life.doubt_engine,
            isolation_doubted=self.life.doubt_isolation,
            tells_worker=config.bridge.tells_worker,
        )
        self.warming = Warming(
            worker=self._worker,
            model=options.model,
            clock=rt.clock,
            engine=engine,
            index=self.index,
            admission=self.admission,
            cold=self.streams.cold,
            hits=self.streams.hits,
            outbox=self._outbox,
            tasks=rt.task_group,
            metrics=self.metrics,
            adapters=adapters,
            idle_share=config.placement.idle_share,
            step_tokens=config.placement.step_tokens,
            caught=rt.caught,
        )
        self._watch_numbers()

    def __repr__(self) -> str:
        return f"<Bridge {self.life!r} {self.admission!r}>"

    async def run(self) -> None:
        tasks = self._rt.task_group
        await self.life.be_alone()
        await self._subscribe()
        for task in (self.life.events.run, self._feed.run, self._heartbeat.run, self.streams.run, self.life.run):
            tasks.start_soon(task)
        tasks.start_soon(self.life.watch_rivals)
        self._rt.ready(lambda: "draining" if self.admission.draining else self.life.why_not)
        await self._rt.stopping.wait()
        await self._drain()

    # --- the worker's lives (a Follower) ---

    async def hear_work(self) -> None:
        self._work = await self._rt.listen(subjects.work(self._worker), messages.DISPATCH, self._on_work)

    async def hear_no_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            await work.unsubscribe()

    def born(self, incarnation: int) -> None:
        self.admission.incarnation = incarnation
        self._report = 0
        self._accepted.clear()
        self._heartbeat.restart()

    def died(self, *, replaced: bool) -> None:
        self.admission.incarnation = 0
        self.warming.give_up()
        if replaced:
            self.streams.give_up_all(WorkerLost("Another bridge has taken the worker's name."))
        else:
            self.streams.stop_all(WorkerLost("The engine was lost."))

    def _lapsed(self) -> None:
        """Nothing was heard of us for so long that our requests may be others' by now."""
        self.streams.give_up_all(WorkerLost("The worker was out of reach for longer than its lease."))

    # --- what is said about its load ---

    def _load(self) -> bytes | None:
        record, admission = self.life.record, self.admission
        if not self.life.incarnation or self.life.stalled:
            return None
        self._report += 1
        self._accepted_reported = len(self._accepted)
        self._told_busy = admission.busy
        self._told_queue_ms = queue_ms = admission.queue_ms(self._rt.clock.now())
        event_seqs = self._feed.seqs
        load = Load(
            v=VERSION,
            worker=self._worker,
            incarnation=self.life.incarnation,
            report=self._report,
            event_seq=event_seqs[0],
            model=record.model,
            serves=record.serves,
            queue_ms=queue_ms,
            running=admission.running,
            waiting=admission.waiting,
            slots=admission.slots,
            kv_usage=self._of_kv(admission.prompt_tokens),
            kv_tokens=record.kv_tokens,
            block_size=record.block_size,
            draining=admission.draining,
            accepted=list(self._accepted),
            reserved_slots=admission.reserved_slots,
            worker_class=self._rt.config.bridge.worker_class,
            pool=self._rt.config.bridge.pool,
            event_seqs=event_seqs,
            incomplete=not self.index.complete,
        )
        return messages.LOAD.encode(load)

    def _load_changed(self) -> None:
        admission = self.admission
        queue_ms = admission.queue_ms(self._rt.clock.now())
        self._heartbeat.changed(urgent=is_urgent(self._told_busy, self._told_queue_ms, admission.busy, queue_ms))

    def _load_sent(self) -> None:
        del self._accepted[: self._accepted_reported]

    # --- what comes in ---

    async def _subscribe(self) -> None:
        rt, worker = self._rt, self._worker
        await rt.listen_plain(subjects.control(worker, "ping"), self._on_ping)
        await rt.listen(subjects.control(worker, "dump"), messages.DUMP_REQUEST, self._on_dump)
        await rt.listen_plain(subjects.control(worker, "reset"), self._on_reset)
        await rt.listen(subjects.control(worker, "abort"), messages.ABORT, self._on_abort)
        await rt.listen(subjects.control(worker, "status"), messages.ABORT, self._on_status)
        await rt.listen_plain(subjects.ALL_CANCELLED, self._on_cancelled)
        await rt.listen_plain(self.streams.nobody_subjects, self._on_nobody_there)
        await rt.listen_plain(self.streams.acks.inbox, self.streams.acks.heard)

    def _on_work(self, dispatch: Dispatch, message: Msg) -> None:
        job = messages.JOB.decode(dispatch.job)
        vetted = vet(
            dispatch,
            job,
            identity=self._identity,
            namespace_key=self._namespace_key,
            max_model_len=self._section.max_model_len,
        )
        now = self._rt.clock.now()
        if isinstance(vetted, Refusal):
            self._record_refusal(job, vetted)
            self._answer(message, dispatch, Verdict(vetted.code, self.admission.queue_ms(now), 0))
            return
        keys = b""
        if not job.uncacheable:
            seed = namespace.seed(dispatch.ns_id)
            keys = blockkeys.chain(job.tokens, self._section.block_size, seed, job.media)
        if dispatch.decision == WARM:
            refused, held_blocks = self.warming.offer(dispatch, job, keys)
            self._answer(message, dispatch, Verdict(refused, self.admission.queue_ms(now), held_blocks))
            return
        offer = self._offer(dispatch, job, keys)
        verdict = self.admission.offer(offer, now, self._rt.clock.wall())
        if verdict.stop is not None:
            self.streams.stop(verdict.stop, Cancelled("Superseded by a newer attempt."), Told.NOBODY)
        told = self._answer(message, dispatch, verdict)
        if verdict.start is None:
            return
        if not told:
            self.admission.end(verdict.start, now, Left.GIVEN_BACK)
            self.streams.give_turns()
            return
        self.warming.give_up()
        if len(self._accepted) < _ACCEPTED_MAX:
            self._accepted.append(dispatch.request_id)
        self.streams.start(
            Started(
                reply=message.reply,
                dispatch=dispatch,
                job=job,
                params=vetted,
                ticket=verdict.start,
                keys=keys,
                generation=self.index.generation,
            )
        )
        self._load_changed()

    def _offer(self, dispatch: Dispatch, job: Job, keys: bytes) -> Offer:
        prompt_tokens = len(job.tokens) // 4
        block_size = self._section.block_size
        held_blocks = held_of_prompt(self.index, dispatch.ns_id, keys, prompt_tokens)
        reusable = keys[: 8 * blockkeys.reusable_blocks(prompt_tokens, block_size)]
        expected_blocks = self.streams.expected_blocks(dispatch.ns_id, reusable, held_blocks)
        return Offer(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            tenant=job.namespace.tenant,
            client_request_id=job.client_request_id,
            incarnation=dispatch.incarnation,
            prefill_ms=charged_ms(
                dispatch.prefill_ms, prompt_tokens, dispatch.predicted_tokens, expected_blocks * block_size
            ),
            prompt_tokens=prompt_tokens,
            held_blocks=held_blocks,
            max_queue_ms=dispatch.max_queue_ms,
            accept_by_at=dispatch.accept_by_at,
            deadline_at=job.deadline_at,
            uncached_tokens=prompt_tokens - held_blocks * block_size,
            is_warm=dispatch.is_warm,
            max_wait_ms=dispatch.max_wait_ms,
            min_held_blocks=dispatch.min_held_blocks,
            expected_blocks=expected_blocks,
        )

    def _answer(self, message: Msg, dispatch: Dispatch, verdict: Verdict) -> bool:
        """Whether the router could be told."""
        if verdict.refused and dispatch.decision != WARM:
            self.metrics.refused(verdict.refused)
        accept = Accept(
            VERSION,
            dispatch.request_id,
            dispatch.attempt,
            self._worker,
            self.life.incarnation,
            verdict.refused,
            verdict.queue_ms,
            verdict.held_blocks,
        )
        try:
            if message.reply:
                self._rt.bus.send(message.reply, messages.ACCEPT.encode(accept))
        except BusUnavailable:
            return False
        return True

    def _record_refusal(self, job: Job, refusal: Refusal) -> None:
        fields = {"request_id": job.request_id, "code": refusal.code}
        self._rt.log.warning("dispatch refused: %s", refusal.detail, extra={"fields": fields})
        if not refusal.fact:
            return
        self._refused_facts += 1
        fact = Fact(
            v=VERSION,
            kind=refusal.fact,
            at=self._rt.clock.wall(),
            service=SERVICE,
            tenant=job.namespace.tenant,
            scope=job.namespace.scope,
            request_id=job.request_id,
            worker=self._worker,
            detail=refusal.detail,
        )
        name = f"{refusal.fact}-{self.life.record.boot}-{self._refused_facts}"
        self._outbox.put(subjects.audit(SERVICE, self._worker), messages.FACT.encode(fact), name)

    def _on_ping(self, message: Msg) -> None:
        if not self.life.is_own_ping(message.data):
            self._reply(message)

    def _on_dump(self, request: DumpRequest, message: Msg) -> None:
        if request.incarnation != self.life.incarnation:
            self._reply(message, "This is another incarnation.")
            return
        self._reply(message, "" if self._feed.ask_dump(request.shard) else "There is no such shard.")

    def _on_reset(self, message: Msg) -> None:
        # It may take the engine a while: other control messages must not wait for it.
        self._rt.task_group.start_soon(self._reset, message)

    async def _reset(self, message: Msg) -> None:
        clears = self.index.clears
        error = ""
        try:
            await self._engine.reset_prefix_cache()
        except TimeoutError as exc:
            error = str(exc)
        except PrefixbusError as exc:
            error = exc.sentence()
        except Exception as exc:
            # The edge of the service: nobody else would hear of it but the task group, and that would end the bridge.
            self._rt.caught(exc, "a reset failed")
            error = PrefixbusError().sentence()
        else:
            # An idle engine does not announce it: we do, unless its own announcement has overtaken the answer.
            if self.index.clears == clears:
                self._feed.add(self.index.empty())
        self._reply(message, error)

    def _on_abort(self, abort: Abort, message: Msg) -> None:
        """Answers how far the attempt was: nothing published (empty), `started`, or `ended` (all was said already)."""
        ticket = self.admission.stop_attempt(abort.request_id, abort.attempt, self._rt.clock.now())
        if ticket is not None:
            started = self.streams.stop(ticket, Cancelled("Stopped by the router."), Told.NOBODY)
            left: Left | None = Left.BROKEN if started else Left.GIVEN_BACK
        else:
            left = self.admission.how_left(abort.request_id, abort.attempt)
        self._reply(message, left.value if left is not None else "")

    def _on_status(self, asked: Abort, message: Msg) -> None:
        self._reply(message, self.admission.whereabouts(asked.request_id, asked.attempt))

    def _on_cancelled(self, message: Msg) -> None:
        tenant, client_request_id = subjects.parse_cancelled(message.subject)
        for ticket in self.admission.cancel(tenant, client_request_id, self._rt.clock.now()):
            self.streams.stop(ticket, Cancelled())

    def _on_nobody_there(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == "503":
            self.streams.nobody_there(message.subject)

    def _reply(self, message: Msg, error: str = "") -> None:
        # Whoever asks over a bus that is cut asks again.
        with contextlib.suppress(BusUnavailable):
            if message.reply:
                self._rt.bus.send(message.reply, reply_of(self.life, error))

    # --- its end, and its numbers ---

    async def _drain(self) -> None:
        """No new work; what is in hand may end, within the runtime's bound."""
        self.admission.draining = True
        self._heartbeat.changed()
        self.warming.give_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S - _DRAIN_TAIL_S):
                await self.streams.idle()
        self.streams.stop_all(WorkerLost("The worker shuts down."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_TAIL_S - 1):
                await self.streams.idle()
                await self.warming.idle()
                await self.streams.acks.idle()
                await self._outbox.idle()

    def _watch_numbers(self) -> None:
        rt, life, admission, index, feed = self._rt, self.life, self.admission, self.index, self._feed
        hits, unused, heartbeat = self.streams.hits, index.unused, self._heartbeat
        self.metrics.watch(
            {
                "running": lambda: admission.running,
                "waiting": lambda: admission.waiting,
                "held_back": lambda: admission.held_back,
                "attempts": lambda: self.streams.in_work,
                "warming": lambda: int(self.warming.in_work),
                "prompt_tokens": lambda: admission.prompt_tokens,
                "queue_ms": lambda: admission.queue_ms(rt.clock.now()),
                "held_blocks": lambda: index.held_keys,
                "foreign_blocks": lambda: index.foreign,
                "kv_occupancy_ratio": lambda: self._of_kv((index.held_keys + index.foreign) * index.block_size),
                "kv_pinned_ratio": lambda: self._of_kv(admission.prompt_tokens),
                "story_complete": lambda: int(index.complete),
                "engine_event_lag_seconds": lambda: life.event_lag_s,
                "incarnation": lambda: life.incarnation,
                "kv_seq": lambda: sum(feed.seqs),
                "cache_clears": lambda: index.clears,
                "engine_sessions": lambda: life.events.sessions,
                "engine_event_gaps": lambda: life.events.gaps,
                "engine_batches": lambda: life.batches,
                "engine_events_unknown": lambda: life.unknown_events,
                "foreign_batches": lambda: life.foreign_batches,
                "blocks_malformed": lambda: unused.malformed,
                "blocks_of_unknown_parents": lambda: unused.unknown_parent,
                "blocks_of_other_tiers": lambda: unused.other_tier,
                "kv_messages_unsent": lambda: feed.unsent,
                "dumps": lambda: feed.dumps,
                "heartbeats": lambda: heartbeat.sent,
                "heartbeats_skipped": lambda: heartbeat.skipped,
                "hits_unverified": lambda: hits.unverified,
                "engine_silent": lambda: hits.silent,
            },
            index.evictions,
        )

    def _of_kv(self, tokens: int) -> float:
        """The share of the engine's KV that so many tokens take."""
        room = self.life.record.kv_tokens
        return min(1.0, tokens / room) if room else 0.0


def _revisions(state: Path, section: ModelSection) -> revision.Revisions | None:
    """Of the tokenizer's files, where the config leaves them open. :raises ConfigInvalid: they cannot be read."""
    if section.tokenizer_revision and section.template_version:
        return None
    return revision.of_directory(state / section.tokenizer)
