"""The wire types between services.

Two forms. Messages that only services read are msgpack arrays (`array_like`): fields are appended with defaults, never
reordered or removed (golden bytes are tested). Records that people read in JetStream (`Outcome`, `DecisionRecord`,
`Fact`, `Captured`) are JSON objects. Every message starts with its version `v`; a decoder refuses one it does not know.

Units: tokens u32 LE, block keys u64 LE, both as bytes that a hop which does not need them never decodes; times named
`*_at` are Unix seconds, `*_ms` milliseconds. Ids: `request_id` is ours (bus.ids), `client_request_id` the caller's
label. Must not know: NATS, what a service does with a message."""

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from .errors import PrefixbusError
from .namespace import Namespace

VERSION = 1

GPU = 0
HOST = 1
TIERS = ("gpu", "host")
"""Where a block is held. `Stored` and `Removed` say it by number, `Level` by name."""


WARM = "warm"
"""The decision of a dispatch that carries out a `WarmOrder`: no client waits for it."""

# An answer that names more workers than this takes longer to read than it can be worth.
NAMED_MAX = 1 << 16

# What a bridge says of itself goes into sums, quotients and records of everybody's requests: a decoder refuses what
# cannot be. NaN is below every bound.
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_QueueMs = Annotated[float, Meta(ge=0, le=1e12)]
_Usage = Annotated[float, Meta(ge=0, le=100)]
# And of records, which anybody may read long after: a time is one of the calendar, which ends with the year 9999, and
# sums are finite. Wide enough for all that a router makes of what it believes of bridges.
_At = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
_Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]
_Sum = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
# And what is remembered of them has a size: ids are 26 characters and 16 bytes.
_Name = Annotated[str, Meta(max_length=512)]
_Id = Annotated[str, Meta(max_length=64)]
_NsId = Annotated[bytes, Meta(max_length=64)]


class MessageInvalid(PrefixbusError):
    """A message of another version, or none of ours."""

    code = "message_invalid"
    status = 400


