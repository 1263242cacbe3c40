"""How commands speak: text for people, one JSON object as the last line of stdout for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console

console = Console(stderr=True)
"""Progress and remarks go to stderr, results to stdout."""


def print_json(result: Mapping[str, Any]) -> None:
    """Print `result` as one line; NaN and infinities are bugs, so they raise."""
    print(json.dumps(result, allow_nan=False, ensure_ascii=False), flush=True)
