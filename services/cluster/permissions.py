"""Who may publish, subscribe and consume what: the one table from which the server's permissions are made.

Least privilege: a role is allowed what its code does and nothing else; whatever is not listed is denied. JetStream's
API subjects are listed one by one, because whoever may call all of `$JS.API.>` may delete the record. Replies are
allowed by explicit inbox, never by NATS's `allow_responses`: the server does not check reply subjects, so a request
with `reply: $JS.API.STREAM.DELETE.AUDIT` would turn an honest service into an accomplice.

Queue names are part of the permission ("subject queue"): a copy of a service shares the work, it cannot quietly read
along.

Owns: the table.   Must not know: keys, files, connections.   Source: DESIGN sections 2 and 9, facts/nats.md."""

import sys

import msgspec

from ..auditor import tenants
from ..bus import subjects

APP = "APP"
AUTH = "AUTH"
SYS = "SYS"

ALL_STREAMS = (
    subjects.STREAM_KV_EVENTS,
    subjects.STREAM_JOURNAL,
    subjects.STREAM_AUDIT,
    subjects.STREAM_CLAIMS,
    subjects.STREAM_CAPTURE,
    subjects.STREAM_WORKERS,
    subjects.STREAM_POLICIES,
    subjects.STREAM_DIRECTORY,
)

# Made by the deploy role, so that the auditor needs no right to make or change consumers.
AUDITOR_CONSUMER = "auditor"

WORKER_BRIDGE = "worker_bridge"

_API = "$JS.API"
_SRV = "$SRV.>"
_TENANT_INBOXES = "_INBOX.>"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What one role may do. Subjects may carry a queue name after a blank; then only that queue may listen there.

    `checks`: streams it may ask about. `follows`: streams it reads through ordered consumers of its own (it may name
    any subject of the stream). `pulls`: (stream, durable consumer) it takes messages from. `gets`: streams of which it
    asks for single messages. `browses`: streams it reads with any tool, such as the `nats` command line, through
    consumers that it names, changes and deletes. `provisions`: streams it creates and updates."""

    role: str
    purpose: str
    account: str = APP
    subscribe: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    pulls: tuple[tuple[str, str], ...] = ()
    gets: tuple[str, ...] = ()
    browses: tuple[str, ...] = ()
    provisions: tuple[str, ...] = ()
    # The reply to a request from the server itself goes to a subject that only the server knows beforehand.
    answers_server: bool = False

    def all_publish(self) -> tuple[str, ...]:
        """Every subject it may publish to, JetStream's API subjects written out."""
        return (*self.publish, *(subject for group in self._jetstream() for subject in group))

    def readable(self) -> tuple[str, ...]:
        """Every stream it may ask about: those it checks, and those it reads in any way."""
        pulled = [stream for stream, _ in self.pulls]
        return tuple(dict.fromkeys((*self.checks, *self.follows, *pulled, *self.gets, *self.browses, *self.provisions)))

    def _jetstream(self) -> list[tuple[str, ...]]:
        groups = [_check(stream) for stream in self.readable()]
        groups += [_follow(stream) for stream in self.follows]
        groups += [_pull(stream, consumer) for stream, consumer in self.pulls]
        groups += [_get(stream) for stream in self.gets]
        groups += [_browse(stream) for stream in self.browses]
        groups += [_provision(stream) for stream in self.provisions]
        return groups


