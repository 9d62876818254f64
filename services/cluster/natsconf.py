"""The nats-server configuration, as text: accounts, users and their permissions, JetStream, limits, auth callout.

Three accounts. APP is where requests and services live; AUTH holds the auth callout alone, so that nobody else can
hear or forge an authentication; SYS is the server's own. Services are nkey users with the permissions of
`permissions.py`; anybody else is sent through the callout. Only public keys are written here.

Adding a worker is rendering again with one more key and a reload (SIGHUP): services and bridges live on. Tenants are
cut off for a moment and come back by their client's own reconnect, because the server (2.15) closes, at each reload of
users, every connection whose user is not in the file. So make the keys of workers that may come (`prefixbus init`)
before they do. The server refuses to reload a change of the callout block: that block must not depend on workers.

Owns: the text.   Must not know: where it is written, who holds the seeds.   Source: facts/nats.md."""

import json

import msgspec

from ..bus.config import NatsSection
from . import permissions
from .permissions import Access

# What may wait for one connection: four of the largest messages. A client that reads slower than that is cut off.
MAX_PENDING = 32 * 1024 * 1024
# Of one connection. A client needs one wildcard inbox; a few hundred serve those that open one for each request. A
# service has about 20. Per-user limits in the callout's answer are not looked at by a server configured by file.
MAX_SUBSCRIPTIONS = 512
# All streams' max_bytes together (provision.py), and half a GiB for what is yet to come.
MAX_FILE_STORE = 7 * 1024 * 1024 * 1024
# Ordered consumers keep their state in memory; nothing else does.
MAX_MEMORY_STORE = 64 * 1024 * 1024
# How long the server waits for the callout: a tenant gets its refusal after this when no callout runs.
AUTH_TIMEOUT_S = 2

TLS_TIMEOUT_S = 2

RANDOM_PORT = -1


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server listens and keeps its data. Port -1 takes a free one, written to a file in `ports_dir`."""

    store_dir: str
    port: int
    monitor_port: int
    host: str = "127.0.0.1"
    server_name: str = "prefixbus"
    ports_dir: str = ""
    max_payload: int = NatsSection().max_payload
    tls_certificate: str = ""
    tls_key: str = ""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Public keys. `roles`: one per role of `permissions.service_roles`; `workers`: one per worker; `issuer` is an
    account key (A...), `xkey` a curve key (X...)."""

    roles: dict[str, str]
    workers: dict[str, str]
    issuer: str
    xkey: str


def render(settings: Settings, keys: Keys) -> str:
    """The whole configuration file.

    :raises KeyError: a role has no key."""
    users: dict[str, list[str]] = {permissions.APP: [], permissions.AUTH: [], permissions.SYS: []}
    for access in permissions.service_roles():
        users[access.account].append(_user(keys.roles[access.role], access, access.role))
    for worker in sorted(keys.workers):
        access = permissions.worker_bridge(worker)
        users[access.account].append(_user(keys.workers[worker], access, f"{access.role} {worker}"))
    with_tls = bool(settings.tls_certificate)
    tls = ""
    if with_tls:
        files = f"cert_file: {_text(settings.tls_certificate)}, key_file: {_text(settings.tls_key)}"
        tls = f"tls {{ {files}, timeout: {TLS_TIMEOUT_S} }}\n"
    ports = f"ports_file_dir: {_text(settings.ports_dir)}\n" if settings.ports_dir else ""
    return f"""\
# Written by `prefixbus`: edit nothing here, it is written anew at each start and when a worker is added.
server_name: {_text(settings.server_name)}
listen: {_text(f"{settings.host}:{settings.port}")}
{"https" if with_tls else "http"}: {_text(f"{settings.host}:{settings.monitor_port}")}
{tls}{ports}max_payload: {settings.max_payload}
max_pending: {MAX_PENDING}
max_subscriptions: {MAX_SUBSCRIPTIONS}
write_deadline: "5s"
# A client that reads slowly must not slow down the bridge that writes to it and, through it, everybody else. What it
# does not read may be dropped: frames are numbered for that reason.
no_fast_producer_stall: true

jetstream {{
  store_dir: {_text(settings.store_dir)}
  max_file_store: {MAX_FILE_STORE}
  max_memory_store: {MAX_MEMORY_STORE}
}}

accounts {{
  {permissions.SYS} {{
    users: [
{"".join(users[permissions.SYS])}    ]
  }}
  {permissions.AUTH} {{
    users: [
{"".join(users[permissions.AUTH])}    ]
  }}
  {permissions.APP} {{
    jetstream: enabled
    users: [
{"".join(users[permissions.APP])}    ]
  }}
}}
system_account: {permissions.SYS}

authorization {{
  timeout: {AUTH_TIMEOUT_S}
  auth_callout {{
    issuer: {_text(keys.issuer)}
    account: {permissions.AUTH}
    auth_users: {_list([keys.roles["callout"]])}
    # A key that is listed in an account which is not named here never passes through the callout: services connect
    # while it is down. (Naming their keys in auth_users would do the same, but that list cannot be reloaded, and each
    # worker adds a key.)
    allowed_accounts: [{permissions.AUTH}]
    # Requests carry passwords: they are sealed for this key.
    xkey: {_text(keys.xkey)}
  }}
}}
"""


def _user(public_key: str, access: Access, comment: str) -> str:
    rights = [f"subscribe: {{ allow: {_list(list(access.subscribe))} }}"]
    if access.answers_server:
        # Safe here and only here: in this account nobody but the server sends requests.
        rights += ['publish: { deny: [">"] }', 'allow_responses: { max: 1, expires: "5s" }']
    else:
        rights.append(f"publish: {{ allow: {_list(list(access.all_publish()))} }}")
    body = "\n".join(f"          {right}" for right in rights)
    return f"""\
      # {comment}
      {{ nkey: {_text(public_key)}, permissions: {{
{body}
      }} }}
"""


def _list(values: list[str]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


def _text(value: str) -> str:
    """A quoted string; the server's format knows JSON's escapes for what can occur in a path or subject."""
    return json.dumps(value, ensure_ascii=False)
