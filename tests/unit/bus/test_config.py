"""One file, environment overrides, and errors that name what is wrong."""

from pathlib import Path

import pytest

from prefixbus.bus import config
from prefixbus.bus.errors import ConfigInvalid


def test_an_empty_file_gives_the_defaults() -> None:
    assert config.parse("", {}) == config.Config()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[router]\nlookup_timeout = 3", "lookup_timeout"),
        ("[routr]", "routr"),
        ("[limits]\nmax_body_bytes = 0", "limits.max_body_bytes"),
        ("[limits]\nmax_body_bytes = 'big'", "limits.max_body_bytes"),
        ("[models.m]\ntokenizer = 't'", "model_revision"),
        ("[http]\nport = 99999", "http.port"),
        ("[http\n", "config.toml"),
    ],
)
def test_a_bad_value_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        config.parse(text, {})

    assert named in caught.value.sentence()


def test_the_environment_overrides_the_file() -> None:
    environ = {
        "PREFIXBUS_ROUTER__LOOKUP_TIMEOUT_MS": "20",
        "PREFIXBUS_NATS__URL": "nats://127.0.0.1:9",
        "PREFIXBUS_TOKEN": "not a config key",
        "PREFIXBUS_STATE": "elsewhere",
        "OTHER__THING": "1",
    }

    loaded = config.parse("[router]\nlookup_timeout_ms = 7\nmax_attempts = 2", environ)

    assert loaded.router.lookup_timeout_ms == 20
    assert loaded.router.max_attempts == 2
    assert loaded.nats.url == "nats://127.0.0.1:9"


def test_an_unknown_override_is_named() -> None:
    with pytest.raises(ConfigInvalid, match="bogus"):
        config.parse("", {"PREFIXBUS_ROUTER__BOGUS": "1"})


def test_a_variable_that_is_no_override_is_named() -> None:
    with pytest.raises(ConfigInvalid, match="PREFIXBUS_ROUTER_LOOKUP_TIMEOUT_MS"):
        config.parse("", {"PREFIXBUS_ROUTER_LOOKUP_TIMEOUT_MS": "20"})


def test_an_override_finds_a_model_whatever_its_case() -> None:
    text = "[models.Tiny-Llama]\ntokenizer = 't'\nmodel_revision = 'r'"

    loaded = config.parse(text, {"PREFIXBUS_MODELS__TINY-LLAMA__PROFILE": "instant"})

    assert loaded.models["Tiny-Llama"].profile == "instant"


def test_a_missing_file_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="prefixbus init"):
        config.load(tmp_path / "config.toml", {})


MODEL = '[models.m]\ntokenizer = "t"\nmodel_revision = "sha256:m"\n'


def test_an_adapter_is_asked_for_by_the_models_name_and_its_own() -> None:
    text = MODEL + '[models.m.adapters.french]\nrevision = "sha256:f"\n[models.m.adapters.b]\nrevision = "sha256:b"\n'

    section = config.parse(text + 'engine_name = "lora-b"\n', {}).models["m"]

    assert section.engine_names() == {"french": "french", "b": "lora-b"}
    assert [config.asked_name("m", adapter) for adapter in ("", "french")] == ["m", "m:french"]


@pytest.mark.parametrize(
    ("case", "adapters", "says"),
    [
        ("no revision", "[models.m.adapters.a]\n", "revision"),
        ("an empty revision", '[models.m.adapters.a]\nrevision = ""\n', "revision"),
        ("no name", '[models.m.adapters.""]\nrevision = "x"\n', "'m' is the name of something else"),
        (
            "the name of another model",
            '[models.m.adapters.a]\nrevision = "x"\n' + MODEL.replace("models.m", 'models."m:a"'),
            "'m:a' is the name of something else",
        ),
        ("the model's name at the engine", '[models.m.adapters.m]\nrevision = "x"\n', "'m' is what the engine calls"),
        (
            "one name at the engine for two",
            '[models.m.adapters.a]\nrevision = "x"\n[models.m.adapters.b]\nrevision = "y"\nengine_name = "a"\n',
            "'a' is what the engine calls",
        ),
    ],
)
def test_adapters_that_could_be_taken_for_something_else_are_refused(case: str, adapters: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        config.parse(MODEL + adapters, {})
