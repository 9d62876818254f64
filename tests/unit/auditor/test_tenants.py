"""Credentials: who a token lets in, and what it allows."""

import hmac
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.auditor import tenants
from prefixbus.bus import subjects
from prefixbus.bus.errors import ConfigInvalid

TOKEN, OTHER = tenants.new_token(bytes(32)), tenants.new_token(bytes([1]) * 32)
names = st.text("abcXYZ019_-", min_size=1, max_size=8)


def credential(
    tenant: str = "acme",
    label: str = "default",
    token: str = TOKEN,
    scopes: tuple[str, ...] | None = None,
    expires_at: float | None = None,
) -> tenants.Credential:
    return tenants.Credential(
        tenant=tenant, label=label, token_hash=tenants.hash_token(token), scopes=scopes, expires_at=expires_at
    )


def file(*credentials: tenants.Credential) -> tenants.TenantsFile:
    return tenants.TenantsFile(version=1, credentials=credentials)


def test_a_tenant_gets_in_with_its_own_token_and_no_other() -> None:
    known = tenants.Tenants(file(credential(), credential("other", token=OTHER)))

    grant = known.verify("acme", TOKEN, 0)

    assert grant is not None and grant.tenant == "acme"
    assert known.verify("acme", OTHER, 0) is None
    assert known.verify("other", TOKEN, 0) is None
    assert known.verify("nobody", TOKEN, 0) is None
    assert known.verify("", TOKEN, 0) is None
    assert known.verify("acme", "", 0) is None
    assert known.verify("acme", tenants.hash_token(TOKEN), 0) is None


@given(tenant=st.text(max_size=20), token=st.text(max_size=60))
@example(tenant="", token="")
@example(tenant="\ud800", token="\ud800")
@example(tenant="", token="0" * 64)
def test_nobody_else_gets_in(tenant: str, token: str) -> None:
    assert tenants.Tenants(file(credential())).verify(tenant, token, 0) is None
    assert tenants.Tenants(tenants.empty()).verify(tenant, token, 0) is None


