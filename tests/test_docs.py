"""Every snippet of the documentation runs.

A block marked ```python run``` is executed; the blocks of one page run in order and share their names. A block marked
```python file=NAME``` is written to that file first. Both happen in an empty folder.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT).as_posix() for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))
)
BLOCK = re.compile(
    r"^```python (?P<kind>run|file=(?P<name>[\w./-]+))\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(text: str) -> list[tuple[str | None, str, int]]:
    """(file name or None, code, line number) of each marked block."""
    return [
        (found["name"], found["code"], text.count("\n", 0, found.start("code")))
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
    for file, code, line in blocks(text):
        if file is not None:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(code, encoding="utf-8")
        else:
            # Blank lines in front make a traceback point to the line of the page.
            exec(compile("\n" * line + code, page, "exec"), names)


def needs_sandbox() -> None:
    from turnwise.rewards.sandbox import probe

    if not any(probe.probe(tier).holds for tier in probe.TIERS):
        pytest.skip("this page runs user rewards, and no sandbox tier holds on this machine")


def test_marked_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python run\nx = 1\n```\n```python\nno\n```\n```python file=b.py\ny = 2\n```\n"
    assert blocks(text) == [(None, "x = 1\n", 2), ("b.py", "y = 2\n", 8)]
