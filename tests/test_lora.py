"""Adapters: which layers get one, what is trained and delivered, saved alone and merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine_models import make_llama, make_qwen3_vl
from tests.learning_cases import (
    make_episode,
    make_groups,
    make_stream,
    random_advantages,
    tiny_network,
    with_logprobs,
)

from turnwise.config import LoraConfig, LossConfig, TrainingConfig
from turnwise.errors import ModelError
from turnwise.fingerprint import fingerprint
from turnwise.learner import Learner
from turnwise.models.lora import (
    adapter_weights,
    add_adapter,
    find_targets,
    load_adapter_weights,
    save_adapter,
    save_merged,
)
from turnwise.samples import Samples, build_samples

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def make_samples(network: torch.nn.Module) -> Samples:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 97, 8)
    episodes = [
        make_episode(f"e{index}", [make_stream([(prompt, False), (rng.integers(1, 97, 5), True)])])
        for index in range(4)
    ]
    with_logprobs(network, episodes)
    return build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=128)


def trained(**lora: object) -> Learner:
    network = add_adapter(tiny_network(), LoraConfig(rank=4, **lora))
    learner = Learner(network, loss=LossConfig(), training=TrainingConfig(learning_rate=1e-2))
    learner.update(make_samples(network))
    return learner


@pytest.mark.parametrize("make", [tiny_network, make_llama, make_qwen3_vl])
def test_the_linear_layers_of_the_language_model_are_found(make) -> None:
    network = make()
    assert find_targets(network) == LINEAR
    adapted = add_adapter(network, LoraConfig(rank=2))
    names = list(adapter_weights(adapted))
    assert names
    assert not any("visual" in name or "lm_head" in name for name in names)


def test_only_the_adapter_is_trained_and_delivered() -> None:
    network = add_adapter(tiny_network(), LoraConfig(rank=4))
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    learner = Learner(network, loss=LossConfig(), training=TrainingConfig(learning_rate=1e-2))
    learner.update(make_samples(network))
    weights = learner.weights()
    assert set(weights) == set(adapter_weights(network))
    moved = {name for name, tensor in network.named_parameters() if not torch.equal(tensor, before[name])}
    assert moved <= set(weights)
    assert moved


def test_the_policy_side_holds_the_same_adapter_after_delivery() -> None:
    learner = trained()
    policy_side = add_adapter(tiny_network(), LoraConfig(rank=4))
    load_adapter_weights(policy_side, learner.weights())
    assert fingerprint(adapter_weights(policy_side)) == fingerprint(learner.weights())


def test_the_same_seed_makes_the_same_adapter() -> None:
    first, second = (add_adapter(tiny_network(), LoraConfig(rank=4), seed=3) for _ in range(2))
    assert fingerprint(adapter_weights(first)) == fingerprint(adapter_weights(second))


def test_an_adapter_saved_alone_gives_the_same_logits(tmp_path: Path) -> None:
    import peft

    learner = trained()
    folder = save_adapter(learner.network, tmp_path / "adapter")
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(tiny_network(), folder)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, learner.network.eval()(input_ids=ids).logits)


def test_a_merged_model_is_an_ordinary_one_with_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = trained()
    before = fingerprint(learner.weights())
    folder = save_merged(learner.network, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(
        merged(input_ids=ids).logits, learner.network.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    assert fingerprint(learner.weights()) == before


def test_dropout_repeats_itself_and_does_not_disturb_the_first_check() -> None:
    first, second = trained(dropout=0.3), trained(dropout=0.3)
    assert fingerprint(first.weights()) == fingerprint(second.weights())
    assert fingerprint(first.weights()) != fingerprint(trained().weights())


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ModelError, match=r"lora\.targets names wq_proj, which the model does not have"):
        add_adapter(tiny_network(), LoraConfig(targets=("wq_proj",)))


def test_an_adapter_of_another_shape_is_refused() -> None:
    small, large = (add_adapter(tiny_network(), LoraConfig(rank=rank)) for rank in (2, 4))
    with pytest.raises(ModelError, match="but the network's is"):
        load_adapter_weights(small, adapter_weights(large))


def test_saving_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapter"):
        save_adapter(tiny_network(), tmp_path)
    with pytest.raises(ModelError, match="no adapter"):
        save_merged(tiny_network(), tmp_path)


def test_checkpointing_trains_an_adapter_on_frozen_embeddings() -> None:
    learners = []
    for checkpointing in (False, True):
        network = add_adapter(tiny_network(), LoraConfig(rank=4))
        training = TrainingConfig(learning_rate=1e-2, gradient_checkpointing=checkpointing)
        learners.append(Learner(network, loss=LossConfig(), training=training))
        learners[-1].update(make_samples(network))
    plain, saving = (learner.weights() for learner in learners)
    assert any(tensor.abs().sum() > 0 for name, tensor in saving.items() if "lora_B" in name)
    for name, tensor in plain.items():
        torch.testing.assert_close(saving[name], tensor, rtol=1e-4, atol=1e-6)
