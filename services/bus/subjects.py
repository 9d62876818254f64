"""Every subject, stream, bucket and header name, built and parsed in one place.

    pb.v1.infer.<tenant>.<model>[.<scope>]   a client's request (tenant and scope come from here alone)
    pb.v1.cancel.<tenant>.<request id>       cancel it; heard by one tokenizer
    pb.v1.cancelled.<tenant>.<request id>    tokenizer -> tokenizers, routers, bridges: somebody cancelled it; empty
    pb.v1.route.<model>                      tokenizer -> router
    pb.v1.dir.lookup.<shard>                 router -> directory
    pb.v1.work.<worker>                      router -> bridge: a dispatch
    pb.v1.ctl.<worker>.<verb>                to a bridge: ping, dump, reset, abort, status
    pb.v1.load.<worker>                      bridge -> all: heartbeat and load
    pb.v1.kv.<shard>.<worker>                bridge -> directory: block events        (stream KV_EVENTS)
    pb.v1.dispatched                         router -> routers, directory: a dispatch was sent
    pb.v1.warm                               directory -> routers: a worker should have this prefix
    pb.v1.outcome.<worker>.<request id>      bridge -> routers, directory: it ended   (stream JOURNAL)
    pb.v1.journal.<request id>               router: the decision, and why            (stream JOURNAL)
    pb.v1.ended.<request id>                 router: it ended it, as an outcome       (stream JOURNAL)
    pb.v1.audit.<service>.<id>               facts for the record                     (stream AUDIT)
    pb.v1.claim.<request id>                 bridge: this attempt answers; router: none will (stream CLAIMS)
    pb.v1.capture.<tenant>.<request id>      tokenizer: a request as its tenant sent it (stream CAPTURE)

Must not know: NATS connections.   Source: DESIGN section 2."""

import re
from typing import NamedTuple

from .errors import BadSubject

PREFIX = "pb.v1"

STREAM_KV_EVENTS = "KV_EVENTS"
STREAM_JOURNAL = "JOURNAL"
STREAM_AUDIT = "AUDIT"
STREAM_CLAIMS = "CLAIMS"
STREAM_CAPTURE = "CAPTURE"
BUCKET_WORKERS = "WORKERS"
BUCKET_POLICIES = "POLICIES"
BUCKET_DIRECTORY = "DIRECTORY"

# The names that the KV convention gives to a bucket's stream (NATS ADR-8).
STREAM_WORKERS = f"KV_{BUCKET_WORKERS}"
STREAM_POLICIES = f"KV_{BUCKET_POLICIES}"
# And that of object stores (ADR-20).
STREAM_DIRECTORY = f"OBJ_{BUCKET_DIRECTORY}"

# How long it is known which attempt answered a request.
CLAIMS_KEPT_S = 900.0

# What each service uses; it does not start without.
STREAMS_OF = {
    "tokenizer": (STREAM_AUDIT, STREAM_CAPTURE),
    "directory": (STREAM_KV_EVENTS, STREAM_DIRECTORY),
    "router": (STREAM_JOURNAL, STREAM_POLICIES),
    "worker_bridge": (STREAM_KV_EVENTS, STREAM_JOURNAL, STREAM_AUDIT, STREAM_CLAIMS, STREAM_WORKERS),
    "auditor": (STREAM_AUDIT,),
}

