"""`python tiny_adapters.py WEIGHTS DIRECTORY NAME...`, by vLLM's own Python: LoRA adapters of random weights for a
Llama.

Each is a directory of that name in the format of peft, which vLLM takes in --lora-modules, and changes what it says."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
# Rows of the projections, by their names in a Llama, as multiples of a head's size.
QUERIES = "self_attn.q_proj"
VALUES = "self_attn.v_proj"

weights, directory, *names = sys.argv[1:]
config = json.loads((Path(weights) / "config.json").read_text())
hidden = config["hidden_size"]
head = hidden // config["num_attention_heads"]
rows = {QUERIES: hidden, VALUES: head * config["num_key_value_heads"]}
for seed, name in enumerate(names):
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, out in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.{projection}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK)
    target = Path(directory) / name
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": weights,
                "r": RANK,
                "lora_alpha": RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": [name.rsplit(".", 1)[1] for name in rows],
            }
        )
    )
