"""Tiny random models and a byte-level tokenizer for the tests of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.policy import Request
from turnwise.types import Image, SamplingParams

SPECIAL = ["<|end|>", "<|pad|>", "<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = ['{"move": "north"} {"move": "south", "steps": 3} I go there because it is free.'] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[2:],
    )


def make_qwen3(seed: int = 0, vocab_size: int = 320, **changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "initializer_range": 0.3,
        "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, **{**settings, **changes})).eval()


def make_llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_qwen3_vl(seed: int = 0) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
            "initializer_range": 0.3, "eos_token_id": 0, "pad_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.3,
        },
        image_token_id=2, video_token_id=3, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval()


def make_image_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=32 * 32, max_pixels=256 * 256)


def make_image(seed: int, height: int = 64, width: int = 96) -> Image:
    rng = np.random.default_rng(seed)
    return Image.from_pixels(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_prompt(image: Image) -> list[int]:
    """The placeholders of an image between their markers."""
    return [4, *[2] * ((image.height // 32) * (image.width // 32)), 5]


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(len(SPECIAL), 303, count)]


def make_request(
    prompt: list[int],
    *,
    stream: str = "s",
    group: str = "g",
    seed: tuple[int, ...] = (0, 0, 0),
    images: tuple[Image, ...] = (),
    deadline_s: float = 60.0,
    action_schema: dict[str, Any] | None = None,
    **sampling: Any,
) -> Request:
    settings = {"max_new_tokens": 12, "stop_at_action": False, **sampling}
    return Request(
        stream_id=stream,
        group_id=group,
        prompt_ids=np.array(prompt, dtype=np.int32),
        images=images,
        sampling=SamplingParams(**settings),
        seed=seed,
        action_schema=action_schema,
        deadline_s=deadline_s,
    )
