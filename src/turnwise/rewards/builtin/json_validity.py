"""Rewards answers that hold the JSON object they should."""

from __future__ import annotations

import json

from turnwise.rewards.interface import (
    EvaluateResult,
    StepOutput,
    assistant_turns,
    message_text,
    reward_function,
)
from turnwise.types import Json


@reward_function(name="json")
def json_reward(
    messages: list[dict[str, Json]], keys: list[str] | None = None, whole: bool = False
) -> EvaluateResult:
    """The share of answers with a JSON object that has all `keys`; with `whole`, and nothing around it."""
    outputs = [
        StepOutput(step_index=index, base_reward=float(_is_valid(message_text(message), keys or [], whole)))
        for index, message in assistant_turns(messages)
    ]
    if not outputs:
        return EvaluateResult(error="the agent said nothing")
    score = sum(output.base_reward for output in outputs) / len(outputs)
    return EvaluateResult(score=score, step_outputs=outputs)


def find_objects(text: str) -> list[dict[str, Json]]:
    """The JSON objects in a text, outermost ones only, in order. NaN and infinities are no JSON."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    objects = []
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position = text.find("{", position + 1)
            continue
        objects.append(value)
        position = text.find("{", end)
    return objects


def _is_valid(text: str, keys: list[str], whole: bool) -> bool:
    if whole:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and all(key in value for key in keys)
    return any(all(key in found for key in keys) for found in find_objects(text))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
