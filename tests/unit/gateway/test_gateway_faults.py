"""Errors in OpenAI's form: stable codes, the field at fault, and whether to try again."""

import pytest

from prefixbus import client
from prefixbus.bus import errors
from prefixbus.gateway import faults
from prefixbus.gateway.keys import InvalidKey


@pytest.mark.parametrize(
    ("error", "kind", "code", "param"),
    [
        (errors.BadRequest("is missing.", field="messages"), "invalid_request_error", "bad_request", "messages"),
        (
            errors.BadRequest("x", field="messages[2].content[0]"),
            "invalid_request_error",
            "bad_request",
            "messages[2].content[0]",
        ),
        # As it comes over the bus, where the sentence is all there is.
        (
            errors.ContextTooLong("messages: 9 tokens are over."),
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        (errors.UnknownModel("No such model: it is not served."), "not_found_error", "model_not_found", None),
        (InvalidKey(), "authentication_error", "invalid_api_key", None),
        (errors.BusPermissionDenied(), "permission_error", "permission_denied", None),
        (errors.Overloaded(), "server_error", "overloaded", None),
        (errors.Unavailable("stream: is lost"), "server_error", "unavailable", None),
    ],
)
def test_an_error_has_its_type_code_and_field(
    error: errors.PrefixbusError, kind: str, code: str, param: str | None
) -> None:
    said = faults.fault(error)["error"]

    assert said == {"message": error.sentence(), "type": kind, "param": param, "code": code}


@pytest.mark.parametrize(
    "kind", [errors.BusUnavailable, errors.EngineFailed, errors.NoWorkers, errors.WorkerLost, client.Silence]
)
def test_of_what_failed_behind_the_gateway_nothing_is_said_but_its_kind(kind: type[errors.PrefixbusError]) -> None:
    error = kind("w7 at 10.0.0.1:8001 is draining.", remedy="prefixbus status")

    said = faults.fault(error)["error"]

    assert said == {"message": kind().sentence(), "type": "server_error", "param": None, "code": kind.code}


def test_no_two_errors_have_one_code_over_http() -> None:
    codes = [faults._CODES.get(kind.code, kind.code) for kind in errors.all_errors()]

    assert len(set(codes)) == len(codes)


def test_overload_says_when_to_come_again() -> None:
    error = errors.Overloaded()
    error.retry_after_s = 7.0

    assert faults.headers(error) == {"x-should-retry": "true", "Retry-After": "7"}


def test_what_was_refused_for_good_is_not_to_be_tried_again() -> None:
    assert faults.headers(errors.BadRequest()) == {"x-should-retry": "false"}
    assert faults.headers(errors.DeadlineExceeded()) == {"x-should-retry": "false"}
