# ruff: noqa: TID251, RUF100 - an adapter: it reads certificate files
"""TLS from the config's [tls] section: one certificate for what this machine serves, one CA for what it trusts.

Must not know: who connects to whom."""

import ssl
from pathlib import Path

from .config import TlsSection
from .errors import ConfigInvalid

_FILES = "Name PEM files, relative to config.toml; a key belongs to its certificate and has no passphrase."


def server_context(section: TlsSection, base: Path) -> ssl.SSLContext | None:
    """For what we serve; None without a certificate. Paths are relative to `base`.

    :raises ConfigInvalid: only one of certificate and key is set, or a file cannot be used; the error names it."""
    if not section.certificate and not section.key:
        return None
    if not section.certificate or not section.key:
        raise ConfigInvalid("certificate and key belong together.", field="tls", remedy="Set both, or neither.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(base / section.certificate, base / section.key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigInvalid(f"cannot be used: {exc}.", field="tls.certificate, tls.key", remedy=_FILES) from exc
    return context


def client_context(section: TlsSection, base: Path) -> ssl.SSLContext | None:
    """For connections to what is served with TLS; None without a CA or a certificate.

    Names are always checked. Without `ca` the system's CAs are trusted.

    :raises ConfigInvalid: the CA file cannot be used."""
    if not section.ca and not section.certificate:
        return None
    try:
        return ssl.create_default_context(cafile=str(base / section.ca) if section.ca else None)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigInvalid(f"cannot be used: {exc}.", field="tls.ca", remedy=_FILES) from exc
