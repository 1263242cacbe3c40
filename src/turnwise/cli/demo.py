"""`turnwise demo`: see an agent learn within minutes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.demo import DemoResult


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    task: Annotated[
        str,
        typer.Argument(
            help="navigation (find furniture by camera), frozenlake (text), smollm2 (text, adapter)."
        ),
    ] = "navigation",
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/demo-<time> by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Model updates.")] = None,
    num_tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out tasks to measure on, before and after; 200 by default."),
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="Who gets the credit: rloo or gigpo; the demo's own by default.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Train a tiny model on a CPU and show its success before and after, on tasks it never trained on."""
    if estimator not in (None, "rloo", "gigpo"):
        raise ConfigError(f"--estimator {estimator!r} is not one of the demo's; choose rloo or gigpo")
    from turnwise.cli.progress import TrainingProgress
    from turnwise.demo import DEMOS, demo_config, run_demo

    if task not in DEMOS:
        raise ConfigError(f"demo {task!r} is unknown; choose one of {', '.join(DEMOS)}")
    config = demo_config(task, num_steps=steps, num_tasks=num_tasks, seed=seed, estimator=estimator)
    folder = out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    console.print(
        f"The model {config.model.path} learns {config.environment.name} by reinforcement ({config.credit.estimator}, seed {seed}): first "
        f"{config.evaluation.num_tasks} held-out tasks, then {config.training.num_steps} updates, then the same tasks again. "
        f"The run goes to {folder}"
    )
    with TrainingProgress(config.training.num_steps) as watch:
        result = asyncio.run(run_demo(config, folder, watch))
    print_table(result)
    if as_json:
        print_json(
            {
                "before": {"success": result.before.success, **result.before.figures()},
                "after": {"success": result.after.success, **result.after.figures()},
                "seconds": round(result.seconds, 1),
                "run": result.run,
                "pictures": result.pictures,
            }
        )


def print_table(result: DemoResult) -> None:
    from rich.table import Table

    has_spl = "spl" in result.before.metrics
    table = Table(title=f"{result.before.num_episodes} tasks never trained on")
    for heading in ("", "success", "95 % interval", *(["SPL"] if has_spl else []), "reward", "turns"):
        table.add_column(heading, justify="right")
    for name, evaluation in (("before", result.before), ("after", result.after)):
        # Where every episode failed there is no figure.
        bounds = evaluation.intervals.get("success")
        table.add_row(
            name,
            _figure(evaluation.success),
            f"{bounds[0]:.2f} – {bounds[1]:.2f}" if bounds else "–",
            *([_figure(evaluation.metrics.get("spl"))] if has_spl else []),
            _figure(evaluation.reward),
            f"{evaluation.metrics['num_turns']:.1f}",
        )
    console.print(table)
    console.print(f"{result.seconds:.0f} s. Pictures: {'   '.join(result.pictures)}")
    console.print(
        f"Look further: turnwise view {result.run}   turnwise verify {result.run}   turnwise credit {result.run}"
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
