"""EndpointPolicy against a real vLLM. `tests/vllm/run.sh` starts the server and runs this file; plain `pytest` does not collect it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import make_request, make_tokenizer, random_ids
from tests.test_policies_local import teacher_forced
from tests.vllm.make_model import make_network

from turnwise.errors import ContextOverflowError, PolicyError
from turnwise.policies.delivery import Delivery
from turnwise.policies.endpoint import EndpointPolicy
from turnwise.types import FinishReason

URL = os.environ.get("TURNWISE_VLLM_URL", "http://127.0.0.1:8123")


@pytest.fixture
async def policy() -> AsyncIterator[EndpointPolicy]:
    policy = EndpointPolicy(URL, "tiny", make_tokenizer())
    yield policy
    await policy.close()


def probe_logprobs(network: Any, ids: list[int]) -> np.ndarray:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logprobs = network(input_ids=tokens).logits[0, :-1].log_softmax(dim=-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]
)
@pytest.mark.parametrize("api", ["generate", "completions"])
async def test_tokens_and_logprobs_are_exact(api: Any, settings: dict[str, Any]) -> None:
    policy = EndpointPolicy(URL, "tiny", make_tokenizer(), api=api)
    network = make_network()
    prompts = [random_ids(i, 20 + i) for i in range(4)]
    requests = [make_request(p, stream=f"s{i}", seed=(0, i, 0), **settings) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert answer.is_token_exact
        assert not np.isin(answer.completion_ids, answer.banned_ids).any()
        expected = teacher_forced(network, prompt, answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-3)
    await policy.close()


async def test_the_best_api_is_found(policy: EndpointPolicy) -> None:
    await policy.complete(make_request(random_ids(0, 10)))
    assert policy._api == "generate"


async def test_greedy_tokens_equal_generate(policy: EndpointPolicy) -> None:
    prompt = random_ids(1, 20)
    answer = await policy.complete(make_request(prompt, temperature=0.0))
    banned = [[int(i)] for i in answer.banned_ids]
    expected = make_network().generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, bad_words_ids=banned
    )
    assert answer.completion_ids.tolist() == expected[0, 20:].tolist()


async def test_a_completion_stops_at_max_new_tokens(policy: EndpointPolicy) -> None:
    answer = await policy.complete(make_request(random_ids(1, 20), max_new_tokens=3))
    assert len(answer.completion_ids) == 3 or answer.finish_reason is FinishReason.END


async def test_a_prompt_that_is_too_long_is_refused(policy: EndpointPolicy) -> None:
    with pytest.raises(ContextOverflowError):
        await policy.complete(make_request(random_ids(1, 1100)))


async def test_an_adapter_arrives(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    network = get_peft_model(make_network(), config)
    torch.manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    weights = {name: value for name, value in network.state_dict().items() if "lora_" in name}
    settings = {**config.to_dict(), "base_model_name_or_path": "tiny"}
    plain = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in settings.items()
        if isinstance(value, str | int | float | bool | list | set | type(None))
    }
    delivery = Delivery(
        tmp_path, adapter_config=plain, probe_ids=random_ids(5, 24), tolerance=1e-3,
        probe_logprobs=lambda ids: probe_logprobs(network, list(ids)),
    )  # fmt: skip
    policy = EndpointPolicy(URL, "tiny", make_tokenizer(), delivery=delivery)
    assert len(await policy.load_weights(weights, 1)) == 64
    prompt = random_ids(2, 20)
    request = make_request(prompt)
    answer = await policy.complete(request)
    assert answer.policy_version == 1
    expected = teacher_forced(network, prompt, answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-3)
    await policy.close()


async def test_whole_weights_arrive_and_lost_ones_are_noticed(tmp_path: Path) -> None:
    first, second = make_network(0), make_network(1)
    probe = random_ids(5, 24)
    delivery = Delivery(tmp_path, probe_ids=probe, tolerance=1e-3)
    policy = EndpointPolicy(URL, "tiny", make_tokenizer(), delivery=delivery)
    delivery._probe_logprobs = lambda ids: probe_logprobs(second, list(ids))
    await policy.load_weights(dict(second.state_dict()), 2)
    with pytest.raises(PolicyError, match="the weights did not arrive"):
        await policy.load_weights(dict(first.state_dict()), 3)
    await policy.close()
