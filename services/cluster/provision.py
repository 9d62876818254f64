# ruff: noqa: TID251 - this adapter speaks JetStream's API through nats-py
"""The streams and buckets: what they hold, their bounds and why; made with the deploy key, only checked by services.

Buckets are made as plain streams of the KV convention (ADR-8), but without roll-ups: with them, whoever may write one
key of a bucket can delete all others with a header (`Nats-Rollup: all`), and each bridge may write its own key.

Owns: stream configurations.   Must not know: who may use them (permissions.py).   Units: bytes, seconds."""

from typing import Any

import msgspec
import nats.errors
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from ..bus import subjects
from ..bus.config import CaptureSection
from ..bus.errors import BusUnavailable, ConfigInvalid
from . import permissions

_MIB = 1024 * 1024
_HOUR = 3600.0
_DAY = 24 * _HOUR
_EVENTS_KEPT_S = 2 * _HOUR


NO_CAPTURE = CaptureSection()


def stream_configs(capture: CaptureSection = NO_CAPTURE) -> tuple[StreamConfig, ...]:
    """Every stream, bounded in bytes and age."""
    return (
        StreamConfig(
            name=subjects.STREAM_KV_EVENTS,
            description="Block events of all workers: directories follow it.",
            subjects=[subjects.ALL_KV],
            # A directory that was away longer than this asks the workers for dumps: older events are of no use. A dump
            # of 100k blocks is 1 MB, so the bytes hold the dumps of hundreds of workers and the events after them.
            max_bytes=512 * _MIB,
            max_age=_EVENTS_KEPT_S,
            discard=DiscardPolicy.OLD,
            # Read without a consumer by whoever asks what was held when, and how far a directory is behind.
            allow_direct=True,
            **_COMMON,
        ),
        StreamConfig(
            name=subjects.STREAM_JOURNAL,
            description="Decisions and outcomes.",
            subjects=[f"{subjects.PREFIX}.journal.*", subjects.ALL_OUTCOME, subjects.ALL_ENDED],
            # About 5 KB a request, less when compressed: some 200k requests, and a week for whoever asks why.
            max_bytes=1024 * _MIB,
            max_age=7 * _DAY,
            discard=DiscardPolicy.OLD,
            compression=StoreCompression.S2,
            # The last record of a request by its subject, without a consumer.
            allow_direct=True,
            **_COMMON,
        ),
        StreamConfig(
            name=subjects.STREAM_AUDIT,
            description="Facts for the record.",
            subjects=[f"{subjects.PREFIX}.audit.*.*"],
            # About 300 B a fact: 13M facts. When it is full, new facts are refused, and whoever must have one
            # acknowledged notices; overwriting the oldest would let a flood erase its own beginning.
            max_bytes=4096 * _MIB,
            max_age=90 * _DAY,
            discard=DiscardPolicy.NEW,
            compression=StoreCompression.S2,
            deny_delete=True,
            deny_purge=True,
            **_COMMON,
        ),
        StreamConfig(
            name=subjects.STREAM_CLAIMS,
            description="Which attempt of a request answers it.",
            subjects=[subjects.claim("*")],
            # The first message of a subject stays, and there is no second: the stream itself keeps claims apart.
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            discard_new_per_subject=True,
            # Longer than any usual request waits; what is older is not begun a second time (worker_bridge/stream.py).
            max_age=subjects.CLAIMS_KEPT_S,
            # 72 B a claim (measured): 1.4 million, or 1500 requests/s; two cores do 900 (docs/performance.md). When it
            # is full, claims are refused rather than forgotten, and no lost attempt is made up for. In files, which
            # cost no more than memory (12 us of the server's CPU and 0.2 ms for the answer, measured): a stream in
            # memory is gone after a restart, name and all.
            max_bytes=96 * _MIB,
            **_COMMON,
        ),
        StreamConfig(
            name=subjects.STREAM_CAPTURE,
            description="Requests of tenants that asked to have them kept.",
            subjects=[subjects.capture("*", "*")],
            max_bytes=capture.max_bytes,
            max_age=capture.ttl_s,
            discard=DiscardPolicy.OLD,
            allow_direct=True,
            **{**_COMMON, "duplicate_window": min(capture.ttl_s, _COMMON["duplicate_window"])},
        ),
        StreamConfig(
            name=subjects.STREAM_DIRECTORY,
            description="Snapshots of the directory's shards (an object store).",
            subjects=[f"$O.{subjects.BUCKET_DIRECTORY}.C.>", f"$O.{subjects.BUCKET_DIRECTORY}.M.>"],
            # 8 B for each block that a worker holds, and two snapshots of each shard: 30M blocks. When it is full the
            # new one is refused, and the one that is there stays whole.
            max_bytes=512 * _MIB,
            # What is older than the events that have to follow it is of no use.
            max_age=_EVENTS_KEPT_S,
            discard=DiscardPolicy.NEW,
            # How a snapshot takes the place of the last but one. Only directories write here.
            allow_rollup_hdrs=True,
            allow_direct=True,
            deny_delete=True,
            **_COMMON,
        ),
        # Registrations, some 300 B each: a name's last record must not age out while the worker lives, and those before
        # it say when it restarted. Room for 1500 workers.
        _bucket(subjects.BUCKET_WORKERS, "Registrations of workers; a sequence is an incarnation.", 8, 4 * _MIB, None),
        # The current policy and seven before it, a few KB each.
        _bucket(subjects.BUCKET_POLICIES, "Routing policies.", 8, 4 * _MIB, None),
    )


