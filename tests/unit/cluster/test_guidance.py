"""What people are told to type can be typed: it is complete, and fits the credential."""

import itertools
import json
import shlex
from pathlib import Path

import pytest

from prefixbus.cluster import guidance
from prefixbus.cluster.state import NewTenant


def credential(tenant: str = "demo", label: str = "default", scopes: tuple[str, ...] | None = None) -> NewTenant:
    inbox = f"_INBOX.{tenant}" if scopes is None else f"_INBOX.{tenant}.{label}"
    return NewTenant(tenant=tenant, label=label, token="t", inbox_prefix=inbox, scopes=scopes)


@pytest.mark.parametrize(
    ("new", "state", "model", "options"),
    [
        (credential(), None, "smollm2", []),
        (credential("acme"), None, "smollm2", ["--tenant", "acme"]),
        (credential(label="b"), None, "smollm2", ["--label", "b"]),
        (credential(scopes=("hr", "law")), None, "smollm2", ["--scope", "hr"]),
        (credential(scopes=("hr", "")), None, "smollm2", []),
        (credential(), Path("/a b/s"), "other", ["--model", "other", "--state", "/a b/s"]),
    ],
)
def test_the_send_command_names_all_that_is_not_the_default(
    new: NewTenant, state: Path | None, model: str, options: list[str]
) -> None:
    command = shlex.split(guidance.send_command(new, "prefixbus", state, model))

    assert command == ["prefixbus", "send", *options, guidance.QUESTION]


def test_the_nats_command_goes_where_the_credential_may() -> None:
    new = credential("acme", "alice", ("hr",))

    command = shlex.split(guidance.nats_command(new, "nats://127.0.0.1:9", "a/b", ca="/c a.pem"))

    options = dict(itertools.pairwise(command))
    assert options["--server"] == "nats://127.0.0.1:9"
    assert options["--user"] == "acme"
    assert options["--inbox-prefix"] == "_INBOX.acme.alice"
    assert options["--tlsca"] == "/c a.pem"
    assert options["--raw"] == "pb.v1.infer.acme.a_2Fb.hr"
    assert json.loads(command[-1])["max_tokens"] == guidance.MAX_TOKENS


@pytest.mark.parametrize(
    ("usage", "sentence"),
    [
        ({}, ""),
        (
            {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}},
            "40 prompt tokens, 32 of them from the cache; 5 tokens answered.",
        ),
        (
            {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": None},
            "40 prompt tokens, 0 of them from the cache; 5 tokens answered.",
        ),
    ],
)
def test_usage_is_a_sentence(usage: dict[str, object], sentence: str) -> None:
    assert guidance.usage_sentence(usage) == sentence


@pytest.mark.parametrize(("scope", "path"), [("", "/v1/chat/completions"), ("hr", "/scopes/hr/v1/chat/completions")])
def test_the_curl_command_is_one_request_with_the_key_of_the_shell(scope: str, path: str) -> None:
    command = shlex.split(
        guidance.curl_command("a/b", "http://127.0.0.1:9", "demo.$PREFIXBUS_TOKEN", scope, "/c a.pem")
    )

    assert command[2] == f"http://127.0.0.1:9{path}"
    assert command[command.index("--cacert") + 1] == "/c a.pem"
    assert "Authorization: Bearer demo.$PREFIXBUS_TOKEN" in command
    body = json.loads(command[-1])
    assert (body["model"], body["stream"], body["max_tokens"]) == ("a/b", True, guidance.MAX_TOKENS)
