"""Measures an agent on held-out tasks: one episode each, no learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from turnwise.config import EvaluationConfig
from turnwise.environment import TaskSource
from turnwise.errors import ConfigError
from turnwise.rewards.score import Rewards, score_groups
from turnwise.rollout import Rollouts, collect_groups
from turnwise.types import Episode, Group, Score


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent achieved on some tasks."""

    num_episodes: int
    num_failed: int
    """Episodes that broke; they count in no figure below."""
    reward: float | None
    """Mean score of the scored episodes."""
    metrics: Mapping[str, float]
    """Means over the episodes that did not fail (success, spl …)."""
    intervals: Mapping[str, tuple[float, float]]
    """95 % confidence intervals of those means that lie in [0, 1] (Wilson)."""
    groups: tuple[Group, ...] = ()

    @property
    def success(self) -> float | None:
        return self.metrics.get("success")

    def figures(self) -> dict[str, Any]:
        """Everything but the episodes, as plain data."""
        return {
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
            "reward": self.reward,
            "metrics": dict(self.metrics),
            "intervals": {name: list(bounds) for name, bounds in self.intervals.items()},
        }


async def evaluate(
    rollouts: Rollouts,
    tasks: TaskSource,
    rewards: Rewards,
    config: EvaluationConfig,
    *,
    label: str,
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """Play the first `num_tasks` tasks of the evaluation split once each."""
    available = tasks.num_tasks("eval")
    num_tasks = config.num_tasks if available is None else min(config.num_tasks, available)
    if num_tasks == 0:
        raise ConfigError("the environment has no tasks in its eval split; check its params")
    rollout_config = rollouts.config.model_copy(
        update={
            "group_size": 1,
            "temperature": config.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            # An agent that does not find an action has not failed to be measured: it has failed the task.
            "drop_masking_failures": False,
        }
    )
    groups = await collect_groups(
        [tasks.task(index, "eval") for index in range(num_tasks)],
        msgspec.structs.replace(rollouts, config=rollout_config),
        label=label,
        on_episode=on_episode,
    )
    scores = await score_groups(groups, rewards)
    return summarize(groups, scores)


def summarize(groups: Sequence[Group], scores: Mapping[str, Score]) -> Evaluation:
    """Means and confidence intervals over the episodes that did not fail."""
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if episode.failure is None]
    values = [scores[episode.episode_id].score for episode in finished if episode.episode_id in scores]
    known = [value for value in values if value is not None]
    names = sorted({name for episode in finished for name in episode.metrics})
    metrics = {
        name: _mean([episode.metrics[name] for episode in finished if name in episode.metrics])
        for name in names
    }
    metrics["num_turns"] = _mean([float(episode.num_turns) for episode in finished])
    return Evaluation(
        num_episodes=len(episodes),
        num_failed=len(episodes) - len(finished),
        reward=_mean(known) if known else None,
        metrics=metrics,
        intervals={
            name: wilson_interval(metrics[name], len(finished))
            for name in names
            if all(0.0 <= episode.metrics.get(name, 0.0) <= 1.0 for episode in finished)
        },
        groups=tuple(groups),
    )


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share seen in `count` trials: 0.5 of 100 gives about (0.40, 0.60)."""
    if count == 0:
        return (0.0, 1.0)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return (max(0.0, centre - half), min(1.0, centre + half))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
