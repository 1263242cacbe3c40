"""The environment's own opinion: what it paid per action, and the sum as the score."""

from __future__ import annotations

from turnwise.rewards.interface import EvaluateResult, StepOutput, reward_function
from turnwise.types import Json


@reward_function(name="environment")
def environment_reward(messages: Json, step_rewards: list[float]) -> EvaluateResult:
    """Score = everything the environment paid; each turn's part is that turn's step reward."""
    return EvaluateResult(
        score=float(sum(step_rewards)),
        step_outputs=[
            StepOutput(step_index=index, base_reward=reward) for index, reward in enumerate(step_rewards)
        ],
    )
