"""`turnwise models`: build the tiny models that ship with turnwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.output import console
from turnwise.errors import ConfigError


def register(app: typer.Typer) -> None:
    models = typer.Typer(help="Build the tiny models that ship with turnwise.", no_args_is_help=True)
    models.command("make-tiny")(make_tiny)
    app.add_typer(models, name="models")


def make_tiny(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    vision: Annotated[
        bool, typer.Option("--vision", help="The vision-language model instead of the text model.")
    ] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Build a tiny model from nothing: tokenizer, network, format of the actions."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder")
    if vision:
        from turnwise.models.tiny_vision import make_tiny_vision

        make_tiny_vision(out, seed=seed)
    else:
        from turnwise.models.tiny_text import make_tiny_text

        make_tiny_text(out, seed=seed)
    console.print(f"wrote {out}; use it with model.path={out}")
