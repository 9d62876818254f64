"""Secrets on disk."""

from pathlib import Path

import pytest

from prefixbus.bus import secretfile
from prefixbus.bus.errors import ConfigInvalid


def secret(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.key"
    secret(path, b"hush-hush")
    path.chmod(mode)

    with pytest.raises(ConfigInvalid, match="chmod 600") as caught:
        secretfile.read(path)

    assert "hush" not in caught.value.sentence()


@pytest.mark.parametrize("content", [b"", b"\n", b"zz" * 32, b"ab" * 31])
def test_a_damaged_key_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "creds").mkdir()
    secret(tmp_path / "creds" / "salt.key", content)

    with pytest.raises(ConfigInvalid, match=r"salt\.key"):
        secretfile.purpose_key(tmp_path, "salt")
