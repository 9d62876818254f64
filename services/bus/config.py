"""One TOML file and environment overrides, decoded and checked into one frozen Struct.

`PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS=20` overrides `[router] lookup_timeout_ms`. An unknown key or a bad value is an
error that names it. Secrets are never here: they are files in `creds/`, by name.

Owns: every default, explained where it stands.   Must not know: what a service does with its section."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import ConfigInvalid, told_by_msgspec

ENV_PREFIX = "PREFIXBUS_"
# Variables of the command line, which are not overrides.
OTHER_VARIABLES = frozenset({"PREFIXBUS_TOKEN", "PREFIXBUS_STATE"})

_Positive = Annotated[int, Meta(gt=0)]
_PositiveMs = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the config file."""


class NatsSection(Section, frozen=True):
    """Where the bus is."""

    url: str = "nats://127.0.0.1:4222"
    # Written into the server's configuration; the largest internal message is a Route with 2M tokens' ids.
    max_payload: _Positive = 8 * 1024 * 1024


class TlsSection(Section, frozen=True):
    """Certificates, as PEM files relative to the config file. With a certificate, the NATS server and every HTTP port
    of ours speak TLS alone. Names are checked: it must be valid for the addresses that are connected to (127.0.0.1)."""

    certificate: str = ""
    key: str = ""
    # Whose certificates services and the command line trust; the system's CAs when empty.
    ca: str = ""


class HttpSection(Section, frozen=True):
    """Where each service serves /metrics, /healthz and /readyz; port 0 takes a free one and says which in `run/`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class LimitsSection(Section, frozen=True):
    """What a client may send."""

    max_body_bytes: _Positive = 4 * 1024 * 1024
    max_header_bytes: _Positive = 16 * 1024
    # A request without Pb-Deadline gets this one.
    default_deadline_s: _PositiveMs = 300.0
    # Deadlines are absolute; a client's clock may be this far off (DESIGN 2).
    clock_skew_s: Annotated[float, Meta(ge=0)] = 1.0


class AdapterSection(Section, frozen=True):
    """A LoRA adapter, which every engine of its model serves; clients ask for it as the model `MODEL:ADAPTER`.

    `revision` is a digest of the adapter's files (as `sha256:...`): two adapters, or two revisions of one, share no KV.
    `engine_name` is what the engine calls it (vLLM: `--lora-modules NAME=PATH`), the adapter's own name if empty."""

    revision: Annotated[str, Meta(min_length=1)]
    engine_name: str = ""


class MeasuredSection(Section, frozen=True):
    """What `prefixbus calibrate` measured of an engine of this model: it prices prefills instead of `profile`, until
    the workers have been measured themselves. Prefill of n uncached tokens of a prompt of L takes `fixed_ms` +
    `token_ms`*n + `attention_ms`*n*(L - n/2)."""

    fixed_ms: _PositiveMs
    token_ms: Annotated[float, Meta(ge=0)]
    attention_ms: Annotated[float, Meta(ge=0)]
    # What each token of the contexts that are decoded in a step adds to it.
    decode_context_token_ms: Annotated[float, Meta(ge=0)]
    # Of the engine that was measured: another than the model's is an error.
    block_size: _Positive
    # What a worker has whose engine does not say; 0: unknown.
    kv_tokens: Annotated[int, Meta(ge=0)] = 0


