"""Namespaces: everything that must agree for two requests to share KV, and the keys and salts made from it.

Two requests in one namespace may share cache; two in different ones never do, because the engine is given a different
`cache_salt` for each and the directory's keys start from a different seed.

Owns: the canonical form, ns_id, seeds, salts, derived keys.   Must not know: where secrets are kept, how prompts look.
Source: DESIGN section 3; HKDF is RFC 5869 with SHA-256."""

import base64
import binascii
import hashlib
import hmac

import msgspec

NS_ID_BYTES = 16
_MAC_BYTES = 8
_FORMAT = b"prefixbus namespace 1"
EPOCH_ZERO = bytes(16)


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """The fields whose agreement lets KV be shared. All are part of ns_id; none is ever guessed from another.

    `scope` and the adapter's fields are empty when there is none. Revisions are digests of content ("sha256:..."), not
    names. `client_salt` is the caller's own `cache_salt`, which can only narrow. `acl_epoch` is 16 random bytes."""

    tenant: str
    scope: str
    model: str
    model_revision: str
    tokenizer_revision: str
    template_version: str
    adapter: str
    adapter_revision: str
    media_revision: str
    position_digest: str
    kv_dtype: str
    block_size: int
    acl_epoch: bytes
    client_salt: str = ""


def canonical(namespace: Namespace) -> bytes:
    """The one encoding of a namespace: fields in fixed order, each with its type and length.

    No two namespaces share an encoding, whatever their texts contain."""
    parts = [_FORMAT]
    for value in msgspec.structs.astuple(namespace):
        if isinstance(value, str):
            kind, raw = b"s", value.encode("utf-8", "surrogatepass")
        elif isinstance(value, bytes):
            kind, raw = b"b", value
        else:
            kind, raw = b"i", str(value).encode()
        parts.append(kind + len(raw).to_bytes(4, "big") + raw)
    return b"".join(parts)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose, from the deployment secret (HKDF-SHA256, RFC 5869, no salt, info = the purpose)."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def ns_id(key: bytes, namespace: Namespace) -> bytes:
    """16 bytes that name the namespace; without the key (purpose "namespace") nobody can compute or guess them."""
    return hashlib.blake2b(canonical(namespace), digest_size=NS_ID_BYTES, key=key).digest()


def seed(namespace_id: bytes) -> int:
    """Where the namespace's block keys start: the first 8 bytes of ns_id (LE)."""
    return int.from_bytes(namespace_id[:8], "little")


def shard_of(namespace_id: bytes, shards: int) -> int:
    """Which of so many shards of the directory knows the namespace: the first 8 bytes of ns_id (LE), modulo."""
    return int.from_bytes(namespace_id[:8], "little") % shards


def salt(key: bytes, namespace_id: bytes, adapter: str = "") -> str:
    """The `cache_salt` an engine gets: base32(ns_id || MAC), 39 characters that need no escaping.

    The MAC (key purpose "salt") lets a restarted bridge recognise its own blocks among foreign ones. It covers the
    namespace's adapter, since an engine's events say no more of that than a name."""
    return base64.b32encode(namespace_id + _mac(key, namespace_id, adapter)).decode().rstrip("=").lower()


def parse_salt(key: bytes, text: str, adapter: str = "") -> bytes | None:
    """The ns_id inside a salt that `salt` made with this key for this adapter; None for anything else."""
    try:
        raw = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        return None
    namespace_id = raw[:NS_ID_BYTES]
    if len(raw) != NS_ID_BYTES + _MAC_BYTES:
        return None
    # Made anew and compared whole: the MAC must be ours, and base 32's spare bits allow no second spelling.
    return namespace_id if hmac.compare_digest(salt(key, namespace_id, adapter).encode(), text.encode()) else None


def _mac(key: bytes, namespace_id: bytes, adapter: str) -> bytes:
    return hashlib.blake2b(namespace_id + adapter.encode(), digest_size=_MAC_BYTES, key=key).digest()
