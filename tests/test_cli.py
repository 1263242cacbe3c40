"""The command line: one sentence and exit code 2 for mistakes, one JSON object as the last line for machines."""

import json
import subprocess
import sys
import time
from pathlib import Path

import PIL.Image
import pytest
from typer.testing import CliRunner

from turnwise.cli import app, main


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "turnwise", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def mistake(capsys, monkeypatch, *arguments):
    """Run in this process; returns what stderr said. Must exit with code 2."""
    monkeypatch.setattr(sys, "argv", ["turnwise", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_init_prints_each_template():
    for template in ("debug", "small", "navigation", "adapter", "full"):
        shown = CliRunner().invoke(app, ["init", "--template", template, "--stdout"])
        assert shown.exit_code == 0
        assert "training:" in shown.stdout


def test_mistakes_are_one_sentence_and_exit_code_2(capsys, monkeypatch, tmp_path):
    config = tmp_path / "c.yaml"
    assert CliRunner().invoke(app, ["init", "--template", "debug", "--out", str(config)]).exit_code == 0
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (
            ["init", "--template", "huge"],
            "template 'huge' is unknown; choose one of debug, small, navigation",
        ),
        (["init", "--template", "debug", "--out", config], "exists"),
        (["train", "--config", tmp_path / "none.yaml"], "does not exist; `turnwise init"),
        (["train"], "either --config FILE to start a run or --resume RUN"),
        (["train", "--config", config, "training.num_step=3"], "did you mean num_steps"),
        (["train", "--config", config, "rollout.tasks_per_step=0"], "rollout.tasks_per_step is 0"),
        (["train", "--config", config, f"model.path={tmp_path / 'empty'}"], "has no usable config.json"),
        (["train", "--config", config, "model.path=tinny"], "model folder 'tinny' does not exist"),
        (["train", "--config", config, "environment.name=frozenpond"], "known: frozenlake"),
        (["demo", "chess"], "demo 'chess' is unknown; choose one of navigation, frozenlake"),
        (["demo", "--estimator", "gae"], "--estimator 'gae' is not one of the demo's; choose rloo or gigpo"),
        (["models", "make-tiny", "--imitate", "--out", tmp_path / "m"], "--imitate needs --vision"),
        (
            ["models", "make-tiny", "--vision", "--lessons", 3, "--out", tmp_path / "m"],
            "only read with --imitate",
        ),
    ):
        error = mistake(capsys, monkeypatch, *arguments)
        assert words in error
        assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "empty"]


def test_a_model_folder_without_tokenizer_is_named(capsys, monkeypatch, tmp_path, tiny):
    config = tmp_path / "c.yaml"
    CliRunner().invoke(app, ["init", "--template", "debug", "--out", str(config)])
    tiny.network.save_pretrained(tmp_path / "model")
    error = mistake(capsys, monkeypatch, "train", "--config", config, f"model.path={tmp_path / 'model'}")
    assert "has no tokenizer; copy tokenizer.json" in error


@pytest.mark.slow
def test_the_navigation_demo_measures_trains_and_films(tmp_path):
    shown = call(
        "demo", "--steps", 1, "--num-tasks", 4, "--estimator", "gigpo", "--out", tmp_path / "demo", "--json"
    )
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout.splitlines()[-1])
    for moment in ("before", "after"):
        assert result[moment]["num_episodes"] == 4
        assert 0 <= result[moment]["metrics"]["spl"] <= result[moment]["success"] <= 1
    assert [Path(picture).name for picture in result["pictures"]] == ["curves.png", "before-after.gif"]
    with PIL.Image.open(result["pictures"][1]) as film:
        assert film.n_frames >= 3
    verified = call("verify", tmp_path / "demo", "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout.splitlines()[-1])["max_logprob_gap"] < 1e-4


@pytest.mark.slow
def test_demo_train_eval_and_resume_work_from_the_shell(tmp_path):
    demo = call("demo", "frozenlake", "--steps", 1, "--num-tasks", 8, "--out", tmp_path / "demo", "--json")
    assert demo.returncode == 0, demo.stderr
    result = json.loads(demo.stdout.splitlines()[-1])
    assert 0 <= result["before"]["success"] <= 1
    assert 0 <= result["after"]["success"] <= 1
    assert result["run"] == str(tmp_path / "demo")
    assert (tmp_path / "demo" / "curves.png").is_file()
    config = tmp_path / "c.yaml"
    call("init", "--template", "debug", "--out", config)
    trained = call("train", "--config", config, "--out", tmp_path / "run", "--json", "training.num_steps=1")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout.splitlines()[-1])["evaluation"]["num_episodes"] == 4
    evaluated = call("eval", tmp_path / "run", "--num-tasks", 3, "--json")
    assert json.loads(evaluated.stdout.splitlines()[-1])["num_episodes"] == 3
    resumed = call("train", "--resume", tmp_path / "run", "--json")
    assert resumed.returncode == 0, resumed.stderr


def test_help_answers_fast_enough_to_feel_instant():
    """The bar is 0.5 s on an idle machine; processor time does not depend on who else is busy."""
    before = time.process_time()
    shown = call("--help")
    assert shown.returncode == 0
    assert "train" in shown.stdout
    assert time.process_time() - before < 1.0