class ModelSection(Section, frozen=True):
    """A served model: what its tokens are made with, and the revisions that must agree before KV is shared.

    `tokenizer` is a local Hugging Face tokenizer directory, relative to the config file: a tokenizer.json, or a
    vocabulary (vocab.json with merges.txt, or vocab.txt) and a tokenizer_config.json that names its `tokenizer_class`.
    SentencePiece files (tokenizer.model) work where the packages that read them are installed; elsewhere save the
    tokenizer once with transformers' `save_pretrained`, which writes a tokenizer.json. Code from the directory is never
    run, and nothing is downloaded.

    Revisions are digests of content: `model_revision` of the weights, `position_digest` of what says how positions
    enter KV. `tokenizer_revision` and `template_version` are checked against the files by the tokenizer when set."""

    tokenizer: str
    model_revision: str
    tokenizer_revision: str = ""
    template_version: str = ""
    position_digest: str = ""
    kv_dtype: str = "bfloat16"
    max_model_len: _Positive = 8192
    block_size: _Positive = 32  # what vLLM on CPU needs
    # Which prefill profile (router.cost.PROFILES) prices this model until its workers have been measured.
    profile: str = "h100-8b"
    measured: MeasuredSection | None = None
    # The engines' own --tool-call-parser and --reasoning-parser, empty if they have none: with a tool parser, requests
    # with tools go to the engine's chat endpoint, with a reasoning parser all chats do. Without a tool parser a model
    # answers tools in its own words, and tool_choice cannot force one.
    tool_parser: str = ""
    reasoning_parser: str = ""
    # A digest of what makes tokens of images (the processor's files); empty: the model takes text alone.
    media_revision: str = ""
    # What the chat template prints for an image, one token of the tokenizer; and how many tokens the engine makes of
    # each image, if it is always the same number. With 0 nothing behind a prompt's first image is found again.
    image_token: str = "<image>"
    image_tokens: Annotated[int, Meta(ge=0)] = 0
    # LoRA adapters by name. All workers of the model must serve these: the set is part of what routers compare.
    adapters: dict[str, AdapterSection] = {}

    def engine_names(self) -> dict[str, str]:
        """What the engine calls each adapter."""
        return {name: adapter.engine_name or name for name, adapter in self.adapters.items()}


class TokenizerSection(Section, frozen=True):
    """Limits of the tokenizer."""

    # Token ids remembered per tenant, in bytes (4 a token).
    memo_bytes_per_tenant: _Positive = 64 * 1024 * 1024
    # Requests in work at once in one copy; more wait, in order.
    max_in_work: _Positive = 256


class DirectorySection(Section, frozen=True):
    """Shards, leases, memory and snapshots of the directory."""

    # Namespaces are spread over so many shards, each with replicas of its own. Bridges, routers and directories must
    # agree: to change it, stop them all.
    shards: Annotated[int, Meta(ge=1, le=64)] = 1

    suspect_after_s: _PositiveMs = 0.6
    lost_after_s: _PositiveMs = 3.0
    # About how often one of a shard's replicas writes a snapshot: what a restarted one has to repeat, at most.
    snapshot_every_s: _PositiveMs = 60.0
    # What the index of one shard may take; over it, the entries of the least useful namespaces go first.
    memory_bytes: Annotated[int, Meta(ge=64 * 1024 * 1024)] = 1024 * 1024 * 1024
    namespaces_max: _Positive = 65536
    # Of one tenant, whose clients' salts make as many as they like: over it its own least useful ones go.
    namespaces_per_tenant: _Positive = 8192
    # Entries that nothing touched for this long lose trust slowly.
    entries_fresh_s: _PositiveMs = 3600.0


class RouterSection(Section, frozen=True):
    """How long the router waits for others, and whom it may ask."""

    lookup_timeout_ms: _PositiveMs = 100.0
    # A bridge answers within about 1 ms; a lost one costs this much before the next candidate is tried.
    accept_timeout_ms: _PositiveMs = 500.0
    max_attempts: Annotated[int, Meta(ge=1, le=16)] = 4
    suspect_after_s: _PositiveMs = 0.6
    lost_after_s: _PositiveMs = 3.0
    # A request is refused as overload, and told when to come again, if every worker has more prefill waiting than this
    # or than its deadline allows. Half of the 60 s that clients usually wait: who waits longer often gives up, and
    # what was computed for it by then is lost.
    overload_queue_ms: _PositiveMs = 30_000.0
    # The pools that a tenant's requests may go to; one that is not named here may go to any.
    pools: dict[str, list[str]] = {}


