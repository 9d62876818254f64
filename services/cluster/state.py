"""The state directory: everything a deployment on one machine keeps, mode 0700.

    lock                        held by the one `prefixbus up` (flock; holds its pid)
    cluster.json                pids and ports, while it is up
    config.toml                 what people edit; no secrets
    nats/                       nats.conf and the JetStream store
    creds/<role>.nk             nkey seed of a role           creds/worker_bridge-<worker>.nk   of one worker's bridge
    creds/issuer.nk, xkey.nk    the callout's signing and curve seeds
    creds/deployment.key        the deployment secret; read by `init` alone
    creds/<purpose>.key         derived from it, one per purpose: a service reads only those it needs
    creds/tenants.json          tenants, tokens hashed
    models/ logs/ run/

`init` makes what is missing and changes nothing that exists. All files are written under another name and renamed: a
crash leaves the old file or the new one.

Owns: the layout, creation, the lock.   Must not know: processes, NATS connections, how models are converted."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import nkeys

from ..auditor import tenants, xkey
from ..bus import config, revision, secretfile, subjects
from ..bus.errors import ConfigInvalid, PrefixbusError
from ..bus.namespace import derive_key
from . import natsconf, permissions

PURPOSES = ("namespace", "salt", "journal")
DEMO_TENANT = "demo"
DEFAULT_LABEL = "default"
_DIRECTORIES = ("nats", "creds", "models", "logs", "run")
_SECRET_BYTES = 32
_WORKER_SEED = re.compile(rf"{permissions.WORKER_BRIDGE}-(?P<worker>[A-Za-z0-9_-]{{1,64}})\.nk\Z")

Entropy = Callable[[int], bytes]
T = TypeVar("T")


class StateLocked(PrefixbusError):
    """Another prefixbus is using the state directory."""

    code = "state_locked"
    status = 409


class LabelTaken(PrefixbusError):
    """The tenant has a credential of this label already."""

    code = "label_taken"
    status = 409


class NoSuchCredential(PrefixbusError):
    """The tenant has no credential of this label."""

    code = "no_such_credential"
    status = 404


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model for the first config.toml. `tokenizer` is its tokenizer directory, inside the state directory or out.

    Without a `model_revision`, the digest of that directory stands for it (a simulated engine has no weights). The
    revisions of tokenizer and template are those of the files."""

    tokenizer: Path
    model_revision: str = ""
    position_digest: str = ""
    max_model_len: int = 8192
    block_size: int = 32
    profile: str = "h100-8b"


class NewTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A credential that was just made: the only time its token is in clear text."""

    tenant: str
    label: str
    token: str
    inbox_prefix: str
    # None: every scope of the tenant, and the tenant-wide one "".
    scopes: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"NewTenant(tenant={self.tenant!r}, label={self.label!r})"


class InitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `init` made: paths relative to the state directory; empty when all was there."""

    created: tuple[str, ...]
    demo: NewTenant | None = None

    def sentence(self) -> str:
        if not self.created:
            return "Nothing to do: the state directory is complete."
        made = {
            "keys": any(name.endswith((".nk", ".key")) for name in self.created),
            "config": "config.toml" in self.created,
            f"tenant {DEMO_TENANT}": self.demo is not None,
        }
        *most, last = [what for what, is_new in made.items() if is_new]
        return f"made {', '.join(most)} and {last}" if most else f"made {last}"


