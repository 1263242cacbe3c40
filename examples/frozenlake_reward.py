"""A reward a user might write for FrozenLake. It runs in the sandbox and sees only what it asks for.

The score says whether the goal was reached; the step outputs say which moves came nearer to it.
"""

import re

from turnwise import EvaluateResult, StepOutput, reward_function
from turnwise.rewards import message_text

STEP_COST = 0.02


def distance_to_goal(text: str) -> int:
    """`Goal: down 1, right 2.` is 3 moves away, `Goal: here.` none."""
    told = re.search(r"Goal: ([^.]*)\.", text)
    return sum(int(number) for number in re.findall(r"\d+", told.group(1))) if told else 0


@reward_function
def nearer_to_goal(
    messages: list[dict], *, metrics: dict[str, float], step_rewards: list[float]
) -> EvaluateResult:
    """1 for reaching the goal; each step is paid what the environment paid plus a tenth of the way it came nearer."""
    distances = [distance_to_goal(message_text(message)) for message in messages if message["role"] == "user"]
    outputs = []
    for step, paid in enumerate(step_rewards):
        # After the last step nothing is shown any more: either the goal was reached or the ice broke.
        gained = distances[step] - distances[step + 1] if step + 1 < len(distances) else 0
        outputs.append(
            StepOutput(
                step_index=step, base_reward=paid + 0.1 * gained - STEP_COST, reason=f"{gained:+d} nearer"
            )
        )
    return EvaluateResult(score=metrics["success"], step_outputs=outputs, reason=f"{len(outputs)} steps")
