"""The wire types: bytes that never change, and decoders that refuse what is not theirs.

A changed golden line means that a running service no longer understands its neighbour of yesterday. Appending a field
with a default adds to the end of its line; anything else is a new VERSION."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import messages
from prefixbus.bus.messages import VERSION, MessageInvalid, Wire
from prefixbus.bus.namespace import Namespace

GOLDEN = Path(__file__).with_name("golden_messages.txt")
WIRES: dict[str, Wire[Any]] = {name: value for name, value in vars(messages).items() if isinstance(value, Wire)}


def sample(kind: Any, name: str = "") -> Any:
    """A value of a type in which every field differs from its neighbours, so that swapped fields show."""
    number = 1 + sum(name.encode()) % 97
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: sample(field.type, field.name) for field in msgspec.structs.fields(kind)})
    if origin is list:
        return [sample(typing.get_args(kind)[0], name)]
    if origin is tuple:
        return tuple(sample(member, name) for member in typing.get_args(kind))
    if origin is dict:
        return {name: sample(typing.get_args(kind)[1], name)}
    if origin is not None:
        return sample(typing.get_args(kind)[0], name)
    if kind is msgspec.Raw:
        return msgspec.Raw(b'{"field":%d}' % number)
    if kind is bytes:
        return bytes([number] * 8)
    if kind is bool:
        return True
    if kind is int:
        return VERSION if name == "v" else number
    if kind is float:
        return number + 0.5
    assert kind is str, kind
    return f"a {name}"


def kinds() -> dict[str, tuple[Wire[Any], Any]]:
    """Every message: its codec and a sample, by name; a union's members one by one."""
    found: dict[str, tuple[Wire[Any], Any]] = {}
    for name, wire in WIRES.items():
        hint = typing.get_args(typing.get_type_hints(messages)[name])[0]
        members = typing.get_args(hint) or (hint,)
        for member in members:
            found[f"{name}.{member.__name__}"] = (wire, sample(member))
    return found


def test_every_message_has_the_bytes_it_always_had() -> None:
    now = "".join(f"{name} {wire.encode(value).hex()}\n" for name, (wire, value) in sorted(kinds().items()))

    assert GOLDEN.read_text() == now, "see the docstring of this file"


@pytest.mark.parametrize("name", sorted(kinds()))
def test_every_message_comes_back_from_its_bytes(name: str) -> None:
    wire, value = kinds()[name]

    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize("name", sorted(kinds()))
def test_another_version_is_refused(name: str) -> None:
    wire, value = kinds()[name]
    later = msgspec.structs.replace(value, v=VERSION + 1)

    with pytest.raises(MessageInvalid, match="version"):
        wire.decode(wire.encode(later))


@pytest.mark.parametrize("name", sorted(WIRES))
@given(data=st.binary(max_size=200))
def test_any_other_bytes_are_refused(name: str, data: bytes) -> None:
    try:
        WIRES[name].decode(data)
    except MessageInvalid:
        pass


@pytest.mark.parametrize("name", sorted(kinds()))
@given(cut=st.integers(0, 400), place=st.integers(0, 400), byte=st.integers(0, 255))
def test_damaged_bytes_are_refused_or_decode_to_a_message(name: str, cut: int, place: int, byte: int) -> None:
    wire, value = kinds()[name]
    data = bytearray(wire.encode(value)[: cut or None])
    if data:
        data[place % len(data)] = byte

    try:
        wire.decode(bytes(data))
    except MessageInvalid:
        pass


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (messages.KV, messages.KvEvents(VERSION, "w", 1, 1, [messages.Stored(bytes(100_000), 0, bytes(8))])),
        (messages.KV, messages.KvEvents(VERSION, "w", 1, 1, [messages.Removed(bytes(100_000), bytes(8))])),
        (messages.KV, messages.KvDump(VERSION, "w", 1, 1, 1, 0, 1, [messages.Stored(bytes(100_000), 0, bytes(8))])),
        *(
            (messages.LOAD, msgspec.structs.replace(sample(messages.Load), **changed))
            for changed in (
                {"accepted": ["x" * 100_000]},
                {"model": "x" * 100_000},
                {"serves": "x" * 100_000},
                {"worker_class": "x" * 100_000},
                {"pool": "x" * 100_000},
            )
        ),
    ],
)
def test_names_that_a_service_would_remember_are_short(wire: Wire[Any], message: Any) -> None:
    """A directory remembered a namespace by whatever id an event gave it: a megabyte each, in no count of memory."""
    with pytest.raises(MessageInvalid, match="length"):
        wire.decode(wire.encode(message))


def test_keys_that_are_not_whole_u64s_are_refused() -> None:
    good = messages.Lookup(VERSION, bytes(16), bytes(16))
    bad = messages.LOOKUP.encode(good).replace(bytes([0xC4, 16]) + bytes(16), bytes([0xC4, 15]) + bytes(15))

    assert messages.LOOKUP.decode(messages.LOOKUP.encode(good)) == good
    with pytest.raises(MessageInvalid):
        messages.LOOKUP.decode(bad)


def test_a_later_versions_appended_field_is_ignored() -> None:
    class Later(msgspec.Struct, array_like=True):
        v: int
        incarnation: int
        reason: str
        shard: int
        added: str

    data = msgspec.msgpack.encode(Later(VERSION, 7, "gap", 1, "new"))

    assert messages.DUMP_REQUEST.decode(data) == messages.DumpRequest(VERSION, 7, "gap", 1)


def test_a_heartbeat_from_before_there_were_shards_speaks_of_the_only_one() -> None:
    load = msgspec.structs.replace(sample(messages.Load), event_seq=7, event_seqs=[])

    assert load.seq_for(0, 1) == 7


def test_a_heartbeat_for_another_number_of_shards_is_refused() -> None:
    load = msgspec.structs.replace(sample(messages.Load), event_seqs=[7, 8])

    assert [load.seq_for(shard, 2) for shard in (0, 1)] == [7, 8]
    for shards in (1, 3):
        with pytest.raises(MessageInvalid, match=f"2 shards of the directory, not for {shards}"):
            load.seq_for(0, shards)


def test_the_namespace_in_a_job_is_whole() -> None:
    job = sample(messages.Job)

    assert set(Namespace.__struct_fields__) == set(type(job.namespace).__struct_fields__)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param([0, bytes(16), 7, bytes(8)], messages.Stored(bytes(16), 7, bytes(8)), id="stored"),
        pytest.param([1, bytes(16), bytes(8)], messages.Removed(bytes(16), bytes(8)), id="removed"),
        pytest.param([2], messages.Cleared(), id="cleared"),
    ],
)
def test_a_block_change_from_before_there_were_tiers_is_about_the_gpu(before: list[object], now: object) -> None:
    data = msgspec.msgpack.encode([0, VERSION, "w", 1, 1, [before]])

    assert messages.KV.decode(data) == messages.KvEvents(VERSION, "w", 1, 1, [now])  # type: ignore[list-item]  # one of three