def init(
    state: Path, *, workers: Sequence[str], models: Mapping[str, Model], entropy: Entropy = os.urandom
) -> InitReport:
    """Makes the state directory, or what is missing of it; checks what is there.

    `models` go into config.toml only when that is made.

    :raises ConfigInvalid: a file that exists is damaged or open to others, or a name is not valid."""
    _make_directories(state)
    with _exclusive(state):
        maker = _Maker(state, entropy)
        for access in permissions.service_roles():
            maker.nkey(f"creds/{access.role}.nk", nkeys.PREFIX_BYTE_USER)
        for worker in workers:
            maker.nkey(_worker_seed(worker), nkeys.PREFIX_BYTE_USER)
        maker.nkey("creds/issuer.nk", nkeys.PREFIX_BYTE_ACCOUNT)
        maker.curve_key("creds/xkey.nk")
        maker.secrets()
        if not (state / "config.toml").exists():
            text = config_text(state, models)
            config.parse(text, {})
            maker.write("config.toml", text.encode())
        config.load(state / "config.toml", {})
        demo = None
        if tenants_path(state).exists():
            _read_tenants(state)
        else:
            demo, file = _credential(tenants.empty(), DEMO_TENANT, None, DEFAULT_LABEL, None, entropy)
            maker.write("creds/tenants.json", tenants.encode(file))
        return InitReport(created=tuple(maker.created), demo=demo)


def add_worker(state: Path, worker: str, entropy: Entropy = os.urandom) -> bool:
    """Makes the key of a worker's bridge; False when it has one. The server has to be told: `write_nats_config`.

    :raises ConfigInvalid: the name is not valid, or its key file is damaged."""
    with _exclusive(state):
        maker = _Maker(state, entropy)
        maker.nkey(_worker_seed(worker), nkeys.PREFIX_BYTE_USER)
        return bool(maker.created)


def workers(state: Path) -> list[str]:
    """The workers that have keys, sorted."""
    matches = (_WORKER_SEED.match(path.name) for path in (state / "creds").iterdir())
    return sorted(match["worker"] for match in matches if match)


def add_tenant(
    state: Path,
    tenant: str,
    scopes: Sequence[str] | None = None,
    *,
    label: str = DEFAULT_LABEL,
    expires_at: float | None = None,
    entropy: Entropy = os.urandom,
) -> NewTenant:
    """One more credential of a tenant; a running callout takes it at the next connection.

    :raises BadSubject: a name is not valid.   :raises LabelTaken: the tenant has a credential of this label."""
    _check_names(tenant, label, scopes)
    with _exclusive(state):
        before = _read_tenants(state)
        if _find(before, tenant, label) is not None:
            raise LabelTaken(
                f"has a credential with the label {label} already.",
                field=f"tenant {tenant}",
                remedy="Choose another with --label, or give this one a new token with --replace.",
            )
        new, file = _credential(before, tenant, scopes, label, expires_at, entropy)
        write_atomically(tenants_path(state), tenants.encode(file))
        return new


def replace_token(
    state: Path,
    tenant: str,
    scopes: Sequence[str] | None = None,
    *,
    label: str = DEFAULT_LABEL,
    entropy: Entropy = os.urandom,
) -> NewTenant:
    """A new token for a credential that exists; the old one connects no more. Without `scopes` it keeps its own.

    :raises BadSubject: a name is not valid.   :raises NoSuchCredential: the tenant has none of this label."""
    _check_names(tenant, label, scopes)
    with _exclusive(state):
        before = _read_tenants(state)
        old = _existing(before, tenant, label)
        kept = old.scopes if scopes is None else scopes
        new, file = _credential(_without(before, old), tenant, kept, label, old.expires_at, entropy)
        write_atomically(tenants_path(state), tenants.encode(file))
        return new


def remove_tenant(state: Path, tenant: str, *, label: str = DEFAULT_LABEL) -> None:
    """Takes a credential away: its token connects no more.

    :raises BadSubject: a name is not valid.   :raises NoSuchCredential: the tenant has none of this label."""
    _check_names(tenant, label, None)
    with _exclusive(state):
        before = _read_tenants(state)
        write_atomically(tenants_path(state), tenants.encode(_without(before, _existing(before, tenant, label))))


def tenants_path(state: Path) -> Path:
    return state / "creds" / "tenants.json"


