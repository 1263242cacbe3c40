"""What an agent may do in one turn: turn on the spot, walk ahead, and say that it has arrived or what the answer is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from turnwise.types import Action, Json

ROTATION_KEY = "rotation_angle_degrees"
FORWARD_KEY = "forward_meters"


class ActionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest move of one turn."""

    max_rotation_degrees: float = 180.0
    """To either side; positive turns left."""
    max_forward_m: float = 1.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """An action that passed the checks: first turn left by the rotation, then walk."""

    rotation_degrees: float = 0.0
    forward_m: float = 0.0
    answer: str | None = None
    is_done: bool = False

    def as_value(self) -> dict[str, Json]:
        """The action's JSON, whole numbers without a fraction."""
        value: dict[str, Json] = {
            ROTATION_KEY: _plain(self.rotation_degrees),
            FORWARD_KEY: _plain(self.forward_m),
        }
        if self.answer is not None:
            value["answer"] = self.answer
        if self.is_done:
            value["done"] = True
        return value


def action_schema(limits: ActionLimits, *, has_answer: bool, has_done: bool) -> dict[str, Json]:
    """JSON schema of an action."""
    properties: dict[str, Json] = {
        ROTATION_KEY: {
            "type": "number", "minimum": -limits.max_rotation_degrees, "maximum": limits.max_rotation_degrees,
            "description": "turn on the spot first; positive is left",
        },
        FORWARD_KEY: {
            "type": "number", "minimum": 0, "maximum": limits.max_forward_m, "description": "then walk straight ahead",
        },
    }  # fmt: skip
    if has_answer:
        properties["answer"] = {"type": "string", "description": "answers the question and ends the episode"}
    if has_done:
        properties["done"] = {
            "type": "boolean",
            "description": "says that the goal is reached and ends the episode",
        }
    return {
        "type": "object", "properties": properties, "required": [ROTATION_KEY, FORWARD_KEY], "additionalProperties": False,
    }  # fmt: skip


def read_command(action: Action, limits: ActionLimits) -> Command | str:
    """The command in an action, or one sentence on why there is none."""
    value = action.value
    if value is None:
        return f'no action found; end with {{"{ROTATION_KEY}": 30, "{FORWARD_KEY}": 0.5}}'
    unknown = sorted(set(value) - {ROTATION_KEY, FORWARD_KEY, "answer", "done"})
    if unknown:
        return f"unknown key {unknown[0]!r}; known are {ROTATION_KEY}, {FORWARD_KEY}, answer and done"
    answer, is_done = value.get("answer"), value.get("done", False)
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        return f"answer is {answer!r}; it must be text or a number"
    if not isinstance(is_done, bool):
        return f"done is {is_done!r}; it must be true or false"
    ends = answer is not None or is_done
    rotation = _number(value, ROTATION_KEY, -limits.max_rotation_degrees, limits.max_rotation_degrees, ends)
    if isinstance(rotation, str):
        return rotation
    forward = _number(value, FORWARD_KEY, 0.0, limits.max_forward_m, ends)
    if isinstance(forward, str):
        return forward
    return Command(
        rotation_degrees=rotation,
        forward_m=forward,
        is_done=is_done,
        answer=None if answer is None else str(answer),
    )


def _number(value: Mapping[str, Any], key: str, low: float, high: float, is_optional: bool) -> float | str:
    if key not in value:
        # An answer or `done` alone means: stay where you are.
        return 0.0 if is_optional else f"{key} is missing; give a number from {low:g} to {high:g}"
    number = value[key]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return f"{key} is {str(number)[:40]!r}; give a number from {low:g} to {high:g}"
    if not low <= number <= high:  # also true of NaN
        shown = number if isinstance(number, float) or abs(number) < 10**18 else "huge"
        return f"{key} is {shown}; it must lie between {low:g} and {high:g}"
    return float(number)


def _plain(number: float) -> int | float:
    return int(number) if float(number).is_integer() else round(float(number), 4)
