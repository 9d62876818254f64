"""The frames of an answer: chunks, keep-alives, and the one empty message that ends it.

    chunk       a body; Pb-Seq 0, 1, 2 ..., Pb-Attempt; the first one also Pb-Decision, Pb-Prompt-Tokens and
                Pb-Predicted-Tokens
    keep-alive  a chunk object with `choices: []`, no Pb-Seq
    end         no body; Pb-Final: 1, and Pb-Seq = how many chunks came before, so that a lost last one is noticed
    error       an end with Pb-Error (the code) and the NATS services headers (status, sentence); after a chunk, where
                the worker was lost or its engine failed, also Pb-Resume: resumable or not_resumable

A resumable answer's chunks have `token_ids` in their choice: exactly the tokens of its text. To go on, the client sends
the same body once more, as another request, with all of them in `resume.token_ids`.

Owns: these headers.   Must not know: who publishes them, or where to.
Source: DESIGN section 2; NATS ADR-32 (service errors), ADR-4 (header values are one line)."""

import msgspec

from .errors import EngineFailed, PrefixbusError, WorkerLost
from .subjects import (
    HEADER_ATTEMPT,
    HEADER_DECISION,
    HEADER_ERROR,
    HEADER_FINAL,
    HEADER_PREDICTED_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_RESUME,
    HEADER_SEQ,
    HEADER_SERVICE_ERROR,
    HEADER_SERVICE_ERROR_CODE,
    HEADER_WORKER,
)

MAX_SENTENCE = 512

_encode = msgspec.json.Encoder().encode


def chunk_headers(request_id: str, *, seq: int, attempt: int) -> dict[str, str]:
    """Headers of chunk `seq` (from 0) of dispatch attempt `attempt`; `request_id` is the caller's label."""
    return {HEADER_REQUEST_ID: request_id, HEADER_SEQ: str(seq), HEADER_ATTEMPT: str(attempt)}


def first_headers(*, decision: str, prompt_tokens: int, predicted_tokens: int, worker: str = "") -> dict[str, str]:
    """What the first chunk's headers have besides; `worker` only where tenants may know it."""
    headers = {
        HEADER_DECISION: decision,
        HEADER_PROMPT_TOKENS: str(prompt_tokens),
        HEADER_PREDICTED_TOKENS: str(predicted_tokens),
    }
    return {**headers, HEADER_WORKER: worker} if worker else headers


def final_headers(request_id: str, *, seq: int, attempt: int | None = None) -> dict[str, str]:
    """Headers of the end of an answer of `seq` chunks; no `attempt` when none was dispatched."""
    headers = {HEADER_REQUEST_ID: request_id, HEADER_FINAL: "1", HEADER_SEQ: str(seq)}
    if attempt is not None:
        headers[HEADER_ATTEMPT] = str(attempt)
    return headers


def error_headers(
    error: PrefixbusError, request_id: str, *, seq: int = 0, attempt: int | None = None
) -> dict[str, str]:
    """Headers of an end that says what went wrong, after `seq` chunks."""
    headers = final_headers(request_id, seq=seq, attempt=attempt)
    headers[HEADER_ERROR] = error.code
    headers[HEADER_SERVICE_ERROR_CODE] = str(error.status)
    headers[HEADER_SERVICE_ERROR] = one_line(error.sentence())
    return headers


def resume_headers(error: PrefixbusError, *, resumable: bool) -> dict[str, str]:
    """What an end after a chunk has besides: whether it is worth asking another worker to go on."""
    if not isinstance(error, WorkerLost | EngineFailed):
        return {}
    return {HEADER_RESUME: "resumable" if resumable else "not_resumable"}


def one_line(text: str) -> str:
    """`text` as a header value: one line of printable ASCII, at most 512 characters, escapes for all else."""
    line = " ".join(text.split()).encode("ascii", "backslashreplace").decode("ascii")
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_SENTENCE else line[: MAX_SENTENCE - 3] + "..."


def completion_id(kind: str, request_id: str) -> str:
    """The `id` of every chunk of a request (`kind` is chat or completions)."""
    return f"chatcmpl-{request_id}" if kind == "chat" else f"cmpl-{request_id}"


def object_name(kind: str) -> str:
    """The `object` of a streamed chunk, as OpenAI names it."""
    return "chat.completion.chunk" if kind == "chat" else "text_completion"


def keepalive(kind: str, model: str, request_id: str, created_at: int) -> bytes:
    """The body that breaks a silent wait: a chunk object without choices. Its only header is Pb-Request-Id."""
    return _encode(
        {
            "id": completion_id(kind, request_id),
            "object": object_name(kind),
            "created": created_at,
            "model": model,
            "choices": [],
        }
    )


def keepalive_headers(request_id: str) -> dict[str, str]:
    return {HEADER_REQUEST_ID: request_id}