def nats_keys(state: Path) -> natsconf.Keys:
    """The public keys for the server's configuration.

    :raises ConfigInvalid: a key file is missing or damaged."""
    creds = state / "creds"
    return natsconf.Keys(
        roles={access.role: _public(creds / f"{access.role}.nk") for access in permissions.service_roles()},
        workers={worker: _public(state / _worker_seed(worker)) for worker in workers(state)},
        issuer=_public(creds / "issuer.nk"),
        xkey=_public_curve(creds / "xkey.nk"),
    )


def write_nats_config(state: Path, *, port: int, monitor_port: int, ports_dir: str = "") -> Path:
    """Writes nats/nats.conf for the keys that exist now and returns its path; the server reads it again at SIGHUP."""
    loaded = config.load(state / "config.toml", os.environ)
    certificate, key = loaded.tls.certificate, loaded.tls.key
    settings = natsconf.Settings(
        max_payload=loaded.nats.max_payload,
        tls_certificate=str((state / certificate).absolute()) if certificate else "",
        tls_key=str((state / key).absolute()) if key else "",
        store_dir=str((state / "nats" / "store").absolute()),
        port=port,
        monitor_port=monitor_port,
        ports_dir=ports_dir,
    )
    path = state / "nats" / "nats.conf"
    write_atomically(path, natsconf.render(settings, nats_keys(state)).encode())
    return path


@contextlib.contextmanager
def lock(state: Path) -> Iterator[None]:
    """Holds the state directory for one `prefixbus up`; released when the process ends, however it ends.

    :raises StateLocked: another process holds it; the error names its pid."""
    path = state / "lock"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _open_lock(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StateLocked(
                f"another prefixbus is using it (pid {_pid_in(path) or 'unknown'}).",
                field=str(state),
                remedy="Stop that one with `prefixbus down`, or choose another directory with --state.",
            ) from exc
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)


