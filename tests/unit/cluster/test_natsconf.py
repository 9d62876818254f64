"""The rendered configuration: what nats-server itself makes of it, and what must not be in it."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from prefixbus.cluster import natsconf, permissions, provision

ROLES = {access.role: f"U{access.role.upper():A<55}" for access in permissions.service_roles()}
KEYS = natsconf.Keys(roles=ROLES, workers={"w2": "UW2", "w1": "UW1"}, issuer="AISSUER", xkey="XKEY")
SETTINGS = natsconf.Settings(store_dir="/var/lib/nats", port=4222, monitor_port=8222)


def test_every_role_and_worker_is_a_user_once() -> None:
    text = natsconf.render(SETTINGS, KEYS)

    for key in (*ROLES.values(), "UW1", "UW2"):
        assert text.count(f'nkey: "{key}"') == 1


def test_a_role_without_a_key_is_an_error() -> None:
    with pytest.raises(KeyError, match="router"):
        natsconf.render(SETTINGS, natsconf.Keys(roles={"tokenizer": "U"}, workers={}, issuer="A", xkey="X"))


def test_the_callout_block_does_not_depend_on_workers() -> None:
    """The server refuses to reload a change of it, and each new worker needs a reload."""
    more = natsconf.Keys(roles=ROLES, workers={**KEYS.workers, "w3": "UW3"}, issuer="AISSUER", xkey="XKEY")

    blocks = [natsconf.render(SETTINGS, keys).partition("authorization {")[2] for keys in (KEYS, more)]

    assert blocks[0] == blocks[1] != ""


def test_the_text_depends_on_nothing_but_its_arguments() -> None:
    reordered = natsconf.Keys(roles=ROLES, workers={"w1": "UW1", "w2": "UW2"}, issuer="AISSUER", xkey="XKEY")

    assert natsconf.render(SETTINGS, KEYS) == natsconf.render(SETTINGS, reordered)


def test_the_store_holds_all_streams_at_their_largest() -> None:
    reserved = sum(config.max_bytes or 0 for config in provision.stream_configs())

    assert reserved < natsconf.MAX_FILE_STORE


@pytest.mark.parametrize(
    "name", ["plain", "with space", 'with "quotes"', "back\\slash", "$dollar", "это", "# no comment"]
)
def test_the_server_takes_any_path_for_its_store(tmp_path: Path, name: str) -> None:
    store = tmp_path / name
    settings = natsconf.Settings(store_dir=str(store), port=natsconf.RANDOM_PORT, monitor_port=natsconf.RANDOM_PORT)
    path = tmp_path / "nats.conf"
    path.write_text(natsconf.render(settings, _real_keys()), encoding="utf-8")

    checked = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "nats-server", "-t", "-c", path],
        capture_output=True,
        text=True,
        timeout=10,
    )

    assert checked.returncode == 0, checked.stderr
    assert "is valid" in checked.stderr


def _real_keys() -> natsconf.Keys:
    """Keys that the server's own parser accepts: it checks their checksums."""
    import nkeys

    from prefixbus.auditor import xkey

    def public(number: int, prefix: int) -> str:
        seed = nkeys.encode_seed(bytes([number]) * 32, prefix)
        key: bytes = nkeys.from_seed(bytearray(seed)).public_key
        return key.decode()

    return natsconf.Keys(
        roles={role: public(number, nkeys.PREFIX_BYTE_USER) for number, role in enumerate(ROLES)},
        workers={"w1": public(200, nkeys.PREFIX_BYTE_USER)},
        issuer=public(201, nkeys.PREFIX_BYTE_ACCOUNT),
        xkey=xkey.public_key(xkey.new_seed(bytes(32))),
    )
