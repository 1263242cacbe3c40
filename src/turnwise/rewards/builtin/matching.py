"""Rewards that compare the agent's last answer with the truth: exactly, by pattern, or as a number."""

from __future__ import annotations

import math
import re
import unicodedata

from turnwise.rewards.interface import (
    EvaluateResult,
    as_metrics,
    assistant_turns,
    message_text,
    reward_function,
)
from turnwise.rewards.vsibench import find_number
from turnwise.types import Json


def final_answer(messages: list[dict[str, Json]], extract: str | None = None) -> str | None:
    """The agent's last words; with `extract`, the pattern's last match in them (its first group, if it has one)."""
    turns = [message_text(message) for _, message in assistant_turns(messages)]
    if not turns:
        return None
    if extract is None:
        return turns[-1].strip()
    found = list(re.finditer(extract, turns[-1], re.DOTALL))
    if not found:
        return None
    return (found[-1][1] if found[-1].re.groups else found[-1][0]).strip()


def normalize_answer(text: str) -> str:
    """Case, spaces and surrounding punctuation do not make an answer wrong: " Paris. " is "paris"."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(".,;:!?\"'`()[]{}*")


@reward_function(name="exact")
def exact_reward(
    messages: list[dict[str, Json]], ground_truth: Json, extract: str | None = None, strict: bool = False
) -> EvaluateResult:
    """1 when the answer equals the truth (or one of several), 0 otherwise; `strict` compares letter by letter."""
    accepted = [str(truth) for truth in (ground_truth if isinstance(ground_truth, list) else [ground_truth])]
    if ground_truth is None or not accepted:
        return EvaluateResult(error="the task has no ground truth to compare with")
    answer = final_answer(messages, extract)
    if answer is None:
        return EvaluateResult(score=0.0, reason="no answer found")
    if strict:
        return EvaluateResult(score=float(answer in accepted))
    return EvaluateResult(score=float(normalize_answer(answer) in {normalize_answer(t) for t in accepted}))


@reward_function(name="regex")
def regex_reward(
    messages: list[dict[str, Json]], ground_truth: Json = None, pattern: str | None = None
) -> EvaluateResult:
    """1 when the pattern (the truth, unless `pattern` is given) occurs in the answer, 0 otherwise."""
    wanted = pattern if pattern is not None else ground_truth
    if not isinstance(wanted, str):
        return EvaluateResult(
            error="there is no pattern; set the parameter `pattern` or the task's ground truth"
        )
    answer = final_answer(messages) or ""
    return EvaluateResult(score=float(re.search(wanted, answer) is not None))


@reward_function(name="numeric")
def numeric_reward(
    messages: list[dict[str, Json]],
    ground_truth: Json,
    extract: str | None = None,
    relative_tolerance: float = 1e-6,
    absolute_tolerance: float = 0.0,
) -> EvaluateResult:
    """1 when the last number of the answer is the truth, within the tolerances."""
    try:
        target = float(str(ground_truth).replace(",", ""))
    except ValueError:
        return EvaluateResult(error=f"the ground truth {ground_truth!r} is not a number")
    answer = final_answer(messages, extract)
    number = None if answer is None else find_number(answer)
    if number is None:
        return EvaluateResult(score=0.0, reason="no number in the answer")
    is_close = math.isclose(number, target, rel_tol=relative_tolerance, abs_tol=absolute_tolerance)
    return EvaluateResult(score=float(is_close), metrics=as_metrics({"error": abs(number - target)}))
