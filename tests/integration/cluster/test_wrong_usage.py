"""What a person mistypes is answered with the option or field and what to do; nothing has to run for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixbus.cluster import deployment

pytestmark = pytest.mark.timeout(60)


def prefixbus(*arguments: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefixbus", *arguments, "--state", str(state)],
        capture_output=True,
        text=True,
        timeout=50,
        # What is wrong is framed, and must not be broken over lines.
        env={**os.environ, "COLUMNS": "300", "PREFIXBUS_TOKEN": "t"},
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("usage") / "state"
    deployment.prepare(directory, [])
    return directory


@pytest.mark.parametrize(
    ("arguments", "option", "says"),
    [
        (["run", "router", "--worker", "w4"], "--worker", "goes with worker_bridge alone"),
        (["run", "router", "--shard", "1"], "--shard", "goes with directory alone"),
        (["run", "worker_bridge", "--worker", "w4"], "--engine-url", "worker_bridge needs"),
        (["policy", "round-robin", "--canary", "0.1", "--class", "web"], "--class", "not one of system, document"),
        (["policy", "round-robin", "--class", "rag"], "--class", "goes with --canary alone"),
        (["policy", "--canary", "0.1"], "NAME|FILE", "or else --clear"),
        (["replay", "--speed", "asap"], "--speed", "goes with --resend alone"),
        (["replay", "--tenant", "acme"], "--tenant", "goes with --resend alone"),
        (["replay", "--resend", "--policy", "round-robin"], "--resend", "no --policy"),
        (["replay", "--since", "1h", "--until", "2h"], "--until", "not after --since"),
        (["mismatches", "--since", "1h", "--until", "2h"], "--until", "not after --since"),
        (["replay", "x", "--since", "1h"], "--since", "its own time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named_with_what_it_goes_with(
    state: Path, arguments: list[str], option: str, says: str
) -> None:
    done = prefixbus(*arguments, state=state)

    assert done.returncode == 2, done.stderr
    assert option in done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"verison": "x"}', "policy: Object contains unknown field `verison`. Correct it"),
        ('{"margin_ms": "4s"}', "policy.margin_ms: Expected `float | null`, got `str`. Correct it"),
        ('{"name": "prefix-aware" 1}', "policy: JSON is malformed"),
    ],
)
def test_a_wrong_weight_of_a_policy_is_named(state: Path, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "mine.json").write_text(content)

    done = prefixbus("policy", str(tmp_path / "mine.json"), state=state)

    assert done.returncode == 1
    assert says in done.stderr
    assert "docs/reference.md" in done.stderr


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ('[tls]\ncertificate = "creds/no.pem"\nkey = "creds/no-key.pem"\n', "tls.certificate, tls.key: cannot be used"),
        ('[tls]\ncertificate = "creds/no.pem"\n', "tls: certificate and key belong together. Set both"),
        ('[policy]\nname = "best"\n', "policy.name: 'best' is not a policy. Use one of"),
        ("[directory]\nshards = 0\n", "directory.shards: Expected `int` >= 1. Correct it in config.toml"),
    ],
)
def test_up_says_what_is_wrong_with_the_config_before_it_starts_anything(
    tmp_path: Path, section: str, says: str
) -> None:
    """Services said it in their logs, and `up` started them again and again."""
    directory = tmp_path / "state"
    deployment.prepare(directory, [])
    with (directory / "config.toml").open("a") as config:
        config.write(f"\n{section}")

    done = prefixbus("up", state=directory)

    assert done.returncode == 1
    assert says in done.stderr
    assert "starting" not in done.stderr
