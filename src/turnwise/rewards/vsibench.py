"""How VSI-Bench scores an answer: accuracy for multiple choice (MCA), mean relative accuracy for numbers (MRA)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from turnwise.errors import RewardError

DIRECTIONS = ("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard")
CHOICES = (*DIRECTIONS, "object_rel_distance", "route_planning", "obj_appearance_order")
NUMBERS = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")

# 1 - θ for θ = 0.50, 0.55 … 0.95, as exact decimals.
_TOLERANCES = tuple((50 - 5 * i) / 100 for i in range(10))
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_DECLARED_LETTER = re.compile(r"(?:answer|option|choice)\s*(?:is|:)?\s*\(?([A-H])\b", re.IGNORECASE)
_LEADING_LETTER = re.compile(r"^\W*([A-Ha-h])(?:\s*$|\s*[.):,*\]\n]|\s+(?=[A-Z0-9]))")
_LONE_LETTER = re.compile(r"(?<![A-Za-z'])([A-H])(?![A-Za-z'])")


def is_official_match(answer: str, letter: str) -> bool:
    """The benchmark's own rule: the first word, without a full stop, is the letter."""
    return answer.split(" ")[0].rstrip(".").strip().lower() == letter.strip().lower()


def find_letter(answer: str) -> str | None:
    """The option an answer chooses: "(A)", "A. Turn left", "The answer is A"; None when it does not say.

    A declared letter wins over a leading one, the last declaration over earlier ones; several lone letters say nothing.
    """
    declared = _DECLARED_LETTER.findall(answer)
    if declared:
        return str(declared[-1]).upper()
    leading = _LEADING_LETTER.match(answer)
    if leading:
        return leading[1].upper()
    lone = set(_LONE_LETTER.findall(answer)) - {"A"} or set(_LONE_LETTER.findall(answer))
    return lone.pop() if len(lone) == 1 else None


def find_number(answer: str) -> float | None:
    """The last number in an answer; None without one."""
    found = _NUMBER.findall(answer)
    if not found:
        return None
    number = float(found[-1].replace(",", ""))
    return number if math.isfinite(number) else None


def multiple_choice_accuracy(answer: str, letter: str) -> float:
    """1 when the answer chooses `letter`."""
    return float(find_letter(answer) == letter.strip().upper())


def mean_relative_accuracy(value: float | None, target: float) -> float:
    """The share of tolerances 0.50, 0.45 … 0.05 that |value − target| / target stays within; 0 without a value.

    >>> mean_relative_accuracy(9.0, 10.0)  # off by 0.10: within 9 of the 10
    0.9
    """
    if value is None:
        return 0.0
    if target == 0:
        return float(value == 0)
    # Rounded so that 0.1 off counts as within 0.10.
    error = round(abs(value - target) / abs(target), 12)
    return sum(error <= tolerance for tolerance in _TOLERANCES) / len(_TOLERANCES)


def score_answer(answer: str, ground_truth: str, question_type: str) -> float:
    """MCA or MRA, whichever the kind of question asks for."""
    if question_type in CHOICES:
        return multiple_choice_accuracy(answer, ground_truth)
    if question_type in NUMBERS:
        return mean_relative_accuracy(find_number(answer), float(ground_truth))
    known = ", ".join((*CHOICES, *NUMBERS))
    raise RewardError(f"VSI-Bench has no question type {question_type!r}; it has: {known}")


def overall_score(scores: Mapping[str, Sequence[float]]) -> float:
    """The benchmark's headline: the unweighted mean of the tasks, the three direction levels counting as one."""
    tasks = {name: fmean(values) for name, values in scores.items() if values}
    directions = [tasks.pop(name) for name in DIRECTIONS if name in tasks]
    means = [*tasks.values(), *([fmean(directions)] if directions else [])]
    if not means:
        raise RewardError("there is no VSI-Bench score to average; give at least one question type")
    return fmean(means)
