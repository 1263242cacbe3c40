"""Who runs when: joining, leaving, waiting for memory, cancelling, deadlines, and the same bits in another process."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import make_qwen3, make_request, make_tokenizer, random_ids
from tests.test_policies_local import teacher_forced

from turnwise.errors import ContextOverflowError, PolicyError
from turnwise.policies.local import LocalPolicy
from turnwise.policies.slots import TokenMemory
from turnwise.policy import TokenEvent
from turnwise.types import FinishReason


@pytest.fixture
async def eager() -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(make_qwen3(), make_tokenizer(), schedule="eager", kv_budget_mb=16)
    yield policy
    await policy.close()


def never_ending(tokens: int) -> Any:
    return make_request(random_ids(9, 20), stream="long", seed=(4, 0, 0), max_new_tokens=tokens, top_k=1)


async def run_episodes(schedule: str) -> str:
    """A digest of everything that six unequal episodes of three turns sampled."""
    policy = LocalPolicy(make_qwen3(), make_tokenizer(), schedule=schedule, kv_budget_mb=16)  # type: ignore[arg-type]
    prompts = [random_ids(i, 10 + 7 * i) for i in range(6)]
    digest = hashlib.sha256()
    for turn in range(3):
        requests = [
            make_request(prompt, stream=f"s{i}", group=f"g{i // 2}", seed=(1, i, turn), max_new_tokens=5 + i)
            for i, prompt in enumerate(prompts)
        ]
        # The order of arrival must not matter.
        arrival = requests if turn % 2 else requests[::-1]
        answers = await asyncio.gather(*(policy.complete(request) for request in arrival))
        for i, answer in enumerate(answers if turn % 2 else answers[::-1]):
            digest.update(answer.completion_ids.tobytes() + answer.logprobs.tobytes())
            prompts[i] += [*answer.completion_ids.tolist(), *random_ids(turn, 4 + i)]
    await policy.close()
    return digest.hexdigest()


async def test_lockstep_gives_the_same_bits_in_another_process() -> None:
    code = (
        "import asyncio; from tests.test_policies_scheduler import run_episodes; "
        "print(asyncio.run(run_episodes('lockstep')))"
    )
    others = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=_environment()
        )
        for _ in range(2)
    ]
    digests = {other.stdout.split()[-1] for other in others}
    assert len(digests) == 1
    assert digests == {await run_episodes("lockstep")}


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": "src:.", "OMP_NUM_THREADS": str(torch.get_num_threads())}


async def test_eager_lets_a_turn_join_and_leave_while_others_run(eager: LocalPolicy) -> None:
    long = asyncio.create_task(eager.complete(never_ending(1500)))
    await asyncio.sleep(0.2)
    short = await eager.complete(make_request(random_ids(1, 10), stream="short", max_new_tokens=3))
    assert len(short.completion_ids) <= 3
    assert not long.done()
    long.cancel()


async def test_a_cancelled_turn_leaves_and_the_rest_goes_on(eager: LocalPolicy) -> None:
    long = asyncio.create_task(eager.complete(never_ending(1500)))
    await asyncio.sleep(0.1)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    request = make_request(random_ids(1, 10), stream="long", seed=(8, 0, 0))
    answer = await eager.complete(request)
    expected = teacher_forced(eager._network, random_ids(1, 10), answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    for _ in range(200):  # an answer is handed over just before its place in the batch is given up
        if not eager._scheduler._running:
            break
        await asyncio.sleep(0.01)
    assert eager._scheduler._running == []


async def test_a_deadline_says_how_far_the_turn_got(eager: LocalPolicy) -> None:
    started_at = time.monotonic()
    request = make_request(random_ids(9, 20), seed=(4, 0, 0), max_new_tokens=2000, top_k=1, deadline_s=0.3)
    with pytest.raises(PolicyError, match=r"of at most 2000 tokens when its deadline of 0.3 s passed"):
        await eager.complete(request)
    assert time.monotonic() - started_at < 5


async def test_one_stream_asks_one_turn_at_a_time(eager: LocalPolicy) -> None:
    long = asyncio.create_task(eager.complete(never_ending(500)))
    await asyncio.sleep(0.05)
    with pytest.raises(PolicyError, match="await each turn"):
        await eager.complete(never_ending(5))
    long.cancel()


async def test_closing_ends_what_is_waiting() -> None:
    policy = LocalPolicy(make_qwen3(), make_tokenizer(), kv_budget_mb=16)
    waiting = asyncio.create_task(policy.complete(never_ending(1500)))
    await asyncio.sleep(0.1)
    await policy.close()
    with pytest.raises(PolicyError, match="closed"):
        await waiting
    with pytest.raises(PolicyError, match="closed"):
        await policy.complete(never_ending(5))


@pytest.mark.parametrize("schedule", ["lockstep", "eager"])
async def test_requests_wait_when_cache_memory_is_full(schedule: Any) -> None:
    # 384 bytes a token: 1 MiB holds 2,730 tokens, so two slots of 1,024.
    network = make_qwen3(max_position_embeddings=8192)
    policy = LocalPolicy(network, make_tokenizer(), schedule=schedule, kv_budget_mb=1)
    prompts = [random_ids(i, 600 + 10 * i) for i in range(6)]

    async def play(i: int) -> None:
        for turn in range(2):
            request = make_request(prompts[i], stream=f"s{i}", group=f"g{i}", seed=(0, i, turn))
            answer = await policy.complete(request)
            expected = teacher_forced(policy._network, prompts[i], answer, request.sampling)
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
            prompts[i] += [*answer.completion_ids.tolist(), *random_ids(turn, 20)]
        await policy.release(f"s{i}")

    await asyncio.wait_for(asyncio.gather(*(play(i) for i in range(6))), 60)
    with pytest.raises(ContextOverflowError, match="raise kv_budget_mb"):
        await policy.complete(make_request(random_ids(0, 2100), stream="huge"))
    await policy.close()


async def test_a_stream_that_outgrows_memory_beside_itself_is_computed_again() -> None:
    # 1 MiB holds 2,688 tokens, the largest range 2,048: a slot of 1,024 in it stands in the way of one of 2,048.
    network = make_qwen3(max_position_embeddings=8192)
    policy = LocalPolicy(network, make_tokenizer(), kv_budget_mb=1)
    prompt = random_ids(1, 600)
    for turn in range(2):
        request = make_request(prompt, seed=(0, 0, turn), deadline_s=30.0)
        answer = await policy.complete(request)
        expected = teacher_forced(network, prompt, answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        prompt = [*prompt, *answer.completion_ids.tolist(), *random_ids(2, 500)]
    await policy.close()


def memorise(text: str) -> Any:
    """A tiny model that has learnt one sentence by heart."""
    tokenizer, network = make_tokenizer(), make_qwen3()
    ids = torch.tensor([[*tokenizer.encode("Q:"), *tokenizer.encode(text), 0]])
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return network.eval()


async def test_events_stream_tokens_text_and_the_action() -> None:
    text = 'I go é {"a": 1} then {"move": "north"} and more'
    tokenizer = make_tokenizer()
    policy = LocalPolicy(memorise(text), tokenizer, kv_budget_mb=16)
    schema = {"type": "object", "required": ["move"]}
    events: list[TokenEvent] = []
    request = make_request(
        tokenizer.encode("Q:"), temperature=0.0, max_new_tokens=60, stop_at_action=True, action_schema=schema
    )
    answer = await policy.complete(request, on_token=events.append)
    assert answer.finish_reason is FinishReason.ACTION
    assert answer.text == 'I go é {"a": 1} then {"move": "north"}'
    assert "".join(event.text for event in events) == answer.text
    assert [event.token_id for event in events] == answer.completion_ids.tolist()
    assert [event.is_action_closed for event in events] == [False] * (len(events) - 1) + [True]
    assert any(event.is_action_open for event in events)
    whole = await policy.complete(
        make_request(
            tokenizer.encode("Q:"), stream="t", temperature=0.0, max_new_tokens=60, action_schema=schema
        )
    )
    assert whole.text == text
    assert whole.finish_reason is FinishReason.END
    assert whole.completion_ids[-1] == 0
    await policy.close()


async def test_an_adapter_is_sampled_from_and_delivered() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    def with_adapter(seed: int) -> Any:
        network = get_peft_model(
            make_qwen3(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        torch.manual_seed(seed)
        for name, parameter in network.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return network.eval()

    mine, trained = with_adapter(1), with_adapter(2)
    policy = LocalPolicy(mine, make_tokenizer(), kv_budget_mb=16)
    prompt = random_ids(3, 30)
    request = make_request(prompt, stream="a")
    answer = await policy.complete(request)
    np.testing.assert_allclose(
        answer.logprobs, teacher_forced(mine, prompt, answer, request.sampling), atol=1e-4
    )
    await policy.load_weights(get_peft_model_state_dict(trained), 1)
    answer = await policy.complete(request)
    expected = teacher_forced(trained, prompt, answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    named = {name: value for name, value in trained.state_dict().items() if "lora_" in name}
    assert len(await policy.load_weights(named, 2)) == 64
    await policy.close()


def test_freed_neighbours_join_again() -> None:
    memory = TokenMemory(1000)
    assert memory.num_tokens == 960
    assert memory.largest_free == 512
    first, second, third = memory.take(64), memory.take(64), memory.take(256)
    # 960 = 512 + 256 + 128 + 64: the smallest range that fits is used first.
    assert (first, second, third) == (896, 768, 512)
    assert memory.take(1024) is None
    memory.give_back(896, 64)
    memory.give_back(768, 64)
    memory.give_back(512, 256)
    assert memory.num_free == 960
    assert memory.take(512) == 0