_COMMON: dict[str, Any] = {
    "retention": RetentionPolicy.LIMITS,
    "storage": StorageType.FILE,
    "num_replicas": 1,
    "duplicate_window": 120.0,
}


def _bucket(name: str, description: str, history: int, max_bytes: int, max_age: float | None) -> StreamConfig:
    return StreamConfig(
        name=f"KV_{name}",
        description=description,
        subjects=[f"$KV.{name}.>"],
        max_msgs_per_subject=history,
        max_bytes=max_bytes,
        max_age=max_age,
        # A full bucket refuses new keys rather than forgetting old ones.
        discard=DiscardPolicy.NEW,
        allow_direct=True,
        deny_delete=True,
        deny_purge=True,
        **_COMMON,
    )


def auditor_consumer() -> ConsumerConfig:
    """The auditor's place in AUDIT: copies of the auditor share it."""
    return ConsumerConfig(
        name=permissions.AUDITOR_CONSUMER,
        durable_name=permissions.AUDITOR_CONSUMER,
        ack_policy=AckPolicy.EXPLICIT,
        deliver_policy=DeliverPolicy.ALL,
        ack_wait=30.0,
        max_ack_pending=10_000,
    )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `provision` did, by stream name."""

    created: tuple[str, ...]
    updated: tuple[str, ...]

    def sentence(self) -> str:
        if not self.created and not self.updated:
            return "Nothing to do: all streams and buckets are there."
        parts = [("created", self.created), ("updated", self.updated)]
        text = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        return f"{text[0].upper()}{text[1:]}."


async def provision(js: JetStreamContext, capture: CaptureSection = NO_CAPTURE) -> Report:
    """Makes streams, buckets and the auditor's consumer, and brings those that differ to what they should be.

    :raises ConfigInvalid: one differs in what the server cannot change; the error names it and the difference.
    :raises BusUnavailable: JetStream did not answer."""
    created: list[str] = []
    updated: list[str] = []
    for wanted in stream_configs(capture):
        name = str(wanted.name)
        try:
            differing = await _ensure(js, wanted)
        except APIError as exc:
            raise ConfigInvalid(
                f"cannot be made as wanted: {exc.description}.",
                field=f"stream {name}",
                remedy="Move its data elsewhere and delete it by hand; `prefixbus provision` makes it anew.",
            ) from exc
        except (nats.errors.Error, TimeoutError) as exc:
            raise BusUnavailable(f"stream {name}: {exc or type(exc).__name__}") from exc
        if differing is None:
            created.append(name)
        elif differing:
            updated.append(name)
    try:
        # Creating what exists with the same configuration changes nothing.
        await js.add_consumer(subjects.STREAM_AUDIT, auditor_consumer())
    except APIError as exc:
        raise ConfigInvalid(f"{exc.description}.", field="the auditor's consumer of AUDIT") from exc
    except (nats.errors.Error, TimeoutError) as exc:
        raise BusUnavailable(f"the auditor's consumer: {exc or type(exc).__name__}") from exc
    return Report(created=tuple(created), updated=tuple(updated))


async def _ensure(js: JetStreamContext, wanted: StreamConfig) -> list[str] | None:
    """None: made. Else the fields that differed and have been brought to what they should be."""
    try:
        found = (await js.stream_info(str(wanted.name))).config
    except NotFoundError:
        await js.add_stream(wanted)
        return None
    differing = differences(wanted, found)
    if differing:
        await js.update_stream(wanted)
    return differing


def differences(wanted: StreamConfig, found: StreamConfig) -> list[str]:
    """The fields in which a stream is not as wanted; those that we do not set are the server's business."""
    fields = (
        "description",
        "subjects",
        "retention",
        "storage",
        "num_replicas",
        "max_bytes",
        "max_age",
        "max_msgs_per_subject",
        "discard",
        "discard_new_per_subject",
        "duplicate_window",
        "deny_delete",
        "deny_purge",
        "allow_rollup_hdrs",
    )
    optional = ("allow_direct", "compression")
    differing = [name for name in fields if (getattr(wanted, name) or 0) != (getattr(found, name) or 0)]
    for name in optional:
        default = False if name == "allow_direct" else StoreCompression.NONE
        if (getattr(wanted, name) or default) != (getattr(found, name) or default):
            differing.append(name)
    return differing
