"""Writes the tiny model folder that the vLLM server of these checks serves: `python make_model.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.engine_models import make_qwen3, make_tokenizer

# vLLM's CPU attention wants heads of 32 or more.
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "num_hidden_layers": 2, "initializer_range": 0.1, "max_position_embeddings": 1024,
}  # fmt: skip


def make_network(seed: int = 0) -> Any:
    return make_qwen3(seed, **SHAPE)


def main() -> None:
    folder = sys.argv[1]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_network().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
