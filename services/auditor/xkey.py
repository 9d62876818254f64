"""Curve keys (X...) and messages sealed for them, as NATS's auth callout uses them.

The nkeys package for Python knows no curve keys. The encoding is nkeys's own (github.com/nats-io/nkeys, `xkeys.go`):
base 32 without padding of prefix byte(s), 32 bytes, CRC-16/XMODEM little-endian. A sealed message is `xkv1`, a 24-byte
nonce and a NaCl box (X25519, XSalsa20, Poly1305).

Owns: the encoding and the box.   Must not know: what is inside, where seeds are kept."""

import base64
import binascii

from nacl.exceptions import CryptoError
from nacl.public import Box, PrivateKey, PublicKey

from ..bus.errors import ConfigInvalid, PrefixbusError

KEY_BYTES = 32
NONCE_BYTES = 24
_MAC_BYTES = 16
_VERSION = b"xkv1"
_PREFIX_SEED = 18 << 3  # "S"
_PREFIX_CURVE = 23 << 3  # "X"
# A seed has two prefix bytes: "S" in the first five bits, the kind of key in the eight after them.
_SEED_PREFIX = bytes([_PREFIX_SEED | _PREFIX_CURVE >> 5, (_PREFIX_CURVE & 31) << 3])


class SealBroken(PrefixbusError):
    """The message was not sealed for this key by that one."""

    code = "seal_broken"
    status = 401


def new_seed(entropy: bytes) -> str:
    """The curve seed (SX...) that 32 random bytes make.

    :raises ValueError: not 32 bytes."""
    if len(entropy) != KEY_BYTES:
        raise ValueError(f"a curve seed is {KEY_BYTES} random bytes, got {len(entropy)}")
    return _encode(_SEED_PREFIX + entropy)


def public_key(seed: str) -> str:
    """The public key (X...) of a seed.

    :raises ConfigInvalid: this is no curve seed."""
    return _encode(bytes([_PREFIX_CURVE]) + bytes(_private(seed).public_key))


def seal(seed: str, recipient: str, plain: bytes, nonce: bytes) -> bytes:
    """`plain` for the holder of `recipient`'s seed alone; `nonce` is 24 random bytes, used once.

    :raises SealBroken: `recipient` is no curve key."""
    return _VERSION + bytes(Box(_private(seed), _public(recipient)).encrypt(plain, nonce))


def unseal(seed: str, sender: str, sealed: bytes) -> bytes:
    """What `sender` (X...) sealed for this seed.

    :raises SealBroken: not sealed by that key for this one, or changed on the way."""
    if not sealed.startswith(_VERSION) or len(sealed) < len(_VERSION) + NONCE_BYTES + _MAC_BYTES:
        raise SealBroken("this is not a sealed message.")
    try:
        return Box(_private(seed), _public(sender)).decrypt(sealed[len(_VERSION) :])
    except CryptoError as exc:
        raise SealBroken() from exc


def _private(seed: str) -> PrivateKey:
    raw = _decode(seed)
    if raw is None or raw[:2] != _SEED_PREFIX or len(raw) != 2 + KEY_BYTES:
        raise ConfigInvalid("this is not a curve seed (SX...).", field="xkey")
    return PrivateKey(raw[2:])


def _public(key: str) -> PublicKey:
    raw = _decode(key)
    if raw is None or raw[0] != _PREFIX_CURVE or len(raw) != 1 + KEY_BYTES:
        raise SealBroken("the sender's key is not a curve key (X...).")
    return PublicKey(raw[1:])


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _decode(text: str) -> bytes | None:
    """The bytes before the checksum; None when the text or its checksum is wrong."""
    try:
        checked = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        return None
    raw, checksum = checked[:-2], checked[-2:]
    return raw if raw and binascii.crc_hqx(raw, 0).to_bytes(2, "little") == checksum else None
