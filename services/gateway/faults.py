"""What went wrong, in OpenAI's form: a body, a status, and whether to try again.

    {"error": {"message", "type", "param", "code"}}

`code` is the error's own, which never changes, but where OpenAI's clients know another word for the same. `param` is
the field that the sentence begins with. The `type` follows from the status. What failed behind the gateway is named by
its class alone: addresses and the state of workers are for the operator, who has `prefixbus status` and the logs, also
those of engines for what they say of themselves.

Owns: that translation.   Must not know: HTTP servers.
Source: OpenAI API reference, "Error codes"; openai-python `_base_client.py` (`x-should-retry`, `retry-after`)."""

import re
from collections.abc import Mapping

import orjson

from ..bus.errors import BusUnavailable, EngineFailed, NoWorkers, PrefixbusError, WorkerLost
from ..client import Silence

# Their own sentences are for the operator.
_BEHIND = BusUnavailable | EngineFailed | NoWorkers | Silence | WorkerLost
# OpenAI's words, which clients look for.
_CODES = {"unknown_model": "model_not_found", "context_too_long": "context_length_exceeded"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIELD = re.compile(r"([a-z_][a-z0-9_]*(?:\[\d+\]|\.\w+)*): ")


class NotServed(PrefixbusError):
    """There is nothing at this URL."""

    code = "unknown_url"
    status = 404


class WrongMethod(PrefixbusError):
    """This URL takes another method."""

    code = "method_not_allowed"
    status = 405


class TooSlow(PrefixbusError):
    """The body of the request did not come in time."""

    code = "request_timeout"
    status = 408
    retryable = True


def fault(error: PrefixbusError) -> dict[str, object]:
    """The body's object."""
    sentence = (type(error)() if isinstance(error, _BEHIND) else error).sentence()
    field = _FIELD.match(sentence) if error.status < 500 else None
    return {
        "error": {
            "message": sentence,
            "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error"),
            "param": field[1] if field else None,
            "code": _CODES.get(error.code, error.code),
        }
    }


def body(error: PrefixbusError) -> bytes:
    return orjson.dumps(fault(error))


def headers(error: PrefixbusError) -> Mapping[str, str]:
    """Headers that say what to do about it."""
    said = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable and error.status in (429, 503):
        said["Retry-After"] = f"{max(1.0, error.retry_after_s or 0.0):.0f}"
    if error.status == 401:
        said["WWW-Authenticate"] = "Bearer"
    return said
