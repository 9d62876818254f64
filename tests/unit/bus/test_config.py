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
