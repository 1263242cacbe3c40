"""Gradients of token trees equal those of seed 003's loop: one plain forward pass per turn, one plain formula per loss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.learning_cases import (
    VOCABULARY,
    gradients,
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

from turnwise.config import LoraConfig, LossConfig, TrainingConfig
from turnwise.learner import Learner
from turnwise.models.lora import add_adapter
from turnwise.samples import build_samples
from turnwise.types import Advantages, Episode, KeptSets

STILL = {"learning_rate": 1e-30, "max_grad_norm": 1e9, "max_logprob_gap": 10.0}


def ids(rng: np.random.Generator, low: int, high: int | None = None) -> np.ndarray:
    return rng.integers(5, VOCABULARY, low if high is None else rng.integers(low, high))


def multi_turn(rng: np.random.Generator) -> list[Episode]:
    """Two groups of three; shared prompts, two or three turns of unequal lengths, masked reasoning tokens."""
    episodes = []
    for group in range(2):
        prompt = ids(rng, 9)
        for index in range(3):
            pieces, masks = [(prompt, False)], []
            for _ in range(2 + index % 2):
                answer = ids(rng, 3, 8)
                pieces += [(answer, True), (ids(rng, 1, 5), False)]
                masks.append(np.arange(len(answer)) >= 1 + index % 2)
            episodes.append(
                make_episode(f"e{group}{index}", [make_stream(pieces)], group_id=f"g{group}", masks=masks)
            )
    return episodes


def forked(rng: np.random.Generator) -> list[Episode]:
    """The template rewrote history: each turn has a stream of its own, sharing only the system prompt."""
    system = ids(rng, 6)
    episodes = []
    for index in range(3):
        streams = [
            make_stream([(system, False), (ids(rng, 4), False), (ids(rng, 2, 6), True)]) for _ in range(3)
        ]
        episodes.append(make_episode(f"e{index}", streams))
    return episodes


def agreeing(rng: np.random.Generator) -> list[Episode]:
    """Siblings that sampled the same first turn, and one whose whole stream begins another's."""
    prompt, answer, more = ids(rng, 7), ids(rng, 5), ids(rng, 4)
    tails = [[(more, False), (ids(rng, 4), True)], [(more, False), (ids(rng, 3), True)], []]
    return [
        make_episode(f"e{index}", [make_stream([(prompt, False), (answer, True), *tail])])
        for index, tail in enumerate(tails)
    ]


def restricted(rng: np.random.Generator) -> list[Episode]:
    """Temperature, banned ids, and kept sets that are empty, short or nearly the whole vocabulary."""
    prompt = ids(rng, 8)
    episodes = []
    for index in range(3):
        answer = ids(rng, 6)
        rows = []
        for place, token in enumerate(answer):
            size = (0, 3, VOCABULARY - 12)[place % 3]
            others = rng.permutation(np.setdiff1d(np.arange(5, VOCABULARY), [token]))
            kept = others[: max(size - 1, 0)]
            rows.append(np.array([], np.int32) if size == 0 else np.append(kept, token).astype(np.int32))
        stream = make_stream(
            [(prompt, False), (answer, True)], kept=KeptSets.from_rows(rows), banned_ids=[0, 3]
        )
        episodes.append(make_episode(f"e{index}", [stream], temperature=0.7))
    return episodes


SITUATIONS: dict[str, Callable[[np.random.Generator], list[Episode]]] = {
    "multi_turn": multi_turn,
    "forked": forked,
    "agreeing": agreeing,
    "restricted": restricted,
}


