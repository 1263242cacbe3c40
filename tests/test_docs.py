"""Every snippet of the documentation runs.

A block marked ```python run``` is executed; the blocks of one page run in order and share their names. A block marked
```python file=NAME``` is written to that file first. Each line of a block marked ```sh run``` is a command that must succeed.
All of it happens in an empty folder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT).as_posix() for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))
)
BLOCK = re.compile(
    r"^```(?P<language>python|yaml|sh) (?:run|file=(?P<name>[\w./-]+))\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    file: str | None
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """The marked blocks of a page, in order."""
    return [
        Block(found["language"], found["name"], found["code"], text.count("\n", 0, found.start("code")))
        for found in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    if "sandbox" in text and "file=" in text:
        needs_sandbox()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "sh":
            run_commands(block, page)
        else:
            # Blank lines in front make a traceback point to the line of the page.
            exec(compile("\n" * block.line + block.code, page, "exec"), names)


def run_commands(block: Block, page: str) -> None:
    """Each command in turn, `turnwise` and `python` being those of this environment."""
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for command in block.code.replace("\\\n", " ").splitlines():
        shown = subprocess.run(
            shlex.split(command, comments=True) or ["true"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, (
            f"{page}, line {block.line + 1}: {command}\n{shown.stdout}\n{shown.stderr}"
        )


def needs_sandbox() -> None:
    from turnwise.rewards.sandbox import probe

    if not any(probe.probe(tier).holds for tier in probe.TIERS):
        pytest.skip("this page runs user rewards, and no sandbox tier holds on this machine")


def test_marked_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python run\nx = 1\n```\n```python\nno\n```\n```python file=b.py\ny = 2\n```\n```sh run\ntrue\n```\n"
    assert blocks(text) == [
        Block("python", None, "x = 1\n", 2),
        Block("python", "b.py", "y = 2\n", 8),
        Block("sh", None, "true\n", 11),
    ]
