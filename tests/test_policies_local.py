"""LocalPolicy against the plain way: `generate()` for tokens, a teacher-forced pass for log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import make_llama, make_qwen3, make_request, make_tokenizer, random_ids

from turnwise.errors import ContextOverflowError, PolicyError
from turnwise.fingerprint import fingerprint
from turnwise.policies.local import LocalPolicy
from turnwise.types import Completion, FinishReason, SamplingParams


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
async def policy(tokenizer: Any) -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(make_qwen3(), tokenizer, kv_budget_mb=16)
    yield policy
    await policy.close()


def greedy_by_generate(network: Any, policy: LocalPolicy, prompt: list[int], count: int) -> list[int]:
    banned = [[int(i)] for i in policy._vocabulary.banned_ids]
    output = network.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, bad_words_ids=banned
    )
    return output[0, len(prompt) :].tolist()


def teacher_forced(
    network: Any, prompt: list[int], completion: Completion, sampling: SamplingParams
) -> np.ndarray:
    """The log-probs of a completion from one plain forward pass, under its kept sets and temperature."""
    ids = torch.tensor([[*prompt, *completion.completion_ids.tolist()]])
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return rescore(logits, completion, sampling)


def rescore(logits: torch.Tensor, completion: Completion, sampling: SamplingParams) -> np.ndarray:
    logits = logits / sampling.temperature
    found = []
    for index, token in enumerate(completion.completion_ids.tolist()):
        row = logits[index].clone()
        kept = completion.kept.row(index) if completion.kept is not None else []
        if len(kept):
            outside = torch.ones_like(row, dtype=torch.bool)
            outside[torch.from_numpy(kept.astype(np.int64))] = False
            row[outside] = float("-inf")
        row[torch.from_numpy(completion.banned_ids.astype(np.int64))] = float("-inf")
        found.append(float(row.log_softmax(dim=-1)[token]))
    return np.array(found)


@pytest.mark.parametrize("make", [make_qwen3, make_llama])
async def test_greedy_tokens_equal_generate_over_turns_of_unequal_episodes(make: Any, tokenizer: Any) -> None:
    network = make()
    policy = LocalPolicy(network, tokenizer, kv_budget_mb=16)
    prompts = [random_ids(seed, 20 + 17 * seed) for seed in range(4)]
    for turn in range(3):
        requests = [
            make_request(prompt, stream=f"s{i}", seed=(0, i, turn), temperature=0.0, max_new_tokens=8 + i)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(policy.complete(request) for request in requests))
        for i, answer in enumerate(answers):
            expected = greedy_by_generate(network, policy, prompts[i], 8 + i)
            assert answer.completion_ids.tolist() == expected
            prompts[i] += [*expected, *random_ids(100 * turn + i, 5 + 30 * i)]
    await policy.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.3}],
)
async def test_logprobs_equal_teacher_forcing_under_the_same_cuts(policy: LocalPolicy, settings: Any) -> None:
    prompts = [random_ids(seed, 30 + 11 * seed) for seed in range(3)]
    for turn in range(2):
        requests = [
            make_request(prompt, stream=f"s{i}", seed=(7, i, turn), **settings)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(policy.complete(request) for request in requests))
        for prompt, request, answer in zip(prompts, requests, answers, strict=True):
            expected = teacher_forced(policy._network, prompt, answer, request.sampling)
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
            assert (answer.kept is None) == (settings == {})
            prompt += [*answer.completion_ids.tolist(), *random_ids(turn, 9)]


async def test_tokens_do_not_depend_on_the_neighbours(policy: LocalPolicy) -> None:
    request = make_request(random_ids(1, 40), stream="mine", seed=(3, 1, 4))
    alone = await policy.complete(request)
    await policy.release("mine")
    others = [make_request(random_ids(i, 25 + i), stream=f"o{i}", seed=(9, i, 0)) for i in range(5)]
    together, *_ = await asyncio.gather(*(policy.complete(r) for r in [request, *others]))
    assert together.completion_ids.tolist() == alone.completion_ids.tolist()


async def test_a_shared_prompt_is_computed_once_and_gives_the_same_answers(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_qwen3()
    policy = LocalPolicy(network, tokenizer, kv_budget_mb=16)
    prompt = random_ids(5, 64)
    lone = [
        await policy.complete(make_request(prompt, stream=f"a{i}", group=f"a{i}", seed=(1, i, 0)))
        for i in range(1)
    ]
    sizes: list[int] = []
    forward = network.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(network, "forward", counted)
    for i in range(1):
        await policy.release(f"a{i}")
    requests = [make_request(prompt, stream=f"b{i}", group="b", seed=(1, i, 0)) for i in range(4)]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    assert sizes[0] == 64
    assert max(sizes[1:]) <= 4
    assert answers[0].completion_ids.tolist() == lone[0].completion_ids.tolist()
    for request, answer in zip(requests, answers, strict=True):
        expected = teacher_forced(network, prompt, answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    await policy.close()


async def test_a_turn_prefills_only_its_new_tokens(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_qwen3()
    policy = LocalPolicy(network, tokenizer, kv_budget_mb=16)
    prompt = random_ids(2, 100)
    first = await policy.complete(make_request(prompt, seed=(0, 0, 0)))
    sizes: list[int] = []
    forward = network.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(network, "forward", counted)
    await policy.complete(
        make_request([*prompt, *first.completion_ids.tolist(), *random_ids(3, 10)], seed=(0, 0, 1))
    )
    # Ten new ones, and the last sampled token, which the first turn never fed back.
    assert sizes[0] == 11
    await policy.close()


async def test_a_rewritten_prompt_is_answered_from_where_it_differs(policy: LocalPolicy) -> None:
    prompt = random_ids(2, 60)
    await policy.complete(make_request(prompt))
    rewritten = [*prompt[:30], *random_ids(77, 20)]
    request = make_request(rewritten, seed=(0, 0, 1))
    answer = await policy.complete(request)
    expected = teacher_forced(policy._network, rewritten, answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


async def test_special_tokens_are_never_sampled(policy: LocalPolicy) -> None:
    answers = await asyncio.gather(
        *(
            policy.complete(make_request(random_ids(i, 8), stream=f"s{i}", seed=(i,), max_new_tokens=60))
            for i in range(8)
        )
    )
    # The markers, and the rows of the model that the tokenizer has no token for.
    assert answers[0].banned_ids.tolist() == [1, 2, 3, 4, 5, *range(303, 320)]
    sampled = np.concatenate([answer.completion_ids for answer in answers])
    assert not np.isin(sampled, answers[0].banned_ids).any()


async def test_a_prompt_that_exceeds_the_context_is_refused_with_the_numbers(policy: LocalPolicy) -> None:
    with pytest.raises(ContextOverflowError, match=r"2040 tokens and asks for up to 12 more.*holds 2048"):
        await policy.complete(make_request(random_ids(0, 2040)))


async def test_loaded_weights_are_sampled_from_and_named(policy: LocalPolicy) -> None:
    request = make_request(random_ids(4, 20), temperature=0.0)
    before = await policy.complete(request)
    assert before.policy_version == 0
    other = make_qwen3(seed=1)
    weights = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert await policy.load_weights(weights, 3) == fingerprint(weights)
    after = await policy.complete(request)
    assert after.policy_version == 3
    assert after.completion_ids.tolist() == greedy_by_generate(other, policy, random_ids(4, 20), 12)
    with pytest.raises(PolicyError, match="nonsense"):
        await policy.load_weights({"nonsense": torch.zeros(1)}, 4)


async def test_weights_that_were_not_finite_leave_nothing_behind(policy: LocalPolicy) -> None:
    """Caches keep their memory from one version to the next, but not the NaNs of a broken one, which masks would let through."""
    prompts = [random_ids(seed, 20 + 9 * seed) for seed in range(4)]
    requests = [make_request(prompt, stream=f"s{i}", temperature=0.0) for i, prompt in enumerate(prompts)]
    good = {name: tensor.clone() for name, tensor in policy._network.state_dict().items()}
    expected = [greedy_by_generate(policy._network, policy, prompt, 12) for prompt in prompts]
    memory = policy._runner.store.keys[0]
    await policy.load_weights(good, 1)
    assert policy._runner.store.keys[0] is memory
    await policy.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}, 2)
    with pytest.raises(PolicyError, match="not finite"):
        await policy.complete(requests[0])
    await policy.load_weights(good, 3)
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    assert [answer.completion_ids.tolist() for answer in answers] == expected


async def test_a_stream_that_ends_reports_why(policy: LocalPolicy) -> None:
    answer = await policy.complete(make_request(random_ids(4, 20), max_new_tokens=5))
    assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.END)
    assert len(answer.completion_ids) <= 5


async def test_what_prompts_begin_with_is_computed_once_across_groups(policy: LocalPolicy) -> None:
    system = random_ids(1, 40)
    prompts = [[*system, *random_ids(10 + i // 2, 10)] for i in range(4)]
    requests = [
        make_request(prompt, stream=f"s{i}", group=f"g{i // 2}", seed=(0, i, 0))
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    # The first prompt whole, the second group's own ten tokens, nothing for the two equal ones.
    assert policy.statistics.num_prefilled == 50 + 10
    assert policy.statistics.num_shared == 50 + 40 + 50
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        expected = teacher_forced(policy._network, prompt, answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


async def test_a_late_member_of_a_group_copies_its_prompt(policy: LocalPolicy) -> None:
    prompt = random_ids(1, 40)
    await policy.complete(make_request(prompt, stream="early", seed=(0, 0, 0)))
    request = make_request(prompt, stream="late", seed=(0, 1, 0))
    answer = await policy.complete(request)
    # One token is computed again, for its logits.
    assert policy.statistics.num_prefilled == 40 + 1
    expected = teacher_forced(policy._network, prompt, answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