HEADER_SEQ = "Pb-Seq"
HEADER_ATTEMPT = "Pb-Attempt"
HEADER_FINAL = "Pb-Final"
HEADER_ERROR = "Pb-Error"
HEADER_REQUEST_ID = "Pb-Request-Id"
HEADER_DEADLINE = "Pb-Deadline"
HEADER_PREFIX_CLASS = "Pb-Prefix-Class"
# Which sending of one request this is, from 1: a client that was not answered sends it again.
HEADER_SENDING = "Pb-Sending"
# With an answer's first chunk: what was decided for it, how long its prompt is, and how much of that was expected to
# come from the cache.
HEADER_DECISION = "Pb-Decision"
HEADER_PROMPT_TOKENS = "Pb-Prompt-Tokens"
HEADER_PREDICTED_TOKENS = "Pb-Predicted-Tokens"
# With it, too, where the operator allows it.
HEADER_WORKER = "Pb-Worker"
# With the end of an answer whose worker was lost: whether another one can go on with it.
HEADER_RESUME = "Pb-Resume"
HEADER_TRACEPARENT = "traceparent"
HEADER_SERVICE_ERROR = "Nats-Service-Error"
HEADER_SERVICE_ERROR_CODE = "Nats-Service-Error-Code"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_MODEL_TOKEN = re.compile(r"(?:[A-Za-z0-9-]|_[0-9A-F]{2})+\Z")
_MODEL_TOKEN_MAX = 384


class InferSubject(NamedTuple):
    """What a request's subject says. `scope` is empty for the tenant-wide scope."""

    tenant: str
    model: str
    scope: str


def is_token(text: str) -> bool:
    """Whether `text` may stand as a tenant, scope, worker or request id: [A-Za-z0-9_-]{1,64}."""
    return _TOKEN.match(text) is not None


def token(text: str, field: str) -> str:
    """`text` itself if it may stand in a subject.

    :raises BadSubject: it may not; the error names `field`."""
    if not is_token(text):
        raise BadSubject(
            f"{text[:80]!r} cannot stand in a subject.", field=field, remedy="Use 1 to 64 of A-Z a-z 0-9 _ and -."
        )
    return text


def model_token(name: str) -> str:
    """A model name as one subject token: letters, digits and `-` stay, every other UTF-8 byte becomes `_XX`."""
    raw = name.encode()
    encoded = "".join(chr(byte) if byte in _PLAIN else f"_{byte:02X}" for byte in raw)
    if not raw or len(encoded) > _MODEL_TOKEN_MAX:
        raise BadSubject(
            f"{name[:80]!r} is empty or too long for a subject.", field="model", remedy="Shorten the name."
        )
    return encoded


def model_name(encoded: str) -> str:
    """The name that `model_token` made `encoded` from.

    :raises BadSubject: no name gives this token."""
    if len(encoded) <= _MODEL_TOKEN_MAX and _MODEL_TOKEN.match(encoded):
        raw = bytearray()
        position = 0
        while position < len(encoded):
            if encoded[position] == "_":
                raw.append(int(encoded[position + 1 : position + 3], 16))
                position += 3
            else:
                raw.append(ord(encoded[position]))
                position += 1
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = ""
        # One name, one token: an escape of a byte that needs none would be a second spelling.
        if name and model_token(name) == encoded:
            return name
    raise BadSubject(
        f"{encoded[:80]!r} is not an encoded model name.",
        field="model",
        remedy="Keep letters, digits and '-'; write every other byte as _XX in upper-case hex.",
    )


def infer(tenant: str, model: str, scope: str = "") -> str:
    base = f"{PREFIX}.infer.{token(tenant, 'tenant')}.{model_token(model)}"
    return f"{base}.{token(scope, 'scope')}" if scope else base


def parse_infer(subject: str) -> InferSubject:
    """:raises BadSubject: this is no infer subject, or a part of it is malformed."""
    parts = subject.split(".")
    if parts[:3] != ["pb", "v1", "infer"] or len(parts) not in (5, 6):
        raise BadSubject(f"{subject[:120]!r}", field="subject", remedy="Use pb.v1.infer.<tenant>.<model>[.<scope>].")
    tenant = token(parts[3], "tenant")
    scope = token(parts[5], "scope") if len(parts) == 6 else ""
    return InferSubject(tenant, model_name(parts[4]), scope)


def cancel(tenant: str, client_request_id: str) -> str:
    return f"{PREFIX}.cancel.{token(tenant, 'tenant')}.{token(client_request_id, 'request id')}"


def parse_cancel(subject: str) -> tuple[str, str]:
    """(tenant, client request id). :raises BadSubject: this is no cancel subject."""
    return _parse_request("cancel", subject)


