"""`prefixbus calibrate` against engines whose profile is known, and against what is no engine it could measure.

The engine waits for no step and tells in its metrics what each would have taken, so nothing here depends on the
machine."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.ports import free_port
from support.processes import spawned

from prefixbus.bus import config
from prefixbus.cluster import state
from prefixbus.engine_sim.profile import PRESETS
from prefixbus.router.choice import prior_of
from prefixbus.router.cost import prefill_ms

pytestmark = pytest.mark.timeout(120)

MODEL = "tiny"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    state.init(made, workers=[], models={MODEL: state.Model(tokenizer=models.tiny(), max_model_len=8192)})
    return made


@contextlib.contextmanager
def engine(*flags: str, profile: str = "h100-8b", served: str = MODEL) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "prefixbus.engine_sim", "--model-dir", str(models.tiny())),
        *("--served-model-name", served, "--port", url.rsplit(":", 1)[1], "--profile", profile),
        *("--enable-prompt-tokens-details", "--virtual-time", "--num-gpu-blocks", "1001", *flags),
    ]
    with spawned(command):
        give_up_at = time.monotonic() + 60
        while True:
            try:
                stats(url)
            except OSError:
                assert time.monotonic() < give_up_at, "the engine does not come up"
                time.sleep(0.05)
            else:
                break
        yield url


def stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/sim/stats", timeout=5) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def calibrate(directory: Path, url: str, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixbus", "calibrate", "--engine-url", url, "--model", MODEL, *more]
    return subprocess.run(
        [*command, "--state", str(directory)], capture_output=True, text=True, timeout=100, env=os.environ
    )


def measured_in(directory: Path) -> config.MeasuredSection | None:
    return config.load(directory / "config.toml", {}).models[MODEL].measured


@pytest.mark.parametrize("name", ["h100-8b", "h100-70b"])
def test_the_profile_of_an_engine_is_learned_and_written_where_routers_begin_from_it(
    directory: Path, name: str
) -> None:
    profile = PRESETS[name]
    with engine(profile=name) as url:
        done = calibrate(directory, url)
        asked = stats(url)

    assert done.returncode == 0, done.stderr
    section = config.load(directory / "config.toml", {}).models[MODEL]
    prior = prior_of(MODEL, section)
    for computed, prompt in ((32, 32), (700, 2000), (4000, 4000), (64, 8000)):
        expected = profile.step_ms + profile.prefill_ms(computed, prompt)
        assert prefill_ms(prior, computed, prompt) == pytest.approx(expected, rel=0.05)
    assert prior.decode_context_token_ms == pytest.approx(profile.decode_context_token_ms, rel=0.2)
    assert section.measured is not None
    assert (section.measured.block_size, section.measured.kv_tokens) == (32, 1001 * 32)
    assert "a decode step" in done.stderr
    assert asked["totals"]["computed_tokens"] <= 7 * 4096 + 3 * 2 * 33
    assert (asked["wrong_hits"], asked["running"], asked["waiting"]) == (0, 0, 0)


def test_a_dry_run_says_what_it_would_write(directory: Path) -> None:
    before = (directory / "config.toml").read_text()

    with engine() as url:
        done = calibrate(directory, url, "--dry-run", "--most-tokens", "1024")
        asked = stats(url)

    assert done.returncode == 0, done.stderr
    assert "prefill of n tokens" in done.stderr
    assert (directory / "config.toml").read_text() == before
    assert asked["totals"]["computed_tokens"] <= 7 * 1024 + 3 * 2 * 33


@pytest.mark.parametrize(
    ("case", "flags", "says"),
    [
        ("another model", {"served": "other"}, "serves other, not tiny"),
        ("other blocks", {"flags": ("--block-size", "16")}, "blocks have 16 tokens, the config says 32"),
        ("a leak", {"flags": ("--ignore-salt",)}, "reuses blocks across salts"),
        ("no time at all", {"profile": "instant"}, "computes in no time"),
    ],
)
def test_an_engine_that_cannot_be_measured_is_told_in_a_sentence_and_nothing_is_written(
    directory: Path, case: str, flags: dict[str, Any], says: str
) -> None:
    more = flags.pop("flags", ())
    with engine(*more, **flags) as url:
        done = calibrate(directory, url, "--most-tokens", "1024")

    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert measured_in(directory) is None


def test_a_busy_engine_is_left_alone_unless_one_insists(directory: Path) -> None:
    with engine() as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/sim/pause", method="POST"), timeout=5).close()
        body = json.dumps({"model": MODEL, "prompt": [9] * 40, "max_tokens": 1}).encode()
        asking = [sys.executable, "-c", "import sys, urllib.request as u; u.urlopen(sys.argv[1], sys.argv[2].encode())"]
        with spawned([*asking, f"{url}/v1/completions", body.decode()]):
            give_up_at = time.monotonic() + 30
            while not stats(url)["waiting"]:
                assert time.monotonic() < give_up_at, "nobody waits"
                time.sleep(0.02)

            refused = calibrate(directory, url)

            urllib.request.urlopen(urllib.request.Request(f"{url}/sim/resume", method="POST"), timeout=5).close()
        insisted = calibrate(directory, url, "--while-busy", "--most-tokens", "1024")

    assert refused.returncode == 1
    assert "busy with 1 request" in refused.stderr and "--while-busy" in refused.stderr
    assert insisted.returncode == 0, insisted.stderr


@pytest.mark.parametrize(
    ("case", "metrics", "says"),
    [
        ("no metrics", b"", "does not tell vllm:request_prefill_time_seconds"),
        ("metrics of another form", b"{\xff}", "metrics cannot be read"),
        ("no server", None, "cannot be reached"),
    ],
)
def test_what_is_no_engine_is_said_to_be_none(
    directory: Path, tmp_path: Path, case: str, metrics: bytes | None, says: str
) -> None:
    port = free_port()
    files = tmp_path / "www"
    (files / "v1").mkdir(parents=True)
    (files / "v1" / "models").write_text(json.dumps({"data": [{"id": MODEL}]}))
    (files / "metrics").write_bytes(metrics or b"")
    url = f"http://127.0.0.1:{port}"
    server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(files)]
    if metrics is None:
        done = calibrate(directory, url)
    else:
        with spawned(server):
            give_up_at = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(url, timeout=5).close()
                    break
                assert time.monotonic() < give_up_at
                time.sleep(0.05)
            done = calibrate(directory, url)

    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_the_config_does_not_have_is_named_with_those_that_it_has(directory: Path) -> None:
    done = calibrate(directory, "http://127.0.0.1:9", "--model", "other")

    assert done.returncode == 1
    assert "other is not in" in done.stderr and "it has tiny" in done.stderr
