"""One tree of errors with codes that never change.

    PrefixbusError                internal            500
    +- BadRequest                 bad_request         400
    |  +- InvalidJson             invalid_json        400
    |  +- ModelMismatch           model_mismatch      400
    |  +- ContextTooLong          context_too_long    400
    |  +- Unsupported             unsupported         400
    |  +- NotResumable            not_resumable       400
    |  +- BadSubject              bad_subject         400
    +- ForgedReply                forged_reply        403
    +- UnknownModel               unknown_model       404
    +- StaleNamespace             stale_namespace     409   retryable
    +- TooLarge                   too_large           413
    +- HeadersTooLarge            headers_too_large   431
    +- Cancelled                  cancelled           499
    +- Unavailable                unavailable         503   retryable
    |  +- Overloaded              overloaded          503   retryable
    |  +- NoWorkers               no_workers          503   retryable
    +- WorkerLost                 worker_lost         502   retryable
    +- EngineFailed               engine_failed       502
    +- DeadlineExceeded           deadline_exceeded   504
    +- ConfigInvalid              config_invalid      500
    +- BusPermissionDenied        permission_denied   403
    +- BusUnavailable             bus_unavailable     503   retryable
    +- WorkerRefused              worker_refused      409

A class docstring's first line is its default message. `field` names what was wrong and `remedy` what to do about it;
both are part of the sentence people read. Codes travel in the `Pb-Error` header, the status in the NATS services header
`Nats-Service-Error-Code` (docs: NATS ADR-32)."""

from typing import ClassVar

_registry: dict[str, type["PrefixbusError"]] = {}


class PrefixbusError(Exception):
    """Something failed inside prefixbus."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    # When it may be worth another try, if whoever refused said so (the header Retry-After).
    retry_after_s: float | None = None

    def __init__(self, message: str = "", *, field: str = "", remedy: str = "") -> None:
        self.message = message or (type(self).__doc__ or "").splitlines()[0]
        self.field = field
        self.remedy = remedy
        super().__init__(self.sentence())

    def __init_subclass__(cls) -> None:
        if "code" not in cls.__dict__:
            raise TypeError(f"{cls.__name__} needs a code of its own")
        if cls.code in _registry:
            raise TypeError(f"the code {cls.code} belongs to {_registry[cls.code].__name__}")
        _registry[cls.code] = cls

    def sentence(self) -> str:
        """What a person reads: the field, what is wrong with it, what to do."""
        parts = [f"{self.field}: {self.message}" if self.field else self.message]
        if self.remedy:
            # Messages of libraries are no sentences; without a stop the remedy would run on from them.
            if not parts[0].endswith((".", "!", "?")):
                parts[0] += "."
            parts.append(self.remedy)
        return " ".join(parts)


_registry[PrefixbusError.code] = PrefixbusError


def told_by_msgspec(exc: Exception) -> tuple[str, str]:
    """What msgspec says is wrong, as a sentence, and where: `a.b[0]`, or empty for the whole."""
    what, _, where = str(exc).partition(" - at `$")
    return f"{what}.", where.removesuffix("`").removeprefix(".")


class BadRequest(PrefixbusError):
    """The request is not valid."""

    code = "bad_request"
    status = 400


class InvalidJson(BadRequest):
    """The body is not a JSON object."""

    code = "invalid_json"


class ModelMismatch(BadRequest):
    """The body's model is not the subject's."""

    code = "model_mismatch"


class ContextTooLong(BadRequest):
    """The prompt does not fit into the model's context."""

    code = "context_too_long"


class Unsupported(BadRequest):
    """The request asks for something that is not served."""

    code = "unsupported"


class NotResumable(BadRequest):
    """The answer cannot be taken up where it broke off."""

    code = "not_resumable"


class BadSubject(BadRequest):
    """The subject is not one of prefixbus's."""

    code = "bad_subject"


class ForgedReply(PrefixbusError):
    """The reply subject does not lie in the tenant's own inbox."""

    code = "forged_reply"
    status = 403


class UnknownModel(PrefixbusError):
    """No such model is served."""

    code = "unknown_model"
    status = 404


class StaleNamespace(PrefixbusError):
    """The namespace of the request is no longer the current one."""

    code = "stale_namespace"
    status = 409
    retryable = True


class TooLarge(PrefixbusError):
    """The body is over the limit."""

    code = "too_large"
    status = 413


class HeadersTooLarge(PrefixbusError):
    """The header block is over the limit."""

    code = "headers_too_large"
    status = 431


class Cancelled(PrefixbusError):
    """The request was cancelled."""

    code = "cancelled"
    status = 499


class Unavailable(PrefixbusError):
    """A part of prefixbus that the request needs is not there."""

    code = "unavailable"
    status = 503
    retryable = True


class Overloaded(Unavailable):
    """Every worker is full."""

    code = "overloaded"


class NoWorkers(Unavailable):
    """No worker serves this model."""

    code = "no_workers"


class WorkerLost(PrefixbusError):
    """The worker was lost while it answered."""

    code = "worker_lost"
    status = 502
    retryable = True


class EngineFailed(PrefixbusError):
    """The engine answered with an error."""

    code = "engine_failed"
    status = 502


class DeadlineExceeded(PrefixbusError):
    """The deadline of the request has passed."""

    code = "deadline_exceeded"
    status = 504


class ConfigInvalid(PrefixbusError):
    """The configuration is not valid."""

    code = "config_invalid"
    status = 500


class BusPermissionDenied(PrefixbusError):
    """The server's permissions deny this subject."""

    code = "permission_denied"
    status = 403


class BusUnavailable(PrefixbusError):
    """The bus did not answer."""

    code = "bus_unavailable"
    status = 503
    retryable = True


class WorkerRefused(PrefixbusError):
    """The worker may not register."""

    code = "worker_refused"
    status = 409


def by_code(code: str) -> type[PrefixbusError]:
    """The class that owns `code`; PrefixbusError for one this version does not know."""
    return _registry.get(code, PrefixbusError)


def all_errors() -> list[type[PrefixbusError]]:
    """Every class, in the order of definition (the reference in docs/ is made from this)."""
    return list(_registry.values())