def _check(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.INFO.{stream}",)


def _follow(stream: str) -> tuple[str, ...]:
    # The form without a name makes ephemeral consumers only: a durable cannot be made or changed through it.
    return (f"{_API}.CONSUMER.CREATE.{stream}", f"$JS.FC.{stream}.>")


def _pull(stream: str, consumer: str) -> tuple[str, ...]:
    return (
        f"{_API}.CONSUMER.INFO.{stream}.{consumer}",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.{consumer}",
        f"$JS.ACK.{stream}.{consumer}.>",
    )


def _get(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.MSG.GET.{stream}", f"{_API}.DIRECT.GET.{stream}", f"{_API}.DIRECT.GET.{stream}.>")


def _browse(stream: str) -> tuple[str, ...]:
    return (
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.INFO.{stream}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.CONSUMER.DELETE.{stream}.*",
        f"$JS.ACK.{stream}.>",
    )


def _provision(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.CREATE.{stream}", f"{_API}.STREAM.UPDATE.{stream}")


def service_roles() -> tuple[Access, ...]:
    """The roles with one key each. Worker bridges have one key per worker: see `worker_bridge`."""
    return (
        _tokenizer(),
        _router(),
        _directory(),
        _auditor(),
        _callout(),
        _gateway(),
        _operator(),
        _deploy(),
        _sys(),
    )


def worker_bridge(worker: str) -> Access:
    """What the bridge of one worker may do: speak for that worker, and for no other."""
    own_inbox = f"_SVC.{WORKER_BRIDGE}.{worker}.>"
    return Access(
        role=WORKER_BRIDGE,
        purpose="fronts one engine; bound to its own worker's subjects",
        subscribe=(
            subjects.work(worker),
            subjects.control(worker, "*"),
            subjects.ALL_CANCELLED,
            own_inbox,
            _SRV,
        ),
        publish=(
            _TENANT_INBOXES,  # frames
            "_SVC.router.>",  # accepts and refusals
            "_SVC.directory.>",  # answers to ctl.dump
            "_SVC.operator.>",  # answers to ctl.* and $SRV
            own_inbox,  # answers to a ping by a second bridge of the same name
            subjects.control(worker, "ping"),  # is there another bridge of my name?
            subjects.load(worker),
            f"{subjects.PREFIX}.kv.*.{worker}",
            subjects.outcome(worker, "*"),
            subjects.audit(WORKER_BRIDGE, worker),
            subjects.claim("*"),  # create-only: one bridge's claim keeps another's answer back, and writes nothing
            f"$KV.{subjects.BUCKET_WORKERS}.{worker}",  # registration: its stream sequence is the incarnation
        ),
        checks=subjects.STREAMS_OF[WORKER_BRIDGE],
    )


def _tokenizer() -> Access:
    return Access(
        role="tokenizer",
        purpose="takes requests in and routes them on",
        subscribe=(
            f"{subjects.ALL_INFER} tokenizer",
            # What tenants send ends here: their bodies and floods are no router's or bridge's to bear.
            f"{subjects.ALL_CANCEL} tokenizer",
            subjects.ALL_CANCELLED,
            subjects.ALL_OUTCOME,  # teaches it how long answers are
            "_SVC.tokenizer.>",
            _SRV,
        ),
        publish=(
            subjects.ALL_ROUTE,
            subjects.ALL_CANCELLED,
            _TENANT_INBOXES,  # error frames
            subjects.audit("tokenizer", "*"),
            subjects.capture("*", "*"),
            "_SVC.operator.>",
        ),
        checks=subjects.STREAMS_OF["tokenizer"],
    )


def _router() -> Access:
    return Access(
        role="router",
        purpose="decides, dispatches, writes the journal",
        subscribe=(
            f"{subjects.ALL_ROUTE} router",
            subjects.ALL_LOAD,
            subjects.DISPATCHED,
            subjects.WARM,
            subjects.ALL_OUTCOME,
            subjects.ALL_CANCELLED,
            "_SVC.router.>",
            _SRV,
        ),
        publish=(
            f"{subjects.PREFIX}.dir.lookup.*",
            subjects.work("*"),
            subjects.control("*", "abort"),
            subjects.control("*", "status"),
            subjects.DISPATCHED,
            subjects.journal("*"),
            subjects.ALL_ENDED,  # heard by nobody: what routers end teaches nothing about workers
            subjects.claim("*"),  # create-only: keeps back bridges that it gave up, before it ends their request
            _TENANT_INBOXES,  # error frames
            "_SVC.operator.>",
        ),
        checks=(subjects.STREAM_JOURNAL,),
        follows=(subjects.STREAM_POLICIES,),
    )


def _directory() -> Access:
    return Access(
        role="directory",
        purpose="knows which worker holds which block",
        subscribe=(
            f"{subjects.PREFIX}.dir.lookup.* directory",
            subjects.ALL_LOAD,
            subjects.DISPATCHED,
            subjects.ALL_OUTCOME,
            "_SVC.directory.>",
            _SRV,
        ),
        publish=(
            "_SVC.router.>",
            subjects.control("*", "dump"),
            subjects.WARM,
            f"$O.{subjects.BUCKET_DIRECTORY}.C.*",  # snapshots: their chunks, and what is said of them
            f"$O.{subjects.BUCKET_DIRECTORY}.M.*",
            "_SVC.operator.>",
        ),
        follows=(subjects.STREAM_KV_EVENTS,),
        gets=(subjects.STREAM_KV_EVENTS, subjects.STREAM_DIRECTORY),
    )


def _auditor() -> Access:
    return Access(
        role="auditor",
        purpose="reads the record",
        subscribe=("_SVC.auditor.>", _SRV),
        publish=(subjects.audit("auditor", "*"), "_SVC.operator.>"),
        pulls=((subjects.STREAM_AUDIT, AUDITOR_CONSUMER),),
    )


def _callout() -> Access:
    return Access(
        role="callout",
        purpose="authenticates tenants; the only holder of the issuer seed",
        account=AUTH,
        subscribe=("$SYS.REQ.USER.AUTH callout", "_SVC.callout.>", _SRV),
        publish=(),
        answers_server=True,
    )


def _gateway() -> Access:
    return Access(
        role="gateway",
        purpose="says that it is there; what it does for callers it does with their own credentials",
        subscribe=("_SVC.gateway.>", _SRV),
        publish=("_SVC.operator.>",),
    )


def _operator() -> Access:
    return Access(
        role="operator",
        purpose="the command line: status, policies, control of workers, reading the streams",
        subscribe=("_SVC.operator.>", subjects.ALL_LOAD, f"{subjects.PREFIX}.journal.*", subjects.ALL_OUTCOME),
        publish=(
            "$SRV.PING",
            "$SRV.PING.>",
            "$SRV.INFO",
            "$SRV.INFO.>",
            "$SRV.STATS",
            "$SRV.STATS.>",
            subjects.control("*", "*"),
            f"$KV.{subjects.BUCKET_POLICIES}.>",
        ),
        follows=(subjects.STREAM_JOURNAL, subjects.STREAM_AUDIT, subjects.STREAM_WORKERS, subjects.STREAM_POLICIES),
        gets=(
            subjects.STREAM_JOURNAL,
            subjects.STREAM_AUDIT,
            subjects.STREAM_WORKERS,
            subjects.STREAM_POLICIES,
            subjects.STREAM_KV_EVENTS,  # what workers held when a decision was made
            subjects.STREAM_DIRECTORY,  # snapshots: the same, once the first events are gone
            subjects.STREAM_CAPTURE,  # requests to be sent again
        ),
        # Only where nobody's durable consumer could be changed or deleted.
        browses=(subjects.STREAM_JOURNAL,),
    )


def _deploy() -> Access:
    consumer = f"{subjects.STREAM_AUDIT}.{AUDITOR_CONSUMER}"
    return Access(
        role="deploy",
        purpose="creates and updates streams and buckets; deletes nothing; used by no running service",
        subscribe=("_SVC.deploy.>",),
        publish=(f"$JS.API.CONSUMER.CREATE.{consumer}", f"$JS.API.CONSUMER.INFO.{consumer}"),
        provisions=ALL_STREAMS,
    )


def _sys() -> Access:
    return Access(
        role="sys",
        purpose="sees and cuts connections",
        account=SYS,
        subscribe=("_SVC.sys.>", "$SYS.ACCOUNT.*.CONNECT", "$SYS.ACCOUNT.*.DISCONNECT"),
        publish=(
            "$SYS.REQ.SERVER.PING",
            "$SYS.REQ.SERVER.PING.CONNZ",
            "$SYS.REQ.SERVER.*.CONNZ",
            "$SYS.REQ.SERVER.*.KICK",
        ),
    )


def markdown_table() -> str:
    """The table as people read it, one row per role; what its last columns mean in JetStream's API is in `legend`."""
    rows = [["role", "account", "subscribes to", "publishes to", "in JetStream", "purpose"]]
    rows.append(["---"] * len(rows[0]))
    for access in (*service_roles(), worker_bridge("WORKER")):
        publish = "the reply subject of a request it was sent" if access.answers_server else _cell(access.publish)
        rows.append(
            [f"`{access.role}`", access.account, _cell(access.subscribe), publish, _streams(access), access.purpose]
        )
    for scopes, role in ((None, "a tenant"), (("SCOPE",), "a tenant's credential with listed scopes")):
        grant = tenants.grant(tenants.Credential(tenant="TENANT", label="LABEL", token_hash="", scopes=scopes))
        rows.append([role, APP, _cell(grant.subscribe), _cell(grant.publish), "", "a client, let in by the callout"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def legend() -> str:
    """What each word of the column "in JetStream" allows, for a stream S."""
    words = {
        "checks": _check("S"),
        "follows": (*_check("S"), *_follow("S")),
        "pulls S/C": (*_check("S"), *_pull("S", "C")),
        "gets from": (*_check("S"), *_get("S")),
        "browses": (*_check("S"), *_browse("S")),
        "provisions": (*_check("S"), *_provision("S")),
    }
    return "".join(
        f"- *{word}*: {', '.join(f'`{subject}`' for subject in allowed)}\n" for word, allowed in words.items()
    )


def document() -> str:
    """infra/nats/permissions.md."""
    return (
        "# Who may publish, subscribe and consume what\n\n"
        "Made by `python -m prefixbus.cluster.permissions > infra/nats/permissions.md`; a test compares the two, and\n"
        "others ask a real server about every entry and every denial. What is not listed is denied. A word after a\n"
        "subject is the queue group outside of which nobody may listen there. `WORKER`, `TENANT`, `SCOPE` and `LABEL`\n"
        f"stand for the names in a key or credential.\n\n{markdown_table()}\n"
        f"In JetStream, for a stream `S` and a consumer `C`:\n\n{legend()}"
    )


def _streams(access: Access) -> str:
    pulled = tuple(f"{stream}/{consumer}" for stream, consumer in access.pulls)
    words = [
        ("checks", access.checks),
        ("follows", access.follows),
        ("pulls", pulled),
        ("gets from", access.gets),
        ("browses", access.browses),
        ("provisions", access.provisions),
    ]
    return "<br>".join(f"{word} {_cell(streams, ', ')}" for word, streams in words if streams)


def _cell(entries: tuple[str, ...], between: str = "<br>") -> str:
    return between.join(f"`{entry}`" for entry in entries) or "nothing"


if __name__ == "__main__":
    sys.stdout.write(document())
