"""`python weights.py GGUF DIRECTORY`: the weights of a GGUF file as config.json and safetensors in bfloat16.

The directory appears whole or not at all. vLLM can read a GGUF by itself only with a plugin, and computes on packed
weights then; unpacked they are the same numbers, in the format it was made for.

Needs torch, transformers, accelerate and gguf of that environment, and nothing of prefixbus."""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig


def unpack(source: Path, directory: Path) -> None:
    """:raises OSError: the file is no GGUF, or the directory cannot be written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(scratch / "new")
        (scratch / "new").replace(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