def plain_loss(
    network: nn.Module,
    episodes: list[Episode],
    advantages: Advantages,
    loss: LossConfig,
    reference: nn.Module | None,
) -> Tensor:
    """The objective as written in the papers, token by token."""
    turns = []
    for episode in episodes:
        for turn, credit in zip(episode.turns, advantages.turns[episode.episode_id], strict=True):
            mask = torch.from_numpy(turn.action_token_mask)
            new, entropy = turn_logprobs(network, turn, episode.sampling.temperature)
            old = torch.from_numpy(turn.logprobs.copy())[mask]
            values = (
                plain_policy_loss(new[mask], old, credit.advantage, loss)
                - loss.entropy_coefficient * entropy[mask]
            )
            if reference is not None:
                with torch.no_grad():
                    other, _ = turn_logprobs(reference, turn, episode.sampling.temperature)
                gap = other[mask] - new[mask]
                values = values + loss.kl_coefficient * (gap.exp() - gap - 1)
            turns.append((episode.episode_id, values))
    if loss.name in ("ppo", "dapo", "cispo"):
        return torch.cat([values for _, values in turns]).mean()
    if loss.name == "gspo":
        return torch.stack([values.mean() for _, values in turns]).mean()
    if loss.name == "dr_grpo":
        return torch.stack([values.sum() / 16 for _, values in turns]).mean()
    by_episode = [torch.cat([v for owner, v in turns if owner == episode.episode_id]) for episode in episodes]
    if loss.name == "grpo":
        return torch.stack([values.mean() for values in by_episode]).mean()
    return torch.stack([values.sum() for values in by_episode]).mean()


def plain_policy_loss(new: Tensor, old: Tensor, advantage: float, loss: LossConfig) -> Tensor:
    if loss.name == "reinforce":
        return -advantage * new
    ratio = (new - old).exp()
    if loss.name == "cispo":
        return -ratio.detach().clamp_max(loss.clip_high) * advantage * new
    if loss.name == "gspo":
        ratio = (new - old).mean().exp().expand(len(new))
    values = torch.maximum(
        -advantage * ratio, -advantage * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    )
    if loss.dual_clip is not None and advantage < 0:
        values = torch.minimum(values, torch.tensor(-advantage * loss.dual_clip))
    return values


def compare(network: nn.Module, episodes: list[Episode], loss: LossConfig, **training: object) -> float:
    """Relative difference between the learner's gradient and the plain one."""
    plain = copy.deepcopy(network)
    advantages = random_advantages(episodes)
    settings = TrainingConfig(**{**STILL, **training})
    learner = Learner(network, loss=loss, training=settings)
    reference = None
    if loss.kl_coefficient:
        # Move the model away from its reference, or the divergence and its gradient are 0.
        reference = copy.deepcopy(plain)
        with torch.no_grad():
            for mine, other in zip(network.parameters(), plain.parameters(), strict=True):
                if mine.requires_grad:
                    mine += 0.02 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
                    other.copy_(mine)
    plain_loss(plain, episodes, advantages, loss, reference).backward()
    samples = build_samples(
        make_groups(episodes),
        advantages,
        tokens_per_pack=settings.tokens_per_pack,
        use_trees=settings.use_token_trees,
    )
    learner.update(samples)
    return relative_difference(gradients(network), gradients(plain))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_every_loss_has_the_plain_gradient_in_every_situation(situation: str, name: str) -> None:
    network = tiny_network()
    episodes = with_logprobs(network, SITUATIONS[situation](np.random.default_rng(1)), noise=0.3)
    # gspo's own bounds would clip every turn of such short, noisy answers and leave no gradient to compare.
    bounds = {"clip_low": 0.2, "clip_high": 0.2} if name == "gspo" else {}
    assert compare(network, episodes, LossConfig(name=name, **bounds)) < 1e-5


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_divergence_and_entropy_have_the_plain_gradient(situation: str, name: str) -> None:
    network = tiny_network()
    episodes = with_logprobs(network, SITUATIONS[situation](np.random.default_rng(2)), noise=0.1)
    loss = LossConfig(
        name=name, entropy_coefficient=0.05, kl_coefficient=0.2, kl_kind="k3", reference="frozen"
    )
    assert compare(network, episodes, loss) < 1e-5


