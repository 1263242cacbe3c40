"""How VSI-Bench scores an answer: accuracy for multiple choice (MCA), mean relative accuracy for numbers (MRA)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from turnwise.errors import RewardError

DIRECTIONS = ("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard")
CHOICES = (*DIRECTIONS, "object_rel_distance", "route_planning", "obj_appearance_order")
NUMBERS = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")

# 1 - θ for θ = 0.50, 0.55 … 0.95, as exact decimals.
_TOLERANCES = tuple((50 - 5 * i) / 100 for i in range(10))
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Inside a sentence only a capital counts, and an A before a word is an article.
_DECLARED_LETTER = re.compile(
    r"(?i:answer|option|choice)\s*(?i:is)?\s*[:=]?\s*\(?(A(?! +[a-z])|[B-H])\b(?!')"
)
_LEADING_LETTER = re.compile(r"^\W*([A-Ha-h])(?:\s*$|\s*[.):,\]\n])")
_LONE_LETTER = re.compile(r"(?<![A-Za-z'])(A(?!\s+[a-z])|[B-H])(?![A-Za-z'])")


class AnswerScore(msgspec.Struct, frozen=True, kw_only=True):
    """Two opinions of one answer: with the letter or number looked for in the text, and by the benchmark's own rule."""

    score: float
    official: float


def is_official_match(answer: str, letter: str) -> bool:
    """The benchmark's own rule: the first word, without a full stop, is the letter.

    "A." and "B. Turn Left" pass; "(A)" and "The answer is A" do not.
    """
    return _first_word(answer).lower() == letter.strip().lower()


def find_letter(answer: str, options: Sequence[str] = ()) -> str | None:
    """The option an answer chooses: "(A)", "A. Turn left", "The answer is A", or an option's own words; None when it does not say.

    The last declared letter wins over a leading one, that over an option's words; several lone letters say nothing.
    """
    text = answer.strip().replace("*", "").replace("`", "")
    declared = _DECLARED_LETTER.findall(text)
    if declared:
        return str(declared[-1])
    leading = _LEADING_LETTER.match(text)
    if leading:
        return leading[1].upper()
    words = {option.strip()[:1].upper(): option.partition(".")[2].strip().lower() for option in options}
    named = [letter for letter, body in words.items() if body and body in text.lower()]
    if len(named) == 1:
        return named[0]
    lone = set(_LONE_LETTER.findall(text))
    return lone.pop() if len(lone) == 1 else None


def find_number(answer: str) -> float | None:
    """The last number in an answer; None without one."""
    found = _NUMBER.findall(answer)
    if not found:
        return None
    number = float(found[-1].replace(",", ""))
    return number if math.isfinite(number) else None


def as_number(text: str) -> float | None:
    """The number that a text is; None when it is anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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


def score_answer(
    answer: str, ground_truth: str, question_type: str, options: Sequence[str] = ()
) -> AnswerScore:
    """0 to 1: accuracy for choices (MCA), mean relative accuracy for numbers (MRA)."""
    if question_type in CHOICES:
        return AnswerScore(
            score=float(find_letter(answer, options) == ground_truth.strip().upper()),
            official=float(is_official_match(answer, ground_truth)),
        )
    if question_type in NUMBERS:
        truth = float(ground_truth)
        return AnswerScore(
            score=mean_relative_accuracy(find_number(answer), truth),
            official=mean_relative_accuracy(as_number(_first_word(answer)), truth),
        )
    known = ", ".join((*CHOICES, *NUMBERS))
    raise RewardError(f"VSI-Bench has no question type {question_type!r}; it has: {known}")


def summarize(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean per question type, and `overall`: the unweighted mean of the tasks, the three direction levels counting as one."""
    means = {name: fmean(values) for name, values in sorted(scores.items()) if values}
    if not means:
        raise RewardError("there is no VSI-Bench score to average; give at least one question type")
    tasks = [mean for name, mean in means.items() if name not in DIRECTIONS]
    directions = [means[name] for name in DIRECTIONS if name in means]
    if directions:
        means["object_rel_direction"] = fmean(directions)
        tasks.append(means["object_rel_direction"])
    return {**means, "overall": fmean(tasks)}


def _first_word(text: str) -> str:
    return text.split(" ")[0].rstrip(".").strip()
