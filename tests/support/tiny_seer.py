"""`python tiny_seer.py DIRECTORY TOKENIZER`, by vLLM's own Python: an Idefics3 of random weights that takes images.

Of each it makes 4 tokens, in 3 that frame them. What it says means nothing. A model's processor is read with its
tokenizer from where its weights are, so that is copied there."""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

IMAGE_TOKEN = "<image>"
# Pixels a side: of the image that is looked at, and of each piece of it. Four pieces make a token.
IMAGE, PIECE = 64, 16

directory, tokenizer = map(Path, sys.argv[1:])
vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
torch.manual_seed(0)
CONFIG = Idefics3Config(
    text_config={
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    vision_config={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PIECE,
    },
    image_token_id=vocabulary[IMAGE_TOKEN],
    scale_factor=2,
    tie_word_embeddings=False,
)
CONFIG.pad_token_id = 2
PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": IMAGE},
    "size": {"longest_edge": IMAGE},
    "resample": 1,
    "rescale_factor": 1 / 255,
}

Idefics3ForConditionalGeneration(CONFIG).to(torch.bfloat16).save_pretrained(directory)
shutil.copytree(tokenizer, directory, dirs_exist_ok=True)
(directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
tokens_each = (IMAGE // PIECE) ** 2 // CONFIG.scale_factor**2
(directory / "processor_config.json").write_text(
    json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": tokens_each})
)
