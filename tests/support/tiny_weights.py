"""`python tiny_weights.py DIRECTORY`, by vLLM's own Python: a Llama of random weights that computes fast.

Its vocabulary is SmolLM2's, so that SmolLM2's tokenizer and chat template go with it; what it says means nothing."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=True,
)

LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(sys.argv[1])
