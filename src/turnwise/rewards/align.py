"""Puts what a reward said about steps onto the steps it said it about; what does not fit is an error, never ignored."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnwise.errors import RewardError
from turnwise.rewards.interface import EvaluateResult, ScoreFromSteps, StepIndexKind
from turnwise.rewards.steps import StepData
from turnwise.types import Episode


def turn_message_indices(episode: Episode) -> tuple[int, ...]:
    """Where each turn's answer stands in `episode.messages`."""
    # Counted, not found by role: a few-shot prompt may hold assistant messages that the agent never wrote.
    indices = []
    position = -1
    for turn in episode.turns:
        position += len(turn.observation.messages) + 1
        indices.append(position)
    return tuple(indices)


def align_step_rewards(
    result: EvaluateResult,
    *,
    message_indices: Sequence[int],
    function: str,
    episode_id: str,
    step_index_kind: StepIndexKind = "turn",
) -> tuple[float | None, ...]:
    """One reward per turn, None where the function gave none; empty when it gave no step outputs at all.

    `message_indices[t]` is the index of turn t's message. Two turns at messages 1 and 3:
    an output with `step_index=1` means turn 1 by default, and turn 0 with `step_index_kind="message"`.
    """
    if not result.step_outputs:
        return ()
    ordinals = {index: turn for turn, index in enumerate(message_indices)}
    rewards: list[float | None] = [None] * len(message_indices)
    for output in result.step_outputs:
        where = f"reward {function}, episode {episode_id}: step_index {output.step_index}"
        if step_index_kind == "message":
            turn = ordinals.get(output.step_index)
            if turn is None:
                raise RewardError(f"{where} is no message of the agent; those are at {list(message_indices)}")
        else:
            turn = output.step_index
            if turn >= len(rewards):
                raise RewardError(
                    f"{where} is out of range; the episode has {len(rewards)} turns, counted from 0 "
                    '(declare step_index_kind="message" to use message indices)'
                )
        if rewards[turn] is not None:
            raise RewardError(f"{where} appears twice; give each step one output")
        rewards[turn] = output.base_reward
    return tuple(rewards)


def episode_score(
    result: EvaluateResult, *, function: str, episode_id: str, score_from_steps: ScoreFromSteps | None = None
) -> float:
    """The score of a valid result; only made from its steps when the function was declared so."""
    if result.score is not None:
        return result.score
    rewards = [output.base_reward for output in result.step_outputs or ()]
    if score_from_steps is None or not rewards:
        raise RewardError(
            f"reward {function}, episode {episode_id}: there are step_outputs but no score; return a score, "
            'or declare @reward_function(score_from_steps="sum")'
        )
    total = float(sum(rewards))
    return total if score_from_steps == "sum" else total / len(rewards)


def align_rewards(
    steps: Sequence[StepData],
    result: EvaluateResult,
    *,
    function: str = "reward",
    step_index_kind: StepIndexKind = "turn",
    score_from_steps: ScoreFromSteps | None = None,
    default_step_reward: float | None = None,
) -> tuple[StepData, ...]:
    """The steps of one episode with `base_reward` and `score` filled in; the given ones stay as they are.

    Steps without an output get `default_step_reward`. The score is kept beside the step rewards, never added to one.
    """
    episode_id = steps[0].episode_id if steps else "?"
    if result.error is not None or not result.is_score_valid:
        raise RewardError(
            f"reward {function}, episode {episode_id}: the result is not valid: {result.error or result.reason}"
        )
    rewards = align_step_rewards(
        result,
        message_indices=[step.message_index for step in steps],
        function=function,
        episode_id=episode_id,
        step_index_kind=step_index_kind,
    ) or (None,) * len(steps)
    score = episode_score(result, function=function, episode_id=episode_id, score_from_steps=score_from_steps)
    return tuple(
        msgspec.structs.replace(
            step, base_reward=default_step_reward if reward is None else reward, score=score
        )
        for step, reward in zip(steps, rewards, strict=True)
    )
