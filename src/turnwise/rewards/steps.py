"""An episode as a list of steps: what was seen, what was done, what it was worth. A view for authors and viewers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from turnwise.errors import RewardError
from turnwise.rewards.arguments import plain, plain_message
from turnwise.types import Action, Episode, Json, Message, Observation, Role, Score, TurnCredit


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's tokens lie in its episode's streams."""

    stream_index: int
    prompt_start: int
    completion_start: int
    completion_end: int
    action_start: int | None = None
    """Index into the completion; None without an action."""
    action_end: int | None = None


class StepData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step of one episode. None means "not computed"; the aligner and the estimators fill in copies."""

    episode_id: str
    group_id: str
    step_index: int
    """The ordinal of the assistant turn."""
    message_index: int
    """Where its answer stands in the episode's messages."""
    observation: Observation
    messages: tuple[Message, ...]
    """The conversation up to and including this step's answer."""
    action: Action
    text: str
    policy_logprobs: tuple[float, ...]
    """One per generated token, of the distribution really sampled from."""
    span: TokenSpan
    is_done: bool
    """Whether the episode ended with this step."""
    environment_reward: float = 0.0
    policy_value_estimate: float | None = None
    base_reward: float | None = None
    """What the reward function paid for this step."""
    score: float | None = None
    """What it paid for the whole episode; the same on each of its steps."""
    step_return: float | None = None
    """Discounted rewards from this step on (G_k)."""
    episode_advantage: float | None = None
    step_advantage: float | None = None
    advantage: float | None = None
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)


def steps_of_episode(episode: Episode, *, values: Sequence[float] | None = None) -> tuple[StepData, ...]:
    """The turns of an episode as steps, not yet scored; `values` are the critic's estimates, one per turn."""
    if values is not None and len(values) != episode.num_turns:
        raise RewardError(
            f"episode {episode.episode_id} has {episode.num_turns} turns but {len(values)} value estimates; "
            "give one per turn"
        )
    spoken: list[Message] = []
    steps = []
    for ordinal, turn in enumerate(episode.turns):
        spoken.extend(turn.observation.messages)
        spoken.append(Message(role=Role.ASSISTANT, content=turn.text))
        stream_index = next(i for i, stream in enumerate(episode.streams) if stream is turn.stream)
        steps.append(
            StepData(
                episode_id=episode.episode_id,
                group_id=episode.group_id,
                step_index=ordinal,
                message_index=len(spoken) - 1,
                observation=turn.observation,
                messages=tuple(spoken),
                action=turn.action,
                text=turn.text,
                policy_logprobs=tuple(float(logprob) for logprob in turn.logprobs),
                span=TokenSpan(
                    stream_index=stream_index,
                    prompt_start=turn.prompt_start,
                    completion_start=turn.completion_start,
                    completion_end=turn.completion_end,
                    action_start=turn.action_token_start_index,
                    action_end=turn.action_token_end_index,
                ),
                is_done=ordinal == episode.num_turns - 1,
                environment_reward=turn.reward,
                policy_value_estimate=None if values is None else float(values[ordinal]),
                metrics=turn.metrics,
            )
        )
    return tuple(steps)


def with_score(
    steps: Sequence[StepData], score: Score, *, default_step_reward: float | None = None
) -> tuple[StepData, ...]:
    """The steps with a stored score and its step rewards."""
    rewards = score.step_rewards or (None,) * len(steps)
    if len(rewards) != len(steps):
        raise RewardError(
            f"reward {score.reward_name}, episode {score.episode_id}: {len(rewards)} step rewards for "
            f"{len(steps)} steps; score the episode again"
        )
    return tuple(
        msgspec.structs.replace(
            step, base_reward=default_step_reward if reward is None else reward, score=score.score
        )
        for step, reward in zip(steps, rewards, strict=True)
    )


def with_credit(steps: Sequence[StepData], credits: Sequence[TurnCredit]) -> tuple[StepData, ...]:
    """The steps with what an estimator made of them."""
    return tuple(
        msgspec.structs.replace(
            step,
            step_return=credit.step_return,
            episode_advantage=credit.episode_advantage,
            step_advantage=credit.step_advantage,
            advantage=credit.advantage,
        )
        for step, credit in zip(steps, credits, strict=True)
    )


def plain_step(step: StepData) -> dict[str, Json]:
    """A step as JSON: the messages that are new in it instead of all of them, images by reference."""
    values = {name: getattr(step, name) for name in step.__struct_fields__}
    values["messages"] = [
        plain_message(message)
        for message in (*step.observation.messages, Message(role=Role.ASSISTANT, content=step.text))
    ]
    values["observation"] = {
        "state_key": step.observation.state_key,
        "info": dict(step.observation.info),
    }
    values["span"] = msgspec.to_builtins(step.span)
    values["action"] = {"value": step.action.value, "text": step.action.text}
    values["metrics"] = dict(step.metrics)
    return {name: plain(value) for name, value in values.items()}


def write_steps(path: Path | str, steps: Iterable[StepData]) -> int:
    """Write one JSON line per step, for the viewer; returns how many."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for step in steps:
            file.write(json.dumps(plain_step(step), ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count
