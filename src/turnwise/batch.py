"""Episode-level training by hand: whole episodes in a batch, one optimizer step per group batch.

batch = prepare_batch(episodes)                       # nothing is flattened
metrics = train_step(learner, batch)                  # RLOO over all episodes, one optimizer step
history = train_epoch(learner, batches, validate=…)   # all batches together, then validation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from turnwise.advantages import compute_advantages, compute_loo_baseline
from turnwise.errors import SampleError
from turnwise.learner import Learner
from turnwise.samples import build_samples
from turnwise.types import Advantages, Episode, FloatArray, Group, Task, TurnCredit


class EpisodeBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Episodes that are compared with each other, whole."""

    episodes: tuple[Episode, ...]
    rewards: FloatArray
    """One per episode."""

    def __post_init__(self) -> None:
        if len(self.episodes) != len(self.rewards):
            raise SampleError(
                f"a batch has {len(self.episodes)} episodes but {len(self.rewards)} rewards; each episode needs one"
            )

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(episode.episode_id for episode in self.episodes)

    def __len__(self) -> int:
        return len(self.episodes)


Validate = Callable[[int], Mapping[str, float]]
"""Called with the number of updates done; what it returns joins the metrics of that update."""


def prepare_batch(episodes: Sequence[Episode], rewards: Sequence[float] | None = None) -> EpisodeBatch:
    """A batch of whole episodes; without rewards, what the environment paid. Failed episodes are refused."""
    failed = [episode.episode_id for episode in episodes if episode.failure is not None]
    if failed:
        raise SampleError(
            f"episodes {', '.join(failed)} failed; a failed episode is never scored, leave it out"
        )
    values = [episode.final_reward for episode in episodes] if rewards is None else rewards
    return EpisodeBatch(episodes=tuple(episodes), rewards=np.asarray(values, dtype=np.float32))


def train_step(learner: Learner, batch: EpisodeBatch, *, normalize: bool = True) -> dict[str, float]:
    """Leave-one-out baselines over all episodes of the batch, then one update of the model."""
    if len(batch) < 2:
        raise SampleError(f"a batch of {len(batch)} episodes has nothing to compare; RLOO needs at least 2")
    advantages = rloo_advantages(batch, normalize=normalize)
    training = learner.training
    samples = build_samples(
        [_as_group(batch)],
        advantages,
        tokens_per_pack=training.tokens_per_pack,
        use_trees=training.use_token_trees,
    )
    update = learner.update(samples)
    return {
        **update.metrics,
        "reward_mean": float(batch.rewards.mean()),
        "advantage_mean": advantages.metrics["advantage_mean"],
    }


def train_epoch(
    learner: Learner,
    batches: Iterable[EpisodeBatch],
    *,
    normalize: bool = True,
    validate: Validate | None = None,
    track: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Gather all batches into one, update once, validate after it, and track one step."""
    parts = list(batches)
    if not parts:
        raise SampleError("an epoch needs at least one batch of episodes")
    whole = EpisodeBatch(
        episodes=tuple(episode for part in parts for episode in part.episodes),
        rewards=np.concatenate([part.rewards for part in parts]),
    )
    metrics = train_step(learner, whole, normalize=normalize)
    if validate is not None:
        metrics.update(validate(learner.num_updates))
    if track is not None:
        track(learner.num_updates, metrics)
    return [metrics]


def rloo_advantages(batch: EpisodeBatch, *, normalize: bool = True) -> Advantages:
    """Each episode against the mean of the others; every turn gets its episode's advantage."""
    rewards = batch.rewards.astype(np.float64)
    values = compute_advantages(rewards, compute_loo_baseline(rewards), normalize=normalize)
    turns = {
        episode.episode_id: tuple(
            TurnCredit(
                episode_id=episode.episode_id,
                turn_index=turn.turn_index,
                advantage=float(value),
                episode_advantage=float(value),
            )
            for turn in episode.turns
        )
        for episode, value in zip(batch.episodes, values, strict=True)
    }
    return Advantages(estimator="rloo", turns=turns, metrics={"advantage_mean": float(np.mean(values))})


def _as_group(batch: EpisodeBatch) -> Group:
    return Group(group_id="batch", task=Task(task_id="batch"), episodes=batch.episodes)
