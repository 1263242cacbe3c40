"""`turnwise models`: build the tiny models that ship with turnwise."""

from __future__ import annotations

import asyncio
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
    imitate: Annotated[
        bool,
        typer.Option(
            "--imitate",
            help="With --vision: also teach it to copy the expert, under twenty minutes on two cores.",
        ),
    ] = False,
    lessons: Annotated[
        int | None, typer.Option(min=1, help="With --imitate: how many expert episodes; fewer are quicker.")
    ] = None,
    num_tasks: Annotated[
        int,
        typer.Option(min=1, help="With --imitate: held-out tasks that the model card's figures are from."),
    ] = 200,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Build a tiny model from nothing: tokenizer, network, format of the actions."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder")
    if imitate and not vision:
        raise ConfigError("--imitate needs --vision: the text model copies random moves, never good ones")
    if lessons is not None and not imitate:
        raise ConfigError(f"--lessons {lessons} is only read with --imitate; add it or remove --lessons")
    if imitate:
        _imitate(out, seed, lessons, num_tasks)
    elif vision:
        from turnwise.models.tiny_vision import make_tiny_vision

        make_tiny_vision(out, seed=seed)
    else:
        from turnwise.models.tiny_text import make_tiny_text

        make_tiny_text(out, seed=seed)
    console.print(f"wrote {out}; use it with model.path={out}")


def _imitate(out: Path, seed: int, lessons: int | None, num_tasks: int) -> None:
    from turnwise.cli.progress import WorkProgress
    from turnwise.imitate import ImitationOptions, make_warm_start, measure, write_model_card

    options = ImitationOptions(seed=seed)
    if lessons is not None:
        options = ImitationOptions(seed=seed, num_lessons=lessons)
    with WorkProgress() as watch:
        report = make_warm_start(out, options, watch)
    console.print(f"measuring it on {num_tasks} held-out tasks")
    greedy, sampled = (asyncio.run(measure(str(out), num_tasks, heat)) for heat in (0.0, 1.0))
    write_model_card(out, options, report, greedy, sampled)
    low, high = greedy.intervals["success"]
    console.print(
        f"success {greedy.success:.2f} ({low:.2f} – {high:.2f}), {report.seconds:.0f} s of teaching"
    )
