"""The learner against the plain per-turn computation, and what it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.learning_cases import (
    gradients,
    make_advantages,
    make_episode,
    make_groups,
    make_stream,
    random_advantages,
    relative_difference,
    tiny_network,
    turn_logprobs,
    with_logprobs,
)
from torch import Tensor, nn

from turnwise.config import LossConfig, TrainingConfig
from turnwise.errors import TrainingError
from turnwise.learner import Learner
from turnwise.samples import build_samples
from turnwise.types import Advantages, Episode

# The optimizer must not change what is compared: a vanishing rate and no clipping leave the gradients readable.
STILL = {"learning_rate": 1e-30, "max_grad_norm": 1e9, "max_logprob_gap": 10.0}


def shared_prompt_episodes(rng: np.random.Generator, *, groups: int = 2, size: int = 3) -> list[Episode]:
    """Two turns of unequal lengths after a prompt that the group shares."""
    episodes = []
    for group in range(groups):
        prompt = rng.integers(1, 97, 11)
        for index in range(size):
            pieces = [(prompt, False)]
            for _ in range(2):
                pieces += [
                    (rng.integers(1, 97, rng.integers(2, 7)), True),
                    (rng.integers(1, 97, rng.integers(1, 4)), False),
                ]
            episodes.append(make_episode(f"e{group}{index}", [make_stream(pieces)], group_id=f"g{group}"))
    return episodes


def learner_gradients(
    network: nn.Module, episodes: list[Episode], advantages: Advantages, loss: LossConfig, **training: object
) -> tuple[dict[str, Tensor], Learner]:
    settings = TrainingConfig(**{**STILL, **training})
    learner = Learner(network, loss=loss, training=settings)
    samples = build_samples(
        make_groups(episodes),
        advantages,
        tokens_per_pack=settings.tokens_per_pack,
        use_trees=settings.use_token_trees,
    )
    learner.update(samples)
    return gradients(network), learner


def naive_reinforce(network: nn.Module, episodes: list[Episode], advantages: Advantages) -> dict[str, Tensor]:
    """Seed 003: per turn a forward pass; loss_i = -A · Σ log-probs of action tokens; mean over episodes."""
    network.zero_grad()
    for episode in episodes:
        loss = torch.zeros(())
        for turn, credit in zip(episode.turns, advantages.turns[episode.episode_id], strict=True):
            logprobs, _ = turn_logprobs(network, turn, episode.sampling.temperature)
            loss = loss - credit.advantage * logprobs[torch.from_numpy(turn.action_token_mask)].sum()
        (loss / len(episodes)).backward()
    return gradients(network)


@pytest.mark.parametrize("use_trees", [True, False])
def test_reinforce_gradient_equals_the_per_turn_loop(use_trees: bool) -> None:
    network = tiny_network()
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0)))
    advantages = random_advantages(episodes)
    expected = naive_reinforce(copy.deepcopy(network), episodes, advantages)
    got, _ = learner_gradients(
        network, episodes, advantages, LossConfig(name="reinforce"), use_token_trees=use_trees
    )
    assert relative_difference(got, expected) < 1e-5


def test_an_update_raises_the_probability_of_what_was_good() -> None:
    network = tiny_network()
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0), groups=1, size=2))
    advantages = make_advantages(episodes, [[1.0, 1.0], [-1.0, -1.0]])
    samples = build_samples(make_groups(episodes), advantages, tokens_per_pack=512)
    learner = Learner(network, loss=LossConfig(name="reinforce"), training=TrainingConfig(learning_rate=1e-3))
    before = [values.sum() for values in learner.logprobs(samples)]
    update = learner.update(samples)
    after = [values.sum() for values in learner.logprobs(samples)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert update.metrics["logprob_gap"] < 1e-5


def test_the_first_update_is_refused_when_log_probs_cannot_be_reproduced() -> None:
    network = tiny_network()
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0)), noise=0.5)
    samples = build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=512)
    learner = Learner(network, loss=LossConfig(), training=TrainingConfig())
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    with pytest.raises(TrainingError, match="sampler and learner disagree"):
        learner.update(samples)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights().items())
