"""`turnwise credit` and `turnwise view` on a stored run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.test_credit import gather, judge, play
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.config import Config
from turnwise.credit_report import read_advantages
from turnwise.rewards.steps import steps_of_episode, write_steps
from turnwise.store.run import Run
from turnwise.types import Action, Episode, Turn


def pay(episode: Episode, rewards: list[float]) -> Episode:
    def repay(turn: Turn, reward: float) -> Turn:
        action = Action(value={"move": "up"}, text='{"move": "up"}')
        return msgspec.structs.replace(turn, reward=reward, action=action, text='Up, I think. {"move": "up"}')

    turns = tuple(repay(turn, reward) for turn, reward in zip(episode.turns, rewards, strict=True))
    return msgspec.structs.replace(episode, turns=turns)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups: in the first, a wins and b loses from the same start, c failed; in the second nobody wins."""
    episodes = [
        pay(play("s0-g0-a", ["s", "u"], group="s0-g0"), [0.0, 1.0]),
        pay(play("s0-g0-b", ["s"], group="s0-g0"), [0.0]),
        pay(play("s0-g0-c", ["s"], group="s0-g0", failed=True), [0.0]),
        pay(play("s0-g1-a", ["s"], group="s0-g1"), [0.0]),
        pay(play("s0-g1-b", ["v"], group="s0-g1"), [0.0]),
    ]
    credit = {"estimator": "gigpo", "gamma": 0.5, "step_norm": "mean"}
    folder = tmp_path / "run"
    stored = Run.create(folder, Config.from_dict({"credit": credit}))
    stored.record_groups("step-0", gather(*episodes))
    stored.close()
    return folder


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


def last_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def test_credit_recomputes_explains_and_stores(run: Path) -> None:
    found = last_json(call("credit", run, "--json"))
    turns = {(turn["episode_id"], turn["turn_index"]): turn for turn in found["turns"]["gigpo"]}
    first = turns["s0-g0-a", 0]
    assert (first["step_return"], first["episode_advantage"], first["step_advantage"]) == (0.5, 0.5, 0.25)
    assert first["advantage"] == 0.75
    assert first["group_id"] == "s0-g0"
    assert first["anchor_size"] == 2
    assert turns["s0-g0-c", 0]["advantage"] is None
    assert found["groups_without_signal"]["gigpo"] == ["s0-g1"]
    assert found["estimators"]["gigpo"]["num_groups_without_signal"] == 1
    assert found["estimators"]["gigpo"]["num_left_out"] == 1
    # Of the five turns that take part, only the two in s of group 0 share a state.
    assert found["estimators"]["gigpo"]["singleton_anchor_share"] == pytest.approx(3 / 5)
    stored = read_advantages(run, "gigpo")
    assert stored["s0-g0-a"][0].advantage == 0.75
    size = (run / "advantages" / "gigpo.jsonl").stat().st_size
    call("credit", run)
    assert (run / "advantages" / "gigpo.jsonl").stat().st_size == size


def test_overrides_reach_the_estimator(run: Path) -> None:
    found = last_json(call("credit", run, "gamma=1.0", "credit.omega=2", "--json", "--no-save"))
    assert found["turns"]["gigpo"][0]["advantage"] == 0.5 + 2 * 0.5
    assert not (run / "advantages").exists()


def test_compare_puts_estimators_side_by_side(run: Path) -> None:
    text = call("credit", run, "--compare", "rloo,grpo,gigpo,gae", "--json")
    found = last_json(text)
    assert list(found["estimators"]) == ["rloo", "grpo", "gigpo", "gae"]
    assert found["turns"]["rloo"][0]["advantage"] == 1.0
    assert set(found["opposite_share"]) >= {"rloo/gigpo", "gigpo/gae"}
    spreads = [item["spread"] for item in found["disagreements"]]
    assert spreads == sorted(spreads, reverse=True)
    assert set(found["disagreements"][0]["advantages"]) == {"rloo", "grpo", "gigpo", "gae"}
    assert "where the estimators disagree most" in text
    assert "1 of 2 groups without signal" in text
    assert not (run / "advantages").exists()


def test_stored_scores_win_over_the_environment(run: Path) -> None:
    stored = Run.open(run)
    stored.record_scores([judge("s0-g0-a", 0.0), judge("s0-g0-b", 3.0)])
    stored.close()
    found = last_json(call("credit", run, "--estimator", "rloo", "--json"))
    assert found["reward"] == "test"
    assert [turn["advantage"] for turn in found["turns"]["rloo"][:3]] == [-3.0, -3.0, 3.0]
    assert found["turns"]["rloo"][4]["advantage"] is None


@pytest.mark.parametrize(
    "arguments", [("--estimator", "giggo"), ("gamma",), ("lam=0.5",), ("--reward", "nobody")]
)
def test_mistakes_are_errors(run: Path, arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["credit", str(run), *arguments]).exit_code != 0


def test_view_lists_episodes(run: Path) -> None:
    text = call("view", run)
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "s0-g0-a", "s0-g0-b", "s0-g0-c", "s0-g1-a", "s0-g1-b",
    ]  # fmt: skip
    assert last_json(call("view", run, "--json", "--limit", "1"))["num_episodes"] == 5


def test_view_prints_an_episode_turn_by_turn(run: Path) -> None:
    call("credit", run)
    text = call("view", run, "s0-g0-a")
    assert "turn 0   reward +0.000   return +0.500   A_E +0.500   A_S +0.250" in text
    assert "advantage +0.750" in text
    assert "sees   user: question 0" in text
    assert "thinks Up, I think." in text
    assert 'does   {"move": "up"}' in text
    assert "2 of 3 sampled tokens are the action" in text
    found = last_json(call("view", run, "s0-g0-a", "--json"))
    assert found["steps"][1]["advantage"] == 0.5
    assert found["steps"][0]["action"] == {"move": "up"}
    assert "failed in step: boom" in call("view", run, "s0-g0-c")


def test_view_reads_a_saved_steps_file(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_steps(path, steps_of_episode(pay(play("a", ["s", "u"]), [0.0, 1.0])))
    text = call("view", path)
    assert "turn 1   reward +1.000" in text
    assert "thinks Up, I think." in text
    assert len(last_json(call("view", path, "--json"))["steps"]) == 2
    path.write_text("{}\n")
    assert CliRunner().invoke(app, ["view", str(path)]).exit_code != 0
