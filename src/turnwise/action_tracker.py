"""Finds the action in a completion while it is being generated, to the exact token.

The action is the leftmost JSON object that has an action key. Every `{` may begin it, also one inside a string of
an object that later turns out to be no JSON, so the tracker follows each `{` that can still become an object. At most two
readings are alive at a time: they differ in which quotes open strings.

    tokens        Go  ing  ' {"'  move  '":'  1  '}.'  …
    is_open       .   .    x      x     x     x  .
    start_index = 2, end_index = 7 (one past the token that holds the closing brace)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from turnwise.json_parse import JsonParse, OpenObject, Status
from turnwise.token_bytes import TokenBytes

_OPEN_BRACE = ord("{")


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    end: int
    start_token: int
    end_token: int


class ActionTracker:
    """Fed one token at a time; says where the action opened and closed. Cost per token does not grow.

    With `action_keys` an object is an action when it has at least one of them; without, any object is.
    """

    def __init__(self, token_bytes: TokenBytes, action_keys: Iterable[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._action_keys = frozenset(action_keys)
        self._text = bytearray()
        self._num_tokens = 0
        self._readings: list[JsonParse] = []
        self._nested: dict[int, _Found] = {}
        self._found: _Found | None = None
        self._is_closed = False

    def push(self, token_id: int) -> bool:
        """Read one more token; True when the action is complete and nothing to come can change it."""
        return self.push_bytes(self._token_bytes[int(token_id)])

    def push_bytes(self, piece: bytes) -> bool:
        """Read one more token, given as its bytes."""
        token = self._num_tokens
        self._num_tokens += 1
        if self._is_closed:
            return True
        offset = len(self._text)
        self._text += piece
        if not self._readings and b"{" not in piece:
            return False
        for byte in piece:
            if self._read(byte, offset, token):
                return True
            offset += 1
        return False

    def finish(self) -> bool:
        """The completion is over: True when it held an action.

        An object that was never closed is none, and neither are the objects inside it.
        """
        self._readings.clear()
        self._nested.clear()
        self._is_closed = self._found is not None
        return self._is_closed

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def is_open(self) -> bool:
        """A `{` has been read that can still become the action."""
        return not self._is_closed and bool(self._readings)

    @property
    def is_closed(self) -> bool:
        """The action is complete."""
        return self._is_closed

    @property
    def start_index(self) -> int | None:
        """The token that holds the action's first byte; while it is open, of the leftmost `{` that can become it."""
        if self._is_closed and self._found is not None:
            return self._found.start_token
        return min((reading.root.start_token for reading in self._readings), default=None)

    @property
    def end_index(self) -> int | None:
        """One past the token that holds the action's last byte."""
        return self._found.end_token if self._is_closed and self._found is not None else None

    @property
    def open_offset(self) -> int | None:
        """The byte of the leftmost `{` that can still become the action; None when there is none."""
        return min((reading.root.start for reading in self._readings), default=None)

    @property
    def action_text(self) -> str:
        """The action's characters; empty while it is not complete."""
        if not self._is_closed or self._found is None:
            return ""
        return self._text[self._found.start : self._found.end].decode("utf-8", errors="replace")

    @property
    def text(self) -> str:
        """All that was read (up to the end of the action, once that is known)."""
        return self._text.decode("utf-8", errors="replace")

    def _read(self, byte: int, offset: int, token: int) -> bool:
        is_shared = False
        for reading in tuple(self._readings):
            status = reading.feed(byte, offset, token)
            if status is not Status.OPEN:
                self._readings.remove(reading)
                self._settle(self._nested.pop(id(reading), None))
            elif byte == _OPEN_BRACE and not reading.is_in_string:
                is_shared = True
                self._forget_outgrown(reading)
        if byte == _OPEN_BRACE and not is_shared:
            self._readings.append(
                JsonParse(self._text, offset, token, self._is_action_key, self._note_closed)
            )
        self._is_closed = self._found is not None and all(
            reading.root.start > self._found.start for reading in self._readings
        )
        return self._is_closed

    def _is_action_key(self, key: str) -> bool:
        return key in self._action_keys

    def _note_closed(self, reading: JsonParse, closed: OpenObject, end: int) -> None:
        if self._action_keys and not closed.has_key:
            return
        found = _Found(
            start=closed.start, end=end, start_token=closed.start_token, end_token=self._num_tokens
        )
        known = self._nested.get(id(reading))
        if known is None or found.start < known.start:
            self._nested[id(reading)] = found

    def _forget_outgrown(self, reading: JsonParse) -> None:
        """When a reading gives up its outer objects for being too deep, what closed in them stands on its own."""
        known = self._nested.get(id(reading))
        if known is not None and known.start < reading.root.start:
            self._settle(self._nested.pop(id(reading)))

    def _settle(self, found: _Found | None) -> None:
        if found is not None and (self._found is None or found.start < self._found.start):
            self._found = found
