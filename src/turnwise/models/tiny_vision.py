"""Builds the tiny vision-language model: the Qwen3-VL architecture at under two million parameters.

Its vocabulary is made for the navigation world: every word of an observation, of the expert's reasoning and every number
of an action is one token, and so is each fixed stretch of the action's JSON. Anything else still encodes, byte by byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from turnwise.environments.navigation.actions import FORWARD_KEY, ROTATION_KEY
from turnwise.environments.navigation.furniture import COLORS
from turnwise.environments.navigation.scenes import CLASSES

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PAD, _END = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (
    _PAD, "<|im_start|>", _END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# About 1 / sqrt(width): the usual 0.02 is made for wide layers, and lets narrow ones learn slowly.
_INIT = 0.08
_MAX_TURNS = 20
_ROTATIONS = range(-180, 181, 15)
_FORWARDS = ("0", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75", "2")
# A piece never spans a word, a number or one of the two fixed stretches of an action.
_PIECES = rf' ?\{{"{ROTATION_KEY}":|, "{FORWARD_KEY}":| ?[A-Za-z]+| ?-?[0-9]+(?:\.[0-9]+)?|\n|[^A-Za-z0-9\s{{}},]|[{{}},]|\s'


def make_tiny_vision(out: Path, seed: int = 0) -> Path:
    """Build tokenizer, image processor and an untrained network, and save them as a Hugging Face model folder."""
    tokenizer = build_tokenizer()
    network = build_network(tokenizer, seed)
    out.mkdir(parents=True, exist_ok=True)
    save_tiny_vision(out, network, tokenizer)
    return out


def save_tiny_vision(out: Path, network: Any, tokenizer: Any) -> None:
    """Write the model folder; network and tokenizer are Hugging Face objects, which share no static types."""
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    build_image_processor().save_pretrained(out)


def build_tokenizer() -> Any:
    """A byte-level BPE tokenizer in which each word of the domain is one token; the same every time."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, as_bytes])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(domain_texts(), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_END, pad_token=_PAD)
    extra = [token for token in SPECIAL_TOKENS if token not in (_END, _PAD)]
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def domain_texts() -> Iterator[str]:
    """Everything the navigation world says in its short form, and everything the expert answers."""
    names = [f"{color} {label.replace('_', ' ')}" for color, label in itertools.product(COLORS, CLASSES)]
    for turn, last in itertools.product(range(1, _MAX_TURNS + 1), repeat=2):
        yield f"Turn {turn} of {last}. Blocked. Invalid action."
    for name in names:
        yield f"Turn 1 of 1. Find the {name}."
        yield f"I do not see the {name}."
        for side in ("ahead", "on the left", "on the right"):
            yield f"I see the {name} {side}."
    for rotation, forward in itertools.product(_ROTATIONS, _FORWARDS):
        action = f'{{"{ROTATION_KEY}": {rotation}, "{FORWARD_KEY}": {forward}}}'
        yield from (action, f"ahead. {action}")
    for role in ("user", "assistant", "system"):
        yield f"{role}\n"


def build_image_processor() -> Any:
    """Patches of 16 pixels, merged two by two: a 96×96 frame is 9 tokens, 128×128 is 16."""
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def build_network(tokenizer: Any, seed: int = 0) -> Any:
    """Qwen3-VL with random weights from the seed."""
    torch.manual_seed(seed)
    return transformers.Qwen3VLForConditionalGeneration(tiny_config(tokenizer))


def tiny_config(tokenizer: Any) -> Any:
    """Four text layers of width 128, three vision layers of width 96, DeepStack after the second."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True, "initializer_range": _INIT,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3, "hidden_size": 96, "intermediate_size": 256, "num_heads": 4, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [1],
            "initializer_range": _INIT,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True,
    )  # fmt: skip