@pytest.mark.parametrize("reference", ["adapter_off", "frozen"])
def test_an_adapter_has_the_plain_gradient(reference: str) -> None:
    network = add_adapter(tiny_network(), LoraConfig(rank=4))
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if "lora_B" in name:
                tensor += 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
    episodes = with_logprobs(network, multi_turn(np.random.default_rng(3)), noise=0.1)
    if reference == "frozen":
        assert (
            compare(network, episodes, LossConfig(name="ppo", kl_coefficient=0.2, reference="frozen")) < 1e-5
        )
        return
    plain, bare = copy.deepcopy(network), tiny_network()
    advantages = random_advantages(episodes)
    loss = LossConfig(name="ppo", kl_coefficient=0.2, reference="adapter_off")
    plain_loss(plain, episodes, advantages, loss, bare).backward()
    learner = Learner(network, loss=loss, training=TrainingConfig(**STILL))
    learner.update(build_samples(make_groups(episodes), advantages, tokens_per_pack=512))
    got = gradients(network)
    assert all("lora_" in name for name in got)
    assert relative_difference(got, gradients(plain)) < 1e-5


@pytest.mark.parametrize(
    "training",
    [
        {"use_token_trees": False},
        {"tokens_per_pack": 64},
        {"logit_chunk": 1},
        {"logit_chunk": 7},
        {"gradient_checkpointing": True},
        {"tokens_per_pack": 64, "use_token_trees": False, "logit_chunk": 3},
    ],
    ids=str,
)
def test_packing_chunks_and_checkpointing_change_nothing(training: dict) -> None:
    network = tiny_network()
    episodes = with_logprobs(network, multi_turn(np.random.default_rng(4)), noise=0.2)
    loss = LossConfig(name="grpo", entropy_coefficient=0.01)
    assert compare(network, episodes, loss, **training) < 1e-5


def test_an_untied_head_has_the_plain_gradient() -> None:
    network = tiny_network(tie=False)
    episodes = with_logprobs(network, restricted(np.random.default_rng(5)), noise=0.2)
    assert compare(network, episodes, LossConfig(name="ppo", entropy_coefficient=0.1)) < 1e-5


def test_masked_tokens_have_exactly_no_gradient() -> None:
    """The reasoning token's embedding is read by nobody that carries loss, so its row stays 0 to the bit."""
    network = tiny_network(tie=False)
    prompt, lonely = [10, 11, 12], 77
    stream = make_stream([(prompt, False), ([20, 21, lonely], True)])
    mask = np.array([True, True, False])
    episodes = with_logprobs(network, [make_episode("e0", [stream], masks=[mask])])
    learner = Learner(network, loss=LossConfig(name="reinforce"), training=TrainingConfig(**STILL))
    learner.update(build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=64))
    grad_VD = network.model.embed_tokens.weight.grad
    assert torch.count_nonzero(grad_VD[lonely]) == 0
    assert torch.count_nonzero(grad_VD[[10, 11, 12, 20]]) > 0
    assert torch.count_nonzero(grad_VD[21]) == 0


def test_gradient_equals_finite_differences() -> None:
    network = tiny_network(dtype=torch.float64)
    episodes = with_logprobs(network, multi_turn(np.random.default_rng(6))[:3], noise=0.05)
    advantages = random_advantages(episodes)
    loss = LossConfig(name="ppo", entropy_coefficient=0.05)
    samples = build_samples(make_groups(episodes), advantages, tokens_per_pack=512)
    learner = Learner(network, loss=loss, training=TrainingConfig(**STILL))
    learner.update(samples)
    rng = np.random.default_rng(0)
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ):
        tensor = network.get_parameter(name)
        grad = tensor.grad.clone()
        direction = torch.from_numpy(rng.normal(size=tensor.shape))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor += sign * 1e-3 * direction
                values.append(float(plain_loss(network, episodes, advantages, loss, None)))
                tensor -= sign * 1e-3 * direction
        slope = (values[0] - values[1]) / 2e-3
        # The model's norms compute in float32 whatever its weights are, so a smaller step would measure rounding.
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-3)
