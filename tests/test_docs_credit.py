"""The Python blocks of docs/credit.md run, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "credit.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M)


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["gigpo", "rloo", "worker"])
def test_a_block_prints_what_its_comments_say(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "docs/credit.md", "exec"), {"__name__": "docs"})
    shown = capsys.readouterr().out
    promised = re.findall(r"^print\(.*\)\s+# (\[.*?\])", block, flags=re.M)
    assert [line for line in promised if line not in shown] == []
    assert shown
