"""Models that benchmarks share."""

from __future__ import annotations

import torch
import transformers


def qwen3_17m(seed: int = 0) -> transformers.Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of 17 million parameters with the vocabulary of SmolLM2 (49,152)."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=49_152, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)
