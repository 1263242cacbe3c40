"""The snippets of docs/tokens.md run, one after the other."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "tokens.md"


def test_the_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
