"""Episodes one at a time, as steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.line_world import DicePolicy, LineSpec, load_tiny_tokenizer

from turnwise.config import CreditConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from turnwise.credit import assign_advantages
from turnwise.errors import ConfigError
from turnwise.rewards.align import align_rewards
from turnwise.rewards.interface import EvaluateResult, StepOutput
from turnwise.rewards.steps import with_credit
from turnwise.types import Message, Role
from turnwise.view import read_steps
from turnwise.worker import AgentPolicy, RLRolloutWorker, TaskDefinition, describe_step, score_of_steps


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tiny_tokenizer()


def make_worker(tokenizer: Any, **options: Any) -> RLRolloutWorker:
    definition = TaskDefinition(environment=LineSpec(), rollout=RolloutConfig(max_turns=5))
    return RLRolloutWorker(definition, AgentPolicy(DicePolicy(tokenizer), tokenizer), **options)


async def test_an_episode_comes_as_steps_messages_and_ground_truth(tokenizer: Any) -> None:
    worker = make_worker(tokenizer)
    steps, messages, ground_truth = await worker.run_episode()
    assert ground_truth == "right"
    assert [step.step_index for step in steps] == list(range(len(steps)))
    assert [message["role"] for message in messages] == ["user", "assistant"] * len(steps)
    assert messages[0]["content"] == "You are at 0."
    assert messages[1]["content"] == steps[0].text == steps[0].action.text
    assert [step.is_done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps[0].policy_logprobs) == len(worker.episodes[0].turns[0].generated_ids)


async def test_episodes_of_a_worker_differ_but_start_alike(tokenizer: Any) -> None:
    worker = make_worker(tokenizer)
    await worker.run_episode()
    await worker.run_group(6)
    group = worker.group()
    assert len({episode.episode_id for episode in group.episodes}) == 7
    assert {episode.group_id for episode in group.episodes} == {"worker"}
    assert {episode.turns[0].observation.text for episode in group.episodes} == {"You are at 0."}
    assert len({tuple(turn.text for turn in episode.turns) for episode in group.episodes}) > 1
    again = make_worker(tokenizer)
    first, _, _ = await again.run_episode()
    assert [step.text for step in first] == [turn.text for turn in group.episodes[0].turns]


async def test_aligned_steps_get_credit_through_the_same_machinery(tokenizer: Any) -> None:
    worker = make_worker(tokenizer)
    batch = [steps for steps, _, _ in await worker.run_group(6)]
    aligned = []
    for steps in batch:
        outputs = [
            StepOutput(step_index=step.step_index, base_reward=step.environment_reward) for step in steps
        ]
        result = EvaluateResult(score=sum(output.base_reward for output in outputs), step_outputs=outputs)
        aligned.append(align_rewards(steps, result))
    scores = {steps[0].episode_id: score_of_steps(steps) for steps in aligned}
    advantages = assign_advantages([worker.group()], scores, CreditConfig(estimator="gigpo"))
    for steps in aligned:
        credited = with_credit(steps, advantages.turns[steps[0].episode_id])
        assert all(step.advantage is not None and step.step_return is not None for step in credited)
    starts = [advantages.turns[episode.episode_id][0].anchor for episode in worker.episodes]
    assert len(set(starts)) == 1


async def test_selected_episodes_are_saved_for_the_viewer(tokenizer: Any, tmp_path: Path) -> None:
    worker = make_worker(
        tokenizer, save_to=tmp_path, save_every=3, save_when=lambda episode: episode.metrics["success"] == 1.0
    )
    await worker.run_group(6)
    wanted = {
        f"{episode.episode_id}.steps.jsonl"
        for number, episode in enumerate(worker.episodes)
        if number % 3 == 0 or episode.metrics["success"] == 1.0
    }
    assert {path.name for path in tmp_path.iterdir()} == wanted
    first = list(read_steps(tmp_path / f"{worker.episodes[0].episode_id}.steps.jsonl"))
    assert [step.action for step in first] == [turn.action.value for turn in worker.episodes[0].turns]
    with pytest.raises(ConfigError, match="save_every is -1"):
        make_worker(tokenizer, save_every=-1)


async def test_each_step_is_logged_at_debug(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="turnwise.worker"):
        steps, _, _ = await make_worker(tokenizer).run_episode()
    assert describe_step(steps[0]) in caplog.text
    assert "observation 'You are at 0.'" in describe_step(steps[0])
    assert f"action {json.loads(steps[0].text)}" in describe_step(steps[0])
    assert f"{len(steps)} steps, stopped by" in caplog.text


async def test_an_agent_answers_a_conversation(tokenizer: Any) -> None:
    agent = AgentPolicy(DicePolicy(tokenizer, right=1.0), tokenizer)
    action, completion = await agent.get_action([Message(role=Role.USER, content="You are at 0.")])
    assert action.value == {"move": "right"}
    assert completion.logprobs.sum() == 0.0


async def test_a_model_in_this_process_plays_a_named_environment() -> None:
    definition = TaskDefinition(
        environment=EnvironmentConfig(name="frozenlake"),
        rollout=RolloutConfig(max_turns=3, max_new_tokens=16),
    )
    agent = AgentPolicy.from_model("tiny")
    worker = RLRolloutWorker(definition, agent)
    steps, messages, _ = await worker.run_episode()
    await agent.close()
    assert 1 <= len(steps) <= 3
    assert messages[0]["content"].startswith("At row")
    assert all(logprob <= 0 for step in steps for logprob in step.policy_logprobs)
    assert TaskDefinition(environment="frozenlake", task_index=2).build()[1].task_id == "frozenlake-train-2"


async def test_a_model_behind_a_server_gives_the_log_probs_of_its_own_tokens(tokenizer: Any) -> None:
    from tests.tiny_server import TinyServer

    from turnwise.models.loading import load_model

    loaded = load_model(ModelConfig(path="tiny"))
    server = TinyServer(loaded.network, loaded.tokenizer)
    agent = AgentPolicy.from_endpoint(server.url, "tiny", "tiny")
    definition = TaskDefinition(
        environment="frozenlake", rollout=RolloutConfig(max_turns=2, max_new_tokens=16)
    )
    worker = RLRolloutWorker(definition, agent)
    try:
        steps, _, _ = await worker.run_episode()
    finally:
        await agent.close()
        server.close()
    (episode,) = worker.episodes
    assert episode.failure is None
    assert episode.is_token_exact
    first = episode.turns[0]
    ids = torch.tensor([[*first.context_input_ids.tolist(), *first.generated_ids.tolist()]])
    with torch.no_grad():
        logits = loaded.network(input_ids=ids).logits[0, len(first.context_input_ids) - 1 : -1]
    # Markers that begin and end messages cannot be sampled, so the server's numbers may only differ by what those hold.
    expected = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, -len(first.generated_ids) :, None])[
        :, 0
    ]
    np.testing.assert_allclose(steps[0].policy_logprobs, expected.numpy(), atol=2e-2)