class BridgeSection(Section, frozen=True):
    """Limits of one worker."""

    # Requests given to the engine at once; beyond it dispatches are refused with the true queue.
    slots: _Positive = 256
    # Uncached prompt tokens that the engine is given at once, or one request; the rest waits, fair between tenants. Two
    # of vLLM's default steps keep the engine busy; more makes newcomers wait for what is there already.
    prefill_window_tokens: _Positive = 16384
    # Share of the slots, rounded down, that requests which are there for their hit leave to those that find nothing.
    cold_reserve: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    heartbeat_s: _PositiveMs = 0.2
    keepalive_s: _PositiveMs = 1.0
    # Names machines that compute alike: they share one learned prefill model. PREFIXBUS_BRIDGE__WORKER_CLASS for one.
    worker_class: Annotated[str, Meta(max_length=64)] = ""
    # Whom this worker serves, if `[router] pools` limits tenants.
    pool: Annotated[str, Meta(max_length=64)] = ""
    # Whether tenants are told, with an answer's first chunk, which worker it comes from.
    tells_worker: bool = False


class PlacementSection(Section, frozen=True):
    """What idle workers compute before a request asks for it. The directory orders it, routers have the tokens, bridges
    carry it out and give it up for any request. Directories and bridges must agree on `idle_share`."""

    # A prefix that so many workers hold is not copied further; below 2 nothing is copied.
    copies_max: Annotated[int, Meta(ge=0, le=64)] = 5
    # The most of a worker's KV that copies may take.
    copies_share: _Share = 0.1
    # The most of a worker's KV that it gets back after it joined, restarted or was reset; 0: none.
    rewarm_share: _Share = 0.5
    # A worker is idle with nothing waiting and at most this share of its slots running.
    idle_share: _Share = 0.05
    # The engine is given so many tokens more at a time: a request that comes waits for one such step at most.
    step_tokens: _Positive = 1024
    # Token ids of popular prefixes that a router remembers, in bytes (4 a token), and of one tenant among them.
    tokens_bytes: Annotated[int, Meta(ge=0)] = 64 * 1024 * 1024
    tokens_bytes_per_tenant: Annotated[int, Meta(ge=0)] = 16 * 1024 * 1024


class GatewaySection(Section, frozen=True):
    """The OpenAI-compatible HTTP interface. With a certificate in [tls] it speaks TLS alone, as every other port."""

    host: str = "127.0.0.1"
    # Copies on one machine share it.
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    # API keys in use at once: each is a connection to the bus, closed when it was idle for `idle_s`. A quarter of them
    # may be one tenant's.
    max_keys: _Positive = 256
    idle_s: _PositiveMs = 60.0
    # Requests of one key in progress; more are refused with 429.
    max_requests_per_key: _Positive = 256
    # The body of a request must be here by then, and a client take what is written to it. Deadlines and the largest
    # body are those of [limits].
    read_timeout_s: _PositiveMs = 30.0
    write_timeout_s: _PositiveMs = 60.0
    # A connection on which no request has begun for that long, whether it sends nothing or its headers by and by, is
    # closed. Longer than proxies keep theirs (60 s), so that they close them, and never while they use one.
    keep_alive_s: _PositiveMs = 75.0
    # A stream whose first token is not there by then gets its headers, and comments: proxies often give up after 60 s.
    # Until then an error has its HTTP status; after it, it is an event in the stream.
    headers_after_s: _PositiveMs = 15.0
    # What may wait for one slow reader; over it its request is cancelled.
    buffer_bytes: _Positive = 1024 * 1024


class CaptureSection(Section, frozen=True):
    """Whose requests are kept as they came, prompts and all, for `prefixbus replay --resend`; by default nobody's.

    What is kept is readable with the operator's key. `prefixbus provision` (or the next `up`) brings the stream to
    these bounds; over either the oldest go first. The bytes are of all these tenants together, since a stream has no
    bound for some of its subjects: one that sends much shortens how long the others' requests are kept."""

    tenants: tuple[str, ...] = ()
    ttl_s: Annotated[float, Meta(ge=1)] = 24 * 3600.0
    # At most what the server's store has left beside the other streams (cluster/natsconf.py).
    max_bytes: Annotated[int, Meta(gt=0, le=256 * 1024 * 1024)] = 128 * 1024 * 1024


