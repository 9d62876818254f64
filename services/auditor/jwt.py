"""The JWTs of NATS's auth callout: the server's request, our response, and the user inside it.

A NATS JWT is `header.payload.signature`, each base64url without padding, signed with Ed25519 by the nkey in `iss`
(NATS ADR-14, ADR-26; github.com/nats-io/jwt). Only what the callout needs is here.

Owns: encoding, signatures, the fields.   Must not know: tenants files, clocks, the wire."""

import base64
import binascii
import hashlib
import json
from typing import Any

import msgspec
import nkeys
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from ..bus.errors import ConfigInvalid, PrefixbusError
from .tenants import Grant

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_PREFIX_ACCOUNT = 0
_PREFIX_SERVER = 13 << 3
_PREFIX_USER = 20 << 3
_PREFIX_BYTES = {"N": _PREFIX_SERVER, "U": _PREFIX_USER, "A": _PREFIX_ACCOUNT}
_REQUEST_TYPE = "authorization_request"
# Requests are bounded by the server's control line (4 KiB) and its own claims; this is far above both.
_MAX_TOKEN_BYTES = 64 * 1024


class BadToken(PrefixbusError):
    """The JWT is malformed, or not signed by its issuer."""

    code = "bad_token"
    status = 401


class ServerId(msgspec.Struct, frozen=True):
    """The server that asks. `id` is its public nkey (N...), `xkey` the curve key it seals with."""

    id: str
    name: str = ""
    xkey: str = ""


class ConnectOptions(msgspec.Struct, frozen=True):
    """What the client showed."""

    user: str = ""
    password: str = msgspec.field(name="pass", default="")

    def __repr__(self) -> str:
        # This must never reach a log with the password in it.
        return f"ConnectOptions(user={self.user!r})"


class ClientInfo(msgspec.Struct, frozen=True):
    """Who connects: `id` is the connection's number on its server (for a KICK)."""

    id: int = 0
    host: str = ""


class _RequestBody(msgspec.Struct, frozen=True):
    server_id: ServerId
    user_nkey: str
    type: str
    connect_opts: ConnectOptions = ConnectOptions()
    client_info: ClientInfo = ClientInfo()


class _RequestClaims(msgspec.Struct, frozen=True):
    iss: str
    nats: _RequestBody
    exp: int = 0


# A backstop for connections whose credential was removed, not a session length: at its end nats-py's client closes for
# good, so it is long.
USER_TTL_S = 8 * 3600.0


_request_decoder = msgspec.json.Decoder(_RequestClaims)


class Issuer:
    """Signs with the issuer's seed (SA...).

    :raises ConfigInvalid: this is no account seed."""

    def __init__(self, seed: bytes) -> None:
        try:
            prefix, _ = nkeys.decode_seed(bytearray(seed))
            self._keys = nkeys.from_seed(bytearray(seed))
        except (nkeys.NkeysError, binascii.Error, ValueError) as exc:
            raise ConfigInvalid("this is not an nkey seed.", field="issuer") from exc
        if prefix != _PREFIX_ACCOUNT:
            raise ConfigInvalid("this is not an account seed (SA...).", field="issuer")
        self.public_key: str = self._keys.public_key.decode()

    def sign(self, claims: dict[str, Any], now: float) -> str:
        """The JWT of these claims, with `iss`, `iat` and `jti` added."""
        complete = {**claims, "iss": self.public_key, "iat": int(now)}
        digest = hashlib.sha256(json.dumps(complete, sort_keys=True).encode()).digest()
        complete["jti"] = base64.b32encode(digest).decode().rstrip("=")
        body = _b64(json.dumps(_HEADER).encode()) + b"." + _b64(json.dumps(complete).encode())
        return (body + b"." + _b64(self._keys.sign(body))).decode()

    def __repr__(self) -> str:
        return f"<Issuer {self.public_key}>"


class AuthRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's question: may this client, who shows this name and password, connect?"""

    server: ServerId
    user_nkey: str
    options: ConnectOptions
    client: ClientInfo


