"""`turnwise score` and `turnwise lint-reward` on stored runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.reward_episodes import make_episode
from typer.testing import CliRunner

from turnwise import get_debug_config
from turnwise.cli import app
from turnwise.rescore import _covered
from turnwise.rewards.sandbox import probe
from turnwise.store.run import Run, read_scores
from turnwise.types import Episode, Failure

REWARD = """
from turnwise import EvaluateResult, StepOutput, reward_function

@reward_function
def words(messages, ground_truth, scale=1.0):
    if ground_truth == "broken":
        raise LookupError("no dictionary")
    answers = [m for m in messages if "step_index" in m]
    steps = [StepOutput(step_index=m["step_index"], base_reward=len(m["content"].split())) for m in answers]
    return EvaluateResult(score=scale * sum(s.base_reward for s in steps), step_outputs=steps)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of four episodes: two fine, one that the reward cannot score, one that failed."""
    run = Run.create(tmp_path / "run", get_debug_config())
    episodes = [
        make_episode("one two", "three", episode_id="e0", ground_truth="x"),
        make_episode("four", episode_id="e1", ground_truth="x"),
        make_episode("five", episode_id="e2", ground_truth="broken", group_id="g1"),
        make_episode("six", episode_id="e3", failure=Failure(stage="step", error="boom"), group_id="g1"),
    ]
    run.record_episodes("first", [_timed(episode, start) for start, episode in enumerate(episodes)])
    run.close()
    (tmp_path / "words.py").write_text(REWARD)
    return tmp_path / "run"


def _timed(episode: Episode, start: int) -> Episode:
    return msgspec.structs.replace(episode, started_at=float(start), seconds=600.0)


def needs_sandbox() -> None:
    if not any(probe.probe(tier).holds for tier in probe.TIERS):
        pytest.skip("no sandbox tier holds on this machine")


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "scores" not in path.parts
    }


def test_a_run_is_scored_again_and_its_episodes_stay_as_they_are(folder: Path) -> None:
    needs_sandbox()
    before = digest(folder)
    shown = CliRunner().invoke(
        app,
        ["score", str(folder), "--reward", f"{folder.parent}/words.py:words", "--param", "scale=2", "--json"],
    )
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout.splitlines()[-1])
    assert (result["num_episodes"], result["num_scored"], result["mean"]) == (4, 2, 4.0)
    assert result["lived_seconds"] == 603.0
    assert result["speedup"] > 10
    assert result["sandbox"] in probe.TIERS
    assert digest(folder) == before
    scores = read_scores(folder, "words")
    assert [scores[f"e{i}"].score for i in range(4)] == [6.0, 2.0, None, None]
    assert scores["e0"].step_rewards == (2.0, 1.0)
    assert "LookupError: no dictionary" in str(scores["e2"].error)
    assert scores["e3"].error == "the episode failed in step: boom"


def test_built_in_rewards_score_under_a_chosen_name(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["score", str(folder), "--reward", "text", "--name", "style"])
    assert shown.exit_code == 0, shown.output
    assert set(read_scores(folder, "style")) == {"e0", "e1", "e2", "e3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "txet"], "did you mean text?"),
        (["--reward", "missing.py:f"], "reward file missing.py cannot be read"),
        (["--reward", "text", "--param", "colour=1"], "takes no parameter 'colour'"),
        (["--reward", "text", "--param", "colour"], "is not of the form key=value"),
        (["--reward", "text", "--sandbox", "wool"], "sandbox is 'wool'"),
        (["--reward", "no_such_package.rewards:f"], "there is no module 'no_such_package'"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, arguments: list[str], message: str) -> None:
    shown = CliRunner().invoke(app, ["score", str(folder), *arguments])
    assert shown.exit_code != 0
    assert message in str(shown.exception)


def test_mistakes_end_with_exit_code_2(tmp_path: Path) -> None:
    code = "from turnwise.cli import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "lint-reward", "missing.py:f"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
    )
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: reward file missing.py cannot be read")
    assert shown.stderr.count("\n") == 1


def test_a_user_reward_is_linted_in_the_sandbox(folder: Path) -> None:
    needs_sandbox()
    shown = CliRunner().invoke(
        app, ["lint-reward", f"{folder.parent}/words.py:words", "--ground-truth", "x", "--json"]
    )
    assert shown.exit_code == 1, shown.output
    report = json.loads(shown.stdout.splitlines()[-1])
    assert report["sandbox"] in probe.TIERS
    assert {"padded", "repeated"} <= {f["mutation"] for f in report["findings"] if f["kind"] == "exploit"}


def test_a_reward_is_linted_with_the_episodes_of_a_run(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["lint-reward", "exact", "--run", str(folder), "--json"])
    report = json.loads(shown.stdout.splitlines()[-1])
    assert report["num_episodes"] == 3
    assert [f["kind"] for f in report["findings"]] == ["constant"]


def test_time_lived_counts_overlaps_once() -> None:
    assert _covered([(0, 2), (1, 3), (5, 6)]) == 4.0
    assert _covered([]) == 0.0