def _check_keys(keys: bytes) -> None:
    """Called by the decoder, which turns the error into a MessageInvalid: nothing of a bad message is ever applied."""
    if len(keys) % 8:
        raise ValueError("keys are not whole u64s")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What a bridge needs to run a request; the router passes it on as bytes.

    `params` is the JSON object of sampling parameters for the engine; `kind` is `chat` or `completions`, the form of
    the client's chunks. `chat` is the JSON object of what else the engine's chat endpoint is given; empty for a request
    by token ids alone. `resumable`: the client wants each frame's tokens, to go on elsewhere if this worker is lost;
    the last `said_tokens` of `tokens` are of the answer: it goes on after them. `media` stand in `tokens` in order
    (blockkeys.Placed). `uncacheable`: nobody can say what is in it, so it shares nothing with any other request; its
    `tokens` are about what the engine will have."""

    v: int
    request_id: str
    client_request_id: str
    reply: str
    namespace: Namespace
    tokens: bytes
    kind: str
    params: bytes
    include_usage: bool
    created_at: int
    deadline_at: float
    traceparent: str = ""
    prefix_class: str = ""
    chat: bytes = b""
    resumable: bool = False
    said_tokens: _Count = 0
    media: list[tuple[_Count, _Count, _NsId]] = []
    uncacheable: bool = False


class Route(msgspec.Struct, frozen=True, array_like=True):
    """Tokenizer -> router: everything the decision looks at, and the job as opaque bytes (an encoded `Job`).

    `serves` is the digest of the model revision that the tokens are for; `keys` are all full blocks' keys; `kind` and
    `created_at` are the job's. `segments` are 12 bytes each: where it ends, in tokens (u32 LE), and its keyed digest
    (u64 LE), which other prompts of the namespace and of its other revisions can be compared by. `sending` counts the
    client's sendings of this request, from 1. `adapter` is that of `model`, empty for none. `resumable` is the
    job's."""

    v: int
    request_id: str
    client_request_id: str
    tenant: str
    model: str
    serves: str
    ns_id: bytes
    keys: bytes
    prompt_tokens: int
    output_tokens: int
    prefix_class: str
    reply: str
    deadline_at: float
    job: bytes
    kind: str = "chat"
    created_at: int = 0
    template_version: str = ""
    tokenizer_revision: str = ""
    segments: bytes = b""
    sending: int = 1
    adapter: str = ""
    resumable: bool = False


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Router -> directory: who holds how much of this chain?"""

    v: int
    ns_id: bytes
    keys: bytes

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Level(msgspec.Struct, frozen=True, array_like=True):
    """These workers hold the first `depth` blocks, and no more, in this tier (`gpu`, or `host`: to be loaded first)."""

    depth: Annotated[int, Meta(ge=1, le=1 << 40)]
    workers: Annotated[list[_Name], Meta(max_length=NAMED_MAX)]
    tier: _Name = "gpu"


class Holdings(msgspec.Struct, frozen=True, array_like=True):
    """Directory -> router: levels, deepest first, each worker once a tier, at its own depth; announced blocks count as
    held in the GPU tier.

    `incomplete` are workers whose story has holes. `trust` is the share (0 to 1) of what is said of a worker in this
    namespace that should be expected to come true, holes in its story included; 1 if it is not named. `announced` says
    how many blocks of a worker's depth are announced and not there yet. `replica` answered, having applied the event
    stream up to `stream_seq`. `refused` says why it does not know, empty where it does."""

    v: int
    levels: Annotated[list[Level], Meta(max_length=NAMED_MAX)]
    incomplete: Annotated[list[_Name], Meta(max_length=NAMED_MAX)] = []
    trust: Annotated[dict[_Name, _Usage], Meta(max_length=NAMED_MAX)] = {}
    replica: _Name = ""
    stream_seq: _Count = 0
    announced: Annotated[dict[_Name, _Count], Meta(max_length=NAMED_MAX)] = {}
    refused: _Name = ""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """Router -> bridge: start this, if your queue is what I think it is.

    The bridge refuses when its incarnation is another, its queue is over `max_queue_ms`, or it is past
    `accept_by_at`. It makes the blocks' keys itself, from the job's tokens. `is_warm` requests may not take the slots
    kept for cold ones; one that was not begun after `max_wait_ms` is given back to be chosen anew (0: it may wait).
    Where fewer than `min_held_blocks` of the prompt are held, or about to be, it is refused before any work."""

    v: int
    request_id: str
    attempt: int
    incarnation: int
    max_queue_ms: float
    accept_by_at: float
    prefill_ms: float
    predicted_tokens: int
    decision: str
    ns_id: bytes
    job: bytes
    is_warm: bool = False
    max_wait_ms: float = 0.0
    min_held_blocks: int = 0


class Accept(msgspec.Struct, frozen=True, array_like=True):
    """Bridge -> router: taken (`refused` is empty), or not and why, with the queue as it truly is.

    `held_blocks` is how deep the chain is in this worker's cache by the bridge's own index; where `refused` is
    `stale_hit`, with what requests in hand there are about to add. It is `waited` where a warm request taken earlier
    was not begun within `max_wait_ms`, and is given back."""

    v: int
    request_id: str
    attempt: int
    worker: str
    incarnation: int
    refused: str
    queue_ms: _QueueMs
    held_blocks: _Count


class Dispatched(msgspec.Struct, frozen=True, array_like=True):
    """Router -> routers and directory: this dispatch was sent; its blocks will be there, its prefill is queued.

    `expires_at` bounds how long it is believed without an outcome. An empty `worker` takes the announcement back.
    `held_blocks` is the deepest that any worker held when it was decided, `shared_blocks` how much of that most traffic
    of the namespace starts with. `is_warming`: no request's, but an order's (`WarmOrder`): no work is queued, and what
    it will leave behind is not to be counted on, since it gives way to any request. `renews`: it was announced before,
    and its worker has not begun its answer yet."""

    v: int
    request_id: str
    attempt: int
    router: str
    worker: str
    incarnation: int
    prefill_ms: float
    ns_id: bytes
    keys: bytes
    expires_at: float
    prefix_class: str = ""
    held_blocks: int = 0
    shared_blocks: int = 0
    is_warming: bool = False
    renews: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class WarmOrder(msgspec.Struct, frozen=True, array_like=True):
    """Directory -> routers: whoever has the tokens of this prefix, have this worker compute it while it is idle.

    The prefix is the chain of `blocks` blocks whose last has the key `key`. `kind` is `rewarm` (the worker lost what it
    had, or is new) or `copy` (one more worker should have it); `benefit` the ms of prefill that it should save for each
    token of KV it takes. Round 0 is for the router that dispatched the prefix last, later ones for any that has it."""

    v: int
    ns_id: bytes
    key: int
    blocks: int
    worker: str
    incarnation: int
    kind: str
    benefit: float
    round: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A bridge's heartbeat: its lease, its load, and the last block event it has published.

    `event_seqs` names the last event for each shard of the directory, `event_seq` that for shard 0. `accepted` are the
    requests taken since the previous report (their prefill is inside `queue_ms` from here on).
    `incomplete`: events of the engine were lost for good, so it may hold more than the bridge knows and tells.
    `worker_class` names machines that compute alike, `pool` whom they serve; `reserved_slots` of the slots are kept for
    requests that are not warm there."""

    v: int
    worker: str
    incarnation: int
    report: int
    event_seq: int
    model: _Name
    serves: _Name
    queue_ms: _QueueMs
    running: _Count
    waiting: _Count
    slots: _Count
    kv_usage: _Usage
    kv_tokens: _Count
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    draining: bool
    accepted: list[_Id]
    worker_class: _Name = ""
    pool: _Name = ""
    reserved_slots: _Count = 0
    event_seqs: list[int] = []
    incomplete: bool = False

    def seq_for(self, shard: int, shards: int) -> int:
        """The last event for this one of so many shards. :raises MessageInvalid: it is told for another number."""
        seqs = self.event_seqs or [self.event_seq]
        if len(seqs) != shards:
            raise MessageInvalid(f"{self.worker} publishes for {len(seqs)} shards of the directory, not for {shards}.")
        return seqs[shard]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A run of blocks appeared in a tier; `parent` is the key before the first, 0 at the start of a chain."""

    ns_id: _NsId
    parent: int
    keys: bytes
    tier: int = GPU

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tier's last copy of each of these blocks went; the other tier keeps its own."""

    ns_id: _NsId
    keys: bytes
    tier: int = GPU

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The worker's whole GPU cache went; with `host`, all that its host store held went too."""

    host: bool = False


