"""The `turnwise` command: each module here parses one subject's arguments and calls one function.

Heavy packages are imported inside the commands, so that `turnwise --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys

import typer

from turnwise.errors import TurnwiseError

app = typer.Typer(
    name="turnwise",
    help="Multi-turn reinforcement learning of language and vision-language agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# One module per subject; each has `register(app)`.
_SUBJECTS: tuple[str, ...] = (
    "demo",
    "training",
    "models",
    "verify",
    "scenes",
    "rewards",
    "credit",
    "branch",
)

for _subject in _SUBJECTS:
    importlib.import_module(f"turnwise.cli.{_subject}").register(app)


def main() -> None:
    """Run the command; a user's mistake is one sentence and exit code 2, a failure exit code 1."""
    try:
        app(standalone_mode=True)
    except TurnwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None
