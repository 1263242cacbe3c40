"""What the agent is told: instructions once, and a short text with every picture."""

from __future__ import annotations

from turnwise.environments.navigation.actions import FORWARD_KEY, ROTATION_KEY, ActionLimits
from turnwise.environments.navigation.scenes import Pose
from turnwise.types import Task


def instruct(limits: ActionLimits, is_question: bool, require_done: bool) -> str:
    """The system message for models that have not been trained on this task."""
    lines = [
        "You are a robot in a building. Each turn shows what your camera sees. Think briefly, then give one action as JSON:",
        f'{{"{ROTATION_KEY}": 30, "{FORWARD_KEY}": 0.5}}',
        f"First you turn on the spot by {ROTATION_KEY} (positive is left, negative is right, at most "
        f"{limits.max_rotation_degrees:g}), then you walk straight ahead by {FORWARD_KEY} (0 to {limits.max_forward_m:g}). "
        "Walls and furniture stop you.",
    ]
    if is_question:
        lines.append(
            'When you know the answer, add "answer": the letter of an option, or a number. This ends the episode.'
        )
    elif require_done:
        lines.append('When you have reached the goal, add "done": true. This ends the episode.')
    else:
        lines.append("The episode ends when you are next to the goal.")
    return "\n".join(lines)


def observe_text(task: Task, turn: int, max_turns: int, note: str, pose: Pose | None) -> str:
    """`Turn 3 of 8. Blocked. Find the red chair.`"""
    # Beyond the last turn only the viewer sees the text.
    parts = [f"Turn {min(turn + 1, max_turns)} of {max_turns}."]
    if note:
        parts.append(note)
    if pose is not None:
        parts.append(f"You are at ({pose.x:.2f}, {pose.y:.2f}), heading {pose.yaw_degrees:.0f} degrees.")
    parts.append(str(task.data.get("question", "")))
    return " ".join(parts)
