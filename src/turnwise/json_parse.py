"""An incremental JSON reader: fed byte by byte, it knows at each byte whether what it has read can still become an object.

It follows RFC 8259, and refuses what could not be stored again: numbers beyond a double, half a surrogate pair,
`NaN`. Objects nested deeper than `MAX_DEPTH` are no actions; those inside them may be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from enum import Enum, auto

MAX_DEPTH = 64

_WHITESPACE = frozenset(b" \t\n\r")
_DIGITS = frozenset(b"0123456789")
_HEX = frozenset(b"0123456789abcdefABCDEF")
_SIMPLE_ESCAPES = frozenset(b'"\\/bfnrt')
_LITERALS = {ord("t"): b"rue", ord("f"): b"alse", ord("n"): b"ull"}
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY, _MINUS = b"{}[]-"


class Status(Enum):
    """What one more byte made of a parse."""

    OPEN = auto()
    DONE = auto()
    FAILED = auto()


class _State(Enum):
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    AFTER_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LOW_SURROGATE = auto()
    LOW_SURROGATE_ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()


class OpenObject:
    """A `{` or `[` that is not closed yet."""

    __slots__ = ("has_key", "is_array", "start", "start_token")

    def __init__(self, *, is_array: bool, start: int, start_token: int) -> None:
        self.is_array = is_array
        self.start = start
        self.start_token = start_token
        self.has_key = False


class JsonParse:
    """Reads one object, and the objects nested in it, from the `{` at byte `start` of `text` on.

    `text` is the caller's growing buffer: it already holds the byte that is fed.
    """

    def __init__(
        self,
        text: bytearray,
        start: int,
        start_token: int,
        is_action_key: Callable[[str], bool],
        on_close: Callable[[JsonParse, OpenObject, int], None],
    ) -> None:
        self._text = text
        self._is_action_key = is_action_key
        self._on_close = on_close
        self._stack = [OpenObject(is_array=False, start=start, start_token=start_token)]
        self._base = 0
        self._state = _State.KEY_OR_END
        self._is_key = False
        self._token_start = 0
        self._hex = 0
        self._hex_left = 0
        self._is_high_surrogate = False
        self._literal_left = b""
        self._number = _NUMBER_START

    @property
    def root(self) -> OpenObject:
        """The outermost object that can still become an action."""
        return self._stack[self._base]

    @property
    def is_in_string(self) -> bool:
        return self._state in _IN_STRING

    def feed(self, byte: int, offset: int, token: int) -> Status:
        """Read the byte at `offset`, which belongs to token number `token`."""
        state = self._state
        if state is _State.STRING:
            return self._feed_string(byte, offset)
        if state is _State.NUMBER:
            following = _NUMBER_STEPS[self._number].get(byte)
            if following is not None:
                self._number = following
                return Status.OPEN
            if self._number not in _NUMBER_ENDS or not self._is_finite(offset):
                return Status.FAILED
            state = self._state = _State.AFTER_VALUE
        if byte in _WHITESPACE and state in _BETWEEN:
            return Status.OPEN
        return _READERS[state](self, byte, offset, token)

    def _feed_string(self, byte: int, offset: int) -> Status:
        if byte == _QUOTE:
            if self._is_key:
                self._note_key(offset)
            self._state = _State.COLON if self._is_key else _State.AFTER_VALUE
        elif byte == _BACKSLASH:
            self._state = _State.ESCAPE
        elif byte < 0x20:
            return Status.FAILED
        return Status.OPEN

    def _feed_escape(self, byte: int, offset: int, token: int) -> Status:
        if byte == ord("u"):
            self._state, self._hex, self._hex_left = _State.HEX, 0, 4
        elif byte in _SIMPLE_ESCAPES:
            self._state = _State.STRING
        else:
            return Status.FAILED
        return Status.OPEN

    def _feed_hex(self, byte: int, offset: int, token: int) -> Status:
        if byte not in _HEX:
            return Status.FAILED
        self._hex = self._hex * 16 + int(chr(byte), 16)
        self._hex_left -= 1
        if self._hex_left:
            return Status.OPEN
        is_low = 0xDC00 <= self._hex <= 0xDFFF
        if is_low is not self._is_high_surrogate:
            return Status.FAILED
        self._is_high_surrogate = 0xD800 <= self._hex <= 0xDBFF
        self._state = _State.LOW_SURROGATE if self._is_high_surrogate else _State.STRING
        return Status.OPEN

    def _feed_low_surrogate(self, byte: int, offset: int, token: int) -> Status:
        self._state = _State.LOW_SURROGATE_ESCAPE
        return Status.OPEN if byte == _BACKSLASH else Status.FAILED

    def _feed_low_surrogate_escape(self, byte: int, offset: int, token: int) -> Status:
        self._state, self._hex, self._hex_left = _State.HEX, 0, 4
        return Status.OPEN if byte == ord("u") else Status.FAILED

    def _feed_literal(self, byte: int, offset: int, token: int) -> Status:
        if byte != self._literal_left[0]:
            return Status.FAILED
        self._literal_left = self._literal_left[1:]
        if not self._literal_left:
            self._state = _State.AFTER_VALUE
        return Status.OPEN

    def _feed_key_or_end(self, byte: int, offset: int, token: int) -> Status:
        return (
            self._close(byte, offset, token) if byte == _CLOSE_OBJECT else self._feed_key(byte, offset, token)
        )

    def _feed_key(self, byte: int, offset: int, token: int) -> Status:
        if byte != _QUOTE:
            return Status.FAILED
        self._state, self._is_key, self._token_start = _State.STRING, True, offset + 1
        return Status.OPEN

    def _feed_colon(self, byte: int, offset: int, token: int) -> Status:
        self._state = _State.VALUE
        return Status.OPEN if byte == _COLON else Status.FAILED

    def _feed_value_or_end(self, byte: int, offset: int, token: int) -> Status:
        return (
            self._close(byte, offset, token)
            if byte == _CLOSE_ARRAY
            else self._feed_value(byte, offset, token)
        )

    def _feed_value(self, byte: int, offset: int, token: int) -> Status:
        if byte == _QUOTE:
            self._state, self._is_key = _State.STRING, False
        elif byte in (_OPEN_OBJECT, _OPEN_ARRAY):
            return self._open(byte == _OPEN_ARRAY, offset, token)
        elif byte == _MINUS or byte in _DIGITS:
            self._state, self._token_start = _State.NUMBER, offset
            self._number = _NUMBER_STEPS[_NUMBER_START][byte]
        elif byte in _LITERALS:
            self._state, self._literal_left = _State.LITERAL, _LITERALS[byte]
        else:
            return Status.FAILED
        return Status.OPEN

    def _feed_after_value(self, byte: int, offset: int, token: int) -> Status:
        is_array = self._stack[-1].is_array
        if byte == _COMMA:
            self._state = _State.VALUE if is_array else _State.KEY
            return Status.OPEN
        if byte == (_CLOSE_ARRAY if is_array else _CLOSE_OBJECT):
            return self._close(byte, offset, token)
        return Status.FAILED

    def _open(self, is_array: bool, offset: int, token: int) -> Status:
        self._stack.append(OpenObject(is_array=is_array, start=offset, start_token=token))
        self._state = _State.VALUE_OR_END if is_array else _State.KEY_OR_END
        while self._stack[self._base].is_array or len(self._stack) - self._base > MAX_DEPTH:
            self._base += 1
            if self._base == len(self._stack):
                return Status.FAILED
        return Status.OPEN

    def _close(self, byte: int, offset: int, token: int) -> Status:
        closed = self._stack.pop()
        self._state = _State.AFTER_VALUE
        if not closed.is_array:
            self._on_close(self, closed, offset + 1)
        return Status.DONE if len(self._stack) <= self._base else Status.OPEN

    def _note_key(self, offset: int) -> None:
        frame = self._stack[-1]
        if not frame.has_key:
            raw = bytes(self._text[self._token_start : offset]).decode("utf-8", errors="replace")
            frame.has_key = self._is_action_key(json.loads(f'"{raw}"') if "\\" in raw else raw)

    def _is_finite(self, offset: int) -> bool:
        return math.isfinite(float(self._text[self._token_start : offset]))


_IN_STRING = frozenset(
    {_State.STRING, _State.ESCAPE, _State.HEX, _State.LOW_SURROGATE, _State.LOW_SURROGATE_ESCAPE}
)
_BETWEEN = frozenset(
    {_State.KEY_OR_END, _State.KEY, _State.COLON, _State.VALUE, _State.VALUE_OR_END, _State.AFTER_VALUE}
)
_READERS: dict[_State, Callable[[JsonParse, int, int, int], Status]] = {
    _State.KEY_OR_END: JsonParse._feed_key_or_end,
    _State.KEY: JsonParse._feed_key,
    _State.COLON: JsonParse._feed_colon,
    _State.VALUE: JsonParse._feed_value,
    _State.VALUE_OR_END: JsonParse._feed_value_or_end,
    _State.AFTER_VALUE: JsonParse._feed_after_value,
    _State.ESCAPE: JsonParse._feed_escape,
    _State.HEX: JsonParse._feed_hex,
    _State.LOW_SURROGATE: JsonParse._feed_low_surrogate,
    _State.LOW_SURROGATE_ESCAPE: JsonParse._feed_low_surrogate_escape,
    _State.LITERAL: JsonParse._feed_literal,
}

# A number as a small automaton: - 0 | 1-9 digits, then . digits, then e sign digits.
_NUMBER_START, _AFTER_MINUS, _ZERO, _INTEGER, _DOT, _FRACTION, _E, _E_SIGN, _EXPONENT = range(9)
_NUMBER_ENDS = frozenset({_ZERO, _INTEGER, _FRACTION, _EXPONENT})


def _steps(*edges: tuple[bytes, int]) -> dict[int, int]:
    return {byte: state for characters, state in edges for byte in characters}


_FIRST_DIGIT = ((b"0", _ZERO), (b"123456789", _INTEGER))
_NUMBER_STEPS: tuple[dict[int, int], ...] = (
    _steps((b"-", _AFTER_MINUS), *_FIRST_DIGIT),
    _steps(*_FIRST_DIGIT),
    _steps((b".", _DOT), (b"eE", _E)),
    _steps((b"0123456789", _INTEGER), (b".", _DOT), (b"eE", _E)),
    _steps((b"0123456789", _FRACTION)),
    _steps((b"0123456789", _FRACTION), (b"eE", _E)),
    _steps((b"+-", _E_SIGN), (b"0123456789", _EXPONENT)),
    _steps((b"0123456789", _EXPONENT)),
    _steps((b"0123456789", _EXPONENT)),
)
