from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat_tokenizers import NASTY_MERGES, byte_tokenizer

from turnwise.action_tracker import ActionTracker
from turnwise.json_parse import MAX_DEPTH
from turnwise.masking import ActionTokenMasker, read_action
from turnwise.token_bytes import TokenBytes
from turnwise.types import MaskingMethod

TOKEN_BYTES = TokenBytes(byte_tokenizer(NASTY_MERGES))
KEYS = frozenset({"move"})


# The reference: the standard library's parser on the whole text, at each `{` from left to right.


class _Unfinished(Exception):
    """The text ends in the middle of what could have become an object."""


def _depth(value: object) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


def _strict_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("beyond a double")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_strict_float, parse_int=_strict_float, parse_constant=_refuse)


def _parse_at(text: str, start: int) -> tuple[dict, int] | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    if re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)) or _depth(value) > MAX_DEPTH:
        return None
    return value, end


_SCALAR = re.compile(
    r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![0-9.eE+-])|true|false|null'
)
_CUT_SCALAR = re.compile(
    r'(?:"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*(?:\\(?:u[0-9a-fA-F]{0,3})?)?|-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][-+]?[0-9]*)?|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?)\Z'
)


def _nested_if_unfinished(text: str, start: int) -> set[int] | None:
    """The objects inside the object at `start` when the text ends before that one does; None when it is no JSON."""
    nested: set[int] = set()
    try:
        _skip_value(text, start, nested)
    except _Unfinished:
        return nested
    except ValueError:
        return None
    return None  # too deep


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    if at == len(text):
        raise _Unfinished
    return at


def _check_scalar(piece: str) -> None:
    if piece[0] in "-0123456789":
        _strict_float(piece)
    if piece[0] == '"' and re.search("[\ud800-\udfff]", json.loads(piece)):
        raise ValueError("half a surrogate pair")


def _skip_value(text: str, at: int, nested: set[int]) -> int:
    if text[at] in "{[":
        return _skip_container(text, at, nested)
    if (match := _SCALAR.match(text, at)) and not (match.end() == len(text) and text[at] in "-0123456789"):
        _check_scalar(match[0])
        return match.end()
    if (match := _CUT_SCALAR.match(text, at)) and match[0]:
        if text[at] == '"' and re.search(r"[\ud800-\udfff](?!\Z)|[\udc00-\udfff]", _decoded_start(match[0])):
            raise ValueError("half a surrogate pair")
        raise _Unfinished
    raise ValueError("no value")


def _decoded_start(cut: str) -> str:
    """A cut string as far as its last whole character; a high surrogate may wait for its other half at the very end."""
    whole = re.sub(r"\\(?:u[0-9a-fA-F]{0,3})?\Z", "", cut) if not cut.endswith("\\\\") else cut
    return json.loads(whole + '"')


def _skip_container(text: str, at: int, nested: set[int]) -> int:
    is_object = text[at] == "{"
    close = "}" if is_object else "]"
    if is_object:
        nested.add(at)
    at = _space(text, at + 1)
    if text[at] == close:
        return at + 1
    while True:
        if is_object:
            if text[at] != '"':
                raise ValueError("no key")
            at = _space(text, _skip_value(text, at, nested))
            if text[at] != ":":
                raise ValueError("no colon")
            at = _space(text, at + 1)
        at = _space(text, _skip_value(text, at, nested))
        if text[at] == close:
            return at + 1
        if text[at] != ",":
            raise ValueError("no comma")
        at = _space(text, at + 1)


def reference(text: str, keys: frozenset[str]) -> tuple[int, int] | None:
    """Characters of the action, found in the whole text."""
    inside_unfinished: set[int] = set()
    for start in (match.start() for match in re.finditer(r"\{", text)):
        if start in inside_unfinished:
            continue
        parsed = _parse_at(text, start)
        if parsed is not None and (not keys or keys & parsed[0].keys()):
            return start, parsed[1]
        if parsed is None:
            inside_unfinished |= _nested_if_unfinished(text, start) or set()
    return None