class KvEvents(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Block changes of one worker, in order; `seq` counts its messages to one shard from 1 within an incarnation."""

    v: int
    worker: str
    incarnation: int
    seq: int
    ops: list[Stored | Removed | Cleared]


class KvDump(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Part `part` of `parts` of all that the worker holds of a shard, true for the moment after event `seq`."""

    v: int
    worker: str
    incarnation: int
    seq: int
    dump_id: int
    part: int
    parts: int
    runs: list[Stored]


class DumpRequest(msgspec.Struct, frozen=True, array_like=True):
    """Directory -> bridge (`ctl.<worker>.dump`): write all you hold of this shard into the stream."""

    v: int
    incarnation: int
    reason: str
    shard: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """Router -> bridge (`ctl.<worker>.abort`): stop this attempt and publish nothing more of it."""

    v: int
    request_id: str
    attempt: int


class ControlReply(msgspec.Struct, frozen=True, array_like=True):
    """Bridge -> whoever asked: done (`error` is empty), or the sentence that says why not."""

    v: int
    worker: str
    incarnation: int
    error: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """How an attempt ended (JSON, `pb.v1.outcome.<worker>.<request id>`).

    Or how a router ended a request itself (`pb.v1.ended.<request id>`): then `worker` is the last that was tried, if
    any, and nothing was measured but `total_ms`, from the request's arrival there.

    `status` is ok, error or cancelled; `error` a stable code. `cached_tokens` is the engine's own count, null when it
    gave none. `prefill_tokens` is what it had to compute. Times are measured at the bridge, from acceptance.
    `traceparent` is the client's trace (W3C Trace Context), empty if it named none.

    `ahead_own_tokens` and `ahead_others_tokens` are its turn in the fair queue: the prefill tokens that the engine was
    given while it waited there, of its own tenant and of others (0: it did not wait; null: its turn never came).

    `engine_differs_at` is where the engine's own tokens of the prompt begin to differ from ours, where it made them
    itself and they do; then `cached_tokens` is null, since what it took is no prefix that anybody predicted."""

    v: int
    request_id: str
    client_request_id: str
    attempt: _Count
    worker: str
    incarnation: _Count
    tenant: str
    model: str
    ns_id: str
    status: str
    error: str
    prefix_class: str
    decision: str
    prompt_tokens: _Count
    predicted_tokens: _Count
    cached_tokens: _Count | None
    prefill_tokens: _Count | None
    output_tokens: _Count
    queue_wait_ms: _Figure | None
    ttft_ms: _Figure | None
    total_ms: _Figure
    ended_at: _At
    traceparent: str = ""
    ahead_own_tokens: _Count | None = None
    ahead_others_tokens: _Count | None = None
    adapter: str = ""
    engine_differs_at: _Count | None = None


class CandidateRecord(msgspec.Struct, frozen=True):
    """One worker as the decision saw it; all terms in ms. `rho` and the KV tokens are what they were made from.

    `speed` multiplies the prefill model of `worker_class`; `held_blocks` is what the directory said, `announced_blocks`
    of them not there yet, and `trust` the share of them that was believed. `pull_source` could give `pull_tokens` in
    `pull_ms`; `transfer_ms` is 0 if it would not be asked. For people: `net_gain_ms` = `saved_prefill_ms` -
    `wait_ms` - `transfer_ms` - `imbalance_penalty_ms`, the order of which is the order of `cost_ms`."""

    worker: str
    cached_tokens: _Count
    queue_ms: _Figure
    prefill_ms: _Figure
    interference_ms: _Figure
    memory_wait_ms: _Figure
    new_kv_ms: _Figure
    externality_ms: _Figure
    home_bonus_ms: _Figure
    ttft_ms: _Figure
    cost_ms: _Figure
    rho: _Figure = 0.0
    pinned_tokens: _Sum = 0
    free_tokens: _Sum = 0
    worker_class: str = ""
    speed: _Figure = 1.0
    held_blocks: _Count = 0
    announced_blocks: _Count = 0
    trust: _Figure = 1.0
    only_reserved: bool = False
    pull_source: str = ""
    pull_tokens: _Count = 0
    pull_ms: _Figure = 0.0
    transfer_ms: _Figure = 0.0
    saved_prefill_ms: _Figure = 0.0
    imbalance_penalty_ms: _Figure = 0.0
    net_gain_ms: _Figure = 0.0
    decode_ms: _Figure = 0.0
    wait_ms: _Figure = 0.0


class ShadowRecord(msgspec.Struct, frozen=True):
    """What a policy that does not act would have chosen; fields as in `DecisionRecord`, which has the inputs that are
    the same for both. Its candidates may be others, and it may believe them less."""

    policy: str
    policy_digest: str
    selected_worker: str
    decision: str
    predicted_cached_tokens: _Count
    cost_ms: _Figure
    candidate_workers: list[CandidateRecord] = []
    policy_weights: dict[str, str | float | None] = {}
    prefill_models: dict[str, list[_Figure]] = {}
    max_queue_ms: _Figure = 0.0
    max_wait_ms: _Figure = 0.0
    is_warm: bool = False
    min_held_blocks: _Count = 0


class DecisionRecord(msgspec.Struct, frozen=True):
    """One decision, and why (JSON, `pb.v1.journal.<request id>`); joined with `Outcome` by request id and attempt.

    `candidate_workers` are in the order in which they would be tried. From `output_tokens` on: the decision's inputs,
    so that it can be replayed; `held_blocks` is the deepest any available worker holds. `prefill_models` are the
    coefficients by worker class, `prefill_model` those of the chosen one; `policy_digest` is of the policy's content.
    `rollout` says whether the policy was the `active` one or the `canary`; `shadow` what another would have done.
    `directory` is the replica that answered, `stream_seq` the last event it had applied (empty and 0: nobody did).
    `segments` say where prompts differ (where each ends, in tokens, and 16 hex digits that stand for what is in it);
    they can be compared within a tenant's scope alone."""

    v: int
    request_id: str
    client_request_id: str
    attempt: _Count
    router: str
    model: str
    tenant: str
    prefix_class: str
    prefix_key: str
    prompt_tokens: _Count
    policy: str
    selected_worker: str
    predicted_cached_tokens: _Count
    decision: str
    candidate_workers: list[CandidateRecord]
    excluded: dict[str, str]
    decided_at: _At
    output_tokens: _Count = 0
    block_size: _Count = 0
    home: str = ""
    blind: bool = False
    ordinal: _Count = 0
    shared_blocks: _Count = 0
    held_blocks: _Count = 0
    max_queue_ms: _Figure = 0.0
    prefill_model: list[_Figure] = []
    policy_weights: dict[str, str | float | None] = {}
    code_version: str = ""
    prefill_models: dict[str, list[_Figure]] = {}
    policy_digest: str = ""
    rollout: str = "active"
    has_waited: bool = False
    fleet_rho: _Figure = 0.0
    directory: str = ""
    stream_seq: _Count = 0
    max_wait_ms: _Figure = 0.0
    is_warm: bool = False
    shadow: ShadowRecord | None = None
    template_version: str = ""
    tokenizer_revision: str = ""
    segments: list[tuple[_Count, str]] = []
    min_held_blocks: _Count = 0
    adapter: str = ""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the record (JSON, `pb.v1.audit.<service>.<id>`): never prompt text.

    `kind` is `reuse` (a request ran and may have reused `tokens` of its namespace's cache), `warm` (an idle worker
    computed a prefix that was used before, for no request), `forged_reply`, `refused_namespace`, or `wrong_hit` (the
    engine says that it reused `tokens`, and its events do not tell of that many in the namespace)."""

    v: int
    kind: str
    at: float
    service: str
    tenant: str
    scope: str = ""
    ns_id: str = ""
    request_id: str = ""
    worker: str = ""
    tokens: int = 0
    decision: str = ""
    detail: str = ""


class Captured(msgspec.Struct, frozen=True):
    """A request as its tenant sent it (JSON, `pb.v1.capture.<tenant>.<request id>`), of a tenant that asked for this.

    `body` is the client's own; `prefix_class` its header (empty: it gave none). When it came is in its id."""

    v: int
    request_id: str
    client_request_id: str
    tenant: str
    scope: str
    model: str
    prefix_class: str
    body: msgspec.Raw


T = TypeVar("T")


class Wire(Generic[T]):
    """Encoder and typed decoder of one kind of message, made once.

    `decode` raises MessageInvalid for bytes that are not of this type and version: the sender is named by the subject,
    so the error only says what was wrong with the bytes."""

    def __init__(self, kind: type[T] | object, *, json: bool = False) -> None:
        self.encode = msgspec.json.Encoder().encode if json else msgspec.msgpack.Encoder().encode
        self._decode = msgspec.json.Decoder(kind).decode if json else msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: bytes) -> T:
        try:
            message: T = self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise MessageInvalid(str(exc)) from exc
        if getattr(message, "v", VERSION) != VERSION:
            raise MessageInvalid(f"version {getattr(message, 'v', None)} is not {VERSION}")
        return message


JOB: Wire[Job] = Wire(Job)
ROUTE: Wire[Route] = Wire(Route)
LOOKUP: Wire[Lookup] = Wire(Lookup)
HOLDINGS: Wire[Holdings] = Wire(Holdings)
DISPATCH: Wire[Dispatch] = Wire(Dispatch)
ACCEPT: Wire[Accept] = Wire(Accept)
DISPATCHED: Wire[Dispatched] = Wire(Dispatched)
WARM_ORDER: Wire[WarmOrder] = Wire(WarmOrder)
LOAD: Wire[Load] = Wire(Load)
KV: Wire[KvEvents | KvDump] = Wire(KvEvents | KvDump)
DUMP_REQUEST: Wire[DumpRequest] = Wire(DumpRequest)
ABORT: Wire[Abort] = Wire(Abort)
CONTROL_REPLY: Wire[ControlReply] = Wire(ControlReply)
OUTCOME: Wire[Outcome] = Wire(Outcome, json=True)
DECISION: Wire[DecisionRecord] = Wire(DecisionRecord, json=True)
FACT: Wire[Fact] = Wire(Fact, json=True)
CAPTURED: Wire[Captured] = Wire(Captured, json=True)
