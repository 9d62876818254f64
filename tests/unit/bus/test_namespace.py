"""Namespaces separate: the rules marked [hard] in the design, section 3."""

import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus import namespace as ns
from prefixbus.bus.namespace import Namespace

BASE = Namespace(
    tenant="acme",
    scope="team-legal",
    model="smollm2",
    model_revision="sha256:aa",
    tokenizer_revision="sha256:bb",
    template_version="sha256:cc",
    adapter="",
    adapter_revision="",
    media_revision="",
    position_digest="",
    kv_dtype="bfloat16",
    block_size=32,
    acl_epoch=ns.EPOCH_ZERO,
    client_salt="",
)
KEY = bytes(range(32))

texts = st.text(max_size=12)
namespaces = st.builds(
    Namespace,
    tenant=texts,
    scope=texts,
    model=texts,
    model_revision=texts,
    tokenizer_revision=texts,
    template_version=texts,
    adapter=texts,
    adapter_revision=texts,
    media_revision=texts,
    position_digest=texts,
    kv_dtype=texts,
    block_size=st.integers(1, 1 << 20),
    acl_epoch=st.binary(min_size=16, max_size=16),
    client_salt=texts,
)


@given(namespaces, namespaces)
def test_no_two_namespaces_share_an_encoding(one: Namespace, other: Namespace) -> None:
    assert (ns.canonical(one) == ns.canonical(other)) == (one == other)


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_every_field_separates(field: str) -> None:
    changed: object = {int: 64, bytes: b"\x01" * 16}.get(type(getattr(BASE, field)), "other")
    other = msgspec.structs.replace(BASE, **{field: changed})

    assert ns.ns_id(KEY, BASE) != ns.ns_id(KEY, other)
    assert ns.seed(ns.ns_id(KEY, BASE)) != ns.seed(ns.ns_id(KEY, other))


@given(st.text(max_size=20), st.integers(0, 20))
def test_text_moved_across_a_field_border_is_another_namespace(text: str, cut: int) -> None:
    left = msgspec.structs.replace(BASE, tenant=text, scope="")
    right = msgspec.structs.replace(BASE, tenant=text[:cut], scope=text[cut:])

    assert (ns.canonical(left) == ns.canonical(right)) == (text[cut:] == "")


def test_a_client_salt_that_equals_an_adapter_name_is_not_that_adapter() -> None:
    salted = msgspec.structs.replace(BASE, client_salt="lora-7")
    adapted = msgspec.structs.replace(BASE, adapter="lora-7")

    assert ns.canonical(salted) != ns.canonical(adapted)


def test_without_the_secret_the_id_is_another() -> None:
    assert ns.ns_id(KEY, BASE) != ns.ns_id(bytes(32), BASE)


def test_the_id_of_a_known_namespace_never_changes() -> None:
    # A change of the canonical form would leave every deployment cold, and is a new format version.
    assert ns.ns_id(KEY, BASE).hex() == "94cedca29b7c0543e717e3bd556418f3"
    assert ns.salt(KEY, ns.ns_id(KEY, BASE)) == "sthnziu3pqcuhzyx4o6vkzay6p6jhzlxa6a3aii"


@given(st.binary(min_size=16, max_size=16), st.integers(1, 64))
def test_a_namespace_has_one_shard_of_so_many(namespace_id: bytes, shards: int) -> None:
    assert 0 <= ns.shard_of(namespace_id, shards) < shards
    assert ns.shard_of(namespace_id, 1) == 0


def test_the_shard_of_a_known_namespace_never_changes() -> None:
    found = [ns.shard_of(bytes.fromhex("0b16212c37424d58636e79848f9aa5b0"), shards) for shards in range(1, 9)]

    assert found == [0, 1, 0, 3, 1, 3, 3, 3]


def test_derived_keys_are_hkdf_as_rfc_5869_writes_it() -> None:
    secret = bytes.fromhex("0b" * 22)
    extracted = hmac.new(bytes(32), secret, "sha256").digest()
    expected = hmac.new(extracted, b"salt\x01", "sha256").digest()

    assert ns.derive_key(secret, "salt") == expected
    # RFC 5869, test case 3 (no salt, no info), the first 32 bytes of OKM
    assert ns.derive_key(secret, "").hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_each_purpose_has_a_key_of_its_own() -> None:
    keys = {ns.derive_key(b"secret" * 6, purpose) for purpose in ("namespace", "salt", "ticket", "journal")}

    assert len(keys) == 4


@given(st.binary(min_size=16, max_size=16))
def test_a_salt_gives_its_namespace_back(namespace_id: bytes) -> None:
    salt = ns.salt(KEY, namespace_id)

    assert ns.parse_salt(KEY, salt) == namespace_id
    assert len(salt) == 39
    assert salt.isalnum()


@given(st.binary(min_size=16, max_size=16), st.integers(0, 38), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567="))
def test_a_salt_changed_in_any_place_is_foreign(namespace_id: bytes, place: int, letter: str) -> None:
    salt = ns.salt(KEY, namespace_id)
    changed = salt[:place] + letter + salt[place + 1 :]

    assert (ns.parse_salt(KEY, changed) is None) == (changed != salt)


@given(st.binary(min_size=16, max_size=16), st.text(), st.text())
def test_a_salt_is_ours_under_the_adapter_that_it_was_made_for_alone(
    namespace_id: bytes, adapter: str, other: str
) -> None:
    salt = ns.salt(KEY, namespace_id, adapter)

    assert ns.parse_salt(KEY, salt, adapter) == namespace_id
    assert (ns.parse_salt(KEY, salt, other) is None) == (other != adapter)


@given(st.text(max_size=60))
def test_anything_else_is_no_salt(text: str) -> None:
    assert ns.parse_salt(KEY, text) is None


def test_a_salt_of_another_deployment_is_foreign() -> None:
    assert ns.parse_salt(KEY, ns.salt(bytes(32), bytes(16))) is None
