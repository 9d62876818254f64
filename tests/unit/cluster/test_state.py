"""The state directory: made once, checked ever after, never half-written, closed to others."""

import multiprocessing
import os
import stat
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import pytest

from prefixbus.auditor import tenants
from prefixbus.bus import config, secretfile
from prefixbus.bus.errors import BadSubject, ConfigInvalid
from prefixbus.bus.namespace import derive_key
from prefixbus.cluster import natsconf, permissions, state


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete state directory with two workers."""
    state.init(tmp_path / "s", workers=["w1", "w2"], models={})
    return tmp_path / "s"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_init_makes_a_complete_directory_that_others_cannot_read(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in directory.iterdir()} >= {"config.toml", "nats", "creds", "models", "logs", "run"}
    for access in permissions.service_roles():
        assert secretfile.role_seed(directory, access.role).startswith(b"SU")
    assert state.workers(directory) == ["w1", "w2"]


def test_the_first_init_says_in_a_few_words_what_it_made(tmp_path: Path) -> None:
    report = state.init(tmp_path / "s", workers=["w1"], models={})

    assert report.sentence() == "made keys, config and tenant demo"
    assert state.init(tmp_path / "s", workers=["w1", "w2"], models={}).sentence() == "made keys"


def test_a_second_init_changes_nothing_and_says_so(directory: Path) -> None:
    before = contents(directory)

    report = state.init(directory, workers=["w1", "w2"], models={})

    assert (report.created, report.demo) == ((), None)
    assert report.sentence() == "Nothing to do: the state directory is complete."
    assert contents(directory) == before


@pytest.mark.parametrize(
    "missing", ["creds/router.nk", "creds/xkey.nk", "creds/salt.key", "config.toml", "creds/tenants.json"]
)
def test_init_makes_only_what_is_missing(directory: Path, missing: str) -> None:
    before = contents(directory)
    (directory / missing).unlink()

    report = state.init(directory, workers=["w1", "w2"], models={})

    assert report.created == (missing,)
    after = contents(directory)
    assert {name: after[name] for name in before if name != missing} == {
        name: content for name, content in before.items() if name != missing
    }


def test_a_purposes_key_is_derived_from_the_deployment_secret(directory: Path) -> None:
    secret = secretfile.purpose_key(directory, "deployment")

    for purpose in state.PURPOSES:
        assert secretfile.purpose_key(directory, purpose) == derive_key(secret, purpose)


def test_a_lost_deployment_secret_is_not_made_anew_in_silence(directory: Path) -> None:
    (directory / "creds" / "deployment.key").unlink()

    with pytest.raises(ConfigInvalid, match=r"deployment\.key"):
        state.init(directory, workers=[], models={})


def test_the_demo_token_is_given_once_and_stored_hashed(tmp_path: Path) -> None:
    report = state.init(tmp_path / "s", workers=[], models={})

    assert report.demo is not None
    assert len(report.demo.token) == 43
    assert report.demo.token.encode() not in b"".join(contents(tmp_path / "s").values())
    assert report.demo.token not in repr(report)
    file = tenants.parse(state.tenants_path(tmp_path / "s").read_bytes(), "t")
    assert tenants.Tenants(file).verify("demo", report.demo.token, 0) is not None


def test_an_empty_directory_of_any_mode_is_taken(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)

    state.init(tmp_path / "s", workers=[], models={})

    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def _chmod(mode: int) -> Callable[[Path], object]:
    return lambda path: path.chmod(mode)


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (".", _chmod(0o750), "0750"),
        ("creds/router.nk", _chmod(0o640), "0640"),
        ("creds/namespace.key", _chmod(0o604), "0604"),
        ("creds/tenants.json", _chmod(0o644), "0644"),
        ("creds/router.nk", _write(b""), "is empty"),
        ("creds/router.nk", _write(b"SUAXXX"), "does not hold an nkey seed"),
        ("creds/router.nk", _write(b"\xff\xfe\x00"), "does not hold an nkey seed"),
        ("creds/worker_bridge-w1.nk", _write(b"no seed"), "does not hold an nkey seed"),
        ("creds/issuer.nk", lambda path: path.write_bytes(path.with_name("router.nk").read_bytes()), "of another kind"),
        ("creds/xkey.nk", lambda path: path.write_bytes(path.with_name("router.nk").read_bytes()), "curve seed"),
        ("creds/salt.key", _write(b"12"), "32 bytes in hex"),
        ("creds/salt.key", _write(b"00" * 32), "another deployment secret"),
        ("creds/tenants.json", _write(b"{"), "truncated"),
        ("creds/tenants.json", _write(b'{"version": 7, "credentials": []}'), "version 7"),
        ("config.toml", _write(b"[models"), "syntax"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_damaged_file_is_an_error_that_names_it(
    directory: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(directory / name)

    with pytest.raises(ConfigInvalid, match=message) as caught:
        state.init(directory, workers=["w1", "w2"], models={})

    assert Path(name).name in caught.value.sentence() or name == "."


def test_a_changed_letter_in_a_seed_is_noticed(directory: Path) -> None:
    path = directory / "creds" / "router.nk"
    seed = path.read_bytes()
    path.write_bytes(seed[:20] + (b"B" if seed[20:21] != b"B" else b"C") + seed[21:])

    with pytest.raises(ConfigInvalid, match=r"router\.nk"):
        state.nats_keys(directory)


def test_a_worker_is_added_once(directory: Path) -> None:
    assert state.add_worker(directory, "gpu-7_a")
    assert not state.add_worker(directory, "gpu-7_a")

    assert state.workers(directory) == ["gpu-7_a", "w1", "w2"]
    assert set(state.nats_keys(directory).workers) == {"gpu-7_a", "w1", "w2"}


@pytest.mark.parametrize("name", ["", "a.b", "../x", "*", "ü", "w" * 65])
def test_a_worker_whose_name_cannot_stand_in_a_subject_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(BadSubject):
        state.add_worker(directory, name)


def test_a_tenants_credential_is_added_beside_the_others(directory: Path) -> None:
    first = state.add_tenant(directory, "acme")
    second = state.add_tenant(directory, "acme", ["user-42"], label="alice", expires_at=2e9)

    file = tenants.Tenants(tenants.parse(state.tenants_path(directory).read_bytes(), "t"))
    assert (first.inbox_prefix, second.inbox_prefix) == ("_INBOX.acme", "_INBOX.acme.alice")
    assert file.verify("acme", first.token, 1e9) is not None
    assert file.verify("acme", second.token, 1e9) is not None
    assert file.verify("acme", second.token, 2e9) is None


@pytest.mark.parametrize(
    ("tenant", "scopes", "label"),
    [("demo", None, "default"), ("a.b", None, "x"), ("", None, "x"), ("a", ["*"], "x"), ("a", None, "x y")],
)
def test_a_credential_that_is_not_valid_changes_nothing(
    directory: Path, tenant: str, scopes: list[str] | None, label: str
) -> None:
    before = contents(directory)

    with pytest.raises((BadSubject, state.LabelTaken)) as caught:
        state.add_tenant(directory, tenant, scopes, label=label)

    assert "file" not in caught.value.sentence(), "arguments were wrong, not a file"
    assert contents(directory) == before


def test_an_existing_label_is_refused_with_the_two_ways_out(directory: Path) -> None:
    with pytest.raises(state.LabelTaken, match=r"default already.*--label.*--replace"):
        state.add_tenant(directory, "demo")


def verifies(directory: Path, new: state.NewTenant) -> tuple[str, ...] | None:
    """What a token allows to be published, None when nothing."""
    file = tenants.Tenants(tenants.parse(state.tenants_path(directory).read_bytes(), "t"))
    grant = file.verify(new.tenant, new.token, 1e9)
    return None if grant is None else grant.publish


def test_a_replaced_token_is_of_no_use_and_the_new_one_allows_the_same(directory: Path) -> None:
    other = state.add_tenant(directory, "acme")
    old = state.add_tenant(directory, "acme", ["hr"], label="alice", expires_at=2e9)
    allowed = verifies(directory, old)

    new = state.replace_token(directory, "acme", label="alice")

    assert new.scopes == ("hr",)
    assert verifies(directory, old) is None
    assert verifies(directory, new) == allowed
    assert verifies(directory, other) is not None


def test_a_replaced_token_may_get_other_scopes(directory: Path) -> None:
    state.add_tenant(directory, "acme", ["hr"], label="alice")

    new = state.replace_token(directory, "acme", ["law"], label="alice")

    assert new.scopes == ("law",)


def test_a_removed_credential_is_of_no_use_and_its_label_is_free(directory: Path) -> None:
    old = state.add_tenant(directory, "acme")

    state.remove_tenant(directory, "acme")

    assert verifies(directory, old) is None
    assert verifies(directory, state.add_tenant(directory, "acme")) is not None


@pytest.mark.parametrize("change", [state.replace_token, state.remove_tenant])
def test_a_label_that_is_not_there_is_said_with_those_that_are(directory: Path, change: Callable[..., object]) -> None:
    before = contents(directory)

    with pytest.raises(state.NoSuchCredential, match=r"demo: has no credential with the label x \(it has default\)"):
        change(directory, "demo", label="x")

    assert contents(directory) == before


def test_credentials_added_at_the_same_time_are_all_kept(directory: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(state.add_tenant, [(directory, f"t{number}") for number in range(12)])

    file = tenants.parse(state.tenants_path(directory).read_bytes(), "t")
    assert {credential.tenant for credential in file.credentials} == {"demo", *(f"t{number}" for number in range(12))}


def test_the_first_config_names_the_models_and_can_be_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "s" / "models" / "smol", tmp_path / 'odd "name"'
    (tmp_path / "s").mkdir(mode=0o700)
    for model in (inside, outside):
        model.mkdir(parents=True)
        (model / "tokenizer.json").write_text("{}")

    state.init(
        tmp_path / "s",
        workers=[],
        models={
            "smollm2": state.Model(tokenizer=inside),
            "meta/llama 3": state.Model(tokenizer=outside, model_revision="sha256:abc", block_size=16),
        },
    )

    found = config.load(tmp_path / "s" / "config.toml", {}).models
    assert found["smollm2"].tokenizer == "models/smol"
    assert found["smollm2"].model_revision == state.directory_digest(inside)
    assert found["meta/llama 3"].tokenizer == str(outside)
    assert (found["meta/llama 3"].model_revision, found["meta/llama 3"].block_size) == ("sha256:abc", 16)


def test_a_model_directory_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="nothing"):
        state.init(tmp_path / "s", workers=[], models={"m": state.Model(tokenizer=tmp_path / "nothing")})


def test_a_directorys_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    for name, files in {"a": {"x": "1", "y": "2"}, "b": {"y": "2", "x": "1"}, "c": {"x": "12", "y": ""}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)

    a, b, c = (state.directory_digest(tmp_path / name) for name in "abc")

    assert a == b != c


def test_the_servers_config_is_written_for_the_keys_that_exist(directory: Path) -> None:
    path = state.write_nats_config(directory, port=natsconf.RANDOM_PORT, monitor_port=natsconf.RANDOM_PORT)
    first = path.read_text()
    state.add_worker(directory, "w3")
    state.write_nats_config(directory, port=natsconf.RANDOM_PORT, monitor_port=natsconf.RANDOM_PORT)

    keys = state.nats_keys(directory)
    assert keys.workers["w3"] in path.read_text()
    assert keys.workers["w3"] not in first
    for name, content in contents(directory).items():
        if name.endswith((".nk", ".key")):
            assert content.strip() not in path.read_bytes(), f"the secret in {name}"


def test_a_second_user_of_the_directory_is_refused_and_told_the_first_ones_pid(directory: Path) -> None:
    with state.lock(directory):
        assert state.lock_holder(directory) == os.getpid()
        with pytest.raises(state.StateLocked, match=f"pid {os.getpid()}") as caught, state.lock(directory):
            pass

        assert "prefixbus down" in caught.value.sentence()
    assert state.lock_holder(directory) is None
    with state.lock(directory):
        pass


def _hold(directory: Path, ready: Event, end: Event) -> None:
    with state.lock(directory):
        ready.set()
        end.wait(10)
        os._exit(9)


def test_a_lock_dies_with_its_holder(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(directory, ready, end))
    holder.start()
    assert ready.wait(10)

    with pytest.raises(state.StateLocked, match=f"pid {holder.pid}"), state.lock(directory):
        pass
    end.set()
    holder.join(10)

    assert state.lock_holder(directory) is None
    with state.lock(directory):
        pass


class _Run(msgspec.Struct, frozen=True):
    pid: int
    http: str


def test_a_json_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    state.write_json(path, _Run(1, "a"))
    state.write_json(path, _Run(2, "b"))

    assert state.read_json(path, _Run) == _Run(2, "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"pid": "x", "http": ""}', b"\xff"])
def test_a_json_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cluster.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigInvalid, match=r"cluster\.json"):
        state.read_json(path, _Run)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    state.write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        state.write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
