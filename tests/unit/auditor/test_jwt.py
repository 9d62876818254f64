"""JWTs of the auth callout: what we take for a server's request, and what we answer."""

import base64
import json
from typing import Any

import nkeys
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.auditor import jwt, tenants
from prefixbus.bus.errors import ConfigInvalid

NOW = 1_700_000_000


def key(kind: int, number: int = 1) -> Any:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(bytes([number]) * 32, kind)))


SERVER = key(nkeys.PREFIX_BYTE_SERVER)
SERVER_ID = SERVER.public_key.decode()
USER = key(nkeys.PREFIX_BYTE_USER).public_key.decode()
ISSUER = jwt.Issuer(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT))
GRANT = tenants.Grant(
    tenant="acme", label="x", publish=("pb.v1.infer.acme.>",), subscribe=("_INBOX.acme.>",), expires_at=None
)


def b64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def token(claims: object, signer: Any = SERVER, header: object = None) -> bytes:
    head = b64(json.dumps(header or {"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    body = head + b"." + b64(json.dumps(claims).encode())
    return body + b"." + b64(signer.sign(body))


def request(**changes: Any) -> dict[str, Any]:
    nats = {
        "server_id": {"name": "n", "id": SERVER_ID, "xkey": "X"},
        "user_nkey": USER,
        "client_info": {"host": "127.0.0.1", "id": 7},
        "connect_opts": {"user": "acme", "pass": "secret", "protocol": 1},
        "type": "authorization_request",
        "version": 2,
    }
    nats |= changes.pop("nats", {})
    return {"iss": SERVER_ID, "aud": "nats-authorization-request", "sub": "A", "exp": NOW + 2, "nats": nats, **changes}


def claims_of(encoded: str) -> dict[str, Any]:
    payload, issuer = jwt.verify(encoded.encode())
    found: dict[str, Any] = json.loads(payload)
    assert issuer == found["iss"] == ISSUER.public_key
    return found


def test_a_servers_request_is_read() -> None:
    found = jwt.parse_request(token(request()), NOW)

    assert (found.server.id, found.user_nkey, found.client.id) == (SERVER_ID, USER, 7)
    assert (found.options.user, found.options.password) == ("acme", "secret")
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("story", "data"),
    [
        ("nothing", b""),
        ("two parts", b"a.b"),
        ("not base 64", b"!.!.!"),
        ("too long", b"a" * 100_000),
        ("another algorithm", token(request(), header={"typ": "JWT", "alg": "none"})),
        ("no signature", token(request()).rpartition(b".")[0] + b"."),
        ("another signer", token(request(), signer=key(nkeys.PREFIX_BYTE_SERVER, 2))),
        ("an account for a server", token(request(iss=ISSUER.public_key), signer=key(nkeys.PREFIX_BYTE_ACCOUNT, 0))),
        ("another server in the body", token(request(nats={"server_id": {"id": "N" + "A" * 55}}))),
        ("a user key of another kind", token(request(nats={"user_nkey": SERVER_ID}))),
        ("a user key with a typing error", token(request(nats={"user_nkey": USER[:-2] + "AA"}))),
        ("another type", token(request(nats={"type": "user"}))),
        ("an old request", token(request(exp=NOW - 1))),
        ("no user", token({"iss": SERVER_ID, "nats": {"type": "authorization_request"}})),
        ("no object", token([1, 2])),
        ("no issuer", token({"nats": {}})),
        ("an issuer that is no key", token({"iss": "N", "nats": {}})),
        ("a password that is no text", token(request(nats={"connect_opts": {"pass": 5}}))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_is_refused_that_has(story: str, data: bytes) -> None:
    with pytest.raises(jwt.BadToken):
        jwt.parse_request(data, NOW)


@given(st.binary(max_size=200))
@example(b"..")
@example(b"e30.e30.")
@example("é.é.é".encode())
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with pytest.raises(jwt.BadToken):
        jwt.parse_request(data, NOW)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_breaks_the_signature(position: int, flip: int) -> None:
    data = bytearray(token(request()))
    data[position % len(data)] ^= flip

    try:
        jwt.parse_request(bytes(data), NOW)
    except jwt.BadToken:
        return
    # The spare bits of base 64's last character: the same bytes in another spelling.
    assert [base64.urlsafe_b64decode(part + b"==") for part in bytes(data).split(b".")] == [
        base64.urlsafe_b64decode(part + b"==") for part in token(request()).split(b".")
    ]


def test_an_allowance_is_for_this_user_on_this_server_with_these_rights() -> None:
    asked = jwt.parse_request(token(request()), NOW)

    response = claims_of(jwt.allow(ISSUER, asked, GRANT, "APP", 60.0, NOW))

    assert (response["sub"], response["aud"]) == (USER, SERVER_ID)
    assert response["nats"]["type"] == "authorization_response"
    user = claims_of(response["nats"]["jwt"])
    assert (user["sub"], user["aud"], user["name"], user["exp"]) == (USER, "APP", "acme", NOW + 60)
    assert user["nats"]["pub"] == {"allow": ["pb.v1.infer.acme.>"]}
    assert user["nats"]["sub"] == {"allow": ["_INBOX.acme.>"]}


@pytest.mark.parametrize(("ends_in", "expected"), [(None, 60), (10.0, 10), (1000.0, 60)])
def test_a_connection_ends_with_the_sooner_of_credential_and_user(ends_in: float | None, expected: int) -> None:
    asked = jwt.parse_request(token(request()), NOW)
    expires_at = None if ends_in is None else NOW + ends_in
    grant = tenants.Grant(tenant="a", label="x", publish=("p",), subscribe=("s",), expires_at=expires_at)

    response = claims_of(jwt.allow(ISSUER, asked, grant, "APP", 60.0, NOW))

    assert claims_of(response["nats"]["jwt"])["exp"] == NOW + expected


def test_a_denial_lets_nobody_in() -> None:
    asked = jwt.parse_request(token(request()), NOW)

    response = claims_of(jwt.deny(ISSUER, asked, "because", NOW))

    assert response["nats"]["error"] == "because"
    assert "jwt" not in response["nats"]


@pytest.mark.parametrize(
    "seed", [b"", b"SA", b"junk", nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER), b"\xff\xff"]
)
def test_only_an_account_seed_can_issue(seed: bytes) -> None:
    with pytest.raises(ConfigInvalid, match="issuer"):
        jwt.Issuer(seed)


def test_an_issuer_does_not_show_its_seed() -> None:
    assert repr(ISSUER) == f"<Issuer {ISSUER.public_key}>"
