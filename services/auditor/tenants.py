"""Tenants, their credentials, and what a credential allows.

A token is 256 random bits. It is kept as one unsalted BLAKE2b-256 hash: salts and slow hashes protect secrets that
people choose and that can be guessed; nobody guesses 256 random bits, and a slow hash would only make it cheap to keep
the callout busy.

A credential is found by the hash of the token that was shown, never by the tenant's name: a tenant that does not exist
and a wrong token for one that does take the same steps. How long a look-up takes can depend on the hash alone, which
nobody can steer without knowing a token.

Owns: the file format, verification, a credential's subjects and limits.   Must not know: files, clocks, JWTs.
Source: DESIGN section 9."""

import base64
import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from ..bus import subjects
from ..bus.errors import ConfigInvalid

TOKEN_BYTES = 32
_FORMAT_VERSION = 1
# A token of ours has 43 characters; hashing what is far longer would be work done for strangers.
_MAX_TOKEN_CHARS = 256
_MAX_CREDENTIALS = 100_000


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What one token may do.

    `scopes`: absent, every scope of the tenant and the tenant-wide one; a list, only these, where "" is the
    tenant-wide one. `label` names the credential within its tenant. `expires_at` is in Unix seconds; absent, never."""

    tenant: str
    label: str
    token_hash: str
    scopes: tuple[str, ...] | None = None
    expires_at: Annotated[float, Meta(gt=0)] | None = None


class TenantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tenants file: JSON, written by `prefixbus`, read by the callout."""

    version: int
    credentials: tuple[Credential, ...]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the NATS user made from a credential may do, and until when (None: no end of its own)."""

    tenant: str
    label: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    expires_at: float | None


class Tenants:
    """The credentials of one tenants file, ready to verify tokens."""

    def __init__(self, file: TenantsFile) -> None:
        self._by_hash = {credential.token_hash: credential for credential in file.credentials}
        self.tenant_count = len({credential.tenant for credential in file.credentials})

    def verify(self, tenant: str, token: str, now: float) -> Grant | None:
        """What this token allows this tenant at `now` (Unix seconds); None for any reason it allows nothing."""
        if len(token) > _MAX_TOKEN_CHARS:
            return None
        shown = hash_token(token)
        credential = self._by_hash.get(shown, _NOBODY)
        # All checks are made whatever the first of them says.
        is_token = hmac.compare_digest(shown, credential.token_hash)
        is_tenant = hmac.compare_digest(tenant.encode("utf-8", "replace"), credential.tenant.encode())
        is_current = credential.expires_at is None or now < credential.expires_at
        return grant(credential) if is_token and is_tenant and is_current else None

    def __repr__(self) -> str:
        return f"<Tenants {self.tenant_count} tenants, {len(self._by_hash)} credentials>"


_NOBODY = Credential(tenant="", label="", token_hash="0" * 64)


def new_token(entropy: bytes) -> str:
    """The token that 32 random bytes make: 43 characters that need no escaping in URLs or shells.

    :raises ValueError: not 32 bytes."""
    if len(entropy) != TOKEN_BYTES:
        raise ValueError(f"a token is {TOKEN_BYTES} random bytes, got {len(entropy)}")
    return base64.urlsafe_b64encode(entropy).decode().rstrip("=")


def hash_token(token: str) -> str:
    """BLAKE2b-256 of a token, in hex."""
    raw = token.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=32, person=b"pb tenant token").hexdigest()


def grant(credential: Credential) -> Grant:
    """The subjects a credential may use.

    A credential whose scopes are listed gets an inbox of its own below the tenant's (`_INBOX.<tenant>.<label>.>`):
    with the whole of the tenant's it could read the answers of scopes it does not have."""
    tenant = credential.tenant
    if credential.scopes is None:
        infer = [f"{subjects.PREFIX}.infer.{tenant}.>"]
        inbox = subjects.tenant_inbox(tenant)
    else:
        infer = [f"{subjects.PREFIX}.infer.{tenant}.*" + (f".{scope}" if scope else "") for scope in credential.scopes]
        inbox = f"{subjects.tenant_inbox(tenant)}.{credential.label}"
    return Grant(
        tenant=tenant,
        label=credential.label,
        publish=(*infer, f"{subjects.PREFIX}.cancel.{tenant}.*"),
        subscribe=(f"{inbox}.>",),
        expires_at=credential.expires_at,
    )


def inbox_prefix(credential: Credential) -> str:
    """What a client sets as its inbox prefix."""
    return grant(credential).subscribe[0].removesuffix(".>")


def parse(data: bytes, source: str) -> TenantsFile:
    """The tenants file in `data`, every name and hash checked.

    :raises ConfigInvalid: not a tenants file; the error names `source` and the credential."""
    try:
        file = msgspec.json.decode(data, type=TenantsFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigInvalid(f"{exc}.", field=source, remedy=_REMEDY) from exc
    _validate(file, source)
    return file


def encode(file: TenantsFile) -> bytes:
    """The bytes of a tenants file, one credential to a few lines, for people to read.

    :raises ConfigInvalid: a credential is not valid."""
    _validate(file, "tenants")
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def empty() -> TenantsFile:
    return TenantsFile(version=_FORMAT_VERSION, credentials=())


def with_credential(file: TenantsFile, credential: Credential) -> TenantsFile:
    """The file with one more credential.

    :raises ConfigInvalid: it is not valid, or the tenant has one with this label."""
    more = TenantsFile(version=file.version, credentials=(*file.credentials, credential))
    _validate(more, "tenants")
    return more


_REMEDY = "Correct the file, or restore it from a backup."


def _validate(file: TenantsFile, source: str) -> None:
    if file.version != _FORMAT_VERSION:
        raise ConfigInvalid(f"version {file.version} is not {_FORMAT_VERSION}.", field=source, remedy=_REMEDY)
    if len(file.credentials) > _MAX_CREDENTIALS:
        raise ConfigInvalid(f"has more than {_MAX_CREDENTIALS} credentials.", field=source, remedy=_REMEDY)
    names: set[tuple[str, str]] = set()
    hashes: set[str] = set()
    for position, credential in enumerate(file.credentials):
        problem = _problem(credential)
        if (credential.tenant, credential.label) in names:
            problem = f"the tenant {credential.tenant} has two credentials with the label {credential.label!r}"
        if credential.token_hash in hashes:
            problem = "the token hash is another credential's too"
        if problem:
            raise ConfigInvalid(f"{problem}.", field=f"{source} credentials[{position}]", remedy=_REMEDY)
        names.add((credential.tenant, credential.label))
        hashes.add(credential.token_hash)


def _problem(credential: Credential) -> str:
    """What is wrong with one credential; empty when nothing is."""
    if not subjects.is_token(credential.tenant):
        return f"the tenant {credential.tenant[:80]!r} is not 1 to 64 of A-Z a-z 0-9 _ and -"
    if not subjects.is_token(credential.label):
        return f"the label {credential.label[:80]!r} is not 1 to 64 of A-Z a-z 0-9 _ and -"
    for scope in credential.scopes or ():
        if scope and not subjects.is_token(scope):
            return f"the scope {scope[:80]!r} is not 1 to 64 of A-Z a-z 0-9 _ and -"
    if len(credential.token_hash) != 64 or not set(credential.token_hash) <= set("0123456789abcdef"):
        return "the token hash is not 64 hex digits"
    return ""
