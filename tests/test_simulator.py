"""The simulator: a model and an environment in, an episode out."""

from __future__ import annotations

import asyncio
import logging

import pytest

from conftest import CountingGame
from turnwise import EpisodeSimulator
from turnwise.environments.frozenlake import build_frozenlake
from turnwise.errors import EnvironmentFailure
from turnwise.policies.scripted import ScriptedPolicy
from turnwise.simulator import PlannedEpisode
from turnwise.types import MaskingMethod, StopReason, Task


def scripted(tiny, answer, **settings) -> EpisodeSimulator:
    policy = ScriptedPolicy(tiny.tokenizer, lambda messages: answer)
    return EpisodeSimulator(policy, tiny.tokenizer, **{"min_action_tokens": 1, **settings})


def test_the_defaults_are_those_of_the_documents(tiny):
    simulator = EpisodeSimulator(tiny.network, tiny.tokenizer)
    config = simulator.config
    assert (config.temperature, config.top_p, config.top_k) == (1.0, 0.9, 50)
    assert (config.min_action_tokens, config.max_action_tokens, config.max_turns) == (10, 100, 10)
    greedy = EpisodeSimulator(tiny.network, tiny.tokenizer, do_sample=False).config
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)


def test_an_episode_is_played_to_its_end(tiny):
    simulator = scripted(tiny, 'one {"add": 1}')
    episode = simulator.run_episode(CountingGame(), {"target": 2}, "ep001")
    assert episode.episode_id == "ep001"
    assert episode.stop_reason is StopReason.TERMINAL
    assert episode.final_reward == 1.0
    assert episode.is_valid
    assert episode.masking_quality == "good"
    assert [turn.reasoning for turn in episode.turns] == ["one", "one"]


def test_a_turn_carries_everything_the_documents_name(tiny):
    turn = scripted(tiny, 'one {"add": 1}').run_episode(CountingGame(), {"target": 1}).turns[0]
    assert len(turn.action_token_mask) == len(turn.generated_ids)
    assert turn.input_token_length == len(turn.context_input_ids)
    assert turn.num_action_tokens == turn.action_token_end_index - turn.action_token_start_index
    action_ids = turn.generated_ids[turn.action_token_start_index : turn.action_token_end_index]
    assert tiny.tokenizer.decode(action_ids).strip() == '{"add": 1}'
    assert (turn.masking_method, turn.masking_confidence) == (MaskingMethod.BRACE_DEPTH, 1.0)
    assert turn.action.value == {"add": 1}


def test_an_episode_without_actions_is_dropped_with_its_reason(tiny):
    episode = scripted(tiny, "no idea", max_turns=2).run_episode(CountingGame(), {"target": 1}, "ep")
    assert not episode.is_valid
    assert episode.dropout_reason == "no_json in turn 0: the completion holds no JSON object"
    assert episode.masking_quality == "fallback_used"


def test_a_short_action_is_out_of_range_by_default(tiny):
    episode = scripted(tiny, '{"add": 1}', min_action_tokens=10).run_episode(CountingGame(), {"target": 1})
    assert not episode.is_valid
    assert episode.dropout_reason.startswith("too_few_action_tokens in turn 0")


def test_a_real_model_samples_the_same_episode_for_the_same_seed_and_another_for_another(tiny):
    spec = build_frozenlake()
    task = spec.tasks.task(0, "train")
    with EpisodeSimulator(tiny.network, tiny.tokenizer, max_turns=3, max_new_tokens=24) as simulator:
        first, again = (simulator.run_episode(spec.make(), task, "ep") for _ in range(2))
        others = [simulator.run_episode(spec.make(), task, "ep", seed=seed) for seed in range(1, 5)]
    assert first.streams[0].ids.tolist() == again.streams[0].ids.tolist()
    assert any(other.streams[0].ids.tolist() != first.streams[0].ids.tolist() for other in others)
    assert first.num_sampled_tokens > 0
    assert (first.streams[0].logprobs[first.streams[0].is_sampled] <= 0).all()


def test_episodes_played_together_equal_those_played_alone(tiny):
    spec = build_frozenlake()
    tasks = [spec.tasks.task(index, "train") for index in range(3)]
    with EpisodeSimulator(tiny.network, tiny.tokenizer, max_turns=3, max_new_tokens=24) as simulator:
        alone = [simulator.run_episode(spec.make(), task, f"ep{i}") for i, task in enumerate(tasks)]
        together = simulator.run_episodes(
            [
                PlannedEpisode(environment=spec.make(), task=task, episode_id=f"ep{i}")
                for i, task in enumerate(tasks)
            ]
        )
    assert [e.streams[0].ids.tolist() for e in together] == [e.streams[0].ids.tolist() for e in alone]


def test_one_environment_cannot_play_two_episodes_at_once(tiny):
    game, task = CountingGame(), Task(task_id="t")
    planned = [PlannedEpisode(environment=game, task=task, episode_id=name) for name in "ab"]
    with pytest.raises(EnvironmentFailure, match="give each its own"):
        scripted(tiny, "{}").run_episodes(planned)


def test_a_pose_the_environment_does_not_understand_is_refused(tiny):
    with pytest.raises(EnvironmentFailure, match="has no task_from_pose, so it cannot start from a float"):
        scripted(tiny, "{}").run_episode(CountingGame(), 1.5)


def test_a_broken_environment_is_recorded_not_raised(tiny):
    class Broken(CountingGame):
        def step(self, action):
            raise RuntimeError("the floor gave way")

    episode = scripted(tiny, '{"add": 1}').run_episode(Broken(), {"target": 1})
    assert episode.stop_reason is StopReason.FAILED
    assert "the floor gave way" in episode.failure.error
    assert not episode.is_valid


async def test_it_can_be_called_from_a_running_event_loop(tiny):
    await asyncio.sleep(0)
    episode = scripted(tiny, '{"add": 1}').run_episode(CountingGame(), {"target": 1})
    assert episode.final_reward == 1.0


def test_log_stats_writes_and_returns_the_counts(tiny, caplog):
    simulator = scripted(tiny, '{"add": 1}')
    simulator.run_episode(CountingGame(), {"target": 2})
    with caplog.at_level(logging.INFO, logger="turnwise.simulator"):
        statistics = simulator.log_stats()
    assert statistics["methods"]["brace_depth"] == 2
    assert statistics["dropout_rate"] == 0.0
    assert "1 episodes, 2 turns: brace_depth 100.0%" in caplog.text
