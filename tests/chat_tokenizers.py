"""Small tokenizers for tests: byte-level BPE with chosen merges, and chat templates with known habits."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.token_bytes import byte_level_alphabet

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims every message, as Llama 3 does.
TRIMMING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the reasoning of every answer but the last, as Qwen3 does.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
)
NASTY_MERGES = ('{"', '."}', '"}', "}}", '":', '": "', " {", "}\n", '\\"', "\\\\", "}.", '}{"')


def byte_tokenizer(
    merges: Sequence[str | bytes] = (), chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens are the 256 bytes and the given pieces (built from their left ends)."""
    to_char = {value: char for char, value in byte_level_alphabet().items()}
    vocabulary = {char: index for index, char in enumerate(to_char.values())}
    pairs: list[tuple[str, str]] = []
    for piece in merges:
        raw = piece.encode() if isinstance(piece, str) else piece
        chars = [to_char[bytes([value])] for value in raw]
        for end in range(2, len(chars) + 1):
            pair = ("".join(chars[: end - 1]), chars[end - 1])
            if pair not in pairs:
                pairs.append(pair)
                vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # One word for the whole text, so that merges may cross what other tokenizers keep apart.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [text for text in SPECIAL if text != "<|im_end|>"]}
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = chat_template
    return tokenizer
