"""Which sampled tokens are the action: the masks that decide what carries loss.

Strategies, strongest first, each with the confidence it deserves:

    brace_depth 1.0   a complete JSON object with an action key; the only one whose action is carried out
    regex       0.7   an object that was opened and never closed: its tokens up to the end
    last_n      0.3   keys without an object around them: the last few tokens
    failed      0.0   nothing: an empty mask with the reason, and an episode that is dropped
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from turnwise.action_tracker import ActionTracker
from turnwise.token_bytes import TokenBytes
from turnwise.types import Action, BoolArray, IntArray, MaskingMethod

__all__ = [
    "ActionTokenMasker",
    "ActionTracker",
    "EpisodeQuality",
    "MaskingStatistics",
    "TokenBytes",
    "TurnMask",
    "read_action",
]

CONFIDENCES: Mapping[MaskingMethod, float] = {
    MaskingMethod.BRACE_DEPTH: 1.0,
    MaskingMethod.REGEX: 0.7,
    MaskingMethod.LAST_N: 0.3,
    MaskingMethod.FAILED: 0.0,
}


class TurnMask(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Which tokens of one completion are its action, and how sure that is."""

    action_token_mask: BoolArray
    method: MaskingMethod
    confidence: float
    action: Action
    problem: str | None = None
    """Why the turn makes its episode invalid: empty_completion, no_json, invalid_json, no_action_key,
    too_few_action_tokens, too_many_action_tokens; None when nothing is wrong."""

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_token_mask.sum())

    @property
    def action_token_start_index(self) -> int | None:
        """The action's first token; None without an action."""
        return int(np.argmax(self.action_token_mask)) if self.num_action_tokens else None

    @property
    def action_token_end_index(self) -> int | None:
        """One past the action's last token."""
        start = self.action_token_start_index
        return None if start is None else start + self.num_action_tokens


class EpisodeQuality(msgspec.Struct, frozen=True, kw_only=True):
    """What the masks of all turns say about an episode."""

    is_valid: bool
    masking_quality: str
    """good: no fallback; low_confidence: in up to half of the turns; fallback_used: in more."""
    dropout_reason: str | None = None


class MaskingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over all that a masker has seen."""

    num_turns: int
    methods: Mapping[str, int]
    num_action_tokens: int
    num_generated_tokens: int
    num_episodes: int
    num_dropped: int
    qualities: Mapping[str, int]
    dropouts: Mapping[str, int]
    """Dropped episodes by the kind of problem."""

    @property
    def dropout_rate(self) -> float:
        return self.num_dropped / self.num_episodes if self.num_episodes else 0.0


class ActionTokenMasker:
    """Turns sampled tokens into action masks, and a row of masks into a verdict on the episode.

    >>> masker.mask(tokenizer.encode('Left. {"move": "left"}'), frozenset({"move"})).action.value
    {'move': 'left'}
    """

    def __init__(
        self,
        tokens: Any,  # a TokenBytes, or the tokenizer to make it from
        *,
        min_action_tokens: int = 10,
        max_action_tokens: int = 100,
        last_n: int = 20,
    ) -> None:
        if not 0 <= min_action_tokens <= max_action_tokens:
            raise ValueError(
                f"min_action_tokens is {min_action_tokens} and max_action_tokens {max_action_tokens}; "
                "they must ascend from 0"
            )
        if last_n < 1:
            raise ValueError(f"last_n is {last_n}; the last-N strategy needs at least 1 token")
        self.token_bytes = tokens if isinstance(tokens, TokenBytes) else TokenBytes(tokens)
        self.min_action_tokens = min_action_tokens
        self.max_action_tokens = max_action_tokens
        self.last_n = last_n
        self._methods: Counter[str] = Counter()
        self._qualities: Counter[str] = Counter()
        self._dropouts: Counter[str] = Counter()
        self._num_tokens = np.zeros(2, dtype=np.int64)

    def mask(
        self, generated_ids: Sequence[int] | IntArray, action_keys: frozenset[str] = frozenset()
    ) -> TurnMask:
        """The mask of one completion, by the strongest strategy that finds anything."""
        ids = _flat_ids(generated_ids)
        found = self._find(ids, action_keys)
        if found.method is not MaskingMethod.FAILED:
            found = msgspec.structs.replace(found, problem=self._range_problem(found.num_action_tokens))
        self._methods[found.method.value] += 1
        self._num_tokens += found.num_action_tokens, len(ids)
        return found

    def evaluate(self, turn_masks: Sequence[TurnMask]) -> EpisodeQuality:
        """The verdict on an episode from the masks of its turns."""
        problems = [(index, mask.problem) for index, mask in enumerate(turn_masks) if mask.problem]
        fallbacks = sum(mask.method is not MaskingMethod.BRACE_DEPTH for mask in turn_masks)
        if fallbacks == 0:
            quality = "good"
        else:
            quality = "low_confidence" if 2 * fallbacks <= len(turn_masks) else "fallback_used"
        reason = None
        if problems:
            index, problem = problems[0]
            reason = f"{problem} in turn {index}: {self._explain(problem, turn_masks[index])}"
        elif not turn_masks:
            problem, reason = "no_turns", "no_turns: the episode ended before the first completion"
        self._qualities[quality] += 1
        if reason is not None:
            self._dropouts[str(problem)] += 1
        return EpisodeQuality(is_valid=reason is None, masking_quality=quality, dropout_reason=reason)

    @property
    def statistics(self) -> MaskingStatistics:
        """Counts of methods, qualities and drop-outs so far."""
        return MaskingStatistics(
            num_turns=self._methods.total(),
            methods={method.value: self._methods[method.value] for method in MaskingMethod},
            num_action_tokens=int(self._num_tokens[0]),
            num_generated_tokens=int(self._num_tokens[1]),
            num_episodes=self._qualities.total(),
            num_dropped=self._dropouts.total(),
            qualities=dict(self._qualities),
            dropouts=dict(self._dropouts),
        )

    def _find(self, ids: list[int], action_keys: frozenset[str]) -> TurnMask:
        tracker = ActionTracker(self.token_bytes, action_keys)
        for index in ids:
            if tracker.push(index):
                break
        truncated = tracker.open_offset
        if tracker.finish():
            assert tracker.start_index is not None
            assert tracker.end_index is not None
            action = Action(value=read_action(tracker.action_text), text=tracker.action_text)
            return _turn_mask(
                len(ids), tracker.start_index, tracker.end_index, MaskingMethod.BRACE_DEPTH, action
            )
        text, last = self.token_bytes.join(ids), self._last_visible(ids)
        opened = _unclosed_object(text, action_keys) if truncated is None else truncated
        if opened is not None:
            action = Action(value=None, text=text[opened:].decode("utf-8", errors="replace"))
            return _turn_mask(len(ids), self._token_at(ids, opened), last, MaskingMethod.REGEX, action)
        if b"{" not in text and _key_pattern(action_keys, b"").search(text):
            start = max(0, last - self.last_n)
            action = Action(value=None, text=self.token_bytes.text(ids[start:last]))
            return _turn_mask(len(ids), start, last, MaskingMethod.LAST_N, action)
        failed = _turn_mask(len(ids), 0, 0, MaskingMethod.FAILED, Action(value=None))
        return msgspec.structs.replace(failed, problem=self._failure(ids, text))

    def _failure(self, ids: list[int], text: bytes) -> str:
        if not text.strip():
            return "empty_completion"
        if b"{" not in text or b"}" not in text:
            return "no_json"
        any_object = ActionTracker(self.token_bytes)
        return "no_action_key" if any(map(any_object.push, ids)) or any_object.finish() else "invalid_json"

    def _token_at(self, ids: list[int], offset: int) -> int:
        """The token that holds the byte at `offset`."""
        for index, token_id in enumerate(ids):
            offset -= len(self.token_bytes[token_id])
            if offset < 0:
                return index
        raise AssertionError("the offset lies within the text of these tokens")

    def _last_visible(self, ids: list[int]) -> int:
        """One past the last token that stands for any bytes: end-of-turn tokens are never part of an action."""
        return next((index + 1 for index in range(len(ids) - 1, -1, -1) if self.token_bytes[ids[index]]), 0)

    def _range_problem(self, num_action_tokens: int) -> str | None:
        if num_action_tokens < self.min_action_tokens:
            return "too_few_action_tokens"
        return "too_many_action_tokens" if num_action_tokens > self.max_action_tokens else None

    def _explain(self, problem: str | None, mask: TurnMask) -> str:
        if problem in _EXPLANATIONS:
            return _EXPLANATIONS[problem]
        return (
            f"the action has {mask.num_action_tokens} tokens, outside {self.min_action_tokens} to "
            f"{self.max_action_tokens}"
        )


_STRING_OR_BRACE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}"]', re.DOTALL)
_BRACE = re.compile(rb"[{}]")
_EXPLANATIONS = {
    "empty_completion": "nothing visible was sampled",
    "no_json": "the completion holds no JSON object",
    "invalid_json": "the braces close but what they hold is no JSON",
    "no_action_key": "the JSON found has none of the action's keys",
}


def read_action(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` spells, or None; integers beyond 64 bits become floats so that any store can hold them."""
    try:
        value = json.loads(text, parse_int=_read_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_integer(digits: str) -> int | float:
    # int() of many thousand digits is slow and refused by Python; a double says enough.
    if len(digits) > 20:
        return float(digits)
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else float(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _flat_ids(generated_ids: Sequence[int] | IntArray) -> list[int]:
    ids = np.asarray(generated_ids, dtype=np.int64)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]  # what `generate` returns for one prompt
    if ids.ndim != 1:
        raise ValueError(f"a mask is made for one completion; got token ids of shape {ids.shape}")
    return [int(index) for index in ids]


def _turn_mask(length: int, start: int, end: int, method: MaskingMethod, action: Action) -> TurnMask:
    mask = np.zeros(length, dtype=np.bool_)
    mask[start:end] = True
    return TurnMask(action_token_mask=mask, method=method, confidence=CONFIDENCES[method], action=action)


def _key_pattern(action_keys: Iterable[str], opening: bytes) -> re.Pattern[bytes]:
    """`"key":`, quoted or not, after `opening`; any quoted name when no keys are known."""
    names = sorted(re.escape(key.encode()) for key in action_keys)
    name = rb"[\"']?(?:" + b"|".join(names) + rb")[\"']?" if names else rb"[\"'][^\"'{}\n]+[\"']"
    return re.compile(opening + rb"(?<![\w])" + name + rb"\s*[:=]")


def _unclosed_object(text: bytes, action_keys: frozenset[str]) -> int | None:
    """Where the first `{` lies that begins with a key, is never closed, and is not even the beginning of JSON."""
    unclosed = _unclosed_braces(text)
    if action_keys:
        opening = re.compile(rb"\{(?=[^{}]*?" + _key_pattern(action_keys, b"").pattern + rb")")
    else:
        opening = re.compile(rb"\{\s*[\"'\w]")
    for match in opening.finditer(text):
        if match.start() in unclosed:
            return match.start()
    return None


def _unclosed_braces(text: bytes) -> frozenset[int]:
    """The offsets of the braces that stay open to the end, strings left aside."""
    still_open: list[int] = []
    # From a quote on that no other one closes, nothing is a string; looking again from every later quote would be quadratic.
    lone = next((match.start() for match in _STRING_OR_BRACE.finditer(text) if match[0] == b'"'), len(text))
    for match in itertools.chain(_STRING_OR_BRACE.finditer(text, 0, lone), _BRACE.finditer(text, lone)):
        if match[0] == b"{":
            still_open.append(match.start())
        elif match[0] == b"}" and still_open:
            still_open.pop()
    return frozenset(still_open)
