"""Rollouts: what happened is recorded, and what broke stays with the episode it broke in."""

import asyncio
import time

import numpy as np
import pytest

from conftest import CountingGame
from turnwise.rollout import TurnBarrier, collect_groups, episode_seed
from turnwise.types import StopReason, Task

TASK = Task(task_id="t", data={"target": 2})


def add_one(messages):
    return 'one more {"add": 1}'


async def collect(rollouts, tasks=(TASK,), label="s0"):
    return await collect_groups(list(tasks), rollouts, label=label)


async def test_an_episode_records_observations_actions_and_rewards(make_rollouts):
    (group,) = await collect(make_rollouts(add_one))
    episode = group.episodes[0]
    assert [turn.observation.text for turn in episode.turns] == ["sum 0 target 2", "sum 1 target 2"]
    assert [turn.action.value for turn in episode.turns] == [{"add": 1}, {"add": 1}]
    assert [turn.reasoning for turn in episode.turns] == ["one more", "one more"]
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert episode.stop_reason is StopReason.TERMINAL
    assert episode.metrics == {"success": 1.0, "total": 2.0}
    assert [turn.observation.state_key for turn in episode.turns] == [0, 1]


async def test_the_prompt_of_each_turn_extends_the_tokens_before_it(make_rollouts, tiny):
    (group,) = await collect(make_rollouts(add_one))
    first, second = group.episodes[0].turns
    assert second.prompt_start == first.completion_end
    assert np.array_equal(
        second.context_input_ids[: first.completion_end], first.stream.ids[: first.completion_end]
    )
    action = tiny.tokenizer.decode(
        first.generated_ids[first.action_token_start_index : first.action_token_end_index]
    )
    assert action.strip() == '{"add": 1}'


async def test_groups_keep_their_tasks_and_ids(make_rollouts):
    tasks = [Task(task_id=name, data={"target": 1}) for name in ("a", "b", "c")]
    groups = await collect(make_rollouts(add_one, group_size=3), tasks)
    assert [group.task.task_id for group in groups] == ["a", "b", "c"]
    assert [len(group.episodes) for group in groups] == [3, 3, 3]
    assert len({episode.episode_id for group in groups for episode in group.episodes}) == 9


async def test_an_episode_that_never_ends_stops_at_max_turns(make_rollouts):
    (group,) = await collect(make_rollouts(lambda messages: '{"add": 0}', max_turns=3))
    assert [episode.stop_reason for episode in group.episodes] == [StopReason.MAX_TURNS] * 2
    assert [episode.num_turns for episode in group.episodes] == [3, 3]


class RaisesOnce(CountingGame):
    """The first environment made raises in its second step; later ones work."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.is_bad = type(self).made == 1
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.is_bad and self.steps == 2:
            raise RuntimeError("the floor gave way")
        return super().step(action)


async def test_a_raising_environment_is_a_recorded_failure_and_its_siblings_go_on(make_rollouts):
    RaisesOnce.made = 0
    (group,) = await collect(make_rollouts(add_one, make=RaisesOnce, max_retries=0))
    broken = [episode for episode in group.episodes if episode.failure is not None]
    assert len(broken) == 1
    assert (broken[0].failure.stage, broken[0].failure.turn_index) == ("step", 1)
    assert "the floor gave way" in broken[0].failure.error
    assert broken[0].stop_reason is StopReason.FAILED
    assert len(broken[0].turns) == 1
    (whole,) = [episode for episode in group.episodes if episode.failure is None]
    assert whole.final_reward == 1.0


async def test_a_failed_episode_is_started_again_and_the_retry_is_counted(make_rollouts):
    RaisesOnce.made = 0
    (group,) = await collect(make_rollouts(add_one, make=RaisesOnce, max_retries=1))
    assert sorted(episode.num_retries for episode in group.episodes) == [0, 1]
    assert all(episode.failure is None for episode in group.episodes)


class Hangs(CountingGame):
    def step(self, action):
        time.sleep(1.0)
        return super().step(action)


async def test_a_hanging_environment_fails_at_its_deadline(make_rollouts):
    rollouts = make_rollouts(add_one, make=Hangs, environment_timeout_s=0.1, max_retries=0, group_size=2)
    (group,) = await collect(rollouts)
    assert all("took longer than 0.1 s" in episode.failure.error for episode in group.episodes)


class ReturnsNonsense(CountingGame):
    def __init__(self, where):
        self.where = where

    def reset(self, task):
        observation = super().reset(task)
        return "hello" if self.where == "reset" else observation

    def step(self, action):
        transition = super().step(action)
        if self.where == "step":
            return None
        return (
            transition
            if self.where != "nan"
            else type(transition)(observation=transition.observation, reward=float("nan"))
        )


@pytest.mark.parametrize(
    ("where", "words"),
    [("reset", "reset returned a str"), ("step", "step returned a NoneType"), ("nan", "reward nan")],
)
async def test_nonsense_from_an_environment_is_named(make_rollouts, where, words):
    (group,) = await collect(make_rollouts(add_one, make=lambda: ReturnsNonsense(where), max_retries=0))
    assert words in group.episodes[0].failure.error


async def test_an_episode_without_an_action_is_kept_or_dropped_as_configured(make_rollouts):
    (kept,) = await collect(make_rollouts(lambda messages: "I will not", max_turns=2))
    assert kept.episodes[0].failure is None
    assert not kept.episodes[0].is_valid
    assert kept.episodes[0].turns[0].num_action_tokens == 0
    rollouts = make_rollouts(lambda messages: "I will not", max_turns=2, drop_masking_failures=True)
    (dropped,) = await collect(rollouts)
    assert dropped.episodes[0].failure.stage == "mask"
    assert dropped.episodes[0].num_retries == 0


async def test_every_environment_is_closed(make_rollouts):
    made = []

    def make():
        made.append(CountingGame())
        return made[-1]

    await collect(make_rollouts(add_one, make=make))
    assert [game.is_closed for game in made] == [True, True]


async def test_eager_and_lockstep_give_the_same_episodes_for_a_scripted_agent(make_rollouts):
    tasks = [Task(task_id=f"t{i}", data={"target": 1 + i % 3}) for i in range(5)]
    found = []
    for schedule in ("lockstep", "eager"):
        groups = await collect(make_rollouts(add_one, schedule=schedule, max_concurrent=3), tasks)
        found.append([[(e.episode_id, e.num_turns, e.final_reward) for e in g.episodes] for g in groups])
    assert found[0] == found[1]


async def test_the_barrier_lets_nobody_start_a_turn_before_all_have_ended_theirs():
    barrier, order = TurnBarrier(3), []

    async def play(name, num_turns, pause):
        try:
            for turn in range(num_turns):
                await asyncio.sleep(pause)
                await barrier.wait()
                order.append((turn, name))
        finally:
            barrier.leave()

    await asyncio.gather(play("a", 3, 0.0), play("b", 1, 0.02), play("c", 3, 0.01))
    assert [turn for turn, _ in order] == sorted(turn for turn, _ in order)


def test_an_episode_is_seeded_by_its_name_alone():
    assert episode_seed("s0-g000-e00") == episode_seed("s0-g000-e00")
    assert episode_seed("s0-g000-e00") != episode_seed("s0-g000-e01")
