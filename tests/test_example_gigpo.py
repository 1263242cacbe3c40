"""examples/gigpo_ppo_training.py goes the whole way and really moves the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_example_runs_and_shows_each_stage() -> None:
    command = [
        sys.executable,
        "examples/gigpo_ppo_training.py",
        "--iterations",
        "2",
        "--eval-tasks",
        "4",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for stage in ("rollout: StepData", "sandboxed reward", "GiGPO", "PPO update", "A_E=", "G_k="):
        assert stage in shown.stdout
    result = json.loads(shown.stdout.strip().splitlines()[-1])
    assert len(result["iterations"]) == 2
    assert all(figures["grad_norm"] > 0 for figures in result["iterations"])
