"""Whether a dispatch may be run here: the checks at the point of use.

Whatever the router or the tokenizer made of a request, this worker runs it only if every field of its namespace is one
that this worker serves, the namespace's id is the one the secret gives, and the answer goes to the tenant's own inbox.

Owns: the rules.   Must not know: load, NATS, the engine.   Source: DESIGN 3 and 7 [hard]."""

import hmac

import msgspec
import orjson

from ..bus import subjects
from ..bus.errors import UnknownModel
from ..bus.identity import ModelIdentity
from ..bus.messages import WARM, Dispatch, Job
from ..bus.namespace import Namespace, ns_id

STALE_NAMESPACE = "stale_namespace"
FORGED_REPLY = "forged_reply"
BAD_REQUEST = "bad_request"
CONTEXT_TOO_LONG = "context_too_long"

FACT_NAMESPACE = "refused_namespace"
FACT_REPLY = "forged_reply"

Params = dict[str, object]
"""Parameters by vLLM's names, as the engine is to get them. With `messages` they are for its chat endpoint."""

_FIELDS = msgspec.structs.fields(Namespace)


class Refusal(msgspec.Struct, frozen=True):
    """Why not: a stable code, a sentence, and the kind of fact it is for the record (empty: none)."""

    code: str
    detail: str
    fact: str = ""


def vet(
    dispatch: Dispatch,
    job: Job,
    *,
    identity: ModelIdentity,
    namespace_key: bytes,
    max_model_len: int,
) -> Refusal | Params:
    """The engine's parameters if it may run."""
    asked = job.namespace
    if job.request_id != dispatch.request_id or not subjects.is_token(job.request_id):
        return Refusal(BAD_REQUEST, "the dispatch and its job are of different requests")
    if not subjects.is_token(asked.tenant) or (asked.scope and not subjects.is_token(asked.scope)):
        return Refusal(STALE_NAMESPACE, "tenant or scope is malformed", FACT_NAMESPACE)
    if dispatch.decision == WARM:
        if job.reply:
            return Refusal(BAD_REQUEST, "an order has no client to answer")
    elif not subjects.is_own_reply(job.reply, asked.tenant):
        return Refusal(FORGED_REPLY, "the reply subject is not in the tenant's inbox", FACT_REPLY)
    try:
        served = identity.namespace(asked.tenant, asked.scope, asked.client_salt, adapter=asked.adapter)
    except UnknownModel:
        return Refusal(STALE_NAMESPACE, "served otherwise: adapter", FACT_NAMESPACE)
    if asked != served:
        return Refusal(STALE_NAMESPACE, f"served otherwise: {', '.join(_differing(asked, served))}", FACT_NAMESPACE)
    if not hmac.compare_digest(ns_id(namespace_key, asked), dispatch.ns_id):
        return Refusal(STALE_NAMESPACE, "the namespace id is not the namespace's", FACT_NAMESPACE)
    return _vet_content(job, max_model_len)


def _vet_content(job: Job, max_model_len: int) -> Refusal | Params:
    if not job.tokens or len(job.tokens) % 4 or job.kind not in ("chat", "completions"):
        return Refusal(BAD_REQUEST, "the job has no tokens, or is of no known kind")
    if len(job.tokens) // 4 >= max_model_len:
        return Refusal(CONTEXT_TOO_LONG, f"{len(job.tokens) // 4} tokens leave no room in {max_model_len}")
    try:
        return sampling_params(job.params) | chat_params(job.chat)
    except ValueError as exc:
        return Refusal(BAD_REQUEST, f"the job's parameters are no JSON object: {exc}")


# The bridge's own to say, or able to change what is computed from which cache: never taken from a request.
_NOT_A_CLIENTS = frozenset(
    (
        "cache_salt",
        "echo",
        "kv_transfer_params",
        "messages",
        "model",
        "priority",
        "prompt",
        "prompt_embeds",
        "request_id",
        "return_token_ids",
        "stream",
        "stream_options",
        "suffix",
        "truncate_prompt_tokens",
        "vllm_xargs",
    )
)


# What the engine's chat endpoint reads besides, and nothing that could be more than that: its parsers and templates
# know many words.
_OF_CHAT = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "messages",
        "parallel_tool_calls",
        "reasoning_effort",
        "thinking_token_budget",
        "tool_choice",
        "tools",
    )
)


def sampling_params(params: bytes) -> Params:
    """The job's parameters for the engine, without those that are not a client's to set.

    :raises ValueError: not a JSON object."""
    return {name: value for name, value in _object(params).items() if name not in _NOT_A_CLIENTS}


def chat_params(chat: bytes) -> Params:
    """What else the engine's chat endpoint is given, with `messages`; empty for a request by token ids alone.

    :raises ValueError: not a JSON object, or one without messages."""
    content = {name: value for name, value in _object(chat).items() if name in _OF_CHAT}
    if chat and not isinstance(content.get("messages"), list):
        raise ValueError("a chat without messages")
    return content


def _object(raw: bytes) -> Params:
    if not raw:
        return {}
    content = orjson.loads(raw)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


def _differing(asked: Namespace, served: Namespace) -> list[str]:
    """Names of fields, never their values: an epoch must not reach a log."""
    return [field.name for field in _FIELDS if getattr(asked, field.name) != getattr(served, field.name)]
