"""Going back to a turn and going on differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.line_world import DicePolicy, LineSpec, RestlessLineWorld, RestorableLineWorld, load_tiny_tokenizer
from typer.testing import CliRunner

from turnwise.branching import (
    BranchedEnvironments,
    branch_episode,
    estimate_value,
    go_back,
    preference_pairs,
    stored_completion,
)
from turnwise.cli import app
from turnwise.config import Config, CreditConfig, RolloutConfig
from turnwise.credit_report import environment_score
from turnwise.errors import CreditError, EnvironmentFailure
from turnwise.rollout import Rollouts, run_episode
from turnwise.store.run import Run
from turnwise.types import Action, Episode
from turnwise.worker import AgentPolicy


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tiny_tokenizer()


def make_rollouts(tokenizer: Any, spec: LineSpec, *, right: float = 0.5) -> tuple[Rollouts, DicePolicy]:
    policy = DicePolicy(tokenizer, right)
    config = RolloutConfig(max_turns=6, max_retries=0)
    agent = AgentPolicy(policy, tokenizer).make_agent(config)
    return Rollouts(agent=agent, environment=spec, config=config), policy


async def play_long(rollouts: Rollouts) -> Episode:
    """An episode of at least four turns."""
    for number in range(50):
        task = rollouts.environment.tasks.task(0, "train")
        episode = await run_episode(rollouts, task, episode_id=f"e{number}", group_id="g")
        if episode.num_turns >= 4:
            return episode
    raise AssertionError("the die never took its time")


@pytest.mark.parametrize("world", ["repeated", "restored"])
async def test_branches_share_the_stored_turns_token_for_token(tokenizer: Any, world: str) -> None:
    spec = LineSpec(RestorableLineWorld) if world == "restored" else LineSpec()
    rollouts, policy = make_rollouts(tokenizer, spec)
    episode = await play_long(rollouts)
    policy.num_asked = RestorableLineWorld.num_steps = 0
    group, is_restored = await branch_episode(episode, rollouts, turn=2, num=8)
    assert is_restored == (world == "restored")
    assert len(group.episodes) == 8
    for branch in group.episodes:
        assert branch.failure is None
        for stored, repeated in zip(episode.turns[:2], branch.turns[:2], strict=True):
            np.testing.assert_array_equal(stored.context_input_ids, repeated.context_input_ids)
            np.testing.assert_array_equal(stored.generated_ids, repeated.generated_ids)
            np.testing.assert_array_equal(stored.logprobs, repeated.logprobs)
            assert stored.reward == repeated.reward
        assert branch.turns[2].observation.text == episode.turns[2].observation.text
    # Only the turns from 2 on were sampled, and only they were stepped (the way back was walked once).
    num_new = sum(branch.num_turns - 2 for branch in group.episodes)
    assert policy.num_asked == num_new
    if world == "restored":
        assert RestorableLineWorld.num_steps == num_new + 2
    assert len({branch.turns[2].text for branch in group.episodes}) == 2
    again, _ = await branch_episode(episode, rollouts, turn=2, num=8)
    other, _ = await branch_episode(episode, rollouts, turn=2, num=8, label="other")
    said = [[turn.text for turn in branch.turns] for branch in group.episodes]
    assert [[turn.text for turn in branch.turns] for branch in again.episodes] == said
    assert [[turn.text for turn in branch.turns] for branch in other.episodes] != said


async def test_the_first_turn_can_be_branched(tokenizer: Any) -> None:
    for spec in (LineSpec(), LineSpec(RestorableLineWorld)):
        rollouts, _ = make_rollouts(tokenizer, spec)
        group, _ = await branch_episode(await play_long(rollouts), rollouts, turn=0, num=2)
        assert [branch.turns[0].observation.state_key for branch in group.episodes] == [0, 0]


async def test_an_environment_that_cannot_be_repeated_is_refused(tokenizer: Any) -> None:
    rollouts, _ = make_rollouts(tokenizer, LineSpec(RestlessLineWorld))
    episode = await play_long(rollouts)
    with pytest.raises(EnvironmentFailure, match="does not repeat episode"):
        await branch_episode(episode, rollouts, turn=2, num=2)


async def test_a_turn_that_never_was_is_refused(tokenizer: Any) -> None:
    rollouts, _ = make_rollouts(tokenizer, LineSpec())
    episode = await play_long(rollouts)
    with pytest.raises(CreditError, match=f"has turns 0 to {episode.num_turns - 1}"):
        await branch_episode(episode, rollouts, turn=episode.num_turns, num=2)


async def test_the_value_is_the_mean_return_from_the_turn_on(tokenizer: Any) -> None:
    rollouts, _ = make_rollouts(tokenizer, LineSpec())
    episode = await play_long(rollouts)
    group, _ = await branch_episode(episode, rollouts, turn=1, num=6)
    scores = {found.episode_id: environment_score(found) for found in (*group.episodes, episode)}
    config = CreditConfig(estimator="gigpo", gamma=0.5)
    estimate = estimate_value(episode, group, scores, config, turn=1)

    def by_hand(found: Episode) -> float:
        return sum(0.5**k * turn.reward for k, turn in enumerate(found.turns[1:]))

    expected = [by_hand(branch) for branch in group.episodes]
    assert estimate.returns == pytest.approx(expected)
    assert estimate.value == pytest.approx(np.mean(expected))
    assert estimate.standard_error == pytest.approx(np.std(expected, ddof=1) / 6**0.5)
    assert estimate.original_return == pytest.approx(by_hand(episode))
    assert estimate.policy_version == 3


async def test_pairs_put_the_better_answer_first(tokenizer: Any) -> None:
    rollouts, _ = make_rollouts(tokenizer, LineSpec())
    episode = await play_long(rollouts)
    group, _ = await branch_episode(episode, rollouts, turn=1, num=16)
    scores = {found.episode_id: environment_score(found) for found in (*group.episodes, episode)}
    estimate = estimate_value(episode, group, scores, CreditConfig(estimator="gigpo"), turn=1)
    (pair,) = preference_pairs(episode, group, estimate)
    answers = {branch.turns[1].text: [] for branch in group.episodes}
    for branch, value in zip(group.episodes, estimate.returns, strict=True):
        answers[branch.turns[1].text].append(value)
    means = {answer: np.mean(values) for answer, values in answers.items()}
    assert pair["chosen"][0]["content"] == max(means, key=means.__getitem__)
    assert pair["rejected"][0]["content"] == min(means, key=means.__getitem__)
    assert pair["chosen_return"] > pair["rejected_return"]
    assert [message["role"] for message in pair["prompt"]] == ["user", "assistant", "user"]
    assert pair["prompt"][-1]["content"] == episode.turns[1].observation.text


async def test_a_stored_completion_is_what_was_sampled(tokenizer: Any) -> None:
    rollouts, _ = make_rollouts(tokenizer, LineSpec())
    episode = await play_long(rollouts)
    completion = stored_completion(episode.turns[1])
    assert completion.text == episode.turns[1].text
    np.testing.assert_array_equal(completion.completion_ids, episode.turns[1].generated_ids)


@pytest.mark.slow
def test_a_stored_run_is_branched_from_the_command_line(tmp_path: Path) -> None:
    from turnwise import trainer

    config = Config.from_dict(
        {
            "rollout": {"tasks_per_step": 1, "group_size": 4, "max_turns": 4, "max_new_tokens": 16},
            "credit": {"estimator": "gigpo"},
            "training": {"num_steps": 1},
        }
    )

    class Nobody:
        def on_episode(self, episode: Episode) -> None: ...

        def on_step(self, step: int, metrics: Any) -> None: ...

    import asyncio

    stages = trainer.build_stages(config)
    run = Run.create(tmp_path / "run", config)
    asyncio.run(trainer.train(run, stages, Nobody()))
    run.close()
    arguments = ["branch", str(run.folder), "s000000-g000-e00", "--turn", "0", "--num", "3", "--json"]
    pairs = tmp_path / "pairs.jsonl"
    for number, extra in enumerate(([], ["--weights", "newest", "--dpo", str(pairs)])):
        result = CliRunner().invoke(app, [*arguments, *extra])
        assert result.exit_code == 0, result.output or result.exception
        found = json.loads(result.stdout.strip().splitlines()[-1])
        assert len(found["returns"]) == 3
        assert found["value"] == pytest.approx(np.mean(found["returns"]))
        assert Path(found["folder"]).name == f"s000000-g000-e00-t0{f'-{number}' if number else ''}"
    assert len(pairs.read_text().splitlines()) == found["num_pairs"]

    from turnwise.branch_run import read_values

    assert read_values(run.folder)["s000000-g000-e00", 0].value == found["value"]
    before = sorted(path for path in (run.folder / "branches").rglob("*"))
    Run.open(run.folder).rewind_to_checkpoint()
    assert sorted(path for path in (run.folder / "branches").rglob("*")) == before


def test_navigation_goes_on_from_its_snapshot_as_if_nothing_had_happened() -> None:
    from tests.reward_episodes import make_episode

    from turnwise.environments.navigation import build_navigation

    scenes = {"num_train_scenes": 1, "num_eval_scenes": 1, "max_rooms": 1}
    spec = build_navigation({"generate": scenes, "width": 32, "height": 32})
    task = spec.tasks.task(0, "train")
    moves = [
        Action(value={"rotation_angle_degrees": angle, "forward_meters": metres})
        for angle, metres in ((30.0, 0.2), (-60.0, 0.1), (15.0, 0.0))
    ]
    environment = spec.make()
    seen = [environment.reset(task)]
    transitions = [environment.step(move) for move in moves]
    seen += [transition.observation for transition in transitions]
    episode = make_episode("a", "b", "c", episode_id="walk")
    turns = tuple(
        msgspec.structs.replace(turn, observation=seen[t], action=moves[t], metrics=transitions[t].metrics)
        for t, turn in enumerate(episode.turns)
    )
    episode = msgspec.structs.replace(episode, turns=turns, task=task)
    snapshot = go_back(spec.make(), episode, 2)
    assert snapshot is not None
    branch = BranchedEnvironments(spec, episode, 2, snapshot).make()
    assert branch.reset(task).messages == seen[0].messages
    for move, expected in zip(moves, seen[1:], strict=True):
        found = branch.step(move).observation
        assert found.messages == expected.messages
        assert found.state_key == expected.state_key
        assert found.info == expected.info
