"""The learner against the plain per-turn computation, and what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
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
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise import losses
from turnwise.config import LossConfig, TrainingConfig
from turnwise.errors import SampleError, TrainingError
from turnwise.fingerprint import fingerprint
from turnwise.learner import Learner
from turnwise.samples import Samples, build_samples
from turnwise.schedule import learning_rate
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


def learner_and_samples(loss: LossConfig | None = None, **training: object) -> tuple[Learner, Samples]:
    network = tiny_network()
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0)))
    samples = build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=512)
    settings = TrainingConfig(**{"learning_rate": 1e-3, **training})
    return Learner(network, loss=loss or LossConfig(), training=settings), samples


def test_gradients_of_many_packs_equal_those_of_one() -> None:
    one, samples = learner_and_samples(**STILL)
    many, _ = learner_and_samples(**STILL)
    first = one.update(samples)
    second = many.update(msgspec.structs.replace(samples, tokens_per_pack=32))
    assert first.metrics["packs"] == 1
    assert second.metrics["packs"] > 2
    assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=1e-5)
    assert relative_difference(gradients(many.network), gradients(one.network)) < 1e-5


def test_epochs_and_minibatches_are_optimizer_steps() -> None:
    learner, samples = learner_and_samples(num_epochs=2, num_minibatches=3)
    update = learner.update(samples)
    assert update.num_optimizer_steps == 6
    assert update.metrics["ratio_max"] > 1.001
    assert learner.num_updates == 1


KL = {"kl_coefficient": 0.1, "kl_target": 0.01}


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(reference="frozen", **KL),
        LossConfig(reference="ema", ema_decay=0.5, **KL),
        LossConfig(value_coefficient=0.5),
    ],
    ids=["plain", "frozen", "ema", "value_head"],
)
def test_a_restored_learner_goes_on_to_the_bit(loss: LossConfig) -> None:
    training = {"num_epochs": 2, "num_steps": 10, "schedule": "cosine", "warmup_steps": 1}
    whole, samples = learner_and_samples(loss, **training)
    if loss.value_coefficient:
        samples = with_returns(samples)
    whole.update(samples)
    saved = whole.state()
    expected = [whole.update(samples) for _ in range(2)]
    other, _ = learner_and_samples(loss, **training)
    other.load_state(saved.tensors, json.loads(json.dumps(saved.values)))
    assert [other.update(samples).metrics for _ in range(2)] == [update.metrics for update in expected]
    for name, tensor in whole.state().tensors.items():
        assert torch.equal(tensor, other.state().tensors[name]), name
    assert other.kl_coefficient == whole.kl_coefficient


@pytest.mark.parametrize("left_out", ["model/", "optimizer/", "reference/", "kl_coefficient", "num_updates"])
def test_leaving_out_any_part_of_the_state_shows(left_out: str) -> None:
    loss = LossConfig(reference="ema", ema_decay=0.5, **KL)
    training = {"num_steps": 10, "schedule": "linear", "max_logprob_gap": 10.0}
    whole, samples = learner_and_samples(loss, **training)
    for _ in range(2):
        whole.update(samples)
    saved = whole.state()
    other, _ = learner_and_samples(loss, **training)
    untouched = other.state()
    tensors = {
        name: untouched.tensors.get(name, torch.zeros_like(tensor)) if name.startswith(left_out) else tensor
        for name, tensor in saved.tensors.items()
    }
    values = {**saved.values, **({left_out: untouched.values[left_out]} if left_out in saved.values else {})}
    other.load_state(tensors, values)
    whole.update(samples)
    other.update(samples)
    assert fingerprint(other.weights()) != fingerprint(whole.weights())


def test_a_checkpoint_of_another_model_is_refused() -> None:
    learner, _ = learner_and_samples()
    other = Learner(tiny_network(num_layers=1), loss=LossConfig(), training=TrainingConfig())
    saved = other.state()
    with pytest.raises(TrainingError, match="not those of this model"):
        learner.load_state(saved.tensors, saved.values)


@pytest.mark.parametrize(("num_epochs", "poison"), [(1, "loss"), (3, "loss"), (1, "gradient")])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing_and_is_written_down(
    tmp_path: Path, num_epochs: int, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, samples = learner_and_samples(num_epochs=num_epochs)
    learner.abort_folder = tmp_path
    learner.update(samples)
    before = learner.state()
    calls = 0

    def poisoned(*arguments: Any, **keywords: Any) -> Tensor:
        nonlocal calls
        calls += 1
        total = losses.total_loss(*arguments, **keywords)
        if calls < num_epochs:
            return total
        # inf - inf only shows in the gradient: the loss itself stays what it was.
        return (
            total * torch.nan if poison == "loss" else total + (total * 1e38 - (total * 1e38).detach()) * 1e38
        )

    monkeypatch.setattr("turnwise.learner.total_loss", poisoned)
    with pytest.raises(
        TrainingError, match=r"the weights are unchanged and the batch is in .*aborted-update-000001"
    ):
        learner.update(samples)
    after = learner.state()
    assert after.values == before.values
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    with safe_open(tmp_path / "aborted-update-000001.safetensors", "numpy") as file:
        assert "the" in file.metadata()["reason"]
        assert file.get_tensor("0/ids").tolist() == samples.samples[0].stream.ids.tolist()
    monkeypatch.undo()
    assert np.isfinite(learner.update(samples).metrics["loss"])


def test_ids_that_the_model_does_not_have_are_refused_before_anything_moves() -> None:
    learner, _ = learner_and_samples()
    episode = make_episode("alien", [make_stream([([1, 2], False), ([3, 97], True)])])
    samples = build_samples(make_groups([episode]), random_advantages([episode]), tokens_per_pack=64)
    with pytest.raises(SampleError, match="episode alien has token id 97 but the model knows 97 ids"):
        learner.update(samples)


def test_the_divergence_of_an_untrained_model_is_zero_and_then_grows() -> None:
    learner, samples = learner_and_samples(LossConfig(kl_coefficient=0.1, kl_target=1e-6), num_epochs=1)
    first = learner.update(samples).metrics
    second = learner.update(samples).metrics
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-4
    # Far above its target, the divergence raises its coefficient by a tenth.
    assert learner.kl_coefficient == pytest.approx(second["kl_coefficient"] * 1.1)


def test_the_reference_leaves_the_weights_as_they_are() -> None:
    learner, samples = learner_and_samples(LossConfig(kl_coefficient=0.1, reference="ema"), **STILL)
    before = fingerprint(learner.weights())
    learner.logprobs(samples)
    learner.update(samples)
    assert fingerprint(learner.weights()) == before


def test_an_ema_reference_moves_at_its_rate_and_period() -> None:
    learner, samples = learner_and_samples(
        LossConfig(kl_coefficient=0.1, reference="ema", ema_decay=0.75, ema_every=2)
    )
    name = "model.norm.weight"
    start = learner.weights()[name].clone()
    learner.update(samples)
    assert torch.equal(learner.state().tensors[f"reference/{name}"], start)
    learner.update(samples)
    expected = 0.75 * start + 0.25 * learner.weights()[name]
    torch.testing.assert_close(learner.state().tensors[f"reference/{name}"], expected)


def test_a_divergence_in_the_reward_lowers_the_advantage() -> None:
    loss = LossConfig(
        name="reinforce", kl_coefficient=0.5, kl_kind="k1", kl_place="reward", reference="frozen"
    )
    learner, samples = learner_and_samples(loss, **STILL)
    with torch.no_grad():
        for tensor in learner.network.parameters():
            tensor += 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    for sample, logprobs in zip(samples.samples, learner.logprobs(samples), strict=True):
        sample.stream.logprobs[sample.targets_R] = logprobs
    got = learner.update(samples).metrics["loss"]
    with learner._reference.in_force():
        reference = learner.logprobs(samples)
    expected = 0.0
    for sample, other in zip(samples.samples, reference, strict=True):
        shaped = sample.advantages_R - 0.5 * (sample.logprobs_R - other)
        expected -= float((shaped * sample.logprobs_R).sum()) / len(samples.episode_ids)
    assert got == pytest.approx(expected, rel=1e-4)


def test_stale_episodes_are_weighed_up_to_the_cap() -> None:
    still = {**STILL, "max_logprob_gap": 0.05}
    learner, samples = learner_and_samples(LossConfig(name="ppo", importance_cap=1.5), **still)
    for sample in samples.samples:
        sample.stream.logprobs[sample.targets_R] -= 1.0
    metrics = learner.update(samples).metrics
    # Every token is e times likelier now than when it was sampled; the ratio is taken against the model before the update.
    assert metrics["importance"] == pytest.approx(1.5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_autocast_trains_and_stays_near() -> None:
    learner, samples = learner_and_samples(use_amp=True, max_logprob_gap=0.5)
    exact, _ = learner_and_samples()
    assert learner.update(samples).metrics["loss"] == pytest.approx(
        exact.update(samples).metrics["loss"], abs=0.05
    )


def test_the_learning_rate_warms_up_and_decays_to_the_end() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup_steps=2, num_steps=6, schedule="linear")
    assert [learning_rate(training, step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = TrainingConfig(learning_rate=1.0, num_steps=4, schedule="cosine")
    assert [round(learning_rate(cosine, step), 4) for step in range(5)] == [1.0, 0.8536, 0.5, 0.1464, 0.0]


def with_returns(samples: Samples) -> Samples:
    """The same samples, their turns worth 1, 2, …"""
    replaced = [
        msgspec.structs.replace(
            sample,
            turns=msgspec.structs.replace(
                sample.turns, returns_N=np.arange(1, len(sample.turns.positions_N) + 1, dtype=np.float32)
            ),
        )
        for sample in samples.samples
    ]
    return msgspec.structs.replace(samples, samples=tuple(replaced))


def test_the_value_head_learns_what_turns_return() -> None:
    network = tiny_network()
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0)))
    groups = make_groups(episodes)
    samples = with_returns(build_samples(groups, random_advantages(episodes), tokens_per_pack=512))
    learner = Learner(
        network, loss=LossConfig(value_coefficient=1.0), training=TrainingConfig(learning_rate=1e-2, max_grad_norm=10.0)
    )  # fmt: skip
    assert learner.values(groups) == {episode.episode_id: (0.0, 0.0) for episode in episodes}
    errors = [learner.update(samples).metrics["value_error"] for _ in range(40)]
    assert errors[0] == pytest.approx(2.5)
    assert errors[-1] < 0.2
    assert learner.values(groups)["e00"] == pytest.approx((1.0, 2.0), abs=0.8)
    assert not any("value_head" in name for name in learner.weights())
    assert any("value_head" in name for name in learner.state().tensors)


def test_a_value_head_without_returns_is_refused() -> None:
    learner, samples = learner_and_samples(LossConfig(value_coefficient=1.0))
    with pytest.raises(TrainingError, match="no turn has a return"):
        learner.update(samples)


def test_an_update_makes_no_tensor_of_tokens_by_vocabulary() -> None:
    learner, samples = learner_and_samples(LossConfig(entropy_coefficient=0.1), logit_chunk=2)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.shape[-1:] == (97,) and tensor.ndim > 1:
                    largest = max(largest, tensor.numel() // 97)
            return out

    with Watch():
        learner.update(samples)
    # The head's transposed weight is 32 rows of 97; there are more trained tokens than that.
    assert samples.num_loss_tokens > 40
    assert largest <= 32


def test_a_model_in_bfloat16_sums_its_head_in_float32() -> None:
    network = tiny_network(dtype=torch.bfloat16)
    episodes = with_logprobs(network, shared_prompt_episodes(np.random.default_rng(0)))
    exact = tiny_network(dtype=torch.bfloat16).float()
    advantages = random_advantages(episodes)
    expected = naive_reinforce(exact, episodes, advantages)
    loss = LossConfig(name="reinforce")
    got, _ = learner_gradients(network, episodes, advantages, loss, max_logprob_gap=1.0)
    rounded = {name: tensor.float() for name, tensor in got.items()}
    assert relative_difference(rounded, expected) < 0.05
