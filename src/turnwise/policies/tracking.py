"""What sequences need of an action tracker, until `turnwise.masking` is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class TokenBytes:
    """id → bytes, by decoding each token alone."""

    def __init__(self, tokenizer: Any) -> None:  # a Hugging Face tokenizer
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = str(self._tokenizer.decode([token_id])).encode()
        return self._known[token_id]


class ActionTracker:
    """Brace depth outside strings."""

    def __init__(self, token_bytes: TokenBytes, action_keys: Iterable[str]) -> None:
        self._token_bytes = token_bytes
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_closed = False

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def push(self, token_id: int) -> bool:
        for byte in self._token_bytes[token_id].decode(errors="replace"):
            if self._in_string:
                self._in_string = self._is_escaped or byte != '"'
                self._is_escaped = byte == "\\" and not self._is_escaped
            elif byte == '"' and self._depth:
                self._in_string = True
            elif byte in "{}":
                self._depth += 1 if byte == "{" else -min(1, self._depth)
                self.is_closed = self.is_closed or (byte == "}" and self._depth == 0)
        return self.is_closed
