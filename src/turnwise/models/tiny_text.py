"""Builds the tiny language model that ships with turnwise: the Qwen3 architecture at half a million parameters.

It learns to continue conversations in which somebody makes random valid moves, never good ones: the format of an action,
and what the lake looks like after it. Which move to make, it learns by reinforcement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from turnwise.environments.frozenlake import MOVES, build_frozenlake
from turnwise.types import Action

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NUM_TURNS = 8


def make_tiny_text(out: Path, *, seed: int = 0, num_steps: int = 900, batch_size: int = 24) -> Path:
    """Train tokenizer and network from nothing and save them as a Hugging Face model folder."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = train_tokenizer(text for _ in range(400) for text in _conversation_texts(rng))
    network = transformers.Qwen3ForCausalLM(tiny_config(tokenizer))
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=num_steps, pct_start=0.1
    )
    for _ in range(num_steps):
        batch = [_random_conversation(rng) for _ in range(batch_size)]
        ids_BT, labels_BT = _encode(tokenizer, batch)
        loss = network(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(_model_card(seed, num_steps, batch_size, network), encoding="utf-8")
    return out


def train_tokenizer(texts: Iterator[str]) -> Any:
    """A byte-level BPE tokenizer of 512 tokens for the given language."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(tokenizer: Any) -> transformers.Qwen3Config:
    """Qwen3 with 4 layers of width 96."""
    return transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _random_conversation(rng: np.random.Generator) -> list[dict[str, str]]:
    """A few turns on a random map, moves drawn evenly."""
    spec = build_frozenlake(min_distance=1)
    environment = spec.make()
    observation = environment.reset(spec.tasks.task(int(rng.integers(1 << 30)), "train"))
    messages = []
    for _ in range(_NUM_TURNS):
        move = list(MOVES)[rng.integers(len(MOVES))]
        messages.append({"role": "user", "content": observation.text})
        messages.append({"role": "assistant", "content": json.dumps({"move": move})})
        transition = environment.step(Action(value={"move": move}))
        if transition.is_terminal:
            break
        observation = transition.observation
    environment.close()
    return messages


def _conversation_texts(rng: np.random.Generator) -> list[str]:
    texts = [message["content"] for message in _random_conversation(rng)]
    return [*texts, "user", "assistant", "system", "Invalid action: there was no JSON action."]


def _encode(tokenizer: Any, batch: list[list[dict[str, str]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids, and labels that are -100 on the padding."""
    rows = [
        tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
        for messages in batch
    ]
    width = max(len(row) for row in rows)
    ids_BT = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    labels_BT = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    return ids_BT, labels_BT


def _model_card(seed: int, num_steps: int, batch_size: int, network: torch.nn.Module) -> str:
    count = sum(parameter.numel() for parameter in network.parameters())
    return (
        "# tiny\n\n"
        f"Qwen3 architecture, {count:,} parameters, trained from nothing on conversations with random valid FrozenLake moves "
        f"({num_steps} steps of {batch_size} conversations, seed {seed}).\n\n"
        f"Made by `turnwise models make-tiny --seed {seed}`.\n"
    )
