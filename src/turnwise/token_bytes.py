"""Which bytes each token stands for.

A token may hold half a UTF-8 character, or `."}` in one piece, so text is only looked at as bytes. Special tokens
(end of turn, image pads …) stand for no bytes at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from turnwise.errors import ModelError

_PROBE = '{"move": "north east", "n": -1.5e3} é 😀\n'
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token id of a tokenizer: `token_bytes[id]`; `join(ids)` for many.

    >>> token_bytes.join(tokenizer.encode('{"a": 1}'))
    b'{"a": 1}'
    """

    def __init__(self, tokenizer: Any) -> None:  # Hugging Face tokenizers share no importable light base
        self._bytes = _read_vocabulary(tokenizer)
        self.special_ids = frozenset(
            int(index) for index in tokenizer.all_special_ids if index is not None
        ) | frozenset(int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        for index in self.special_ids:
            if index < len(self._bytes):
                self._bytes[index] = b""
        _check(tokenizer, self)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, token_id: int) -> bytes:
        # Models often have more rows than the tokenizer has tokens; such an id stands for nothing.
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def join(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self[int(index)] for index in token_ids)

    def text(self, token_ids: Iterable[int]) -> str:
        """The tokens as text; bytes that are no UTF-8 become U+FFFD."""
        return self.join(token_ids).decode("utf-8", errors="replace")


def _read_vocabulary(tokenizer: Any) -> list[bytes]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = {int(index): str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    size = max([*vocabulary.values(), *added], default=-1) + 1
    pieces = [b""] * size
    convert = _piece_reader(tokenizer, vocabulary)
    for token, index in vocabulary.items():
        pieces[index] = convert(token)
    for index, content in added.items():
        pieces[index] = content.encode()
    return pieces


def _piece_reader(tokenizer: Any, vocabulary: dict[str, int]) -> Callable[[str], bytes]:
    """How this tokenizer writes bytes into the names of its tokens."""
    decoders = _decoder_kinds(tokenizer)
    if "ByteLevel" in decoders or (not decoders and "Ġ" in vocabulary):
        return _byte_level_bytes
    if "WordPiece" in decoders:
        return lambda token: (token[2:] if token.startswith("##") else f" {token}").encode()
    if {"Metaspace", "ByteFallback", "Replace"} & decoders or any(
        token.startswith("▁") for token in vocabulary
    ):
        return _sentencepiece_bytes
    separator = _word_separator(tokenizer, vocabulary)
    return lambda token: (separator + token).encode()


def _decoder_kinds(tokenizer: Any) -> set[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    # The decoder alone: the whole tokenizer as JSON would hold its vocabulary.
    decoder = json.loads(backend.decoder.__getstate__())
    return {decoder.get("type", "")} | {part["type"] for part in decoder.get("decoders", ())} - {"Sequence"}


def _byte_level_bytes(token: str) -> bytes:
    # Translating to Latin-1 is many times faster than looking each character up, and vocabularies are large.
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # an oddity of the vocabulary file; it stands for itself


def _sentencepiece_bytes(token: str) -> bytes:
    fallback = _BYTE_FALLBACK.fullmatch(token)
    return bytes([int(fallback[1], 16)]) if fallback else token.replace("▁", " ").encode()


def _word_separator(tokenizer: Any, vocabulary: dict[str, int]) -> str:
    """What a word-level tokenizer writes between two tokens when it decodes."""
    special = set(tokenizer.all_special_ids)
    words = [(token, index) for token, index in vocabulary.items() if index not in special][:2]
    if len(words) < 2:
        return ""
    (first, first_id), (second, second_id) = words
    text = tokenizer.decode([first_id, second_id], clean_up_tokenization_spaces=False)
    return " " if text == f"{first} {second}" else ""


def _check(tokenizer: Any, token_bytes: TokenBytes) -> None:
    """Refuse a tokenizer whose tokens were misread: masks made from wrong bytes would be wrong in silence."""
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = token_bytes.text(ids)
    if "".join(found.split()) != "".join(expected.split()):
        raise ModelError(
            f"the tokens of {type(tokenizer).__name__} could not be read as bytes: {_PROBE!r} gave {found!r}, the tokenizer "
            f"itself says {expected!r}; use a byte-level BPE, SentencePiece, WordPiece or WordLevel tokenizer"
        )


def byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte, as character → byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(value): bytes([value]) for value in printable}
    for offset, value in enumerate(value for value in range(256) if value not in printable):
        alphabet[chr(256 + offset)] = bytes([value])
    return alphabet


_TO_LATIN_1 = {ord(char): value[0] for char, value in byte_level_alphabet().items()}