def track(pieces: list[bytes], keys: frozenset[str]) -> ActionTracker:
    tracker = ActionTracker(TOKEN_BYTES, keys)
    for piece in pieces:
        tracker.push_bytes(piece)
        assert len(tracker._readings) <= 2
    tracker.finish()
    return tracker


def token_span(pieces: list[bytes], start: int, end: int) -> tuple[int, int]:
    """The first token that holds a byte of [start, end), and one past the last."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(ends, end, side="left")) + 1


def check(text: str, pieces: list[bytes], keys: frozenset[str]) -> None:
    expected = reference(text, keys)
    tracker = track(pieces, keys)
    if expected is None:
        assert (tracker.is_closed, tracker.start_index, tracker.end_index) == (False, None, None)
        return
    start, end = (len(text[:index].encode()) for index in expected)
    assert tracker.action_text == text[slice(*expected)]
    assert (tracker.start_index, tracker.end_index) == token_span(pieces, start, end)


FRAGMENTS = [
    "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "-", "0", "1", "2.5", "e", "E+3", "1e999", ".", "true", "fals", "null",
    "NaN", "\\u", "00e9", "\\ud83d\\ude00", "\\ud83d", "\\n", "é", "😀", "move", '"move"', '"move": ', '"a": ', '{"', '"}', "}}",
    '{"move": 1}', '{"a": {"move": [1, {"b": 2}]}', '{"m\\u006fve": "x"}', "{}", "[{}", 'say "hi {', "tab\t", "\x01",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join) | st.text(
    alphabet='{}[]":,\\ mov01-.eu\né', max_size=40
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.just("move"), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def split_texts(draw: st.DrawFn, texts: st.SearchStrategy[str] = TEXTS) -> tuple[str, list[bytes]]:
    """A text and its bytes cut anywhere, also within characters; some tokens are empty, as special ones are."""
    text = draw(texts)
    raw = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    return text, [raw[left:right] for left, right in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


@settings(max_examples=1200, deadline=None)
@given(split_texts(), st.sampled_from([frozenset(), KEYS]))
def test_the_tracker_finds_what_a_parse_of_the_whole_text_finds(case, keys):
    check(*case, keys)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.text(max_size=4) | st.just("move"), JSON_VALUES, max_size=3), TEXTS, TEXTS, st.data()
)
def test_real_objects_between_any_texts_are_found_like_in_the_whole_text(value, before, after, data):
    rendered = json.dumps(
        value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    text, pieces = data.draw(split_texts(st.just(before + rendered + after)))
    check(text, pieces, data.draw(st.sampled_from([frozenset(), KEYS])))


@settings(max_examples=300, deadline=None)
@given(split_texts())
def test_chunking_does_not_matter(case):
    text, pieces = case
    whole = track([text.encode()], KEYS)
    cut = track(pieces, KEYS)
    assert (cut.is_closed, cut.action_text) == (whole.is_closed, whole.action_text)


NASTY = [
    byte_tokenizer(NASTY_MERGES),
    byte_tokenizer([b"\xf0\x9f", b"\x98\x80}", 'é"}', ' {"move', '": {"', "}}}", '\\"}', '"}\n{"']),
    byte_tokenizer(["{{", "}{", '{"move": 1}', "1}", ": 1} "]),
]
MASKERS = [ActionTokenMasker(tokenizer, min_action_tokens=0, max_action_tokens=10**6) for tokenizer in NASTY]


@settings(max_examples=500, deadline=None)
@given(TEXTS, st.integers(0, len(NASTY) - 1))
def test_the_mask_covers_the_tokens_of_the_action_and_no_other(text, which):
    ids = NASTY[which].encode(text)
    pieces = [MASKERS[which].token_bytes[index] for index in ids]
    assert b"".join(pieces) == text.encode()
    mask = MASKERS[which].mask(ids, KEYS)
    assert len(mask.action_token_mask) == len(ids)
    expected = reference(text, KEYS)
    assert (mask.method is MaskingMethod.BRACE_DEPTH) == (expected is not None)
    if expected is not None:
        start, end = token_span(pieces, *(len(text[:index].encode()) for index in expected))
        assert np.flatnonzero(mask.action_token_mask).tolist() == list(range(start, end))
        assert mask.action.value == read_action(text[slice(*expected)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": "}"}', '{"a": "}"}'),
        ('{"a": "\\"}"}', '{"a": "\\"}"}'),
        ('{"a": "\\\\"}"}', '{"a": "\\\\"}'),
        ('set {1, 2} then {"a": 1}', '{"a": 1}'),
        ('{"a": {"b": 1}} {"c": 2}', '{"a": {"b": 1}}'),
        ('{"a": 1 {"b": 2}', '{"b": 2}'),
        ('{"a": "say {"b": 2}', '{"b": 2}'),
        ('{"a": {"b": 1}', ""),
        ('{"a": {"b": 1}, oops {"c": 2}', '{"b": 1}'),
        ('{"a": 1,}', ""),
        ('{"a": 01}', ""),
        ('{"a": 1.}', ""),
        ('{"a": "\n"}', ""),
        ('{"a": tru}', ""),
        ('{"😀": "é"}', '{"😀": "é"}'),
    ],
)
def test_hand_worked_cases(text, found):
    assert track([text.encode()], frozenset()).action_text == found


def test_a_token_may_hold_the_brace_and_more():
    tracker = ActionTracker(TOKEN_BYTES, KEYS)
    pieces = [b"Go", b"ing", b' {"', b"move", b'":', b"1", b"}.", b" Done"]
    closed = [tracker.push_bytes(piece) for piece in pieces]
    assert closed == [False] * 6 + [True, True]
    assert (tracker.start_index, tracker.end_index, tracker.num_tokens) == (2, 7, 8)


def test_is_open_follows_what_can_still_become_the_action():
    tracker = ActionTracker(TOKEN_BYTES, KEYS)
    states = []
    for piece in [b"a {", b"b", b' {"move"', b": 1", b"}"]:
        tracker.push_bytes(piece)
        states.append((tracker.is_open, tracker.is_closed, tracker.start_index))
    assert states == [
        (True, False, 0),
        (False, False, None),
        (True, False, 2),
        (True, False, 2),
        (False, True, 2),
    ]


def test_an_action_inside_another_object_waits_for_that_one_to_close():
    tracker = ActionTracker(TOKEN_BYTES, KEYS)
    assert not tracker.push_bytes(b'{"plan": {"move": 1}')
    assert tracker.push_bytes(b"}")
    assert tracker.action_text == '{"move": 1}'


def test_an_outer_object_with_an_action_key_wins_over_the_one_inside():
    assert track([b'{"a": {"move": 1}, "move": 2}'], KEYS).action_text == '{"a": {"move": 1}, "move": 2}'


def test_a_key_written_with_escapes_counts():
    assert track([b'{"m\\u006fve": 1}'], KEYS).is_closed


def test_nesting_beyond_the_limit_is_no_action_but_what_is_inside_may_be():
    deep = '{"a": ' * 70 + "1" + "}" * 70
    check(deep, [deep.encode()], frozenset())
    assert track([deep.encode()], frozenset()).action_text.count("{") == MAX_DEPTH
    arrays = '{"a": ' + "[" * 70 + "]" * 70 + "}"
    assert not track([arrays.encode()], frozenset()).is_closed
    check(arrays + '{"b": 1}', [(arrays + '{"b": 1}').encode()], frozenset())


def test_half_a_character_in_a_token_is_no_problem():
    raw = '{"move": "😀é"}'.encode()
    tracker = track([raw[index : index + 1] for index in range(len(raw))], KEYS)
    assert tracker.action_text == '{"move": "😀é"}'
    assert (tracker.start_index, tracker.end_index) == (0, len(raw))


def test_bytes_that_are_no_utf8_are_read_as_replacement_characters():
    assert track([b'{"move": "\xf0\x9f"}'], KEYS).action_text == '{"move": "\ufffd"}'
    assert not track([b'{"move": \xf0}'], KEYS).is_closed
