"""Secrets on disk: one file each, readable by its owner alone.

    <state>/creds/<role>.nk                  nkey seed of a service role
    <state>/creds/worker_bridge-<worker>.nk  nkey seed of one worker's bridge
    <state>/creds/<purpose>.key              32 bytes in hex, derived from the deployment secret for one purpose

Must not know: who uses a secret, or for what."""

import os
import stat
from pathlib import Path

from .errors import ConfigInvalid


def read(path: Path) -> bytes:
    """The file's bytes without surrounding white space.

    :raises ConfigInvalid: missing, unreadable, empty, or readable by group or others; the error names the file
    alone."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read().strip()
    except OSError as exc:
        raise ConfigInvalid(
            f"cannot be read ({exc.strerror}).", field=str(path), remedy="Run `prefixbus init` on this state directory."
        ) from exc
    if mode & 0o077:
        raise ConfigInvalid(f"has mode {mode:04o}; others could read it.", field=str(path), remedy="chmod 600 it.")
    if not content:
        raise ConfigInvalid("is empty.", field=str(path), remedy="Restore it from a backup, or make a new deployment.")
    return content


def role_seed(state: Path, role: str, worker: str = "") -> bytes:
    """The nkey seed of a role; of one worker's bridge when `worker` is given."""
    return read(state / "creds" / (f"{role}-{worker}.nk" if worker else f"{role}.nk"))


def purpose_key(state: Path, purpose: str) -> bytes:
    """The 32-byte key of one purpose.

    :raises ConfigInvalid: see `read`, or the file is not 32 bytes in hex."""
    path = state / "creds" / f"{purpose}.key"
    try:
        key = bytes.fromhex(read(path).decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigInvalid("is not 32 bytes in hex.", field=str(path), remedy="Restore it from a backup.")
    return key