class PolicySection(Section, frozen=True):
    """Which policy routers start with; `prefixbus policy` changes it without a restart."""

    name: str = "prefix-aware"


class Config(Section, frozen=True):
    """All of it. `models` maps the name clients use to its section."""

    nats: NatsSection = NatsSection()
    tls: TlsSection = TlsSection()
    http: HttpSection = HttpSection()
    limits: LimitsSection = LimitsSection()
    models: dict[str, ModelSection] = {}
    tokenizer: TokenizerSection = TokenizerSection()
    directory: DirectorySection = DirectorySection()
    router: RouterSection = RouterSection()
    bridge: BridgeSection = BridgeSection()
    placement: PlacementSection = PlacementSection()
    gateway: GatewaySection = GatewaySection()
    policy: PolicySection = PolicySection()
    capture: CaptureSection = CaptureSection()


def asked_name(model: str, adapter: str) -> str:
    """What clients call a model (`adapter` empty) or an adapter of it, in subjects, bodies and answers."""
    return f"{model}:{adapter}" if adapter else model


def parse(text: str, environ: Mapping[str, str], source: str = "config.toml") -> Config:
    """The config that a TOML text and the environment's overrides make.

    :raises ConfigInvalid: not TOML, an unknown key, or a value of the wrong kind or range; the error names it."""
    try:
        tree: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigInvalid(str(exc), field=source, remedy="Correct the file's syntax.") from exc
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES:
            _override(tree, name, environ[name])
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as exc:
        what, where = told_by_msgspec(exc)
        remedy = f"Correct it in {source} or its environment override."
        raise ConfigInvalid(what, field=where or source, remedy=remedy) from exc
    _check_names(config.models)
    for name, section in config.models.items():
        if section.measured is not None and section.measured.block_size != section.block_size:
            raise ConfigInvalid(
                f"was measured with blocks of {section.measured.block_size} tokens, not {section.block_size}.",
                field=f"models.{name}.measured",
                remedy="Run prefixbus calibrate again, or take the section out.",
            )
    return config


def load(path: Path, environ: Mapping[str, str]) -> Config:
    """:raises ConfigInvalid: the file cannot be read, or see `parse`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigInvalid(str(exc), field=path.name, remedy="Run `prefixbus init`.") from exc
    return parse(text, environ, path.name)


def _check_names(models: Mapping[str, ModelSection]) -> None:
    """:raises ConfigInvalid: two things would be asked for by one name."""
    asked = set(models)
    for model, section in models.items():
        at_engine = {model}
        for adapter, name in section.engine_names().items():
            field = f"models.{model}.adapters.{adapter}"
            if not adapter or asked_name(model, adapter) in asked:
                raise ConfigInvalid(
                    f"{asked_name(model, adapter)!r} is the name of something else.", field=field, remedy="Rename it."
                )
            if name in at_engine:
                raise ConfigInvalid(
                    f"{name!r} is what the engine calls something else.", field=field, remedy="Change its engine_name."
                )
            asked.add(asked_name(model, adapter))
            at_engine.add(name)


def _override(tree: dict[str, Any], name: str, value: str) -> None:
    """Puts PREFIXBUS_A__B=value at tree[a][b]; the value is TOML when it parses as such, text otherwise."""
    path = name.removeprefix(ENV_PREFIX).split("__")
    if len(path) < 2:
        raise ConfigInvalid("is not an override.", field=name, remedy="Overrides are PREFIXBUS_SECTION__KEY.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    node = tree
    for key in path[:-1]:
        child = node.setdefault(_existing(node, key), {})
        if not isinstance(child, dict):
            raise ConfigInvalid(f"{key} is a value, not a table.", field=name, remedy="Remove the override.")
        node = child
    node[_existing(node, path[-1])] = parsed


def _existing(node: Mapping[str, Any], key: str) -> str:
    """The table's own spelling of a key: variables are upper case, names of models need not be lower case."""
    return next((known for known in node if known.lower() == key.lower()), key.lower())