def lock_holder(state: Path) -> int | None:
    """The pid of the process that holds the lock; None when nobody does."""
    path = state / "lock"
    if not path.exists():
        return None
    with _open_lock(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid_in(path)
    return None


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file (cluster.json, run/<name>.json), mode 0600, all of it or nothing."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json(path: Path, kind: type[T]) -> T:
    """:raises ConfigInvalid: missing, or not JSON of this kind; the error names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as exc:
        raise ConfigInvalid(f"cannot be read ({exc.strerror}).", field=str(path)) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigInvalid(f"{exc}.", field=str(path), remedy="Stop the cluster and remove the file.") from exc


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600 that is the old one or the new one at any moment, also after a power loss."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    # What a crashed process of the same pid left behind would make O_EXCL fail for ever.
    scratch.unlink(missing_ok=True)
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    _sync_directory(path.parent)


def config_text(state: Path, models: Mapping[str, Model]) -> str:
    """The first config.toml: the models, and where to read about the rest."""
    parts = [
        "# What prefixbus is told by people. Every key and its default: services/bus/config.py; an unknown key is an\n"
        "# error. PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS=20 in the environment overrides [router] lookup_timeout_ms.\n"
        "# [nats] url is set by `prefixbus up`. Secrets are not here but in creds/.\n"
    ]
    for name, model in models.items():
        tokenizer = model.tokenizer.absolute()
        if tokenizer.is_relative_to(state.absolute()):
            tokenizer = tokenizer.relative_to(state.absolute())
        weights = model.model_revision or directory_digest(model.tokenizer)
        found = revision.of_directory(model.tokenizer)
        parts.append(
            f"\n[models.{_toml(name)}]\n"
            "# Relative to this file.\n"
            f"tokenizer = {_toml(str(tokenizer))}\n"
            "# Digests of content; requests share KV only where all four agree. Of the weights, of what the tokenizer\n"
            "# and its template are made of (checked when they are loaded), and of how positions enter KV.\n"
            f"model_revision = {_toml(weights)}\n"
            f"tokenizer_revision = {_toml(found.tokenizer)}\n"
            f"template_version = {_toml(found.template)}\n"
            f"position_digest = {_toml(model.position_digest)}\n"
            f"max_model_len = {model.max_model_len}\n"
            f"block_size = {model.block_size}\n"
            f"profile = {_toml(model.profile)}\n"
            "# How its engines find calls of tools (vLLM's --tool-call-parser); empty: they do not.\n"
            'tool_parser = "hermes"\n'
        )
    return "".join(parts)


def directory_digest(directory: Path) -> str:
    """ "sha256:..." over the names and contents of the files in a directory, whatever their order or dates.

    :raises ConfigInvalid: it is not a directory, or has no files."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if not files:
        raise ConfigInvalid("is not a directory with files in it.", field=str(directory))
    digest = hashlib.sha256()
    for path in files:
        name = path.relative_to(directory).as_posix().encode()
        content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(len(name).to_bytes(4, "big") + name + content)
    return f"sha256:{digest.hexdigest()}"


class _Maker:
    """Makes files that are missing and checks those that are there; `created` lists the former."""

    def __init__(self, state: Path, entropy: Entropy) -> None:
        self._state = state
        self._entropy = entropy
        self.created: list[str] = []

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self._state / name, content)
        self.created.append(name)

    def nkey(self, name: str, prefix: int) -> None:
        path = self._state / name
        if not path.exists():
            seed: bytes = nkeys.encode_seed(self._entropy(_SECRET_BYTES), prefix)
            self.write(name, seed + b"\n")
        elif _seed_prefix(path) != prefix:
            raise ConfigInvalid("holds a key of another kind.", field=str(path), remedy=_RESTORE)

    def curve_key(self, name: str) -> None:
        path = self._state / name
        if not path.exists():
            self.write(name, xkey.new_seed(self._entropy(_SECRET_BYTES)).encode() + b"\n")
        else:
            _public_curve(path)

    def secrets(self) -> None:
        """The deployment secret, and from it the key of each purpose.

        A missing secret beside existing keys is refused: a new one would make every namespace anew, silently."""
        existing = [purpose for purpose in PURPOSES if (self._state / f"creds/{purpose}.key").exists()]
        if not (self._state / "creds/deployment.key").exists():
            if existing:
                raise ConfigInvalid(
                    f"is missing, but {existing[0]}.key was made from it.",
                    field=str(self._state / "creds/deployment.key"),
                    remedy=_RESTORE,
                )
            self.write("creds/deployment.key", self._entropy(_SECRET_BYTES).hex().encode() + b"\n")
        secret = secretfile.purpose_key(self._state, "deployment")
        for purpose in PURPOSES:
            key = derive_key(secret, purpose)
            if purpose not in existing:
                self.write(f"creds/{purpose}.key", key.hex().encode() + b"\n")
            elif secretfile.purpose_key(self._state, purpose) != key:
                raise ConfigInvalid(
                    "was made from another deployment secret.",
                    field=str(self._state / f"creds/{purpose}.key"),
                    remedy=_RESTORE,
                )


_RESTORE = "Restore it from a backup, or make a new deployment in another directory."