def cancelled(tenant: str, client_request_id: str) -> str:
    return f"{PREFIX}.cancelled.{token(tenant, 'tenant')}.{token(client_request_id, 'request id')}"


def parse_cancelled(subject: str) -> tuple[str, str]:
    """(tenant, client request id). :raises BadSubject: this is no cancelled subject."""
    return _parse_request("cancelled", subject)


def _parse_request(kind: str, subject: str) -> tuple[str, str]:
    parts = subject.split(".")
    if parts[:3] != ["pb", "v1", kind] or len(parts) != 5:
        raise BadSubject(f"{subject[:120]!r}", field="subject", remedy=f"Use pb.v1.{kind}.<tenant>.<request id>.")
    return token(parts[3], "tenant"), token(parts[4], "request id")


def route(model: str) -> str:
    return f"{PREFIX}.route.{model_token(model)}"


def lookup(shard: int) -> str:
    return f"{PREFIX}.dir.lookup.{shard}"


def work(worker: str) -> str:
    return f"{PREFIX}.work.{worker}"


def control(worker: str, verb: str) -> str:
    return f"{PREFIX}.ctl.{worker}.{verb}"


def load(worker: str) -> str:
    return f"{PREFIX}.load.{worker}"


def kv(shard: int, worker: str) -> str:
    return f"{PREFIX}.kv.{shard}.{worker}"


def kv_shard(subject: str) -> int:
    """The shard of a subject that `kv` made."""
    return int(subject.split(".")[3])


def outcome(worker: str, request_id: str) -> str:
    return f"{PREFIX}.outcome.{worker}.{request_id}"


def outcome_id(address: str) -> str:
    """The message id of an attempt's outcome, by its bridge or by its router: the stream keeps the first.

    `address` is where the router hears of the attempt; these two alone know it, and so nobody else can use the id."""
    return f"outcome-{address}"


def journal(request_id: str) -> str:
    return f"{PREFIX}.journal.{request_id}"


def ended(request_id: str) -> str:
    return f"{PREFIX}.ended.{request_id}"


def audit(service: str, instance: str) -> str:
    return f"{PREFIX}.audit.{service}.{instance}"


def capture(tenant: str, request_id: str) -> str:
    return f"{PREFIX}.capture.{tenant}.{request_id}"


def claim(request_id: str) -> str:
    return f"{PREFIX}.claim.{request_id}"


DISPATCHED = f"{PREFIX}.dispatched"
WARM = f"{PREFIX}.warm"
ALL_INFER = f"{PREFIX}.infer.>"
ALL_CANCEL = f"{PREFIX}.cancel.*.*"
ALL_CANCELLED = f"{PREFIX}.cancelled.*.*"
ALL_ROUTE = f"{PREFIX}.route.*"
ALL_LOAD = f"{PREFIX}.load.*"
ALL_OUTCOME = f"{PREFIX}.outcome.*.*"
ALL_ENDED = f"{PREFIX}.ended.*"
ALL_KV = f"{PREFIX}.kv.*.*"


def tenant_inbox(tenant: str) -> str:
    """The prefix under which this tenant, and nobody else, may listen: `_INBOX.<tenant>`."""
    return f"_INBOX.{tenant}"


def service_inbox(service: str, instance: str) -> str:
    """The prefix of a service's own inbox: `_SVC.<service>.<instance>`."""
    return f"_SVC.{service}.{instance}"


_INBOX_REST = re.compile(r"[A-Za-z0-9_\-=.]{1,256}\Z")


def is_own_reply(reply: str, tenant: str) -> bool:
    """Whether `reply` is a concrete subject below the tenant's inbox.

    The server does not check reply subjects, so whoever takes a request in must: else a service could be made to write
    into another tenant's inbox, into a service's, or into `$JS.API`."""
    head = f"_INBOX.{tenant}."
    rest = reply[len(head) :]
    return (
        reply.startswith(head)
        and _INBOX_REST.match(rest) is not None
        and ".." not in rest
        and not rest.startswith(".")
        and not rest.endswith(".")
    )
