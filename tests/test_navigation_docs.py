import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turnwise.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "navigation.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_on_the_page_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, str(PAGE), "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.startswith("1.0 ")


def test_the_commands_on_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        line for block in blocks("bash") for line in block.splitlines() if line.startswith("turnwise ")
    ]
    assert len(commands) == 3
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "map.png").is_file()


def test_the_settings_on_the_page_are_known() -> None:
    import yaml

    from turnwise.config import Config
    from turnwise.environments import build_environment

    for block in blocks("yaml"):
        config = Config.from_dict(yaml.safe_load(block))
        assert build_environment(config.environment).tasks.num_tasks("train") is None


def test_the_pictures_on_the_page_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    assert all((PAGE.parent / picture).is_file() for picture in pictures)
