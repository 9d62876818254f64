"""How long one engine step takes on a given machine and model: the only place that knows about hardware.

    step = step_ms
         + prefill_step_ms                                   if it prefills anything
         + prefill_token_ms * n + prefill_attention_ms * n * (L - n/2)     for each chunk of n tokens that ends at L
         + decode_sequence_ms                                for each sequence in decode
         + decode_context_token_ms * context                 for each sequence in decode

Owns: the cost formula and its presets.   Must not know: blocks, requests, clocks.
Units: milliseconds, tokens.   Source: facts of the routing pre-study (its engine model agrees with a well-known
router's own offline replay within 5 % on TTFT)."""

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Cost coefficients of one (machine, model) pair and the limits of a step."""

    name: str
    step_ms: float
    prefill_step_ms: float
    prefill_token_ms: float
    prefill_attention_ms: float
    decode_sequence_ms: float
    decode_context_token_ms: float
    step_tokens: int = 8192
    """Token budget of a step, decode and prefill chunks together (vLLM's max_num_batched_tokens)."""
    max_num_seqs: int = 256
    kv_token_bytes: int = 128 << 10
    """KV of one token in all layers: 32 layers of 8 heads of 128 for an 8B model, K and V, two bytes each."""

    def chunk_ms(self, tokens: int, end: int) -> float:
        """Computing `tokens` prompt tokens, the last of which is number `end` of its sequence (the fixed part
        apart)."""
        return self.prefill_token_ms * tokens + self.prefill_attention_ms * tokens * (end - tokens / 2)

    def prefill_ms(self, tokens: int, end: int) -> float:
        """The same with the fixed part of a prefilling step: a + b*n + c*n*(L - n/2)."""
        return self.prefill_step_ms + self.chunk_ms(tokens, end)

    def decode_ms(self, sequences: int, context_tokens: int) -> float:
        """What `sequences` in decode, `context_tokens` long in all, add to a step."""
        return self.decode_sequence_ms * sequences + self.decode_context_token_ms * context_tokens


H100_8B = Profile(
    name="h100-8b",
    step_ms=5.74,
    prefill_step_ms=16.0,
    prefill_token_ms=0.0172,
    prefill_attention_ms=4e-8,
    decode_sequence_ms=0.0,  # the pre-study's fit found none beside the context term
    decode_context_token_ms=5.2e-5,
)

# An A100-80G has 312 dense bf16 TFLOPS to an H100's 989, of which kernels reach a larger share: 2.4x slower in compute.
# 2.04 TB/s against 3.35 TB/s: 1.64x slower where weights and KV are streamed. Launches and the host cost the same, so
# only the streaming part of a step (16 GB of weights: 4.8 of the 5.74 ms) scales.
A100_8B = Profile(
    name="a100-8b",
    step_ms=5.74 + 4.8 * 0.64,
    prefill_step_ms=16.0,
    prefill_token_ms=0.0172 * 2.4,
    prefill_attention_ms=4e-8 * 2.4,
    decode_sequence_ms=0.0,
    decode_context_token_ms=5.2e-5 * 1.64,
)

# 70B in bf16 does not fit one H100: four of them, tensor parallel. Each holds 17.5B parameters, 2.19x the 8B model's,
# and two all-reduces a layer over 80 layers add about a fifth to prefill and 2 ms to a step. Attention: 80 layers of
# width 8192 against 32 of 4096, over four, 1.25x. KV: 320 KiB a token against 128 KiB, over four, 0.625x.
H100_70B = Profile(
    name="h100-70b",
    step_ms=5.74 + 4.8 * 1.19 + 2.0,
    prefill_step_ms=16.0,
    prefill_token_ms=0.0172 * 2.19 * 1.2,
    prefill_attention_ms=4e-8 * 1.25,
    decode_sequence_ms=0.0,
    decode_context_token_ms=5.2e-5 * 0.625,
    kv_token_bytes=320 << 10,
)

INSTANT = Profile(
    name="instant",
    step_ms=0.0,
    prefill_step_ms=0.0,
    prefill_token_ms=0.0,
    prefill_attention_ms=0.0,
    decode_sequence_ms=0.0,
    decode_context_token_ms=0.0,
)

PRESETS = {profile.name: profile for profile in (H100_8B, A100_8B, H100_70B, INSTANT)}