def parse_request(token: bytes, now: float) -> AuthRequest:
    """The request in a JWT, its signature and its form checked.

    :raises BadToken: malformed, expired, or not signed by the server that it says it is from."""
    payload, issuer = verify(token)
    try:
        claims = _request_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadToken("the claims are not an authorization request's.") from exc
    body = claims.nats
    if body.type != _REQUEST_TYPE:
        raise BadToken(f"the type is {body.type[:40]!r}, not {_REQUEST_TYPE}.")
    if issuer[0] != "N" or issuer != body.server_id.id:
        raise BadToken("it is not signed by the server that it names.")
    if claims.exp and now > claims.exp:
        raise BadToken("it has expired.")
    _raw_key(body.user_nkey, "U")
    return AuthRequest(
        server=body.server_id, user_nkey=body.user_nkey, options=body.connect_opts, client=body.client_info
    )


def allow(issuer: Issuer, request: AuthRequest, grant: Grant, account: str, ttl_s: float, now: float) -> str:
    """The response that lets the client in, as a user of `account` with what `grant` allows, for at most `ttl_s`."""
    expires_at = now + ttl_s
    if grant.expires_at is not None:
        expires_at = min(expires_at, grant.expires_at)
    user = {
        "sub": request.user_nkey,
        "aud": account,
        # What monitoring shows, and what an administrator who looks for a tenant's connections finds.
        "name": grant.tenant,
        "exp": int(expires_at),
        "nats": {
            "type": "user",
            "version": 2,
            "tags": [f"credential:{grant.label}"],
            # No limits of its own: a server configured by file does not look at them (2.15). The same for all
            # connections are in its configuration: max_payload, max_subscriptions, max_pending.
            "subs": -1,
            "data": -1,
            "payload": -1,
            "allowed_connection_types": ["STANDARD"],
            "pub": {"allow": list(grant.publish)},
            "sub": {"allow": list(grant.subscribe)},
        },
    }
    return _respond(issuer, request, {"jwt": issuer.sign(user, now)}, now)


def deny(issuer: Issuer, request: AuthRequest, reason: str, now: float) -> str:
    """The response that refuses the client; the server logs `reason`, the client is not told it."""
    return _respond(issuer, request, {"error": reason}, now)


def verify(token: bytes) -> tuple[bytes, str]:
    """(payload, issuer) of a JWT whose signature is its issuer's.

    :raises BadToken: it is not."""
    if len(token) > _MAX_TOKEN_BYTES:
        raise BadToken("it is too long.")
    parts = token.split(b".")
    if len(parts) != 3:
        raise BadToken("it has not three parts.")
    try:
        header, payload, signature = (_unb64(part) for part in parts)
        if json.loads(header) != _HEADER:
            raise BadToken("the header names another algorithm.")
        issuer = msgspec.json.decode(payload, type=_Issued).iss
    except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
        raise BadToken("it is not base64url and JSON.") from exc
    key = VerifyKey(_raw_key(issuer, issuer[:1]))
    try:
        key.verify(parts[0] + b"." + parts[1], signature)
    except (BadSignatureError, ValueError) as exc:
        raise BadToken() from exc
    return payload, issuer


class _Issued(msgspec.Struct, frozen=True):
    iss: str


def _respond(issuer: Issuer, request: AuthRequest, answer: dict[str, str], now: float) -> str:
    body = {"type": "authorization_response", "version": 2, **answer}
    return issuer.sign({"sub": request.user_nkey, "aud": request.server.id, "nats": body}, now)


def _raw_key(public_key: str, kind: str) -> bytes:
    """The 32 bytes of a public nkey of this kind (its first letter).

    :raises BadToken: not such a key, or its checksum is wrong."""
    try:
        checked = base64.b32decode(public_key + "=" * (-len(public_key) % 8))
    except (binascii.Error, ValueError) as exc:
        raise BadToken("a public key in it is not base 32.") from exc
    raw, checksum = checked[:-2], checked[-2:]
    if (
        len(raw) != 33
        or raw[0] != _PREFIX_BYTES.get(kind)
        or binascii.crc_hqx(raw, 0).to_bytes(2, "little") != checksum
    ):
        raise BadToken("a public key in it is not the kind of key it should be.")
    return raw[1:]


def _b64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def _unb64(text: bytes) -> bytes:
    return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