def test_no_tenant_takes_the_same_steps_as_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing on a shared machine proves nothing; that the same comparisons run on the same lengths does."""
    known = tenants.Tenants(file(credential()))
    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: Any, b: Any) -> bool:
        seen.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    known.verify("acme", OTHER, 0)
    wrong_token, seen = seen, []
    known.verify("nope", OTHER, 0)

    assert wrong_token == seen == [(64, 64), (4, 0)]


def test_a_credential_ends_when_it_says() -> None:
    known = tenants.Tenants(file(credential(expires_at=100.0)))

    assert known.verify("acme", TOKEN, 99.9) is not None
    assert known.verify("acme", TOKEN, 100.0) is None


def test_every_credential_of_a_tenant_has_its_own_rights() -> None:
    known = tenants.Tenants(file(credential(), credential(label="alice", token=OTHER, scopes=("user-42",))))

    whole, alice = known.verify("acme", TOKEN, 0), known.verify("acme", OTHER, 0)

    assert whole is not None and whole.publish == ("pb.v1.infer.acme.>", "pb.v1.cancel.acme.*")
    assert whole.subscribe == ("_INBOX.acme.>",)
    assert alice is not None and alice.publish == ("pb.v1.infer.acme.*.user-42", "pb.v1.cancel.acme.*")
    assert alice.subscribe == ("_INBOX.acme.alice.>",)


@pytest.mark.parametrize(
    ("scopes", "infer"),
    [
        (None, ["pb.v1.infer.acme.>"]),
        ((), []),
        (("",), ["pb.v1.infer.acme.*"]),
        (("", "a"), ["pb.v1.infer.acme.*", "pb.v1.infer.acme.*.a"]),
        (("a", "b"), ["pb.v1.infer.acme.*.a", "pb.v1.infer.acme.*.b"]),
    ],
)
def test_scopes_become_subjects(scopes: tuple[str, ...] | None, infer: list[str]) -> None:
    grant = tenants.grant(credential(scopes=scopes))

    assert list(grant.publish) == [*infer, "pb.v1.cancel.acme.*"]


@given(tenant=names, label=names, scopes=st.none() | st.lists(names, max_size=3).map(tuple))
def test_no_grant_reaches_outside_its_tenant(tenant: str, label: str, scopes: tuple[str, ...] | None) -> None:
    grant = tenants.grant(credential(tenant, label, scopes=scopes))

    for subject in grant.publish:
        assert subject.split(".")[:4] in (["pb", "v1", "infer", tenant], ["pb", "v1", "cancel", tenant])
    for subject in grant.subscribe:
        assert subject.startswith(f"_INBOX.{tenant}.")
        assert subjects.is_own_reply(subject.removesuffix(">") + "r1", tenant)


@given(
    st.lists(
        st.builds(
            credential,
            tenant=names,
            label=names,
            token=st.text(min_size=1),
            scopes=st.none() | st.lists(names, max_size=3).map(tuple),
            expires_at=st.none() | st.floats(1, 1e10),
        ),
        unique_by=(lambda c: (c.tenant, c.label), lambda c: c.token_hash),
        max_size=5,
    )
)
def test_a_file_reads_back_as_it_was_written(credentials: list[tenants.Credential]) -> None:
    original = file(*credentials)

    assert tenants.parse(tenants.encode(original), "tenants.json") == original


GOOD = {"tenant": "acme", "label": "x", "token_hash": "0" * 63 + "1"}


@pytest.mark.parametrize(
    ("story", "content", "message"),
    [
        ("not JSON", "{", "truncated"),
        ("another version", {"version": 2, "credentials": []}, "version 2"),
        ("an unknown field", {"version": 1, "credentials": [], "x": 1}, "unknown field"),
        ("an unknown field of a credential", {"version": 1, "credentials": [{**GOOD, "scope": "a"}]}, "unknown field"),
        ("a tenant that is no subject token", {"version": 1, "credentials": [{**GOOD, "tenant": "a.b"}]}, "a.b"),
        ("a wildcard tenant", {"version": 1, "credentials": [{**GOOD, "tenant": "*"}]}, "'\\*'"),
        ("a scope with a wildcard", {"version": 1, "credentials": [{**GOOD, "scopes": [">"]}]}, "'>'"),
        ("a label with a dot", {"version": 1, "credentials": [{**GOOD, "label": "a.b"}]}, "a.b"),
        ("an empty label", {"version": 1, "credentials": [{**GOOD, "label": ""}]}, "label"),
        ("a short hash", {"version": 1, "credentials": [{**GOOD, "token_hash": "00"}]}, "64 hex"),
        ("an upper-case hash", {"version": 1, "credentials": [{**GOOD, "token_hash": "A" * 64}]}, "64 hex"),
        ("scopes that are no list", {"version": 1, "credentials": [{**GOOD, "scopes": "a"}]}, "array"),
        ("an expiry that is no number", {"version": 1, "credentials": [{**GOOD, "expires_at": "soon"}]}, "float"),
        ("two credentials of one name", {"version": 1, "credentials": [GOOD, {**GOOD, "token_hash": "1" * 64}]}, "two"),
        ("two credentials of one token", {"version": 1, "credentials": [GOOD, {**GOOD, "label": "y"}]}, "another"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_file_is_refused_with(story: str, content: object, message: str) -> None:
    data = content.encode() if isinstance(content, str) else json.dumps(content).encode()

    with pytest.raises(ConfigInvalid, match=message) as caught:
        tenants.parse(data, "tenants.json")

    assert caught.value.field.startswith("tenants.json")


def test_a_token_is_256_bits_and_needs_no_escaping() -> None:
    token = tenants.new_token(bytes(range(224, 256)))

    assert len(token) == 43
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    with pytest.raises(ValueError, match="32"):
        tenants.new_token(bytes(16))
