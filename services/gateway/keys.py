"""API keys: a tenant's credential for the bus, in one word.

    <tenant>.<token>             the credential labelled `default`
    <tenant>.<label>.<token>     another one of the tenant's

Every part is a subject token or base64url, so a dot separates them. A key says who it is of and is worth nothing
without its token, which the bus checks; nothing here knows which keys exist.

Owns: the form.   Must not know: HTTP, connections.   Source: DESIGN section 9."""

import hashlib

import msgspec

from ..bus import subjects
from ..bus.errors import PrefixbusError

DEFAULT_LABEL = "default"
# A token of ours has 43 characters.
_MAX_TOKEN_CHARS = 256
_DIGEST_BYTES = 16


class InvalidKey(PrefixbusError):
    """Incorrect API key provided."""

    code = "invalid_api_key"
    status = 401


class ApiKey(msgspec.Struct, frozen=True):
    """What a key says. It does not show its token."""

    tenant: str
    label: str
    token: str

    def __repr__(self) -> str:
        return f"<ApiKey {self.tenant}.{self.label}>"

    def digest(self, secret: bytes) -> bytes:
        """A name for this key, by which nobody without the secret recognises it."""
        text = f"{self.tenant}.{self.label}.{self.token}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=secret).digest()


def parse(authorization: str) -> ApiKey:
    """The key in a header `Authorization: Bearer KEY`.

    :raises InvalidKey: there is none that could be one; the sentence is that of a wrong one."""
    scheme, _, text = authorization.strip().partition(" ")
    parts = text.strip().split(".")
    if scheme.lower() != "bearer" or len(parts) not in (2, 3):
        raise InvalidKey
    tenant, label, token = parts[0], parts[1] if len(parts) == 3 else DEFAULT_LABEL, parts[-1]
    is_named = subjects.is_token(tenant) and subjects.is_token(label)
    if not (is_named and 0 < len(token) <= _MAX_TOKEN_CHARS and token.isascii() and token.isprintable()):
        raise InvalidKey
    return ApiKey(tenant, label, token)


def text_of(tenant: str, token: str, label: str = DEFAULT_LABEL) -> str:
    """The key of a credential, as its owner writes it down."""
    return f"{tenant}.{token}" if label == DEFAULT_LABEL else f"{tenant}.{label}.{token}"
