"""What the command line tells people to type, and numbers as sentences.

Owns: the wording.   Must not know: terminals, where tokens are kept."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bus import subjects
from .deployment import DEFAULT_MODEL
from .state import DEFAULT_LABEL, DEMO_TENANT, NewTenant

QUESTION = "What does a KV cache hold?"
MAX_TOKENS = 32
RANDOM_WORDS = "Simulated engines answer with random words."


def send_command(new: NewTenant, program: str, state: Path | None, model: str) -> str:
    """`prefixbus send` with everything that this credential needs. `state` is None for the default directory."""
    words = [program, "send"]
    if new.tenant != DEMO_TENANT:
        words += ["--tenant", new.tenant]
    if new.label != DEFAULT_LABEL:
        words += ["--label", new.label]
    if scope := scope_of(new):
        words += ["--scope", scope]
    if model != DEFAULT_MODEL:
        words += ["--model", model]
    if state is not None:
        words += ["--state", str(state)]
    return f'{shlex.join(words)} "{QUESTION}"'


def nats_command(new: NewTenant, url: str, model: str, ca: str = "") -> str:
    """The same request by the plain `nats` command; the token comes from the environment."""
    words = ["nats", "--server", url, "--user", new.tenant, "--password", '"$PREFIXBUS_TOKEN"']
    words += ["--inbox-prefix", new.inbox_prefix]
    if ca:
        words += ["--tlsca", shlex.quote(ca)]
    words += ["request", "--wait-for-empty", "--reply-timeout", "5s", "--raw"]
    body = f'{{"messages":[{{"role":"user","content":"{QUESTION}"}}],"max_tokens":{MAX_TOKENS}}}'
    return " ".join([*words, subjects.infer(new.tenant, model, scope_of(new)), shlex.quote(body)])


def curl_command(model: str, url: str, key: str, scope: str = "", ca: str = "") -> str:
    """The same request over HTTP by curl; `key` may name variables of the shell."""
    words = ["curl", "-N", f"{url}{f'/scopes/{scope}' if scope else ''}/v1/chat/completions"]
    if ca:
        words += ["--cacert", shlex.quote(ca)]
    words += ["-H", f'"Authorization: Bearer {key}"', "-H", "'Content-Type: application/json'"]
    message = f'{{"role":"user","content":"{QUESTION}"}}'
    body = f'{{"model":"{model}","messages":[{message}],"max_tokens":{MAX_TOKENS},"stream":true}}'
    return " ".join([*words, "-d", shlex.quote(body)])


def usage_sentence(usage: Mapping[str, Any]) -> str:
    """An OpenAI usage object, for people; empty when there is none."""
    if "prompt_tokens" not in usage:
        return ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return (
        f"{usage['prompt_tokens']} prompt tokens, {cached} of them from the cache; "
        f"{usage.get('completion_tokens', 0)} tokens answered."
    )


def scope_of(new: NewTenant) -> str:
    """A scope that this credential may name; "" is the tenant-wide one."""
    if new.scopes is None or "" in new.scopes or not new.scopes:
        return ""
    return new.scopes[0]
