"""The error tree: every code once, every default message a sentence."""

import pytest

from prefixbus.bus import errors


def test_every_error_has_a_code_a_status_and_a_sentence_of_its_own() -> None:
    classes = errors.all_errors()

    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert 400 <= cls.status < 600
        assert cls().sentence().endswith(".")


def test_a_code_taken_twice_refuses_to_import() -> None:
    with pytest.raises(TypeError, match="too_large"):
        type("Other", (errors.PrefixbusError,), {"code": "too_large"})


def test_a_class_without_a_code_refuses_to_import() -> None:
    with pytest.raises(TypeError, match="needs a code"):
        type("Other", (errors.BadRequest,), {})


def test_an_error_names_the_field_and_the_remedy() -> None:
    error = errors.BadRequest("must be a list.", field="messages", remedy="Send at least one message.")

    assert str(error) == "messages: must be a list. Send at least one message."


def test_a_remedy_does_not_run_on_from_what_a_library_said() -> None:
    error = errors.ConfigInvalid("Object missing required field `name`", remedy="Name it.")

    assert error.sentence() == "Object missing required field `name`. Name it."


def test_codes_lead_back_to_their_class() -> None:
    assert errors.by_code("overloaded") is errors.Overloaded
    assert errors.by_code("from a later version") is errors.PrefixbusError


def test_the_drawn_tree_is_the_tree() -> None:
    drawing = errors.__doc__ or ""

    for cls in errors.all_errors():
        if cls.__module__ == errors.__name__:
            assert f"{cls.__name__} " in drawing
            assert f" {cls.code} " in drawing
