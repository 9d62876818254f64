"""Curve keys and sealed messages."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.auditor import xkey
from prefixbus.bus.errors import ConfigInvalid

OURS, SERVERS, STRANGERS = (xkey.new_seed(bytes([number]) * 32) for number in (1, 2, 3))
NONCE = bytes(24)
keys = st.binary(min_size=32, max_size=32)


def test_keys_look_like_the_servers_own() -> None:
    assert OURS.startswith("SX") and len(OURS) == 58
    assert xkey.public_key(OURS).startswith("X") and len(xkey.public_key(OURS)) == 56


@given(entropy=keys, plain=st.binary(max_size=300), nonce=st.binary(min_size=24, max_size=24))
def test_the_recipient_opens_what_was_sealed_for_it(entropy: bytes, plain: bytes, nonce: bytes) -> None:
    seed = xkey.new_seed(entropy)

    sealed = xkey.seal(SERVERS, xkey.public_key(seed), plain, nonce)

    assert sealed.startswith(b"xkv1" + nonce)
    assert xkey.unseal(seed, xkey.public_key(SERVERS), sealed) == plain


def test_nobody_else_opens_it_and_nobody_else_can_have_sent_it() -> None:
    sealed = xkey.seal(SERVERS, xkey.public_key(OURS), b"plain", NONCE)

    with pytest.raises(xkey.SealBroken):
        xkey.unseal(STRANGERS, xkey.public_key(SERVERS), sealed)
    with pytest.raises(xkey.SealBroken):
        xkey.unseal(OURS, xkey.public_key(STRANGERS), sealed)


@given(position=st.integers(0, 1000), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, flip: int) -> None:
    sealed = bytearray(xkey.seal(SERVERS, xkey.public_key(OURS), b"plain", NONCE))
    sealed[position % len(sealed)] ^= flip

    with pytest.raises(xkey.SealBroken):
        xkey.unseal(OURS, xkey.public_key(SERVERS), bytes(sealed))


@given(st.binary(max_size=100))
@example(b"")
@example(b"xkv1")
@example(b"xkv1" + bytes(40))
def test_no_bytes_break_it(data: bytes) -> None:
    with pytest.raises(xkey.SealBroken):
        xkey.unseal(OURS, xkey.public_key(SERVERS), data)


@given(st.text(max_size=70))
@example("")
@example(xkey.public_key(OURS).lower())
@example(xkey.public_key(OURS)[:-1] + "A")
@example(OURS)
def test_a_sender_that_is_no_curve_key_is_refused(sender: str) -> None:
    with pytest.raises(xkey.SealBroken):
        xkey.unseal(OURS, sender, xkey.seal(SERVERS, xkey.public_key(OURS), b"plain", NONCE))


@pytest.mark.parametrize("seed", ["", "SX", OURS[:-1], OURS.lower(), xkey.public_key(OURS), "SU" + OURS[2:]])
def test_a_seed_that_is_none_is_an_error(seed: str) -> None:
    with pytest.raises(ConfigInvalid, match="curve seed"):
        xkey.public_key(seed)


def test_a_seed_needs_32_bytes() -> None:
    with pytest.raises(ValueError, match="32"):
        xkey.new_seed(bytes(31))