def _make_directories(state: Path) -> None:
    """:raises ConfigInvalid: the state directory is open to others, or is no directory."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(state.iterdir()):
            # An empty directory that somebody made for us may have any mode; there is nothing in it yet to read.
            state.chmod(0o700)
        mode = stat.S_IMODE(state.stat().st_mode)
        if mode & 0o077:
            raise ConfigInvalid(f"has mode {mode:04o}; others could read it.", field=str(state), remedy="chmod 700 it.")
        for name in _DIRECTORIES:
            (state / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ConfigInvalid(f"cannot be made ({exc.strerror}).", field=str(exc.filename or state)) from exc


@contextlib.contextmanager
def _exclusive(state: Path) -> Iterator[None]:
    """One writer of creds/ at a time; waits for the other, who takes milliseconds."""
    with _open_lock(state / "creds" / ".lock") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    try:
        # Not inherited by children: a lock must not outlive its holder in a process that it started.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigInvalid(
            f"cannot be opened ({exc.strerror}).", field=str(path), remedy="Run `prefixbus init`."
        ) from exc
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pid_in(path: Path) -> int | None:
    text = path.read_text("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None


def _credential(
    file: tenants.TenantsFile,
    tenant: str,
    scopes: Sequence[str] | None,
    label: str,
    expires_at: float | None,
    entropy: Entropy,
) -> tuple[NewTenant, tenants.TenantsFile]:
    """A new credential, and the file with it in."""
    token = tenants.new_token(entropy(tenants.TOKEN_BYTES))
    credential = tenants.Credential(
        tenant=tenant,
        label=label,
        token_hash=tenants.hash_token(token),
        scopes=None if scopes is None else tuple(scopes),
        expires_at=expires_at,
    )
    more = tenants.with_credential(file, credential)
    prefix = tenants.inbox_prefix(credential)
    return NewTenant(tenant=tenant, label=label, token=token, inbox_prefix=prefix, scopes=credential.scopes), more


def _check_names(tenant: str, label: str, scopes: Sequence[str] | None) -> None:
    """What people typed, before a file is looked at: its own checks speak of the file."""
    subjects.token(tenant, "tenant")
    subjects.token(label, "label")
    for scope in scopes or ():
        if scope:
            subjects.token(scope, "scope")


def _find(file: tenants.TenantsFile, tenant: str, label: str) -> tenants.Credential | None:
    named = (each for each in file.credentials if (each.tenant, each.label) == (tenant, label))
    return next(named, None)


def _existing(file: tenants.TenantsFile, tenant: str, label: str) -> tenants.Credential:
    found = _find(file, tenant, label)
    if found is None:
        known = ", ".join(each.label for each in file.credentials if each.tenant == tenant) or "none"
        raise NoSuchCredential(
            f"has no credential with the label {label} (it has {known}).",
            field=f"tenant {tenant}",
            remedy="Name one of its labels with --label, or make a credential without --replace and --remove.",
        )
    return found


def _without(file: tenants.TenantsFile, credential: tenants.Credential) -> tenants.TenantsFile:
    rest = tuple(each for each in file.credentials if each is not credential)
    return tenants.TenantsFile(version=file.version, credentials=rest)


def _read_tenants(state: Path) -> tenants.TenantsFile:
    path = tenants_path(state)
    return tenants.parse(secretfile.read(path), str(path))


def _worker_seed(worker: str) -> str:
    return f"creds/{permissions.WORKER_BRIDGE}-{subjects.token(worker, 'worker')}.nk"


def _seed_prefix(path: Path) -> int:
    """The kind of a seed. :raises ConfigInvalid: the file is damaged or open to others."""
    seed = bytearray(secretfile.read(path))
    try:
        prefix: int
        prefix, _ = nkeys.decode_seed(seed)
        # nkeys does not look at a seed's checksum: make it again and compare.
        good = nkeys.encode_seed(bytes(_), prefix) == bytes(seed)
    except (nkeys.NkeysError, ValueError):
        good = False
    if not good:
        raise ConfigInvalid("does not hold an nkey seed.", field=str(path), remedy=_RESTORE)
    return prefix


def _public(path: Path) -> str:
    _seed_prefix(path)
    public: bytes = nkeys.from_seed(bytearray(secretfile.read(path))).public_key
    return public.decode()


def _public_curve(path: Path) -> str:
    try:
        return xkey.public_key(secretfile.read(path).decode("ascii"))
    except (ConfigInvalid, UnicodeDecodeError) as exc:
        if isinstance(exc, ConfigInvalid) and exc.field == str(path):
            raise
        raise ConfigInvalid("does not hold a curve seed.", field=str(path), remedy=_RESTORE) from exc


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _toml(text: str) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's (but for DEL, which no path here has)."""
    return json.dumps(text, ensure_ascii=False)
