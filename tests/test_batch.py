"""Whole episodes in a batch: one optimizer step per group batch, validation after it, one tracked step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.learning_cases import (
    gradients,
    make_episode,
    make_stream,
    relative_difference,
    tiny_network,
    turn_logprobs,
    with_logprobs,
)

from turnwise.batch import EpisodeBatch, prepare_batch, rloo_advantages, train_epoch, train_step
from turnwise.config import LossConfig, TrainingConfig
from turnwise.errors import SampleError
from turnwise.learner import Learner
from turnwise.types import Episode, Failure


def episodes_of(turns: tuple[int, ...]) -> list[Episode]:
    """One episode per number, with so many turns."""
    rng = np.random.default_rng(0)
    found = []
    for index, count in enumerate(turns):
        pieces = [(rng.integers(1, 97, 5), False)]
        for _ in range(count):
            pieces += [(rng.integers(1, 97, 4), True), (rng.integers(1, 97, 2), False)]
        found.append(make_episode(f"e{index}", [make_stream(pieces)]))
    return found


def make_learner(**training: object) -> Learner:
    network = tiny_network()
    settings = TrainingConfig(**{"learning_rate": 1e-3, **training})
    return Learner(network, loss=LossConfig(name="reinforce"), training=settings)


def test_a_batch_keeps_episodes_whole() -> None:
    episodes = episodes_of((1, 2, 6, 3))
    batch = prepare_batch(episodes, [1.0, 0.0, 0.5, 0.0])
    assert batch.episodes == tuple(episodes)
    assert batch.episode_ids == ("e0", "e1", "e2", "e3")
    assert prepare_batch(episodes).rewards.tolist() == [0.0] * 4


def test_advantages_are_leave_one_out() -> None:
    batch = prepare_batch(episodes_of((1, 2, 1)), [1.0, 0.0, 0.5])
    advantages = rloo_advantages(batch, normalize=False)
    assert [credit.advantage for credit in advantages.turns["e1"]] == [-0.75, -0.75]
    assert advantages.turns["e0"][0].advantage == 0.75


def test_a_step_has_the_gradient_of_the_written_algorithm() -> None:
    """Loss_i = -A_i Σ over turns and action tokens; backward of loss_i / N; one step after all episodes."""
    learner = make_learner(learning_rate=1e-30, max_grad_norm=1e9)
    episodes = with_logprobs(learner.network, episodes_of((1, 2, 6, 3)))
    plain = copy.deepcopy(learner.network)
    rewards = np.array([1.0, 0.0, 0.5, 0.2])
    raw = rewards - (rewards.sum() - rewards) / 3
    advantages = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-8)
    for episode, advantage in zip(episodes, advantages, strict=True):
        total = sum(turn_logprobs(plain, turn, 1.0)[0].sum() for turn in episode.turns)
        (-advantage * total / 4).backward()
    metrics = train_step(learner, prepare_batch(episodes, rewards.tolist()))
    assert relative_difference(gradients(learner.network), gradients(plain)) < 1e-5
    assert metrics["reward_mean"] == pytest.approx(0.425)
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-9)


def test_an_epoch_is_one_update_one_tracked_step_and_a_validation_after_it() -> None:
    learner = make_learner()
    episodes = with_logprobs(learner.network, episodes_of((1, 2, 3, 1)))
    singles = [prepare_batch([episode], [float(index)]) for index, episode in enumerate(episodes)]
    start = {name: tensor.clone() for name, tensor in learner.weights().items()}
    tracked: list[tuple[int, float]] = []

    def validate(step: int) -> dict[str, float]:
        moved = any(not torch.equal(start[name], tensor) for name, tensor in learner.weights().items())
        return {"validation_reward": 0.5 if moved else -1.0}

    history = train_epoch(
        learner, singles, validate=validate, track=lambda step, metrics: tracked.append((step, metrics["validation_reward"]))
    )  # fmt: skip
    assert len(history) == 1
    assert tracked == [(1, 0.5)]
    assert learner.num_updates == 1


def test_what_cannot_be_compared_is_refused() -> None:
    learner = make_learner()
    episodes = episodes_of((1, 1))
    with pytest.raises(SampleError, match="needs at least 2"):
        train_step(learner, prepare_batch(episodes[:1]))
    with pytest.raises(SampleError, match="at least one batch"):
        train_epoch(learner, [])
    with pytest.raises(SampleError, match="2 episodes but 1 rewards"):
        EpisodeBatch(episodes=tuple(episodes), rewards=np.zeros(1, np.float32))
    failed = make_episode("broken", list(episodes[0].streams), failure=Failure(stage="step", error="x"))
    with pytest.raises(SampleError, match="episodes broken failed"):
        prepare_batch([failed])
