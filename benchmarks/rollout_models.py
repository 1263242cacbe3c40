"""A tokenizer as large as the benchmark model's vocabulary, and a tiny Qwen3-VL."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE, VIDEO, VISION_START, VISION_END = range(4)


def byte_pair_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Markers, all bytes, then pairs of bytes until the vocabulary is full. No token ends a turn, so completions have full length."""
    markers = ["<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(markers) - len(alphabet)
    pairs = list(itertools.islice(itertools.product(alphabet, alphabet), num_pairs))
    pieces = [*markers, *alphabet, *(left + right for left, right in pairs)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=markers)


def qwen3_vl_tiny(seed: int = 0) -> Any:
    """The Qwen3-VL architecture at 1.5 million parameters."""
    torch.manual_seed(seed)
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2],
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


def image_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=32 * 32, max_pixels=256 * 256)
